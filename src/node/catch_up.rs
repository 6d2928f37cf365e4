//! A node catches up with what is committed and what was removed, so that more than half of the nodes know of every save
//! (docs/semantics.md, 2).
//!
//! It only adds: marks of committed saves, and ids of removed ones to its graves. No file goes by what is done here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::Node;
use super::census::node_address;
use super::failure::failure;
use super::inventory;
use super::marks::{TOMBSTONE, save_scope};
use super::quorum::Quorum;
use super::waits::look;
use super::walk::Walk;
use crate::catalogue::Catalogue;
use crate::catalogue::map::REVISIONS_PER_EPOCH;
use crate::catalogue::records::{
    CHECKPOINTS, NODES, NOTHING_FORGOTTEN, ORPHANS, parse, read, root_key,
};
use crate::format::records::{
    Checkpoint, CommitMark, Node as NodeRecord, Record, RemoveReason, Removing, Saved, ShardRoot,
    Standing, Writing,
};
use crate::id::{Epoch, PeerName, SaveId, ShardId};
use crate::kind::Kind;
use crate::net::call::address;
use crate::store::{Store, StoreError};
use crate::wire::Failure;
use crate::wire::calls::{CatchUp, ListGraves, PutMark, StandingAnswer};

/// Removed saves in one page.
const GRAVES_PER_PAGE: usize = 4096;
/// One page of them comes within this.
const PAGE_LIMIT: Duration = Duration::from_secs(20);
/// Saves with damaged marks that a node names; with more it is no witness of anything.
const MAX_DAMAGED: usize = 4096;

/// Whether this node is at it, and whether it is to begin again.
#[derive(Default)]
pub(super) struct CatchingUp {
    alone: tokio::sync::Mutex<()>,
    is_due: AtomicBool,
    now: Notify,
}

impl CatchingUp {
    /// It begins, or begins again.
    pub(super) fn is_due(&self) {
        self.is_due.store(true, Ordering::Relaxed);
        self.now.notify_one();
    }
}

/// The saves that this node has a good mark of, and the codes in those.
#[derive(Default)]
struct Marked {
    saves: BTreeSet<SaveId>,
    codes: BTreeSet<(u8, u8)>,
}

