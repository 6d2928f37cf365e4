//! Verifying a checkpoint where it lies: the nodes read all that they have of it and say what is wrong; no data crosses the network
//! (docs/semantics.md, 6, *Verify*).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;

use super::judge::{ExaminedStripe, HeldItem, JudgedFault, KnownMargins, Problem, StripeJudgement};
use crate::client::restore::read::{BY_MARKS, MAX_MOVES};
use crate::client::restore::selection::ShardSelection;
use crate::client::{Client, ClientError, Progress, ProgressFn};
use crate::format::digest;
use crate::format::file::FileName;
use crate::format::records::{Leaves, Receipt, Record, StripeState};
use crate::id::{Attempt, Job, NodeId, PeerName, ShardName, Step, StripeId};
use crate::kind::ErrorKind;
use crate::pipeline::read::{ReadSession, find_stripe_state};
use crate::pipeline::shard_records::{self, RecordsError};
use crate::wire::NodeAddress;
use crate::wire::calls::{
    ExamineAnswer, ExamineStripe, GetRecord, ListSources, RecordName, VerifyFile,
};

/// Stripes that are examined at once. A node reads one file after the other, so that with several it always has a next one.
const STRIPES_AT_ONCE: usize = 4;
/// A node that did not answer is not asked again before this has passed.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Nodes that are asked at once for a stripe.
const NODES_AT_ONCE: usize = 32;
/// The time-out of one [`ExamineStripe`], with the time in the node's queue.
const EXAMINE_LIMIT: Duration = Duration::from_secs(1200);
/// How long the client waits for replicas to be mended, and 1 s for each [`MEND_PACE_BYTES`] of them. Others stay in the report.
const MEND_LIMIT: Duration = Duration::from_secs(30);
const MEND_PACE_BYTES: u64 = 4 << 20;
/// Between two looks whether a replica is mended.
const MEND_LOOK: Duration = Duration::from_millis(500);
/// Faults that a report names; all are counted.
const MAX_FAULTS: usize = 10_000;

/// A part of a checkpoint that is not as it should be, on a node that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The node.
    pub node: String,
    /// The shard.
    pub shard: ShardName,
    /// The stripe; `None` for a record of the shard.
    pub stripe: Option<u32>,
    /// The part.
    pub held: HeldItem,
    /// The defect.
    pub wrong: Problem,
}

/// A node that may have a part of the checkpoint and was not examined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbsentNode {
    /// The node.
    pub node: String,
    /// Why it was not.
    pub reason: String,
}

/// How a checkpoint is.
#[derive(Debug, Clone)]
pub struct VerifyReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// How many shards.
    pub shards: u32,
    /// How many stripes.
    pub stripes: u64,
    /// Files that were read.
    pub files: u64,
    /// Their bytes, as far as their tails tell.
    pub file_bytes: u64,
    /// Records that were read.
    pub records: u64,
    /// Nodes that answered.
    pub nodes: Vec<PeerName>,
    /// Nodes of the rings that did not answer, are not registered, or do not support the call.
    pub away: Vec<AbsentNode>,
    /// Nodes that answer and could not examine a stripe, by their disks' errors, say.
    pub failures: Vec<AbsentNode>,
    /// Records that nodes lack, of which as many are there as the commit promised; at most 10,000.
    pub lacking: Vec<Fault>,
    /// The defects that were found, at most 10,000.
    pub faults: Vec<Fault>,
    /// The number of defects.
    pub fault_count: u64,
    /// The defects that were mended, at most 10,000.
    pub mended: Vec<Fault>,
    /// The largest number such that any so many of the nodes that answered may be lost and every stripe can still be read from the others.
    /// `None` if the parts found good do not prove that every stripe can be read.
    pub survives: Option<usize>,
    /// The first stripe that survives no more losses than that.
    pub weakest: Option<(ShardName, u32)>,
    /// Errors that did not end the verify.
    pub incidents: Vec<String>,
}

/// What becomes of a replica that is found damaged.
#[derive(Debug, Clone, Copy)]
enum Finding {
    /// Its node notes it.
    Note,
    /// Its node mends it.
    Mend,
}

/// What all stripes share.
struct Verification<'a> {
    client: &'a Client,
    reading: Arc<ReadSession>,
    /// Nodes that did not answer, each of which may take seconds to be silent.
    away: Mutex<BTreeMap<NodeId, SilentNode>>,
    /// Stripes that nodes which answer could not examine, and why.
    failures: Mutex<BTreeMap<(NodeId, StripeId), String>>,
    answered: Mutex<BTreeMap<NodeId, PeerName>>,
    known: Mutex<KnownMargins>,
    done_bytes: AtomicU64,
    total_bytes: u64,
    progress: ProgressFn,
}

