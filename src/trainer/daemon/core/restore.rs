//! Restoring the state that a previous daemon left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Core, Effect, Launch, Phase, StagedStep, StepKey, StepOfLaunch, Use};
use crate::id::{FillId, Job, LaunchId, MemberId, SegmentId, Step};
use crate::trainer::daemon::hold::Hold;
use crate::trainer::daemon::records::{JobRecord, LaunchRecord, SaveState, StepRecord};
use crate::trainer::protocol::Place;

/// A step that was found in the staging folder.
#[derive(Debug)]
pub struct RestoredStep {
    /// The segments, by rank.
    pub parts: BTreeMap<u32, SegmentId>,
    /// The phase that the step had reached.
    pub phase: Phase,
}

impl Launch {
    /// Creates a launch from its record.
    pub(super) fn restored(record: LaunchRecord) -> Self {
        Self {
            world: record.world,
            born_ns: record.born_ns,
            resumed: record.resumed,
            keep: record.keep,
            committed_before: record.committed_before.map(|steps| steps.into_iter().collect()),
            hosts: None,
            fenced: None,
            filled: None,
            members: BTreeMap::new(),
            segments_a_rank: 0,
            launch_bytes: 0,
            reserved_bytes: 0,
            taken: BTreeSet::new(),
            skipped: BTreeMap::new(),
            loads: BTreeMap::new(),
            over: BTreeMap::new(),
            removed: BTreeSet::new(),
        }
    }

    fn record(&self, launch: LaunchId) -> LaunchRecord {
        let committed_before = self.committed_before.as_ref();
        LaunchRecord {
            launch,
            world: self.world,
            born_ns: self.born_ns,
            resumed: self.resumed,
            keep: self.keep,
            committed_before: committed_before.map(|steps| steps.iter().copied().collect()),
        }
    }
}

impl Core {
    /// Adds a segment that a previous daemon made. Its owner may still use it.
    pub fn restore_segment(
        &mut self,
        id: SegmentId,
        owner: MemberId,
        place: &Place,
        len_bytes: u64,
    ) {
        self.add_segment(id, owner, place, len_bytes);
        self.unattached.insert(owner);
    }

    /// Restores a job from its record.
    pub fn restore_job(&mut self, record: JobRecord) {
        let state = self.jobs.entry(record.job).or_default();
        state.newest = record.newest.as_ref().map(|newest| newest.launch);
        state.old = record.old.iter().map(|old| old.launch).collect();
        state.dropped = record.dropped.into();
        state.abandoned = record.abandoned;
        state.loads = record.loads.into();
        for launch in record.newest.into_iter().chain(record.old) {
            state.launches.insert(launch.launch, Launch::restored(launch));
        }
    }

    /// Returns whether a step that is known only from its headers may be restored: its launch must
    /// be known and its filling must not have been dropped.
    pub fn may_restore(&self, key: &StepKey) -> bool {
        let Some(state) = self.jobs.get(&key.job) else { return false };
        let is_known = state.newest == Some(key.launch) || state.old.contains(&key.launch);
        is_known && !state.dropped.contains(&key.fill)
    }

    /// Restores a step, and has it saved if it is not committed. Returns false, and does nothing,
    /// if the filling was dropped.
    pub fn restore_step(&mut self, key: StepKey, step: RestoredStep) -> bool {
        if self.jobs.get(&key.job).is_some_and(|job| job.dropped.contains(&key.fill)) {
            return false;
        }
        let RestoredStep { parts, phase } = step;
        let world = parts.len() as u32;
        let mut len_bytes = 0;
        for id in parts.values() {
            if let Some(segment) = self.segments.get_mut(id) {
                segment.state = Use::Held(key.clone());
                len_bytes += segment.len_bytes;
            }
        }
        let state = self.jobs.entry(key.job.clone()).or_default();
        let is_saved = matches!(phase, Phase::Committed { .. });
        let staged = StagedStep {
            fill: key.fill,
            phase,
            began_at: Duration::ZERO,
            world,
            parts,
            samples: BTreeMap::new(),
            len_bytes,
            committed_at: Duration::ZERO,
            trouble: None,
            silent: String::new(),
            missing: String::new(),
            progressed_at: Duration::ZERO,
            stalls: 0,
            is_replaced: false,
        };
        state.steps.insert((key.step, key.launch), staged);
        if !is_saved {
            self.effects.push(Effect::Save(key));
        }
        true
    }

