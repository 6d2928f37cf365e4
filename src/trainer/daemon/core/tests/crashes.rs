//! Races between requests, and the state that a crash between two effects leaves behind.

use super::*;
use crate::trainer::daemon::core::restore::RestoredStep;

fn fresh(world: &mut World, launch_number: u8, ranks: u32) {
    for rank in 0..ranks {
        world.prepare(launch_number, rank, ranks).unwrap();
    }
    world.effects();
}

/// Returns the index of each effect for which `is_it` holds.
fn places(effects: &[Effect], is_it: impl Fn(&Effect) -> bool) -> Vec<usize> {
    (0..).zip(effects).filter(|(_, effect)| is_it(effect)).map(|(at, _)| at).collect()
}

#[test]
fn a_header_that_was_read_before_its_step_was_dropped_counts_no_more() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    let FillOutcome::Segment(segment, fill) = world.fill(16, 10).unwrap() else { panic!() };
    let key = world.key(1, 10).unwrap();
    world.core.give_up(member(16), Step(10), fill, "why").unwrap();
    world.core.hold_part(&key, 0, segment, Vec::new());
    let FillOutcome::Segment(again, fill) = world.fill(16, 20).unwrap() else { panic!() };
    assert_eq!(again, segment, "the segment is free: its step was dropped");
    world.core.hold_part(&key, 0, segment, Vec::new());
    world.core.staged(member(16), Step(20), again, fill, Vec::new()).unwrap();
}

#[test]
fn samples_that_come_after_the_header_was_read_are_kept() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    let FillOutcome::Segment(segment, fill) = world.fill(16, 10).unwrap() else { panic!() };
    let key = world.key(1, 10).unwrap();
    world.core.hold_part(&key, 0, segment, Vec::new());
    let samples = vec![Sample { name: "w".into(), hash: [1; 16] }];
    world.core.staged(member(16), Step(10), segment, fill, samples.clone()).unwrap();
    assert_eq!(world.core.step(&key).unwrap().samples[&0], samples);
}

#[test]
fn a_step_that_is_asked_for_again_is_filled_into_the_same_segment() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    // The segment with the lower id is not free at the time of the first request.
    world.stage(17, 5);
    let (low, _) = world.stage(16, 5);
    let FillOutcome::Segment(first, fill) = world.fill(16, 10).unwrap() else { panic!() };
    assert!(low < first);
    world.commit(1, 5);
    // Another rank needs its segment: the committed step is released, and both of its segments are
    // free.
    world.fill(17, 10).unwrap();
    let FillOutcome::Segment(again, same) = world.fill(16, 10).unwrap() else { panic!() };
    assert_eq!((again, same), (first, fill), "two headers of one rank would name one filling");
}

#[test]
fn a_segment_that_is_left_for_another_step_is_marked() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 1);
    let FillOutcome::Segment(first, _) = world.fill(16, 10).unwrap() else { panic!() };
    world.effects();
    world.fill(16, 20).unwrap();
    assert!(world.effects().contains(&Effect::MarkFree(first)), "its header may say staged");
}

#[test]
fn a_segment_that_its_owner_has_let_go_is_not_filled_again() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 1);
    let (first, _) = world.stage(16, 10);
    // The layout changed: the trainer closes its segments and prepares again.
    world.mapped.clear();
    let new = world.prepare(1, 0, 1).unwrap();
    world.commit(1, 10);
    for step in [20, 30, 40] {
        let (segment, _) = world.stage(16, step);
        assert!(new.contains(&segment), "step {step}: the owner knows nothing of this segment");
        world.commit(1, step);
    }
    assert!(world.core.doomed().contains(&first));
}

#[test]
fn a_rank_that_prepares_again_takes_no_memory_that_nobody_uses() {
    let mut world = World::new(6 * MIB);
    fresh(&mut world, 1, 2);
    // The answer to its first request was lost.
    world.mapped.clear();
    world.prepare(1, 0, 2).unwrap();
    for segment in world.core.doomed() {
        world.core.freed(segment);
    }
    assert_eq!(world.core.used_bytes(), 4 * MIB);
    assert!(world.core.make_room(2 * MIB, &|_| true), "the launch has all of its segments");
}

#[test]
fn a_length_out_of_all_reach_does_not_fit() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 1);
    let place = Place { job: job(), launch: launch(2), world: 1, rank: 0 };
    for (segment_bytes, launch_bytes) in [(u64::MAX, u64::MAX), (MIB, u64::MAX - MIB)] {
        let prepare = Prepare {
            place: place.clone(),
            segment_bytes,
            launch_bytes,
            born_ns: 2,
            resumed: Resumed::default(),
            keep: 0,
            limit_ms: 0,
        };
        let made =
            world.core.prepare(member(32), &prepare, None, &|_| true, &mut || SegmentId([9; 16]));
        assert_eq!(made.unwrap_err().kind(), ErrorKind::Busy);
    }
    assert!(world.core.used_bytes() <= 64 * MIB);
}

