//! Saving a checkpoint: begin, upload of all stripes of all shards, leaves, completion of the
//! shards, commit (docs/semantics.md, 3).

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, TryStreamExt};

use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::save_decisions::PlainSave;
use super::shard_upload::ShardParameters;
use crate::client::connection::LONG_LIMIT;
use crate::client::{
    Client, ClientError, NewShard, Progress, ProgressFn, SaveCode, SaveDecisions, SaveFate,
};
use crate::format::geometry::MAX_SHARDS;
use crate::format::records::{Node, RingChanges, Saved, ShardRoot};
use crate::format::save_record::{SaveHead, SaveRecord};
use crate::id::{ClusterId, Generation, Job, LaunchId, NodeId, SaveId, Step, StepRef};
use crate::kind::ErrorKind;
use crate::net::Address;
use crate::pipeline::upload::{FailedNodes, SaveError};
use crate::placement::ring;
use crate::topology::Directory;
use crate::wire::calls::{
    AbortSave, BeginLaunchSave, BeginSave, BeginSaveAnswer, CommitSave, CompleteShard, Hello,
    NodeView, RenewLease,
};

/// Number of shards that are saved at once.
pub(super) const SHARDS_AT_ONCE: usize = 4;
/// Number of stripes of a save that are saved at once.
pub(super) const STRIPES_AT_ONCE: usize = 4;
/// Number of blocks of a save that a writer sends at once. Each block keeps in memory two chunks of
/// 256 KiB, unless the source hands out its own memory, and the bytes that the receiver has not
/// acknowledged.
const BLOCKS_AT_ONCE: usize = 24;
/// Time limit for a node to report its epoch. A save that checks whether its epoch is over ignores
/// a later answer.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// How long a save waits for the end of a catalogue transfer that is under way; afterwards, how
/// long it waits for the new catalogue server.
const MOVE_LIMIT: Duration = Duration::from_secs(10);
/// Interval between two checks whether a catalogue transfer has ended, and between two attempts to
/// commit or abort the save in the later epoch.
const MOVE_LOOK: Duration = Duration::from_millis(250);
/// How long an uploaded shard or save waits for a catalogue server that is away, for example because
/// its machine restarts.
const CATALOGUE_LIMIT: Duration = Duration::from_secs(120);
/// The time limit of a call that asks whether the server is back, and the pause before the next
/// such call.
const CATALOGUE_LOOK: Duration = Duration::from_secs(2);
/// Number of nodes that are asked for their epoch at once.
const HELLOS_AT_ONCE: usize = 32;
/// Maximum number of times that a save starts again after its nodes failed or its epoch ended.
pub(super) const RESTARTS: u32 = 2;

/// The options of a save.
#[derive(Debug, Clone, Copy, Default)]
pub struct SaveOptions {
    /// Whether to replace the step if it is committed. The old save stays committed until the new
    /// one is.
    pub replace: bool,
}

/// The report about a save.
#[derive(Debug, Clone)]
pub struct SaveReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The save.
    pub save: SaveId,
    /// Number of shards.
    pub shards: u32,
    /// Number of bytes of all shards.
    pub len_bytes: u64,
    /// Number of pieces of the code by which the save will be archived.
    pub n: u8,
    /// Number of blocks of that code.
    pub k: u8,
    /// The save's generation.
    pub generation: Generation,
    /// The record by which [`Client::restore_by_record`] reads the save when no catalogue answers.
    pub record: SaveRecord,
}

/// A task that renews a save's lease until this is dropped. It is dropped with the save's future,
/// so that the lease of an abandoned save ends.
pub(super) struct RunningLeaseKeeper(tokio::task::JoinHandle<()>);

impl Drop for RunningLeaseKeeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The outcome of a save whose epoch is over.
enum SaveOutcome {
    Committed(Saved),
    /// The save is not open any more, and was not decided.
    Gone,
    /// No catalogue answered.
    Unknown,
}

/// Returns whether an error may be due to the end of the save's epoch. Nodes then refuse the older
/// epoch, and gateways lose the catalogue.
pub(super) fn can_be_epoch_end(kind: ErrorKind) -> bool {
    kind == ErrorKind::Fenced || kind.is_transient()
}

