//! Catching up: a node learns what is committed and what was removed, so that more than half of the
//! nodes know of every save (docs/semantics.md, 2).
//!
//! Catching up only adds: it writes marks of committed saves, and adds the ids of removed saves to
//! the removed-save set. It removes no file, except those of a save that is removed while its mark
//! is written.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::error::BackgroundError;
use crate::catalogue::Catalogue;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, NOTHING_FORGOTTEN, ORPHANS, parse_record, read_record, shard_root_key,
};
use crate::format::records::{
    Checkpoint, CommitMark, Node as NodeRecord, Record, RemoveReason, Removing, Saved, ShardRoot,
    Standing, Writing,
};
use crate::id::{Epoch, PeerName, SaveId, ShardId};
use crate::kind::ErrorKind;
use crate::net::call::address;
use crate::node::catalogue_server::membership::Membership;
use crate::node::context::NodeContext;
use crate::node::quorum::Quorum;
use crate::node::registration::{CatchUpRequests, Registration};
use crate::node::retry_schedule::{backoff, scan_interval};
use crate::node::standings::{fetch_standings, get_standing};
use crate::node::storage::fencing::{Fencing, read_marked_save};
use crate::node::storage::node_inventory;
use crate::node::storage::records_and_drops::ShardRecords;
use crate::stage::{TracePoint, trace_point};
use crate::store::{Store, StoreError};
use crate::wire::calls::{CatchUp, ListRemovedSaves, PutMark, StandingAnswer};
use crate::wire::{NodeAddress, RemoteError};

/// Maximum number of removed saves in one page.
const REMOVED_PER_PAGE: usize = 4096;
/// Time limit for one page of removed saves.
const PAGE_LIMIT: Duration = Duration::from_secs(20);
/// Number of nodes whose removed saves are read at once.
const WITNESSES_AT_ONCE: usize = 8;
/// Maximum number of saves with damaged marks that a node reports. A node that has more is no
/// witness for any save.
const MAX_DAMAGED: usize = 4096;

/// Longest wait between two tries to catch up, unless the scan interval is longer.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The saves of which this node has an intact commit mark, and the codes that these marks name.
#[derive(Default)]
struct LocalMarks {
    saves: BTreeSet<SaveId>,
    codes: BTreeSet<(u8, u8)>,
}

/// The service that catches up with commits and removals that this node missed.
pub(in crate::node) struct CatchUpRounds {
    context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    registration: Arc<Registration>,
    catching_up: Arc<CatchUpRequests>,
    shard_records: Arc<ShardRecords>,
    membership: Arc<Membership>,
}

