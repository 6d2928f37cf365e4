//! The life of a step: filled by its ranks, staged, hashed, saved and committed, or dropped as a
//! whole.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Core, Effect, FillOutcome, Phase, Skipped, StagedStep, StepKey, Use, fail};
use crate::id::{FillId, MemberId, SaveId, SegmentId, Step};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, Notice, Place, Sample};

/// Maximum number of dropped fillings that are remembered per job. It must exceed the number of a
/// job's segments, whose headers may name dropped fillings.
pub const MAX_DROPPED: usize = 1024;
/// Maximum number of step outcomes that are remembered per launch.
const MAX_OVER: usize = 256;
/// Maximum number of skipped steps that are remembered per launch.
const MAX_SKIPPED: usize = 64;
/// Maximum length of a reason that a rank gives, in characters. All ranks are told the reason.
pub(in crate::trainer::daemon) const MAX_WHY_CHARS: usize = 1000;

/// The fate of the saves of a step that is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SavesOfDropped {
    /// Open saves are aborted, and committed ones are removed.
    Remove,
    /// Open saves are aborted, and committed ones stay.
    AbortIfOpen,
    /// Open saves stay until their leases end, and committed ones for good.
    Leave,
}

impl Core {
    /// Chooses a segment into which the member may write `step`. If there is none, `or_skip` is set
    /// and no rank has begun to fill the step, skips the step and returns
    /// [`FillOutcome::Skipped`]. `new_fill` and `new_segment` draw ids.
    #[expect(clippy::too_many_arguments, reason = "ids and looks at files come in from outside")]
    pub fn fill(
        &mut self,
        member: MemberId,
        step: Step,
        or_skip: bool,
        now: Duration,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
        new_fill: &mut dyn FnMut() -> FillId,
        new_segment: &mut dyn FnMut() -> SegmentId,
    ) -> Result<FillOutcome, Failure> {
        let place = self.writer(member)?;
        if self.is_stopping && self.key_of(&place.job, step, place.launch).is_none() {
            return fail(
                ErrorKind::Unavailable,
                "the staging folder was taken away: no step begins any more",
                "start the staging daemon again; `RemoveIPC=no` keeps systemd-logind from removing the folder",
            );
        }
        if let Some(outcome) = self.check_not_saved(&place, step)? {
            return Ok(outcome);
        }
        let Some(launch) = self.jobs.get(&place.job).and_then(|j| j.launches.get(&place.launch))
        else {
            return fail(
                ErrorKind::Invalid,
                "this launch has not prepared anything",
                "call prepare first",
            );
        };
        let (world, segments_a_rank) = (launch.world, launch.segments_a_rank);
        let is_begun = self.key_of(&place.job, step, place.launch).is_some();
        launch.check_may_fill(&place, step, or_skip, is_begun)?;
        if let Some(key) = self.key_of(&place.job, step, place.launch)
            && let Some(found) = self.step(&key)
            && found.parts.contains_key(&place.rank)
        {
            return Err(saved_twice(&place, step));
        }
        if or_skip && let Some(why) = self.skipped_by_others(&place, step) {
            self.went_on(member, &place, step);
            return Ok(FillOutcome::Skipped(why));
        }
        let again = self.filling_segment(member, &place, step);
        self.went_on(member, &place, step);
        let Some(segment) = again.or_else(|| self.free_segment(member, is_unmapped)) else {
            let none = self.no_segment(member, segments_a_rank, is_unmapped, new_segment)?;
            return Ok(match none {
                // A step that another rank has begun to fill is not skipped: this rank waits for a
                // segment.
                FillOutcome::Full(why)
                    if or_skip && self.key_of(&place.job, step, place.launch).is_none() =>
                {
                    self.skip(&place, step, &why);
                    FillOutcome::Skipped(why)
                }
                none => none,
            });
        };
        self.begin_filling(&place, step);
        let state = self.jobs.entry(place.job.clone()).or_default();
        let found = state.steps.entry((step, place.launch)).or_insert_with(|| StagedStep {
            fill: new_fill(),
            phase: Phase::Filling,
            began_at: now,
            world,
            parts: BTreeMap::new(),
            samples: BTreeMap::new(),
            len_bytes: 0,
            committed_at: Duration::ZERO,
            trouble: None,
            silent: String::new(),
            missing: String::new(),
            progressed_at: now,
            stalls: 0,
            is_replaced: false,
        });
        let fill = found.fill;
        let key = StepKey { job: place.job, step, launch: place.launch, fill };
        if let Some(found) = self.segments.get_mut(&segment) {
            found.state = Use::Filling(key);
        }
        self.effects.push(Effect::MarkFilling(segment, fill));
        Ok(FillOutcome::Segment(segment, fill))
    }

