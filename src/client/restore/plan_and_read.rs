//! Restoring a checkpoint: selects its parts, has every stripe planned, refuses if one cannot be read,
//! then streams (docs/semantics.md, 6).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, TryStreamExt};
use tokio::sync::{OnceCell, Semaphore};

use super::output::{
    CountedSink, DiscardSink, FileSink, Output, TemporaryFiles, refuse_full_output,
    refuse_output_conflicts,
};
use super::restore_request::RestoreRequest;
use super::selection::{ReadRange, ShardSelection, StripeSlice};
use super::stripe_planning::{MAX_MOVES, PlannedStripe, ReadPlan};
use crate::client::{Client, ClientError, Progress, ProgressFn};
use crate::format::records::{Leaves, ShardRoot, StripeState};
use crate::id::{Job, NodeId, Step};
use crate::kind::ErrorKind;
use crate::pipeline::busy_retry::BusyRetry;
use crate::pipeline::read::{ReadSession, Sink};
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;

/// Number of files of nodes that are read at once. A stripe counts for at most half of them, so that
/// two stripes are read at once whatever k is.
const FILES_AT_ONCE: u16 = 16;
/// Maximum number of retries: of planning a stripe again after its sources failed, and of looking
/// up a step again after its save was replaced.
const MAX_LOOKS: u32 = 3;
/// Wait before a step that was found removed is looked up again. A client may be about to commit
/// its replacement.
const REPLACED_WAIT: Duration = Duration::from_millis(500);
/// The first incident in the report of a restore without a catalogue.
pub(in crate::client) const BY_MARKS: &str =
    "no catalogue answers: the checkpoint was found by its commit marks";

/// The report about a restore.
#[derive(Debug, Clone)]
pub struct RestoreReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Number of shards.
    pub shards: u32,
    /// Number of bytes written, or verified.
    pub len_bytes: u64,
    /// Number of stripes read from replicas.
    pub replica_stripes: u64,
    /// Number of stripes decoded from pieces.
    pub decoded_stripes: u64,
    /// Failures that the restore survived.
    pub incidents: Vec<String>,
}