impl CatchUpRounds {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        fencing: Arc<Fencing>,
        registration: Arc<Registration>,
        catching_up: Arc<CatchUpRequests>,
        shard_records: Arc<ShardRecords>,
        membership: Arc<Membership>,
    ) -> Self {
        Self { context, fencing, registration, catching_up, shard_records, membership }
    }

    /// Catches up after the node has registered, and again whenever a round is due. Runs until the
    /// node stops; returns at once if the node stores no data.
    pub(in crate::node) async fn run_catch_up(self: Arc<Self>) {
        if !self.context.settings.storage {
            return;
        }
        let look = scan_interval(self.context.settings.lease);
        let mut failures = 0;
        loop {
            let wait = wait_before_round(look, failures);
            tokio::select! {
                () = self.catching_up.wait_for_request() => {}
                () = self.context.clock.sleep(wait) => {}
            }
            if !self.catching_up.take() {
                continue;
            }
            match self.run_catch_up_round(None).await {
                Ok(()) => failures = 0,
                Err(error) => {
                    tracing::info!(%error, "failed to catch up; retrying");
                    self.catching_up.request_later();
                    failures += 1;
                }
            }
        }
    }

    pub(in crate::node) async fn catch_up_on_request(
        &self,
        call: CatchUp,
    ) -> Result<(), RemoteError> {
        trace_point(TracePoint::CatchUp, &self.context.settings.name);
        // `remove-node` and `replace-node` need this node to store the ring change before they
        // return.
        self.membership.fetch_and_store_members().await?;
        self.run_catch_up_round(call.without.as_ref()).await
    }

    /// Runs one round of catching up, without asking the node `without`. The catalogue's keys are
    /// read before the removed-save sets of the other nodes. If the catalogue forgets a removal
    /// before this round reads its key, the removal is in those sets by then.
    async fn run_catch_up_round(&self, without: Option<&PeerName>) -> Result<(), RemoteError> {
        let _alone = self.catching_up.begin_round().await;
        let catalogue = self.context.catalogue();
        let epoch = catalogue.epoch();
        let not_registered = || {
            let node = self.context.settings.name.clone();
            BackgroundError::NodeNotRegistered { node }
        };
        let registered =
            self.registration.fetch_registration_revision().await?.ok_or_else(not_registered)?;
        let nodes = catalogue.list_nodes().await?.into_iter().map(|view| view.node);
        let nodes: Vec<_> = nodes.filter(|node| Some(&node.name) != without).collect();
        let is_complete =
            || async { Ok::<_, RemoteError>(catalogue.get(NOTHING_FORGOTTEN).await?.is_some()) };
        // The witnesses are asked before the steps are read, so that a node that cannot catch up
        // now does not read the steps in vain at every try.
        let witnesses = match is_complete().await? {
            true => None,
            false => Some(self.fetch_witness_standings(&nodes, epoch).await?),
        };
        let marked = self.context.run_on_store(local_marks).await?;
        let committed =
            self.mark_committed_and_record_removed(&*catalogue, epoch, &marked.saves).await?;
        match witnesses {
            Some(witnesses) => {
                let heard =
                    self.copy_removed_ids_from_witnesses(&witnesses, epoch, &committed).await?;
                self.check_enough_witnesses(&nodes, &heard, &marked.codes)?;
            }
            None if is_complete().await? => {}
            None => return Err(BackgroundError::RemovalForgotten.into()),
        }
        if self.registration.fetch_registration_revision().await? != Some(registered) {
            return Err(not_registered().into());
        }
        let was = self.context.store.read_catch_up_standing();
        self.context.run_on_store(move |store| store.record_caught_up(epoch, registered)).await?;
        if was != Standing::CaughtUp {
            tracing::info!(%epoch, "this node knows what is committed and what was removed");
        }
        Ok(())
    }

    /// Writes a mark on this node of each committed or decided save that has none here. Records as
    /// removed each save whose removal is under way, except aborted saves. Returns the committed
    /// and decided saves.
    async fn mark_committed_and_record_removed(
        &self,
        catalogue: &dyn Catalogue,
        epoch: Epoch,
        already_marked: &BTreeSet<SaveId>,
    ) -> Result<BTreeSet<SaveId>, RemoteError> {
        let (mut wanted, mut removed) = (BTreeSet::new(), Vec::new());
        let mut note = |removing: &Removing| {
            if removing.reason != RemoveReason::Aborted {
                removed.push(removing.save);
            }
        };
        let mut checkpoints = KeyScan::of_prefix(catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let checkpoint: Checkpoint = parse_record(&key, &entry.value)?;
            checkpoint.removing.iter().for_each(&mut note);
            let decided = checkpoint.writing.and_then(|writing| match writing {
                Writing::Decided { saved } => Some(saved),
                Writing::Open { .. } => None,
            });
            for saved in checkpoint.committed.into_iter().chain(decided) {
                wanted.insert(saved.save);
                if !already_marked.contains(&saved.save) {
                    self.put_mark_locally(catalogue, epoch, saved).await?;
                }
            }
        }
        let mut orphans = KeyScan::of_prefix(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            note(&parse_record(&key, &entry.value)?);
        }
        self.record_removed_locally(removed, epoch).await?;
        Ok(wanted)
    }

    /// Writes one commit mark of a save on this node: that of its first shard.
    async fn put_mark_locally(
        &self,
        catalogue: &dyn Catalogue,
        epoch: Epoch,
        saved: Saved,
    ) -> Result<(), RemoteError> {
        // A save without a root was removed and forgotten since its step was read.
        let Some((root, _)) =
            read_record::<ShardRoot>(catalogue, &shard_root_key(saved.save, 0)).await?
        else {
            return Ok(());
        };
        let save = saved.save;
        let mark = CommitMark { cluster: self.context.settings.cluster, saved, root };
        match self.shard_records.put_mark(PutMark { bytes: mark.to_bytes()?, epoch }).await {
            // The save was removed meanwhile, or the epoch is over. If the epoch is over, the store
            // refuses the catch-up record at the end of the round, too.
            Err(error) if error.kind == ErrorKind::Fenced => {
                tracing::info!(%save, %error, "a commit mark was not written: the save was removed, or a later epoch has begun");
                Ok(())
            }
            marked => marked,
        }
    }

    /// Returns the standings of all storage nodes among `nodes` that answer, this node included.
    ///
    /// # Errors
    /// Fails with kind `Unavailable` if a node that answers runs an older program or has noted a
    /// later epoch.
    async fn fetch_witness_standings(
        &self,
        nodes: &[NodeRecord],
        epoch: Epoch,
    ) -> Result<Vec<(NodeRecord, StandingAnswer)>, RemoteError> {
        let others: Vec<NodeRecord> =
            nodes.iter().filter(|node| node.name != self.context.settings.name).cloned().collect();
        let mut answers = fetch_standings(&self.context, &others).await;
        for (node, answer) in &answers {
            let node = node.name.clone();
            let refusal = match answer {
                older if is_of_an_older_program(older) => BackgroundError::ProgramOutdated { node },
                later if later.epoch > epoch => {
                    BackgroundError::EpochOver { node, noted: later.epoch, epoch }
                }
                _ => continue,
            };
            return Err(refusal.into());
        }
        answers.push((self.context.own_node_record(), get_standing(&self.context).await?));
        answers.retain(|(node, _)| node.storage);
        Ok(answers)
    }

    /// Copies the removals that the other storage nodes know, except those of saves that were
    /// `committed` when the steps were read: a rebuild has undone such a removal, or the removal
    /// began later and its tombstone is sent to this node. Returns the witnesses that reported all
    /// of their removals and whose standing is the same afterwards as before.
    async fn copy_removed_ids_from_witnesses(
        &self,
        witnesses: &[(NodeRecord, StandingAnswer)],
        epoch: Epoch,
        committed: &BTreeSet<SaveId>,
    ) -> Result<Vec<(NodeRecord, StandingAnswer)>, RemoteError> {
        let others = witnesses.iter().map(|(node, _)| node);
        let others = others.filter(|node| node.name != self.context.settings.name);
        let copies: Vec<_> = others
            .map(|node| async move {
                (node, self.copy_removed_ids_from_node(node, epoch, committed).await)
            })
            .collect();
        let (mut told, mut copies) =
            (Vec::new(), stream::iter(copies).buffer_unordered(WITNESSES_AT_ONCE));
        while let Some((node, copied)) = copies.next().await {
            match copied {
                Ok(()) => told.push(node.clone()),
                Err(error) => {
                    tracing::info!(node = %node.name, %error, "failed to read the node's removals");
                }
            }
        }
        let mut after = self.fetch_witness_standings(&told, epoch).await?;
        let before = |name: &PeerName| {
            let found = witnesses.iter().find(|(node, _)| node.name == *name);
            found.map(|(_, answer)| answer.standing)
        };
        after.retain(|(node, answer)| before(&node.name) == Some(answer.standing));
        Ok(after)
    }

    /// Checks that every removal is known to at least one of the nodes that were `heard`. If all
    /// storage nodes were heard, there is nothing to check.
    ///
    /// # Errors
    /// Fails with kind `Unavailable` if a removal could be unknown to all nodes that were heard.
    fn check_enough_witnesses(
        &self,
        nodes: &[NodeRecord],
        heard: &[(NodeRecord, StandingAnswer)],
        codes: &BTreeSet<(u8, u8)>,
    ) -> Result<(), RemoteError> {
        let mut quorum = Quorum::from_catalogue_list(nodes, heard);
        quorum.set_max_missing(codes.iter().chain(&self.context.settings.codes).copied());
        let is_heard = |name: &PeerName| heard.iter().any(|(node, _)| node.name == *name);
        let is_all = nodes.iter().all(|node| !node.storage || is_heard(&node.name));
        match quorum.check_enough_heard(is_heard) {
            Err(too_few) if !is_all => {
                Err(BackgroundError::TooFewWitnesses { reason: too_few.to_string() }.into())
            }
            _ => Ok(()),
        }
    }

    /// Copies the removals that `node` knows, page by page, except those of `committed` saves.
    async fn copy_removed_ids_from_node(
        &self,
        node: &NodeRecord,
        epoch: Epoch,
        committed: &BTreeSet<SaveId>,
    ) -> Result<(), RemoteError> {
        let mut after = None;
        loop {
            let to = address(&NodeAddress::of(node));
            let mut page = self
                .context
                .caller
                .call_within(&to, &ListRemovedSaves { after }, PAGE_LIMIT)
                .await?;
            // Each page must end after the page before. Otherwise this loop might never end.
            let last = page.last().copied().filter(|last| after.is_none_or(|after| *last > after));
            let Some(last) = last else { return Ok(()) };
            after = Some(last);
            page.retain(|save| !committed.contains(save));
            self.record_removed_locally(page, epoch).await?;
        }
    }

    /// Adds removed saves to the removed-save set of this node, unless `epoch` is over. Files of
    /// these saves on this node stay until a purge.
    async fn record_removed_locally(
        &self,
        saves: Vec<SaveId>,
        epoch: Epoch,
    ) -> Result<(), RemoteError> {
        let removed = saves.clone();
        self.context.run_on_store(move |store| store.record_all_removed(epoch, removed)).await?;
        saves.into_iter().for_each(|save| self.fencing.cache_removed(save));
        Ok(())
    }

    pub(in crate::node) async fn list_removed_saves(
        &self,
        call: ListRemovedSaves,
    ) -> Result<Vec<SaveId>, RemoteError> {
        self.context
            .run_on_store(move |store| local_removed_saves(store, call.after, REMOVED_PER_PAGE))
            .await
    }

    pub(in crate::node) async fn list_damaged_marks(&self) -> Result<Vec<SaveId>, RemoteError> {
        let damaged = self.context.run_on_store(node_inventory::find_damaged_mark_saves).await?;
        if !damaged.is_empty() {
            tracing::warn!(
                saves = damaged.len(),
                "saves have only damaged commit marks here: those that are committed get new ones when a catalogue answers"
            );
            self.catching_up.request();
        }
        if damaged.len() > MAX_DAMAGED {
            return Err(BackgroundError::TooManyDamagedMarks { saves: damaged.len() }.into());
        }
        Ok(damaged)
    }
}

