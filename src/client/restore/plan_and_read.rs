//! Restoring a checkpoint: plans every stripe, refuses if one cannot be read, then streams
//! (docs/semantics.md, 6).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, TryStreamExt};

use super::output::{
    CountedSink, DiscardSink, FileSink, Output, TemporaryFiles, refuse_output_conflicts,
};
use super::restore_request::RestoreRequest;
use super::selection::{PartSlice, PartSlices, ReadRange, ShardSelection, StripeSlice};
use crate::client::{Client, ClientError, Progress, ProgressFn};
use crate::format::records::{Leaves, ShardRoot, ShardState, StripeState};
use crate::id::{Job, NodeId, Step, StripeId};
use crate::kind::ErrorKind;
use crate::pipeline::busy_retry::BusyRetry;
use crate::pipeline::read::{
    NodesToAsk, ReadError, ReadSession, Sink, StripeReader, UnreadableStripe, find_stripe_state,
};
use crate::pipeline::record_fetch::{self, RecordsError};
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;
use crate::wire::calls::GetShardState;

/// Number of stripes planned at once.
const PLANS_AT_ONCE: usize = 8;
/// Number of stripes read at once. Each holds up to k streams.
const STRIPES_AT_ONCE: usize = 2;
/// Maximum number of retries: of planning a stripe again after its sources failed, and of looking
/// up a step again after its save was replaced.
const MAX_LOOKS: u32 = 3;
/// Wait before a step that was found removed is looked up again. A client may be about to commit
/// its replacement.
const REPLACED_WAIT: Duration = Duration::from_millis(500);
/// Maximum number of changes of a stripe's state that a reader follows. The state moves forward
/// twice, but a state that is derived from the nodes may vary from time to time.
pub(in crate::client) const MAX_MOVES: u32 = 8;

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

/// A slice, the state of its stripe for which the reader was planned, and the reader.
struct PlannedStripe {
    slice: StripeSlice,
    state: StripeState,
    reader: StripeReader,
}

/// The retries of one slice whose sources failed.
struct SliceRetries {
    /// Number of times that the slice was planned again at once.
    looks: u32,
    outage: BusyRetry,
}

impl Client {
    /// Restores a committed step (`None`: the latest) into a folder. Writes only if everything can
    /// be read.
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
        if let Some(output) = output.file_request() {
            refuse_output_conflicts(output, &parts)?;
        }
        let reading = ReadSession::new(
            self.caller().clone(),
            self.workers().clone(),
            self.entropy().clone(),
            directory.await?,
            incident.map(str::to_owned).into_iter().collect(),
        );
        let total_bytes = parts.iter().map(|part| part.range.end - part.range.start).sum();
        let done = AtomicU64::new(0);
        let count: Arc<dyn Fn(u64) + Send + Sync> = Arc::new(move |bytes| {
            // A stripe whose reading started again counts twice.
            let done_bytes = (done.fetch_add(bytes, Ordering::Relaxed) + bytes).min(total_bytes);
            progress(Progress { done_bytes, total_bytes });
        });
        trace_point(TracePoint::Plan, format_args!("{job}/{step}"));
        let planned = self.plan_parts(&reading, &parts).await?;
        let (mut replica_stripes, mut decoded_stripes) = (0, 0);
        for PlannedStripe { reader, .. } in planned.iter().flatten() {
            let slot =
                if reader.needs_decoding() { &mut decoded_stripes } else { &mut replica_stripes };
            *slot += 1;
        }
        let mut files = TemporaryFiles::new(output);
        trace_point(TracePoint::Deliver, format_args!("{job}/{step}"));
        self.read_into_output(&reading, &parts, planned, output, &count, &mut files).await?;
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

    /// Plans a reader for each slice of each part. Reports all stripes that cannot be read in one
    /// [`ClientError::Lost`]. The slices of all parts are planned as one sequence, because most
    /// parts of a step of many small files have a single slice.
    async fn plan_parts(
        &self,
        reading: &Arc<ReadSession>,
        parts: &[ShardSelection],
    ) -> Result<Vec<Vec<PlannedStripe>>, ClientError> {
        let (mut lost, mut total) = (Vec::new(), 0);
        let mut planned: Vec<Vec<PlannedStripe>> = parts.iter().map(|_| Vec::new()).collect();
        let slices = PartSlices::new(parts)?;
        let mut plans = stream::iter(slices)
            .map(|next| async move {
                (next.at, self.plan_part_slice(reading, &parts[next.at], next).await)
            })
            .buffered(PLANS_AT_ONCE);
        while let Some((at, plan)) = plans.next().await {
            total += 1;
            match plan {
                Ok(reader) => planned[at].push(reader),
                Err(ClientError::Read(ReadError::Lost(one))) => lost.push(one),
                Err(error) => return Err(error),
            }
        }
        if lost.is_empty() { Ok(planned) } else { Err(ClientError::Lost { lost, total }) }
    }

