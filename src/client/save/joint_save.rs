//! Saving a step together with other writers: join, announcement, upload, completion, the index,
//! and the commit (docs/semantics.md, 3).

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{Either, select};
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::save_decisions::{NewShard, SaveCode};
use super::save_session::{RESTARTS, SHARDS_AT_ONCE, SaveRestarts, SaveSession, can_be_epoch_end};
use super::shard_upload::ShardParameters;
use super::stall_timer::{PAUSES, SaveProgress, StallTimer};
use super::writer_watch::WriterWatch;
use crate::client::{Client, ClientError, ProgressFn};
use crate::format::joint_save::{JointSave, MAX_REASON_BYTES};
use crate::format::records::ShardRoot;
use crate::id::{LaunchId, NodeId, SaveId, ShardName, StepRef};
use crate::kind::ErrorKind;
use crate::pipeline::upload::ShardSource;
use crate::wire::calls::{
    AbortSave, BeginSaveAnswer, CompletedShards, JoinSave, JoinSaveAnswer, JoinedSave,
    ListCompletedShards, WriterReport,
};

/// Number of reports of a writer within a lease period.
const REPORTS_A_LEASE: u32 = 4;
/// The longest interval between two reports of a writer, for leases of any length.
const MAX_REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of reports of all writers of a save in a second. Each of them is a change of the
/// catalogue.
const REPORTS_A_SECOND: u32 = 25;
/// Minimum number of reports of a writer within a stall period.
const REPORTS_A_STALL: u32 = 8;

/// A writer of a joint save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JointWriter {
    /// The launch.
    pub launch: LaunchId,
    /// The writer's number, from 0.
    pub writer: u32,
    /// The number of writers.
    pub writers: u32,
    /// How long a save waits for writers that make no progress.
    pub stall: Duration,
}

/// The decisions of a writer of a joint save. [`Client::save_jointly`] calls these methods, and
/// calls them again if the save starts again.
#[async_trait]
pub trait JointDecisions: Send + Sync {
    /// Records that the writer takes part in `save`. An error of this method ends the writer's
    /// attempt to save the step.
    fn note_save(&self, save: SaveId) -> io::Result<()>;

    /// Cuts the writer's content into shards that fit the code. The same content and code must give
    /// the same shards.
    fn cut_shards(&self, code: SaveCode) -> Result<Vec<Arc<dyn ShardSource>>, ClientError>;

    /// Returns the name of the shard with this number in the save.
    fn name_shard(&self, number: u32) -> Result<ShardName, ClientError>;

    /// Decides whether the writer's shards may be completed. Called when all their bytes are stored.
    /// The implementation calls `count` after each part of the content that it has checked; the
    /// number of these calls is reported as progress. An error aborts the save; its text becomes the
    /// reason.
    async fn approve_shards(&self, count: &(dyn Fn() + Send + Sync)) -> Result<(), String>;

    /// Fails if the writer no longer wants to save the step. The error aborts the save; its text
    /// becomes the reason.
    fn ensure_wanted(&self) -> Result<(), String>;

    /// Notes that the save waits for `writers`, and for how long none of the writers has made
    /// progress. If `writers` is empty, the save waits for no writer.
    fn note_missing(&self, writers: &[u32], unchanged: Duration);

    /// Notes that no report of `writers`, whose shards are not complete, has come for three intervals
    /// between reports. Called after each report of this writer, with an empty list if there are none.
    fn note_silent(&self, writers: &[u32]);

    /// Returns the index of the save. The index must depend only on the data shards; `data` has
    /// their roots in order.
    async fn build_index(&self, data: Vec<ShardRoot>) -> Result<NewShard, ClientError>;
}

/// The end of an attempt.
enum AttemptEnd {
    Committed(SaveId),
    /// The save is over and was not committed, as far as is known.
    Over,
}

/// A writer at work on a step: the arguments of [`Client::save_jointly`].
pub(super) struct JointWork<'a> {
    step_ref: StepRef<'a>,
    writer: JointWriter,
    replace: Option<SaveId>,
    pub(super) decisions: &'a dyn JointDecisions,
}

impl JointWork<'_> {
    fn ensure_wanted(&self) -> Result<(), ClientError> {
        self.decisions.ensure_wanted().map_err(|why| ClientError::CalledOff { why })
    }
}

