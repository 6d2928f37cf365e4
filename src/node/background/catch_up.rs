//! A node catches up with what is committed and what was removed, so that more than half of the nodes know of every save
//! (docs/semantics.md, 2).
//!
//! It only adds: marks of committed saves, and ids of removed ones to its graves. No file goes by what is done here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::retry::{backoff, scan_interval};
use crate::catalogue::Catalogue;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::records::{CHECKPOINTS, NOTHING_FORGOTTEN, ORPHANS, parse, read, root_key};
use crate::format::records::{
    Checkpoint, CommitMark, Node as NodeRecord, Record, RemoveReason, Removing, Saved, ShardRoot,
    Standing, Writing,
};
use crate::id::{Epoch, PeerName, SaveId, ShardId};
use crate::kind::ErrorKind;
use crate::net::call::address;
use crate::node::Node;
use crate::node::catalogue_server::cluster_inventory::node_address;
use crate::node::quorum::Quorum;
use crate::node::rpc::failure::remote_error;
use crate::node::storage::fencing::marked_save;
use crate::node::storage::inventory;
use crate::store::{Store, StoreError};
use crate::wire::RemoteError;
use crate::wire::calls::{CatchUp, ListRemovedSaves, PutMark, StandingAnswer};

/// Removed saves in one page.
const REMOVED_PER_PAGE: usize = 4096;
/// One page of them comes within this.
const PAGE_LIMIT: Duration = Duration::from_secs(20);
/// Saves with damaged marks that a node names; with more it is no witness of anything.
const MAX_DAMAGED: usize = 4096;

/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Whether this node is at it, and whether it is to begin again.
#[derive(Default)]
pub(in crate::node) struct CatchingUp {
    alone: tokio::sync::Mutex<()>,
    is_due: AtomicBool,
    now: Notify,
}

impl CatchingUp {
    /// It begins, or begins again.
    pub(in crate::node) fn is_due(&self) {
        self.is_due.store(true, Ordering::Relaxed);
        self.now.notify_one();
    }
}

/// The saves that this node has a good mark of, and the codes in those.
#[derive(Default)]
struct LocalMarks {
    saves: BTreeSet<SaveId>,
    codes: BTreeSet<(u8, u8)>,
}

impl Node {
    /// Catches up when it has registered, and again whenever that is due.
    pub(in crate::node) async fn run_catch_up(self: Arc<Self>) {
        if !self.context.settings.storage {
            return;
        }
        let look = scan_interval(self.context.settings.lease);
        let mut failures = 0;
        loop {
            let wait = backoff(look, failures).clamp(look, LONGEST_WAIT);
            tokio::select! {
                () = self.catching_up.now.notified() => {}
                () = self.context.clock.sleep(wait) => {}
            }
            if !self.catching_up.is_due.swap(false, Ordering::Relaxed) {
                continue;
            }
            match self.catch_up(None).await {
                Ok(()) => failures = 0,
                Err(error) => {
                    tracing::info!(%error, "this node has not caught up yet");
                    self.catching_up.is_due.store(true, Ordering::Relaxed);
                    failures += 1;
                }
            }
        }
    }

    pub(in crate::node) async fn catch_up_for(&self, call: CatchUp) -> Result<(), RemoteError> {
        self.catch_up(call.without.as_ref()).await
    }

    /// Keys first, then graves: a removal that is forgotten before its key is read has left its graves by then.
    async fn catch_up(&self, without: Option<&PeerName>) -> Result<(), RemoteError> {
        let _alone = self.catching_up.alone.lock().await;
        let catalogue = self.context.catalogue();
        let epoch = catalogue.epoch();
        let not_registered = || {
            let text = format!("node {} is not registered", self.context.settings.name);
            remote_error(ErrorKind::Unavailable, text)
        };
        let registered = self.registration.registration().await?.ok_or_else(not_registered)?;
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let nodes: Vec<_> = nodes.filter(|node| Some(&node.name) != without).collect();
        let is_complete =
            || async { Ok::<_, RemoteError>(catalogue.get(NOTHING_FORGOTTEN).await?.is_some()) };
        // Before the steps are read: a node that cannot catch up now need not read them again and again.
        let witnesses = match is_complete().await? {
            true => None,
            false => Some(self.witnesses(&nodes, epoch).await?),
        };
        let marked = self.context.on_store(local_marks).await?;
        let committed = self.mark_committed_saves(&*catalogue, epoch, &marked.saves).await?;
        match witnesses {
            Some(witnesses) => {
                let heard = self.fetch_removed_saves(&witnesses, epoch, &committed).await?;
                self.check_witnesses(&nodes, &heard, &marked.codes)?;
            }
            None if is_complete().await? => {}
            None => {
                let text =
                    "a removal was forgotten meanwhile: what was removed is asked of the others";
                return Err(remote_error(ErrorKind::Busy, text));
            }
        }
        if self.registration.registration().await? != Some(registered) {
            return Err(not_registered());
        }
        let was = self.context.store.standing();
        self.context.on_store(move |store| store.note_caught_up(epoch, registered)).await?;
        if was != Standing::CaughtUp {
            tracing::info!(%epoch, "this node knows what is committed and what was removed");
        }
        Ok(())
    }

