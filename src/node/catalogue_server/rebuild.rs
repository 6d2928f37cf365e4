//! The rebuild of a lost catalogue from what the nodes hold (docs/semantics.md, 8).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::future::join_all;

use super::cluster_inventory::{ClusterInventory, InventoryReader};
use super::error::CatalogueServerError;
use super::membership::Membership;
use crate::catalogue::database_format::DbWriter;
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::record_access::{
    ArchiveRequest, NODES, RETENTION_PAUSED, archive_request_key, checkpoint_key, orphan_key,
    ring_change_key, shard_root_key, shard_state_key,
};
use crate::catalogue::save_evidence::Committed;
use crate::code::{Code, CodeId, table};
use crate::format::records::{
    Checkpoint, CommitMark, Home, LeaveState, Node as NodeRecord, Record, RingChanges, StripeState,
};
use crate::id::{DbId, Epoch, Generation, Job, LeaseId, NodeId, PeerName, Step, StripeId};
use crate::kind::ErrorKind;
use crate::node::context::NodeContext;
use crate::node::quorum::{
    Quorum, is_on_latest_list, keep_nodes_with_seen_epoch, majority, tolerated_losses,
};
use crate::node::standings::fetch_standings;
use crate::stage::{TracePoint, trace_point};
use crate::store::Kv;
use crate::topology::Directory;
use crate::wire::calls::{
    ArchiveOptions, ClaimEpoch, PlanChoice, PutMark, RebuildAnswer, RebuildCatalogue,
    StandingAnswer,
};
use crate::wire::order::Codec;
use crate::wire::{NodeAddress, RemoteError};

/// Maximum number of incomplete steps, and maximum number of damaged stripes, that an answer lists.
const MAX_LISTED: usize = 1000;

/// A rebuild under way, after its epoch was claimed.
struct Rebuild<'a> {
    epoch: Epoch,
    /// The storage nodes that accepted the claim.
    sources: &'a [NodeRecord],
    /// The nodes of the new catalogue.
    members: &'a [NodeRecord],
    /// The ids of the storage nodes among `members`.
    listed: BTreeSet<NodeId>,
    /// The merged ring changes of all nodes that were read.
    changes: &'a RingChanges,
    accept_loss: bool,
}

/// The inventory, the standings and the ring changes of the nodes that a rebuild reached.
struct ReadInventory {
    inventory: ClusterInventory,
    standings: Vec<(NodeRecord, StandingAnswer)>,
    changes: RingChanges,
}

/// The service that rebuilds a lost catalogue. It also answers claims of an epoch, and creates and
/// opens catalogue databases for rebuilds and moves.
pub(in crate::node) struct CatalogueRebuild {
    context: Arc<NodeContext>,
    membership: Arc<Membership>,
    inventory_reader: Arc<InventoryReader>,
    /// Held while a catalogue is rebuilt or moved to this node.
    change_lock: tokio::sync::Mutex<()>,
}