impl Client {
    /// Saves the part of a step that this writer has, together with the other writers of its launch.
    /// `replace` is the committed save of another launch that may be replaced. Returns the save when
    /// it is committed and visible.
    ///
    /// # Errors
    /// [`ClientError::WritersMissing`] if the writers made no progress for too long,
    /// [`ClientError::WriterDropped`] if a writer has dropped the step, and
    /// [`ClientError::JointSaveOver`] if each attempt ended without a commit. Once `note_save` has
    /// returned, an error aborts the save if it is open, except `WriterDropped` and errors of kind
    /// `Fenced`.
    pub async fn save_jointly(
        &self,
        step_ref: StepRef<'_>,
        writer: JointWriter,
        replace: Option<SaveId>,
        decisions: Arc<dyn JointDecisions>,
        progress: ProgressFn,
    ) -> Result<SaveId, ClientError> {
        let work = JointWork { step_ref, writer, replace, decisions: &*decisions };
        let mut restarts = SaveRestarts::default();
        loop {
            let joins = WriterReport::Joins;
            work.ensure_wanted()?;
            let joined = match self.join_save(&work, joins, &restarts.avoid).await? {
                JoinSaveAnswer::Committed { save } => return Ok(save),
                JoinSaveAnswer::Open(joined) => *joined,
                JoinSaveAnswer::Over => return Err(ClientError::JointSaveOver),
            };
            let save = joined.joint.save;
            decisions.note_save(save).map_err(|source| ClientError::SaveId { source })?;
            let mut session = self.start_session(step_ref, describe(&joined)).await?;
            let lease = self.spawn_lease_keeper(&session.begun);
            let ended = session.save_part_and_await_end(&work, &progress).await;
            drop(lease);
            let error = match ended {
                Ok(AttemptEnd::Committed(save)) => return Ok(save),
                Ok(AttemptEnd::Over) => None,
                Err(error @ ClientError::WriterDropped { .. }) => return Err(error),
                Err(error) => Some(error),
            };
            restarts.count += 1;
            if let Some(error) = error {
                match session.find_end_after_failure(&work, &error).await {
                    Ok(Some(AttemptEnd::Committed(save))) => return Ok(save),
                    Ok(Some(AttemptEnd::Over)) => {}
                    Ok(None) => {
                        session.abort_and_prepare_restart(error, &mut restarts).await?;
                        continue;
                    }
                    Err(unknown) => {
                        let restart = session.abort_and_prepare_restart(error, &mut restarts);
                        restart.await.map_err(|error| error_while_unknown(error, unknown))?;
                        continue;
                    }
                }
            }
            if restarts.count > RESTARTS {
                return Err(ClientError::JointSaveOver);
            }
            // Writers that abort in turns would otherwise open one save after the other.
            self.caller().clock().sleep(Duration::from_millis(joined.lease_ms)).await;
        }
    }

    /// Tells the other writers of a launch that this writer has dropped the step, and why; only the
    /// first [`MAX_REASON_BYTES`] of `why` are sent. Returns `true` if no further call is needed: all
    /// writers have dropped the step, or its save is committed or over. Returns `false` if the call
    /// has to be repeated.
    pub async fn report_step_dropped(
        &self,
        step_ref: StepRef<'_>,
        writer: JointWriter,
        why: &str,
    ) -> Result<bool, ClientError> {
        let StepRef { job, step } = step_ref;
        let JointWriter { launch, writer, writers, .. } = writer;
        let mut reason = why.to_owned();
        reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
        let (job, report) = (job.clone(), WriterReport::DropsBecause(reason));
        let (replace, avoid) = (None, Vec::new());
        let mut call = JoinSave { job, step, launch, writer, writers, report, replace, avoid };
        let answer = match self.call_gateway(&call).await {
            // A gateway of an older version does not know reasons.
            Err(error) if error.kind() == ErrorKind::Invalid => {
                call.report = WriterReport::Drops;
                self.call_gateway(&call).await?
            }
            answer => answer?,
        };
        Ok(match answer {
            JoinSaveAnswer::Open(joined) => joined.joint.is_dropped_by_all(),
            JoinSaveAnswer::Committed { .. } | JoinSaveAnswer::Over => true,
        })
    }

    /// Aborts a save if it is open. Does nothing if it is decided, committed or over.
    pub async fn abort_if_open(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
    ) -> Result<(), ClientError> {
        let (job, step) = (step_ref.job.clone(), step_ref.step);
        match self.call_gateway(&AbortSave { job, step, save }).await {
            Err(error) if error.kind() == ErrorKind::Exists => Ok(()),
            aborted => aborted,
        }
    }

    /// Returns whether a save that this client has joined before was committed.
    pub async fn is_joint_save_committed(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
    ) -> Result<bool, ClientError> {
        let (job, step) = (step_ref.job.clone(), step_ref.step);
        let call = ListCompletedShards { job, step, save, first: u32::MAX };
        Ok(self.call_gateway(&call).await? == CompletedShards::Committed)
    }

