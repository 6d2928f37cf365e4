//! The staging daemon: takes over state from the trainers of a host and saves it (docs/staging.md).

pub mod assemble;
pub mod core;
mod fetch;
pub mod folder;
pub mod hold;
mod loads;
mod ranges;
pub mod records;
mod recovery;
mod server;
pub mod source;
pub mod trace;
mod upload;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use self::core::{Core, Effect, Limits, StepKey};
use self::fetch::Fetches;
use self::folder::{Folder, FolderError};
use self::hold::Bell;
use self::loads::{LoadKey, Verified};
use self::ranges::MAX_WINDOWS;
use self::records::SaveState;
use self::trace::{TracePoint, trace_point};
use crate::client::{Client, Progress};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::id::{ClusterId, InstanceId, Job, MemberId, SegmentId};
use crate::kind::ErrorKind;
use crate::trainer::mapping::Readable;
use crate::trainer::segment::{Header, read_header};
use crate::workers::Workers;

/// Between two looks at deadlines and at memory that processes have let go.
const TICK: Duration = Duration::from_millis(200);

/// Between two looks whether the folder is still there.
const FOLDER_LOOK: Duration = Duration::from_secs(1);
/// A daemon that is to end ends when nothing has been under way for so long.
const QUIET: Duration = Duration::from_secs(1);

/// What a daemon is told by its configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The staging folder.
    pub dir: PathBuf,
    /// The limit on all segments.
    pub memory_bytes: u64,
    /// How long a rank may fill a segment.
    pub fill: Duration,
    /// Trainers have to send this, when it is not empty.
    pub token: Vec<u8>,
    /// The cluster.
    pub cluster: ClusterId,
    /// Where steps are hashed and sent, and read from the cluster: threads that yield to training.
    pub background: Handle,
}

/// Why a daemon does not start.
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
        /// Why.
        source: io::Error,
    },
}

impl StartError {
    /// What kind of failure this is.
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
    /// One save at a time for each job.
    queues: Mutex<BTreeMap<Job, Arc<tokio::sync::Mutex<()>>>>,
    progress: Mutex<BTreeMap<StepKey, Progress>>,
    fetches: Mutex<Fetches>,
    verified: Mutex<BTreeMap<LoadKey, Verified>>,
    windows: Semaphore,
    connections: watch::Sender<usize>,
}

/// A daemon that runs; its tasks end with it.
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
        tracing::error!(%segment, %error, "the state of a segment is not written");
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StagingDaemon {
    /// Opens the folder, finds what a daemon before this one left, and listens.
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
        let daemon = Arc::new(Self {
            core: Mutex::new(Core::new(limits, bell.clone())),
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
            fetches: Mutex::default(),
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

    /// Changes the state, and then does what follows from the change.
    fn with<T>(self: &Arc<Self>, change: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = lock(&self.core);
        let result = change(&mut core);
        while !core.effects.is_empty() {
            let mut effects = std::mem::take(&mut core.effects);
            // A record goes after the headers that it is about: without them it is removed, but without it they would bring the step back.
            effects.sort_by_key(|effect| {
                !matches!(
                    effect,
                    Effect::MarkFilling(..) | Effect::MarkFree(_) | Effect::KeepJob(_)
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
                trace_point(TracePoint::Forgetting, &key.job, key.step);
                self.folder.forget_step(&key);
                lock(&self.progress).remove(&key);
            }
            Effect::KeepJob(job) => {
                if let Some(record) = core.job_record(&job)
                    && let Err(error) = self.folder.keep_job(&record)
                {
                    tracing::error!(%job, %error, "the job's record is not kept");
                }
            }
            Effect::KeepStep(key) => {
                if let Some(record) = core.record(&key, SaveState::Unsaved)
                    && let Err(error) = self.folder.keep_step(&record)
                {
                    // The headers say the same to the next daemon.
                    tracing::warn!(job = %key.job, step = %key.step, %error, "the step's record is not kept");
                }
                trace_point(TracePoint::Staged, &key.job, key.step);
            }
            Effect::Save(key) => {
                drop(self.settings.background.spawn(self.clone().save_step(key)));
            }
            Effect::Settle(job) => drop(tokio::spawn(self.clone().remove_abandoned(job))),
        }
    }

    /// Counts parts of steps whose owners have written that they are staged and have not said so: from the headers of segments that are
    /// being filled. What is in a header after its owner is gone is what a daemon would find that starts now.
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

    fn set_progress(&self, key: &StepKey, progress: Progress) {
        lock(&self.progress).insert(key.clone(), progress);
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

    /// Waits for a change, at most `limit`.
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
            // A step that was read is kept for ranks that begin later, and then goes.
            self.account_fetches();
            self.folder.keep_reserve();
        }
    }
}

impl Running {
    /// The staging folder's id.
    pub fn instance(&self) -> InstanceId {
        self.daemon.folder.instance()
    }

    /// Returns when nothing is under way, or `limit` has passed: then what is left, in words. Trainers that are told to end save once more,
    /// so steps go on to begin; a moment without any ends the wait.
    pub async fn quiet(&self, limit: Duration) -> Vec<String> {
        let daemon = &self.daemon;
        let until = daemon.clock.now() + limit;
        let mut quiet_since = None;
        loop {
            let left = daemon.with(|core| core.unsaved());
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

    /// Returns when the staging folder has been taken away under the daemon. No step begins any more then.
    pub async fn lost(&self) {
        while self.daemon.folder.is_there() {
            self.daemon.clock.sleep(FOLDER_LOOK).await;
        }
        self.daemon.with(Core::stop);
    }

    /// Returns when the daemon has had no connection and no segment for `limit`.
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
