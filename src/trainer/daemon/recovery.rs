//! Recovery at start: restores the segments, steps and jobs of the previous daemon
//! (docs/staging.md, 8).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::StagingDaemon;
use super::core::{Effect, Phase, RestoredStep, StepKey};
use super::folder::FolderError;
use super::records::{OwnerRecord, SaveState};
use crate::client::ClientError;
use crate::id::{Job, SaveId, SegmentId, Step, StepRef};
use crate::kind::ErrorKind;
use crate::trainer::mapping::Readable;
use crate::trainer::segment::read_header;

/// Pause between two attempts to remove an abandoned step.
const REMOVE_AGAIN: Duration = Duration::from_secs(5);

impl StagingDaemon {
    /// Restores the state in the staging folder. Steps that all ranks had staged are restored, and
    /// saved unless they are committed; unfinished fillings are dropped.
    pub(super) fn recover(self: &Arc<Self>) -> Result<(), FolderError> {
        let (jobs, steps) = (self.folder.jobs()?, self.folder.steps()?);
        let hosts = self.folder.hosts()?;
        let segments: BTreeMap<SegmentId, OwnerRecord> =
            self.folder.segments()?.into_iter().collect();
        let mut headers: BTreeMap<StepKey, Vec<(u32, SegmentId)>> = BTreeMap::new();
        for (id, owner) in &segments {
            let header = self
                .folder
                .open_segment(*id)
                .ok()
                .and_then(|file| Readable::map(&file, owner.len_bytes).ok())
                .and_then(|map| read_header(*id, &map).ok());
            let Some(header) = header else { continue };
            let place = &owner.place;
            if (header.launch, header.rank, header.world) == (place.launch, place.rank, place.world)
            {
                let (job, step) = (place.job.clone(), header.step);
                let key = StepKey { job, step, launch: header.launch, fill: header.fill };
                headers.entry(key).or_default().push((header.rank, *id));
            }
        }
        self.with(|core| {
            for job in jobs {
                core.restore_job(job);
            }
            for record in hosts {
                let launch = record.launch;
                if !core.restore_hosts(record) {
                    core.effects.push(Effect::ForgetHosts(launch));
                }
            }
            for (id, owner) in &segments {
                core.restore_segment(*id, owner.member, &owner.place, owner.len_bytes);
            }
            let mut found = 0;
            for record in steps {
                let key = record.key();
                let staged = headers.remove(&key).unwrap_or_default();
                let is_whole = (0..).zip(&record.segments).all(|(rank, id)| staged.contains(&(rank, *id)));
                let phase = match record.save {
                    SaveState::Unsaved => Phase::Staged,
                    SaveState::Begun { saves } => Phase::Saving { saves },
                    SaveState::Committed { save } => Phase::Committed { save, notes: Vec::new() },
                };
                let parts = (0..).zip(record.segments).collect();
                if is_whole && core.restore_step(key.clone(), RestoredStep { parts, phase }) {
                    found += 1;
                    continue;
                }
                core.tell_dropped(&key, "one of its segments is gone or was filled again");
                tracing::warn!(job = %key.job, step = %key.step, "the step is no longer in memory, because one of its segments is gone or was filled again, or because it was dropped: a committed step is loaded from the cluster, an uncommitted step is lost");
                self.folder.forget_step(&key);
            }
            for (key, staged) in headers {
                let world = staged.first().and_then(|(_, id)| segments.get(id)).map_or(0, |o| o.place.world);
                let parts: BTreeMap<u32, SegmentId> = staged.iter().copied().collect();
                let is_whole = parts.len() == staged.len() && parts.len() as u32 == world;
                if is_whole
                    && core.may_restore(&key)
                    && core.restore_step(key.clone(), RestoredStep { parts, phase: Phase::Staged })
                {
                    found += 1;
                    core.effects.push(Effect::KeepStep(key));
                } else {
                    // A rank that is a step ahead has staged this step while others still filled it.
                    core.tell_dropped(&key, "its staging daemon ended before all ranks had staged it");
                }
            }
            core.drop_unfinished_fillings(&|id| self.folder.filling_of(id));
            if found > 0 {
                tracing::info!(steps = found, segments = segments.len(), "restored steps from the staging folder");
            }
        });
        for job in self.with(|core| core.jobs_with_abandoned_saves()) {
            tokio::spawn(self.clone().remove_abandoned(job));
        }
        Ok(())
    }

    /// Aborts or removes the abandoned saves of a job, retrying until all are done.
    pub(super) async fn remove_abandoned(self: Arc<Self>, job: Job) {
        while let Err((step, error)) = self.settle_abandoned(&job).await {
            tracing::warn!(%job, %step, %error, "cannot abort or remove an abandoned save: retrying");
            self.clock.sleep(REMOVE_AGAIN).await;
        }
    }

    /// Aborts the saves that the job has abandoned and removes those that are committed, newest
    /// first. Each stays on record until it is aborted or removed, so that nothing resumes from it
    /// after a crash.
    pub(super) async fn settle_abandoned(
        self: &Arc<Self>,
        job: &Job,
    ) -> Result<(), (Step, ClientError)> {
        while let Some((step, save)) = self.with(|core| core.next_abandoned(job)) {
            let failed = |error| (step, error);
            if self.settle(job, step, &[save]).await.map_err(failed)?.is_some() {
                self.remove_abandoned_save(job.at(step), save).await.map_err(failed)?;
            }
            self.with(|core| core.forget_abandoned(job, &(step, save)));
        }
        Ok(())
    }

    /// Removes a committed save that a launch of this host has abandoned, in the name of the newest
    /// launch of the job. Leaves the save if the newest launch has not run on this host, because that
    /// launch may have resumed from the save.
    async fn remove_abandoned_save(
        self: &Arc<Self>,
        step_ref: StepRef<'_>,
        save: SaveId,
    ) -> Result<(), ClientError> {
        let StepRef { job, step } = step_ref;
        let views = self.client.list_steps(Some(job)).await?;
        if !views.iter().any(|view| view.step == step && view.saved.save == save) {
            return Ok(());
        }
        let order = self.client.fetch_launch_order(job).await?;
        let removed = match order.newest().map(|newest| newest.launch) {
            // No launch has registered since the catalogue was rebuilt.
            None => self.client.remove_save(step_ref, save).await,
            Some(newest) if self.with(|core| core.has_run_here(job, newest)) => {
                self.client.remove_launch_step(step_ref, save, newest).await
            }
            Some(_) => return Ok(()),
        };
        match removed {
            // Another task removed it first.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map(drop),
        }
    }
}
