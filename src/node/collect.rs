//! What the catalogue's host finishes for others: saves whose client is gone, saves that were decided and not published,
//! removals; and it applies the policy.
//!
//! Once per lease period it walks over all checkpoints. What cannot go on now, because nodes are away, holds up nothing else.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream;

use super::Node;
use super::orphans::Compared;
use super::policy::{Looked, Pending, Survey};
use super::removal::Removed;
use super::waits::Waits;
use super::walk::Walk;
use crate::catalogue::Catalogue;
use crate::catalogue::records::{CHECKPOINTS, checkpoint_key, parse, parse_checkpoint_key, update};
use crate::format::records::{Checkpoint, RemoveReason, Removing, Writing};
use crate::id::{Job, LeaseId, SaveId, Step};
use crate::wire::Failure;

/// Removals that are tried in one round.
const REMOVALS_A_ROUND: usize = 16;
/// Of these, tried at once.
const REMOVALS_AT_ONCE: usize = 4;

impl Node {
    /// Rounds without end.
    pub(super) async fn collect(self: Arc<Self>) {
        let mut decided = HashSet::new();
        let mut removals = Waits::new(self.settings.lease);
        let mut looked = Looked::default();
        let mut compared = Compared::default();
        loop {
            self.clock.sleep(self.settings.lease).await;
            if !self.serves() {
                continue;
            }
            let mut survey = match self.survey(&mut decided, &mut removals).await {
                Ok(survey) => survey,
                Err(error) => {
                    tracing::warn!(%error, "collecting what was left half done");
                    continue;
                }
            };
            removals.end_round();
            let mut due = std::mem::take(&mut survey.due);
            match self.apply_policy(&survey, &removals, &mut looked).await {
                Ok(retired) => due.extend(retired),
                Err(error) => tracing::warn!(%error, "applying the policy"),
            }
            self.go_on_removing(due, &mut removals).await;
            let catalogue = self.catalogue();
            if let Err(error) = self.compare_holdings(&*catalogue, &mut compared).await {
                tracing::warn!(%error, "comparing what nodes hold with the catalogue");
            }
            if let Err(error) = self.collect_orphans(&*catalogue).await {
                tracing::warn!(%error, "removing what a lost catalogue left");
            }
        }
    }

    async fn survey(
        self: &Arc<Self>,
        decided: &mut HashSet<SaveId>,
        removals: &mut Waits,
    ) -> Result<Survey, Failure> {
        let catalogue = self.catalogue();
        let (mut survey, mut still) = (Survey::default(), HashSet::new());
        let mut checkpoints = Walk::over(&*catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            let checkpoint: Checkpoint = parse(&key, &entry.value)?;
            let Some((job, step)) = parse_checkpoint_key(&key) else { continue };
            for entry in checkpoint.removing {
                survey.removing += 1;
                let is_due = removals.is_due(entry.save, self.clock.now());
                if is_due && survey.due.len() < REMOVALS_A_ROUND {
                    survey.due.push(Pending { job: job.clone(), step, entry });
                }
            }
            if let Some(Writing::Decided { saved }) = &checkpoint.writing {
                still.insert(saved.save);
            }
            if let Some(writing) = checkpoint.writing
                && let Err(error) = self.collect_save(&job, step, writing, decided).await
            {
                tracing::warn!(%job, %step, %error, "a save that was left half done goes on later");
            }
            if checkpoint.committed.is_some() {
                *survey.committed.entry(job).or_default() += 1;
            }
        }
        *decided = still;
        Ok(survey)
    }

    async fn go_on_removing(&self, due: Vec<Pending>, removals: &mut Waits) {
        let mut tries = stream::iter(due)
            .map(|Pending { job, step, entry }| async move {
                let tried = self.removal(&job, step, &entry).await;
                (job, step, entry.save, tried)
            })
            .buffer_unordered(REMOVALS_AT_ONCE);
        while let Some((job, step, save, tried)) = tries.next().await {
            let why = match tried {
                Ok(Removed { is_complete: true, .. }) => {
                    removals.ended(save);
                    continue;
                }
                Ok(Removed { answer, .. }) => {
                    let names: Vec<&str> =
                        answer.waiting.iter().map(|name| name.as_str()).collect();
                    format!("its files wait to be removed: {}", names.join(", "))
                }
                Err(error) => error.to_string(),
            };
            tracing::info!(%job, %step, why, "a removal goes on later");
            removals.failed(save, (&job, step), self.clock.now(), why);
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
