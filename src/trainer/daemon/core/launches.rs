//! Members and launches: which processes may write for a job.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::hosts::check_hosts;
use super::{
    Core, Effect, Ending, Launch, MAX_OLD_LAUNCHES, Member, SEGMENTS_A_RANK, Segment, StepKey, Use,
    fail,
};
use crate::format::launch_order::{LaunchOrder, LaunchRank};
use crate::id::{Job, LaunchId, MemberId, SaveId, SegmentId, Step};
use crate::kind::ErrorKind;
use crate::trainer::daemon::hold::Holds;
use crate::trainer::daemon::records::LaunchRecord;
use crate::trainer::protocol::{Failure, Hosts, MAX_WORLD, Place, Prepare, Resumed};
use crate::trainer::segment::HEADER_BYTES;
use crate::units::{ByteCount, date};

/// Returns the failure of a step whose launch may no longer save it.
pub fn launch_over_failure(key: &StepKey, order: &LaunchOrder) -> Failure {
    let by = order.newest().map_or("another launch".to_owned(), |newest| {
        let since = date(newest.registered_at);
        format!(
            "launch {} ({}) has been saving for the job since {since}",
            newest.number, newest.launch
        )
    });
    let message = format!(
        "step {} of {} is not saved: launch {} is over, {by}",
        key.step, key.job, key.launch
    );
    Failure::new(ErrorKind::Fenced, message, "end this process; its successor has taken over")
}

impl Core {
    /// Returns the failure of a call of a launch that is no longer the newest of its job on this host.
    fn launch_replaced_failure(&self, place: &Place) -> Failure {
        let newest = self.jobs.get(&place.job).and_then(|job| {
            let id = job.newest?;
            Some((id, job.launches.get(&id)?))
        });
        let by = newest.map_or("a newer launch writes for the job".to_owned(), |(id, launch)| {
            let since =
                date(self.booted_at.saturating_add(Duration::from_nanos(launch.born_ns).as_secs()));
            format!("a newer launch ({id}) has been writing for the job since {since}")
        });
        let message = format!("launch {} of job {} is over: {by}", place.launch, place.job);
        Failure::new(ErrorKind::Fenced, message, "end this process; its successor has taken over")
    }

    /// Makes segments for a rank and makes its launch the newest of the job. `is_unmapped` returns
    /// whether no process maps a segment; `new_id` draws ids. Fails with [`ErrorKind::Busy`] if
    /// there is no room now.
    pub fn prepare(
        &mut self,
        member: MemberId,
        prepare: &Prepare,
        hosts: Option<&Hosts>,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
        new_id: &mut dyn FnMut() -> SegmentId,
    ) -> Result<Vec<SegmentId>, Failure> {
        let place = &prepare.place;
        check_place(place)?;
        if let Some(hosts) = hosts {
            check_hosts(hosts)?;
        }
        if prepare.segment_bytes <= HEADER_BYTES || prepare.launch_bytes < prepare.segment_bytes {
            return fail(
                ErrorKind::Invalid,
                "the length of a segment is too small, or exceeds the sum over all ranks",
                "use the package and the daemon of one version",
            );
        }
        self.take_over(prepare, hosts)?;
        self.join(member, place)?;
        if self.launch_mut(place).is_some_and(|launch| launch.hosts.as_ref() != hosts) {
            return fail(
                ErrorKind::Invalid,
                format!("rank {} names other hosts than the other ranks", place.rank),
                "make every Checkpointer of a launch with the same process group",
            );
        }
        if let Some(found) = self.members.get_mut(&member) {
            found.may_grow = true;
        }
        // A member prepares again because its layout changed or it did not get the answer. Its
        // earlier segments are no longer used.
        for segment in self.owned(member) {
            let Some(found) = self.segments.get_mut(&segment) else { continue };
            found.is_current = false;
            if matches!(found.state, Use::Free | Use::Filling(_)) {
                self.unlink(segment);
            }
        }
        let count = self.admit(prepare, is_unmapped)?;
        if let Some(launch) = self.launch_mut(place) {
            launch.members.insert(place.rank, member);
        }
        let made: Vec<SegmentId> = (0..count).map(|_| new_id()).collect();
        for &id in &made {
            self.add_segment(id, member, place, prepare.segment_bytes);
        }
        Ok(made)
    }

