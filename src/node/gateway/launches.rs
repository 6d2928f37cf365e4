//! The launches of a job: which of them may save (docs/semantics.md, 3).

use std::sync::Arc;

use super::begin_save::SaveGateway;
use super::error::GatewayError;
use super::page_limits::LAUNCHES_SHOWN;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, LAUNCH_ORDERS, RecordSetOutcome, compare_and_set_record, joint_save_key,
    launch_order_key, parse_checkpoint_key, parse_launch_order_key, parse_record, read_record,
    shard_root_key,
};
use crate::catalogue::{Catalogue, Guard};
use crate::format::joint_save::JointSave;
use crate::format::launch_order::{LaunchOrder, LaunchRank, MAX_LAUNCHES};
use crate::format::records::{Checkpoint, Saved, ShardRoot, Writing};
use crate::format::table::launch_of_index;
use crate::id::{Job, LaunchId, SaveId, Step, StepRef};
use crate::stage::{TracePoint, trace_point};
use crate::wire::RemoteError;
use crate::wire::calls::{AbortSave, LaunchClaim, LaunchView, ListLaunches, RegisterLaunch};

/// A launch that may save a step, as long as the order of the job's launches has not changed.
pub(super) struct AdmittedLaunch {
    launch: LaunchId,
    order: LaunchOrder,
    /// The condition for changes that the launch makes: the order of the job's launches is
    /// unchanged.
    pub(super) guard: Guard,
}

impl SaveGateway {
    /// Registers a launch as the newest one of its job. If it is the newest one already, lowers its
    /// resume point if the call names an earlier one. Then publishes the decided saves of later
    /// steps than the resume point, and aborts the open saves that older launches have of such
    /// steps. Repeating it is safe.
    ///
    /// # Errors
    /// [`GatewayError::LaunchReplaced`] if a newer launch has registered, or may have: the launch is
    /// unknown, claims to have been registered before, and the record has dropped launches.
    /// [`GatewayError::LaunchOvertaken`] if the launch is unknown, claims to have been registered
    /// before, and the newest committed step after its resume point is of another launch.
    pub(in crate::node) async fn register_launch(
        self: &Arc<Self>,
        call: RegisterLaunch,
    ) -> Result<(), RemoteError> {
        let catalogue = self.context.catalogue();
        let key = launch_order_key(&call.job);
        let mut current = read_record::<LaunchOrder>(&*catalogue, &key).await?;
        loop {
            let (mut order, revision) =
                current.map_or_else(Default::default, |(found, revision)| (found, Some(revision)));
            let has_changed = match order.rank_of(call.launch) {
                LaunchRank::Newest => order.lower_resume_point(call.resumed),
                LaunchRank::Older => return Err(replaced(&call.job, call.launch, &order).into()),
                LaunchRank::Unknown => {
                    check_claim(&*catalogue, &call, &order).await?;
                    order.register(call.launch, self.context.clock.wall_seconds(), call.resumed);
                    true
                }
            };
            if !has_changed {
                break;
            }
            trace_point(TracePoint::Register, format_args!("{}/{}", call.job, call.launch));
            match compare_and_set_record(&*catalogue, &key, revision, &order).await? {
                RecordSetOutcome::Set(_) => {
                    tracing::info!(job = %call.job, launch = %call.launch, "the launch is the newest one of its job");
                    break;
                }
                RecordSetOutcome::Conflict(other) => current = other,
            }
        }
        self.end_older_saves(&*catalogue, &call).await
    }