impl CatalogueRebuild {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        membership: Arc<Membership>,
        inventory_reader: Arc<InventoryReader>,
    ) -> Self {
        Self { context, membership, inventory_reader, change_lock: tokio::sync::Mutex::default() }
    }

    /// Locks out rebuilds and moves of the catalogue on this node. Returns the guard, or `None` if
    /// a rebuild or a move is under way.
    pub(in crate::node) fn try_lock_changes(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        self.change_lock.try_lock().ok()
    }

    pub(in crate::node) async fn claim_epoch(&self, call: ClaimEpoch) -> Result<(), RemoteError> {
        trace_point(TracePoint::Claim, call.epoch);
        self.store_claim_and_server(call).await
    }

    async fn store_claim_and_server(&self, call: ClaimEpoch) -> Result<(), RemoteError> {
        let home = Home { name: call.home.name.clone(), address: call.home.host_port.clone() };
        self.context
            .run_on_store(move |store| store.claim_epoch(call.epoch, call.map, home))
            .await?;
        self.context.remote.set_expected_epoch(call.epoch, Some(call.map));
        self.context.remote.add_fallback_nodes([call.home.clone()]);
        self.context.remote.set_server(call.epoch, call.home);
        // Readers no longer assume that no catalogue answers, and ask the new server.
        self.context.catalogue_contact.record_answer();
        Ok(())
    }

    /// Rebuilds the catalogue, in a task of its own: an operator who disconnects must not leave the
    /// cluster between two catalogues. Returns the contents of the new catalogue, in numbers.
    pub(in crate::node) async fn rebuild_catalogue(
        self: &Arc<Self>,
        call: RebuildCatalogue,
    ) -> Result<RebuildAnswer, RemoteError> {
        let service = self.clone();
        let work = self.context.tasks.spawn(async move {
            let Some(_alone) = service.try_lock_changes() else {
                return Err(CatalogueServerError::RebuildUnderWay.into());
            };
            service.rebuild_now(call.accept_loss).await
        });
        work.await.map_err(|_| CatalogueServerError::StoppingDuringRebuild)?
    }

    async fn rebuild_now(&self, accept_loss: bool) -> Result<RebuildAnswer, RemoteError> {
        self.ensure_no_catalogue_answers().await?;
        let (members, heard) = self.membership.discover_members().await?;
        let latest = heard.iter().map(|(_, hello)| hello.epoch).max().unwrap_or_default();
        let epoch = latest.max(self.context.store.highest_seen_epoch()).next();
        let generation = Generation { epoch, counter: 0 };
        let reached = keep_nodes_with_seen_epoch(heard);
        ensure_storage_node_known(&members)?;
        // The inventory is checked once before an epoch is claimed. If steps cannot be brought
        // back, the rebuild fails here, and the present epoch goes on.
        drop(self.read_inventory(&members, &reached, generation, accept_loss).await?);

        // The database is created before the claim: if there is no room for it, no epoch is
        // claimed.
        let empty_db = self.set_aside_and_create_db().await?;
        let db_id = DbId(self.context.entropy.id());
        let claimed = self.claim_epoch_on_nodes(&reached, epoch, db_id).await?;
        tracing::warn!(%epoch, nodes = claimed.len(), "rebuilding the catalogue: this many nodes have recorded the claim of the epoch");
        // The inventory is read again, now that the nodes accept nothing of an older epoch any
        // more.
        trace_point(TracePoint::Census, epoch);
        let sources = storage_nodes(&claimed);
        let read = self.read_inventory(&members, &claimed, generation, accept_loss).await?;
        let ReadInventory { inventory, standings, changes } = read;
        // A node that was taken off the list is left out here. It registers anew, and catches up.
        let is_listed =
            |node: &&NodeRecord| !node.storage || is_on_latest_list(&standings, &node.name);
        let members: Vec<NodeRecord> = members.iter().filter(is_listed).cloned().collect();
        let mut answer = RebuildAnswer {
            epoch,
            home: self.context.settings.name.to_string(),
            reached: sources.iter().map(|node| node.name.clone()).collect(),
            missing: unreached_storage_nodes(&members, &claimed)
                .map(|node| node.name.clone())
                .collect(),
            orphans: u32::try_from(inventory.count_to_remove()).unwrap_or(u32::MAX),
            incomplete: inventory.describe_incomplete_steps().collect(),
            ..RebuildAnswer::default()
        };
        let listed = storage_nodes(&members).iter().map(|node| NodeId::of(&node.name)).collect();
        let (sources, members) = (&sources[..], &members[..]);
        let rebuild = Rebuild { epoch, sources, members, listed, changes: &changes, accept_loss };
        let writer = DbWriter::new(empty_db, epoch);
        let writer =
            self.write_database_and_missing_marks(&rebuild, writer, inventory, &mut answer).await?;
        trace_point(TracePoint::Map, epoch);
        let database = writer.finish(epoch, db_id)?;
        let local = self.open_local_catalogue(database, epoch).await?;
        let is_on_list = |node: &&NodeRecord| rebuild.listed.contains(&NodeId::of(&node.name));
        let claimed_count = rebuild.sources.iter().filter(is_on_list).count();
        // If no majority has recorded the claim, the other nodes may still obey another catalogue,
        // which accepts changes.
        local.set_read_only(claimed_count < majority(rebuild.listed.len()));
        self.context.catalogue_server.start_serving(local);
        tracing::warn!(%epoch, steps = answer.steps, "the rebuilt catalogue is served");
        Ok(answer)
    }

    /// Reads what the `reached` nodes have and, unless `accept_loss` is set, checks that it
    /// suffices.
    ///
    /// # Errors
    /// If a node cannot be read to the end. Without `accept_loss`, also as
    /// [`check_inventory_suffices`](Self::check_inventory_suffices).
    async fn read_inventory(
        &self,
        members: &[NodeRecord],
        reached: &[NodeRecord],
        generation: Generation,
        accept_loss: bool,
    ) -> Result<ReadInventory, RemoteError> {
        let sources = storage_nodes(reached);
        let inventory =
            self.inventory_reader.read_and_judge_inventories(&sources, generation).await?;
        let standings = fetch_standings(&self.context, &sources).await;
        let (changes, failed) = self.membership.collect_ring_changes(reached).await;
        let changes = mark_removed_nodes_left(changes, &standings, reached);
        let read = ReadInventory { inventory, standings, changes };
        match accept_loss {
            true => Ok(read),
            false => {
                // More than half of the nodes have each ring change. A node whose ring changes
                // could not be read does not count as reached.
                let mut reached = reached.to_vec();
                reached.retain(|node| !failed.contains(&node.name));
                self.check_inventory_suffices(&read, members, &reached).map(|()| read)
            }
        }
    }

    /// Returns an error if a catalogue server answers, because then nothing is to be rebuilt.
    async fn ensure_no_catalogue_answers(&self) -> Result<(), RemoteError> {
        if self.context.catalogue().list_nodes().await.is_err() {
            return Ok(());
        }
        // The catalogue server has just answered, but may not have told this node its newest epoch
        // yet.
        let server = self
            .context
            .catalogue_server_address()
            .or_else(|| self.context.remote.known_server(Epoch::default()));
        let refusal = match server {
            Some(server) => CatalogueServerError::CatalogueServed { server: server.name },
            None => CatalogueServerError::CatalogueServedElsewhere,
        };
        Err(refusal.into())
    }

    /// Writes the entries of the new database: nodes, ring changes, steps with their shards,
    /// pending removals and orphans. Before a step is written, its missing commit marks are written
    /// on the nodes. Counts the steps, shards and damaged stripes in `answer`. Returns the writer.
    async fn write_database_and_missing_marks(
        &self,
        rebuild: &Rebuild<'_>,
        mut writer: DbWriter,
        inventory: ClusterInventory,
        answer: &mut RebuildAnswer,
    ) -> Result<DbWriter, RemoteError> {
        // The labels that protect steps from retention are lost.
        writer.put_entry(RETENTION_PAUSED, &[])?;
        for node in rebuild.members {
            writer.put_entry(&format!("{NODES}{}", node.name), &node.to_bytes()?)?;
        }
        for change in &rebuild.changes.changes {
            writer.put_entry(&ring_change_key(&change.node), &change.to_bytes()?)?;
        }
        let mut checkpoints: BTreeMap<(Job, Step), Checkpoint> = BTreeMap::new();
        for (step, committed) in inventory.steps {
            self.put_marks_and_require_majority(rebuild, &committed).await?;
            checkpoints.entry(step).or_default().committed = Some(committed.saved.clone());
            self.write_step_records(&mut writer, *committed, answer)?;
        }
        for (step, removing) in inventory.removing {
            checkpoints.entry(step).or_default().removing = removing;
        }
        for ((job, step), checkpoint) in &checkpoints {
            writer.put_entry(&checkpoint_key(job.at(*step)), &checkpoint.to_bytes()?)?;
        }
        for removing in &inventory.orphans {
            writer.put_entry(&orphan_key(removing.save), &removing.to_bytes()?)?;
        }
        answer.incomplete.truncate(MAX_LISTED);
        answer.damaged.truncate(MAX_LISTED);
        Ok(writer)
    }

    /// Writes missing commit marks of the step, and checks that a majority of the listed storage
    /// nodes have one then. A rebuild that accepts losses does without the majority.
    ///
    /// # Errors
    /// [`CatalogueServerError::TooFewCommitMarks`] if half or fewer have one and no loss was
    /// accepted.
    async fn put_marks_and_require_majority(
        &self,
        rebuild: &Rebuild<'_>,
        committed: &Committed,
    ) -> Result<(), RemoteError> {
        let listed = &rebuild.listed;
        let needed = majority(listed.len());
        let marked = self.put_missing_marks(rebuild, committed).await;
        let marked = marked.intersection(listed).count();
        if marked < needed && !rebuild.accept_loss {
            let too_few = CatalogueServerError::TooFewCommitMarks {
                marked,
                all: listed.len(),
                job: committed.job.clone(),
                step: committed.step,
                needed,
            };
            return Err(too_few.into());
        }
        Ok(())
    }

    /// Creates an empty catalogue database. Moves an existing one aside. Returns the empty one.
    pub(in crate::node) async fn set_aside_and_create_db(
        &self,
    ) -> Result<Arc<dyn Kv>, RemoteError> {
        let maps = self.context.catalogue_server.db_location().clone();
        let fresh = self.context.workers.run(move || maps.move_aside_and_create()).await?;
        fresh.map_err(|error| {
            CatalogueServerError::DatabaseNotCreated { reason: error.to_string() }.into()
        })
    }

    /// Opens the finished catalogue database of `epoch` in `kv`. Returns its catalogue.
    pub(in crate::node) async fn open_local_catalogue(
        &self,
        kv: Arc<dyn Kv>,
        epoch: Epoch,
    ) -> Result<Arc<LocalCatalogue>, RemoteError> {
        let (clock, entropy) = (self.context.clock.clone(), self.context.entropy.clone());
        let (workers, lease) = (self.context.workers.clone(), self.context.settings.lease);
        let open = move || LocalCatalogue::open(kv, clock, entropy, &workers, lease, epoch);
        Ok(Arc::new(self.context.workers.run(open).await??))
    }

    /// Claims `epoch` for the catalogue database `db_id`, on this node and on `reached`. Returns
    /// the nodes among `reached` that recorded the claim.
    ///
    /// # Errors
    /// Fails with kind `Fenced` if a node refuses the epoch, and any failure of this node.
    async fn claim_epoch_on_nodes(
        &self,
        reached: &[NodeRecord],
        epoch: Epoch,
        db_id: DbId,
    ) -> Result<Vec<NodeRecord>, RemoteError> {
        let call = ClaimEpoch { epoch, map: db_id, home: self.context.own_address() };
        // This node claims first: if it cannot, the epoch is claimed nowhere.
        self.store_claim_and_server(call.clone()).await?;
        let asks = reached.iter().map(|node| {
            let call = &call;
            async move { (node, self.context.caller.call(&NodeAddress::of(node), call).await) }
        });
        let mut claimed = Vec::new();
        for (node, answer) in join_all(asks).await {
            match answer {
                Ok(()) => claimed.push(node.clone()),
                Err(error) if error.kind() == ErrorKind::Fenced => {
                    let (node, reason) = (node.name.clone(), error.to_string());
                    return Err(CatalogueServerError::EpochRefused { node, epoch, reason }.into());
                }
                Err(error) => {
                    tracing::warn!(node = %node.name, %error, "failed to claim the epoch on a node")
                }
            }
        }
        Ok(claimed)
    }

    /// Writes the missing commit marks of a save, as far as nodes can be reached: each shard's mark
    /// on the nodes of its ring, and one shard's mark on all other nodes. Returns the nodes that
    /// have a mark then.
    async fn put_missing_marks(
        &self,
        rebuild: &Rebuild<'_>,
        committed: &Committed,
    ) -> BTreeSet<NodeId> {
        let &Rebuild { sources, epoch, .. } = rebuild;
        let directory = Directory::new(Vec::new(), rebuild.changes.clone());
        let mut marked: BTreeSet<NodeId> =
            committed.shards.iter().flat_map(|shard| &shard.marked).copied().collect();
        for shard in &committed.shards {
            let mark = CommitMark {
                cluster: self.context.settings.cluster,
                saved: committed.saved.clone(),
                root: shard.root.clone(),
            };
            let Ok(bytes) = mark.to_bytes() else { continue };
            let call = PutMark { bytes, epoch };
            let ring: BTreeSet<NodeId> = directory.nodes_to_ask(&shard.root).collect();
            let is_missing = |node: &NodeId| {
                !marked.contains(node) || (ring.contains(node) && !shard.marked.contains(node))
            };
            let missing = sources.iter().filter(|source| is_missing(&NodeId::of(&source.name)));
            let puts = missing.map(|source| {
                let call = &call;
                async move {
                    let put = self.context.caller.call(&NodeAddress::of(source), call).await;
                    if let Err(error) = &put {
                        tracing::info!(node = %source.name, %error, "a node did not store a commit mark");
                    }
                    put.ok().map(|()| NodeId::of(&source.name))
                }
            });
            let puts: Vec<_> = puts.collect();
            marked.extend(join_all(puts).await.into_iter().flatten());
        }
        marked
    }

    /// Checks that enough nodes were read, and that no committed step is incomplete.
    ///
    /// # Errors
    /// Fails with kind `Unavailable` if more nodes have to be read, or `Lost` if a committed step
    /// cannot be brought back whole.
    fn check_inventory_suffices(
        &self,
        read: &ReadInventory,
        members: &[NodeRecord],
        reached: &[NodeRecord],
    ) -> Result<(), RemoteError> {
        let ReadInventory { inventory, standings, changes } = read;
        let mut quorum = Quorum::new(members, standings);
        quorum
            .set_max_missing(inventory.codes().chain(self.context.settings.codes.iter().copied()));
        let is_reached = |name: &PeerName| reached.iter().any(|node| node.name == *name);
        quorum.check_enough_heard(is_reached).map_err(|too_few| {
            let reason = too_few.to_string();
            CatalogueServerError::TooFewNodesReached { reason }
        })?;
        for (save, nodes) in &inventory.doubts {
            let is_sound = |name: &PeerName| is_reached(name) && !nodes.contains(&NodeId::of(name));
            quorum.check_enough_heard(is_sound).map_err(|too_few| {
                let bad = reached.iter().filter(|node| nodes.contains(&NodeId::of(&node.name)));
                let bad: Vec<&str> = bad.map(|node| node.name.as_str()).collect();
                let (nodes, reason) = (bad.join(", "), too_few.to_string());
                CatalogueServerError::CommitMarkDamaged { save: *save, nodes, reason }
            })?;
        }
        let known: BTreeSet<NodeId> = members.iter().map(|node| NodeId::of(&node.name)).collect();
        let directory = Directory::new(Vec::new(), changes.clone());
        let unknown = inventory
            .committed_roots()
            .flat_map(|root| directory.nodes_to_ask(root))
            .filter(|node| !known.contains(node))
            .collect::<BTreeSet<_>>();
        if !unknown.is_empty() {
            return Err(CatalogueServerError::HoldersUnknown { count: unknown.len() }.into());
        }
        let reached: BTreeSet<NodeId> = reached.iter().map(|node| NodeId::of(&node.name)).collect();
        if let Some((committed, shard, missing)) =
            find_doubtful_shard(inventory, &directory, &reached)
        {
            let name = |node: &NodeId| {
                let known = members.iter().find(|member| NodeId::of(&member.name) == *node);
                known.map_or_else(|| node.to_string(), |member| member.name.to_string())
            };
            let names: Vec<String> = missing.iter().map(name).collect();
            let uncertain = CatalogueServerError::ShardStateUncertain {
                missing: missing.len(),
                job: committed.job.clone(),
                step: committed.step,
                shard: shard.to_owned(),
                nodes: names.join(", "),
            };
            return Err(uncertain.into());
        }
        let Some(first) = inventory.describe_incomplete_steps().next() else { return Ok(()) };
        let count = inventory.describe_incomplete_steps().count();
        Err(CatalogueServerError::StepsIncomplete { count, first }.into())
    }

    /// Writes the keys of a committed step into the new database, and counts them in `answer`.
    fn write_step_records(
        &self,
        writer: &mut DbWriter,
        committed: Committed,
        answer: &mut RebuildAnswer,
    ) -> Result<(), RemoteError> {
        let Committed { job, step, saved, shards } = committed;
        let mut unfinished = None;
        for shard in shards {
            let root = &shard.root;
            unfinished =
                unfinished.or_else(|| shard.state.states().find_map(code_of_unfinished_archiving));
            writer.put_entry(&shard_state_key(root.shard), &shard.state.to_bytes()?)?;
            writer.put_entry(&shard_root_key(root.save, root.index), &root.to_bytes()?)?;
            let damaged = shard.damaged.iter().map(|&index| StripeId { shard: root.shard, index });
            answer.damaged.extend(damaged);
            answer.shards += 1;
        }
        if let Some(code) = unfinished {
            // This archive request has a lease that no coordinator renews. When the lease is over,
            // a daemon takes the request over.
            let request = ArchiveRequest {
                node: self.context.id,
                lease: LeaseId(self.context.entropy.id()),
                save: saved.save,
                options: archive_options_for(code),
                failures: 0,
                waiting: None,
            };
            writer.put_entry(&archive_request_key(job.at(step)), &request.to_bytes()?)?;
        }
        answer.steps += 1;
        Ok(())
    }
}