impl Node {
    /// Catches up when it has registered, and again whenever that is due.
    pub(super) async fn keep_caught_up(self: Arc<Self>) {
        if !self.settings.storage {
            return;
        }
        loop {
            tokio::select! {
                () = self.catching_up.now.notified() => {}
                () = self.clock.sleep(look(self.settings.lease)) => {}
            }
            if !self.catching_up.is_due.swap(false, Ordering::Relaxed) {
                continue;
            }
            if let Err(error) = self.catch_up(None).await {
                tracing::info!(%error, "this node has not caught up yet");
                self.catching_up.is_due.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Before and after it registers: a node that was taken off the list has missed what was committed and removed since. Another
    /// registration than the one of the note says so, unless it is that of a rebuilt map: a rebuild lists those that were on the list.
    pub(super) async fn check_registration(&self) -> Result<(), Failure> {
        let noted = self.on_store(|store| Ok::<_, StoreError>(store.caught_up_as())).await?;
        let Some(noted) = noted else { return Ok(()) };
        let registered = self.registration().await?;
        if registered == Some(noted) {
            return Ok(());
        }
        self.catching_up.is_due();
        let epoch = |revision: u64| revision / REVISIONS_PER_EPOCH;
        if registered.is_none_or(|registered| epoch(registered) == epoch(noted)) {
            self.on_store(|store| store.note_behind()).await?;
            tracing::warn!("this node was off the list of nodes: it catches up anew");
        }
        Ok(())
    }

    /// The revision of this node's entry in the catalogue.
    async fn registration(&self) -> Result<Option<u64>, Failure> {
        let key = format!("{NODES}{}", self.settings.name);
        Ok(self.catalogue().get(&key).await?.map(|entry| entry.revision))
    }

    pub(super) async fn catch_up_for(&self, call: CatchUp) -> Result<(), Failure> {
        self.catch_up(call.without.as_ref()).await
    }

    /// Keys first, then graves: a removal that is forgotten before its key is read has left its graves by then.
    async fn catch_up(&self, without: Option<&PeerName>) -> Result<(), Failure> {
        let _alone = self.catching_up.alone.lock().await;
        let catalogue = self.catalogue();
        let epoch = catalogue.epoch();
        let not_registered = || {
            let text = format!("node {} is not registered", self.settings.name);
            failure(Kind::Unavailable, text)
        };
        let registered = self.registration().await?.ok_or_else(not_registered)?;
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let nodes: Vec<_> = nodes.filter(|node| Some(&node.name) != without).collect();
        let marked = self.on_store(marked).await?;
        let committed = self.keep_what_is_committed(&*catalogue, epoch, &marked.saves).await?;
        if catalogue.get(NOTHING_FORGOTTEN).await?.is_none() {
            self.gather_graves(&nodes, epoch, &marked.codes, &committed).await?;
        }
        if self.registration().await? != Some(registered) {
            return Err(not_registered());
        }
        let was = self.store.standing();
        self.on_store(move |store| store.note_caught_up(epoch, registered)).await?;
        if was != Standing::CaughtUp {
            tracing::info!(%epoch, "this node knows what is committed and what was removed");
        }
        Ok(())
    }

    /// Keeps a mark of each save that is committed or decided, and answers with those; keeps it of each that is being removed.
    async fn keep_what_is_committed(
        &self,
        catalogue: &dyn Catalogue,
        epoch: Epoch,
        marked: &BTreeSet<SaveId>,
    ) -> Result<BTreeSet<SaveId>, Failure> {
        let (mut wanted, mut removed) = (BTreeSet::new(), Vec::new());
        let mut note = |removing: &Removing| {
            if removing.reason != RemoveReason::Aborted {
                removed.push(removing.save);
            }
        };
        let mut checkpoints = Walk::over(catalogue, CHECKPOINTS);
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
                    self.mark_here(catalogue, epoch, saved).await?;
                }
            }
        }
        let mut orphans = Walk::over(catalogue, ORPHANS);
        while let Some((key, entry)) = orphans.next().await? {
            note(&parse(&key, &entry.value)?);
        }
        self.entomb_here(removed).await?;
        Ok(wanted)
    }

    /// One mark of a save, of its first shard.
    async fn mark_here(
        &self,
        catalogue: &dyn Catalogue,
        epoch: Epoch,
        saved: Saved,
    ) -> Result<(), Failure> {
        // Without a root it has been removed and forgotten since its step was read.
        let Some((root, _)) = read::<ShardRoot>(catalogue, &root_key(saved.save, 0)).await? else {
            return Ok(());
        };
        let save = saved.save;
        let mark = CommitMark { cluster: self.settings.cluster, saved, root };
        match self.put_mark(PutMark { bytes: mark.to_bytes()?, epoch }).await {
            // Removed meanwhile. Of an epoch that is over nothing is noted in the end.
            Err(error) if error.kind == Kind::Fenced => {
                tracing::info!(%save, %error, "not marked here");
                Ok(())
            }
            marked => marked,
        }
    }