/// The scope of a read.
enum ReadScope<'a> {
    /// Into this output: the shard and range that its [`RestoreRequest`] names, or the whole step
    /// if it names none or there is no request.
    All(Output<'a>),
    /// Ranges of shards.
    Ranges(&'a [ReadRange]),
}

/// The retries of one slice whose sources failed.
struct SliceRetries {
    /// Number of times that the slice was planned again at once.
    looks: u32,
    outage: BusyRetry,
}

/// A part whose slices are being read, with what they share.
#[derive(Clone)]
struct OpenPart {
    sink: Arc<dyn Sink>,
    /// The leaves of the shard, which are fetched if a slice has to be planned.
    leaves: Arc<OnceCell<Leaves>>,
}

impl OpenPart {
    /// Opens the destination of part `at`.
    fn open(
        output: &Output<'_>,
        at: usize,
        part: &ShardSelection,
        count: &Arc<dyn Fn(u64) + Send + Sync>,
    ) -> Result<Self, ClientError> {
        let done = count.clone();
        let sink: Arc<dyn Sink> = match output {
            Output::Files(request) => {
                let file = request.out.open_to_write(&part.temporary);
                let file = file.map_err(|source| part.output_error(source))?;
                Arc::new(FileSink { file, start: part.range.start, done })
            }
            Output::Sinks(sinks) => match sinks.get(at) {
                Some(to) => Arc::new(CountedSink { to: to.clone(), done }),
                None => Arc::new(DiscardSink { done }),
            },
            Output::Nowhere => Arc::new(DiscardSink { done }),
        };
        Ok(Self { sink, leaves: Arc::default() })
    }
}

impl Client {
    /// Restores a committed step (`None`: the latest) into a folder. Every stripe is planned before
    /// the first byte is written; if one has too few sources, nothing is written.
    pub async fn restore(
        &self,
        job: &Job,
        step: Option<Step>,
        request: RestoreRequest,
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        self.read_step(job, step, ReadScope::All(Output::Files(&request)), progress).await
    }

    /// Reads one copy of a whole committed step (`None`: the latest) and verifies every byte as a
    /// restore does, without writing anything. [`Client::verify`] checks all copies instead.
    pub async fn read_without_output(
        &self,
        job: &Job,
        step: Option<Step>,
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        self.read_step(job, step, ReadScope::All(Output::Nowhere), progress).await
    }

    /// Reads ranges of the shards of a committed step (`None`: the latest) into their sinks,
    /// verified as in a restore. Delivers bytes only if everything can be read. If the call fails
    /// later, the delivered bytes are incomplete. A step that is replaced meanwhile is read again
    /// from the new save, so bytes may be delivered twice.
    pub async fn read_ranges(
        &self,
        job: &Job,
        step: Option<Step>,
        ranges: &[ReadRange],
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        self.read_step(job, step, ReadScope::Ranges(ranges), progress).await
    }

    /// Reads ranges of completed shards of a save that is still open, verified by the shards' roots.
    /// All `roots` are of one save.
    pub async fn read_ranges_of_open_save(
        &self,
        roots: &[ShardRoot],
        ranges: &[ReadRange],
    ) -> Result<(), ClientError> {
        let Some(first) = roots.first() else { return Ok(()) };
        let step_ref = first.job.at(first.step);
        let shards = roots.iter().map(|root| (root.clone(), None)).collect();
        let parts = self.select_ranges(step_ref, shards, ranges)?;
        let sinks: Vec<_> = ranges.iter().map(|range| range.sink.clone()).collect();
        let (directory, output) = (self.fetch_directory(), Output::Sinks(&sinks));
        let job_and_step = (step_ref.job, step_ref.step);
        self.read_parts(job_and_step, parts, directory, None, &output, Arc::new(|_| ()))
            .await
            .map(drop)
    }

    /// Reads the scope. A step that is replaced meanwhile is read from the new save.
    async fn read_step(
        &self,
        job: &Job,
        step: Option<Step>,
        wanted: ReadScope<'_>,
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        self.retry_on_replaced(|| self.read_step_once(job, step, &wanted, progress.clone())).await
    }

    /// Does `work` on a step, and again if the step was replaced meanwhile.
    pub(in crate::client) async fn retry_on_replaced<T, F>(
        &self,
        work: impl Fn() -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let (mut looks, mut removed) = (0, None);
        loop {
            match work().await {
                Err(error @ ClientError::Removed { .. }) if looks < MAX_LOOKS => {
                    removed = Some(error);
                }
                // The save that was committed at first has been removed since.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Err(removed.unwrap_or(error));
                }
                result => return result,
            }
            looks += 1;
            self.caller().clock().sleep(REPLACED_WAIT).await;
        }
    }

    async fn read_step_once(
        &self,
        job: &Job,
        step: Option<Step>,
        wanted: &ReadScope<'_>,
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        let found = self.fetch_step(job, step).await?;
        let step = found.step.step;
        if found.shards.iter().any(|(_, state)| state.is_none()) {
            return Err(ClientError::Removed { job: job.clone(), step });
        }
        let incident = found.step.by_marks.then_some(BY_MARKS);
        match wanted {
            ReadScope::All(output) => {
                let parts =
                    self.select_requested(job.at(step), found.shards, output.file_request())?;
                self.read_parts(
                    (job, step),
                    parts,
                    self.fetch_directory(),
                    incident,
                    output,
                    progress,
                )
                .await
            }
            ReadScope::Ranges(ranges) => {
                let parts = self.select_ranges(job.at(step), found.shards, ranges)?;
                let sinks: Vec<_> = ranges.iter().map(|range| range.sink.clone()).collect();
                let output = Output::Sinks(&sinks);
                self.read_parts(
                    (job, step),
                    parts,
                    self.fetch_directory(),
                    incident,
                    &output,
                    progress,
                )
                .await
            }
        }
    }

    /// Reads `parts` from the nodes of `directory`, which is awaited only after the output has been
    /// checked.
    pub(in crate::client) async fn read_parts(
        &self,
        (job, step): (&Job, Step),
        parts: Vec<ShardSelection>,
        directory: impl Future<Output = Result<Directory, ClientError>>,
        incident: Option<&str>,
        output: &Output<'_>,
        progress: ProgressFn,
    ) -> Result<RestoreReport, ClientError> {
        let total_bytes = parts.iter().map(|part| part.range.end - part.range.start).sum();
        if let Some(output) = output.file_request() {
            refuse_output_conflicts(output, &parts)?;
            refuse_full_output(output, total_bytes)?;
        }
        let reading = ReadSession::new(
            self.caller().clone(),
            self.workers().clone(),
            self.entropy().clone(),
            directory.await?,
            incident.map(str::to_owned).into_iter().collect(),
        );
        let done = AtomicU64::new(0);
        let count: Arc<dyn Fn(u64) + Send + Sync> = Arc::new(move |bytes| {
            // A stripe whose reading started again counts twice.
            let done_bytes = (done.fetch_add(bytes, Ordering::Relaxed) + bytes).min(total_bytes);
            progress(Progress { done_bytes, total_bytes });
        });
        trace_point(TracePoint::Plan, format_args!("{job}/{step}"));
        let plan = self.plan_parts(&reading, &parts).await?;
        let (replica_stripes, decoded_stripes) = (plan.replica_stripes, plan.decoded_stripes);
        let mut files = TemporaryFiles::new(output);
        trace_point(TracePoint::Deliver, format_args!("{job}/{step}"));
        self.read_into_output(&reading, &parts, plan, output, &count, &mut files).await?;
        if output.file_request().is_some() {
            trace_point(TracePoint::Finish, format_args!("{job}/{step}"));
        }
        files.publish()?;
        let incidents =
            std::mem::take(&mut *reading.incidents.lock().unwrap_or_else(PoisonError::into_inner));
        let shards = parts.len() as u32;
        Ok(RestoreReport {
            job: job.clone(),
            step,
            shards,
            len_bytes: total_bytes,
            replica_stripes,
            decoded_stripes,
            incidents,
        })
    }

    /// Reads a slice. If its sources fail, plans the stripe again: it may have been archived
    /// meanwhile, and the first plan may have left out sources that it did not need.
    /// Takes from `free` the permits for the files while it reads them.
    async fn read_slice(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        OpenPart { sink, leaves }: OpenPart,
        mut planned: PlannedStripe,
        free: &Semaphore,
    ) -> Result<(), ClientError> {
        let mut retries = SliceRetries { looks: 0, outage: reading.new_busy_retry() };
        loop {
            let PlannedStripe { slice, state, reader } = planned;
            let failed = match reader {
                Some(reader) => {
                    let files = match reader.needs_decoding() {
                        true => part.root.k.into(),
                        false => slice.blocks.len() as u16,
                    };
                    // The semaphore is never closed.
                    let _turn = free.acquire_many(files.clamp(1, FILES_AT_ONCE / 2).into()).await;
                    let (grains, range) = (slice.grains.clone(), part.range.clone());
                    let read = reader.read_into_sink(&slice.blocks, grains, range, sink.clone());
                    match read.await {
                        Ok(()) => return Ok(()),
                        Err(error) => error.into(),
                    }
                }
                None => {
                    let plan = async {
                        let leaves =
                            leaves.get_or_try_init(|| self.fetch_leaves(reading, part)).await?;
                        self.plan_slice(reading, part, leaves, &slice, state).await
                    };
                    match plan.await {
                        Ok(next) => {
                            planned = next;
                            continue;
                        }
                        Err(error) => error,
                    }
                }
            };
            if failed.kind() != ErrorKind::Lost {
                return Err(failed);
            }
            planned =
                self.plan_slice_again(reading, part, (&slice, state), &mut retries, failed).await?;
        }
    }

    /// Plans a slice again whose sources failed with the error `lost`. While nodes of the shard do
    /// not answer, waits for them for up to [`BUSY_LIMIT`](crate::pipeline::busy_retry::BUSY_LIMIT):
    /// a restore of hours must outlive the restart of a switch.
    async fn plan_slice_again(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        (slice, state): (&StripeSlice, StripeState),
        retries: &mut SliceRetries,
        mut lost: ClientError,
    ) -> Result<PlannedStripe, ClientError> {
        let ring: Vec<NodeId> = reading.directory.nodes_to_ask(&part.root).collect();
        loop {
            let changed = self.find_changed_state(reading, part, slice.stripe, state).await?;
            let max_looks = if changed.is_some() { MAX_MOVES } else { MAX_LOOKS };
            if retries.looks < max_looks {
                retries.looks += 1;
            } else {
                let is_outage = ring.iter().any(|&node| reading.directory.is_silent(node));
                if !is_outage || !retries.outage.wait_unless_expired().await {
                    return Err(lost);
                }
            }
            let state = changed.unwrap_or(state);
            let planned = async {
                let leaves = self.fetch_leaves(reading, part).await?;
                self.plan_slice(reading, part, &leaves, slice, state).await
            };
            match planned.await {
                Err(error) if error.kind() == ErrorKind::Lost => lost = error,
                planned => return planned,
            }
        }
    }

    async fn read_into_output<'a>(
        &self,
        reading: &Arc<ReadSession>,
        parts: &'a [ShardSelection],
        plan: ReadPlan,
        output: &Output<'_>,
        count: &Arc<dyn Fn(u64) + Send + Sync>,
        files: &mut TemporaryFiles<'a>,
    ) -> Result<(), ClientError> {
        // All files are created before the first byte is read. At most FILES_AT_ONCE are
        // open at a time, because a step may have more files than a process can have open.
        if let Some(request) = output.file_request() {
            for part in parts {
                let created = request.out.create_new(&part.temporary);
                created.map_err(|source| part.output_error(source))?;
                files.add(part);
            }
        }
        let mut opened: Option<(usize, OpenPart)> = None;
        let work = plan.slices.into_iter().map(|(at, planned)| {
            let open = match opened.take() {
                Some((of, open)) if of == at => open,
                _ => OpenPart::open(output, at, &parts[at], count)?,
            };
            opened = Some((at, open.clone()));
            Ok((&parts[at], open, planned))
        });
        let free = &Semaphore::new(FILES_AT_ONCE.into());
        stream::iter(work)
            .try_for_each_concurrent(usize::from(FILES_AT_ONCE), |(part, open, planned)| {
                self.read_slice(reading, part, open, planned, free)
            })
            .await
    }
}
