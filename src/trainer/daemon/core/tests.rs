//! Tests of the rules of docs/staging.md, one by one, without files and sockets.

mod crashes;
mod going_back;
mod hosts;
mod launch_order;

use super::*;
use crate::trainer::protocol::Prepare;

const MIB: u64 = 1 << 20;

/// A core with one job, and the ids that were drawn.
struct World {
    core: Core,
    drawn: u8,
    /// The segments that a process has.
    mapped: BTreeSet<SegmentId>,
    now: Duration,
    /// The length of a segment that a rank prepares.
    segment_bytes: u64,
    /// The sum that a rank names, if it is not that of segments of this length.
    launch_bytes: Option<u64>,
}

fn member(number: u8) -> MemberId {
    MemberId([number; 16])
}

fn launch(number: u8) -> LaunchId {
    LaunchId([number; 16])
}

fn job() -> Job {
    "gpt".parse().unwrap()
}

fn save(number: u8) -> SaveId {
    SaveId([number; 12])
}

impl World {
    fn new(memory_bytes: u64) -> Self {
        let limits = Limits { memory_bytes, fill: Duration::from_secs(10) };
        let core = Core::new(limits, Bell::new(), 0);
        let (now, segment_bytes) = (Duration::ZERO, MIB);
        let mapped = BTreeSet::new();
        Self { core, drawn: 0, mapped, now, segment_bytes, launch_bytes: None }
    }

    fn prepare(
        &mut self,
        launch_number: u8,
        rank: u32,
        world: u32,
    ) -> Result<Vec<SegmentId>, Failure> {
        self.prepare_on(launch_number, rank, world, None)
    }

    fn prepare_on(
        &mut self,
        launch_number: u8,
        rank: u32,
        world: u32,
        hosts: Option<&Hosts>,
    ) -> Result<Vec<SegmentId>, Failure> {
        let place = Place { job: job(), launch: launch(launch_number), world, rank };
        let prepare = Prepare {
            place: place.clone(),
            segment_bytes: self.segment_bytes,
            launch_bytes: self.launch_bytes.unwrap_or(self.segment_bytes * u64::from(world)),
            born_ns: launch_number.into(),
            resumed: Resumed::default(),
            keep: 0,
            limit_ms: 0,
        };
        let mapped = self.mapped.clone();
        let drawn = &mut self.drawn;
        let mut new_id = || {
            *drawn += 1;
            SegmentId([*drawn; 16])
        };
        let own = member(launch_number * 16 + rank as u8);
        let made =
            self.core.prepare(own, &prepare, hosts, &|id| !mapped.contains(&id), &mut new_id)?;
        self.mapped.extend(&made);
        if self.core.unchecked_resume_point(own).is_some() {
            self.core.checked(&place, BTreeSet::new(), None);
        }
        Ok(made)
    }

    fn fill(&mut self, own: u8, step: u64) -> Result<FillOutcome, Failure> {
        self.fill_or_skip(own, step, false)
    }

    fn fill_or_skip(&mut self, own: u8, step: u64, or_skip: bool) -> Result<FillOutcome, Failure> {
        let mapped = self.mapped.clone();
        let (mut drawn, mut grown) = (self.drawn, self.drawn + 1);
        let mut new_fill = || {
            drawn += 1;
            FillId([drawn; 16])
        };
        let mut new_segment = || {
            grown += 1;
            SegmentId([grown; 16])
        };
        let is_unmapped = |id: SegmentId| !mapped.contains(&id);
        let (own, step) = (member(own), Step(step));
        let now = self.now;
        let ids = (&mut new_fill, &mut new_segment);
        let outcome = self.core.fill(own, step, or_skip, now, &is_unmapped, ids.0, ids.1);
        self.drawn = drawn.max(grown);
        if let Ok(FillOutcome::Grow { segment, .. }) = &outcome {
            self.mapped.insert(*segment);
        }
        outcome
    }

    /// Fills and stages a step for a member.
    fn stage(&mut self, own: u8, step: u64) -> (SegmentId, FillId) {
        let FillOutcome::Segment(segment, fill) = self.fill(own, step).unwrap() else {
            panic!("no segment for step {step} of member {own}");
        };
        self.core.staged(member(own), Step(step), segment, fill, Vec::new()).unwrap();
        (segment, fill)
    }

    fn key(&self, launch_number: u8, step: u64) -> Option<StepKey> {
        self.core.key_of(&job(), Step(step), launch(launch_number))
    }

    fn commit(&mut self, launch_number: u8, step: u64) {
        let key = self.key(launch_number, step).unwrap();
        self.core.committed(&key, save(step as u8), Vec::new(), Duration::from_secs(step));
    }

