//! Saves a step that all ranks have staged: checks it, hashes it, sends it, verifies its memory
//! once more, and commits it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::assemble::{
    self, Assembled, Coverage, MAX_SHARD_STRIPES, cut, find_changed, shard_sources,
};
use super::core::{Phase, StepKey};
use super::failure_warnings::FailureWarnings;
use super::folder::FolderError;
use super::records::{SaveState, StepRecord};
use super::trace::{StagingPoint, trace_point};
use super::{StagingDaemon, lock};
use crate::client::{
    ClientError, NewShard, Progress, SaveCode, SaveDecisions, SaveFate, SaveOptions,
};
use crate::format::table::{DATA_SHARD, INDEX_SHARD, Table, launch_of_index};
use crate::id::{IdError, Job, Label, LaunchId, SaveId, ShardName, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, Sample};

/// The first and the longest pause after a failed save.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Returns the name of data shard `number` of a launch's step.
pub fn data_name(launch: LaunchId, number: usize) -> Result<ShardName, IdError> {
    format!("{DATA_SHARD}{launch}/{number}").parse()
}

/// Returns the name of the index of a launch's step.
pub fn index_name(launch: LaunchId) -> Result<ShardName, IdError> {
    format!("{INDEX_SHARD}{launch}").parse()
}

/// The origin of the save that is committed as a step.
pub(super) enum Committed {
    /// The launch itself.
    Own(SaveId),
    /// An older launch of this host. Its save may be replaced.
    Replaceable(SaveId),
    /// Any other origin.
    Other,
    /// The origin is not known: the committed save cannot be read now or is being removed, or none is
    /// committed and another save of the step is open. A later attempt to save the step may succeed.
    Unknown,
}

/// The outcome of an attempt to save a step.
pub(super) enum Attempt {
    Committed {
        save: SaveId,
        notes: Vec<String>,
    },
    /// The step is no longer in memory.
    Gone,
    /// The step can never be saved.
    Failed(Failure),
    /// Other hosts have dropped the step.
    DroppedElsewhere(Failure),
    /// A later attempt may succeed.
    Later(String),
    /// An earlier step of the launch is to be saved first.
    AfterEarlierStep,
    /// The save was refused as fenced, and perhaps the launch is over.
    Fenced(String),
}

impl StagingDaemon {
    /// Saves a step, retrying until it is committed, turns out to be unsavable, or is dropped.
    pub(super) async fn save_step(self: Arc<Self>, key: StepKey) {
        self.save_until_over(&key).await;
        lock(&self.progress).remove(&key);
    }