/// Returns the code of a stripe whose archiving began and has not ended; it ends when the replicas
/// are dropped.
fn code_of_unfinished_archiving(state: StripeState) -> Option<CodeId> {
    match state {
        StripeState::Archiving { code, .. }
        | StripeState::Archived { code, dropped: false, .. } => Some(code),
        _ => None,
    }
}

/// Returns the options with which an archiving into `code` resumes.
fn archive_options_for(code: CodeId) -> ArchiveOptions {
    let plan = match table::by_id(code) {
        Some(Code::Rs(_)) => PlanChoice::BestStar,
        _ => PlanChoice::Chain,
    };
    ArchiveOptions { plan, codec: Codec::Kernel, parallel: 0 }
}

fn storage_nodes(nodes: &[NodeRecord]) -> Vec<NodeRecord> {
    nodes.iter().filter(|node| node.storage).cloned().collect()
}

/// Returns the storage nodes that are not among `reached`.
pub(in crate::node) fn unreached_storage_nodes<'a>(
    members: &'a [NodeRecord],
    reached: &'a [NodeRecord],
) -> impl Iterator<Item = &'a NodeRecord> {
    let is_reached = |node: &NodeRecord| reached.iter().any(|other| other.name == node.name);
    members.iter().filter(move |node| node.storage && !is_reached(node))
}