    /// Skips a step for all ranks of a launch.
    fn skip(&mut self, place: &Place, step: Step, why: &str) {
        let Some(launch) = self.launch_mut(place) else { return };
        while launch.skipped.len() >= MAX_SKIPPED {
            launch.skipped.pop_first();
        }
        let skipped = Skipped { why: why.to_owned(), told: BTreeSet::from([place.rank]) };
        launch.skipped.insert(step, skipped);
    }

    /// Returns the reason why other ranks skip a step, once for each rank. If a rank asks again,
    /// the skip is forgotten and the step starts over.
    fn skipped_by_others(&mut self, place: &Place, step: Step) -> Option<String> {
        let launch = self.launch_mut(place)?;
        let skipped = launch.skipped.get_mut(&step)?;
        if skipped.told.insert(place.rank) {
            return Some(skipped.why.clone());
        }
        launch.skipped.remove(&step);
        None
    }

    /// Returns the segment into which the member already fills the step. A member asks again when
    /// the answer was lost. With a second segment, two segments of one rank would claim the same
    /// part.
    fn filling_segment(&self, member: MemberId, place: &Place, step: Step) -> Option<SegmentId> {
        let is_it = |segment: &super::Segment| match &segment.state {
            Use::Filling(key) => (key.step, key.launch) == (step, place.launch),
            _ => false,
        };
        let mut own = self.segments.iter().filter(|(_, segment)| segment.owner == member);
        own.find(|(_, segment)| is_it(segment)).map(|(id, _)| *id)
    }

    /// Drops the steps that the member has not staged and will not stage, because it begins `step`:
    /// earlier steps, and any that it was filling. Later steps are kept, because ranks that are
    /// ahead may have begun them.
    fn went_on(&mut self, member: MemberId, place: &Place, step: Step) {
        let own = self.segments.iter_mut().filter(|(_, segment)| segment.owner == member);
        let mut given_up = Vec::new();
        for (id, segment) in own {
            if let Use::Filling(key) = &segment.state
                && key.step != step
            {
                given_up.push(key.step);
                segment.state = Use::Free;
                self.effects.push(Effect::MarkFree(*id));
            }
        }
        let Some(state) = self.jobs.get(&place.job) else { return };
        let left = state.keys(&place.job, |other, launch, found| {
            launch == place.launch
                && (other < step || given_up.contains(&other))
                && !found.phase.is_complete()
                && !found.parts.contains_key(&place.rank)
        });
        for key in left {
            let why = Failure::new(
                ErrorKind::Invalid,
                format!(
                    "rank {} saves step {step} while other ranks save step {}",
                    place.rank, key.step
                ),
                "all ranks of a launch must save the same steps in the same order",
            );
            self.drop_step(&key, why);
        }
    }

    /// Returns a free segment of the member. If there is none, releases the member's oldest
    /// committed step that is not in use.
    fn free_segment(
        &mut self,
        member: MemberId,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
    ) -> Option<SegmentId> {
        if let Some(free) = self.idle_segment(member, is_unmapped) {
            return Some(free);
        }
        let held = |core: &Self, id: &SegmentId| match &core.segments.get(id)?.state {
            Use::Held(key) => Some(key.clone()),
            _ => None,
        };
        let own = self.owned(member);
        let mut over: Vec<StepKey> = own.iter().filter_map(|id| held(self, id)).collect();
        over.retain(|key| {
            let phase = self.step(key).map(|step| &step.phase);
            matches!(phase, Some(Phase::Committed { .. })) && !self.is_held(key)
        });
        let resume = self.members.get(&member).and_then(|m| self.resume_point(&m.place.job));
        // The resume point is released last, because resuming from memory is fastest.
        over.sort_by_key(|key| (Some(key) == resume.as_ref(), key.step));
        over.into_iter().find_map(|key| {
            self.release_step(&key);
            self.idle_segment(member, is_unmapped)
        })
    }

    /// Returns an unused segment of the member. Unlinks unused segments that the member no longer
    /// has, because it prepared again or unmapped them.
    fn idle_segment(
        &mut self,
        member: MemberId,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
    ) -> Option<SegmentId> {
        for id in self.owned(member) {
            let found = self.segments.get(&id);
            let Some(found) = found.filter(|s| s.state == Use::Free && !s.holds.is_held()) else {
                continue;
            };
            if found.is_current && !is_unmapped(id) {
                return Some(id);
            }
            self.unlink(id);
        }
        None
    }