/// A save between begin and commit.
pub(super) struct SaveSession {
    pub(super) client: Client,
    pub(super) job: Job,
    pub(super) step: Step,
    cluster: ClusterId,
    pub(super) begun: BeginSaveAnswer,
    /// The roots of the shards whose completion was requested, whether or not the gateway answered.
    roots: Mutex<BTreeMap<u32, ShardRoot>>,
    pub(super) directory: Directory,
    pub(super) failures: Arc<FailedNodes>,
    pub(super) stripes: Semaphore,
    pub(super) block_permits: Arc<Semaphore>,
    /// Number of bytes that were sent.
    pub(super) sent_bytes: Arc<AtomicU64>,
    /// The parts of its content that a writer of a joint save has checked after it had sent them.
    pub(super) checked_parts: AtomicU64,
    pub(super) progress: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Client {
    /// Saves a checkpoint. Returns its report when the save is committed and visible.
    pub async fn save(
        &self,
        job: &Job,
        step: Step,
        shards: Vec<NewShard>,
        options: SaveOptions,
        progress: ProgressFn,
    ) -> Result<SaveReport, ClientError> {
        check_shards(&shards)?;
        let entropy = self.entropy().clone();
        let decisions = Arc::new(PlainSave { shards, entropy });
        self.save_with_decisions(job, step, options, decisions, progress).await
    }

    /// Saves a checkpoint as `decisions` say. Returns its report when the save is committed and
    /// visible.
    pub async fn save_with_decisions(
        &self,
        job: &Job,
        step: Step,
        options: SaveOptions,
        decisions: Arc<dyn SaveDecisions>,
        progress: ProgressFn,
    ) -> Result<SaveReport, ClientError> {
        let mut restarts = SaveRestarts::default();
        loop {
            let id = decisions.assign_save_id(restarts.count);
            let save = id.map_err(|source| ClientError::SaveId { source })?;
            let begin = BeginSave {
                job: job.clone(),
                step,
                replace: options.replace,
                save,
                avoid: restarts.avoid.clone(),
            };
            let mut saving = self.begin_save(begin, decisions.launch()).await?;
            if let Some(error) = restarts.take_refusal_that_recurs(&saving.begun) {
                saving.abort_save().await;
                return Err(error);
            }
            let lease = self.spawn_lease_keeper(&saving.begun);
            let shards = match saving.prepare_shards(&*decisions, &progress) {
                Ok(shards) => shards,
                Err(error) => {
                    saving.abort_save().await;
                    return Err(error);
                }
            };
            let result = saving.upload_and_commit(&shards, &*decisions).await;
            drop(lease);
            let error = match result {
                Ok(saved) => return saving.build_report(saved),
                Err(error) => error,
            };
            restarts.count += 1;
            if can_be_epoch_end(error.kind()) && saving.has_epoch_ended(error.kind()).await {
                match saving.commit_or_abort(shards.len(), &*decisions).await {
                    SaveOutcome::Committed(saved) => return saving.build_report(saved),
                    SaveOutcome::Gone if restarts.count <= RESTARTS => {}
                    _ => return Err(error),
                }
                tracing::warn!(%error, restarts = restarts.count, "the save of {job}/{step} failed and starts again from its first byte");
            } else {
                saving.abort_and_prepare_restart(error, &mut restarts).await?;
            }
        }
    }

    /// Determines the fate of a save, for a client that does not know whether the save was
    /// committed. Aborts a save that is still open, and publishes one that is decided. An id that
    /// no gateway ever saw counts as aborted.
    pub async fn settle_save(
        &self,
        step_ref: StepRef<'_>,
        save: SaveId,
    ) -> Result<SaveFate, ClientError> {
        let StepRef { job, step } = step_ref;
        let aborted = self.call_gateway(&AbortSave { job: job.clone(), step, save }).await;
        match aborted {
            Ok(()) => Ok(SaveFate::Aborted),
            Err(error) if error.kind() == ErrorKind::Exists => {
                // A decided save is not checked against the number of its shards any more, so 0
                // will do.
                let commit = CommitSave { job: job.clone(), step, save, shards: 0 };
                match self.call_any_gateway_within(&commit, LONG_LIMIT).await {
                    Ok(_) => Ok(SaveFate::Committed),
                    // The save was committed, and has been removed or replaced since.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Fenced | ErrorKind::NotFound) =>
                    {
                        Ok(SaveFate::Committed)
                    }
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    async fn begin_save(
        &self,
        begin: BeginSave,
        launch: Option<LaunchId>,
    ) -> Result<SaveSession, ClientError> {
        let (job, step) = (begin.job.clone(), begin.step);
        let begun = match launch {
            None => self.call_gateway(&begin).await?,
            Some(launch) => self.call_gateway(&BeginLaunchSave { begin, launch }).await?,
        };
        self.start_session(job.at(step), begun).await
    }

    /// Starts the session of an open save.
    pub(super) async fn start_session(
        &self,
        step_ref: StepRef<'_>,
        begun: BeginSaveAnswer,
    ) -> Result<SaveSession, ClientError> {
        let cluster = self.fetch_cluster_id().await?;
        let live = begun.nodes.iter().map(|node| NodeView { node: node.clone(), live: true });
        Ok(SaveSession {
            client: self.clone(),
            job: step_ref.job.clone(),
            step: step_ref.step,
            cluster,
            directory: Directory::new(live.collect(), RingChanges::default()),
            begun,
            roots: Mutex::default(),
            failures: Arc::default(),
            stripes: Semaphore::new(STRIPES_AT_ONCE),
            block_permits: Arc::new(Semaphore::new(BLOCKS_AT_ONCE)),
            sent_bytes: Arc::default(),
            checked_parts: AtomicU64::default(),
            progress: Arc::new(|_| ()),
        })
    }

    pub(super) fn spawn_lease_keeper(&self, begun: &BeginSaveAnswer) -> RunningLeaseKeeper {
        let lease = begun.lease;
        let period = Duration::from_millis(begun.lease_ms / 3);
        let (client, runtime) = match self.lease_keeper() {
            Some((keeper, runtime)) => (keeper.clone(), runtime.clone()),
            None => (self.clone(), Handle::current()),
        };
        RunningLeaseKeeper(runtime.spawn(async move {
            loop {
                client.caller().clock().sleep(period).await;
                // The limit leaves time to ask another gateway if this one does not answer.
                if let Err(error) =
                    client.call_any_gateway_within(&RenewLease { lease }, period).await
                    && error.kind() == ErrorKind::Fenced
                {
                    return;
                }
            }
        }))
    }
}

pub(super) fn check_shards(shards: &[NewShard]) -> Result<(), ClientError> {
    let count = shards.len();
    if count > MAX_SHARDS as usize {
        return Err(ClientError::TooManyShards { count });
    }
    let mut names = HashSet::new();
    if let Some(twice) = shards.iter().find(|shard| !names.insert(&shard.name)) {
        return Err(ClientError::DuplicateName { name: twice.name.clone() });
    }
    if shards.is_empty() { Err(ClientError::NoShards) } else { Ok(()) }
}

/// Returns whether a call may have failed because the catalogue server is away.
fn can_be_server_outage(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Timeout)
}

/// The number of restarts of a save, and the nodes that refused it in earlier tries.
#[derive(Default)]
pub(super) struct SaveRestarts {
    pub(super) count: u32,
    /// Nodes that refused blocks. The next [`BeginSave`] leaves them out if a code of the cluster
    /// fits without them.
    pub(super) avoid: Vec<NodeId>,
    /// The error of the last try, if every node that failed in it refused.
    refused: Option<ClientError>,
}

impl SaveRestarts {
    /// Returns the error of the last try if the save began again on nodes that had refused. No code
    /// of the cluster fits without them, and they would refuse again.
    fn take_refusal_that_recurs(&mut self, begun: &BeginSaveAnswer) -> Option<ClientError> {
        let is_avoided = |node: &Node| self.avoid.contains(&NodeId::of(&node.name));
        let recurs = begun.nodes.iter().any(is_avoided);
        self.refused.take().filter(|_| recurs)
    }
}

impl SaveSession {
    /// Returns the shards of `decisions`. From here on the progress counts the bytes of all of them.
    fn prepare_shards(
        &mut self,
        decisions: &dyn SaveDecisions,
        progress: &ProgressFn,
    ) -> Result<Vec<NewShard>, ClientError> {
        let BeginSaveAnswer { n, k, block_bytes, .. } = self.begun;
        let shards = decisions.shards_for_code(SaveCode { n, k, block_bytes })?;
        check_shards(&shards)?;
        self.set_progress_callback(
            shards.iter().map(|shard| shard.source.len_bytes()).sum(),
            progress,
        );
        Ok(shards)
    }

    /// Reports the bytes that are sent from here on to `progress`, as a part of `total_bytes`.
    pub(super) fn set_progress_callback(&mut self, total_bytes: u64, progress: &ProgressFn) {
        let (sent, progress) = (self.sent_bytes.clone(), progress.clone());
        self.progress = Arc::new(move |bytes| {
            let done_bytes = sent.fetch_add(bytes, Ordering::Relaxed) + bytes;
            progress(Progress { done_bytes, total_bytes });
        });
    }

    async fn upload_and_commit(
        &self,
        shards: &[NewShard],
        decisions: &dyn SaveDecisions,
    ) -> Result<Saved, ClientError> {
        let count = u32::try_from(shards.len()).unwrap_or(u32::MAX);
        let work = (0u32..).zip(shards).map(|(index, shard)| self.save_shard(index, count, shard));
        // Collected, so that the future of a save can be sent to another thread.
        let work: Vec<_> = work.collect();
        let done: Vec<()> =
            stream::iter(work).buffer_unordered(SHARDS_AT_ONCE).try_collect().await?;
        debug_assert_eq!(done.len(), shards.len());
        decisions.approve_commit().await.map_err(|why| ClientError::CalledOff { why })?;
        self.repeat_after_catalogue_is_back(|| self.commit_save(shards.len())).await
    }

    /// Makes a call that may be made twice. If it fails while the catalogue server is away, makes
    /// it again once the server answers: leases, and with them the save, outlive a restart of the
    /// server. Waits for at most [`CATALOGUE_LIMIT`] in all. Stops waiting when the save's epoch is
    /// over; the caller then ends the save in the later epoch.
    pub(super) async fn repeat_after_catalogue_is_back<A, F>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<A, ClientError>
    where
        F: Future<Output = Result<A, ClientError>>,
    {
        let until = self.client.caller().clock().now() + CATALOGUE_LIMIT;
        let mut answered = false;
        loop {
            match call().await {
                // If the server answered just before, the cause of the error is not its absence.
                Err(error) if can_be_server_outage(error.kind()) && !answered => {
                    answered = self.wait_for_catalogue(until, &error).await;
                    if !answered {
                        return Err(error);
                    }
                }
                answer => return answer,
            }
        }
    }

    /// Waits until the catalogue server answers. Returns `false` at `until`, or when the epoch of the
    /// save is over.
    async fn wait_for_catalogue(&self, until: Duration, why: &ClientError) -> bool {
        let clock = self.client.caller().clock();
        let call = RenewLease { lease: self.begun.lease };
        let mut is_logged = false;
        loop {
            match self.client.call_any_gateway_within(&call, CATALOGUE_LOOK).await {
                Err(error) if can_be_server_outage(error.kind()) => {}
                _ => return true,
            }
            if clock.now() >= until || self.has_later_epoch().await {
                return false;
            }
            if !std::mem::replace(&mut is_logged, true) {
                tracing::warn!(error = %why, "the save of {}/{} waits for the catalogue server", self.job, self.step);
            }
            clock.sleep(CATALOGUE_LOOK).await;
        }
    }

    /// Returns whether some node knows a later epoch, and so refuses what was begun in this one.
    /// During a transfer no node knows a later epoch yet, and callers that want to change a key
    /// receive `Busy`. If `failed` is `Busy`, this therefore waits up to [`MOVE_LIMIT`] for a later
    /// epoch.
    pub(super) async fn has_epoch_ended(&self, failed: ErrorKind) -> bool {
        let clock = self.client.caller().clock();
        let until = clock.now() + MOVE_LIMIT;
        loop {
            if self.has_later_epoch().await {
                return true;
            }
            if failed != ErrorKind::Busy || clock.now() >= until {
                return false;
            }
            clock.sleep(MOVE_LOOK).await;
        }
    }

    async fn has_later_epoch(&self) -> bool {
        let asks = self.begun.nodes.iter().map(|node| async {
            let to = Address { host_port: node.address.clone(), node: Some(node.name.clone()) };
            self.client.caller().call_within(&to, &Hello { me: None }, HELLO_LIMIT).await
        });
        let mut asks = stream::iter(asks.collect::<Vec<_>>()).buffer_unordered(HELLOS_AT_ONCE);
        let epoch = self.begun.generation.epoch;
        while let Some(hello) = asks.next().await {
            if hello.is_ok_and(|hello| hello.epoch > epoch) {
                return true;
            }
        }
        false
    }

    /// Ends the save in the later epoch: commits it if all shards were completed or it is decided,
    /// and if `decisions` approve; otherwise aborts it. Tries for at most [`MOVE_LIMIT`] until the
    /// catalogue answers.
    async fn commit_or_abort(
        &self,
        shard_count: usize,
        decisions: &dyn SaveDecisions,
    ) -> SaveOutcome {
        let clock = self.client.caller().clock();
        let until = clock.now() + MOVE_LIMIT;
        // The call that failed may be the one that completed the last shard, before the approval.
        let may_commit = decisions.approve_commit().await.is_ok();
        loop {
            if may_commit && let Ok(saved) = self.commit_save(shard_count).await {
                return SaveOutcome::Committed(saved);
            }
            // The abort is refused if the save is decided. The save will be committed then.
            if self.abort_save().await {
                return SaveOutcome::Gone;
            }
            if clock.now() >= until {
                return SaveOutcome::Unknown;
            }
            clock.sleep(MOVE_LOOK).await;
        }
    }

    /// Aborts the save. Returns whether it is now known to be neither open nor decided.
    pub(super) async fn abort_save(&self) -> bool {
        let (job, step, save) = (self.job.clone(), self.step, self.begun.save);
        self.client.call_gateway(&AbortSave { job, step, save }).await.is_ok()
    }

    fn lock_roots(&self) -> MutexGuard<'_, BTreeMap<u32, ShardRoot>> {
        self.roots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build_report(&self, saved: Saved) -> Result<SaveReport, ClientError> {
        let BeginSaveAnswer { n, k, .. } = self.begun;
        let Saved { save, shards, len_bytes, generation, .. } = saved;
        let roots = std::mem::take(&mut *self.lock_roots()).into_values().collect();
        let (cluster, nodes) = (self.cluster, self.begun.nodes.clone());
        let record = SaveRecord::new(SaveHead { cluster, saved, nodes }, roots)?;
        Ok(SaveReport {
            job: self.job.clone(),
            step: self.step,
            save,
            shards,
            len_bytes,
            n,
            k,
            generation,
            record,
        })
    }

    pub(super) async fn commit_save(&self, shard_count: usize) -> Result<Saved, ClientError> {
        let shards = u32::try_from(shard_count).unwrap_or(u32::MAX);
        let (job, step, save) = (self.job.clone(), self.step, self.begun.save);
        self.client
            .call_any_gateway_within(&CommitSave { job, step, save, shards }, LONG_LIMIT)
            .await
    }

    /// Aborts the save, and prepares a restart if nodes failed and no spare was left. The next
    /// [`BeginSave`] counts the live nodes and may choose a smaller code.
    ///
    /// # Errors
    /// The save's `error`, if a restart would not help.
    pub(super) async fn abort_and_prepare_restart(
        &mut self,
        error: ClientError,
        restarts: &mut SaveRestarts,
    ) -> Result<(), ClientError> {
        // If the abort fails, the catalogue server aborts the save when its lease is over.
        if error.kind() != ErrorKind::Fenced {
            let _ = self.abort_save().await;
        }
        let has_no_holders = matches!(error, ClientError::Save(SaveError::NoHolders { .. }));
        if !has_no_holders || restarts.count > RESTARTS {
            return Err(error);
        }
        // The next `BeginSave` does not count a node that refused, for example because its disk is
        // full. It counts a node that is down as live until the node's lease is over, so wait for a
        // lease period.
        restarts.avoid.extend(self.failures.refused_nodes());
        if self.failures.has_only_refusals() {
            restarts.refused = Some(error);
            return Ok(());
        }
        let lease = Duration::from_millis(self.begun.lease_ms);
        self.client.caller().clock().sleep(lease).await;
        tracing::warn!(%error, restarts = restarts.count, "the save of {}/{} failed and starts again from its first byte", self.job, self.step);
        Ok(())
    }

    /// Uploads and completes a shard of a save that has no other writer.
    async fn save_shard(
        &self,
        index: u32,
        shard_count: u32,
        shard: &NewShard,
    ) -> Result<(), ClientError> {
        let mut fingerprint_key = [0; 32];
        self.client.entropy().fill(&mut fingerprint_key);
        let ring = ring(&self.begun.nodes, index.into());
        let parameters = ShardParameters { index, shard_count, ring, fingerprint_key };
        let root = self.upload_shard(parameters, shard).await?;
        self.repeat_after_catalogue_is_back(|| self.complete_shard(root.clone())).await
    }

    /// Records that a shard is complete.
    pub(super) async fn complete_shard(&self, root: ShardRoot) -> Result<(), ClientError> {
        self.lock_roots().insert(root.index, root.clone());
        self.client.call_gateway(&CompleteShard { root }).await
    }
}
