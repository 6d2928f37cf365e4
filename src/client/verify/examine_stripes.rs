//! Verifying a checkpoint in place. The nodes read all data that they hold of it and report
//! defects; no data crosses the network (docs/semantics.md, 6, *Verify*).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;

use super::judge_stripe::{ExaminedStripe, HeldItem, JudgedFault, StripeJudgement};
use super::report::{AbsentNode, Fault, VerifyReport};
use crate::client::restore::plan_and_read::BY_MARKS;
use crate::client::restore::selection::ShardSelection;
use crate::client::restore::stripe_planning::MAX_MOVES;
use crate::client::{Client, ClientError, Progress, ProgressFn};
use crate::code::SurvivableLossCache;
use crate::format::records::{Leaves, Receipt, Record, StripeState};
use crate::id::{Job, NodeId, PeerName, Step, StripeId};
use crate::kind::ErrorKind;
use crate::pipeline::coordinator::{ArchivedAttempt, choose_receipt_that_counts};
use crate::pipeline::read::{NodesToAsk, ReadSession, find_stripe_state};
use crate::pipeline::record_fetch::{self, RecordsError};
use crate::wire::calls::{ExamineAnswer, ExamineStripe, GetRecord, RecordName};

/// Number of stripes that are examined at once. A node reads one file after another, so with
/// several stripes it always has a next file.
const STRIPES_AT_ONCE: usize = 4;
/// Minimum wait before a node that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Number of nodes that are asked about a stripe at once.
const NODES_AT_ONCE: usize = 32;
/// Time limit of one [`ExamineStripe`], and of one `VerifyFile` before a mend, including the time
/// in the node's queue.
pub(super) const EXAMINE_LIMIT: Duration = Duration::from_secs(1200);
/// Maximum number of entries in each list of a report. The number of faults is counted without this
/// limit.
const MAX_FAULTS: usize = 10_000;

/// The treatment of a replica that is found damaged.
#[derive(Debug, Clone, Copy)]
enum DamageAction {
    /// The node notes the damage.
    Note,
    /// The node notes the damage and mends the replica.
    Mend,
}

/// The state that the examinations of all stripes share.
pub(super) struct Verification<'a> {
    client: &'a Client,
    pub(super) reading: Arc<ReadSession>,
    /// Nodes that did not answer. It may take seconds to find out that such a node is silent.
    silent_nodes: Mutex<BTreeMap<NodeId, SilentNode>>,
    /// The reasons why nodes that answer could not examine a stripe.
    failures: Mutex<BTreeMap<(NodeId, StripeId), String>>,
    answered: Mutex<BTreeMap<NodeId, PeerName>>,
    survivable_cache: Mutex<SurvivableLossCache>,
    done_bytes: AtomicU64,
    total_bytes: u64,
    progress: ProgressFn,
}

/// A node that did not answer.
struct SilentNode {
    reason: String,
    /// The earliest time at which the node is asked again.
    ask_again: Duration,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// Makes the nodes check every replica, piece and record that they hold of a committed step
    /// (`None`: the latest). The nodes record the damage that they find. Returns the report.
    ///
    /// # Errors
    /// If the step is not committed, or no node can be asked. Damaged and lost data is no error;
    /// the report names it.
    pub async fn verify(
        &self,
        job: &Job,
        step: Option<Step>,
        progress: ProgressFn,
    ) -> Result<VerifyReport, ClientError> {
        self.retry_on_replaced(|| {
            self.verify_step_once(job, step, DamageAction::Note, progress.clone())
        })
        .await
    }

    /// Verifies a step as [`verify`](Self::verify) does, and makes the nodes mend damaged replicas.
    /// Returns a report on the state afterwards.
    ///
    /// # Errors
    /// As for `verify`. A replica that cannot be mended is no error.
    pub async fn verify_and_mend(
        &self,
        job: &Job,
        step: Option<Step>,
        progress: ProgressFn,
    ) -> Result<VerifyReport, ClientError> {
        self.retry_on_replaced(|| {
            self.verify_step_once(job, step, DamageAction::Mend, progress.clone())
        })
        .await
    }