    fn phase(&self, launch_number: u8, step: u64) -> Option<&'static str> {
        Some(self.core.step(&self.key(launch_number, step)?)?.phase.name())
    }

    fn effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.core.effects)
    }
}

#[test]
fn a_save_begins_when_the_last_rank_has_staged() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    world.stage(16, 10);
    assert_eq!(world.phase(1, 10), Some("filling"));
    assert!(!world.effects().iter().any(|effect| matches!(effect, Effect::Save(_))));
    world.stage(17, 10);
    assert_eq!(world.phase(1, 10), Some("staged"));
    let key = world.key(1, 10).unwrap();
    assert!(world.effects().contains(&Effect::Save(key)));
}

#[test]
fn a_segment_is_marked_before_its_owner_is_told() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.effects();
    let FillOutcome::Segment(segment, fill) = world.fill(16, 10).unwrap() else { panic!() };
    assert!(world.effects().contains(&Effect::MarkFilling(segment, fill)));
}

#[test]
fn a_step_that_a_dead_rank_cannot_complete_is_dropped_and_the_others_are_told() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    let (segment, fill) = world.stage(16, 10);
    world.effects();
    world.core.gone(member(17), Ending::Died);
    assert_eq!(world.phase(1, 10), None);
    assert!(world.effects().contains(&Effect::MarkFree(segment)));
    let notices = world.core.take_notices(member(16));
    assert!(notices[0].failure.as_ref().unwrap().message.contains("rank 1 died"));
    assert!(world.core.job(&job()).unwrap().dropped.contains(&fill));
    assert!(world.core.outcome(member(16), Step(10)).is_err());
}

#[test]
fn memory_of_a_member_that_left_is_free_but_for_the_resume_point() {
    let mut world = World::new(4 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    world.commit(1, 10);
    world.effects();
    world.core.gone(member(16), Ending::Left);
    let unlinked = world.effects().into_iter().filter(|e| matches!(e, Effect::Unlink(_))).count();
    assert_eq!(unlinked, 1, "the segment without a step");
    assert_eq!(world.phase(1, 10), Some("committed"));
    assert!(world.fill(16, 11).is_err(), "it is no member any more");
}

#[test]
fn a_step_that_was_staged_by_all_needs_no_trainer() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    world.stage(16, 10);
    world.stage(17, 10);
    world.core.gone(member(16), Ending::Died);
    world.core.gone(member(17), Ending::Died);
    assert_eq!(world.phase(1, 10), Some("staged"));
    world.prepare(2, 0, 1).unwrap();
    assert_eq!(world.phase(1, 10), Some("staged"), "a newer launch leaves it alone");
}

#[test]
fn parts_of_two_fillings_never_mix() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    let (segment, old) = world.stage(16, 10);
    let FillOutcome::Segment(_, fill) = world.fill(17, 10).unwrap() else { panic!() };
    assert_eq!(fill, old, "all ranks of a step fill one filling");
    world.core.give_up(member(17), Step(10), fill, "Ctrl-C").unwrap();
    assert!(world.core.take_notices(member(17)).is_empty(), "the rank knows it already");
    assert_eq!(world.core.take_notices(member(16)).len(), 1);
    let FillOutcome::Segment(_, new) = world.fill(17, 10).unwrap() else { panic!() };
    assert_ne!(new, old);
    let late = world.core.staged(member(16), Step(10), segment, old, Vec::new());
    assert!(late.is_err(), "what was staged for the old filling does not count for the new one");
}

#[test]
fn said_twice_it_counts_once() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    let (segment, fill) = world.stage(16, 10);
    world.core.staged(member(16), Step(10), segment, fill, Vec::new()).unwrap();
    assert!(world.fill(16, 10).is_err(), "a step is saved once");
    world.commit(1, 10);
    assert!(world.fill(16, 10).is_err());
}

