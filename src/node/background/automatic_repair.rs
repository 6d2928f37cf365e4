//! Automatic repair: the catalogue server surveys the committed steps, and repairs those that are
//! degraded or have surplus copies (docs/semantics.md, 11).
//!
//! Nothing here is durable, and nothing depends on what is remembered: a repair examines the step
//! itself.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::error::BackgroundError;
use super::steps_to_repair::{MAX_TO_REPAIR, Settled, StepToRepair, describe, keep_worst};
use crate::catalogue::CatalogueError;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{CHECKPOINTS, parse_checkpoint_key, parse_record};
use crate::code::SurvivableLossCache;
use crate::format::records::Checkpoint;
use crate::id::{NodeId, PeerName, SaveId, StepRef};
use crate::kind::ErrorKind;
use crate::node::catalogue_server::maintenance::list_maintenance;
use crate::node::catalogue_server::repair_survey::{
    StepHealth, StepSurvey, SurveyOutcome, survey_save,
};
use crate::node::context::NodeContext;
use crate::node::failure_log::FailureLog;
use crate::node::retry_schedule::{RetrySchedule, scan_interval};
use crate::pipeline::coordinator::{CoordinatorError, RepairCause, RepairLimits, RepairRate};
use crate::repair_policy::{AwayNodes, RepairPriority, is_repair_due};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{
    GetRepairStatus, RepairEvent, RepairMode, RepairOptions, RepairPlan, RepairStatus,
    RepairSummary, RunningRepair, SurveyResult,
};

/// Minimum wait after a survey, unless the list of nodes has changed or a repair has ended.
const SURVEY_INTERVAL: Duration = Duration::from_secs(10);
/// The wait after a survey, as a multiple of its duration.
const SURVEY_WAIT: u32 = 20;
/// The same multiple when the list of nodes has changed or a repair has ended.
const SOON_SURVEY_WAIT: u32 = 4;
/// Number of failures in a row after which a step is left alone until the list of nodes or the
/// health of the step changes, but for at most [`SETTLED_WAIT`].
const TRIES: u32 = 3;
/// Maximum time for which a step is left alone after [`TRIES`] failures. A full disk may get room,
/// or a broken link may heal, without any change of the list of nodes.
const SETTLED_WAIT: Duration = Duration::from_secs(3600);
/// Maximum number of degraded steps that the repair status names.
const MAX_WORST: usize = 16;
/// Maximum number of steps waiting for a retry that the repair status names.
const MAX_WAITING: usize = 64;
/// Number of events of a repair that may be queued.
const EVENTS: usize = 64;

/// The options of an automatic repair. It repairs one stripe at a time, so that no stripe is worked
/// on during a pause.
const OPTIONS: RepairOptions =
    RepairOptions { mode: RepairMode::Repair, plan: RepairPlan::Chain, parallel: 1 };

/// The state that the rounds share with the repair that runs and with the calls that report it.
struct RepairLedger {
    /// The result of the last survey, and the time at which it ended.
    survey: Option<(SurveyResult, Duration)>,
    running: Option<RunningRepair>,
    brake: Option<String>,
    /// The nodes in maintenance, each with the seconds that were left at the last round.
    maintenance: Vec<(PeerName, u64)>,
    /// Steps whose repair failed.
    retries: RetrySchedule,
    settled: HashMap<SaveId, Settled>,
    /// The times before which steps are not tried: another owner has them, their repair was
    /// stopped, or they could not be surveyed.
    not_before: HashMap<SaveId, Duration>,
    /// Whether a repair has ended since the last survey began.
    wants_survey: bool,
}

/// The state of the rounds.
#[derive(Default)]
struct Rounds {
    nodes: AwayNodes,
    /// The steps that the last survey found to be repaired, in the order of repair.
    to_repair: Vec<StepToRepair>,
    /// The version of the list of nodes at the last survey.
    surveyed_version: u64,
    last_survey: Option<LastSurvey>,
    losses: SurvivableLossCache,
    running: Option<Running>,
    round_failures: FailureLog,
    /// The surveys that could not survey every step.
    survey_failures: FailureLog,
    /// The first step that the survey could not survey, and the reason.
    not_surveyed: Option<(String, String)>,
}

