//! Saves a step of a launch that runs on several hosts: each host's daemon saves the part of its own
//! ranks, and one of them merges the tables into the index (docs/staging.md, 10).

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::assemble::{Assembled, MAX_SHARD_STRIPES, cut, shard_sources};
use super::core::{StepKey, StepOfLaunch};
use super::records::{SaveState, StepRecord};
use super::tables::{MAX_TABLES_BYTES, merge_tables, read_tables};
use super::upload::{Attempt, Committed, data_name, failure, index_name, is_final};
use super::{StagingDaemon, lock};
use crate::client::{
    ClientError, JointDecisions, JointWriter, NewShard, Progress, ReadRange, SaveCode,
};
use crate::format::records::ShardRoot;
use crate::id::{LaunchId, SaveId, ShardName};
use crate::kind::ErrorKind;
use crate::pipeline::upload::ShardSource;
use crate::trainer::protocol::{Failure, Hosts};

/// The number of saves of a step that may end because other hosts made no progress. The step is
/// dropped after the last one.
const MAX_STALLS: u32 = 2;
/// How long a host keeps trying to tell the others that it has dropped a step.
const DROP_LIMIT: Duration = Duration::from_secs(60);
/// Pause between two attempts to tell the others.
const DROP_INTERVAL: Duration = Duration::from_secs(2);

impl StagingDaemon {
    /// Tries once to save this host's part of a step together with the other hosts.
    pub(super) async fn attempt_jointly(
        self: &Arc<Self>,
        key: &StepKey,
        hosts: &Hosts,
        earlier: &[SaveId],
    ) -> Attempt {
        if self.with(|core| core.has_earlier_uncommitted(key)) {
            return Attempt::AfterEarlierStep;
        }
        let now = self.clock.now();
        // An attempt after a failed one is not progress by itself.
        self.with(|core| {
            core.note_missing(key, String::new());
            if core.step(key).is_some_and(|step| step.trouble.is_none()) {
                core.note_progress(key, now);
            }
        });
        // An earlier save is not aborted, because other hosts may be in the middle of it.
        for save in earlier {
            match self.client.is_joint_save_committed(key.job.at(key.step), *save).await {
                Ok(true) => return Attempt::Committed { save: *save, notes: Vec::new() },
                Ok(false) => {}
                Err(error) => return Attempt::Later(error.to_string()),
            }
        }
        let step = match self.hashed_step(key).await {
            Ok(Some(step)) => step,
            Ok(None) => return Attempt::Gone,
            Err(failure) if is_final(failure.kind()) => return Attempt::Failed(failure),
            Err(failure) => return Attempt::Later(failure.to_string()),
        };
        let error = match self.send_jointly(key, hosts, &step, None).await {
            Ok(attempt) => return attempt,
            Err(error) if error.kind() == ErrorKind::Exists => match self.committed_by(key).await {
                Committed::Own(save) => {
                    return Attempt::Committed { save, notes: Vec::new() };
                }
                Committed::Replaceable(save) => {
                    match self.send_jointly(key, hosts, &step, Some(save)).await {
                        Ok(attempt) => return attempt,
                        Err(error) => error,
                    }
                }
                Committed::Other => {
                    let hint = "save another step, or remove that one";
                    return Attempt::Failed(failure(key, &error, hint));
                }
                Committed::Unknown => return Attempt::Later(error.to_string()),
            },
            Err(error) => error,
        };
        match &error {
            ClientError::WritersMissing { writers, limit } => {
                let (host, seconds) = (names(hosts, writers), limit.as_secs());
                let message = format!("step {}: no progress of {host} for {seconds} s", key.step);
                match self.with(|core| core.count_stall(key)) {
                    MAX_STALLS.. => {
                        let hint =
                            "start the staging daemon there, or the job on the hosts that are left";
                        Attempt::Failed(Failure::new(ErrorKind::Timeout, message, hint))
                    }
                    _ => Attempt::Later(message),
                }
            }
            ClientError::WriterDropped { writer, reason } => {
                let host = names(hosts, &[*writer]);
                let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                let before = self.with(|core| core.describe_obstacle(key));
                let before =
                    before.map_or_else(String::new, |text| format!("; before that, {text}"));
                let message = format!("step {} was dropped on {host}{why}{before}", key.step);
                let hint = match reason.is_empty() {
                    true => "the log of the staging daemon there says why; save the next step",
                    false => "save the next step",
                };
                Attempt::DroppedElsewhere(Failure::new(ErrorKind::Unavailable, message, hint))
            }
            error => self.judge(key, error),
        }
    }

