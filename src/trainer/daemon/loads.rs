//! Loads: the choice of a rank's step and of its source, and the record of extents that were
//! verified on this host.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::MemfdFlags;

use super::assemble::find_changed;
use super::core::{LoadAnswer, OlderSteps, StepKey};
use super::fetch::{FetchFailure, FetchScope, Fetched, MemoryUse};
use super::load_source::{LoadedContent, Source};
use super::ranges::Window;
use super::trace::{StagingPoint, trace_point};
use super::{MAX_HELD_BACK, StagingDaemon};
use crate::id::{Job, LaunchId, MemberId, SaveId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{
    Answer, Failure, Load, LoadFrom, LoadSource, Loadable, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES,
    Pending, Place, Resumed,
};

/// Maximum number of open loads of one connection.
const MAX_TICKETS: usize = 16;
/// Maximum number of loads for which verified extents are remembered.
const MAX_VERIFIED: usize = 64;
/// Pause before the cluster is asked again which steps are committed.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// The key of a load of a launch. The ranks of the launch share which extents they have verified.
pub type LoadKey = (Job, LaunchId, u32);

/// The extents of a load that some rank of its launch has verified, as a bit map with one bit per
/// row.
pub struct Verified {
    of: LoadedContent,
    bits: Vec<u8>,
}

struct Ticket {
    source: Source,
    of: Option<LoadKey>,
    window: Option<Window>,
}

/// The loads of one connection.
#[derive(Default)]
pub struct Tickets {
    next: u64,
    open: BTreeMap<u64, Ticket>,
}

/// The place from which a step is to be loaded.
enum Found {
    InMemory(StepKey),
    InCluster(Step, SaveId),
    Nothing,
}

type Replied = Result<(Answer, Vec<OwnedFd>), Failure>;

fn pending(what: String, (done_bytes, total_bytes): (u64, u64)) -> Replied {
    Ok((Answer::Pending(Pending { what, done_bytes, total_bytes }), Vec::new()))
}

fn other_answer() -> Replied {
    pending("another rank of the launch was given another step".to_owned(), (0, 0))
}

impl StagingDaemon {
    /// Finds the step of a load and prepares it. The answer may be that it is not ready yet.
    pub(super) async fn load(
        self: &Arc<Self>,
        member: MemberId,
        load: &Load,
        from: LoadFrom,
        tickets: &mut Tickets,
    ) -> Replied {
        if tickets.open.len() >= MAX_TICKETS {
            let message = format!("this process has {MAX_TICKETS} loads open");
            return Err(Failure::new(ErrorKind::Busy, message, "release one first"));
        }
        let limit = Duration::from_millis(load.limit_ms.into()).min(MAX_HELD_BACK);
        let until = self.clock.now() + limit;
        // Ranks that have died may have staged a part without reporting it. Read the headers before
        // the step to load is chosen.
        self.accept_headers(None);
        if let Some(what) = self.wait_for_older_steps(load, from, until).await {
            return pending(what, (0, 0));
        }
        let (newest, found) = loop {
            let changes = self.with(|core| core.changes(&load.job));
            self.read_launch_order_before(load).await;
            let committed = match self.committed_saves(&load.job).await {
                Ok(committed) => Some(committed),
                Err(_) if load.offline => None,
                Err(failure) if failure.kind().is_transient() => {
                    self.clock.sleep(ASK_AGAIN.min(until.saturating_sub(self.clock.now()))).await;
                    return pending(failure.message, (0, 0));
                }
                Err(failure) => return Err(failure),
            };
            let newest = committed.as_ref().and_then(|saves| saves.last()).map(|(step, _)| *step);
            match self.find(load, from, committed.as_deref(), changes)? {
                Some(found) => break (newest, found),
                None if self.clock.now() >= until => {
                    return pending(format!("a step of {} was just committed", load.job), (0, 0));
                }
                None => {}
            }
        };
        let mut why_by_ranges = String::new();
        let (step, source) = match found {
            Found::Nothing => match self.remember(member, load, None, newest) {
                true => return Ok((Answer::Nothing, Vec::new())),
                false => return other_answer(),
            },
            Found::InMemory(key) => {
                let went_away =
                    || pending(format!("step {} is no longer in memory", key.step), (0, 0));
                let Some(step) = self.hashed_step(&key).await? else { return went_away() };
                let Some(holds) = self.with(|core| core.hold_step(&key)) else {
                    return went_away();
                };
                let _holds = holds.into_iter().map(|(_, hold, _)| hold).collect();
                (key.step, Source::Memory { step, _holds })
            }
            Found::InCluster(step, save) => {
                // A segment that a reader holds cannot be filled again. So only ranks of a launch
                // read from segments here; other readers would delay the trainers.
                let memory_use = match from == LoadFrom::Cluster && load.launch.is_some() {
                    true => MemoryUse::Allowed,
                    false => MemoryUse::Forbidden,
                };
                match self.read_from_cluster(load, (step, save), memory_use, until).await? {
                    Ok((fetched, why)) => {
                        why_by_ranges = why;
                        let held = match memory_use {
                            MemoryUse::Allowed if fetched.files.is_empty() => {
                                self.find_held_part(&fetched).await
                            }
                            _ => None,
                        };
                        (step, Source::Cluster { fetched, held })
                    }
                    Err(progress) => {
                        return pending(
                            format!("step {step} is being read from the cluster"),
                            progress,
                        );
                    }
                }
            }
        };
        if !self.remember(member, load, Some(step), newest) {
            return other_answer();
        }
        trace_point(StagingPoint::Loading, &load.job, step);
        self.open_ticket(load, step, newest, source, why_by_ranges, tickets)
    }

    /// Waits, before the resume point is chosen, until the steps of older launches that cannot be
    /// loaded from memory are saved or make no progress. Returns a description of the step that it
    /// still waits for at `until`, or `None` if there is none.
    async fn wait_for_older_steps(
        self: &Arc<Self>,
        load: &Load,
        from: LoadFrom,
        until: Duration,
    ) -> Option<String> {
        let (launch, _) = load.launch.filter(|_| load.step.is_none())?;
        let waited_for = match from {
            LoadFrom::Anywhere => OlderSteps::OfSeveralHosts,
            LoadFrom::Cluster => OlderSteps::All,
        };
        let mut heard = self.bell.listen();
        loop {
            let now = self.clock.now();
            let what =
                self.with(|core| core.describe_awaited_step(&load.job, launch, waited_for, now))?;
            if now >= until {
                return Some(what);
            }
            self.wait_for_bell(&mut heard, (until - now).min(ASK_AGAIN)).await;
        }
    }

    /// Reads a step from the cluster: the whole step, or only its table if the process asked for
    /// this first or memory does not suffice for more. Returns what was read, and the reason if it
    /// is only the table although the whole step was requested; or the progress if the read is not
    /// done at `until`.
    async fn read_from_cluster(
        self: &Arc<Self>,
        load: &Load,
        (step, save): (Step, SaveId),
        memory_use: MemoryUse,
        until: Duration,
    ) -> Result<Result<(Arc<Fetched>, String), (u64, u64)>, Failure> {
        let mut why_by_ranges = String::new();
        let mut scope = match load.table_first && !self.is_fetched(&load.job, step, save) {
            true => FetchScope::Table,
            false => FetchScope::Whole,
        };
        loop {
            let fetch = self.fetch(&load.job, step, save, scope, memory_use).await?;
            let mut heard = self.bell.listen();
            let end = loop {
                if let Some(end) = fetch.end() {
                    break end;
                }
                let now = self.clock.now();
                if now >= until {
                    return Ok(Err(fetch.progress()));
                }
                self.wait_for_bell(&mut heard, until - now).await;
            };
            match end {
                Err(FetchFailure::NoRoom(failure)) if scope == FetchScope::Whole => {
                    (scope, why_by_ranges) = (FetchScope::Table, failure.message);
                }
                end => return Ok(Ok((end.map_err(Failure::from)?, why_by_ranges))),
            }
        }
    }

    /// Reads extents of a step that is loaded by ranges. The answer may be that they are not read
    /// yet.
    pub(super) async fn read_extents(
        self: &Arc<Self>,
        tickets: &mut Tickets,
        ticket: u64,
        extents: Vec<u32>,
        limit_ms: u32,
    ) -> Replied {
        let until = self.clock.now() + Duration::from_millis(limit_ms.into()).min(MAX_HELD_BACK);
        // A process has one window at a time.
        for (_, other) in tickets.open.iter_mut().filter(|(other, _)| **other != ticket) {
            other.window = None;
        }
        let open = tickets.open.get_mut(&ticket).ok_or_else(no_ticket)?;
        let (Source::Cluster { fetched, .. }, LoadSource::Ranges) =
            (&open.source, open.source.kind())
        else {
            return Err(Failure::new(ErrorKind::Invalid, "this load is not by ranges", ""));
        };
        let known = open.window.take().filter(|window| window.extents == extents);
        let mut window = match known {
            Some(window) => window,
            None => self.open_window(fetched, extents.clone())?,
        };
        let mut heard = self.bell.listen();
        loop {
            if window.has_expired() {
                window = self.open_window(fetched, extents.clone())?;
            }
            if let Some(end) = window.take() {
                let (parts, file) = end?;
                return Ok((Answer::Parts { parts }, vec![file.into()]));
            }
            let now = self.clock.now();
            if now >= until {
                let progress = window.progress();
                open.window = Some(window);
                return pending("a part of a step is being read".to_owned(), progress);
            }
            self.wait_for_bell(&mut heard, until - now).await;
        }
    }

    fn open_ticket(
        &self,
        load: &Load,
        step: Step,
        newest_committed: Option<Step>,
        source: Source,
        why_by_ranges: String,
        tickets: &mut Tickets,
    ) -> Replied {
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(ErrorKind::Io, format!("the table of step {step}: {error}"), "")
        };
        let bytes = source.table().to_bytes().map_err(|error| failed(&error))?;
        let descriptor = memory_file(&bytes).map_err(|error| failed(&error))?;
        let kind = source.kind();
        let of = load.launch.map(|(launch, number)| (load.job.clone(), launch, number));
        // Each process verifies what is read for it alone, so nothing is shared.
        let of = of.filter(|_| kind != LoadSource::Ranges);
        let verified = of.as_ref().and_then(|of| {
            let all = self.verified();
            let found = all.get(of).filter(|found| found.of == source.content());
            // Without the bits, the rank verifies all extents itself.
            let found = found.filter(|found| found.bits.len() <= MAX_MESSAGE_BYTES / 2);
            found.map(|found| found.bits.clone())
        });
        let parts = source.parts().len() as u32;
        let world = if kind == LoadSource::Memory { parts } else { 0 };
        tickets.next += 1;
        let loadable = Loadable {
            ticket: tickets.next,
            step,
            table_bytes: bytes.len() as u64,
            parts,
            source: kind,
            verified: verified.unwrap_or_default(),
            newest_committed,
            world,
            why_by_ranges,
        };
        tickets.open.insert(tickets.next, Ticket { source, of, window: None });
        Ok((Answer::Loadable(loadable), vec![descriptor]))
    }

    /// Returns the committed steps of a job with their saves, ascending, without abandoned ones.
    pub(super) async fn committed_saves(
        self: &Arc<Self>,
        job: &Job,
    ) -> Result<Vec<(Step, SaveId)>, Failure> {
        let steps = self.client.list_steps(Some(job)).await.map_err(|error| {
            let message = format!("the cluster does not say which steps are committed: {error}");
            Failure::new(error.kind(), message, error.hint().unwrap_or_default())
        })?;
        let mut saves: Vec<(Step, SaveId)> =
            steps.into_iter().map(|view| (view.step, view.saved.save)).collect();
        self.with(|core| {
            if let Some(state) = core.job(job) {
                saves.retain(|save| !state.abandoned.contains(save));
            }
        });
        saves.sort_unstable();
        Ok(saves)
    }

    /// Fails if the launch has a `keep` and the cluster's policy retires steps of the job too: the
    /// two rules would conflict.
    pub(super) async fn check_keep(self: &Arc<Self>, place: &Place) -> Result<(), Failure> {
        let keep = self.with(|core| core.keep_of(place));
        if keep == 0 {
            return Ok(());
        }
        let newest = self.client.fetch_keep_newest(&place.job).await.map_err(|error| {
            let message = format!("the cluster does not say what its policy keeps: {error}");
            Failure::new(error.kind(), message, error.hint().unwrap_or_default())
        })?;
        let Some(newest) = newest else { return Ok(()) };
        let message = format!(
            "keep={keep} for {}, of which the cluster's policy keeps the newest {newest}",
            place.job
        );
        let hint = "leave keep out, or take keep_newest out of the policy of the nodes";
        Err(Failure::new(ErrorKind::Invalid, message, hint))
    }

    /// Chooses the step of a load. All ranks of a launch get the same answer to their n-th load. A
    /// step in memory counts as committed only if the cluster has the same save; otherwise a client
    /// has removed or replaced it. `changes`: see `Core::drop_replaced`. Returns `None` if the list
    /// of committed steps is outdated and must be requested again.
    fn find(
        self: &Arc<Self>,
        load: &Load,
        from: LoadFrom,
        committed: Option<&[(Step, SaveId)]>,
        changes: u64,
    ) -> Result<Option<Found>, Failure> {
        let of = |step: Step| {
            committed.and_then(|saves| {
                saves.binary_search_by_key(&step, |save| save.0).ok().and_then(|at| saves.get(at))
            })
        };
        let answered = load.launch.and_then(|(launch, number)| {
            self.with(|core| {
                let loads = &core.job(&load.job)?.loads;
                loads.iter().find(|a| (a.launch, a.number) == (launch, number)).map(|a| a.step)
            })
        });
        if let (Some(answered), Some(asked)) = (answered, load.step)
            && answered != Some(asked)
        {
            let other = answered.map_or("nothing".to_owned(), |step| format!("step {step}"));
            let message =
                format!("this rank loads step {asked}, another rank of its launch {other}");
            return Err(Failure::new(
                ErrorKind::Invalid,
                message,
                "all ranks must load the same step",
            ));
        }
        if answered == Some(None) {
            return Ok(Some(Found::Nothing));
        }
        let wanted = load.step.or(answered.flatten());
        let save_of = |step: Step| of(step).map(|save| save.1);
        let in_memory = self.with(|core| {
            let counts = committed.is_none() || core.drop_replaced(&load.job, changes, &save_of);
            counts.then(|| match (from, wanted) {
                (LoadFrom::Cluster, _) => None,
                (LoadFrom::Anywhere, Some(step)) => core.complete_step(&load.job, step),
                (LoadFrom::Anywhere, None) => core.resume_point(&load.job),
            })
        });
        let Some(in_memory) = in_memory else { return Ok(None) };
        let newest = committed.and_then(|saves| saves.last().copied());
        Ok(Some(match (wanted, in_memory, newest) {
            (None, Some(key), Some((step, save))) if step > key.step => {
                let newer = self.with(|core| core.complete_step(&load.job, step));
                newer.map_or(Found::InCluster(step, save), Found::InMemory)
            }
            (_, Some(key), _) => Found::InMemory(key),
            (None, None, Some((step, save))) => Found::InCluster(step, save),
            (None, None, None) => Found::Nothing,
            (Some(step), None, _) => match of(step) {
                Some((step, save)) => Found::InCluster(*step, *save),
                None => {
                    let message = format!(
                        "{}/{step} is not committed, and not in this host's memory",
                        load.job
                    );
                    let hint = "`rapidraid ls` shows what is committed";
                    return Err(Failure::new(ErrorKind::NotFound, message, hint));
                }
            },
        }))
    }

    /// Records which step a launch was given, before its first rank is notified. A launch that may
    /// write continues from this step. Returns false if another rank was given another step
    /// meanwhile.
    fn remember(
        self: &Arc<Self>,
        member: MemberId,
        load: &Load,
        step: Option<Step>,
        newest_seen: Option<Step>,
    ) -> bool {
        let Some((launch, number)) = load.launch else { return true };
        self.with(|core| {
            if core.answer_load(&load.job, LoadAnswer { launch, number, step }) != step {
                return false;
            }
            if let Some(place) = core.place(member).cloned()
                && step.is_some()
            {
                let resumed = Resumed { loaded: step, newest_seen, abandon_later: false };
                core.loaded(&place, number, resumed);
            }
            true
        })
    }

    /// Returns descriptors for the parts of a load, from `first` on.
    pub(super) fn open_parts(&self, tickets: &Tickets, ticket: u64, first: u32) -> Replied {
        let source = &tickets.open.get(&ticket).ok_or_else(no_ticket)?.source;
        let (mut parts, mut descriptors) = (Vec::new(), Vec::new());
        let all = source.parts();
        for (at, part) in all.into_iter().enumerate().skip(first as usize).take(MAX_DESCRIPTORS) {
            parts.push(part);
            descriptors.push(source.open_part(&self.folder, at)?.ok_or_else(no_ticket)?.into());
        }
        Ok((Answer::Parts { parts }, descriptors))
    }

    /// Records for the other ranks of a launch which extents of a load were verified.
    pub(super) fn set_verified(
        &self,
        tickets: &Tickets,
        ticket: u64,
        extents: &[u32],
    ) -> Result<(), Failure> {
        let Ticket { source, of, .. } = tickets.open.get(&ticket).ok_or_else(no_ticket)?;
        let Some(of) = of else { return Ok(()) };
        let count = source.table().extents().len();
        let mut verified = self.verified();
        while verified.len() >= MAX_VERIFIED && !verified.contains_key(of) {
            verified.pop_first();
        }
        let none = || Verified { of: source.content(), bits: vec![0; count.div_ceil(8)] };
        let found = verified.entry(of.clone()).or_insert_with(none);
        if found.of != source.content() {
            *found = none();
        }
        let bits = &mut found.bits;
        for &extent in extents.iter().filter(|extent| (**extent as usize) < count) {
            if let Some(byte) = bits.get_mut(extent as usize / 8) {
                *byte |= 1 << (extent % 8);
            }
        }
        Ok(())
    }

    /// Ends a load.
    pub(super) fn release(&self, tickets: &mut Tickets, ticket: u64) {
        tickets.open.remove(&ticket);
    }

    /// Handles a report that an extent of a load does not match its hash. If the load reads the
    /// step's segments, the daemon checks them itself, because an uncommitted step is lost with its
    /// memory. If an extent has changed, or the check fails, the daemon gives up the step in memory;
    /// a committed step is then loaded from the cluster. In a load from the cluster, the daemon gives
    /// up the fetched files, and this host's memory of the step if the load used it, without a check,
    /// because the cluster has the step.
    pub(super) async fn set_corrupt(
        self: &Arc<Self>,
        tickets: &mut Tickets,
        ticket: u64,
        name: &str,
    ) -> Result<(), Failure> {
        let Ticket { source, of, .. } = tickets.open.remove(&ticket).ok_or_else(no_ticket)?;
        if let Some(of) = of {
            self.verified().remove(&of);
        }
        let (step, _holds) = match source {
            Source::Memory { step, _holds } => (step, _holds),
            Source::Cluster { fetched, held } => {
                tracing::error!(
                    "a trainer reports that {name} is damaged in memory: the next load reads the step from the cluster again"
                );
                self.forget_fetched(&fetched);
                let held = held.map(|held| held.key.clone());
                if let Some(key) =
                    held.or_else(|| fetched.copied.as_ref().map(|copied| copied.from.clone()))
                {
                    self.with(|core| core.give_up_copy(&key));
                }
                return Ok(());
            }
        };
        let changed = find_changed(&step, &self.workers, &|| {}).await;
        let fill = step.fill;
        drop((step, _holds));
        match changed {
            Ok(None) => {
                tracing::error!(
                    "a trainer reports that {name} is damaged in memory, but it is intact: check the memory to which the trainer copied it"
                );
            }
            _ => {
                tracing::error!(
                    "a trainer reports that {name} is damaged in memory: the step is dropped there, and lost unless it is committed"
                );
                self.with(|core| core.give_up_memory(fill, name));
            }
        }
        Ok(())
    }
}

fn no_ticket() -> Failure {
    Failure::new(ErrorKind::Invalid, "this load is no longer open", "load once more")
}

/// Creates an unnamed file that contains `bytes`, for a process to read.
fn memory_file(bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create("rapidraid-table", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file.into())
}