    /// Takes a rank's share from the memory that is reserved for its launch. The launch gets memory
    /// for all of its ranks or for none. Returns the number of segments for this rank.
    fn admit(
        &mut self,
        prepare: &Prepare,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
    ) -> Result<usize, Failure> {
        let (place, bytes) = (&prepare.place, prepare.segment_bytes);
        let Some(launch) = self.launch_mut(place) else { return Ok(0) };
        let (count, promised) = (launch.segments_a_rank, launch.reserved_bytes);
        let is_promised = count > 0 && launch.launch_bytes == prepare.launch_bytes;
        let has_taken = launch.taken.contains(&place.rank);
        if is_promised && !has_taken && promised >= bytes.saturating_mul(count as u64) {
            self.take(place, bytes.saturating_mul(count as u64));
            return Ok(count);
        }
        // After a restart of the daemon, all other ranks may still have their segments. If a rank
        // has none, or their sum says that the segments of others become longer, memory for all is
        // reserved. The sum may be older than the length of this rank's own segment.
        let of_others = self.segments_of_other_ranks(place, is_unmapped);
        let is_alone = of_others.len() as u64 + 1 == u64::from(place.world)
            && of_others.values().sum::<u64>().saturating_add(bytes) >= prepare.launch_bytes;
        let taken = if count == 0 && is_alone { of_others } else { BTreeMap::new() };
        let missing = if taken.is_empty() { prepare.launch_bytes } else { bytes };
        // A rank that already took its share, and lost the answer or released the memory, needs
        // only that share.
        let needed = if is_promised { bytes } else { missing };
        for count in (1..=SEGMENTS_A_RANK).rev() {
            let wanted = needed.saturating_mul(count as u64);
            if self.make_room(wanted, is_unmapped) {
                if is_promised {
                    return Ok(count);
                }
                if let Some(launch) = self.launch_mut(place) {
                    launch.segments_a_rank = count;
                    launch.launch_bytes = prepare.launch_bytes;
                    launch.reserved_bytes = wanted;
                    launch.taken = taken.into_keys().collect();
                }
                self.take(place, bytes.saturating_mul(count as u64));
                return Ok(count);
            }
        }
        Err(self.no_room(needed))
    }

    fn take(&mut self, place: &Place, bytes: u64) {
        if let Some(launch) = self.launch_mut(place) {
            launch.reserved_bytes = launch.reserved_bytes.saturating_sub(bytes);
            launch.taken.insert(place.rank);
        }
    }

    pub(super) fn launch_mut(&mut self, place: &Place) -> Option<&mut Launch> {
        self.jobs.get_mut(&place.job)?.launches.get_mut(&place.launch)
    }

    /// Adds a segment, in the state *free*.
    pub fn add_segment(&mut self, id: SegmentId, owner: MemberId, place: &Place, len_bytes: u64) {
        let holds = Holds::new(&self.bell);
        let (place, state, is_current) = (place.clone(), Use::Free, true);
        self.segments.insert(id, Segment { owner, place, len_bytes, state, is_current, holds });
    }

    /// Identifies a member again after its connection ended. Returns the segments that it has.
    pub fn attach(&mut self, member: MemberId, place: &Place) -> Result<Vec<SegmentId>, Failure> {
        check_place(place)?;
        let is_newest =
            self.jobs.get(&place.job).is_some_and(|job| job.newest == Some(place.launch));
        if !is_newest {
            return Err(self.launch_replaced_failure(place));
        }
        self.join(member, place)?;
        Ok(self.owned(member))
    }

