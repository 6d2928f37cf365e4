//! What a node does unasked: it registers and keeps its lease, answers for the catalogue if it hosts it, and the host finishes
//! removals and saves that were left half done.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use tokio::sync::mpsc;

use super::failure::failure;
use super::gateway::renewal;
use super::{MAX_MET, Node};
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::records::{
    ARCHIVINGS, Archiving, CHECKPOINTS, ORPHANS, checkpoint_key, parse, parse_archiving_key,
    parse_checkpoint_key, update,
};
use crate::catalogue::{Catalogue, MAX_PAGE, SetOutcome};
use crate::format::records::{Checkpoint, RemoveReason, Removing, Writing};
use crate::id::{Job, LeaseId, SaveId, Step};
use crate::kind::Kind;
use crate::net::{Peer, Role};
use crate::wire::Failure;
use crate::wire::calls::{
    CatalogueGet, CatalogueList, CatalogueSet, Hello, HelloAnswer, LeaseRevoke, LeaseTouch,
    NodeStatusAnswer, Register, RegisterAnswer, SetAnswer,
};

impl Node {
    pub(super) async fn hello(&self, call: Hello, peer: &Peer) -> Result<HelloAnswer, Failure> {
        if let Some(node) = call.me.filter(|node| peer.role == Role::Node && peer.name == node.name)
        {
            let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
            if met.len() < MAX_MET || met.contains_key(&node.name) {
                met.insert(node.name.clone(), node);
            }
        }
        Ok(HelloAnswer {
            cluster: self.settings.cluster,
            node: self.settings.name.clone(),
            epoch: self.store.epoch(),
            map: self.store.map(),
            catalogue: self.catalogue_home(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    pub(super) async fn status(&self) -> Result<NodeStatusAnswer, Failure> {
        let totals = self.store.totals();
        let space = self.store.space()?;
        let budgets = [
            ("archive", &self.budgets.archive),
            ("save", &self.budgets.save),
            ("restore", &self.budgets.restore),
            ("control", &self.budgets.control),
        ];
        let mut notes: Vec<String> = self.hosting.note().into_iter().collect();
        if totals.quarantined > 0 {
            notes.push(format!("{} files are in quarantine", totals.quarantined));
        }
        Ok(NodeStatusAnswer {
            replicas: (totals.replica_files, totals.replica_bytes),
            pieces: (totals.piece_files, totals.piece_bytes),
            record_bytes: totals.small_bytes,
            quarantined: totals.quarantined,
            disk: (space.total_bytes, space.free_bytes),
            budgets: budgets
                .map(|(name, share)| {
                    (name.to_owned(), share.used_bytes(), share.peak_bytes(), share.total_bytes())
                })
                .to_vec(),
            peak_memory_bytes: crate::clock::peak_memory_bytes(),
            segmentation_offload: self.segmentation_offload,
            catalogue: self.hosted_catalogue().is_some(),
            notes,
        })
    }

    /// Registers, again and again, for as long as the node runs.
    pub(super) async fn keep_registered(self: Arc<Self>) {
        let mut told = false;
        let mut members = None;
        loop {
            match self.catalogue().register(&self.record()).await {
                Ok(answer) => {
                    let noted =
                        self.on_store(move |store| store.note_map(answer.epoch, answer.map));
                    match noted.await {
                        Ok(()) => self.remote.expect(answer.epoch, answer.map),
                        Err(error) => {
                            tracing::error!(%error, "the catalogue that was found is not the cluster's");
                        }
                    }
                    if !told {
                        tracing::info!(node = %self.settings.name, epoch = %answer.epoch, "registered");
                    }
                    told = true;
                    if members != Some((answer.map, answer.members)) {
                        match self.remember_members().await {
                            Ok(()) => members = Some((answer.map, answer.members)),
                            Err(error) => tracing::info!(%error, "the other nodes were not noted"),
                        }
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "not registered");
                    told = false;
                }
            }
            self.runs.give_back_unused();
            self.clock.sleep(renewal(self.settings.lease)).await;
        }
    }

    /// Looks for work that others left, again and again.
    pub(super) async fn keep_looking(self: Arc<Self>) {
        loop {
            self.clock.sleep(renewal(self.settings.lease)).await;
            if let Err(error) = self.take_over().await {
                tracing::warn!(%error, "looking for archivings whose coordinator is gone");
            }
        }
    }

    /// Goes on with archivings whose coordinator's lease is over. Several daemons may try; the compare-and-set lets one through.
    async fn take_over(self: &Arc<Self>) -> Result<(), Failure> {
        let catalogue = self.catalogue();
        for (key, entry) in catalogue.list(ARCHIVINGS, None, MAX_PAGE).await? {
            let archiving: Archiving = parse(&key, &entry.value)?;
            let Some((job, step)) = parse_archiving_key(&key) else { continue };
            if catalogue.lease_touch(archiving.lease, false).await? {
                continue;
            }
            let coordinator = self.coordinator();
            self.spawn(|_| async move {
                // Nobody watches this one: its events go nowhere.
                let (events, _) = mpsc::channel(1);
                match coordinator.archive(&job, step, archiving.options, &events).await {
                    Ok(()) => tracing::info!(%job, %step, "archived after a take-over"),
                    Err(error) => tracing::info!(%job, %step, %error, "a take-over did not finish"),
                }
            });
        }
        Ok(())
    }

    fn hosted(&self) -> Result<Arc<LocalCatalogue>, Failure> {
        self.hosted_catalogue()
            .ok_or_else(|| failure(Kind::Unavailable, "this node does not host the catalogue"))
    }

    pub(super) async fn register(&self, call: Register) -> Result<RegisterAnswer, Failure> {
        Ok(self.hosted()?.register(&call.node).await?)
    }

    pub(super) async fn catalogue_get(
        &self,
        call: CatalogueGet,
    ) -> Result<Option<(Vec<u8>, u64)>, Failure> {
        let entry = self.hosted()?.get(&call.key).await?;
        Ok(entry.map(|entry| (entry.value, entry.revision)))
    }

    pub(super) async fn catalogue_set(&self, call: CatalogueSet) -> Result<SetAnswer, Failure> {
        let outcome = self.hosted()?.set(&call.key, call.expected, call.value).await?;
        Ok(match outcome {
            SetOutcome::Set(revision) => SetAnswer::Set(revision),
            SetOutcome::Other(entry) => {
                SetAnswer::Other(entry.map(|entry| (entry.value, entry.revision)))
            }
        })
    }

    pub(super) async fn catalogue_list(
        &self,
        call: CatalogueList,
    ) -> Result<Vec<(String, Vec<u8>, u64)>, Failure> {
        let page = self.hosted()?.list(&call.prefix, call.after.as_deref(), call.limit).await?;
        Ok(page.into_iter().map(|(key, entry)| (key, entry.value, entry.revision)).collect())
    }

    pub(super) async fn lease_grant(&self) -> Result<(LeaseId, u64), Failure> {
        let (lease, period) = self.hosted()?.lease_grant().await?;
        Ok((lease, period.as_millis() as u64))
    }

    pub(super) async fn lease_touch(&self, call: LeaseTouch) -> Result<bool, Failure> {
        Ok(self.hosted()?.lease_touch(call.lease, call.keep).await?)
    }

    pub(super) async fn lease_revoke(&self, call: LeaseRevoke) -> Result<(), Failure> {
        Ok(self.hosted()?.lease_revoke(call.lease).await?)
    }

    /// The catalogue's host finishes what others left: removals, saves whose client is gone, saves that were decided and not published.
    pub(super) async fn collect(self: Arc<Self>) {
        let mut decided = HashSet::new();
        loop {
            self.clock.sleep(self.settings.lease).await;
            if !self.serves() {
                continue;
            }
            if let Err(error) = self.collect_once(&mut decided).await {
                tracing::warn!(%error, "collecting what was left half done");
            }
        }
    }

    async fn collect_once(self: &Arc<Self>, decided: &mut HashSet<SaveId>) -> Result<(), Failure> {
        let catalogue = self.catalogue();
        let mut still = HashSet::new();
        let mut after: Option<String> = None;
        loop {
            let page = catalogue.list(CHECKPOINTS, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { break };
            after = Some(last.clone());
            for (key, entry) in &page {
                let checkpoint: Checkpoint = parse(key, &entry.value)?;
                let Some((job, step)) = parse_checkpoint_key(key) else { continue };
                if let Some(Writing::Decided { saved }) = &checkpoint.writing {
                    still.insert(saved.save);
                }
                // What cannot go on now, because nodes are away, holds up no other step.
                if let Some(writing) = checkpoint.writing
                    && let Err(error) = self.collect_save(&job, step, writing, decided).await
                {
                    tracing::warn!(%job, %step, %error, "a save that was left half done goes on later");
                }
                for removing in &checkpoint.removing {
                    if let Err(error) = self.removal(&job, step, removing).await {
                        tracing::info!(%job, %step, %error, "a removal goes on later");
                    }
                }
            }
        }
        *decided = still;
        self.collect_orphans(&*catalogue).await
    }

    /// Saves that a rebuilt catalogue knows only as to be removed. One stays on the list until every node has removed it.
    async fn collect_orphans(&self, catalogue: &dyn Catalogue) -> Result<(), Failure> {
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let storage: Vec<_> = nodes.filter(|node| node.storage).collect();
        let mut after: Option<String> = None;
        loop {
            let page = catalogue.list(ORPHANS, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = Some(last.clone());
            for (key, entry) in &page {
                let removing: Removing = parse(key, &entry.value)?;
                // That nobody has a mark is evidence only when everybody has said so.
                if removing.reason == RemoveReason::Aborted
                    && self.is_marked(&storage, removing.save).await != Some(false)
                {
                    tracing::info!(save = %removing.save, "a save without a known mark is kept until all nodes have been asked");
                    continue;
                }
                match self.removal_of_orphan(&removing).await {
                    Ok(true) => {
                        catalogue.set(key, Some(entry.revision), None).await?;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        tracing::info!(save = %removing.save, %error, "a removal goes on later")
                    }
                }
            }
        }
    }

    async fn collect_save(
        self: &Arc<Self>,
        job: &Job,
        step: Step,
        writing: Writing,
        decided: &HashSet<SaveId>,
    ) -> Result<(), Failure> {
        let catalogue = self.catalogue();
        match writing {
            Writing::Open { save, lease, .. } => {
                if catalogue.lease_touch(lease, false).await? {
                    return Ok(());
                }
                self.abandon(&*catalogue, job, step, save, lease).await
            }
            // Seen twice in a row: its gateway is gone, or is at it; publishing twice does no harm.
            Writing::Decided { saved } if decided.contains(&saved.save) => {
                self.publish(job, step, saved).await.map(drop)
            }
            Writing::Decided { .. } => Ok(()),
        }
    }

    async fn abandon(
        &self,
        catalogue: &dyn Catalogue,
        job: &Job,
        step: Step,
        of: SaveId,
        over: LeaseId,
    ) -> Result<(), Failure> {
        let change = |mut checkpoint: Checkpoint| -> Result<Option<Checkpoint>, Failure> {
            match checkpoint.writing.take() {
                Some(Writing::Open { save, generation, lease }) if save == of && lease == over => {
                    let reason = RemoveReason::Aborted;
                    checkpoint.removing.push(Removing { save, generation, reason });
                    Ok(Some(checkpoint))
                }
                _ => Ok(None),
            }
        };
        update(catalogue, &checkpoint_key(job, step), change).await?;
        Ok(())
    }
}