    fn no_segment(
        &mut self,
        member: MemberId,
        segments_a_rank: usize,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
        new_segment: &mut dyn FnMut() -> SegmentId,
    ) -> Result<FillOutcome, Failure> {
        let mut own = self.owned(member);
        own.retain(|id| self.segments.get(id).is_some_and(|s| s.is_current) && !is_unmapped(*id));
        if own.is_empty() {
            let message = "the segments of this rank are gone: the staging daemon was started anew";
            return fail(ErrorKind::NotFound, message, "call prepare again");
        }
        let len_bytes =
            own.iter().filter_map(|id| self.segments.get(id)).map(|s| s.len_bytes).max();
        if let Some(len_bytes) = len_bytes
            && self.members.get(&member).is_some_and(|found| found.may_grow)
            && own.len() < super::SEGMENTS_A_RANK.max(segments_a_rank)
            && self.make_room(len_bytes, is_unmapped)
        {
            // Count the segment from now on, because other ranks ask for theirs at the same time.
            let segment = new_segment();
            if let Some(place) = self.place(member).cloned() {
                self.add_segment(segment, member, &place, len_bytes);
            }
            return Ok(FillOutcome::Grow { segment, len_bytes });
        }
        let held: Vec<String> = own
            .iter()
            .filter_map(|id| match &self.segments.get(id)?.state {
                Use::Held(key) => Some(self.progress_of(key)),
                _ => None,
            })
            .collect();
        Ok(FillOutcome::Full(held.join("; ")))
    }

    /// Records that a segment of [`FillOutcome::Grow`] could not be made.
    pub fn not_made(&mut self, segment: SegmentId) {
        self.unlink(segment);
    }

    /// Records that the member has no memory for a segment that it was ordered to make, and unlinks
    /// the segment. The member is ordered to make no other until it prepares again. Returns the
    /// member's rank. Returns `None` and changes nothing if the process is no member, or if the
    /// segment is another member's or in use.
    pub fn stop_growth(&mut self, member: MemberId, segment: SegmentId) -> Option<u32> {
        // The segment is gone if the daemon has seen meanwhile that no process has it.
        let found = self.segments.get(&segment);
        let is_unused = |state: &Use| matches!(state, Use::Free | Use::Doomed);
        if found.is_some_and(|found| found.owner != member || !is_unused(&found.state)) {
            return None;
        }
        let of = self.members.get_mut(&member)?;
        of.may_grow = false;
        let rank = of.place.rank;
        self.unlink(segment);
        Some(rank)
    }

    /// Records that the member's part of the step is staged. A repeated call has no effect.
    pub fn staged(
        &mut self,
        member: MemberId,
        step: Step,
        segment: SegmentId,
        fill: FillId,
        samples: Vec<Sample>,
    ) -> Result<(), Failure> {
        let place = self.writer(member)?;
        let key = StepKey { job: place.job.clone(), step, launch: place.launch, fill };
        let state = self.segments.get(&segment).filter(|s| s.owner == member).map(|s| &s.state);
        if state == Some(&Use::Held(key.clone())) {
            // The part was accepted from its header before this report arrived.
            if let Some(found) = self.step_mut(&key)
                && found.samples.get(&place.rank).is_none_or(Vec::is_empty)
            {
                found.samples.insert(place.rank, samples);
            }
            return Ok(());
        }
        if state != Some(&Use::Filling(key.clone())) || self.step(&key).is_none() {
            let over = self
                .launch(&key)
                .and_then(|launch| launch.over.get(&step))
                .and_then(|over| over.as_ref().err().cloned());
            return Err(over.unwrap_or_else(|| {
                Failure::new(
                    ErrorKind::Unavailable,
                    format!("step {step} was dropped while rank {} filled it", place.rank),
                    "save the next step: the staging daemon was started anew meanwhile",
                )
            }));
        }
        self.hold_part(&key, place.rank, segment, samples);
        Ok(())
    }

    /// Records that a rank's part of a step is staged in `segment`. Does nothing if the step was
    /// dropped meanwhile; the segment then is free or being filled with another step.
    pub fn hold_part(
        &mut self,
        key: &StepKey,
        rank: u32,
        segment: SegmentId,
        samples: Vec<Sample>,
    ) {
        if self.step(key).is_none() {
            return;
        }
        let found = self.segments.get_mut(&segment);
        let Some(found) = found.filter(|found| found.state == Use::Filling(key.clone())) else {
            return;
        };
        found.state = Use::Held(key.clone());
        let len_bytes = found.len_bytes;
        let Some(found) = self.step_mut(key) else { return };
        found.parts.insert(rank, segment);
        found.samples.insert(rank, samples);
        found.len_bytes += len_bytes;
        if found.parts.len() as u32 == found.world && found.phase == Phase::Filling {
            found.phase = Phase::Staged;
            self.effects.push(Effect::KeepStep(key.clone()));
            self.effects.push(Effect::Save(key.clone()));
            self.bell.ring();
        }
    }