    fn join(&mut self, member: MemberId, place: &Place) -> Result<(), Failure> {
        let other = self.members.iter().find(|(id, other)| {
            **id != member
                && other.place.job == place.job
                && other.place.launch == place.launch
                && other.place.rank == place.rank
        });
        if other.is_some() {
            return fail(
                ErrorKind::Exists,
                format!("rank {} of launch {} has another live process", place.rank, place.launch),
                "every process of a launch needs a rank of its own",
            );
        }
        if let Some(launch) = self.jobs.get(&place.job).and_then(|j| j.launches.get(&place.launch))
            && launch.world != place.world
        {
            return fail(
                ErrorKind::Invalid,
                format!(
                    "rank {} says that the launch has {} ranks, others say {}",
                    place.rank, place.world, launch.world
                ),
                "make every Checkpointer of a launch with the same process group",
            );
        }
        if let Some(job) = self.jobs.get_mut(&place.job)
            && let Some(launch) = job.launches.get_mut(&place.launch)
        {
            launch.members.insert(place.rank, member);
        }
        let entry = self.members.entry(member).or_insert_with(|| Member {
            place: place.clone(),
            notices: VecDeque::new(),
            may_grow: true,
        });
        if entry.place != *place {
            return fail(
                ErrorKind::Invalid,
                "a process has one rank of one launch",
                "make a new Checkpointer for another job",
            );
        }
        self.unattached.remove(&member);
        Ok(())
    }

    /// Makes a launch the newest of its job, and drops the steps that older launches were filling.
    /// Fails if the launch is older than the newest one.
    fn take_over(&mut self, prepare: &Prepare, hosts: Option<&Hosts>) -> Result<(), Failure> {
        let place = &prepare.place;
        let job = self.jobs.entry(place.job.clone()).or_default();
        if job.newest == Some(place.launch) {
            // All ranks of a launch report the same resume point. If a rank has loaded since, the
            // state here is newer than this request.
            return Ok(());
        }
        let newest = job.newest.and_then(|newest| job.launches.get(&newest));
        let is_older = newest.is_some_and(|newest| newest.born_ns > prepare.born_ns);
        if is_older || job.old.contains(&place.launch) {
            return Err(self.launch_replaced_failure(place));
        }
        let mut forgotten = None;
        if let Some(old) = job.newest.replace(place.launch) {
            if job.old.len() == MAX_OLD_LAUNCHES {
                forgotten = job.old.pop_front();
            }
            job.old.push_back(old);
        }
        let launch = Launch::restored(LaunchRecord {
            launch: place.launch,
            world: place.world,
            born_ns: prepare.born_ns,
            resumed: prepare.resumed,
            keep: prepare.keep,
            committed_before: None,
        });
        job.launches.insert(place.launch, Launch { hosts: hosts.cloned(), ..launch });
        if hosts.is_some() {
            // A rank whose request was refused may have removed the record meanwhile.
            self.effects.push(Effect::KeepHosts(place.job.clone(), place.launch));
        }
        if let Some(forgotten) = forgotten {
            self.forget_launch(&place.job, forgotten);
        }
        self.effects.push(Effect::KeepJob(place.job.clone()));
        self.end_old_launches(&place.job, place.launch);
        Ok(())
    }

    /// Forgets an old launch. If it ran on several hosts, its steps are released first: without the
    /// launch, nothing says that this host has only a part of each.
    pub(super) fn forget_launch(&mut self, job: &Job, launch: LaunchId) {
        let Some(state) = self.jobs.get(job) else { return };
        let has_parts = !state.has_whole_steps(launch);
        let parts = state.keys(job, |_, of, _| has_parts && of == launch);
        parts.iter().for_each(|key| self.release_step(key));
        if let Some(state) = self.jobs.get_mut(job) {
            state.launches.remove(&launch);
        }
        self.effects.extend(has_parts.then_some(Effect::ForgetHosts(launch)));
    }