/// Restores committed steps of an ended launch, as a starting daemon finds them.
fn restored(world: &mut World, steps: &[u64]) {
    let mut old = World::new(64 * MIB);
    fresh(&mut old, 1, 1);
    world.core.restore_job(old.core.job_record(&job()).unwrap());
    for &step in steps {
        let (segment, fill) = (SegmentId([step as u8; 16]), FillId([step as u8; 16]));
        let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
        world.core.restore_segment(segment, member(16), &place, MIB);
        let key = StepKey { job: job(), step: Step(step), launch: launch(1), fill };
        let phase = Phase::Committed { save: save(step as u8), notes: Vec::new() };
        let parts = BTreeMap::from([(0, segment)]);
        world.core.restore_step(key, RestoredStep { parts, phase });
    }
}

#[test]
fn no_more_is_evicted_than_is_needed() {
    let mut world = World::new(4 * MIB);
    restored(&mut world, &[110, 120, 130]);
    assert!(!world.core.make_room(5 * MIB, &|_| true));
    assert_eq!(world.phase(1, 110), Some("committed"), "nothing goes for what cannot fit");
    assert_eq!(world.prepare(2, 0, 1).unwrap().len(), 2);
    assert_eq!(world.phase(1, 110), None);
    assert_eq!(world.phase(1, 120), Some("committed"), "one was enough");
}

#[test]
fn memory_that_an_upload_or_a_reader_uses_is_not_given_back() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 1);
    let (segment, _) = world.stage(16, 10);
    let hold = world.core.hold(segment).unwrap().0;
    let key = world.key(1, 10).unwrap();
    world.core.gone(member(16), Ending::Died);
    world.core.drop_step(&key, Failure::new(ErrorKind::Unavailable, "why", ""));
    assert!(!world.core.doomed().contains(&segment), "its file would go, and its memory would not");
    drop(hold);
    assert!(world.core.doomed().contains(&segment));
}

#[test]
fn headers_of_a_step_that_is_over_are_marked_before_its_record_goes() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    let parts = [world.stage(16, 10).0, world.stage(17, 10).0];
    world.commit(1, 10);
    world.effects();
    // A client removed the step. After a crash nothing may bring it back.
    let changes = world.core.changes(&job());
    world.core.drop_replaced(&job(), changes, &|_| None);
    let effects = world.effects();
    let marks =
        places(&effects, |effect| matches!(effect, Effect::MarkFree(id) if parts.contains(id)));
    assert_eq!(marks.len(), 2, "{effects:?}");
}

#[test]
fn saves_of_a_step_that_is_dropped_are_remembered_until_they_are_settled() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 1);
    world.stage(16, 10);
    let key = world.key(1, 10).unwrap();
    world.core.begin_saving(&key, vec![save(1), save(2)]);
    world.core.drop_step(&key, Failure::new(ErrorKind::Corrupt, "why", ""));
    let record = world.core.job_record(&job()).unwrap();
    assert_eq!(record.abandoned, [(Step(10), save(1)), (Step(10), save(2))]);
}

#[test]
fn no_step_begins_when_the_folder_was_taken_away() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    world.stage(16, 10);
    world.core.stop();
    assert!(world.fill(16, 20).is_err());
    world.stage(17, 10);
    assert_eq!(world.phase(1, 10), Some("staged"), "what has begun goes on");
}

#[test]
fn two_ranks_that_grow_at_once_stay_within_the_memory() {
    let mut world = World::new(3 * MIB);
    fresh(&mut world, 1, 2);
    world.stage(16, 10);
    world.stage(17, 10);
    assert!(matches!(world.fill(16, 20), Ok(FillOutcome::Grow { .. })));
    assert!(matches!(world.fill(17, 20), Ok(FillOutcome::Full(_))), "there is room for one");
}

#[test]
fn a_rank_without_memory_for_another_segment_waits_for_its_own() {
    let mut world = World::new(3 * MIB);
    fresh(&mut world, 1, 2);
    world.stage(16, 10);
    world.stage(17, 10);
    let Ok(FillOutcome::Grow { segment, .. }) = world.fill(16, 20) else { panic!() };
    assert_eq!(world.core.stop_growth(member(17), segment), None, "it is another rank's");
    assert_eq!(world.core.stop_growth(member(16), segment), Some(0));
    assert!(matches!(world.fill(16, 20), Ok(FillOutcome::Full(_))));
    world.commit(1, 10);
    assert!(matches!(world.fill(16, 20), Ok(FillOutcome::Segment(..))));
}