/// A repair that runs.
struct Running {
    save: SaveId,
    task: JoinHandle<()>,
    /// Cancelled to end the repair before its next stripe, plan or copy.
    stop: CancellationToken,
    /// The priority that the step had before the repair.
    priority: RepairPriority,
}

impl Rounds {
    fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.task.is_finished())
    }

    /// Replaces the health of a step in the list, and removes a step of which nothing is missing or
    /// surplus any more.
    fn set_health(&mut self, save: SaveId, health: StepHealth, now: Duration) {
        for step in self.to_repair.iter_mut().filter(|step| step.save == save) {
            *step = step.clone().with_health(health, now);
        }
        self.to_repair.retain(|step| step.health.needs_repair());
        keep_worst(&mut self.to_repair);
    }

    /// Logs why a step could not be surveyed, the first one of a survey.
    fn log_unknown(&mut self, unknown: u64, now: Duration) {
        let Some((step, why)) = self.not_surveyed.take() else {
            self.survey_failures.record_success();
            return;
        };
        if self.survey_failures.record_failure(now).is_some() {
            tracing::warn!(
                step,
                why,
                unknown,
                "a step could not be surveyed, and is not repaired until it can be; `unknown` steps are in this state"
            );
        }
    }

    /// Stops the running repair before its next stripe, plan or copy.
    fn stop_running(&self) {
        if let Some(running) = &self.running {
            running.stop.cancel();
        }
    }
}

/// The time at which a survey ended, and its duration.
#[derive(Clone, Copy)]
struct LastSurvey {
    ended_at: Duration,
    took: Duration,
}

/// The service that repairs degraded steps automatically.
pub(in crate::node) struct AutomaticRepair {
    context: Arc<NodeContext>,
    ledger: Mutex<RepairLedger>,
    rate: Arc<RepairRate>,
}

