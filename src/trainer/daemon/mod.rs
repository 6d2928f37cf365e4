//! The staging daemon: it receives state from the trainers of a host and saves it
//! (docs/staging.md).

pub mod assemble;
pub mod core;
mod failure_warnings;
mod fetch;
pub mod folder;
mod held_part;
pub mod hold;
mod joint_upload;
mod launch_order;
mod load_source;
mod loads;
mod ranges;
pub mod records;
mod recovery;
mod server;
pub mod source;
mod tables;
pub mod trace;
mod upload;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use self::core::{Core, Effect, Limits, StepKey, StepOfLaunch};
use self::fetch::Fetches;
use self::folder::{Folder, FolderError};
use self::held_part::HeldParts;
use self::hold::Bell;
use self::loads::{LoadKey, Verified};
use self::ranges::MAX_WINDOWS;
use self::records::SaveState;
use self::trace::{StagingPoint, trace_point};
use crate::client::{Client, Progress};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::id::{ClusterId, InstanceId, Job, MemberId, SegmentId};
use crate::kind::ErrorKind;
use crate::trainer::mapping::Readable;
use crate::trainer::segment::{Header, read_header};
use crate::trainer::session::boot_time;
use crate::workers::Workers;

/// Interval between two checks of deadlines and of memory that processes have released.
const TICK: Duration = Duration::from_millis(200);

/// Interval between two checks that the staging folder still exists.
const FOLDER_LOOK: Duration = Duration::from_secs(1);
/// Maximum time by which an answer is delayed, whatever the request allows.
const MAX_HELD_BACK: Duration = Duration::from_secs(10);
/// A daemon that is shutting down ends once nothing has been in progress for this long.
const QUIET: Duration = Duration::from_secs(1);

/// The configuration of a daemon.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The staging folder.
    pub dir: PathBuf,
    /// Memory limit for all segments and all shards read from the cluster together, in bytes.
    pub memory_bytes: u64,
    /// How long the ranks may fill a step, counted from the first rank that began.
    pub fill: Duration,
    /// How long a save of several hosts waits for hosts that make no progress.
    pub stall: Duration,
    /// The token that trainers must send; empty if none is required.
    pub token: Vec<u8>,
    /// The id of the cluster that the daemon saves to.
    pub cluster: ClusterId,
    /// The runtime on which steps are hashed, sent, and read from the cluster. Its threads yield to
    /// training.
    pub background: Handle,
}

/// The reason why a daemon does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The staging folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The socket cannot be made.
    #[error("the socket in {}: {source}", dir.display())]
    Socket {
        /// The staging folder.
        dir: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl StartError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            StartError::Folder(error) => error.kind(),
            StartError::Socket { .. } => ErrorKind::Io,
        }
    }
}

/// The state that all of a daemon's tasks share.
pub struct StagingDaemon {
    settings: Settings,
    folder: Folder,
    core: Mutex<Core>,
    bell: Bell,
    client: Client,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    workers: Workers,
    hashing: tokio::sync::Mutex<()>,
    /// A lock for each job, so that it has one save at a time.
    queues: Mutex<BTreeMap<Job, Arc<tokio::sync::Mutex<()>>>>,
    progress: Mutex<BTreeMap<StepKey, Progress>>,
    /// The dropped steps of which the other hosts are being told.
    drops_to_tell: Mutex<BTreeSet<StepOfLaunch>>,
    /// Held while steps beyond `keep` are removed.
    trimming: tokio::sync::Mutex<()>,
    fetches: Mutex<Fetches>,
    held_parts: tokio::sync::Mutex<HeldParts>,
    verified: Mutex<BTreeMap<LoadKey, Verified>>,
    windows: Semaphore,
    connections: watch::Sender<usize>,
}