    /// Keeps a mark of each save that is committed or decided, and a grave of each that is being removed. Returns the former.
    async fn mark_committed_saves(
        &self,
        catalogue: &dyn Catalogue,
        epoch: Epoch,
        marked: &BTreeSet<SaveId>,
    ) -> Result<BTreeSet<SaveId>, RemoteError> {
        let (mut wanted, mut removed) = (BTreeSet::new(), Vec::new());
        let mut note = |removing: &Removing| {
            if removing.reason != RemoveReason::Aborted {
                removed.push(removing.save);
            }
        };
        let mut checkpoints = KeyScan::over(catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let checkpoint: Checkpoint = parse(&key, &entry.value)?;
            checkpoint.removing.iter().for_each(&mut note);
            let decided = checkpoint.writing.and_then(|writing| match writing {
                Writing::Decided { saved } => Some(saved),
                Writing::Open { .. } => None,
            });
            for saved in checkpoint.committed.into_iter().chain(decided) {
                wanted.insert(saved.save);
                if !marked.contains(&saved.save) {
                    self.put_mark_locally(catalogue, epoch, saved).await?;
                }
            }
        }
        let mut orphans = KeyScan::over(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            note(&parse(&key, &entry.value)?);
        }
        self.record_removed_locally(removed, epoch).await?;
        Ok(wanted)
    }

    /// One mark of a save, of its first shard.
    async fn put_mark_locally(
        &self,
        catalogue: &dyn Catalogue,
        epoch: Epoch,
        saved: Saved,
    ) -> Result<(), RemoteError> {
        // Without a root it has been removed and forgotten since its step was read.
        let Some((root, _)) = read::<ShardRoot>(catalogue, &root_key(saved.save, 0)).await? else {
            return Ok(());
        };
        let save = saved.save;
        let mark = CommitMark { cluster: self.context.settings.cluster, saved, root };
        match self.put_mark(PutMark { bytes: mark.to_bytes()?, epoch }).await {
            // The save was removed meanwhile, or the epoch is over: in that case nothing is noted in the end.
            Err(error) if error.kind == ErrorKind::Fenced => {
                tracing::info!(%save, %error, "not marked here");
                Ok(())
            }
            marked => marked,
        }
    }

    /// Returns the standings of all nodes that answer, this one's among them.
    ///
    /// # Errors
    /// When one of them runs an older program, or has noted a later epoch.
    async fn witnesses(
        &self,
        nodes: &[NodeRecord],
        epoch: Epoch,
    ) -> Result<Vec<(NodeRecord, StandingAnswer)>, RemoteError> {
        let others: Vec<NodeRecord> =
            nodes.iter().filter(|node| node.name != self.context.settings.name).cloned().collect();
        let mut answers = self.fetch_standings(&others).await;
        for (node, answer) in &answers {
            let text = match answer {
                older if is_of_an_older_program(older) => {
                    format!("node {} runs an older program: upgrade it", node.name)
                }
                later if later.epoch > epoch => {
                    format!("node {} has noted epoch {}: {epoch} is over", node.name, later.epoch)
                }
                _ => continue,
            };
            return Err(remote_error(ErrorKind::Unavailable, text));
        }
        answers.push((self.context.record(), self.get_standing().await?));
        answers.retain(|(node, _)| node.storage);
        Ok(answers)
    }

    /// Collects removals from the other storage nodes, except of saves that were `committed` when the steps were read: such a removal was
    /// undone by a rebuild, or began later and will reach this node itself. Returns the witnesses that told all of theirs and say the same
    /// of themselves afterwards as before.
    async fn fetch_removed_saves(
        &self,
        witnesses: &[(NodeRecord, StandingAnswer)],
        epoch: Epoch,
        committed: &BTreeSet<SaveId>,
    ) -> Result<Vec<(NodeRecord, StandingAnswer)>, RemoteError> {
        let mut told: Vec<NodeRecord> = Vec::new();
        for (node, _) in witnesses {
            if node.name == self.context.settings.name {
                continue;
            }
            match self.copy_removed_saves(node, epoch, committed).await {
                Ok(()) => told.push(node.clone()),
                Err(error) => {
                    tracing::info!(node = %node.name, %error, "its removals are not known");
                }
            }
        }
        let mut after = self.witnesses(&told, epoch).await?;
        let before = |name: &PeerName| {
            let found = witnesses.iter().find(|(node, _)| node.name == *name);
            found.map(|(_, answer)| answer.standing)
        };
        after.retain(|(node, answer)| before(&node.name) == Some(answer.standing));
        Ok(after)
    }