impl AutomaticRepair {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        let ledger = Mutex::new(RepairLedger::new(context.settings.lease));
        Self { context, ledger, rate: Arc::default() }
    }

    fn lock_ledger(&self) -> MutexGuard<'_, RepairLedger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Surveys and repairs while this daemon serves the catalogue. Runs until the node stops.
    pub(in crate::node) async fn run_automatic_repair(self: Arc<Self>) {
        let mut rounds = Rounds::default();
        loop {
            self.context.clock.sleep(scan_interval(self.context.settings.lease)).await;
            if !self.context.is_writable_catalogue_server() {
                rounds.stop_running();
                rounds = Rounds { running: rounds.running.take(), ..Rounds::default() };
                *self.lock_ledger() = RepairLedger::new(self.context.settings.lease);
                continue;
            }
            match self.run_round(&mut rounds).await {
                Ok(()) if rounds.round_failures.record_success() => {
                    tracing::info!("automatic repair works again");
                }
                Ok(()) => {}
                Err(error) => {
                    let now = self.context.clock.now();
                    if let Some(failures) = rounds.round_failures.record_failure(now) {
                        tracing::warn!(%error, failures, "a round of automatic repair failed; the next round tries again");
                    }
                }
            }
        }
    }

    async fn run_round(self: &Arc<Self>, rounds: &mut Rounds) -> Result<(), RemoteError> {
        let rules = &self.context.settings.repair;
        let directory = self.watch_nodes(rounds).await?;
        if self.is_survey_due(rounds) {
            self.survey_all(rounds, directory.clone()).await?;
        }
        if rules.share_percent == 0 {
            return Ok(());
        }
        let Some(next) = self.choose_step(rounds) else { return Ok(()) };
        if rounds.is_running() {
            let running = rounds.running.as_ref().map(|running| running.priority);
            if running.is_some_and(|running| next.priority().interrupts(&running)) {
                rounds.stop_running();
            }
            return Ok(());
        }
        let surveyed =
            self.survey_step(next.job.at(next.step), next.save, &directory, rounds).await?;
        let SurveyOutcome::Known(StepSurvey { health, stripes, with_surplus }) = surveyed else {
            self.put_off(next.save);
            return Ok(());
        };
        // The list of steps is as old as the last survey.
        rounds.set_health(next.save, health, self.context.clock.now());
        if !health.needs_repair() {
            self.lock_ledger().wants_survey = true;
            return Ok(());
        }
        if health.is_degraded() != next.health.is_degraded() {
            return Ok(());
        }
        let limits = RepairLimits {
            given_up: rounds.nodes.given_up().clone(),
            share_percent: rules.share_percent,
            rate: self.rate.clone(),
            stripes: if health.is_degraded() { stripes } else { with_surplus },
            stop: CancellationToken::new(),
        };
        let next = StepToRepair { health, ..next };
        rounds.running = Some(self.spawn_repair(next, limits, rounds.nodes.version()));
        Ok(())
    }

    /// Reads the list of nodes. When the list or the set of given-up nodes has changed, steps whose
    /// repair failed may be tried again, and the running repair is stopped.
    async fn watch_nodes(&self, rounds: &mut Rounds) -> Result<Directory, CatalogueError> {
        let settings = &self.context.settings;
        let directory = Directory::read(&*self.context.catalogue()).await?;
        let views: Vec<_> = directory.views().cloned().collect();
        let version = rounds.nodes.version();
        let now = self.context.clock.wall_seconds();
        let maintenance = list_maintenance(&*self.context.catalogue(), now).await?;
        let in_maintenance = maintenance.keys().map(NodeId::of).collect();
        rounds.nodes.update(
            &views,
            &in_maintenance,
            self.context.clock.now(),
            &settings.repair,
            settings.lease,
        );
        let mut ledger = self.lock_ledger();
        ledger.brake = rounds.nodes.brake().cloned();
        ledger.maintenance = maintenance.into_iter().collect();
        if rounds.nodes.version() != version {
            ledger.retries = RetrySchedule::new(settings.lease);
            rounds.stop_running();
        }
        Ok(directory)
    }

    /// Puts a step off for a lease period.
    fn put_off(&self, save: SaveId) {
        let until = self.context.clock.now().saturating_add(self.context.settings.lease);
        self.lock_ledger().not_before.insert(save, until);
    }

    fn is_survey_due(&self, rounds: &Rounds) -> bool {
        let Some(LastSurvey { ended_at, took }) = rounds.last_survey else { return true };
        let is_changed = rounds.surveyed_version != rounds.nodes.version();
        let wait = match is_changed || self.lock_ledger().wants_survey {
            true => took * SOON_SURVEY_WAIT,
            false => (took * SURVEY_WAIT).max(SURVEY_INTERVAL),
        };
        self.context.clock.now() >= ended_at.saturating_add(wait)
    }

    /// Surveys all committed steps.
    async fn survey_all(
        &self,
        rounds: &mut Rounds,
        directory: Directory,
    ) -> Result<(), CatalogueError> {
        let begun_at = self.context.clock.now();
        rounds.surveyed_version = rounds.nodes.version();
        rounds.not_surveyed = None;
        self.lock_ledger().wants_survey = false;
        let surveyed = self.survey_steps(rounds, directory).await;
        let ended_at = self.context.clock.now();
        rounds.last_survey = Some(LastSurvey { ended_at, took: ended_at - begun_at });
        let (to_repair, result) = surveyed?;
        rounds.log_unknown(result.unknown, ended_at);
        self.record_survey(&to_repair, result, ended_at);
        rounds.to_repair = to_repair;
        Ok(())
    }

    async fn survey_step(
        &self,
        step: StepRef<'_>,
        save: SaveId,
        directory: &Directory,
        rounds: &mut Rounds,
    ) -> Result<SurveyOutcome, CatalogueError> {
        let surveyed = survey_save(&self.context, save, directory, &mut rounds.losses).await;
        rounds.nodes.note_run(self.context.clock.now());
        if let Ok(SurveyOutcome::Unknown(why)) = &surveyed {
            rounds.not_surveyed.get_or_insert_with(|| (step.to_string(), why.clone()));
        }
        surveyed
    }

    /// Surveys all committed steps. Returns those that are degraded or have surplus copies, in the
    /// order in which they are repaired, and the result.
    async fn survey_steps(
        &self,
        rounds: &mut Rounds,
        mut directory: Directory,
    ) -> Result<(Vec<StepToRepair>, SurveyResult), CatalogueError> {
        let known: HashMap<SaveId, StepToRepair> =
            rounds.to_repair.iter().map(|known| (known.save, known.clone())).collect();
        let (mut to_repair, mut result) = (Vec::new(), SurveyResult::default());
        let mut survives = Some(u32::MAX);
        let catalogue = self.context.catalogue();
        let mut checkpoints = KeyScan::of_prefix(&*catalogue, CHECKPOINTS);
        while let Some((key, entry)) = checkpoints.next().await? {
            if self.context.clock.now() > rounds.nodes.updated_at() + self.context.settings.lease {
                directory = self.watch_nodes(rounds).await?;
            }
            let Ok(checkpoint) = parse_record::<Checkpoint>(&key, &entry.value) else {
                (result.steps, result.unknown) = (result.steps + 1, result.unknown + 1);
                continue;
            };
            let (Some((job, step)), Some(saved)) =
                (parse_checkpoint_key(&key), checkpoint.committed)
            else {
                continue;
            };
            let step_ref = job.at(step);
            let surveyed = self.survey_step(step_ref, saved.save, &directory, rounds).await?;
            let health = match surveyed {
                SurveyOutcome::Gone => continue,
                SurveyOutcome::Changing | SurveyOutcome::Unknown(_) => {
                    (result.steps, result.unknown) = (result.steps + 1, result.unknown + 1);
                    let before = known.get(&saved.save).cloned();
                    to_repair.extend(before.map(|step| StepToRepair { is_unknown: true, ..step }));
                    continue;
                }
                SurveyOutcome::Known(StepSurvey { health, .. }) => health,
            };
            result.steps += 1;
            survives = survives.min(health.survives);
            if !health.needs_repair() {
                continue;
            }
            add_health(&mut result, &health);
            let (save, saved_at, is_unknown) = (saved.save, saved.saved_at, false);
            let (version, now) = (rounds.nodes.version(), self.context.clock.now());
            // The list is limited, and steps whose surplus copies stay may be many.
            if !health.is_degraded() && self.lock_ledger().is_settled(save, health, version, now) {
                continue;
            }
            let known = known.get(&save).cloned();
            let since = known.map_or(now, |known| known.with_health(health, now).since);
            to_repair.push(StepToRepair { job, step, save, saved_at, health, since, is_unknown });
            if to_repair.len() >= 2 * MAX_TO_REPAIR {
                keep_worst(&mut to_repair);
            }
        }
        keep_worst(&mut to_repair);
        result.survives = survives.filter(|_| result.steps > result.unknown);
        let degraded = |step: &&StepToRepair| !step.is_unknown && step.health.is_degraded();
        let worst = to_repair.iter().filter(degraded).take(MAX_WORST);
        result.worst = worst.map(describe).collect();
        Ok((to_repair, result))
    }

    fn record_survey(&self, to_repair: &[StepToRepair], result: SurveyResult, ended_at: Duration) {
        let mut ledger = self.lock_ledger();
        ledger.survey = Some((result, ended_at));
        for step in to_repair {
            ledger.retries.mark_seen_and_check_due(step.save, ended_at);
        }
        ledger.retries.forget_unseen();
        let saves: HashSet<SaveId> = to_repair.iter().map(|step| step.save).collect();
        // Steps that only have surplus copies are not listed while they are settled.
        ledger.settled.retain(|save, settled| {
            saves.contains(save) || !settled.health.is_degraded() && ended_at < settled.until
        });
        ledger.not_before.retain(|save, until| saves.contains(save) && *until > ended_at);
    }

    /// Returns the first step that is due and is not being repaired.
    fn choose_step(&self, rounds: &Rounds) -> Option<StepToRepair> {
        let now = self.context.clock.now();
        let (grace, version) = (self.context.settings.repair.grace, rounds.nodes.version());
        let running = rounds.running.as_ref().map(|running| running.save);
        let running = running.filter(|_| rounds.is_running());
        let mut ledger = self.lock_ledger();
        let mut is_due = |step: &&StepToRepair| {
            let is_settled = ledger.is_settled(step.save, step.health, version, now);
            let is_put_off = ledger.not_before.get(&step.save).is_some_and(|until| now < *until);
            Some(step.save) != running
                && is_repair_due(step.health.is_urgent(), step.since, now, grace)
                && !step.is_unknown
                && !is_put_off
                && !is_settled
                && ledger.retries.mark_seen_and_check_due(step.save, now)
        };
        rounds.to_repair.iter().find(|step| is_due(step)).cloned()
    }

    /// Repairs a step in a task of its own.
    fn spawn_repair(
        self: &Arc<Self>,
        next: StepToRepair,
        limits: RepairLimits,
        version: u64,
    ) -> Running {
        let (save, priority) = (next.save, next.priority());
        let StepHealth { survives, missing, records, surplus, .. } = next.health;
        tracing::info!(job = %next.job, step = %next.step, ?survives, missing, records, surplus, "repairing a step automatically");
        let (service, stop) = (self.clone(), limits.stop.clone());
        let task = self.context.tasks.spawn_until_stop(async move {
            let repaired = service.repair_step(&next, &RepairCause::Survey(limits)).await;
            service.record_repair(&next, version, repaired);
        });
        Running { save, task, stop, priority }
    }

    /// Repairs a step and records its progress. Returns the summary and the first message about
    /// something that was not made.
    async fn repair_step(
        &self,
        next: &StepToRepair,
        cause: &RepairCause,
    ) -> Result<(RepairSummary, Option<String>), CoordinatorError> {
        let coordinator = self.context.coordinator();
        let (events, mut watched) = mpsc::channel(EVENTS);
        let repair = async {
            // The channel ends with the repair.
            let events = events;
            let step_ref = next.job.at(next.step);
            coordinator.repair_step(step_ref, OPTIONS, cause, &events).await
        };
        let watch = async {
            let (mut summary, mut note) = (RepairSummary::default(), None);
            while let Some(event) = watched.recv().await {
                match event {
                    RepairEvent::Progress { done_bytes, total_bytes, made_bytes } => {
                        let (job, step) = (next.job.clone(), next.step);
                        let running =
                            RunningRepair { job, step, done_bytes, total_bytes, made_bytes };
                        self.lock_ledger().running = Some(running);
                    }
                    RepairEvent::Note(text) => note = note.or(Some(text)),
                    RepairEvent::Done(done) => summary = done,
                }
            }
            (summary, note)
        };
        let (repaired, watched) = tokio::join!(repair, watch);
        repaired.map(|()| watched)
    }

    fn record_repair(
        &self,
        step: &StepToRepair,
        version: u64,
        repaired: Result<(RepairSummary, Option<String>), CoordinatorError>,
    ) {
        let StepToRepair { job, step: number, save, health, .. } = step;
        if repaired.as_ref().is_err_and(gives_way) {
            self.put_off(*save);
        }
        let mut ledger = self.lock_ledger();
        ledger.running = None;
        ledger.wants_survey |= health.is_degraded() && !repaired.as_ref().is_err_and(gives_way);
        let why = match repaired {
            Ok((RepairSummary { pieces, replicas, records, made_bytes, away, .. }, None)) => {
                tracing::info!(%job, step = %number, pieces, replicas, records, made_bytes, ?away, "an automatic repair completed; the parts of the nodes in `away`, if there are any, are still missing");
                // If nobody is away and something is missing later, it was not seen now, or was lost
                // since. Surplus copies that stay are looked at again, too.
                let is_left_away = !away.is_empty();
                let until = match is_left_away && health.is_degraded() {
                    true => Duration::MAX,
                    false => self.context.clock.now().saturating_add(SETTLED_WAIT),
                };
                ledger.settled.insert(*save, Settled { version, health: *health, until });
                return ledger.retries.forget_finished(*save);
            }
            Ok((_, Some(note))) => note,
            // The step was removed, is to be archived or has another owner, or the repair was
            // stopped.
            Err(error) if gives_way(&error) => {
                return tracing::info!(%job, step = %number, %error, "an automatic repair ended early: after a lease period the step is tried again, if anything is still missing or surplus");
            }
            Err(error) => error.to_string(),
        };
        tracing::warn!(%job, step = %number, why, "an automatic repair did not complete: it is tried again; after {TRIES} failures in a row only when the list of nodes or the health of the step changes, or after an hour");
        let now = self.context.clock.now();
        let tries = ledger.retries.record_failure(*save, (job, *number), now, why);
        if tries >= TRIES {
            let until = now.saturating_add(SETTLED_WAIT);
            ledger.settled.insert(*save, Settled { version, health: *health, until });
        }
    }

    pub(in crate::node) async fn get_repair_status(
        &self,
        _: GetRepairStatus,
    ) -> Result<RepairStatus, RemoteError> {
        if !self.context.is_writable_catalogue_server() {
            return Err(BackgroundError::NotRepairing.into());
        }
        let now = self.context.clock.now();
        let ledger = self.lock_ledger();
        let survey = ledger.survey.clone().map(|(result, ended_at)| {
            let age = now.saturating_sub(ended_at);
            SurveyResult { age_ms: age.as_millis().try_into().unwrap_or(u64::MAX), ..result }
        });
        let share_percent = self.context.settings.repair.share_percent;
        let (running, brake) = (ledger.running.clone(), ledger.brake.clone());
        let maintenance = ledger.maintenance.clone();
        let mut waiting: Vec<_> = ledger.retries.pending_retries().collect();
        waiting.sort_by(|a, b| (&a.job, a.step).cmp(&(&b.job, b.step)));
        waiting.truncate(MAX_WAITING);
        Ok(RepairStatus { share_percent, survey, running, brake, maintenance, waiting })
    }
}