    fn end_old_launches(&mut self, job: &Job, newest: LaunchId) {
        let Some(state) = self.jobs.get_mut(job) else { return };
        for (launch, old) in &mut state.launches {
            if *launch != newest {
                old.reserved_bytes = 0;
            }
        }
        let filling =
            state.keys(job, |_, launch, step| launch != newest && !step.phase.is_complete());
        self.drop_uncommitted_joint_steps(job, newest);
        for key in filling {
            let why = Failure::new(
                ErrorKind::Fenced,
                format!("step {} was being filled when a newer launch of {job} began", key.step),
                "end this process; its successor has taken over",
            );
            self.drop_step(&key, why);
        }
        let free: Vec<SegmentId> = self
            .segments
            .iter()
            .filter(|(_, segment)| {
                segment.place.job == *job
                    && segment.place.launch != newest
                    && !matches!(segment.state, Use::Held(_))
            })
            .map(|(id, _)| *id)
            .collect();
        free.into_iter().for_each(|segment| self.unlink(segment));
    }

    /// Removes a member. Drops the steps that it was filling and every other step that lacks its
    /// part.
    pub fn gone(&mut self, member: MemberId, how: Ending) {
        let Some(Member { place, .. }) = self.members.remove(&member) else { return };
        let Some(job) = self.jobs.get_mut(&place.job) else { return };
        if let Some(launch) = job.launches.get_mut(&place.launch)
            && launch.members.get(&place.rank) == Some(&member)
        {
            launch.members.remove(&place.rank);
            if launch.members.is_empty() {
                // The other ranks may never come. A rank that comes later reserves memory for the
                // whole launch again.
                (launch.reserved_bytes, launch.segments_a_rank) = (0, 0);
                launch.taken.clear();
            }
        }
        for key in job.not_staged_by(&place) {
            let why = Failure::new(
                ErrorKind::Unavailable,
                format!("rank {} {how} before it had staged step {}", place.rank, key.step),
                "start the job again: it resumes from the newest step that all ranks had staged",
            );
            self.drop_step(&key, why);
        }
        for segment in self.owned(member) {
            if self.segments.get(&segment).is_some_and(|found| !matches!(found.state, Use::Held(_)))
            {
                self.unlink(segment);
            }
        }
        self.tidy(&place.job);
    }

    /// Returns the member's rank. Fails unless its launch is the newest of the job.
    pub(super) fn writer(&self, member: MemberId) -> Result<Place, Failure> {
        let Some(found) = self.members.get(&member) else {
            return fail(
                ErrorKind::Invalid,
                "this process has not prepared anything",
                "call prepare first",
            );
        };
        let place = &found.place;
        match self.jobs.get(&place.job) {
            Some(job) if job.newest == Some(place.launch) => {
                let launch = job.launches.get(&place.launch);
                match launch.and_then(|launch| launch.fenced.as_ref()) {
                    Some(why) => Err(why.clone()),
                    None => Ok(place.clone()),
                }
            }
            _ => Err(self.launch_replaced_failure(place)),
        }
    }

    /// Notes which launch was the job's newest in the cluster when `launch` began. Later calls for
    /// the same `launch` have no effect.
    pub fn note_predecessor(&mut self, job: &Job, launch: LaunchId, newest: Option<LaunchId>) {
        if self.predecessor(job, launch).is_some() {
            return;
        }
        let known = &mut self.jobs.entry(job.clone()).or_default().predecessors;
        if known.len() >= MAX_OLD_LAUNCHES {
            known.pop_front();
        }
        known.push_back((launch, newest));
    }

    /// Returns the launch that was the job's newest in the cluster when `launch` began; the inner
    /// `None` means that the job had no launch. The outer `None` means that it was not noted.
    pub fn predecessor(&self, job: &Job, launch: LaunchId) -> Option<Option<LaunchId>> {
        let known = &self.jobs.get(job)?.predecessors;
        known.iter().find(|(of, _)| *of == launch).map(|(_, newest)| *newest)
    }

    /// Returns whether a launch of this host has living ranks here.
    pub fn has_members(&self, job: &Job, launch: LaunchId) -> bool {
        let launches = self.jobs.get(job).map(|state| &state.launches);
        let found = launches.and_then(|launches| launches.get(&launch));
        found.is_some_and(|launch| !launch.members.is_empty())
    }