    /// Plans a reader for a slice. Fetches the leaves of its part unless another slice has done so.
    async fn plan_part_slice(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        PartSlice { slice, leaves, .. }: PartSlice,
    ) -> Result<PlannedStripe, ClientError> {
        let leaves = leaves.get_or_try_init(|| self.fetch_leaves(reading, part)).await?;
        let state = match &part.state {
            Some(known) => known.stripe(slice.stripe),
            None => {
                let of = (&part.root, slice.stripe);
                Some(find_stripe_state(reading, of.0, of.1, NodesToAsk::Live).await)
            }
        };
        let state = state.unwrap_or(StripeState::Replicated);
        self.plan_slice(reading, part, leaves, &slice, state).await
    }

    /// Plans a reader for a stripe in `state`, or in the state that it has reached meanwhile.
    async fn plan_slice(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        leaves: &Leaves,
        slice: &StripeSlice,
        mut state: StripeState,
    ) -> Result<PlannedStripe, ClientError> {
        let (mut moves, mut patience) = (0, reading.new_busy_retry());
        let (mut has_asked_nodes, mut is_by_nodes) = (part.state.is_none(), false);
        loop {
            let error = match self.plan_slice_in_state(reading, part, leaves, slice, state).await {
                Ok(reader) => return Ok(PlannedStripe { slice: slice.clone(), state, reader }),
                Err(ClientError::Read(error)) => error,
                Err(error) => return Err(error),
            };
            let is_busy = matches!(error, ReadError::Busy { .. });
            if moves >= MAX_MOVES || !(is_busy || matches!(error, ReadError::Lost(_))) {
                return Err(error.into());
            }
            if is_busy && is_by_nodes {
                // The catalogue does not know this state yet, so asking it again yields nothing
                // new.
                if !patience.wait_unless_expired().await {
                    return Err(error.into());
                }
                continue;
            }
            is_by_nodes = false;
            match self.find_changed_state(reading, part, slice.stripe, state).await? {
                Some(next) => {
                    moves += 1;
                    state = next;
                }
                None if is_busy && patience.wait_unless_expired().await => {}
                // The nodes may have pieces that were proven before the commit point. These serve
                // as well, so derive the state from the nodes, once.
                None if !is_busy && !has_asked_nodes => {
                    has_asked_nodes = true;
                    let found =
                        find_stripe_state(reading, &part.root, slice.stripe, NodesToAsk::All).await;
                    if found == state || found == StripeState::Replicated {
                        return Err(error.into());
                    }
                    (state, is_by_nodes) = (found, true);
                }
                None => return Err(error.into()),
            }
        }
    }

    /// Returns the present state of a stripe if it differs from `known`. Returns `None` if the
    /// state is unchanged, or cannot be found out.
    pub(in crate::client) async fn find_changed_state(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        stripe: u32,
        known: StripeState,
    ) -> Result<Option<StripeState>, ClientError> {
        let shard = self.fetch_shard_state(reading, part).await?;
        let state = match part.state {
            Some(_) => shard.and_then(|shard| shard.stripe(stripe)),
            None => Some(find_stripe_state(reading, &part.root, stripe, NodesToAsk::All).await),
        };
        Ok(state.filter(|state| *state != known))
    }

    /// Fetches the leaves of a shard. Returns [`ClientError::Removed`] if no node has them because
    /// the step was removed.
    pub(in crate::client) async fn fetch_leaves(
        &self,
        reading: &ReadSession,
        part: &ShardSelection,
    ) -> Result<Leaves, ClientError> {
        let mut patience = reading.new_busy_retry();
        loop {
            match record_fetch::fetch_leaves(&reading.caller, &reading.directory, &part.root).await
            {
                Err(error @ RecordsError::Lost { .. }) => {
                    self.fetch_shard_state(reading, part).await?;
                    if error.kind() != ErrorKind::Busy || !patience.wait_unless_expired().await {
                        return Err(error.into());
                    }
                }
                leaves => return Ok(leaves?),
            }
        }
    }