    async fn join_save(
        &self,
        work: &JointWork<'_>,
        report: WriterReport,
        avoid: &[NodeId],
    ) -> Result<JoinSaveAnswer, ClientError> {
        let JointWork { step_ref, writer, replace, .. } = *work;
        let StepRef { job, step } = step_ref;
        let JointWriter { launch, writer, writers, .. } = writer;
        let (job, avoid) = (job.clone(), avoid.to_vec());
        let call = JoinSave { job, step, launch, writer, writers, report, replace, avoid };
        self.call_gateway(&call).await
    }
}

fn describe(joined: &JoinedSave) -> BeginSaveAnswer {
    let JoinedSave { joint, generation, lease_ms, nodes } = joined;
    BeginSaveAnswer {
        save: joint.save,
        generation: *generation,
        lease: joint.lease,
        lease_ms: *lease_ms,
        n: joint.n,
        k: joint.k,
        block_bytes: joint.block_bytes,
        nodes: nodes.clone(),
    }
}

fn parameters_of(joint: &JointSave, index: u32, shard_count: u32) -> ShardParameters {
    let (ring, fingerprint_key) = (joint.ring_of(index), joint.fingerprint_key(index));
    ShardParameters { index, shard_count, ring, fingerprint_key }
}

impl SaveSession {
    /// Saves this writer's part of a save that was joined, and waits for the end of the save.
    async fn save_part_and_await_end(
        &mut self,
        work: &JointWork<'_>,
        progress: &ProgressFn,
    ) -> Result<AttemptEnd, ClientError> {
        let decisions = work.decisions;
        let clock = self.client.caller().clock().clone();
        let mut watch = WriterWatch::new(clock, self.report_interval(work), work.writer.writer);
        let BeginSaveAnswer { n, k, block_bytes, .. } = self.begun;
        let sources = decisions.cut_shards(SaveCode { n, k, block_bytes })?;
        let own_count = u32::try_from(sources.len()).unwrap_or(u32::MAX);
        let joint = match self.announce_and_await_writers(work, own_count, &mut watch).await? {
            Ok(joint) => joint,
            Err(end) => return Ok(end),
        };
        let (Some(total), Some(first)) =
            (joint.shard_count(), joint.first_shard(work.writer.writer as usize))
        else {
            return Ok(AttemptEnd::Over);
        };
        let mut shards = Vec::with_capacity(sources.len());
        for (number, source) in (first..).zip(sources) {
            shards.push((number, NewShard { name: decisions.name_shard(number)?, source }));
        }
        self.set_progress_callback(
            shards.iter().map(|(_, new)| new.source.len_bytes()).sum(),
            progress,
        );
        let (session, progress_of_all) = (&*self, AtomicU64::new(0));
        let uploads = shards.iter().map(|(number, shard)| {
            session.upload_shard(parameters_of(&joint, *number, total), shard)
        });
        let uploads: Vec<_> = uploads.collect();
        let uploads = stream::iter(uploads).buffered(SHARDS_AT_ONCE).try_collect();
        let part = async {
            let roots: Vec<ShardRoot> = uploads.await?;
            let count = || {
                session.checked_parts.fetch_add(1, Ordering::Relaxed);
            };
            // Ask before the shards are completed: another writer commits as soon as all shards are
            // complete.
            let approved = decisions.approve_shards(&count).await;
            approved.map_err(|why| ClientError::CalledOff { why })?;
            for root in roots {
                let complete = || session.complete_shard(root.clone());
                session.repeat_after_catalogue_is_back(complete).await?;
            }
            session.commit_when_complete(work, &joint, &progress_of_all).await
        };
        let reports = session.report_until_end(work, own_count, &mut watch, &progress_of_all);
        match select(pin!(part), pin!(reports)).await {
            Either::Left((end, _)) | Either::Right((end, _)) => end,
        }
    }

    fn lease_period(&self) -> Duration {
        Duration::from_millis(self.begun.lease_ms)
    }

    /// Returns the interval between two reports of a writer: a quarter of a lease period, but all
    /// writers together make at most [`REPORTS_A_SECOND`].
    fn report_interval(&self, work: &JointWork<'_>) -> Duration {
        let JointWriter { writers, stall, .. } = work.writer;
        let of_lease = (self.lease_period() / REPORTS_A_LEASE).min(MAX_REPORT_INTERVAL);
        let of_writers = Duration::from_secs(1) * writers / REPORTS_A_SECOND;
        of_lease.max(of_writers).min(stall / REPORTS_A_STALL)
    }