#[test]
fn a_step_is_skipped_by_all_ranks_or_by_none() {
    let mut world = World::new(64 * MIB);
    for rank in 0..2 {
        world.prepare(1, rank, 2).unwrap();
    }
    for step in [10, 20] {
        for own in [16, 17] {
            world.stage(own, step);
        }
    }
    let is_skipped = |outcome: FillOutcome| matches!(outcome, FillOutcome::Skipped(_));
    assert!(is_skipped(world.fill_or_skip(16, 30, true).unwrap()));
    assert!(is_skipped(world.fill_or_skip(16, 40, true).unwrap()));
    // There is room when the other rank asks, and it still skips the same steps.
    world.commit(1, 10);
    assert!(is_skipped(world.fill_or_skip(17, 30, true).unwrap()));
    assert!(is_skipped(world.fill_or_skip(17, 40, true).unwrap()));
    // A rank that asks again does not get an old answer.
    assert!(matches!(world.fill_or_skip(17, 40, true).unwrap(), FillOutcome::Segment(..)));
    // Another rank does not skip a step that one rank fills; it waits for a segment.
    assert!(matches!(world.fill_or_skip(16, 40, true).unwrap(), FillOutcome::Segment(..)));
    world.stage(16, 40);
    world.stage(17, 40);
    assert!(is_skipped(world.fill_or_skip(16, 50, true).unwrap()));
    world.commit(1, 20);
    // After a load the launch starts over.
    let place = Place { job: job(), launch: launch(1), world: 2, rank: 1 };
    world.core.loaded(&place, 1, Resumed { loaded: Some(Step(20)), ..Resumed::default() });
    world.core.checked(&place, Default::default(), None);
    assert!(!is_skipped(world.fill_or_skip(17, 50, true).unwrap()));
}

#[test]
fn only_a_committed_step_that_nobody_reads_gives_its_segment_back() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    let (first, _) = world.stage(16, 10);
    let (second, _) = world.stage(16, 20);
    assert_ne!(first, second);
    assert!(matches!(world.fill(16, 30).unwrap(), FillOutcome::Full(_)));
    let hold = world.core.hold(first).unwrap().0;
    world.commit(1, 10);
    assert!(matches!(world.fill(16, 30).unwrap(), FillOutcome::Full(_)), "a reader holds it");
    drop(hold);
    let FillOutcome::Segment(again, _) = world.fill(16, 30).unwrap() else { panic!() };
    assert_eq!(again, first);
    assert_eq!(world.phase(1, 10), None);
    assert_eq!(world.phase(1, 20), Some("staged"));
}

#[test]
fn the_copy_to_resume_from_is_filled_again_last() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    let (first, _) = world.stage(16, 10);
    world.commit(1, 10);
    world.stage(16, 20);
    world.commit(1, 20);
    let FillOutcome::Segment(again, _) = world.fill(16, 30).unwrap() else { panic!() };
    assert_eq!(again, first);
    assert_eq!(world.core.resume_point(&job()).unwrap().step, Step(20));
}

#[test]
fn a_newer_launch_fences_the_older_one_and_never_the_other_way_round() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.fill(16, 10).unwrap();
    world.prepare(2, 0, 1).unwrap();
    assert_eq!(world.phase(1, 10), None, "what it was filling is dropped");
    assert_eq!(world.fill(16, 20).unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(world.prepare(1, 0, 1).unwrap_err().kind(), ErrorKind::Fenced);
    world.prepare(4, 0, 1).unwrap();
    assert_eq!(
        world.prepare(3, 0, 1).unwrap_err().kind(),
        ErrorKind::Fenced,
        "it is older than the newest"
    );
}

#[test]
fn ranks_that_disagree_are_named() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    assert!(world.prepare(1, 1, 3).unwrap_err().message.contains("3 ranks, others say 2"));
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    world.stage(16, 10);
    world.fill(17, 11).unwrap();
    assert_eq!(world.phase(1, 10), None);
    let notices = world.core.take_notices(member(16));
    let told = &notices[0].failure.as_ref().unwrap().message;
    assert!(told.contains("rank 1 saves step 11") && told.contains("step 10"), "{told}");
}

#[test]
fn a_slow_rank_may_lag_behind_by_one_step() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    world.stage(16, 10);
    world.fill(17, 10).unwrap();
    world.stage(16, 20);
    assert_eq!((world.phase(1, 10), world.phase(1, 20)), (Some("filling"), Some("filling")));
    // A rank may also begin a step that the others have staged and left behind.
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    world.stage(16, 10);
    world.stage(16, 20);
    world.stage(17, 10);
    world.stage(17, 20);
    assert_eq!((world.phase(1, 10), world.phase(1, 20)), (Some("staged"), Some("staged")));
}

#[test]
fn a_rank_that_goes_back_gives_up_what_it_has_not_staged() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    world.stage(16, 20);
    world.fill(17, 20).unwrap();
    world.fill(17, 10).unwrap();
    assert_eq!(world.phase(1, 20), None, "it was filling it");
    world.stage(16, 30);
    let place = Place { job: job(), launch: launch(1), world: 2, rank: 1 };
    world.core.loaded(&place, 1, Resumed { loaded: Some(Step(5)), ..Resumed::default() });
    assert_eq!((world.phase(1, 10), world.phase(1, 30)), (None, None), "it loads");
}