    /// Drops the fillings that were unfinished when the previous daemon ended. Their ranks may
    /// continue to write for a while; neither this daemon nor the next one accepts the result.
    pub fn drop_unfinished_fillings(&mut self, filling_of: &dyn Fn(SegmentId) -> Option<FillId>) {
        for (id, segment) in &self.segments {
            if segment.state != Use::Free {
                continue;
            }
            let Some(fill) = filling_of(*id) else { continue };
            if let Some(job) = self.jobs.get_mut(&segment.place.job)
                && !job.dropped.contains(&fill)
            {
                job.drop_filling(fill);
                self.effects.push(Effect::KeepJob(segment.place.job.clone()));
            }
            self.effects.push(Effect::MarkFree(*id));
        }
        for (job, state) in &self.jobs {
            let newest =
                state.newest.and_then(|launch| Some((launch, state.launches.get(&launch)?)));
            let Some((launch, of_newest)) = newest else { continue };
            let (Some(hosts), Some(step)) = (&of_newest.hosts, of_newest.filled) else { continue };
            // The step is committed, or this host has dropped it. The previous daemon may have ended
            // before the other hosts heard of the drop. A committed step stays as it is.
            if !state.steps.contains_key(&(step, launch)) {
                let dropped = StepOfLaunch { job: job.clone(), step, launch };
                let why =
                    "its part was lost or dropped before its staging daemon was started again";
                let drop = Effect::DropOnOtherHosts(dropped, hosts.clone(), why.to_owned());
                self.effects.push(drop);
            }
        }
        // Write the records of all dropped fillings before any header is marked.
        self.effects.sort_by_key(|effect| matches!(effect, Effect::MarkFree(_)));
    }

    /// Returns the record of a step.
    pub fn record(&self, key: &StepKey, save: SaveState) -> Option<StepRecord> {
        let step = self.step(key)?;
        Some(StepRecord {
            job: key.job.clone(),
            step: key.step,
            launch: key.launch,
            fill: key.fill,
            segments: step.parts.values().copied().collect(),
            save,
        })
    }

    /// Returns the record of a job.
    pub fn job_record(&self, job: &Job) -> Option<JobRecord> {
        let state = self.jobs.get(job)?;
        let record = |id: &LaunchId| state.launches.get(id).map(|launch| launch.record(*id));
        // An older launch can fill no further step, so its list of steps that it may not fill again
        // is not kept.
        let old = |id: &LaunchId| Some(LaunchRecord { committed_before: None, ..record(id)? });
        Some(JobRecord {
            job: job.clone(),
            newest: state.newest.as_ref().and_then(record),
            old: state.old.iter().filter_map(old).collect(),
            dropped: state.dropped.iter().copied().collect(),
            abandoned: state.abandoned.clone(),
            loads: state.loads.iter().copied().collect(),
        })
    }

    /// Returns a hold on each segment of a step that all ranks have staged, with the segment's
    /// length in bytes, in the order of the ranks.
    pub fn hold_step(&self, key: &StepKey) -> Option<Vec<(SegmentId, Hold, u64)>> {
        let step = self.step(key).filter(|step| step.phase.is_complete())?;
        let hold = |id: &SegmentId| self.hold(*id).map(|(hold, len)| (*id, hold, len));
        step.parts.values().map(hold).collect()
    }

    /// Returns the key of a step in memory that all ranks of some launch have staged, preferably of
    /// the newest launch. Steps of which other hosts have a part do not count.
    pub fn complete_step(&self, job: &Job, step: Step) -> Option<StepKey> {
        let state = self.jobs.get(job)?;
        let all = state.keys(job, |at, launch, found| {
            at == step && found.is_loadable() && state.has_whole_steps(launch)
        });
        all.into_iter().max_by_key(|key| state.newest == Some(key.launch))
    }

    /// Returns descriptions of the uncommitted steps, for people.
    pub fn unsaved(&self) -> Vec<String> {
        let mut left = Vec::new();
        for (job, state) in &self.jobs {
            let keys = state.keys(job, |_, _, s| !matches!(s.phase, Phase::Committed { .. }));
            for key in keys {
                left.push(format!("{job}/{}: {}", key.step, self.progress_of(&key)));
            }
        }
        left
    }

    /// Unlinks the segments whose owners are not known to the daemon, that hold no part of a step,
    /// and that no process maps.
    pub fn drop_orphans(&mut self, is_unmapped: &dyn Fn(SegmentId) -> bool) {
        let orphans: Vec<SegmentId> = self
            .segments
            .iter()
            .filter(|(id, segment)| {
                !self.members.contains_key(&segment.owner)
                    && matches!(segment.state, Use::Free | Use::Filling(_))
                    && is_unmapped(**id)
            })
            .map(|(id, _)| *id)
            .collect();
        orphans.into_iter().for_each(|segment| self.unlink(segment));
    }
}