    /// Fetches the state of a shard. Returns `None` if the catalogue does not answer, or if `part`
    /// has no state from a catalogue. Returns [`ClientError::Removed`] if the shard is gone.
    async fn fetch_shard_state(
        &self,
        reading: &ReadSession,
        part: &ShardSelection,
    ) -> Result<Option<ShardState>, ClientError> {
        let (job, step) = (&part.root.job, part.root.step);
        let gone = || ClientError::Removed { job: job.clone(), step };
        if part.state.is_none() {
            let is_gone = self.is_removed_anywhere(&reading.directory, part.root.save).await;
            return if is_gone { Err(gone()) } else { Ok(None) };
        }
        let Ok(shard) = self.call_gateway(&GetShardState { shard: part.root.shard }).await else {
            return Ok(None);
        };
        shard.filter(|shard| !shard.deleting).map(Some).ok_or_else(gone)
    }

    async fn plan_slice_in_state(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        leaves: &Leaves,
        slice: &StripeSlice,
        state: StripeState,
    ) -> Result<StripeReader, ClientError> {
        let (caller, directory) = (&reading.caller, &reading.directory);
        let info = match record_fetch::fetch_stripe_record(
            caller,
            directory,
            &part.root,
            leaves,
            slice.stripe,
        )
        .await
        {
            Err(error @ RecordsError::Lost { .. }) if error.kind() == ErrorKind::Busy => {
                let stripe = StripeId { shard: part.root.shard, index: slice.stripe };
                let (node, reason) = ("with its record".into(), error.to_string());
                return Err(ReadError::Busy { stripe, node, reason }.into());
            }
            Err(error @ RecordsError::Lost { .. }) => {
                return Err(ReadError::Lost(UnreadableStripe {
                    shard: part.root.name.to_string(),
                    stripe: slice.stripe,
                    needs: "its record".into(),
                    missing: vec![error.to_string()],
                })
                .into());
            }
            other => other?,
        };
        let receipt = match state {
            StripeState::Archived { attempt, .. } => {
                // Without the receipt the pieces can still be read. The decoded bytes are verified
                // in any case.
                let at = (slice.stripe, info.places.as_slice());
                record_fetch::fetch_receipt(caller, directory, &part.root, at, attempt).await.ok()
            }
            _ => None,
        };
        let (root, key) = (part.root.clone(), part.key.clone());
        let (blocks, grains) = (&slice.blocks, slice.grains.clone());
        let reading = reading.clone();
        let plan =
            StripeReader::probe_and_plan(reading, root, key, info, state, receipt, blocks, grains);
        Ok(plan.await?)
    }

    /// Reads a slice. If its sources fail, plans the stripe again: it may have been archived
    /// meanwhile, and the first plan may have left out sources that it did not need.
    async fn read_slice(
        &self,
        reading: &Arc<ReadSession>,
        part: &ShardSelection,
        mut planned: PlannedStripe,
        sink: Arc<dyn Sink>,
    ) -> Result<(), ClientError> {
        let mut retries = SliceRetries { looks: 0, outage: reading.new_busy_retry() };
        loop {
            let PlannedStripe { slice, state, reader } = planned;
            let (grains, range) = (slice.grains.clone(), part.range.clone());
            let lost = match reader.read_into_sink(&slice.blocks, grains, range, sink.clone()).await
            {
                Err(error @ ReadError::Lost(_)) => error.into(),
                result => return Ok(result?),
            };
            planned =
                self.plan_slice_again(reading, part, (&slice, state), &mut retries, lost).await?;
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
        planned: Vec<Vec<PlannedStripe>>,
        output: &Output<'_>,
        count: &Arc<dyn Fn(u64) + Send + Sync>,
        files: &mut TemporaryFiles<'a>,
    ) -> Result<(), ClientError> {
        let mut work = Vec::new();
        for (at, (part, readers)) in parts.iter().zip(planned).enumerate() {
            let sink: Arc<dyn Sink> = match output {
                Output::Files(output) => {
                    let failed = |source| ClientError::Output { path: part.path.clone(), source };
                    let file = output.out.create_new(&part.temporary).map_err(failed)?;
                    files.add(part);
                    Arc::new(FileSink { file, start: part.range.start, done: count.clone() })
                }
                Output::Sinks(sinks) => match sinks.get(at) {
                    Some(to) => Arc::new(CountedSink { to: to.clone(), done: count.clone() }),
                    None => Arc::new(DiscardSink { done: count.clone() }),
                },
                Output::Nowhere => Arc::new(DiscardSink { done: count.clone() }),
            };
            work.extend(readers.into_iter().map(|reader| (part, sink.clone(), reader)));
        }
        stream::iter(work.into_iter().map(Ok))
            .try_for_each_concurrent(STRIPES_AT_ONCE, |(part, sink, planned)| {
                self.read_slice(reading, part, planned, sink)
            })
            .await
    }
}