#[test]
fn a_rank_that_is_late_is_named_also_when_it_never_began() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.prepare(1, 1, 2).unwrap();
    world.stage(16, 10);
    world.core.check_deadlines(Duration::from_secs(10));
    assert_eq!(world.phase(1, 10), Some("filling"));
    world.core.check_deadlines(Duration::from_millis(10_001));
    assert_eq!(world.phase(1, 10), None);
    let notices = world.core.take_notices(member(16));
    assert!(notices[0].failure.as_ref().unwrap().message.contains("rank 1 has not staged step 10"));
}

#[test]
fn memory_is_promised_to_a_launch_as_a_whole() {
    let mut world = World::new(4 * MIB);
    assert_eq!(world.prepare(1, 0, 2).unwrap().len(), 2);
    assert_eq!(world.prepare(1, 1, 2).unwrap().len(), 2);
    let mut world = World::new(3 * MIB);
    assert_eq!(world.prepare(1, 0, 2).unwrap().len(), 1);
    assert_eq!(world.prepare(1, 1, 2).unwrap().len(), 1);
    let mut world = World::new(MIB);
    let full = world.prepare(1, 0, 2).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Busy);
    assert!(full.hint.contains("staging.memory"));
}

#[test]
fn the_resume_point_stays_until_the_next_launch_has_committed() {
    let mut world = World::new(2 * MIB);
    let old = world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    world.commit(1, 10);
    world.core.gone(member(16), Ending::Died);
    world.mapped.clear();
    for segment in world.core.doomed() {
        world.core.freed(segment);
    }
    let new = world.prepare(2, 0, 1).unwrap();
    assert_eq!(new.len(), 1, "the other half of the memory has the step to resume from");
    assert_eq!(world.core.resume_point(&job()).unwrap().step, Step(10));
    world.stage(32, 20);
    assert!(matches!(world.fill(32, 30).unwrap(), FillOutcome::Full(_)));
    assert_eq!(world.phase(1, 10), Some("committed"));
    world.commit(2, 20);
    assert_eq!(world.phase(1, 10), None, "nobody resumes from it any more");
    for segment in world.core.doomed() {
        world.core.freed(segment);
    }
    assert!(old.iter().all(|segment| world.core.hold(*segment).is_none()));
    assert!(matches!(world.fill(32, 30), Ok(FillOutcome::Grow { .. } | FillOutcome::Segment(..))));
}

#[test]
fn what_was_abandoned_is_dropped_and_its_saves_are_known() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    world.stage(16, 20);
    let key = world.key(1, 20).unwrap();
    world.core.begin_saving(&key, vec![save(1)]);
    world.prepare(2, 0, 1).unwrap();
    assert_eq!(world.core.later_in_memory(&job(), Some(Step(10)), launch(2)), [Step(20)]);
    world.effects();
    let committed = [(Step(15), save(2))];
    world.core.abandon(&job(), Some(Step(10)), launch(2), &committed);
    assert_eq!((world.phase(1, 10), world.phase(1, 20)), (Some("staged"), None));
    let kept = world.core.job_record(&job()).unwrap().abandoned;
    assert_eq!(kept, [(Step(15), save(2)), (Step(20), save(1))], "in one record");
    world.effects();
    world.core.abandon(&job(), Some(Step(10)), launch(2), &committed);
    assert_eq!(world.core.job_record(&job()).unwrap().abandoned, kept, "known already");
    // Steps that were committed since the launch checked the cluster are abandoned too.
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 20);
    world.commit(1, 20);
    world.prepare(2, 0, 1).unwrap();
    world.core.abandon(&job(), Some(Step(10)), launch(2), &[]);
    assert_eq!(world.core.next_abandoned(&job()), Some((Step(20), save(20))));
}

#[test]
fn what_is_abandoned_is_settled_the_newest_first() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 20);
    let key = world.key(1, 20).unwrap();
    world.core.begin_saving(&key, vec![save(1)]);
    world.prepare(2, 0, 1).unwrap();
    world.effects();
    world.core.abandon(&job(), Some(Step(10)), launch(2), &[(Step(15), save(2))]);
    assert!(world.effects().contains(&Effect::Settle(job())));
    assert_eq!(world.core.next_abandoned(&job()), Some((Step(20), save(1))), "the newest first");
    world.core.forget_abandoned(&job(), &(Step(20), save(1)));
    assert_eq!(world.core.next_abandoned(&job()), Some((Step(15), save(2))));
}