    /// Returns whether a launch has run on this host, as far as is remembered.
    pub fn has_run_here(&self, job: &Job, launch: LaunchId) -> bool {
        let state = self.jobs.get(job);
        state.is_some_and(|state| state.newest == Some(launch) || state.old.contains(&launch))
    }

    /// Drops the staged steps that their launches may no longer save, because other launches have
    /// registered since. Their open saves are aborted; committed ones are not removed.
    pub fn drop_unsavable_steps(&mut self, job: &Job, order: &LaunchOrder) {
        if order.launches.is_empty() {
            return;
        }
        let Some(state) = self.jobs.get(job) else { return };
        let overtaken = state.keys(job, |step, launch, found| {
            // If the catalogue was rebuilt, it may not know the newest launch of this host, which
            // then registers again.
            let can_register_again =
                state.newest == Some(launch) && order.rank_of(launch) == LaunchRank::Unknown;
            found.is_uncommitted() && !order.may_save(launch, step) && !can_register_again
        });
        for key in overtaken {
            self.drop_unsavable_step(&key, launch_over_failure(&key, order));
        }
    }

    /// Lets a launch fill no further step, because of `why`.
    pub fn fence_launch(&mut self, job: &Job, launch: LaunchId, why: Failure) {
        let launches = self.jobs.get_mut(job).map(|state| &mut state.launches);
        if let Some(found) = launches.and_then(|launches| launches.get_mut(&launch)) {
            found.fenced = Some(why);
        }
    }

    pub(super) fn owned(&self, member: MemberId) -> Vec<SegmentId> {
        let own = self.segments.iter().filter(|(_, segment)| segment.owner == member);
        own.filter(|(_, segment)| segment.state != Use::Doomed).map(|(id, _)| *id).collect()
    }

    /// Records that a rank of a launch loads a step. The launch's next writes are compared again
    /// with the committed steps. Drops the steps that the rank has not staged, because it continues
    /// from the loaded one.
    pub fn loaded(&mut self, place: &Place, number: u32, resumed: Resumed) {
        let Some(launch) = self.launch_mut(place) else { return };
        // A rank may open the same load again, in another way, after other ranks have finished it
        // and save already.
        if launch.loads.insert(place.rank, number) == Some(number) {
            return;
        }
        launch.skipped.clear();
        launch.resumed = Resumed { abandon_later: launch.resumed.abandon_later, ..resumed };
        launch.committed_before = None;
        self.effects.push(Effect::KeepJob(place.job.clone()));
        let Some(state) = self.jobs.get(&place.job) else { return };
        for key in state.not_staged_by(place) {
            let why = Failure::new(
                ErrorKind::Invalid,
                format!("rank {} loads, and had not staged step {}", place.rank, key.step),
                "all ranks of a launch must save and load the same steps in the same order",
            );
            self.drop_step(&key, why);
        }
    }

    /// Returns the member's rank and its launch's resume point while [`Core::checked`] has not been
    /// called for the launch; `None` afterwards.
    pub fn unchecked_resume_point(&self, member: MemberId) -> Option<(Place, Resumed)> {
        let place = self.place(member)?;
        let launch = self.jobs.get(&place.job)?.launches.get(&place.launch)?;
        launch.committed_before.is_none().then(|| (place.clone(), launch.resumed))
    }

    /// Returns how many committed steps a launch keeps; 0 means all.
    pub fn keep_of(&self, place: &Place) -> u32 {
        let launches = self.jobs.get(&place.job).map(|job| &job.launches);
        launches.and_then(|launches| launches.get(&place.launch)).map_or(0, |launch| launch.keep)
    }

    /// Records which committed steps the launch found and did not abandon, and the newest committed
    /// step that it found.
    pub fn checked(&mut self, place: &Place, committed: BTreeSet<Step>, newest: Option<Step>) {
        if let Some(launch) = self.launch_mut(place) {
            launch.committed_before = Some(committed);
            launch.resumed.newest_seen = launch.resumed.newest_seen.max(newest);
            self.effects.push(Effect::KeepJob(place.job.clone()));
        }
    }