#[test]
fn a_rank_that_waits_for_its_only_segment_is_not_late() {
    const FILL_LIMIT: Duration = Duration::from_secs(10);
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    let own: Vec<SegmentId> = world.core.owned(member(16));
    for segment in &own[1..] {
        assert_eq!(world.core.stop_growth(member(16), *segment), Some(0));
    }
    world.stage(16, 10);
    world.stage(17, 10);
    assert!(matches!(world.fill(17, 20), Ok(FillOutcome::Segment(..))));
    assert!(matches!(world.fill(16, 20), Ok(FillOutcome::Full(_))));
    let late = world.now + 2 * FILL_LIMIT;
    world.core.check_deadlines(late);
    assert!(world.phase(1, 20).is_some(), "rank 0 can do nothing about it");
    world.commit(1, 10);
    world.core.check_deadlines(late + FILL_LIMIT / 2);
    assert!(world.phase(1, 20).is_some(), "its time has begun");
    world.core.check_deadlines(late + 2 * FILL_LIMIT);
    assert_eq!(world.phase(1, 20), None);
}

#[test]
fn a_dropped_filling_does_not_come_back_by_its_record() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 1);
    let (segment, fill) = world.stage(16, 10);
    let key = world.key(1, 10).unwrap();
    world.core.drop_step(&key, Failure::new(ErrorKind::Corrupt, "why", ""));
    let mut again = World::new(64 * MIB);
    again.core.restore_job(world.core.job_record(&job()).unwrap());
    let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
    again.core.add_segment(segment, member(16), &place, MIB);
    assert!(!again.core.may_restore(&key), "{fill}");
    let parts = BTreeMap::from([(0, segment)]);
    again.core.restore_step(key.clone(), RestoredStep { parts, phase: Phase::Staged });
    assert!(again.core.step(&key).is_none());
}

#[test]
fn what_was_not_finished_when_a_daemon_ended_never_counts() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    let (staged, fill) = world.stage(16, 10);
    let FillOutcome::Segment(filling, _) = world.fill(17, 10).unwrap() else { panic!() };
    let key = world.key(1, 10).unwrap();
    let mut again = World::new(64 * MIB);
    again.core.restore_job(world.core.job_record(&job()).unwrap());
    for (rank, segment) in (0..).zip([staged, filling]) {
        let place = Place { job: job(), launch: launch(1), world: 2, rank };
        again.core.add_segment(segment, member(16 + rank as u8), &place, MIB);
    }
    again.core.drop_unfinished_fillings(&|_| Some(fill));
    let effects = again.effects();
    let kept = places(&effects, |effect| *effect == Effect::KeepJob(job()));
    let marked = places(&effects, |effect| matches!(effect, Effect::MarkFree(_)));
    assert!(kept.len() == 1 && marked.len() == 2 && kept[0] < marked[0], "{effects:?}");
    // Rank 1 continues and writes its header, and the daemon is killed once more.
    assert!(!again.core.may_restore(&key));
}

/// A trainer that computes sends nothing for a long time, and the daemon may be a new one then.
#[test]
fn an_owner_that_has_not_attached_yet_keeps_its_segments() {
    let mut world = World::new(64 * MIB);
    restored(&mut world, &[10, 20]);
    let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
    let freed = SegmentId([10; 16]);
    world.mapped.extend([10, 20].map(|number| SegmentId([number; 16])));
    // The older step is released when anything of the job changes.
    world.core.gone(member(99), Ending::Died);
    world.commit(1, 20);
    assert_eq!(world.phase(1, 10), None);
    assert!(world.core.doomed().is_empty(), "its owner fills it again");
    world.core.drop_orphans(&|_| false);
    assert!(world.core.attach(member(16), &place).unwrap().contains(&freed));
    assert!(matches!(world.fill(16, 30).unwrap(), FillOutcome::Segment(id, _) if id == freed));
    world.core.give_up(member(16), Step(30), FillId([1; 16]), "why").unwrap();
    world.core.gone(member(16), Ending::Died);
    assert!(world.core.doomed().contains(&freed), "its owner is dead");
}

#[test]
fn memory_of_an_owner_that_never_attaches_is_freed() {
    let mut world = World::new(64 * MIB);
    restored(&mut world, &[10, 20]);
    world.commit(1, 20);
    world.core.drop_orphans(&|_| true);
    assert_eq!(world.core.doomed(), [SegmentId([10; 16])]);
}