    /// Returns the progress that this writer reports: the MiB that it has sent, and the parts of its
    /// content that it has checked since.
    fn reported_progress(&self) -> u32 {
        let checked = self.checked_parts.load(Ordering::Relaxed);
        let progress = (self.sent_bytes.load(Ordering::Relaxed) >> 20).saturating_add(checked);
        progress.min(u32::MAX.into()) as u32
    }

    /// Reports the number of this writer's shards and its progress, if a report is due, and looks at
    /// the other writers. Returns the save's record, or the end of the save.
    async fn report(
        &self,
        work: &JointWork<'_>,
        shards: u32,
        watch: &mut WriterWatch,
    ) -> Result<Result<JointSave, AttemptEnd>, ClientError> {
        let save = self.begun.save;
        let (progress, reports) = watch.next_report(|| self.reported_progress());
        let report = WriterReport::Reports { save, shards, progress, reports };
        let joint = match self.client.join_save(work, report, &[]).await? {
            JoinSaveAnswer::Committed { save } => return Ok(Err(AttemptEnd::Committed(save))),
            JoinSaveAnswer::Open(joined) => joined.joint,
            JoinSaveAnswer::Over => return Ok(Err(AttemptEnd::Over)),
        };
        // This applies even if `joint` is the record of another save: a writer that drops a step
        // marks the save that is open then.
        if let Some((writer, reason)) = joint.first_drop() {
            let reason = reason.to_owned();
            return Err(ClientError::WriterDropped { writer, reason });
        }
        if joint.save != save {
            return Ok(Err(AttemptEnd::Over));
        }
        self.note_silent_writers(work, &joint, watch).await;
        Ok(Ok(joint))
    }