/// A node that did not answer.
struct SilentNode {
    reason: String,
    /// When it is asked again, at the earliest.
    ask_again: Duration,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// Has every replica, piece and record of a committed step (`None`: the latest) checked by the nodes that have them. The nodes note what
    /// is damaged.
    ///
    /// # Errors
    /// When the step is not there or nobody can be asked. That something is damaged or lost is no error: the report says so.
    pub async fn verify(
        &self,
        job: &Job,
        step: Option<Step>,
        progress: ProgressFn,
    ) -> Result<VerifyReport, ClientError> {
        self.retry_on_replaced(|| self.verify_found(job, step, Finding::Note, progress.clone()))
            .await
    }

    /// As [`verify`](Self::verify), and has damaged replicas mended. The report is of afterwards.
    ///
    /// # Errors
    /// As with `verify`. That something cannot be mended is none.
    pub async fn verify_and_mend(
        &self,
        job: &Job,
        step: Option<Step>,
        progress: ProgressFn,
    ) -> Result<VerifyReport, ClientError> {
        self.retry_on_replaced(|| self.verify_found(job, step, Finding::Mend, progress.clone()))
            .await
    }

    async fn verify_found(
        &self,
        job: &Job,
        step: Option<Step>,
        finding: Finding,
        progress: ProgressFn,
    ) -> Result<VerifyReport, ClientError> {
        let found = self.fetch_step(job, step).await?;
        let step = found.step.step;
        if found.shards.iter().any(|(_, state)| state.is_none()) {
            return Err(ClientError::Removed { job: job.clone(), step });
        }
        let incidents = found.step.by_marks.then(|| BY_MARKS.to_owned()).into_iter().collect();
        let parts = self.select_all(job, step, found.shards, None)?;
        let reading = ReadSession::new(
            self.caller().clone(),
            self.workers().clone(),
            self.entropy().clone(),
            self.fetch_directory().await?,
            incidents,
        );
        let mut total_bytes = 0;
        for part in &parts {
            total_bytes += expected_bytes(part)?;
        }
        let verification = Verification {
            client: self,
            reading,
            away: Mutex::default(),
            failures: Mutex::default(),
            answered: Mutex::default(),
            known: Mutex::default(),
            done_bytes: AtomicU64::new(0),
            total_bytes,
            progress,
        };
        let mut exams = Vec::new();
        for part in &parts {
            exams.extend(verification.examine_part(part).await?);
        }
        verification.examine_again(&mut exams).await?;
        let mended = match finding {
            Finding::Note => Vec::new(),
            Finding::Mend => verification.mend(&mut exams).await?,
        };
        Ok(verification.report((job, step), &parts, &exams, mended))
    }
}

/// What the nodes have of a shard, if nothing is missing.
fn expected_bytes(part: &ShardSelection) -> Result<u64, ClientError> {
    let geometry = part.root.geometry()?;
    let stripes = (0..geometry.stripes()).filter_map(|index| {
        let cut = geometry.stripe(index)?;
        let pieces = u64::from(part.root.n) * cut.block_len(0);
        Some(match part.state.as_ref().and_then(|state| state.stripe(index)) {
            Some(StripeState::Archived { dropped: true, .. }) => pieces,
            Some(StripeState::Archived { .. }) => pieces + 2 * cut.len_bytes,
            _ => 2 * cut.len_bytes,
        })
    });
    Ok(stripes.sum())
}

/// A stripe and how it is.
struct StripeExam<'a> {
    part: &'a ShardSelection,
    index: u32,
    of: StripeJudgement,
}