    /// Returns the segments that are being filled, with step and rank, only those of member `of` if
    /// given. Their headers may say *staged* before their owners report it.
    pub fn filling(&self, of: Option<MemberId>) -> Vec<(SegmentId, StepKey, u32)> {
        let is_it = |owner: MemberId| of.is_none_or(|of| of == owner);
        let filling = self.segments.iter().filter_map(|(id, segment)| match &segment.state {
            Use::Filling(key) if is_it(segment.owner) => {
                Some((*id, key.clone(), segment.place.rank))
            }
            _ => None,
        });
        filling.collect()
    }

    /// Drops a step that the member no longer fills, and notifies the other ranks.
    pub fn give_up(
        &mut self,
        member: MemberId,
        step: Step,
        fill: FillId,
        why: &str,
    ) -> Result<(), Failure> {
        let place = self.writer(member)?;
        let key = StepKey { job: place.job.clone(), step, launch: place.launch, fill };
        if self.step(&key).is_some_and(|found| !found.phase.is_complete()) {
            let why: String = why.chars().take(MAX_WHY_CHARS).collect();
            let message = format!("rank {} gave up step {step}: {why}", place.rank);
            self.drop_step(
                &key,
                Failure::new(ErrorKind::Unavailable, message, "save the next step"),
            );
            // The next call of this member must not fail with the reason that it gave itself.
            if let Some(member) = self.members.get_mut(&member) {
                member.notices.retain(|notice| notice.step != step);
            }
        }
        Ok(())
    }

    /// Drops a step as a whole: frees its segments, notifies its ranks, and abandons its saves. A
    /// save that is already committed is abandoned too, and is then removed from the cluster, unless
    /// other hosts have parts of the step.
    pub fn drop_step(&mut self, key: &StepKey, why: Failure) {
        self.drop_step_with_saves(key, why, self.fate_of_saves(key));
    }

    /// Drops a step that its own launch abandons. Its ranks have asked for that, so only those that
    /// wait for the step get `why`.
    pub(super) fn drop_own_step(&mut self, key: &StepKey, why: Failure) {
        if self.discard_step(key, self.fate_of_saves(key)) {
            self.tell_dropped(key, &why.message);
            self.end(key, Err(why));
        }
    }

    fn fate_of_saves(&self, key: &StepKey) -> SavesOfDropped {
        // Other hosts may have committed a step of several hosts meanwhile. Its save stays, because a
        // newer launch may have resumed from it.
        match self.hosts_of(key) {
            Some(_) => SavesOfDropped::AbortIfOpen,
            None => SavesOfDropped::Remove,
        }
    }

    /// Drops a staged step that its launch may no longer save. A save of it that is committed all the
    /// same stays, because a newer launch may have resumed from it.
    pub fn drop_unsavable_step(&mut self, key: &StepKey, why: Failure) {
        if self.step(key).is_some_and(StagedStep::is_uncommitted) {
            self.drop_step_with_saves(key, why, SavesOfDropped::AbortIfOpen);
        }
    }

    /// Drops a step that another host has dropped. Its save stays open until its lease ends, so that
    /// all hosts can read in the save's record which host dropped the step first.
    pub fn drop_step_with_other_hosts(&mut self, key: &StepKey, why: Failure) {
        self.drop_step_with_saves(key, why, SavesOfDropped::Leave);
    }

    fn drop_step_with_saves(&mut self, key: &StepKey, why: Failure, fate: SavesOfDropped) {
        if !self.discard_step(key, fate) {
            return;
        }
        // If a newer launch has begun, the other hosts drop the step because of it, and need not be
        // told.
        if why.kind() != ErrorKind::Fenced {
            self.tell_dropped(key, &why.message);
        }
        self.end(key, Err(why.clone()));
        let notice = Notice { step: key.step, failure: Some(why), warning: String::new() };
        self.notify(&key.job, key.launch, &notice);
    }