/// Changes *leaving* to *left* for each node that is not on the latest list of nodes. A node is
/// taken off the list only after it has left, but some nodes may store the older state. The state
/// of a node that was reached stays: the node may have registered again after that list was made.
fn mark_removed_nodes_left(
    mut changes: RingChanges,
    standings: &[(NodeRecord, StandingAnswer)],
    reached: &[NodeRecord],
) -> RingChanges {
    let is_reached = |name: &PeerName| reached.iter().any(|node| node.name == *name);
    for change in &mut changes.changes {
        let is_listed = is_on_latest_list(standings, &change.node) || is_reached(&change.node);
        if change.state == LeaveState::Leaving && !is_listed {
            change.state = LeaveState::Left;
        }
    }
    changes
}

fn ensure_storage_node_known(members: &[NodeRecord]) -> Result<(), RemoteError> {
    let all = members.iter().filter(|node| node.storage).count();
    if all == 0 {
        return Err(CatalogueServerError::NoKnownStorageNode.into());
    }
    Ok(())
}

/// Returns the first shard whose receipts leave a doubt and whose ring misses more nodes than the
/// code tolerates, and the nodes that are missing. A node that was reached is missing, too, if it
/// holds nothing of the shard but its mark.
fn find_doubtful_shard<'a>(
    inventory: &'a ClusterInventory,
    directory: &Directory,
    reached: &BTreeSet<NodeId>,
) -> Option<(&'a Committed, &'a str, Vec<NodeId>)> {
    for committed in inventory.steps.values() {
        for shard in committed.shards.iter().filter(|shard| shard.is_doubtful) {
            let root = &shard.root;
            let is_there = |node: &NodeId| reached.contains(node) && shard.holders.contains(node);
            let ring = directory.nodes_to_ask(root);
            let missing: Vec<NodeId> = ring.filter(|node| !is_there(node)).collect();
            if missing.len() > tolerated_losses([(root.n, root.k)]) {
                return Some((committed, root.name.as_str(), missing));
            }
        }
    }
    None
}