    /// Announces the number of this writer's shards until all writers have announced theirs.
    /// Returns the save's record then, or the end of the save.
    async fn announce_and_await_writers(
        &self,
        work: &JointWork<'_>,
        shards: u32,
        watch: &mut WriterWatch,
    ) -> Result<Result<JointSave, AttemptEnd>, ClientError> {
        let clock = self.client.caller().clock().clone();
        let longest_pause = PAUSES.1.min(self.report_interval(work));
        let mut timer = StallTimer::new(clock, work.writer.stall, longest_pause);
        loop {
            let joint = match self.report(work, shards, watch).await {
                Ok(Ok(joint)) => joint,
                Ok(end) => return Ok(end),
                Err(error) if error.kind().is_transient() => {
                    timer.pause(Vec::new()).await.map_err(|_| error)?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let missing = joint.unknown_writers();
            let announced = joint.writers.len() - missing.len();
            let unchanged = timer.note(SaveProgress { announced, progress: 0, complete: 0 });
            work.ensure_wanted()?;
            work.decisions.note_missing(&missing, unchanged);
            if missing.is_empty() {
                return Ok(Ok(joint));
            }
            timer.pause(missing).await?;
        }
    }

    /// Reports the progress of this writer again and again, and keeps that of all writers in
    /// `progress_of_all`. Returns only when the save is over for this writer.
    async fn report_until_end(
        &self,
        work: &JointWork<'_>,
        shards: u32,
        watch: &mut WriterWatch,
        progress_of_all: &AtomicU64,
    ) -> Result<AttemptEnd, ClientError> {
        let interval = self.report_interval(work);
        loop {
            self.client.caller().clock().sleep(interval).await;
            work.ensure_wanted()?;
            match self.report(work, shards, watch).await {
                Ok(Ok(joint)) => progress_of_all.store(joint.progress(), Ordering::Relaxed),
                Ok(Err(end)) => return Ok(end),
                Err(error @ ClientError::WriterDropped { .. }) => return Err(error),
                // The rest of the work goes on, and finds out by itself whether the save is still open.
                Err(error) => tracing::debug!(%error, "cannot report the progress of a save"),
            }
        }
    }

    /// Waits until all data shards are complete, saves the index, and commits. Writer 0 does so at
    /// once. Writer i does so after i lease periods without progress, or after half a stall period
    /// if that is shorter. Returns the end of the save.
    async fn commit_when_complete(
        &self,
        work: &JointWork<'_>,
        joint: &JointSave,
        progress_of_all: &AtomicU64,
    ) -> Result<AttemptEnd, ClientError> {
        let save = joint.save;
        let index = joint.shard_count().unwrap_or_default().saturating_sub(1);
        let turn = self.lease_period() * work.writer.writer;
        let turn = turn.min(work.writer.stall / 2);
        let clock = self.client.caller().clock().clone();
        let mut timer = StallTimer::new(clock, work.writer.stall, PAUSES.1);
        let mut roots: Vec<ShardRoot> = Vec::new();
        loop {
            let complete = roots.len();
            match self.list_completed_shards(work, complete as u32).await {
                Ok(CompletedShards::Committed) => return Ok(AttemptEnd::Committed(save)),
                Ok(CompletedShards::Over) => return Ok(AttemptEnd::Over),
                Err(error) if error.kind().is_transient() => {
                    timer.pause(Vec::new()).await.map_err(|_| error)?;
                    continue;
                }
                Err(error) => return Err(error),
                Ok(CompletedShards::Open { roots: page }) => {
                    for root in page {
                        if root.index as usize == roots.len() {
                            roots.push(root);
                        }
                    }
                }
            }
            if roots.len() > complete && roots.len() < index as usize {
                // There may be another page.
                continue;
            }
            let progress = progress_of_all.load(Ordering::Relaxed);
            let unchanged =
                timer.note(SaveProgress { announced: 0, progress, complete: roots.len() });
            let is_whole = roots.len() >= index as usize;
            let missing =
                if is_whole { Vec::new() } else { find_first_incomplete_writer(joint, &roots) };
            work.ensure_wanted()?;
            work.decisions.note_missing(&missing, unchanged);
            if is_whole && unchanged >= turn {
                roots.truncate(index as usize);
                return self.commit_with_index(work, joint, roots).await;
            }
            timer.pause(missing).await?;
        }
    }

    /// Uploads the index of the data shards as the save's last shard, and commits the save.
    async fn commit_with_index(
        &self,
        work: &JointWork<'_>,
        joint: &JointSave,
        data: Vec<ShardRoot>,
    ) -> Result<AttemptEnd, ClientError> {
        let index = data.len() as u32;
        let shard = work.decisions.build_index(data).await?;
        let root = self.upload_shard(parameters_of(joint, index, index + 1), &shard).await?;
        self.repeat_after_catalogue_is_back(|| self.complete_shard(root.clone())).await?;
        let shards = index as usize + 1;
        let saved = self.repeat_after_catalogue_is_back(|| self.commit_save(shards)).await?;
        Ok(AttemptEnd::Committed(saved.save))
    }

    pub(super) async fn list_completed_shards(
        &self,
        work: &JointWork<'_>,
        first: u32,
    ) -> Result<CompletedShards, ClientError> {
        let StepRef { job, step } = work.step_ref;
        let (job, save) = (job.clone(), self.begun.save);
        self.client.call_gateway(&ListCompletedShards { job, step, save, first }).await
    }

    /// Returns the end of the save after this writer's part has failed, or `None` if the save is
    /// still open: the failure is then the writer's own. Aborts a save of an epoch that is over,
    /// because nodes refuse that epoch.
    ///
    /// # Errors
    /// The error of the call that asks whether the save is still open.
    async fn find_end_after_failure(
        &self,
        work: &JointWork<'_>,
        error: &ClientError,
    ) -> Result<Option<AttemptEnd>, ClientError> {
        let save = self.begun.save;
        if can_be_epoch_end(error.kind()) && self.has_epoch_ended(error.kind()).await {
            // If it is decided all the same, the next join says so.
            self.abort_save().await;
            return Ok(Some(AttemptEnd::Over));
        }
        Ok(match self.list_completed_shards(work, u32::MAX).await? {
            CompletedShards::Committed => Some(AttemptEnd::Committed(save)),
            CompletedShards::Over => Some(AttemptEnd::Over),
            CompletedShards::Open { .. } => None,
        })
    }
}

/// Returns the error of a save that failed with `failed`, if the call that asks how the save ended
/// failed with `unknown`. The other writers may have committed the save. So if the caller would
/// drop the step after `failed`, and `unknown` is transient, this returns `unknown`, after which
/// the caller asks again.
fn error_while_unknown(failed: ClientError, unknown: ClientError) -> ClientError {
    let is_stall = matches!(failed, ClientError::WritersMissing { .. });
    let is_final = is_stall || !failed.kind().is_transient();
    if is_final && unknown.kind().is_transient() { unknown } else { failed }
}

/// Returns the writer of the first shard that is not complete, as a list of at most one writer.
fn find_first_incomplete_writer(joint: &JointSave, complete: &[ShardRoot]) -> Vec<u32> {
    let next = complete.len() as u32;
    let ends_after =
        |writer: &u32| joint.first_shard(*writer as usize + 1).is_some_and(|end| end > next);
    (0..joint.writers.len() as u32).find(ends_after).into_iter().collect()
}