/// A running daemon. When this value is dropped, it accepts no further connections and checks no
/// further deadlines. Open connections and saves end with their runtimes.
pub struct Running {
    daemon: Arc<StagingDaemon>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn marked(segment: SegmentId, written: io::Result<()>) {
    if let Err(error) = written {
        tracing::error!(%segment, %error, "cannot write the state into a segment's header");
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StagingDaemon {
    /// Opens the folder, recovers the state that a previous daemon left, and listens.
    pub async fn start(
        settings: Settings,
        client: Client,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
        workers: Workers,
    ) -> Result<Running, StartError> {
        let folder = Folder::open(&settings.dir, settings.cluster, &*entropy)?;
        let bell = Bell::new();
        let limits = Limits { memory_bytes: settings.memory_bytes, fill: settings.fill };
        let booted_at = clock.wall_seconds().saturating_sub(boot_time().as_secs());
        let daemon = Arc::new(Self {
            core: Mutex::new(Core::new(limits, bell.clone(), booted_at)),
            settings,
            folder,
            bell,
            client,
            clock,
            entropy,
            workers,
            hashing: tokio::sync::Mutex::default(),
            queues: Mutex::default(),
            progress: Mutex::default(),
            drops_to_tell: Mutex::default(),
            trimming: tokio::sync::Mutex::default(),
            fetches: Mutex::default(),
            held_parts: tokio::sync::Mutex::default(),
            verified: Mutex::default(),
            windows: Semaphore::new(MAX_WINDOWS),
            connections: watch::Sender::new(0),
        });
        daemon.recover()?;
        let listener = daemon.listen()?;
        let (serving, ticking) = (daemon.clone(), daemon.clone());
        let tasks = vec![
            tokio::spawn(async move { serving.serve(listener).await }),
            tokio::spawn(async move { ticking.tick().await }),
        ];
        Ok(Running { daemon, tasks })
    }

    /// Changes the state, then carries out the effects of the change. Returns the result of
    /// `change`.
    fn with<T>(self: &Arc<Self>, change: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = lock(&self.core);
        let result = change(&mut core);
        while !core.effects.is_empty() {
            let mut effects = std::mem::take(&mut core.effects);
            // Remove a record only after the headers that it describes are marked. If the daemon
            // ends in between, the next daemon removes a record without headers, but headers without
            // a record would bring the step back.
            effects.sort_by_key(|effect| {
                !matches!(
                    effect,
                    Effect::MarkFilling(..)
                        | Effect::MarkFree(_)
                        | Effect::KeepJob(_)
                        | Effect::KeepHosts(..)
                )
            });
            for effect in effects {
                self.apply(&mut core, effect);
            }
        }
        result
    }

    fn apply(self: &Arc<Self>, core: &mut Core, effect: Effect) {
        match effect {
            Effect::MarkFilling(segment, fill) => {
                marked(segment, self.folder.set_filling(segment, fill));
            }
            Effect::MarkFree(segment) => marked(segment, self.folder.set_free(segment)),
            Effect::Unlink(segment) => {
                if core.doomed().contains(&segment) && self.folder.unlink_segment(segment) {
                    core.freed(segment);
                }
            }
            Effect::Forget(key) => {
                trace_point(StagingPoint::Forgetting, &key.job, key.step);
                self.folder.forget_step(&key);
                lock(&self.progress).remove(&key);
            }
            Effect::KeepJob(job) => {
                if let Some(record) = core.job_record(&job)
                    && let Err(error) = self.folder.keep_job(&record)
                {
                    tracing::error!(%job, %error, "cannot write the job's record");
                }
            }
            Effect::KeepHosts(job, launch) => {
                if let Some(record) = core.hosts_record(&job, launch)
                    && let Err(error) = self.folder.keep_hosts(&record)
                {
                    tracing::error!(%job, %error, "cannot write the record of a launch's hosts");
                }
            }
            Effect::ForgetHosts(launch) => self.folder.forget_hosts(launch),
            Effect::AbortIfOpen(key, saves) => {
                drop(self.settings.background.spawn(self.clone().abort_if_open(key, saves)));
            }
            Effect::DropOnOtherHosts(step, hosts, why) => {
                if lock(&self.drops_to_tell).insert(step.clone()) {
                    let telling = self.clone().drop_on_other_hosts(step, hosts, why);
                    drop(self.settings.background.spawn(telling));
                }
            }
            Effect::KeepStep(key) => {
                if let Some(record) = core.record(&key, SaveState::Unsaved)
                    && let Err(error) = self.folder.keep_step(&record)
                {
                    // The next daemon reads the same from the headers.
                    tracing::warn!(job = %key.job, step = %key.step, %error, "cannot write the step's record");
                }
                trace_point(StagingPoint::Staged, &key.job, key.step);
            }
            Effect::Save(key) => {
                drop(self.settings.background.spawn(self.clone().save_step(key)));
            }
            Effect::Settle(job) => drop(tokio::spawn(self.clone().remove_abandoned(job))),
        }
    }

    /// Accepts parts of steps whose headers say *staged* although their owners have not reported
    /// it. Reads the headers of the segments that are being filled, only those of member `of` if
    /// given. A daemon that is started again would accept the same parts.
    fn accept_headers(self: &Arc<Self>, of: Option<MemberId>) {
        for (segment, key, rank) in self.with(|core| core.filling(of)) {
            let Some((_, len_bytes)) = self.with(|core| core.hold(segment)) else { continue };
            let header = self
                .folder
                .open_segment(segment)
                .ok()
                .and_then(|file| Readable::map(&file, len_bytes).ok())
                .and_then(|map| read_header(segment, &map).ok());
            let is_it = |header: &Header| {
                (header.step, header.launch, header.fill, header.rank)
                    == (key.step, key.launch, key.fill, rank)
            };
            if header.is_some_and(|header| is_it(&header)) {
                self.with(|core| core.hold_part(&key, rank, segment, Vec::new()));
            }
        }
    }

    fn queue_of(&self, job: &Job) -> Arc<tokio::sync::Mutex<()>> {
        lock(&self.queues).entry(job.clone()).or_default().clone()
    }

    fn set_progress(self: &Arc<Self>, key: &StepKey, progress: Progress) {
        lock(&self.progress).insert(key.clone(), progress);
        self.note_progress(key);
    }

    /// Notes that the save of the step makes progress, so that a load that waits for the step goes
    /// on waiting.
    fn note_progress(self: &Arc<Self>, key: &StepKey) {
        let now = self.clock.now();
        self.with(|core| core.note_progress(key, now));
    }

    fn progress_bytes(&self, key: &StepKey) -> (u64, u64) {
        lock(&self.progress).get(key).map_or((0, 0), |p| (p.done_bytes, p.total_bytes))
    }

    fn fetches(&self) -> MutexGuard<'_, Fetches> {
        lock(&self.fetches)
    }

    fn verified(&self) -> MutexGuard<'_, BTreeMap<LoadKey, Verified>> {
        lock(&self.verified)
    }

    /// Waits for a change of the state, at most for `limit`.
    async fn wait_for_bell(&self, heard: &mut watch::Receiver<u64>, limit: Duration) {
        let _ = crate::clock::deadline(&*self.clock, limit, heard.changed()).await;
    }

    async fn tick(self: Arc<Self>) {
        loop {
            self.clock.sleep(TICK).await;
            let now = self.clock.now();
            if self.with(|core| core.has_late(now)) {
                self.accept_headers(None);
            }
            self.with(|core| {
                for segment in core.doomed() {
                    if self.folder.unlink_segment(segment) {
                        core.freed(segment);
                    }
                }
                core.check_deadlines(now);
                core.drop_orphans(&|segment| self.folder.is_unmapped(segment));
            });
            // A fetched step is kept for a while, for ranks that begin later, and then removed.
            self.account_fetches();
            self.folder.keep_reserve();
        }
    }
}

impl Running {
    /// Returns the id of the staging folder.
    pub fn instance(&self) -> InstanceId {
        self.daemon.folder.instance()
    }