    /// Asks the other storage nodes for what they know was removed. What was `committed` when this began was not, whatever a node has of a
    /// removal that was undone; its removal since then asks this node, too.
    async fn gather_graves(
        &self,
        nodes: &[NodeRecord],
        epoch: Epoch,
        codes: &BTreeSet<(u8, u8)>,
        committed: &BTreeSet<SaveId>,
    ) -> Result<(), Failure> {
        let others: Vec<NodeRecord> =
            nodes.iter().filter(|node| node.name != self.settings.name).cloned().collect();
        let mut answers = self.standings(&others).await;
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
            return Err(failure(Kind::Unavailable, text));
        }
        answers.retain(|(node, _)| node.storage);
        let mut heard = BTreeSet::from([self.settings.name.clone()]);
        for (node, _) in &answers {
            match self.keep_graves_of(node, committed).await {
                Ok(()) => {
                    heard.insert(node.name.clone());
                }
                Err(error) => {
                    tracing::info!(node = %node.name, %error, "what it removed is not known");
                }
            }
        }
        answers.push((self.record(), self.standing().await?));
        let mut quorum = Quorum::of_list(nodes, &answers);
        quorum.bound(codes.iter().chain(&self.settings.codes).copied());
        let is_all = nodes.iter().all(|node| !node.storage || heard.contains(&node.name));
        match quorum.check(|name| heard.contains(name)) {
            Err(too_few) if !is_all => Err(failure(Kind::Unavailable, too_few.to_string())),
            _ => Ok(()),
        }
    }

    async fn keep_graves_of(
        &self,
        node: &NodeRecord,
        committed: &BTreeSet<SaveId>,
    ) -> Result<(), Failure> {
        let mut after = None;
        loop {
            let to = address(&node_address(node));
            let mut page = self.caller.call_within(&to, &ListGraves { after }, PAGE_LIMIT).await?;
            // A page goes on behind the one before; anything else would never end.
            let last = page.last().copied().filter(|last| after.is_none_or(|after| *last > after));
            let Some(last) = last else { return Ok(()) };
            after = Some(last);
            page.retain(|save| !committed.contains(save));
            self.entomb_here(page).await?;
        }
    }

    /// Keeps it that these saves were removed; their files here, if there are any, wait for a sweep.
    async fn entomb_here(&self, saves: Vec<SaveId>) -> Result<(), Failure> {
        let removed = saves.clone();
        self.on_store(move |store| store.entomb_all(removed)).await?;
        saves.into_iter().for_each(|save| self.cache_tombstone(save, true));
        Ok(())
    }

    pub(super) async fn list_graves(&self, call: ListGraves) -> Result<Vec<SaveId>, Failure> {
        self.on_store(move |store| graves(store, call.after, GRAVES_PER_PAGE)).await
    }

    pub(super) async fn damaged_marks(&self) -> Result<Vec<SaveId>, Failure> {
        let damaged = self.on_store(inventory::damaged_marks).await?;
        if damaged.len() > MAX_DAMAGED {
            let text = format!("commit marks of {} saves do not parse here", damaged.len());
            return Err(failure(Kind::Corrupt, text));
        }
        if !damaged.is_empty() {
            tracing::warn!(
                saves = damaged.len(),
                "commit marks do not parse: they are written again"
            );
            self.catching_up.is_due();
        }
        Ok(damaged)
    }
}

fn is_of_an_older_program(answer: &StandingAnswer) -> bool {
    answer.standing == Standing::Unknown && answer.epoch == Epoch::default()
}

/// The saves that are marked here.
fn marked(store: &Store) -> Result<Marked, StoreError> {
    let mut known = Marked::default();
    let mut after = None;
    loop {
        let page = inventory::marks(store, after, GRAVES_PER_PAGE)?;
        for found in page.saves {
            known.saves.insert(found.saved.save);
            known.codes.insert((found.n, found.k));
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(known),
        }
    }
}

/// Saves that were removed, whether their files are swept here or not.
fn graves(store: &Store, after: Option<SaveId>, limit: usize) -> Result<Vec<SaveId>, StoreError> {
    let mut saves: BTreeSet<SaveId> = store.list_graves(after, limit)?.into_iter().collect();
    let from = after.map(|after| ShardId::new(after, u32::MAX));
    for shard in store.shards(from)?.filter(|shard| shard.index() == u32::MAX) {
        if store.get_small(save_scope(shard.save()), TOMBSTONE)?.is_some() {
            saves.insert(shard.save());
        }
    }
    Ok(saves.into_iter().take(limit).collect())
}