    async fn verify_step_once(
        &self,
        job: &Job,
        step: Option<Step>,
        action: DamageAction,
        progress: ProgressFn,
    ) -> Result<VerifyReport, ClientError> {
        let found = self.fetch_step(job, step).await?;
        let step = found.step.step;
        if found.shards.iter().any(|(_, state)| state.is_none()) {
            return Err(ClientError::Removed { job: job.clone(), step });
        }
        let incidents = found.step.by_marks.then(|| BY_MARKS.to_owned()).into_iter().collect();
        let parts = self.select_requested(job.at(step), found.shards, None)?;
        let reading = ReadSession::new(
            self.caller().clone(),
            self.workers().clone(),
            self.entropy().clone(),
            self.fetch_directory().await?,
            incidents,
        );
        let mut total_bytes = 0;
        for part in &parts {
            total_bytes += expected_stored_bytes(part)?;
        }
        let verification = Verification {
            client: self,
            reading,
            silent_nodes: Mutex::default(),
            failures: Mutex::default(),
            answered: Mutex::default(),
            survivable_cache: Mutex::default(),
            done_bytes: AtomicU64::new(0),
            total_bytes,
            progress,
        };
        let mut exams = Vec::new();
        for part in &parts {
            exams.extend(verification.examine_shard(part).await?);
        }
        verification.reexamine_stale(&mut exams).await?;
        let mended = match action {
            DamageAction::Note => Vec::new(),
            DamageAction::Mend => verification.mend_replicas(&mut exams).await?,
        };
        Ok(verification.build_report((job, step), &parts, &exams, mended))
    }
}

/// Returns the number of bytes that the nodes hold of a shard if nothing is missing.
fn expected_stored_bytes(part: &ShardSelection) -> Result<u64, ClientError> {
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

/// A stripe and its judgement.
pub(super) struct StripeExam<'a> {
    pub(super) part: &'a ShardSelection,
    pub(super) index: u32,
    pub(super) judgement: StripeJudgement,
}