    /// Waits until no step is in progress and all other hosts know of the steps that this host
    /// dropped, or until `limit` has passed. Returns descriptions of the steps that are left.
    /// Trainers that are being terminated save once more, so new steps may still begin; the wait
    /// therefore ends only after a short time without any.
    pub async fn quiet(&self, limit: Duration) -> Vec<String> {
        let daemon = &self.daemon;
        let until = daemon.clock.now() + limit;
        let mut quiet_since = None;
        loop {
            let mut left = daemon.with(|core| core.unsaved());
            left.extend(lock(&daemon.drops_to_tell).iter().map(|dropped| {
                format!(
                    "{}/{}: the other hosts are told that it is dropped",
                    dropped.job, dropped.step
                )
            }));
            let now = daemon.clock.now();
            match (left.is_empty(), quiet_since) {
                (true, Some(since)) if now - since >= QUIET => return left,
                (true, None) => quiet_since = Some(now),
                (true, Some(_)) => {}
                (false, _) => quiet_since = None,
            }
            if now >= until {
                return left;
            }
            daemon.clock.sleep(TICK).await;
        }
    }

    /// Waits until the staging folder is removed from outside, then stops accepting new steps.
    pub async fn lost(&self) {
        while self.daemon.folder.is_there() {
            self.daemon.clock.sleep(FOLDER_LOOK).await;
        }
        self.daemon.with(Core::stop);
    }

    /// Waits until the daemon has had no connection and no used memory for `limit`.
    pub async fn idle(&self, limit: Duration) {
        let daemon = &self.daemon;
        let mut since = daemon.clock.now();
        loop {
            daemon.clock.sleep(TICK).await;
            let is_used =
                *daemon.connections.borrow() > 0 || daemon.with(|core| core.used_bytes() > 0);
            let now = daemon.clock.now();
            if is_used {
                since = now;
            } else if now - since >= limit {
                return;
            }
        }
    }
}