#[test]
fn memory_that_is_reserved_for_a_dead_launch_is_given_back() {
    let mut world = World::new(4 * MIB);
    world.prepare(1, 0, 2).unwrap();
    let own = world.core.used_bytes();
    assert_eq!(own, 2 * MIB, "and as much is reserved for rank 1");
    assert!(!world.core.make_room(MIB, &|_| true));
    world.mapped.clear();
    world.core.gone(member(16), Ending::Died);
    for segment in world.core.doomed() {
        world.core.freed(segment);
    }
    assert!(world.core.make_room(4 * MIB, &|_| true));
    // A rank that was late reserves the memory of the launch anew.
    world.prepare(1, 1, 2).unwrap();
    assert!(!world.core.make_room(MIB, &|_| true));
}

#[test]
fn a_long_reason_is_cut_off() {
    let mut world = World::new(64 * MIB);
    fresh(&mut world, 1, 2);
    let FillOutcome::Segment(_, fill) = world.fill(16, 10).unwrap() else { panic!() };
    world.core.give_up(member(16), Step(10), fill, &"x".repeat(200_000)).unwrap();
    let notices = world.core.take_notices(member(17));
    assert!(notices[0].failure.as_ref().unwrap().message.len() < 2_000);
}

/// Returns a core that a daemon would restore after `world`, whose processes all live.
fn restarted(world: &World, memory_bytes: u64) -> World {
    let mut next = World::new(memory_bytes);
    next.core.restore_job(world.core.job_record(&job()).unwrap());
    for (id, segment) in &world.core.segments {
        next.core.restore_segment(*id, segment.owner, &segment.place, segment.len_bytes);
    }
    (next.mapped, next.drawn) = (world.mapped.clone(), world.drawn);
    next
}

/// Releases the segments of a member, as its process does before it prepares again.
fn release_segments(world: &mut World, owner: MemberId) {
    let own = world.core.owned(owner);
    world.mapped.retain(|id| !own.contains(id));
    world.core.drop_orphans(&|id| own.contains(&id));
    world.core.doomed().into_iter().for_each(|segment| world.core.freed(segment));
}

#[test]
fn a_rank_that_prepares_again_after_a_restart_reserves_nothing_for_ranks_that_have_their_memory() {
    let mut world = World::new(4 * MIB);
    fresh(&mut world, 1, 2);
    let mut next = restarted(&world, 4 * MIB);
    // Rank 0 releases its segments and prepares again.
    assert_eq!(next.core.owned(member(16)).len(), 2);
    release_segments(&mut next, member(16));
    assert_eq!(next.prepare(1, 0, 2).unwrap().len(), 2, "the other rank has its two segments");
    assert_eq!(next.core.used_bytes(), 4 * MIB);
    // The other rank prepares again, too.
    release_segments(&mut next, member(17));
    assert_eq!(next.prepare(1, 1, 2).unwrap().len(), 2);
    // Memory is reserved for ranks whose processes are gone.
    let mut next = restarted(&world, 4 * MIB);
    next.mapped.clear();
    next.core.drop_orphans(&|_| true);
    next.core.doomed().into_iter().for_each(|segment| next.core.freed(segment));
    assert_eq!(next.prepare(1, 0, 2).unwrap().len(), 2);
    assert!(!next.core.make_room(1, &|_| false), "the other rank's memory is reserved");
}

/// The sum that a rank names is that of the lengths with which the launch began.
#[test]
fn a_rank_that_alone_needs_a_longer_segment_after_a_restart_gets_it() {
    let mut world = World::new(6 * MIB);
    fresh(&mut world, 1, 2);
    let mut next = restarted(&world, 6 * MIB);
    release_segments(&mut next, member(16));
    (next.segment_bytes, next.launch_bytes) = (2 * MIB, Some(2 * MIB));
    assert_eq!(next.prepare(1, 0, 2).unwrap().len(), 2);
    assert_eq!(next.core.used_bytes(), 6 * MIB);
}

#[test]
fn ranks_that_need_longer_segments_after_a_restart_all_get_them() {
    let mut world = World::new(12 * MIB);
    fresh(&mut world, 1, 2);
    let mut next = restarted(&world, 12 * MIB);
    next.segment_bytes = 3 * MIB;
    for rank in 0..2 {
        release_segments(&mut next, member(16 + rank));
        assert!(!next.prepare(1, rank.into(), 2).unwrap().is_empty(), "rank {rank}");
    }
}