    async fn send_jointly(
        self: &Arc<Self>,
        key: &StepKey,
        hosts: &Hosts,
        step: &Arc<Assembled>,
        replace: Option<SaveId>,
    ) -> Result<Attempt, ClientError> {
        let record = self.with(|core| core.record(key, SaveState::Unsaved));
        let Some(record) = record else { return Ok(Attempt::Gone) };
        let decisions = Arc::new(JointStepDecisions {
            daemon: self.clone(),
            key: key.clone(),
            hosts: hosts.clone(),
            step: step.clone(),
            record,
            saves: Mutex::default(),
        });
        let (daemon, of) = (self.clone(), key.clone());
        let progress = Arc::new(move |progress: Progress| daemon.set_progress(&of, progress));
        let writer = self.writer_of(key.launch, hosts);
        let saved = self
            .client
            .save_jointly(key.job.at(key.step), writer, replace, decisions, progress)
            .await;
        // After an error the missing hosts stay noted: they may be the reason why another host
        // drops the step.
        self.with(|core| core.note_silent(key, String::new()));
        let save = saved?;
        self.with(|core| core.note_missing(key, String::new()));
        Ok(Attempt::Committed { save, notes: Vec::new() })
    }

    fn writer_of(&self, launch: LaunchId, hosts: &Hosts) -> JointWriter {
        JointWriter {
            launch,
            writer: hosts.own,
            writers: hosts.names.len() as u32,
            stall: self.settings.stall,
        }
    }

    /// Tells the other hosts that this host has dropped its part of a step. Repeats this until all
    /// hosts have dropped the step, it is committed, another launch saves it or has taken over, or
    /// [`DROP_LIMIT`] has passed. A host that stages the step later notices after a stall period.
    pub(super) async fn drop_on_other_hosts(
        self: Arc<Self>,
        dropped: StepOfLaunch,
        hosts: Hosts,
        why: String,
    ) {
        self.report_drop_until_known(&dropped, &hosts, &why).await;
        lock(&self.drops_to_tell).remove(&dropped);
    }

    async fn report_drop_until_known(
        self: &Arc<Self>,
        dropped: &StepOfLaunch,
        hosts: &Hosts,
        why: &str,
    ) {
        let StepOfLaunch { job, step, launch } = dropped;
        let writer = self.writer_of(*launch, hosts);
        let until = self.clock.now() + DROP_LIMIT;
        loop {
            let is_newest = |core: &mut super::core::Core| {
                core.job(job).is_some_and(|state| state.newest == Some(*launch))
            };
            if !self.with(is_newest) || self.clock.now() >= until {
                return;
            }
            match self.client.report_step_dropped(job.at(*step), writer, why).await {
                Ok(true) => return,
                Ok(false) => {}
                // Another launch saves the step.
                Err(error) if error.kind() == ErrorKind::Exists => return,
                Err(error)
                    if error.kind() == ErrorKind::Fenced
                        && self.may_no_longer_save(dropped).await =>
                {
                    return;
                }
                Err(error) => {
                    tracing::info!(%job, %step, %error, "the other hosts do not know yet that the step is dropped: trying again");
                }
            }
            self.clock.sleep(DROP_INTERVAL).await;
        }
    }

    /// Aborts the saves of a step that this host has dropped, if they are open. A save that cannot be
    /// aborted now ends with its lease, or is committed by the other hosts.
    pub(super) async fn abort_if_open(self: Arc<Self>, key: StepKey, saves: Vec<SaveId>) {
        for save in saves {
            if let Err(error) = self.client.abort_if_open(key.job.at(key.step), save).await {
                tracing::info!(job = %key.job, step = %key.step, %error, "cannot abort the save of a dropped step: it ends with its lease, unless the other hosts commit it");
            }
        }
    }
}