    /// Records that an abandoned save is aborted or removed.
    pub fn forget_abandoned(&mut self, job: &Job, save: &(Step, SaveId)) {
        if let Some(state) = self.jobs.get_mut(job) {
            state.abandoned.retain(|other| other != save);
            state.changes += 1;
            self.effects.push(Effect::KeepJob(job.clone()));
        }
    }

    /// Returns the steps in memory that are later than `loaded` and that all ranks of a launch have
    /// staged. Committed steps of `newest` are left out, because the cluster lists them.
    pub fn later_in_memory(&self, job: &Job, loaded: Option<Step>, newest: LaunchId) -> Vec<Step> {
        let keys = self.jobs.get(job).map(|state| {
            state.keys(job, |step, launch, found| {
                let counts =
                    if launch == newest { found.is_uncommitted() } else { found.is_loadable() };
                counts && loaded.is_none_or(|at| step > at)
            })
        });
        keys.unwrap_or_default().into_iter().map(|key| key.step).collect()
    }

    /// Abandons the steps later than `loaded`: drops those of launches other than `newest`, and
    /// those that all ranks of `newest` had staged before it went back. The job continues from
    /// `loaded`. `committed` are saves to remove; from now on no load resumes from them.
    pub fn abandon(
        &mut self,
        job: &Job,
        loaded: Option<Step>,
        newest: LaunchId,
        committed: &[(Step, SaveId)],
    ) {
        let Some(state) = self.jobs.get_mut(job) else { return };
        let new = committed.iter().filter(|save| !state.abandoned.contains(save));
        let new: Vec<_> = new.copied().collect();
        if !new.is_empty() {
            state.abandoned.extend(new);
            // The launch may end before it has removed them itself.
            self.effects.push(Effect::Settle(job.clone()));
        }
        let is_later = |step: Step| loaded.is_none_or(|at| step > at);
        if let Some(launch) = state.launches.get_mut(&newest) {
            launch.over.retain(|step, _| !is_later(*step));
            launch.removed.retain(|step| !is_later(*step));
        }
        let later = state.keys(job, |step, launch, found| {
            is_later(step) && (launch != newest || found.phase.is_complete())
        });
        self.effects.push(Effect::KeepJob(job.clone()));
        for key in later {
            let abandoned = format!("step {} was abandoned", key.step);
            if key.launch == newest {
                let message = format!("{abandoned}: this launch loaded an earlier step");
                self.drop_own_step(&key, Failure::new(ErrorKind::NotFound, message, ""));
            } else {
                let message = format!("{abandoned}: a newer launch resumed from an earlier step");
                self.drop_step(&key, Failure::new(ErrorKind::Fenced, message, ""));
            }
        }
    }
}

fn check_place(place: &Place) -> Result<(), Failure> {
    if place.world == 0 || place.world > MAX_WORLD || place.rank >= place.world {
        return fail(
            ErrorKind::Invalid,
            format!("rank {} is not a rank of a launch of {} ranks", place.rank, place.world),
            format!("a launch has at most {MAX_WORLD} ranks on a host; their numbers begin with 0"),
        );
    }
    Ok(())
}

impl Core {
    /// Returns the failure of a request for memory when `wanted` bytes do not fit.
    pub fn no_room(&self, wanted: u64) -> Failure {
        let mut used: Vec<String> = self
            .status()
            .iter()
            .filter(|job| job.segment_bytes > 0)
            .map(|job| format!("{} has {}", job.job, ByteCount(job.segment_bytes)))
            .collect();
        if self.fetched_bytes > 0 {
            used.push(format!("steps from the cluster have {}", ByteCount(self.fetched_bytes)));
        }
        let used = if used.is_empty() { "nothing else is there".into() } else { used.join(", ") };
        let message = format!(
            "the staging memory is full: {} more do not fit into {} ({used})",
            ByteCount(wanted),
            ByteCount(self.limits.memory_bytes)
        );
        let hint = "raise staging.memory, which has to hold the state of all ranks twice, or give a job's memory back with `rapidraid stage --free JOB`";
        Failure::new(ErrorKind::Busy, message, hint)
    }
}
