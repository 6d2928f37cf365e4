//! The policy, applied by the catalogue server: old steps are archived or retired
//! (docs/semantics.md, 9).
//!
//! One round runs per lease period. Each round decides from what the catalogue says at that time;
//! what is remembered between two rounds only saves work. A round begins at most one archiving and
//! a few removals. Both take the same path as those that an operator requests.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::error::BackgroundError;
use crate::catalogue::Catalogue;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    ARCHIVE_REQUESTS, ArchiveRequest, CHECKPOINTS, checkpoint_key, parse_archive_request_key,
    parse_checkpoint_key, parse_record, read_record, shard_roots_prefix, shard_state_key,
};
use crate::config::{Fate, Rule};
use crate::format::records::{Checkpoint, RemoveReason, Saved, ShardRoot, ShardState, StripeState};
use crate::id::{Job, SaveId, Step, StepRef};
use crate::kind::ErrorKind;
use crate::node::context::NodeContext;
use crate::node::gateway::labels::find_label_to_keep;
use crate::node::gateway::removal::{SaveRemoval, UnpublishOutcome};
use crate::node::gateway::retention_pause::is_retention_paused;
use crate::node::retry_schedule::RetrySchedule;
use crate::wire::RemoteError;
use crate::wire::calls::{ArchiveOptions, GetPolicyStatus, PlanChoice};
use crate::wire::order::Codec;
use crate::wire::policy::{PolicyAnswer, PolicyRule, PolicyWait};

/// Maximum number of steps that are retired in one round.
const RETIRED_AT_ONCE: usize = 8;
/// The policy begins no archiving while there are this many archive requests that have not failed
/// yet. Requests that have failed do not count.
const MAX_OPEN_REQUESTS: usize = 4;
/// Maximum number of steps whose shards are read in one round.
const LOOKED_AT_ONCE: usize = 256;
/// Maximum number of saves that are remembered as archived. Further ones are checked in every
/// round.
const MAX_ARCHIVED: usize = 131_072;
/// Maximum number of archivings and removals, together, that the policy's status names as waiting
/// for a retry.
const MAX_VIEWS: usize = 64;

/// The options with which the policy archives.
const OPTIONS: ArchiveOptions =
    ArchiveOptions { plan: PlanChoice::Chain, codec: Codec::Kernel, parallel: 0 };

/// The counts from a scan over all checkpoints.
#[derive(Default)]
pub(in crate::node) struct CheckpointCounts {
    /// Number of committed steps, by job.
    pub(in crate::node) committed: BTreeMap<Job, u64>,
    /// Number of removals that are under way.
    pub(in crate::node) removing: u64,
}

/// The state that a round leaves to the next one to save work. Without it, rounds decide the same.
#[derive(Default)]
pub(in crate::node) struct RetentionCache {
    archived: HashSet<SaveId>,
    /// The step at which the last round reached its limit of steps to read. The next round reads
    /// only later steps.
    cursor: Option<(Job, Step)>,
    archiving: Option<JoinHandle<()>>,
}

/// The state that the rounds share with the archiving under way and with the calls that report it.
pub(in crate::node) struct RetentionState {
    waits: RetrySchedule,
    answer: PolicyAnswer,
}

impl RetentionState {
    fn new(lease: std::time::Duration) -> Self {
        Self { waits: RetrySchedule::new(lease), answer: PolicyAnswer::default() }
    }
}

/// The archive requests that are not finished.
#[derive(Default)]
struct OpenArchiveRequests {
    steps: HashSet<(Job, Step)>,
    /// Number of requests that have not failed yet.
    untried: usize,
    /// The requests that wait for a retry; the first [`MAX_VIEWS`] of them.
    waiting: Vec<PolicyWait>,
}

impl OpenArchiveRequests {
    async fn read(catalogue: &dyn Catalogue) -> Result<Self, RemoteError> {
        let mut open = Self::default();
        let mut requests = KeyScan::of_prefix(catalogue, ARCHIVE_REQUESTS.to_owned());
        while let Some((key, entry)) = requests.next().await? {
            let Some((job, step)) = parse_archive_request_key(&key) else { continue };
            open.steps.insert((job.clone(), step));
            // The takeover reports a request that does not parse.
            let Ok(request) = parse_record::<ArchiveRequest>(&key, &entry.value) else { continue };
            open.untried += usize::from(request.failures == 0);
            if let Some(why) = request.waiting.filter(|_| open.waiting.len() < MAX_VIEWS) {
                open.waiting.push(PolicyWait { job, step, failures: request.failures, why });
            }
        }
        Ok(open)
    }

    fn has(&self, job: &Job, step: Step) -> bool {
        !self.steps.is_empty() && self.steps.contains(&(job.clone(), step))
    }
}