impl Verification<'_> {
    async fn examine_part<'p>(
        &self,
        part: &'p ShardSelection,
    ) -> Result<Vec<StripeExam<'p>>, ClientError> {
        let stripes = part.root.geometry()?.stripes();
        let leaves = self.leaves(part).await?;
        let leaves = leaves.as_ref();
        // A shard without a stripe has its records all the same.
        let mut exams = stream::iter(0..stripes.max(1))
            .map(|index| async move {
                let of = self.examine(part, leaves, index).await?;
                Ok::<_, ClientError>(StripeExam { part, index, of })
            })
            .buffered(STRIPES_AT_ONCE);
        let mut examined = Vec::new();
        while let Some(exam) = exams.next().await {
            examined.push(exam?);
        }
        Ok(examined)
    }

    /// The leaves of a shard; `None` when no node that answers has them.
    async fn leaves(&self, part: &ShardSelection) -> Result<Option<Leaves>, ClientError> {
        match self.client.fetch_leaves(&self.reading, part).await {
            Ok(leaves) => Ok(Some(leaves)),
            Err(ClientError::Records(error @ RecordsError::Lost { .. })) => {
                self.record_incident(error.to_string());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Examines once more the stripes that were judged with nodes that have gone away since, or without nodes that are back.
    async fn examine_again(&self, exams: &mut [StripeExam<'_>]) -> Result<(), ClientError> {
        for of_shard in exams.chunk_by_mut(|a, b| a.part.root.shard == b.part.root.shard) {
            let Some(part) = of_shard.first().map(|exam| exam.part) else { continue };
            let away: BTreeSet<NodeId> = lock(&self.away).keys().copied().collect();
            let is_stale = |exam: &&mut StripeExam<'_>| {
                let mut ring = part.root.ring.iter().map(|member| member.node);
                ring.any(|node| exam.of.answered.contains(&node) == away.contains(&node))
            };
            let stale: Vec<&mut StripeExam<'_>> = of_shard.iter_mut().filter(is_stale).collect();
            if stale.is_empty() {
                continue;
            }
            let leaves = self.leaves(part).await?;
            let leaves = leaves.as_ref();
            let work = stale.into_iter().map(|exam| async move {
                exam.of = self.examine(part, leaves, exam.index).await?;
                Ok::<_, ClientError>(())
            });
            // Collected, so that the future of a verify can be sent to another thread.
            let work: Vec<_> = work.collect();
            let mut work = stream::iter(work).buffer_unordered(STRIPES_AT_ONCE);
            while let Some(done) = work.next().await {
                done?;
            }
        }
        Ok(())
    }

    /// Examines a stripe. If it has faults or cannot be read, and its state has changed, examines it again.
    async fn examine(
        &self,
        part: &ShardSelection,
        leaves: Option<&Leaves>,
        index: u32,
    ) -> Result<StripeJudgement, ClientError> {
        let known = part.state.as_ref().and_then(|state| state.stripe(index));
        let mut state = match known {
            Some(state) => state,
            None => find_stripe_state(&self.reading, &part.root, index, true).await,
        };
        let mut moves = 0;
        loop {
            let exam = self.examine_in_state(part, leaves, index, state).await?;
            if exam.faults.is_empty() && exam.survives.is_some() {
                return Ok(exam);
            }
            match self.client.await_next_state(&self.reading, part, index, state).await? {
                Some(next) if moves < MAX_MOVES => (state, moves) = (next, moves + 1),
                _ => return Ok(exam),
            }
        }
    }

    async fn examine_in_state(
        &self,
        part: &ShardSelection,
        leaves: Option<&Leaves>,
        index: u32,
        state: StripeState,
    ) -> Result<StripeJudgement, ClientError> {
        let (caller, directory) = (&self.reading.caller, &self.reading.directory);
        let answers = self.ask_ring(part, index).await;
        let mut info = None;
        if let Some(leaves) = leaves.filter(|_| part.root.len_bytes > 0) {
            match shard_records::fetch_stripe_record(caller, directory, &part.root, leaves, index)
                .await
            {
                Ok(found) => info = Some(found),
                Err(error @ RecordsError::Lost { .. }) => self.record_incident(error.to_string()),
                Err(error) => return Err(error.into()),
            }
        }
        let receipt = match state {
            StripeState::Archived { attempt, .. } => {
                self.receipt(part, (index, attempt), &answers).await
            }
            _ => None,
        };
        let leaf = leaves.and_then(|leaves| leaves.hashes.get(index as usize)).copied();
        let examined = ExaminedStripe {
            root: &part.root,
            info: info.as_ref().zip(leaf),
            state,
            receipt: receipt.as_ref(),
            answers: &answers,
            with_shard: index == 0,
        };
        Ok(examined.judge(&mut lock(&self.known)))
    }

    /// The receipt of an attempt that most nodes have. An earlier one may lie on a node that was replaced.
    async fn receipt(
        &self,
        part: &ShardSelection,
        (index, attempt): (u32, Attempt),
        answers: &BTreeMap<NodeId, ExamineAnswer>,
    ) -> Option<Receipt> {
        let record = RecordName::Receipt { index, attempt };
        let mut holders: BTreeMap<[u8; 32], Vec<NodeId>> = BTreeMap::new();
        for (&node, answer) in answers {
            let of_record = answer.records.iter().filter(|view| view.record == record);
            for digest in of_record.filter_map(|view| view.digest) {
                holders.entry(digest).or_default().push(node);
            }
        }
        let (digest, nodes) = holders.into_iter().max_by_key(|(_, nodes)| nodes.len())?;
        for node in nodes {
            let Some(address) = self.reading.directory.address(node) else { continue };
            let call = GetRecord { shard: part.root.shard, record };
            let Ok(Some(bytes)) = self.reading.caller.call(&address, &call).await else { continue };
            let receipt = Receipt::parse(&bytes).ok();
            let is_it = |receipt: &Receipt| digest::of_receipt(receipt) == Some(digest);
            if let Some(receipt) = receipt.filter(is_it) {
                return Some(receipt);
            }
        }
        self.record_incident(format!(
            "the receipt of stripe {index} of {} was not given",
            part.root.name
        ));
        None
    }

    /// What the nodes of the ring that answer have of a stripe.
    async fn ask_ring(&self, part: &ShardSelection, index: u32) -> BTreeMap<NodeId, ExamineAnswer> {
        let stripe = StripeId { shard: part.root.shard, index };
        let call = ExamineStripe { stripe, with_shard: index == 0 };
        let call = &call;
        let answers = stream::iter(part.root.ring.iter().map(|member| member.node))
            .map(|node| async move { Some((node, self.ask_node(node, call).await?)) })
            .buffer_unordered(NODES_AT_ONCE);
        answers.filter_map(std::future::ready).collect().await
    }

    async fn ask_node(&self, node: NodeId, call: &ExamineStripe) -> Option<ExamineAnswer> {
        let now = || self.reading.caller.clock().now();
        if lock(&self.away).get(&node).is_some_and(|away| now() < away.ask_again) {
            return None;
        }
        let Some(address) = self.reading.directory.address(node) else {
            let reason = "it is not registered".to_owned();
            lock(&self.away).insert(node, SilentNode { reason, ask_again: Duration::MAX });
            return None;
        };
        let (mut patience, began) = (self.reading.busy_retry(), now());
        let error = loop {
            match self.reading.caller.call_held(&address, call, EXAMINE_LIMIT).await {
                Ok(answer) => {
                    lock(&self.away).remove(&node);
                    lock(&self.failures).remove(&(node, call.stripe));
                    lock(&self.answered).insert(node, address.name);
                    let lengths = answer.files.iter().filter_map(|file| Some(file.content?.0));
                    self.count(lengths.sum());
                    return Some(answer);
                }
                Err(error) if error.kind() == ErrorKind::Busy && patience.wait().await => {}
                Err(error) => break error,
            }
        };
        tracing::debug!(node = %address.name, %error, "not examined");
        if error.is_unanswered() || error.kind() == ErrorKind::Invalid {
            let reason = match error.is_unanswered() {
                true => "no answer".to_owned(),
                false => error.to_string(),
            };
            // One that takes long to be silent is asked as rarely.
            let pause = ASK_AGAIN.max(now().saturating_sub(began));
            lock(&self.away).insert(node, SilentNode { reason, ask_again: now() + pause });
        } else {
            // The node answered with an error: its examination of this stripe failed.
            lock(&self.failures).insert((node, call.stripe), error.to_string());
        }
        None
    }

    fn count(&self, bytes: u64) {
        let done_bytes = self.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let total_bytes = self.total_bytes;
        (self.progress)(Progress { done_bytes: done_bytes.min(total_bytes), total_bytes });
    }

    fn record_incident(&self, text: String) {
        let mut incidents = lock(&self.reading.incidents);
        if incidents.len() < MAX_FAULTS {
            incidents.push(text);
        }
    }

    /// Has damaged replicas mended and examines their stripes again. Returns what was mended.
    async fn mend(&self, exams: &mut [StripeExam<'_>]) -> Result<Vec<Fault>, ClientError> {
        let clock = self.reading.caller.clock();
        let mut reported = Vec::new();
        for (at, exam) in exams.iter().enumerate() {
            // Nodes mend only replicas of stripes that are not archived, and only with a catalogue.
            let Some(state) = &exam.part.state else { continue };
            if matches!(state.stripe(exam.index), Some(StripeState::Archived { .. })) {
                continue;
            }
            let stripe = StripeId { shard: exam.part.root.shard, index: exam.index };
            for fault in &exam.of.faults {
                let (HeldItem::Replica(block), Problem::Grains(_) | Problem::Damaged) =
                    (fault.held, fault.wrong)
                else {
                    continue;
                };
                let Some(address) = self.reading.directory.address(fault.node) else { continue };
                let file = FileName::Replica { block };
                let call = VerifyFile { stripe, file };
                match self.reading.caller.call_held(&address, &call, EXAMINE_LIMIT).await {
                    Ok(_) => reported.push((at, fault.clone(), address, stripe, file)),
                    Err(error) => self.record_incident(error.to_string()),
                }
            }
        }
        let bytes: u64 = reported.iter().map(|(at, ..)| exams[*at].part.root.block_bytes).sum();
        let end = clock.now() + MEND_LIMIT + Duration::from_secs(bytes / MEND_PACE_BYTES);
        for (_, _, address, stripe, file) in &reported {
            self.wait_until_good(address, *stripe, *file, end).await;
        }
        let mut mended = Vec::new();
        for of_stripe in reported.chunk_by(|a, b| a.0 == b.0) {
            let Some(exam) = of_stripe.first().and_then(|(at, ..)| exams.get_mut(*at)) else {
                continue;
            };
            let leaves = self.leaves(exam.part).await?;
            exam.of = self.examine(exam.part, leaves.as_ref(), exam.index).await?;
            for (_, fault, _, _, file) in of_stripe {
                if exam.of.good.contains(&(fault.node, *file)) {
                    mended.push(self.fault(exam, fault));
                }
            }
        }
        Ok(mended)
    }

    /// Waits until a replica counts on its node.
    async fn wait_until_good(
        &self,
        node: &NodeAddress,
        stripe: StripeId,
        file: FileName,
        end: Duration,
    ) {
        let clock = self.reading.caller.clock();
        while clock.now() < end {
            let sources = self.reading.caller.call(node, &ListSources { stripe }).await;
            // A node that does not say is asked again, as long as there is time.
            let is_good = sources.is_ok_and(|sources| {
                sources.iter().any(|source| source.file == file && source.damaged.is_none())
            });
            if is_good {
                return;
            }
            clock.sleep(MEND_LOOK).await;
        }
    }

    fn fault(&self, exam: &StripeExam<'_>, fault: &JudgedFault) -> Fault {
        let is_of_shard = matches!(fault.held, HeldItem::Leaves | HeldItem::Mark);
        Fault {
            node: self.reading.directory.name(fault.node),
            shard: exam.part.root.name.clone(),
            stripe: (!is_of_shard).then_some(exam.index),
            held: fault.held,
            wrong: fault.wrong,
        }
    }

    /// The nodes that were not examined, by name.
    fn absent_nodes(&self) -> Vec<AbsentNode> {
        let away = lock(&self.away);
        let name = |node: &NodeId| self.reading.directory.name(*node);
        let mut away: Vec<AbsentNode> = away
            .iter()
            .map(|(node, silent)| AbsentNode { node: name(node), reason: silent.reason.clone() })
            .collect();
        away.sort_by(|a, b| a.node.cmp(&b.node));
        away
    }

    fn report(
        self,
        (job, step): (&Job, Step),
        parts: &[ShardSelection],
        exams: &[StripeExam<'_>],
        mut mended: Vec<Fault>,
    ) -> VerifyReport {
        mended.truncate(MAX_FAULTS);
        let mut nodes: Vec<PeerName> = lock(&self.answered).values().cloned().collect();
        nodes.sort();
        let all = |of: fn(&StripeJudgement) -> u64| exams.iter().map(|exam| of(&exam.of)).sum();
        let faults = exams.iter().flat_map(|exam| exam.of.faults.iter().map(move |f| (exam, f)));
        let faults = faults.map(|(exam, fault)| self.fault(exam, fault)).take(MAX_FAULTS);
        let lacking = exams.iter().flat_map(|exam| exam.of.lacking.iter().map(move |f| (exam, f)));
        let lacking = lacking.map(|(exam, fault)| self.fault(exam, fault)).take(MAX_FAULTS);
        let failures = lock(&self.failures);
        let failures = failures.iter().take(MAX_FAULTS).map(|((node, stripe), why)| AbsentNode {
            node: self.reading.directory.name(*node),
            reason: format!("stripe {stripe}: {why}"),
        });
        let weakest = exams.iter().min_by_key(|exam| exam.of.survives);
        VerifyReport {
            job: job.clone(),
            step,
            shards: parts.len() as u32,
            stripes: exams.iter().filter(|exam| exam.part.root.len_bytes > 0).count() as u64,
            files: all(|exam| exam.files),
            file_bytes: all(|exam| exam.file_bytes),
            records: all(|exam| exam.records),
            faults: faults.collect(),
            fault_count: all(|exam| exam.faults.len() as u64),
            mended,
            survives: weakest.and_then(|exam| exam.of.survives),
            weakest: weakest.map(|exam| (exam.part.root.name.clone(), exam.index)),
            nodes,
            away: self.absent_nodes(),
            lacking: lacking.collect(),
            failures: failures.collect(),
            incidents: std::mem::take(&mut *lock(&self.reading.incidents)),
        }
    }
}