    /// Records that a filling is dropped, frees its segments, and abandons its saves. Returns false
    /// if the step is not in memory.
    fn discard_step(&mut self, key: &StepKey, fate: SavesOfDropped) -> bool {
        let Some(step) = self.step(key) else { return false };
        let begun = match &step.phase {
            Phase::Saving { saves } => saves.clone(),
            _ => Vec::new(),
        };
        let saves = match (fate, &step.phase) {
            (SavesOfDropped::AbortIfOpen, _) => {
                if !begun.is_empty() {
                    self.effects.push(Effect::AbortIfOpen(key.clone(), begun));
                }
                Vec::new()
            }
            (SavesOfDropped::Leave, _) => Vec::new(),
            (SavesOfDropped::Remove, Phase::Committed { save, .. }) => vec![*save],
            (SavesOfDropped::Remove, _) => begun,
        };
        let filling = self.segments.iter().filter(|(_, s)| s.state == Use::Filling(key.clone()));
        let filling: Vec<SegmentId> = filling.map(|(id, _)| *id).collect();
        // Record this before any rank is notified: a header that says *staged* later must not bring
        // the step back.
        if let Some(job) = self.jobs.get_mut(&key.job) {
            job.drop_filling(key.fill);
            let new = saves.iter().map(|save| (key.step, *save));
            let new: Vec<_> = new.filter(|save| !job.abandoned.contains(save)).collect();
            job.abandoned.extend(new);
        }
        if !saves.is_empty() {
            self.effects.push(Effect::Settle(key.job.clone()));
        }
        self.effects.push(Effect::KeepJob(key.job.clone()));
        self.effects.extend(filling.iter().copied().map(Effect::MarkFree));
        for id in filling {
            let Some(segment) = self.segments.get_mut(&id) else { continue };
            segment.state = Use::Free;
            if !self.members.contains_key(&segment.owner) {
                self.unlink(id);
            }
        }
        self.release_step(key);
        self.bell.ring();
        true
    }

    fn end(&mut self, key: &StepKey, how: Result<(SaveId, Vec<String>), Failure>) {
        let launch = self.jobs.get_mut(&key.job).and_then(|job| job.launches.get_mut(&key.launch));
        let Some(launch) = launch else { return };
        launch.over.insert(key.step, how);
        launch.removed.remove(&key.step);
        while launch.over.len() > MAX_OVER {
            // A removed step that is saved again may be lower than all others.
            let lowest = launch.over.keys().copied().find(|step| *step != key.step);
            launch.over.retain(|step, _| Some(*step) != lowest);
        }
        let over = &launch.over;
        launch.removed.retain(|step| over.contains_key(step));
    }

    /// Records that the hashes of a step are written.
    pub fn hashed(&mut self, key: &StepKey) {
        if let Some(step) = self.step_mut(key)
            && step.phase == Phase::Staged
        {
            step.phase = Phase::Hashed;
            self.bell.ring();
        }
    }

    /// Records that a save of the step begins under the last of `saves`, which are already on
    /// record. Returns false if the step was dropped, so that it must not be saved.
    pub fn begin_saving(&mut self, key: &StepKey, saves: Vec<SaveId>) -> bool {
        let Some(step) = self.step_mut(key) else { return false };
        step.phase = Phase::Saving { saves };
        self.bell.ring();
        true
    }

    /// Records that all saves of the step that had begun were aborted.
    pub fn settled(&mut self, key: &StepKey) {
        if let Some(step) = self.step_mut(key)
            && matches!(step.phase, Phase::Saving { .. })
        {
            step.phase = Phase::Hashed;
        }
    }

    /// Records that an attempt to save the step failed and will be retried. Also warns the ranks of
    /// the step if `is_warned` is set.
    pub fn troubled(&mut self, key: &StepKey, trouble: String, is_warned: bool) {
        if let Some(step) = self.step_mut(key) {
            let warning = format!("attempts to save it fail: {trouble}");
            step.trouble = Some(trouble);
            if is_warned {
                self.warn(key, warning);
            }
            self.bell.ring();
        }
    }

    /// Records that the step is committed.
    pub fn committed(&mut self, key: &StepKey, save: SaveId, notes: Vec<String>, now: Duration) {
        let Some(step) = self.step_mut(key) else { return };
        step.phase = Phase::Committed { save, notes: notes.clone() };
        step.committed_at = now;
        step.trouble = None;
        step.missing.clear();
        step.silent.clear();
        if let Some(job) = self.jobs.get_mut(&key.job) {
            job.changes += 1;
        }
        self.end(key, Ok((save, notes)));
        self.tidy(&key.job);
        self.bell.ring();
    }
}

/// Returns the failure of a rank that fills a step which its launch or an earlier one has saved.
pub(super) fn saved_twice(place: &Place, step: Step) -> Failure {
    Failure::new(
        ErrorKind::Exists,
        format!("step {step} of {} is saved already", place.job),
        "save another step, or remove this one first",
    )
}