    async fn save_until_over(self: &Arc<Self>, key: &StepKey) {
        let queue = self.queue_of(&key.job);
        let (mut pause, mut last_reason) = (PAUSES.0, String::new());
        let mut warnings = FailureWarnings::default();
        loop {
            // Steps of a job are saved one at a time, in the order in which they became staged. A
            // failed attempt lets the next step have its turn.
            let turn = queue.lock().await;
            let attempt = match self.attempt(key).await {
                Attempt::Fenced(reason) => self.judge_fenced(key, reason).await,
                attempt => attempt,
            };
            match attempt {
                Attempt::Committed { save, notes } => {
                    trace_point(StagingPoint::Decided, &key.job, key.step);
                    tracing::info!(job = %key.job, step = %key.step, %save, "committed");
                    let keep = self.finish(key, save, notes);
                    // A removal may wait for nodes, and the job's next step must not.
                    drop(turn);
                    if keep > 0 {
                        let _alone = self.trimming.lock().await;
                        self.trim(key, keep).await;
                    }
                    return;
                }
                Attempt::Gone => return,
                Attempt::Failed(failure) => {
                    tracing::error!(job = %key.job, step = %key.step, "the step cannot be saved and is dropped: {failure}");
                    return self.with(|core| core.drop_step(key, failure));
                }
                Attempt::DroppedElsewhere(failure) => {
                    tracing::error!(job = %key.job, step = %key.step, "{failure}");
                    return self.with(|core| core.drop_step_with_other_hosts(key, failure));
                }
                Attempt::Later(reason) | Attempt::Fenced(reason) => {
                    // An outage of hours produces one line, not one for each attempt.
                    if reason != last_reason {
                        tracing::warn!(job = %key.job, step = %key.step, "not saved yet: {reason}");
                        last_reason.clone_from(&reason);
                    }
                    let is_due = warnings.is_due(&reason, self.clock.now());
                    self.with(|core| core.troubled(key, reason, is_due));
                }
                Attempt::AfterEarlierStep => {
                    let reason = "an earlier step of the launch is being saved".to_owned();
                    self.with(|core| core.troubled(key, reason, false));
                }
            }
            drop(turn);
            self.clock.sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    async fn attempt(self: &Arc<Self>, key: &StepKey) -> Attempt {
        let Some(phase) = self.with(|core| core.step(key).map(|step| step.phase.clone())) else {
            return Attempt::Gone;
        };
        if let Some(hosts) = self.with(|core| core.hosts_of(key).cloned()) {
            let earlier = match phase {
                Phase::Saving { saves } => saves,
                _ => Vec::new(),
            };
            return self.attempt_jointly(key, &hosts, &earlier).await;
        }
        // Determine the outcome of earlier saves before another one begins: one of them may be
        // committed.
        if let Phase::Saving { saves } = phase {
            match self.settle(&key.job, key.step, &saves).await {
                Ok(Some(save)) => return Attempt::Committed { save, notes: Vec::new() },
                Ok(None) => self.with(|core| core.settled(key)),
                Err(error) => return Attempt::Later(error.to_string()),
            }
        }
        let step = match self.hashed_step(key).await {
            Ok(Some(step)) => step,
            Ok(None) => return Attempt::Gone,
            Err(failure) if is_final(failure.kind()) => return Attempt::Failed(failure),
            Err(failure) => return Attempt::Later(failure.to_string()),
        };
        match self.send(key, &step, false).await {
            Err(error) if error.kind() == ErrorKind::Exists => match self.committed_by(key).await {
                Committed::Replaceable(_) => match self.send(key, &step, true).await {
                    Err(error) => self.judge(key, &error),
                    Ok(committed) => committed,
                },
                // All saves of this filling were aborted, so the committed save is of another
                // filling.
                Committed::Own(_) | Committed::Other => {
                    Attempt::Failed(failure(key, &error, "save another step, or remove that one"))
                }
                // A save of a previous daemon may still be open; its lease will end.
                Committed::Unknown => Attempt::Later(error.to_string()),
            },
            Err(error) => self.judge(key, &error),
            Ok(committed) => committed,
        }
    }

    /// Determines the outcome of saves of a step. Returns the committed one, if any; all others are
    /// aborted for good.
    pub(super) async fn settle(
        &self,
        job: &Job,
        step: Step,
        saves: &[SaveId],
    ) -> Result<Option<SaveId>, ClientError> {
        let mut committed = None;
        for save in saves {
            if self.client.settle_save(job.at(step), *save).await? == SaveFate::Committed {
                committed = Some(*save);
            }
        }
        Ok(committed)
    }

    /// Determines the origin of the save that is committed as the step. The save of an older launch
    /// of this host may be replaced if its step is later than the newest committed one that this
    /// launch saw.
    pub(super) async fn committed_by(self: &Arc<Self>, key: &StepKey) -> Committed {
        let Ok(shown) = self.client.fetch_committed_step(&key.job, Some(key.step)).await else {
            return Committed::Unknown;
        };
        let save = shown.step.saved.save;
        let is_abandoned = |core: &mut super::core::Core| {
            core.job(&key.job).is_some_and(|job| job.abandoned.contains(&(key.step, save)))
        };
        if self.with(is_abandoned) {
            // The save is being removed.
            return Committed::Unknown;
        }
        let launch = shown.shards.iter().find_map(|(root, _)| launch_of_index(&root.name));
        if launch == Some(key.launch) {
            return Committed::Own(save);
        }
        self.with(|core| {
            let is_later = core.launch(key).is_some_and(|launch| {
                launch.resumed.newest_seen.is_none_or(|seen| key.step > seen)
            });
            let is_older = core
                .job(&key.job)
                .zip(launch)
                .is_some_and(|(job, launch)| job.old.contains(&launch));
            if is_later && is_older { Committed::Replaceable(save) } else { Committed::Other }
        })
    }

    /// Returns the step with its hashes, read from the stored table or computed now. Returns `None`
    /// if the step is no longer in memory.
    pub(super) async fn hashed_step(
        self: &Arc<Self>,
        key: &StepKey,
    ) -> Result<Option<Arc<Assembled>>, Failure> {
        // Hash one step at a time, and each only once.
        let _turn = self.hashing.lock().await;
        let Some(segments) = self.with(|core| core.hold_step(key)) else { return Ok(None) };
        let (daemon, of) = (self.clone(), key.clone());
        let coverage = self.coverage_of(key);
        let work = move || assemble::assemble(&daemon.folder, &of, segments, coverage);
        let died = |error: &dyn std::fmt::Display| {
            Failure::new(ErrorKind::Internal, error.to_string(), "")
        };
        let assembled = self.workers.run(work).await.map_err(|error| died(&error))?;
        let mut step = match assembled {
            Ok(step) => step,
            Err(error) if is_final(error.kind()) && self.give_up_copy(key, &error) => {
                return Ok(None);
            }
            Err(error) => {
                let hint = "a step that cannot be assembled is dropped; save the next one";
                let message = format!("step {}: {error}", key.step);
                return Err(Failure::new(error.kind(), message, hint));
            }
        };
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(ErrorKind::Io, format!("the table of step {}: {error}", key.step), "")
        };
        match self.stored_hashes(key, &step.table).map_err(|error| failed(&error))? {
            Some(table) => step.table = table,
            // The copy of a committed step must not be hashed again: damaged bytes would get
            // matching hashes.
            None if self.give_up_copy(key, &"its hashes are missing") => return Ok(None),
            None => {
                trace_point(StagingPoint::Hashing, &key.job, key.step);
                let hashes = assemble::hash(&step, &self.workers, || self.note_progress(key))
                    .await
                    .map_err(|e| died(&e))?;
                step.table = step.table.with_hashes(&hashes).map_err(|error| failed(&error))?;
                let bytes = step.table.to_bytes().map_err(|error| failed(&error))?;
                self.keep_table(key, &bytes);
                trace_point(StagingPoint::Hashed, &key.job, key.step);
                self.compare_samples(key);
            }
        }
        self.with(|core| core.hashed(key));
        Ok(Some(Arc::new(step)))
    }

    /// Writes the table of a step. If the step was dropped meanwhile, its files were removed before
    /// this one was written, so removes this one as well.
    fn keep_table(self: &Arc<Self>, key: &StepKey, bytes: &[u8]) {
        if let Err(error) = self.folder.keep_table(key, bytes) {
            tracing::warn!(%error, "cannot write the step's hashes: a restarted daemon cannot load the committed step from memory");
        }
        self.forget_if_dropped(key);
    }

    /// Removes the files of a step that is no longer in memory.
    fn forget_if_dropped(self: &Arc<Self>, key: &StepKey) {
        if self.with(|core| core.step(key).is_none()) {
            self.folder.forget_step(key);
        }
    }

    /// Returns [`Coverage::Whole`] if this host has all ranks of the step's launch.
    pub(super) fn coverage_of(self: &Arc<Self>, key: &StepKey) -> Coverage {
        match self.with(|core| core.hosts_of(key).is_none()) {
            true => Coverage::Whole,
            false => Coverage::OfOneHost,
        }
    }

    /// Returns the stored table of a step, which has hashes, or `None` if it is missing or differs
    /// from `table` in more than the hashes.
    pub(super) fn stored_hashes(
        &self,
        key: &StepKey,
        table: &Table,
    ) -> Result<Option<Table>, FolderError> {
        let stored = self.folder.table(key)?.and_then(|bytes| Table::parse(&bytes).ok());
        Ok(stored.filter(|stored| stored.clone().without_hashes() == *table))
    }

    /// Gives up the memory copy of a step if it is committed. Returns whether it is.
    fn give_up_copy(self: &Arc<Self>, key: &StepKey, why: &dyn std::fmt::Display) -> bool {
        let is_committed = self.with(|core| core.give_up_copy(key));
        if is_committed {
            tracing::warn!(job = %key.job, step = %key.step, "later loads read the step from the cluster: {why}");
        }
        is_committed
    }

    /// Warns if replicated content differs between ranks.
    fn compare_samples(self: &Arc<Self>, key: &StepKey) {
        self.with(|core| {
            let samples = core.step(key).map(|step| step.samples.clone()).unwrap_or_default();
            let mut first: BTreeMap<&str, (u32, &Sample)> = BTreeMap::new();
            for (&rank, samples) in &samples {
                let differs = samples.iter().find_map(|sample| {
                    let known = first.entry(&sample.name).or_insert((rank, sample));
                    (known.1.hash != sample.hash).then_some((known.0, &sample.name))
                });
                // One name per rank suffices to find the cause.
                if let Some((other, name)) = differs {
                    let warning = format!(
                        "{name} differs between ranks {other} and {rank}, though it is declared replicated: the owner's copy is saved",
                    );
                    tracing::warn!(job = %key.job, step = %key.step, "{warning}");
                    core.warn(key, warning);
                }
            }
        });
    }

    async fn send(
        self: &Arc<Self>,
        key: &StepKey,
        step: &Arc<Assembled>,
        replace: bool,
    ) -> Result<Attempt, ClientError> {
        let record = self.with(|core| core.record(key, SaveState::Unsaved));
        let Some(record) = record else { return Ok(Attempt::Gone) };
        let decisions = Arc::new(StepDecisions {
            daemon: self.clone(),
            key: key.clone(),
            step: step.clone(),
            record,
            saves: Mutex::default(),
        });
        let (daemon, of) = (self.clone(), key.clone());
        let progress = Arc::new(move |progress: Progress| daemon.set_progress(&of, progress));
        let options = SaveOptions { replace };
        let report = self
            .client
            .save_with_decisions(&key.job, key.step, options, decisions.clone(), progress)
            .await?;
        let attempts = decisions.saves.lock().unwrap_or_else(PoisonError::into_inner).len();
        let notes = match attempts {
            0 | 1 => Vec::new(),
            more => vec![format!(
                "the save started again (number of restarts: {}), because storage nodes failed",
                more - 1
            )],
        };
        Ok(Attempt::Committed { save: report.save, notes })
    }

    /// Records that saves of a step begin, or may have begun, under these ids. The record is written
    /// first, so that a daemon that is started after a crash asks for their outcome. Fails if the
    /// step was given up.
    pub(super) fn record_saves(
        self: &Arc<Self>,
        key: &StepKey,
        record: &StepRecord,
        saves: &[SaveId],
    ) -> io::Result<()> {
        let save = SaveState::Begun { saves: saves.to_vec() };
        let record = StepRecord { save, ..record.clone() };
        self.folder.keep_step(&record).map_err(io::Error::other)?;
        if !self.with(|core| core.begin_saving(key, saves.to_vec())) {
            self.folder.forget_step(key);
            return Err(io::Error::new(io::ErrorKind::NotFound, "the step was given up"));
        }
        trace_point(StagingPoint::Saving, &key.job, key.step);
        Ok(())
    }

    /// Fails if the step was given up, or if its memory has changed since it was hashed. The error is
    /// the reason, for people. Calls `count` for each part that was checked.
    pub(super) async fn approve_content(
        self: &Arc<Self>,
        key: &StepKey,
        step: &Assembled,
        count: &(dyn Fn() + Send + Sync),
    ) -> Result<(), String> {
        if self.with(|core| core.step(key).is_none()) {
            return Err("the step was given up".into());
        }
        let report_progress = || {
            self.note_progress(key);
            count();
        };
        match find_changed(step, &self.workers, &report_progress).await {
            Ok(None) => {
                trace_point(StagingPoint::Confirmed, &key.job, key.step);
                Ok(())
            }
            Ok(Some(name)) => Err(format!(
                "{name} was changed in memory after it was staged: does something write to the segment?"
            )),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Returns what a failed save means for the step.
    pub(super) fn judge(self: &Arc<Self>, key: &StepKey, error: &ClientError) -> Attempt {
        if self.with(|core| core.step(key).is_none()) {
            return Attempt::Gone;
        }
        match error.kind() {
            ErrorKind::Fenced => Attempt::Fenced(error.to_string()),
            kind if is_final(kind) => Attempt::Failed(failure(key, error, "")),
            _ => Attempt::Later(error.to_string()),
        }
    }

    /// Records the commit of a step. Returns the number of steps to keep, 0 if this host removes none.
    fn finish(self: &Arc<Self>, key: &StepKey, save: SaveId, notes: Vec<String>) -> u32 {
        let Some(record) = self.with(|core| core.record(key, SaveState::Committed { save })) else {
            // The step was dropped just before its commit. Its save is on record as abandoned and
            // will be removed, unless it may be the resume point of a newer launch.
            return 0;
        };
        let keep = self.with(|core| core.launch(key).map_or(0, |launch| launch.keep));
        if let Err(error) = self.folder.keep_step(&record) {
            tracing::warn!(%error, "cannot record the commit: the daemon asks the cluster again after its next start");
        }
        self.forget_if_dropped(key);
        let now = self.clock.now();
        self.with(|core| core.committed(key, save, notes, now));
        trace_point(StagingPoint::Committed, &key.job, key.step);
        let is_first_host = self.with(|core| core.hosts_of(key).is_none_or(|hosts| hosts.own == 0));
        if is_first_host { keep } else { 0 }
    }

    /// Removes the oldest of the committed steps before the one that was just committed, so that
    /// `keep` are left including that one. The newest step with each label stays as well.
    async fn trim(self: &Arc<Self>, key: &StepKey, keep: u32) {
        let steps = match self.client.list_steps(Some(&key.job)).await {
            Ok(steps) => steps,
            Err(error) => {
                return tracing::warn!(job = %key.job, %error, "cannot list the job's steps: those beyond `keep` stay in the cluster until the next commit");
            }
        };
        // Labels that were set before retention was resumed must be read.
        if !self.may_trim(&key.job).await {
            return;
        }
        let labels = match self.client.list_labels(&key.job).await {
            Ok(labels) => labels,
            Err(error) => {
                return tracing::warn!(job = %key.job, %error, "cannot list the labels: older steps are kept for now");
            }
        };
        let labelled = newest_with_each_label(&labels);
        let mut before: Vec<_> =
            steps.into_iter().map(|view| (view.step, view.saved.save)).collect();
        before.retain(|(step, _)| *step < key.step);
        before.sort_unstable_by(|a, b| b.cmp(a));
        for (step, save) in before.into_iter().skip(keep.saturating_sub(1) as usize) {
            if labelled.contains(&step) {
                continue;
            }
            if !self.may_trim(&key.job).await {
                return;
            }
            let step_ref = key.job.at(step);
            match self.client.remove_launch_step(step_ref, save, key.launch).await {
                Ok(_) => self.with(|core| core.note_removal(&key.job, step, save)),
                // A newer launch has other steps to keep.
                Err(error) if error.kind() == ErrorKind::Fenced => return,
                Err(error) => {
                    tracing::warn!(job = %key.job, %step, %error, "the removal of an older step was not confirmed and may have begun: if the step is still listed, the next commit tries again");
                }
            }
        }
    }

    /// Returns whether older steps may be removed: retention is not paused.
    async fn may_trim(&self, job: &Job) -> bool {
        match self.client.is_retention_paused().await {
            Ok(false) => return true,
            Ok(true) => {
                tracing::warn!(%job, "retention is paused: older steps are kept until `rapidraid catalogue retention --resume`");
            }
            Err(error) => {
                tracing::warn!(%job, %error, "cannot ask whether retention is paused: older steps are kept for now");
            }
        }
        false
    }
}

/// Returns the newest step with each label.
fn newest_with_each_label(labels: &BTreeMap<Step, Vec<Label>>) -> BTreeSet<Step> {
    let mut newest: BTreeMap<&Label, Step> = BTreeMap::new();
    for (step, labels) in labels {
        newest.extend(labels.iter().map(|label| (label, *step)));
    }
    newest.into_values().collect()
}

/// Returns whether retries do not help: the step itself is at fault, or the client lacks the rights.
/// All other failures may pass.
pub(super) fn is_final(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::Invalid | ErrorKind::Denied)
}

pub(super) fn failure(key: &StepKey, error: &ClientError, hint: &str) -> Failure {
    let own = error.hint().unwrap_or_default();
    let hint = if hint.is_empty() { own } else { hint.to_owned() };
    Failure::new(error.kind(), format!("saving step {}: {error}", key.step), hint)
}

/// The decisions about the save of one step.
struct StepDecisions {
    daemon: Arc<StagingDaemon>,
    key: StepKey,
    step: Arc<Assembled>,
    record: StepRecord,
    /// The save ids of the attempts so far.
    saves: Mutex<Vec<SaveId>>,
}

#[async_trait]
impl SaveDecisions for StepDecisions {
    fn assign_save_id(&self, _attempt: u32) -> io::Result<SaveId> {
        let mut save = SaveId([0; 12]);
        self.daemon.entropy.fill(&mut save.0);
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.push(save);
        self.daemon.record_saves(&self.key, &self.record, &saves)?;
        Ok(save)
    }

    fn launch(&self) -> Option<LaunchId> {
        Some(self.key.launch)
    }

    fn shards_for_code(&self, code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        let wrong =
            |error: &dyn std::fmt::Display| ClientError::CalledOff { why: error.to_string() };
        let max_bytes = code.stripe_bytes().saturating_mul(MAX_SHARD_STRIPES);
        let shards = cut(&self.step.table, max_bytes).map_err(|error| wrong(&error))?;
        let mut new = Vec::with_capacity(shards.data.len() + 1);
        for (number, source) in shard_sources(&self.step, shards.data).into_iter().enumerate() {
            let name = data_name(self.key.launch, number).map_err(|error| wrong(&error))?;
            new.push(NewShard { name, source });
        }
        let name = index_name(self.key.launch).map_err(|error| wrong(&error))?;
        let index: Bytes = shards.index;
        new.push(NewShard { name, source: Arc::new(index) });
        Ok(new)
    }

    async fn approve_commit(&self) -> Result<(), String> {
        self.daemon.approve_content(&self.key, &self.step, &|| ()).await
    }
}
