//! Memory: its use, the eviction of steps, and the step from which a job would resume.

use std::collections::BTreeMap;

use super::{Core, Effect, JobState, Phase, StagedStep, StepKey, Use};
use crate::id::{Job, LaunchId, SegmentId};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, Place};

impl Core {
    /// Returns the memory that segments and fetched files use, in bytes, including doomed segments
    /// that a process still maps.
    pub fn used_bytes(&self) -> u64 {
        let segments: u64 = self.segments.values().map(|segment| segment.len_bytes).sum();
        segments.saturating_add(self.fetched_bytes)
    }

    /// Returns the memory that launches have reserved and not taken yet, in bytes.
    fn reserved_bytes(&self) -> u64 {
        let launches = self.jobs.values().flat_map(|job| job.launches.values());
        launches.map(|launch| launch.reserved_bytes).sum()
    }

    /// Returns the memory limit, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limits.memory_bytes
    }

    /// Sets the memory that files read from the cluster use, in bytes.
    pub fn set_fetched_bytes(&mut self, bytes: u64) {
        self.fetched_bytes = bytes;
    }

    /// Returns the newest step in memory that all ranks have staged. Steps of which other hosts have
    /// a part do not count.
    pub fn resume_point(&self, job: &Job) -> Option<StepKey> {
        let state = self.jobs.get(job)?;
        newest(job, state, |phase| phase.is_complete())
    }

    /// Evicts steps until `bytes` more fit. Returns whether they fit; evicts nothing if they would
    /// not.
    pub fn make_room(&mut self, bytes: u64, is_unmapped: &dyn Fn(SegmentId) -> bool) -> bool {
        // The lengths are untrusted, so the sums must not overflow.
        let taken_bytes = self.used_bytes().saturating_add(self.reserved_bytes());
        let missing = taken_bytes.saturating_add(bytes).saturating_sub(self.limits.memory_bytes);
        let (mut freed, mut victims) = (0u64, Vec::new());
        if missing > 0 {
            for (len_bytes, victim) in self.victims(is_unmapped) {
                freed = freed.saturating_add(len_bytes);
                victims.push(victim);
                if freed >= missing {
                    break;
                }
            }
        }
        let fits = freed >= missing;
        if fits {
            victims.iter().for_each(|victim| self.release_step(victim));
            self.drop_orphans(is_unmapped);
        }
        fits
    }

    /// Returns the other ranks of the place's launch whose processes have segments that they fill,
    /// with the length of one segment in bytes.
    pub(super) fn segments_of_other_ranks(
        &self,
        place: &Place,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
    ) -> BTreeMap<u32, u64> {
        let current = self.segments.iter().filter(|(id, segment)| {
            let of = &segment.place;
            (&of.job, of.launch) == (&place.job, place.launch)
                && of.rank != place.rank
                && segment.is_current
                && segment.state != Use::Doomed
                && (self.members.contains_key(&segment.owner)
                    || self.unattached.contains(&segment.owner))
                && !is_unmapped(**id)
        });
        current.map(|(_, segment)| (segment.place.rank, segment.len_bytes)).collect()
    }

    /// Returns whether memory may become free for a launch: a process of another launch of the job
    /// still has a segment, a segment of another launch is in use or waits to be unmapped, or a step
    /// of any job is not committed yet.
    pub fn may_get_room(&self, place: &Place) -> bool {
        let is_other = |segment: &super::Segment| segment.place.launch != place.launch;
        let is_in_use =
            |s: &super::Segment| is_other(s) && (s.state == Use::Doomed || s.holds.is_held());
        let is_of_older = |s: &super::Segment| {
            s.place.job == place.job && is_other(s) && self.members.contains_key(&s.owner)
        };
        self.segments.values().any(|s| is_in_use(s) || is_of_older(s)) || !self.unsaved().is_empty()
    }

    /// Returns the committed steps that may be evicted: no process maps them, no upload or reader
    /// uses them, and [`protected`] does not name them. Each is returned with the length of its
    /// segments in bytes, in the order of their commits.
    fn victims(&self, is_unmapped: &dyn Fn(SegmentId) -> bool) -> Vec<(u64, StepKey)> {
        let mut found = Vec::new();
        for (job, state) in &self.jobs {
            let protected = protected(job, state);
            let is_idle = |id: &SegmentId| {
                self.segments.get(id).is_none_or(|s| !s.holds.is_held()) && is_unmapped(*id)
            };
            let idle = state.keys(job, |_, _, found| {
                is_committed(&found.phase) && found.parts.values().all(is_idle)
            });
            let idle = idle.into_iter().filter(|key| !protected.contains(key));
            found.extend(idle.map(|key| (self.step(&key).map(|s| s.committed_at), key)));
        }
        found.sort();
        let len_bytes = |key: &StepKey| {
            let parts = self.step(key).into_iter().flat_map(|step| step.parts.values());
            parts.filter_map(|id| self.segments.get(id)).map(|segment| segment.len_bytes).sum()
        };
        found.into_iter().map(|(_, key)| (len_bytes(&key), key)).collect()
    }

    /// Releases the memory of a step. Segments that their owners will fill again become free; the
    /// others are unlinked.
    pub(super) fn release_step(&mut self, key: &StepKey) {
        if self.step(key).is_none() {
            return;
        }
        let Some(job) = self.jobs.get_mut(&key.job) else { return };
        let Some(step) = job.steps.remove(&(key.step, key.launch)) else { return };
        let newest = job.newest;
        self.effects.push(Effect::Forget(key.clone()));
        for segment in step.parts.into_values() {
            let Some(found) = self.segments.get_mut(&segment) else { continue };
            if found.state != Use::Held(key.clone()) {
                continue;
            }
            // Without the record, the next daemon would take a header that says *staged* for a step
            // that was never saved.
            self.effects.push(Effect::MarkFree(segment));
            let is_owned =
                self.members.contains_key(&found.owner) || self.unattached.contains(&found.owner);
            if is_owned && found.is_current && newest == Some(found.place.launch) {
                found.state = Use::Free;
            } else {
                self.unlink(segment);
            }
        }
        self.bell.ring();
    }

    /// Releases the committed steps that the job would not resume from, that have a segment which no
    /// process fills again, and that no upload and no reader uses. The newest committed step stays
    /// even if this host has only a part of it: the next launch loads that part from memory.
    pub(super) fn tidy(&mut self, job: &Job) {
        let Some(state) = self.jobs.get(job) else { return };
        let mut kept = protected(job, state);
        kept.extend(state.keys(job, |_, _, step| is_committed(&step.phase)).pop());
        let is_left = |step: &super::StagedStep| {
            step.parts.values().any(|id| {
                self.segments.get(id).is_none_or(|segment| {
                    !self.members.contains_key(&segment.owner)
                        || !segment.is_current
                        || state.newest != Some(segment.place.launch)
                })
            })
        };
        let mut over = state.keys(job, |_, _, step| is_committed(&step.phase) && is_left(step));
        over.retain(|key| !kept.contains(key) && !self.is_held(key));
        over.iter().for_each(|key| self.release_step(key));
    }

    /// Returns whether an upload or a reader uses a segment of the step.
    pub(super) fn is_held(&self, key: &StepKey) -> bool {
        self.step(key).is_some_and(|step| {
            step.parts.values().any(|id| self.segments.get(id).is_some_and(|s| s.holds.is_held()))
        })
    }

    /// Returns whether a load holds a committed step that may be evicted after the load.
    pub fn is_evictable_step_held(&self) -> bool {
        self.jobs.iter().any(|(job, state)| {
            let protected = protected(job, state);
            let copies = state.keys(job, |_, _, step| is_committed(&step.phase));
            copies.iter().any(|key| !protected.contains(key) && self.is_held(key))
        })
    }

    pub(super) fn unlink(&mut self, segment: SegmentId) {
        if let Some(found) = self.segments.get_mut(&segment)
            && found.state != Use::Doomed
        {
            found.state = Use::Doomed;
            self.effects.push(Effect::Unlink(segment));
        }
    }

    /// Records that a doomed segment was unlinked and its memory is free.
    pub fn freed(&mut self, segment: SegmentId) {
        if self.segments.get(&segment).is_some_and(|found| found.state == Use::Doomed) {
            self.segments.remove(&segment);
            self.bell.ring();
        }
    }

    /// Returns the segments to be unlinked when no process maps them any more, without those that
    /// an upload or a reader still uses.
    pub fn doomed(&self) -> Vec<SegmentId> {
        let is_it =
            |segment: &super::Segment| segment.state == Use::Doomed && !segment.holds.is_held();
        let doomed = self.segments.iter().filter(|(_, segment)| is_it(segment));
        doomed.map(|(id, _)| *id).collect()
    }

    /// Frees the job's memory that no process maps. Frees uncommitted steps only if `with_unsaved`.
    /// Returns the number of bytes freed.
    pub fn free_job(
        &mut self,
        job: &Job,
        with_unsaved: bool,
        is_unmapped: &dyn Fn(SegmentId) -> bool,
    ) -> u64 {
        let Some(state) = self.jobs.get(job) else { return 0 };
        let mut idle = state.keys(job, |_, _, step| {
            let is_saved = is_committed(&step.phase);
            step.phase.is_complete()
                && (is_saved || with_unsaved)
                && step.parts.values().all(|id| is_unmapped(*id))
        });
        // A committed step that is being loaded stays. An uncommitted step may be held by its upload,
        // which ends when the step is dropped.
        let is_loaded = |key: &StepKey| {
            self.step(key).is_some_and(|step| is_committed(&step.phase)) && self.is_held(key)
        };
        idle.retain(|key| !is_loaded(key));
        let mut bytes = 0;
        for key in idle {
            let Some(step) = self.step(&key) else { continue };
            bytes += step.len_bytes;
            if is_committed(&step.phase) {
                self.release_step(&key);
            } else {
                let why = Failure::new(
                    ErrorKind::Unavailable,
                    "its memory was freed with `rapidraid stage --free`",
                    "",
                );
                self.drop_step(&key, why);
            }
        }
        self.drop_orphans(is_unmapped);
        bytes
    }
}

fn is_committed(phase: &Phase) -> bool {
    matches!(phase, Phase::Committed { .. })
}

/// Returns the latest step whose phase fulfils `is_it`. Replaced steps and steps of which other
/// hosts have a part do not count. If several launches have staged this step, prefers that of the
/// newest launch, as [`Core::complete_step`] does: some ranks of a load get the step from this
/// function and others from that one, and all must get the same.
fn newest(job: &Job, state: &JobState, is_it: impl Fn(&Phase) -> bool) -> Option<StepKey> {
    let is_it = |launch: LaunchId, step: &StagedStep| {
        is_it(&step.phase) && !step.is_replaced && state.has_whole_steps(launch)
    };
    let found = state.keys(job, |_, launch, step| is_it(launch, step));
    found.into_iter().max_by_key(|key| (key.step, state.newest == Some(key.launch)))
}

/// Returns the steps that must not be evicted: the one that the job would resume from and, if that
/// is uncommitted, also the newest committed one.
fn protected(job: &Job, state: &JobState) -> Vec<StepKey> {
    let complete = newest(job, state, Phase::is_complete);
    let committed = newest(job, state, is_committed);
    complete.into_iter().chain(committed).collect()
}