#[test]
fn a_committed_step_that_somebody_replaced_is_no_resume_point() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    world.commit(1, 10);
    let changes = world.core.changes(&job());
    assert!(world.core.drop_replaced(&job(), changes, &|_| Some(save(10))));
    assert_eq!(world.phase(1, 10), Some("committed"));
    // A reader that has the step keeps it; nobody else gets it.
    let key = world.core.complete_step(&job(), Step(10)).unwrap();
    let held = world.core.hold_step(&key).unwrap();
    assert!(world.core.drop_replaced(&job(), changes, &|_| Some(save(99))));
    assert_eq!(world.phase(1, 10), Some("committed"));
    assert_eq!(world.core.complete_step(&job(), Step(10)), None);
    assert_eq!(world.core.resume_point(&job()), None);
    drop(held);
    assert!(world.core.drop_replaced(&job(), changes, &|_| Some(save(99))));
    assert_eq!(world.phase(1, 10), None);
    let before = world.core.changes(&job());
    world.core.note_removal(&job(), Step(5), save(5));
    assert!(!world.core.drop_replaced(&job(), before, &|_| None), "asked before the removal");
}

#[test]
fn a_rank_that_dies_after_it_has_staged_leaves_the_step_to_those_that_come_later() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.stage(16, 10);
    world.core.gone(member(16), Ending::Died);
    assert_eq!(world.phase(1, 10), Some("filling"));
    world.prepare(1, 1, 2).unwrap();
    world.stage(17, 10);
    assert_eq!(world.phase(1, 10), Some("staged"));
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 2).unwrap();
    world.stage(16, 10);
    world.core.gone(member(16), Ending::Died);
    world.prepare(2, 0, 2).unwrap();
    assert_eq!(world.phase(1, 10), None, "a newer launch ends it");
}

#[test]
fn a_list_from_before_a_commit_or_a_removal_does_not_count() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    let before = world.core.changes(&job());
    world.commit(1, 10);
    assert!(!world.core.drop_replaced(&job(), before, &|_| None), "asked before the commit");
    assert_eq!(world.phase(1, 10), Some("committed"));
    let before = world.core.changes(&job());
    world.core.forget_abandoned(&job(), &(Step(5), save(5)));
    assert!(!world.core.drop_replaced(&job(), before, &|_| None), "step 5 may be on it");
}

#[test]
fn what_a_job_remembers_comes_back() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.prepare(2, 0, 1).unwrap();
    let FillOutcome::Segment(_, fill) = world.fill(32, 10).unwrap() else { panic!() };
    world.core.give_up(member(32), Step(10), fill, "why").unwrap();
    let mut answer = |number, step: Option<u64>| {
        let answer = LoadAnswer { launch: launch(2), number, step: step.map(Step) };
        world.core.answer_load(&job(), answer)
    };
    assert_eq!(answer(1, Some(7)), Some(Step(7)));
    assert_eq!(answer(1, Some(8)), Some(Step(7)), "the first answer counts");
    assert_eq!(answer(2, None), None);
    assert_eq!(answer(2, Some(8)), None, "also when there was nothing");
    let record = world.core.job_record(&job()).unwrap();
    assert_eq!(record.loads.len(), 2);
    let mut again = World::new(64 * MIB);
    again.core.restore_job(record.clone());
    assert_eq!(again.core.job_record(&job()), Some(record));
    let old = StepKey { job: job(), step: Step(9), launch: launch(1), fill };
    assert!(again.core.launch(&old).is_some(), "what an older launch knew when it began");
    let key = StepKey { job: job(), step: Step(10), launch: launch(2), fill };
    assert!(!again.core.may_restore(&key), "a dropped filling does not come back");
    assert!(again.core.may_restore(&StepKey { fill: FillId([9; 16]), ..key.clone() }));
    assert!(!again.core.may_restore(&StepKey { launch: launch(9), ..key }));
    assert_eq!(again.prepare(1, 0, 1).unwrap_err().kind(), ErrorKind::Fenced);
}

/// A rank whose load has been answered gets the step by its number, the others as the resume point.
#[test]
fn of_one_step_of_two_launches_every_rank_gets_the_same() {
    let mut world = World::new(64 * MIB);
    for number in [1, 2] {
        world.prepare(number, 0, 1).unwrap();
        world.stage(number * 16, 10);
    }
    for newest in [1, 2] {
        world.core.jobs.get_mut(&job()).unwrap().newest = Some(launch(newest));
        let found = world.core.resume_point(&job());
        assert_eq!(found, world.key(newest, 10));
        assert_eq!(found, world.core.complete_step(&job(), Step(10)));
    }
}