impl Verification<'_> {
    async fn examine_shard<'p>(
        &self,
        part: &'p ShardSelection,
    ) -> Result<Vec<StripeExam<'p>>, ClientError> {
        let stripes = part.root.geometry()?.stripes();
        let leaves = self.fetch_leaves(part).await?;
        let leaves = leaves.as_ref();
        // A shard without stripes has records too.
        let mut exams = stream::iter(0..stripes.max(1))
            .map(|index| async move {
                let of = self.examine_stripe(part, leaves, index).await?;
                Ok::<_, ClientError>(StripeExam { part, index, judgement: of })
            })
            .buffered(STRIPES_AT_ONCE);
        let mut examined = Vec::new();
        while let Some(exam) = exams.next().await {
            examined.push(exam?);
        }
        Ok(examined)
    }

    /// Fetches the leaves of a shard. Returns `None` if no node that answers has them.
    pub(super) async fn fetch_leaves(
        &self,
        part: &ShardSelection,
    ) -> Result<Option<Leaves>, ClientError> {
        match self.client.fetch_leaves(&self.reading, part).await {
            Ok(leaves) => Ok(Some(leaves)),
            Err(ClientError::Records(error @ RecordsError::Lost { .. })) => {
                self.record_incident(error.to_string());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Examines again the stripes whose judgement is out of date. Such a judgement counts a node
    /// that has become unreachable since; or it lacks a node that is reachable, because the node
    /// answers again, or because it failed to examine the stripe.
    async fn reexamine_stale(&self, exams: &mut [StripeExam<'_>]) -> Result<(), ClientError> {
        for of_shard in exams.chunk_by_mut(|a, b| a.part.root.shard == b.part.root.shard) {
            let Some(part) = of_shard.first().map(|exam| exam.part) else { continue };
            let away: BTreeSet<NodeId> = lock(&self.silent_nodes).keys().copied().collect();
            let is_stale = |exam: &&mut StripeExam<'_>| {
                let mut ring = self.reading.directory.nodes_to_ask(&part.root);
                ring.any(|node| exam.judgement.answered.contains(&node) == away.contains(&node))
            };
            let stale: Vec<&mut StripeExam<'_>> = of_shard.iter_mut().filter(is_stale).collect();
            if stale.is_empty() {
                continue;
            }
            let leaves = self.fetch_leaves(part).await?;
            let leaves = leaves.as_ref();
            let work = stale.into_iter().map(|exam| async move {
                exam.judgement = self.examine_stripe(part, leaves, exam.index).await?;
                Ok::<_, ClientError>(())
            });
            // Collected, so that the future of a verification can be sent to another thread.
            let work: Vec<_> = work.collect();
            let mut work = stream::iter(work).buffer_unordered(STRIPES_AT_ONCE);
            while let Some(done) = work.next().await {
                done?;
            }
        }
        Ok(())
    }

    /// Examines a stripe. If the stripe has faults or cannot be read, and its state has changed
    /// meanwhile, examines it again.
    pub(super) async fn examine_stripe(
        &self,
        part: &ShardSelection,
        leaves: Option<&Leaves>,
        index: u32,
    ) -> Result<StripeJudgement, ClientError> {
        let known = part.state.as_ref().and_then(|state| state.stripe(index));
        let mut state = match known {
            Some(state) => state,
            None => find_stripe_state(&self.reading, &part.root, index, NodesToAsk::All).await,
        };
        let mut moves = 0;
        loop {
            let exam = self.examine_stripe_in_state(part, leaves, index, state).await?;
            if exam.faults.is_empty() && exam.survives.is_some() {
                return Ok(exam);
            }
            match self.client.find_changed_state(&self.reading, part, index, state).await? {
                Some(next) if moves < MAX_MOVES => (state, moves) = (next, moves + 1),
                _ => return Ok(exam),
            }
        }
    }

    async fn examine_stripe_in_state(
        &self,
        part: &ShardSelection,
        leaves: Option<&Leaves>,
        index: u32,
        state: StripeState,
    ) -> Result<StripeJudgement, ClientError> {
        let (caller, directory) = (&self.reading.caller, &self.reading.directory);
        let answers = self.examine_on_ring(part, index).await;
        let mut info = None;
        if let Some(leaves) = leaves.filter(|_| part.root.len_bytes > 0) {
            match record_fetch::fetch_stripe_record(caller, directory, &part.root, leaves, index)
                .await
            {
                Ok(found) => info = Some(found),
                Err(error @ RecordsError::Lost { .. }) => self.record_incident(error.to_string()),
                Err(error) => return Err(error.into()),
            }
        }
        let receipt = match state {
            StripeState::Archived { attempt, generation, code, .. } => {
                let archived = ArchivedAttempt { attempt, generation, code };
                self.fetch_receipt_that_counts(part, index, archived, &answers).await
            }
            _ => None,
        };
        let leaf = leaves.and_then(|leaves| leaves.hashes.get(index as usize)).copied();
        let ring = directory.current_ring(&part.root);
        let ring: Vec<NodeId> = ring.iter().map(|member| member.node).collect();
        let examined = ExaminedStripe {
            root: &part.root,
            ring: &ring,
            info: info.as_ref().zip(leaf),
            state,
            receipt: receipt.as_ref(),
            answers: &answers,
            with_shard: index == 0,
        };
        Ok(examined.judge_stripe(&mut lock(&self.survivable_cache)))
    }

    /// Returns the receipt that says where the pieces of an archived stripe are. If the receipts
    /// contradict each other, returns the one that the most nodes have.
    async fn fetch_receipt_that_counts(
        &self,
        part: &ShardSelection,
        index: u32,
        archived: ArchivedAttempt,
        answers: &BTreeMap<NodeId, ExamineAnswer>,
    ) -> Option<Receipt> {
        let record = RecordName::Receipt { index, attempt: archived.attempt };
        let has_it = |answer: &ExamineAnswer| {
            answer.records.iter().any(|view| view.record == record && view.digest.is_some())
        };
        let holders = answers.iter().filter(|(_, answer)| has_it(answer));
        let asks = holders.map(|(&node, _)| async move {
            let address = self.reading.directory.address(node)?;
            let call = GetRecord { shard: part.root.shard, record };
            let bytes = self.reading.caller.call(&address, &call).await.ok()??;
            Some((node, Receipt::parse(&bytes).ok()?))
        });
        let found: Vec<Option<(NodeId, Receipt)>> =
            stream::iter(asks).buffer_unordered(NODES_AT_ONCE).collect().await;
        if found.is_empty() {
            return None;
        }
        let found: BTreeMap<NodeId, Receipt> = found.into_iter().flatten().collect();
        if let Some(receipt) = choose_receipt_that_counts(&found, archived) {
            return Some(receipt.clone());
        }
        let copies = |receipt: &Receipt| found.values().filter(|other| *other == receipt).count();
        let most_common = found.values().max_by_key(|receipt| copies(receipt));
        if most_common.is_none() {
            self.record_incident(format!(
                "no node returned the receipt of stripe {index} of {}",
                part.root.name
            ));
        }
        most_common.cloned()
    }

    /// Asks the nodes of the ring about a stripe. Returns the answers of those that answer.
    async fn examine_on_ring(
        &self,
        part: &ShardSelection,
        index: u32,
    ) -> BTreeMap<NodeId, ExamineAnswer> {
        let stripe = StripeId { shard: part.root.shard, index };
        let call = ExamineStripe { stripe, with_shard: index == 0 };
        let call = &call;
        let answers = stream::iter(self.reading.directory.nodes_to_ask(&part.root))
            .map(|node| async move { Some((node, self.examine_on_node(node, call).await?)) })
            .buffer_unordered(NODES_AT_ONCE);
        answers.filter_map(std::future::ready).collect().await
    }

    async fn examine_on_node(&self, node: NodeId, call: &ExamineStripe) -> Option<ExamineAnswer> {
        let now = || self.reading.caller.clock().now();
        if lock(&self.silent_nodes).get(&node).is_some_and(|away| now() < away.ask_again) {
            return None;
        }
        let Some(address) = self.reading.directory.address(node) else {
            let reason = "it is not registered".to_owned();
            lock(&self.silent_nodes).insert(node, SilentNode { reason, ask_again: Duration::MAX });
            return None;
        };
        let (mut patience, began) = (self.reading.new_busy_retry(), now());
        let error = loop {
            match self.reading.caller.call_held(&address, call, EXAMINE_LIMIT).await {
                Ok(answer) => {
                    lock(&self.silent_nodes).remove(&node);
                    lock(&self.failures).remove(&(node, call.stripe));
                    lock(&self.answered).insert(node, address.name);
                    let lengths = answer.files.iter().filter_map(|file| Some(file.content?.0));
                    self.add_progress(lengths.sum());
                    return Some(answer);
                }
                Err(error)
                    if error.kind() == ErrorKind::Busy && patience.wait_unless_expired().await => {}
                Err(error) => break error,
            }
        };
        tracing::debug!(node = %address.name, %error, "a node did not examine a stripe");
        if error.is_unanswered() || error.kind() == ErrorKind::Invalid {
            let reason = match error.is_unanswered() {
                true => "no answer".to_owned(),
                false => error.to_string(),
            };
            // Wait as long as the node took to be found silent, so that slow nodes are asked less
            // often.
            let pause = ASK_AGAIN.max(now().saturating_sub(began));
            lock(&self.silent_nodes).insert(node, SilentNode { reason, ask_again: now() + pause });
        } else {
            // The node answered with an error: its examination of this stripe failed.
            lock(&self.failures).insert((node, call.stripe), error.to_string());
        }
        None
    }

    fn add_progress(&self, bytes: u64) {
        let done_bytes = self.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let total_bytes = self.total_bytes;
        (self.progress)(Progress { done_bytes: done_bytes.min(total_bytes), total_bytes });
    }

    pub(super) fn record_incident(&self, text: String) {
        let mut incidents = lock(&self.reading.incidents);
        if incidents.len() < MAX_FAULTS {
            incidents.push(text);
        }
    }

    pub(super) fn to_report_fault(&self, exam: &StripeExam<'_>, fault: &JudgedFault) -> Fault {
        let is_of_shard = matches!(fault.held, HeldItem::Leaves | HeldItem::Mark);
        Fault {
            node: self.reading.directory.name(fault.node),
            shard: exam.part.root.name.clone(),
            stripe: (!is_of_shard).then_some(exam.index),
            held: fault.held,
            wrong: fault.wrong,
        }
    }

    /// Returns the nodes that were not examined, by name.
    fn absent_nodes(&self) -> Vec<AbsentNode> {
        let away = lock(&self.silent_nodes);
        let name = |node: &NodeId| self.reading.directory.name(*node);
        let mut away: Vec<AbsentNode> = away
            .iter()
            .map(|(node, silent)| AbsentNode { node: name(node), reason: silent.reason.clone() })
            .collect();
        away.sort_by(|a, b| a.node.cmp(&b.node));
        away
    }

    fn build_report(
        self,
        (job, step): (&Job, Step),
        parts: &[ShardSelection],
        exams: &[StripeExam<'_>],
        mut mended: Vec<Fault>,
    ) -> VerifyReport {
        mended.truncate(MAX_FAULTS);
        let mut nodes: Vec<PeerName> = lock(&self.answered).values().cloned().collect();
        nodes.sort();
        let all =
            |of: fn(&StripeJudgement) -> u64| exams.iter().map(|exam| of(&exam.judgement)).sum();
        let faults =
            exams.iter().flat_map(|exam| exam.judgement.faults.iter().map(move |f| (exam, f)));
        let faults = faults.map(|(exam, fault)| self.to_report_fault(exam, fault)).take(MAX_FAULTS);
        let lacking =
            exams.iter().flat_map(|exam| exam.judgement.lacking.iter().map(move |f| (exam, f)));
        let lacking =
            lacking.map(|(exam, fault)| self.to_report_fault(exam, fault)).take(MAX_FAULTS);
        let failures = lock(&self.failures);
        let failures = failures.iter().take(MAX_FAULTS).map(|((node, stripe), why)| AbsentNode {
            node: self.reading.directory.name(*node),
            reason: format!("stripe {stripe}: {why}"),
        });
        let weakest = exams.iter().min_by_key(|exam| exam.judgement.survives);
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
            survives: weakest.and_then(|exam| exam.judgement.survives),
            weakest: weakest.map(|exam| (exam.part.root.name.clone(), exam.index)),
            nodes,
            away: self.absent_nodes(),
            lacking: lacking.collect(),
            failures: failures.collect(),
            incidents: std::mem::take(&mut *lock(&self.reading.incidents)),
        }
    }
}