impl RepairLedger {
    /// Returns whether a step with this health is left alone while the list of nodes has this
    /// version.
    fn is_settled(&self, save: SaveId, health: StepHealth, version: u64, now: Duration) -> bool {
        let settled = self.settled.get(&save);
        settled.is_some_and(|settled| settled.holds_for(version, health, now))
    }

    fn new(lease: Duration) -> Self {
        Self {
            survey: None,
            running: None,
            brake: None,
            maintenance: Vec::new(),
            retries: RetrySchedule::new(lease),
            settled: HashMap::new(),
            not_before: HashMap::new(),
            wants_survey: false,
        }
    }
}

/// Adds what is missing of a step to the result of a survey.
fn add_health(result: &mut SurveyResult, health: &StepHealth) {
    result.degraded += u64::from(health.is_degraded());
    result.missing += health.missing;
    result.missing_bytes += health.missing_bytes;
    result.records += health.records;
}

/// Returns whether a repair ended because the step has another owner, is to be archived or was
/// removed, or because the repair was stopped.
fn gives_way(error: &CoordinatorError) -> bool {
    matches!(
        error,
        CoordinatorError::RepairStopped { .. }
            | CoordinatorError::ArchivingRequested { .. }
            | CoordinatorError::Owned { .. }
    ) || matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Fenced)
}
