//! Automatic repair: the catalogue server surveys the committed steps, and repairs the degraded
//! ones (docs/semantics.md, 11).
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
use crate::catalogue::CatalogueError;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{CHECKPOINTS, parse_checkpoint_key, parse_record};
use crate::code::SurvivableLossCache;
use crate::format::records::Checkpoint;
use crate::id::{Job, NodeId, PeerName, SaveId, Step};
use crate::kind::ErrorKind;
use crate::node::catalogue_server::maintenance::list_maintenance;
use crate::node::catalogue_server::repair_survey::{
    StepHealth, StepSurvey, SurveyOutcome, survey_save,
};
use crate::node::context::NodeContext;
use crate::node::retry_schedule::{RetrySchedule, scan_interval};
use crate::pipeline::coordinator::{CoordinatorError, RepairCause, RepairLimits};
use crate::repair_policy::{AwayNodes, RepairPriority, is_repair_due};
use crate::topology::Directory;
use crate::wire::RemoteError;
use crate::wire::calls::{
    DegradedStep, GetRepairStatus, RepairEvent, RepairMode, RepairOptions, RepairPlan,
    RepairStatus, RepairSummary, RunningRepair, SurveyResult,
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
/// Maximum number of degraded steps that a survey keeps: the first ones in the order of repair.
/// When these are repaired, a further survey finds more.
const MAX_DEGRADED: usize = 4096;
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

/// A degraded step.
#[derive(Debug, Clone)]
struct Degraded {
    job: Job,
    step: Step,
    save: SaveId,
    saved_at: u64,
    health: StepHealth,
    /// The time at which a survey first found the step degraded.
    since: Duration,
    /// Whether the last survey could not determine the health of the step. Such a step is not
    /// repaired.
    is_unknown: bool,
}

impl Degraded {
    fn priority(&self) -> RepairPriority {
        let &Self { saved_at, save, health: StepHealth { survives, .. }, .. } = self;
        RepairPriority { survives, saved_at, save }
    }
}

/// The list of nodes and the health of a step that is left alone until one of the two changes, or
/// for some time.
struct Settled {
    /// The version of the list of nodes.
    version: u64,
    /// The health of the step before the repair.
    health: StepHealth,
    /// The time at which the step is tried again even without such a change.
    until: Duration,
}

impl Settled {
    fn holds_for(&self, version: u64, health: StepHealth, now: Duration) -> bool {
        (self.version, self.health) == (version, health) && now < self.until
    }
}

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
    /// The degraded steps of the last survey, in the order in which they are repaired.
    degraded: Vec<Degraded>,
    /// The version of the list of nodes at the last survey.
    surveyed_version: u64,
    last_survey: Option<LastSurvey>,
    losses: SurvivableLossCache,
    running: Option<Running>,
}

/// A repair that runs.
struct Running {
    save: SaveId,
    task: JoinHandle<()>,
    /// Cancelled to end the repair before its next stripe, plan or copy.
    stop: CancellationToken,
    /// Number of node losses that the step survived before the repair; `None` if it could not be
    /// read.
    survives: Option<u32>,
}

impl Rounds {
    fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.task.is_finished())
    }

    /// Replaces the health of a step in the list, and removes a step that is not degraded any more.
    fn set_health(&mut self, save: SaveId, health: StepHealth) {
        let of_save = self.degraded.iter_mut().filter(|step| step.save == save);
        of_save.for_each(|step| step.health = health);
        self.degraded.retain(|step| step.health.is_degraded());
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
}