/// The progress of one round.
#[derive(Default)]
struct RetentionRound {
    is_retention_paused: bool,
    retired: Vec<SaveId>,
    to_retire: u64,
    to_archive: u64,
    still_archived: HashSet<SaveId>,
    looked: usize,
    stopped_at: Option<(Job, Step)>,
    /// The first step that is to be archived and may be tried now.
    next: Option<(Job, Step, SaveId)>,
}

/// The service that applies the policy to committed steps.
pub(in crate::node) struct Retention {
    context: Arc<NodeContext>,
    removal: Arc<SaveRemoval>,
    state: Mutex<RetentionState>,
    /// The removals that save recovery retries.
    removal_retries: Mutex<RetrySchedule>,
}

impl Retention {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>, removal: Arc<SaveRemoval>) -> Self {
        let lease = context.settings.lease;
        let state = Mutex::new(RetentionState::new(lease));
        let removal_retries = Mutex::new(RetrySchedule::new(lease));
        Self { context, removal, state, removal_retries }
    }

    /// Returns the schedule of the removals that save recovery retries. The policy's answer lists
    /// them beside its own work.
    pub(in crate::node) fn lock_removal_retries(&self) -> MutexGuard<'_, RetrySchedule> {
        self.removal_retries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_retention(&self) -> MutexGuard<'_, RetentionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one round. Returns the saves that it retired.
    pub(in crate::node) async fn run_policy_round(
        self: &Arc<Self>,
        counts: &CheckpointCounts,
        cache: &mut RetentionCache,
    ) -> Result<Vec<SaveId>, RemoteError> {
        let catalogue = self.context.catalogue();
        let requests = OpenArchiveRequests::read(&*catalogue).await?;
        let mut round = RetentionRound::default();
        for (job, count) in &counts.committed {
            let rule = self.context.settings.policy.of(job);
            if (0..*count).next_back().is_some_and(|newer| rule.touches(newer)) {
                self.apply_rule_to_steps(
                    &*catalogue,
                    (job, *count, rule),
                    &requests,
                    cache,
                    &mut round,
                )
                .await?;
            }
        }
        cache.archived = std::mem::take(&mut round.still_archived);
        cache.cursor = round.stopped_at.take();
        if cache.archiving.as_ref().is_none_or(JoinHandle::is_finished)
            && requests.untried < MAX_OPEN_REQUESTS
            && let Some((job, step, save)) = round.next.take()
        {
            cache.archiving = Some(self.spawn_policy_archiving(job, step, save));
        }
        let removing = counts.removing + round.retired.len() as u64;
        self.update_policy_answer(&round, requests, removing);
        Ok(round.retired)
    }

    /// Applies `rule` to all committed steps of one job, oldest first.
    async fn apply_rule_to_steps(
        &self,
        catalogue: &dyn Catalogue,
        (job, count, rule): (&Job, u64, Rule),
        requests: &OpenArchiveRequests,
        cache: &RetentionCache,
        round: &mut RetentionRound,
    ) -> Result<(), RemoteError> {
        let mut newer = count;
        let mut steps = KeyScan::of_prefix(catalogue, format!("{CHECKPOINTS}{job}/"));
        while let Some((key, entry)) = steps.next().await? {
            // Save recovery reports a record that does not parse. Its step stays as it is.
            let Ok(checkpoint) = parse_record::<Checkpoint>(&key, &entry.value) else { continue };
            let (Some((_, step)), Some(saved)) = (parse_checkpoint_key(&key), checkpoint.committed)
            else {
                continue;
            };
            newer = newer.saturating_sub(1);
            match rule.fate(step, newer) {
                Fate::Stays => {}
                Fate::Retired => {
                    self.retire_step(catalogue, job.at(step), &saved, rule, round).await?
                }
                Fate::Archived if cache.archived.contains(&saved.save) => {
                    round.still_archived.insert(saved.save);
                }
                Fate::Archived => {
                    round.to_archive += 1;
                    let passed = |(j, s): &(Job, Step)| (job, step) <= (j, *s);
                    let is_new = !cache.cursor.as_ref().is_some_and(passed);
                    let is_due = self
                        .lock_retention()
                        .waits
                        .mark_seen_and_check_due(saved.save, self.context.clock.now());
                    let may_be_next = is_new && is_due && round.next.is_none();
                    if may_be_next && !requests.has(job, step) {
                        self.choose_if_unarchived(catalogue, (job, step, saved.save), round)
                            .await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads whether a step is archived already. If it is not, makes it the next step to archive.
    /// Does nothing once the round has read as many steps as it may.
    async fn choose_if_unarchived(
        &self,
        catalogue: &dyn Catalogue,
        (job, step, save): (&Job, Step, SaveId),
        round: &mut RetentionRound,
    ) -> Result<(), RemoteError> {
        if round.looked >= LOOKED_AT_ONCE {
            return Ok(());
        }
        round.looked += 1;
        if round.looked == LOOKED_AT_ONCE {
            round.stopped_at = Some((job.clone(), step));
        }
        match is_archived_and_dropped(catalogue, save).await {
            Ok(false) => round.next = Some((job.clone(), step, save)),
            Ok(true) => {
                round.to_archive -= 1;
                if round.still_archived.len() < MAX_ARCHIVED {
                    round.still_archived.insert(save);
                }
            }
            // A step with a damaged record must not hold up the others.
            Err(error) if error.kind == ErrorKind::Corrupt => {
                tracing::error!(%job, %step, %error, "a step with a damaged record is not archived by the policy");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn retire_step(
        &self,
        catalogue: &dyn Catalogue,
        step_ref: StepRef<'_>,
        saved: &Saved,
        rule: Rule,
        round: &mut RetentionRound,
    ) -> Result<(), RemoteError> {
        let StepRef { job, step } = step_ref;
        let Some(keep_newest) = rule.keep_newest else { return Ok(()) };
        let may_more = !round.is_retention_paused && round.retired.len() < RETIRED_AT_ONCE;
        if !may_more || is_retention_paused(catalogue).await? {
            // One step is enough to know of a pause in this round.
            round.is_retention_paused |= may_more;
            round.to_retire += 1;
            return Ok(());
        }
        // The count may be outdated: newer steps may have been removed since the scan.
        if !has_newer_steps(catalogue, step_ref, u64::from(keep_newest.max(1))).await? {
            return Ok(());
        }
        // If a label is set from here on, the record that `guard` names changes, and nothing is
        // retired.
        let (label, guard) = match find_label_to_keep(catalogue, step_ref, saved.save).await {
            Ok(found) => found,
            // The damaged record may have a label that keeps the step.
            Err(error) if error.kind == ErrorKind::Corrupt => {
                tracing::error!(%job, %step, %error, "a step is not retired by the policy: labels of its job are damaged");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if label.is_some() {
            return Ok(());
        }
        let reason = RemoveReason::Retired;
        let found = self.removal.unpublish_if(step_ref, saved.save, reason, &guard).await?;
        if let Some(UnpublishOutcome::Removing(entry)) = found {
            tracing::info!(
                %job, %step, save = %saved.save, bytes = saved.len_bytes, keep_newest, keep_every = rule.keep_every,
                "retired by the policy: enough newer steps are committed"
            );
            round.retired.push(entry.save);
        }
        Ok(())
    }

    /// Archives a step in a task of its own. The archive request is recorded as a client's is, so
    /// that another daemon takes it over if this one vanishes. Returns the handle of the task.
    fn spawn_policy_archiving(
        self: &Arc<Self>,
        job: Job,
        step: Step,
        save: SaveId,
    ) -> JoinHandle<()> {
        let archive_all_but = self.context.settings.policy.of(&job).archive_all_but;
        tracing::info!(%job, %step, %save, archive_all_but, "archiving a step by the policy: enough newer steps are committed");
        let coordinator = self.context.coordinator();
        let service = self.clone();
        self.context.tasks.spawn_until_stop(async move {
            // No client watches this archiving, so its events are discarded.
            let (events, _) = mpsc::channel(1);
            let archived = coordinator.archive_step(job.at(step), OPTIONS, &events).await;
            let left = match archived {
                Ok(()) => {
                    match is_archived_and_dropped(&*service.context.catalogue(), save).await {
                        Ok(true) => None,
                        Ok(false) => Some("unreachable nodes still have replicas of it".to_owned()),
                        Err(error) => Some(error.to_string()),
                    }
                }
                Err(error) => Some(error.to_string()),
            };
            let waits = &mut service.lock_retention().waits;
            match left {
                None => {
                    tracing::info!(%job, %step, "archived by the policy");
                    waits.forget_finished(save);
                }
                Some(why) => {
                    tracing::warn!(%job, %step, why, "archiving by the policy is not complete; trying again later");
                    waits.record_failure(save, (&job, step), service.context.clock.now(), why);
                }
            }
        })
    }

    fn update_policy_answer(
        &self,
        round: &RetentionRound,
        requests: OpenArchiveRequests,
        removing: u64,
    ) {
        let mut desk = self.lock_retention();
        desk.waits.forget_unseen();
        // For a step with an archive request, the catalogue has the current state. The failures
        // that are remembered here are older.
        let is_asked = |wait: &PolicyWait| requests.has(&wait.job, wait.step);
        let mut waiting: Vec<PolicyWait> =
            desk.waits.pending_retries().filter(|wait| !is_asked(wait)).collect();
        waiting.extend(self.lock_removal_retries().pending_retries());
        waiting.extend(requests.waiting);
        waiting.sort_by(|a, b| (&a.job, a.step).cmp(&(&b.job, b.step)));
        waiting.truncate(MAX_VIEWS);
        desk.answer = PolicyAnswer {
            rules: Vec::new(),
            to_archive: round.to_archive,
            to_retire: round.to_retire,
            removing,
            waiting,
        };
    }

    pub(in crate::node) async fn get_policy_status(
        &self,
        _: GetPolicyStatus,
    ) -> Result<PolicyAnswer, RemoteError> {
        if !self.context.is_writable_catalogue_server() {
            return Err(BackgroundError::PolicyNotApplied.into());
        }
        let rule = |job: Option<&Job>, rule: &Rule| PolicyRule {
            job: job.cloned(),
            archive_all_but: rule.archive_all_but,
            keep_newest: rule.keep_newest,
            keep_every: rule.keep_every,
        };
        let policy = &self.context.settings.policy;
        let single = policy.jobs.iter().map(|(job, of_job)| rule(Some(job), of_job));
        let rules = std::iter::once(rule(None, &policy.rule)).chain(single).collect();
        Ok(PolicyAnswer { rules, ..self.lock_retention().answer.clone() })
    }
}

/// Returns whether nothing of a save is left to archive or to drop.
async fn is_archived_and_dropped(
    catalogue: &dyn Catalogue,
    save: SaveId,
) -> Result<bool, RemoteError> {
    let mut roots = KeyScan::of_prefix(catalogue, shard_roots_prefix(save));
    while let Some((key, entry)) = roots.next().await? {
        let root: ShardRoot = parse_record(&key, &entry.value)?;
        // An absent state means that the save was removed.
        let state = read_record::<ShardState>(catalogue, &shard_state_key(root.shard)).await?;
        let is_done =
            |state: StripeState| matches!(state, StripeState::Archived { dropped: true, .. });
        if state.is_some_and(|(state, _)| !state.runs.iter().all(|run| is_done(run.state))) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether at least `min_count` later steps of the job are committed now.
async fn has_newer_steps(
    catalogue: &dyn Catalogue,
    step_ref: StepRef<'_>,
    min_count: u64,
) -> Result<bool, RemoteError> {
    let StepRef { job, .. } = step_ref;
    let steps = KeyScan::of_prefix(catalogue, format!("{CHECKPOINTS}{job}/"));
    let mut steps = steps.starting_after(checkpoint_key(step_ref));
    let mut newer = 0;
    while newer < min_count {
        let Some((key, entry)) = steps.next().await? else { return Ok(false) };
        // A step whose record does not parse is not counted, so that too few steps are retired
        // rather than too many.
        let checkpoint = parse_record::<Checkpoint>(&key, &entry.value);
        newer += u64::from(checkpoint.is_ok_and(|checkpoint| checkpoint.committed.is_some()));
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::catalogue::local::LocalCatalogue;
    use crate::catalogue::record_access::archive_request_key;
    use crate::clock::SystemClock;
    use crate::entropy::SeededEntropy;
    use crate::format::records::Record;
    use crate::id::{Epoch, LeaseId, NodeId};
    use crate::store::MemoryKv;
    use crate::workers::Workers;

    #[tokio::test]
    async fn requests_that_wait_are_listed_and_do_not_count_as_untried() {
        let (clock, entropy) = (SystemClock::new(), Arc::new(SeededEntropy::new(1)));
        let (kv, workers) = (Arc::new(MemoryKv::new()), Workers::inline());
        let lease = Duration::from_secs(10);
        let catalogue =
            LocalCatalogue::open(kv, clock, entropy, &workers, lease, Epoch::default()).unwrap();
        let job: Job = "gpt".parse().unwrap();
        for step in 0..600 {
            let waiting = (step < 597).then(|| "a node is away".to_owned());
            let (node, save) = (NodeId(1), SaveId([1; 12]));
            let (lease, failures) = (LeaseId([1; 16]), u32::from(waiting.is_some()));
            let request = ArchiveRequest { node, lease, save, options: OPTIONS, failures, waiting };
            let key = archive_request_key(job.at(Step(step)));
            let value = request.to_bytes().unwrap();
            catalogue.compare_and_set(&key, None, Some(value)).await.unwrap();
        }
        let open = OpenArchiveRequests::read(&catalogue).await.unwrap();
        assert_eq!((open.untried, open.waiting.len()), (3, MAX_VIEWS));
        assert!(open.has(&job, Step(599)) && !open.has(&job, Step(600)));
    }
}