/// Returns the wait before the next check whether a round is due. The wait grows with `failures` up
/// to [`LONGEST_WAIT`], and is never shorter than the scan interval `look`.
fn wait_before_round(look: Duration, failures: u32) -> Duration {
    backoff(look, failures).min(LONGEST_WAIT).max(look)
}

fn is_of_an_older_program(answer: &StandingAnswer) -> bool {
    answer.standing == Standing::Unknown && answer.epoch == Epoch::default()
}

/// Returns the saves of which this node has an intact mark. A mark that cannot be read counts as
/// absent; it is written again.
fn local_marks(store: &Store) -> Result<LocalMarks, StoreError> {
    let mut marked = LocalMarks::default();
    for shard in store.shards_after(None)? {
        if let Ok(Some(found)) = read_marked_save(store, shard) {
            marked.saves.insert(found.saved.save);
            marked.codes.insert((found.n, found.k));
        }
    }
    Ok(marked)
}

/// Returns at most `limit` removed saves from the first one after `after`, in order, whether or not
/// this node has purged their files. The tombstones are read first: a purge adds the save to the
/// removed-save set before it removes the tombstone, so a purge that ends in between hides no save.
fn local_removed_saves(
    store: &Store,
    after: Option<SaveId>,
    limit: usize,
) -> Result<Vec<SaveId>, StoreError> {
    let mut saves = BTreeSet::new();
    let from = after.map(|after| ShardId::new(after, u32::MAX));
    for shard in store.shards_after(from)?.filter(|shard| shard.index() == u32::MAX) {
        if store.get_tombstone(shard.save())?.is_some() {
            saves.insert(shard.save());
        }
    }
    saves.extend(store.list_removed(after, limit)?);
    Ok(saves.into_iter().take(limit).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_wait_longer_after_failures_and_never_shorter_than_a_look() {
        let seconds = Duration::from_secs;
        assert_eq!(wait_before_round(seconds(3), 0), seconds(3));
        assert_eq!(wait_before_round(seconds(3), 2), seconds(6));
        assert_eq!(wait_before_round(seconds(3), 99), LONGEST_WAIT);
        // A quarter of the longest lease that the configuration takes.
        assert_eq!(wait_before_round(seconds(21_600), 1), seconds(21_600));
    }
}