impl AutomaticRepair {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>) -> Self {
        let ledger = Mutex::new(RepairLedger::new(context.settings.lease));
        Self { context, ledger }
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
            if let Err(error) = self.run_round(&mut rounds).await {
                tracing::warn!(%error, "a round of automatic repair failed; the next round tries again");
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
            let survives = rounds.running.as_ref().map(|running| running.survives);
            if survives.is_some_and(|survives| next.health.survives < survives) {
                rounds.stop_running();
            }
            return Ok(());
        }
        let surveyed = self.survey_step(next.save, &directory, rounds).await?;
        let SurveyOutcome::Known(StepSurvey { health, stripes }) = surveyed else {
            self.put_off(next.save);
            return Ok(());
        };
        // The list of degraded steps is as old as the last survey.
        rounds.set_health(next.save, health);
        if !health.is_degraded() {
            self.lock_ledger().wants_survey = true;
            return Ok(());
        }
        let limits = RepairLimits {
            given_up: rounds.nodes.given_up().clone(),
            share_percent: rules.share_percent,
            stripes,
            stop: CancellationToken::new(),
        };
        let next = Degraded { health, ..next };
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
        self.lock_ledger().wants_survey = false;
        let surveyed = self.survey_steps(rounds, directory).await;
        let ended_at = self.context.clock.now();
        rounds.last_survey = Some(LastSurvey { ended_at, took: ended_at - begun_at });
        let (degraded, result) = surveyed?;
        self.record_survey(&degraded, result, ended_at);
        rounds.degraded = degraded;
        Ok(())
    }

    async fn survey_step(
        &self,
        save: SaveId,
        directory: &Directory,
        rounds: &mut Rounds,
    ) -> Result<SurveyOutcome, CatalogueError> {
        let surveyed = survey_save(&self.context, save, directory, &mut rounds.losses).await;
        rounds.nodes.note_run(self.context.clock.now());
        surveyed
    }

    /// Surveys all committed steps. Returns the degraded ones, in the order in which they are
    /// repaired, and the result.
    async fn survey_steps(
        &self,
        rounds: &mut Rounds,
        mut directory: Directory,
    ) -> Result<(Vec<Degraded>, SurveyResult), CatalogueError> {
        let known: HashMap<SaveId, Degraded> =
            rounds.degraded.iter().map(|known| (known.save, known.clone())).collect();
        let (mut degraded, mut result) = (Vec::new(), SurveyResult::default());
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
            let surveyed = self.survey_step(saved.save, &directory, rounds).await?;
            let health = match surveyed {
                SurveyOutcome::Gone => continue,
                SurveyOutcome::Unknown => {
                    (result.steps, result.unknown) = (result.steps + 1, result.unknown + 1);
                    let before = known.get(&saved.save).cloned();
                    degraded.extend(before.map(|step| Degraded { is_unknown: true, ..step }));
                    continue;
                }
                SurveyOutcome::Known(StepSurvey { health, .. }) => health,
            };
            result.steps += 1;
            survives = survives.min(health.survives);
            if !health.is_degraded() {
                continue;
            }
            result.degraded += 1;
            result.missing += health.missing;
            result.missing_bytes += health.missing_bytes;
            result.records += health.records;
            let (save, saved_at, is_unknown) = (saved.save, saved.saved_at, false);
            let since =
                known.get(&save).map_or_else(|| self.context.clock.now(), |step| step.since);
            degraded.push(Degraded { job, step, save, saved_at, health, since, is_unknown });
            if degraded.len() >= 2 * MAX_DEGRADED {
                keep_worst(&mut degraded);
            }
        }
        keep_worst(&mut degraded);
        result.survives = survives.filter(|_| result.steps > result.unknown);
        let worst = degraded.iter().filter(|step| !step.is_unknown).take(MAX_WORST);
        result.worst = worst.map(describe).collect();
        Ok((degraded, result))
    }

    fn record_survey(&self, degraded: &[Degraded], result: SurveyResult, ended_at: Duration) {
        let mut ledger = self.lock_ledger();
        ledger.survey = Some((result, ended_at));
        for step in degraded {
            ledger.retries.mark_seen_and_check_due(step.save, ended_at);
        }
        ledger.retries.forget_unseen();
        let saves: HashSet<SaveId> = degraded.iter().map(|step| step.save).collect();
        ledger.settled.retain(|save, _| saves.contains(save));
        ledger.not_before.retain(|save, until| saves.contains(save) && *until > ended_at);
    }

    /// Returns the first degraded step that is due and is not being repaired.
    fn choose_step(&self, rounds: &Rounds) -> Option<Degraded> {
        let now = self.context.clock.now();
        let (grace, version) = (self.context.settings.repair.grace, rounds.nodes.version());
        let running = rounds.running.as_ref().map(|running| running.save);
        let running = running.filter(|_| rounds.is_running());
        let mut ledger = self.lock_ledger();
        let mut is_due = |step: &&Degraded| {
            let settled = ledger.settled.get(&step.save);
            let is_settled =
                settled.is_some_and(|settled| settled.holds_for(version, step.health, now));
            let is_put_off = ledger.not_before.get(&step.save).is_some_and(|until| now < *until);
            Some(step.save) != running
                && is_repair_due(step.health.is_urgent, step.since, now, grace)
                && !step.is_unknown
                && !is_put_off
                && !is_settled
                && ledger.retries.mark_seen_and_check_due(step.save, now)
        };
        rounds.degraded.iter().find(|step| is_due(step)).cloned()
    }

    /// Repairs a step in a task of its own.
    fn spawn_repair(
        self: &Arc<Self>,
        next: Degraded,
        limits: RepairLimits,
        version: u64,
    ) -> Running {
        let (save, StepHealth { survives, missing, records, .. }) = (next.save, next.health);
        tracing::info!(job = %next.job, step = %next.step, ?survives, missing, records, "repairing a degraded step automatically");
        let (service, stop) = (self.clone(), limits.stop.clone());
        let task = self.context.tasks.spawn_until_stop(async move {
            let repaired = service.repair_step(&next, &RepairCause::Survey(limits)).await;
            service.record_repair(&next, version, repaired);
        });
        Running { save, task, stop, survives }
    }

    /// Repairs a step and records its progress. Returns the summary and the first message about
    /// something that was not made.
    async fn repair_step(
        &self,
        next: &Degraded,
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
        step: &Degraded,
        version: u64,
        repaired: Result<(RepairSummary, Option<String>), CoordinatorError>,
    ) {
        let Degraded { job, step: number, save, health, .. } = step;
        if repaired.as_ref().is_err_and(gives_way) {
            self.put_off(*save);
        }
        let mut ledger = self.lock_ledger();
        ledger.running = None;
        ledger.wants_survey |= !repaired.as_ref().is_err_and(gives_way);
        let why = match repaired {
            Ok((RepairSummary { pieces, replicas, records, made_bytes, away, .. }, None)) => {
                tracing::info!(%job, step = %number, pieces, replicas, records, made_bytes, ?away, "an automatic repair completed; the parts of the nodes in `away`, if there are any, are still missing");
                // If nothing was made and nobody is away, something that a node lacks was not seen, for
                // example because the node did not answer for a moment.
                let is_explained = pieces + replicas + records > 0 || !away.is_empty();
                let until = match is_explained {
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
                return tracing::info!(%job, step = %number, %error, "an automatic repair ended early: after a lease period the step is tried again, if it is still degraded");
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

/// Sorts the steps into the order in which they are repaired, and drops all but the first
/// [`MAX_DEGRADED`].
fn keep_worst(degraded: &mut Vec<Degraded>) {
    degraded.sort_by_key(Degraded::priority);
    degraded.truncate(MAX_DEGRADED);
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

fn describe(step: &Degraded) -> DegradedStep {
    let StepHealth { survives, missing, missing_bytes, records, .. } = step.health;
    let (job, step) = (step.job.clone(), step.step);
    DegradedStep { job, step, survives, missing, missing_bytes, records }
}