/// Returns the names of hosts, for messages.
fn names(hosts: &Hosts, numbers: &[u32]) -> String {
    let name = |number: &u32| hosts.names.get(*number as usize).map_or("?", String::as_str);
    let names: Vec<&str> = numbers.iter().take(8).map(name).collect();
    let more = numbers.len() - names.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    match numbers.len() {
        0 => String::new(),
        1 => format!("host {}", names.concat()),
        _ => format!("hosts {}{more}", names.join(", ")),
    }
}

/// The decisions about this host's part of a joint save.
struct JointStepDecisions {
    daemon: Arc<StagingDaemon>,
    key: StepKey,
    hosts: Hosts,
    step: Arc<Assembled>,
    record: StepRecord,
    /// The saves that this daemon has joined for the step.
    saves: Mutex<Vec<SaveId>>,
}

impl JointStepDecisions {
    fn wrong(error: &dyn std::fmt::Display) -> ClientError {
        ClientError::CalledOff { why: error.to_string() }
    }
}

#[async_trait]
impl JointDecisions for JointStepDecisions {
    fn note_save(&self, save: SaveId) -> io::Result<()> {
        // Called before this host announces its shards, so that no save can be committed that the
        // next daemon does not know.
        let mut saves = self.saves.lock().unwrap_or_else(PoisonError::into_inner);
        saves.push(save);
        self.daemon.record_saves(&self.key, &self.record, &saves)
    }

    fn cut_shards(&self, code: SaveCode) -> Result<Vec<Arc<dyn ShardSource>>, ClientError> {
        let max_bytes = code.stripe_bytes().saturating_mul(MAX_SHARD_STRIPES);
        let shards = cut(&self.step.table, max_bytes).map_err(|error| Self::wrong(&error))?;
        Ok(shard_sources(&self.step, shards.data))
    }

    fn name_shard(&self, number: u32) -> Result<ShardName, ClientError> {
        data_name(self.key.launch, number as usize).map_err(|error| Self::wrong(&error))
    }

    async fn approve_shards(&self, count: &(dyn Fn() + Send + Sync)) -> Result<(), String> {
        self.daemon.approve_content(&self.key, &self.step, count).await
    }

    fn ensure_wanted(&self) -> Result<(), String> {
        match self.daemon.with(|core| core.step(&self.key).is_some()) {
            true => Ok(()),
            false => Err("the step was given up".into()),
        }
    }

    fn note_missing(&self, writers: &[u32], unchanged: Duration) {
        let progressed_at = self.daemon.clock.now().saturating_sub(unchanged);
        let missing = names(&self.hosts, writers);
        self.daemon.with(|core| {
            core.note_missing(&self.key, missing);
            core.note_progress(&self.key, progressed_at);
        });
    }

    fn note_silent(&self, writers: &[u32]) {
        let silent = names(&self.hosts, writers);
        self.daemon.with(|core| core.note_silent(&self.key, silent));
    }

    async fn build_index(&self, data: Vec<ShardRoot>) -> Result<NewShard, ClientError> {
        let shards: Vec<_> = data.iter().map(|root| (root.name.clone(), root.len_bytes)).collect();
        let client = &self.daemon.client;
        let read = |ranges: Vec<ReadRange>| {
            let data = &data;
            async move { client.read_ranges_of_open_save(data, &ranges).await }
        };
        let (job, step) = (&self.key.job, self.key.step);
        let tables = read_tables(&shards, MAX_TABLES_BYTES, read).await;
        let tables = tables.map_err(|error| error.of_step(job, step))?;
        let merged = self.daemon.workers.run(move || {
            let table = merge_tables(&tables)?;
            table.check_coverage()?;
            table.without_hashes().to_bytes()
        });
        let bytes = merged.await?.map_err(|error| Self::wrong(&error))?;
        let name = index_name(self.key.launch).map_err(|error| Self::wrong(&error))?;
        Ok(NewShard { name, source: Arc::new(bytes::Bytes::from(bytes)) })
    }
}