    /// Refuses when a removal could be known to none of the nodes that were `heard`.
    fn check_witnesses(
        &self,
        nodes: &[NodeRecord],
        heard: &[(NodeRecord, StandingAnswer)],
        codes: &BTreeSet<(u8, u8)>,
    ) -> Result<(), RemoteError> {
        let mut quorum = Quorum::of_list(nodes, heard);
        quorum.bound(codes.iter().chain(&self.context.settings.codes).copied());
        let is_heard = |name: &PeerName| heard.iter().any(|(node, _)| node.name == *name);
        let is_all = nodes.iter().all(|node| !node.storage || is_heard(&node.name));
        match quorum.check(is_heard) {
            Err(too_few) if !is_all => {
                Err(remote_error(ErrorKind::Unavailable, too_few.to_string()))
            }
            _ => Ok(()),
        }
    }

    async fn copy_removed_saves(
        &self,
        node: &NodeRecord,
        epoch: Epoch,
        committed: &BTreeSet<SaveId>,
    ) -> Result<(), RemoteError> {
        let mut after = None;
        loop {
            let to = address(&node_address(node));
            let mut page = self
                .context
                .caller
                .call_within(&to, &ListRemovedSaves { after }, PAGE_LIMIT)
                .await?;
            // A page goes on behind the one before; anything else would never end.
            let last = page.last().copied().filter(|last| after.is_none_or(|after| *last > after));
            let Some(last) = last else { return Ok(()) };
            after = Some(last);
            page.retain(|save| !committed.contains(save));
            self.record_removed_locally(page, epoch).await?;
        }
    }

    /// Adds removed saves to the graves of this node, while `epoch` is not over; their files here, if there are any, wait for a sweep.
    async fn record_removed_locally(
        &self,
        saves: Vec<SaveId>,
        epoch: Epoch,
    ) -> Result<(), RemoteError> {
        let removed = saves.clone();
        self.context.on_store(move |store| store.record_all_removed(epoch, removed)).await?;
        saves.into_iter().for_each(|save| self.fencing.cache_tombstone(save, true));
        Ok(())
    }

    pub(in crate::node) async fn list_removed_saves(
        &self,
        call: ListRemovedSaves,
    ) -> Result<Vec<SaveId>, RemoteError> {
        self.context
            .on_store(move |store| local_removed_saves(store, call.after, REMOVED_PER_PAGE))
            .await
    }

    pub(in crate::node) async fn list_damaged_marks(&self) -> Result<Vec<SaveId>, RemoteError> {
        let damaged = self.context.on_store(inventory::find_damaged_marks).await?;
        if !damaged.is_empty() {
            tracing::warn!(
                saves = damaged.len(),
                "commit marks do not parse: they are written again"
            );
            self.catching_up.is_due();
        }
        if damaged.len() > MAX_DAMAGED {
            let text = format!("commit marks of {} saves do not parse here", damaged.len());
            return Err(remote_error(ErrorKind::Corrupt, text));
        }
        Ok(damaged)
    }
}

fn is_of_an_older_program(answer: &StandingAnswer) -> bool {
    answer.standing == Standing::Unknown && answer.epoch == Epoch::default()
}

/// Returns the saves of which a good mark is here. One that cannot be read is none: it is written again.
fn local_marks(store: &Store) -> Result<LocalMarks, StoreError> {
    let mut marked = LocalMarks::default();
    for shard in store.shards(None)? {
        if let Ok(Some(found)) = marked_save(store, shard) {
            marked.saves.insert(found.saved.save);
            marked.codes.insert((found.n, found.k));
        }
    }
    Ok(marked)
}

/// Returns removed saves, in order, whether their files are swept here or not. Tombstones are read first: a sweep that ends in between
/// leaves a grave before it takes the tombstone.
fn local_removed_saves(
    store: &Store,
    after: Option<SaveId>,
    limit: usize,
) -> Result<Vec<SaveId>, StoreError> {
    let mut saves = BTreeSet::new();
    let from = after.map(|after| ShardId::new(after, u32::MAX));
    for shard in store.shards(from)?.filter(|shard| shard.index() == u32::MAX) {
        if store.tombstone(shard.save())?.is_some() {
            saves.insert(shard.save());
        }
    }
    saves.extend(store.list_removed(after, limit)?);
    Ok(saves.into_iter().take(limit).collect())
}