    /// Publishes the decided saves of later steps than the launch's resume point, so that the
    /// launch finds all of them committed. Aborts the open saves that other launches have of such
    /// steps. The other launches are older as long as this one is the newest.
    async fn end_older_saves(
        self: &Arc<Self>,
        catalogue: &dyn Catalogue,
        call: &RegisterLaunch,
    ) -> Result<(), RemoteError> {
        let is_later = |step: Step| call.resumed.is_none_or(|resumed| step > resumed);
        let mut checkpoints = KeyScan::of_prefix(catalogue, steps_prefix(&call.job));
        while let Some((key, entry)) = checkpoints.next().await? {
            // A damaged record must not keep the launch from saving other steps. No daemon can
            // commit a save of this step until the record parses.
            let checkpoint: Checkpoint = match parse_record(&key, &entry.value) {
                Ok(checkpoint) => checkpoint,
                Err(error) => {
                    tracing::error!(key, %error, "the record of a step does not parse: a save of this step that an earlier launch left open is neither published nor aborted");
                    continue;
                }
            };
            let Some((job, step)) = parse_checkpoint_key(&key) else { continue };
            let Some(writing) = checkpoint.writing.filter(|_| is_later(step)) else { continue };
            let ended = match &writing {
                Writing::Decided { saved } => {
                    self.mark_and_publish(job.at(step), saved.clone()).await.map(drop)
                }
                Writing::Open { save, .. } => {
                    let save = *save;
                    match self.await_joint_record(catalogue, job.at(step), save).await? {
                        Some((joint, _)) if joint.launch != call.launch => {
                            let abort = AbortSave { job: job.clone(), step, save };
                            self.abort_save_for(abort, Some(call.launch)).await
                        }
                        _ => Ok(()),
                    }
                }
            };
            let Err(error) = ended else { continue };
            // Another daemon may have published or aborted the save meanwhile.
            let now = read_record::<Checkpoint>(catalogue, &key).await?;
            if now.is_some_and(|(now, _)| now.writing.as_ref() == Some(&writing)) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Lists the newest launch of each job, by pages, or the last launches of one job.
    pub(in crate::node) async fn list_launches(
        &self,
        call: ListLaunches,
    ) -> Result<Vec<LaunchView>, RemoteError> {
        let catalogue = self.context.catalogue();
        if let Some(job) = call.job {
            let found = read_record::<LaunchOrder>(&*catalogue, &launch_order_key(&job)).await?;
            let launches = found.map(|(order, _)| order.launches).unwrap_or_default();
            let view = |registered| LaunchView { job: job.clone(), registered };
            return Ok(launches.into_iter().map(view).collect());
        }
        let after = call.after.map(|job| launch_order_key(&job));
        let limit = LAUNCHES_SHOWN as u32;
        let page = catalogue.list_entries(LAUNCH_ORDERS, after.as_deref(), limit).await?;
        let mut views = Vec::with_capacity(page.len());
        for (key, entry) in page {
            // A damaged record must not hide the launches of all other jobs.
            let mut order: LaunchOrder = match parse_record(&key, &entry.value) {
                Ok(order) => order,
                Err(error) => {
                    tracing::error!(key, %error, "the order of a job's launches does not parse: its launches are not listed, and cannot save");
                    continue;
                }
            };
            let newest = parse_launch_order_key(&key).zip(order.launches.pop());
            views.extend(newest.map(|(job, registered)| LaunchView { job, registered }));
        }
        Ok(views)
    }
}

fn steps_prefix(job: &Job) -> String {
    format!("{CHECKPOINTS}{job}/")
}

/// Returns the refusal of a launch: a newer one is registered, or this one is not.
fn refusal(job: &Job, launch: LaunchId, order: &LaunchOrder) -> GatewayError {
    match order.newest().filter(|_| order.rank_of(launch) != LaunchRank::Unknown) {
        None => GatewayError::LaunchUnregistered { launch, job: job.clone() },
        Some(_) => replaced(job, launch, order),
    }
}

fn replaced(job: &Job, launch: LaunchId, order: &LaunchOrder) -> GatewayError {
    match order.newest() {
        None => GatewayError::LaunchUnregistered { launch, job: job.clone() },
        Some(newest) => GatewayError::LaunchReplaced {
            launch,
            job: job.clone(),
            number: newest.number,
            newest: newest.launch,
            since: newest.registered_at,
        },
    }
}

/// Checks that a launch may save a step. Returns it with the condition for its changes.
///
/// # Errors
/// [`GatewayError::LaunchReplaced`] if a newer launch has registered, and
/// [`GatewayError::LaunchUnregistered`] if the launch is unknown.
pub(super) async fn admit_launch(
    catalogue: &dyn Catalogue,
    launch: LaunchId,
    step_ref: StepRef<'_>,
) -> Result<AdmittedLaunch, RemoteError> {
    let (order, guard) = read_order(catalogue, step_ref.job).await?;
    match order.may_save(launch, step_ref.step) {
        true => Ok(AdmittedLaunch { launch, order, guard }),
        false => Err(refusal(step_ref.job, launch, &order).into()),
    }
}

/// Checks that a launch is the newest one of its job. Returns the condition for its changes.
///
/// # Errors
/// As [`admit_launch`].
pub(super) async fn require_newest(
    catalogue: &dyn Catalogue,
    launch: LaunchId,
    job: &Job,
) -> Result<Guard, RemoteError> {
    let (order, guard) = read_order(catalogue, job).await?;
    match order.rank_of(launch) {
        LaunchRank::Newest => Ok(guard),
        LaunchRank::Older | LaunchRank::Unknown => Err(refusal(job, launch, &order).into()),
    }
}

async fn read_order(
    catalogue: &dyn Catalogue,
    job: &Job,
) -> Result<(LaunchOrder, Guard), RemoteError> {
    let key = launch_order_key(job);
    let found = read_record::<LaunchOrder>(catalogue, &key).await?;
    let (order, revision) =
        found.map_or_else(Default::default, |(order, revision)| (order, Some(revision)));
    Ok((order, Guard { key, revision }))
}

impl AdmittedLaunch {
    /// Returns whether an open save is one of a launch that registered before this one.
    pub(super) async fn is_newer_than_launch_of(
        &self,
        catalogue: &dyn Catalogue,
        save: SaveId,
    ) -> Result<bool, RemoteError> {
        let launch = find_launch_of_open_save(catalogue, save).await?;
        Ok(launch.is_some_and(|launch| self.order.is_before(launch, self.launch)))
    }
}

/// Checks whether a launch that is not in `order` may register as the newest one, by the claim in
/// its call.
async fn check_claim(
    catalogue: &dyn Catalogue,
    call: &RegisterLaunch,
    order: &LaunchOrder,
) -> Result<(), RemoteError> {
    match call.claim {
        LaunchClaim::After { newest } => {
            let found = order.newest().map(|newest| newest.launch);
            // The order is empty when the catalogue was rebuilt since.
            match found.is_none() || found == newest {
                true => Ok(()),
                false => Err(replaced(&call.job, call.launch, order).into()),
            }
        }
        // The order lists only the last launches. Once it has dropped some, this launch may be one
        // of those, and is then older than the newest.
        LaunchClaim::Again
            if order.newest().is_some_and(|newest| newest.number > MAX_LAUNCHES as u64) =>
        {
            Err(replaced(&call.job, call.launch, order).into())
        }
        LaunchClaim::Again => refuse_if_overtaken(catalogue, call).await,
    }
}

/// Refuses a launch that was overtaken. Of the committed steps after its resume point, the last one
/// that belongs to any launch decides: it must be one of this launch.
async fn refuse_if_overtaken(
    catalogue: &dyn Catalogue,
    call: &RegisterLaunch,
) -> Result<(), RemoteError> {
    let mut later: Vec<(Step, Saved)> = Vec::new();
    let mut checkpoints = KeyScan::of_prefix(catalogue, steps_prefix(&call.job));
    while let Some((key, entry)) = checkpoints.next().await? {
        let checkpoint: Checkpoint = parse_record(&key, &entry.value)?;
        let Some((_, step)) = parse_checkpoint_key(&key) else { continue };
        if call.resumed.is_none_or(|resumed| step > resumed) {
            later.extend(checkpoint.committed.map(|saved| (step, saved)));
        }
    }
    for (step, saved) in later.into_iter().rev() {
        let last = shard_root_key(saved.save, saved.shards.saturating_sub(1));
        let root = read_record::<ShardRoot>(catalogue, &last).await?;
        match root.and_then(|(root, _)| launch_of_index(&root.name)) {
            // A save that belongs to no launch proves nothing.
            None => {}
            Some(launch) if launch == call.launch => return Ok(()),
            Some(other) => {
                let (job, launch) = (call.job.clone(), call.launch);
                return Err(GatewayError::LaunchOvertaken { job, step, launch, other }.into());
            }
        }
    }
    Ok(())
}

/// Returns the launch of a save that is open or decided, or `None` if it belongs to none.
pub(super) async fn find_launch_of_open_save(
    catalogue: &dyn Catalogue,
    save: SaveId,
) -> Result<Option<LaunchId>, RemoteError> {
    let joint = read_record::<JointSave>(catalogue, &joint_save_key(save)).await?;
    Ok(joint.map(|(joint, _)| joint.launch))
}
