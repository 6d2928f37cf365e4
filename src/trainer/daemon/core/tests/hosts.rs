//! Launches of several hosts (docs/staging.md, 10).

use super::*;

fn hosts(own: u32) -> Hosts {
    Hosts { own, names: vec!["host-a".into(), "host-b".into()] }
}

/// A world with launch 1 of two hosts, of which this one has one rank.
fn world() -> World {
    let mut world = World::new(64 * MIB);
    world.prepare_on(1, 0, 1, Some(&hosts(1))).unwrap();
    world
}

fn is_drop(effect: &Effect) -> bool {
    matches!(effect, Effect::DropOnOtherHosts(..))
}

/// Returns whether `effect` tells `others` of a drop of `step`.
pub fn is_drop_of(effect: &Effect, step: &StepOfLaunch, others: &Hosts) -> bool {
    matches!(effect, Effect::DropOnOtherHosts(of, hosts, _) if of == step && hosts == others)
}

#[test]
fn a_step_is_filled_once_and_in_order() {
    let mut world = World::new(64 * MIB);
    for rank in 0..2 {
        world.prepare_on(1, rank, 2, Some(&hosts(0))).unwrap();
    }
    world.effects();
    let FillOutcome::Segment(segment, fill) = world.fill(16, 10).unwrap() else { panic!() };
    let effects = world.effects();
    let kept = effects.iter().position(|effect| matches!(effect, Effect::KeepHosts(..)));
    let marked = effects.iter().position(|effect| matches!(effect, Effect::MarkFilling(..)));
    assert!(kept.is_some() && kept < marked, "on record before the header: {effects:?}");
    assert!(matches!(world.fill(16, 10), Ok(FillOutcome::Segment(..))), "the answer was lost");
    assert!(matches!(world.fill(17, 10), Ok(FillOutcome::Segment(..))), "the other rank");
    world.core.give_up(member(16), Step(10), fill, "why").unwrap();
    assert!(world.effects().iter().any(is_drop));
    assert!(world.core.staged(member(16), Step(10), segment, fill, Vec::new()).is_err());
    for (step, kind) in [(9, ErrorKind::Exists), (10, ErrorKind::Unavailable)] {
        for own in [16, 17] {
            assert_eq!(world.fill(own, step).unwrap_err().kind(), kind, "{own}");
        }
    }
    assert!(matches!(world.fill(16, 11), Ok(FillOutcome::Segment(..))));
    // The next daemon keeps to it.
    let record = world.core.hosts_record(&job(), launch(1)).unwrap();
    assert_eq!(record.filled, Some(Step(11)));
    let mut again = World::new(64 * MIB);
    assert!(!again.core.restore_hosts(record.clone()), "the launch is not known");
    again.core.restore_job(world.core.job_record(&job()).unwrap());
    assert!(again.core.restore_hosts(record));
    again.prepare_on(1, 0, 2, Some(&hosts(0))).unwrap();
    assert_eq!(again.fill(16, 11).unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn contradictions_are_refused() {
    let mut world = world();
    assert_eq!(world.fill_or_skip(16, 10, true).unwrap_err().kind(), ErrorKind::Invalid);
    for other in [None, Some(hosts(0))] {
        let refused = world.prepare_on(1, 0, 1, other.as_ref()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{other:?}");
    }
    let one = Hosts { own: 0, names: vec!["host-a".into()] };
    let long = Hosts { own: 0, names: vec!["a".repeat(65), "b".into()] };
    for wrong in [one, long, hosts(2)] {
        let refused = world.prepare_on(2, 0, 1, Some(&wrong)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{wrong:?}");
    }
}

#[test]
fn a_part_of_a_step_is_no_resume_point() {
    let mut world = world();
    world.stage(16, 10);
    assert_eq!(world.core.resume_point(&job()), None);
    world.commit(1, 10);
    assert_eq!(world.core.resume_point(&job()), None);
    assert_eq!(world.core.complete_step(&job(), Step(10)), None);
}

#[test]
fn a_newer_launch_drops_what_is_not_committed_and_tells_nobody() {
    let mut world = world();
    world.stage(16, 10);
    world.commit(1, 10);
    world.stage(16, 11);
    let key = world.key(1, 11).unwrap();
    assert!(world.core.begin_saving(&key, vec![save(11)]));
    world.effects();
    world.prepare(2, 0, 1).unwrap();
    assert_eq!((world.phase(1, 10), world.phase(1, 11)), (Some("committed"), None));
    let effects = world.effects();
    let aborts = Effect::AbortIfOpen(key, vec![save(11)]);
    assert!(effects.contains(&aborts), "its save is aborted if it is open: {effects:?}");
    assert!(!effects.iter().any(is_drop), "the other hosts have the newer launch too");
}

#[test]
fn a_load_waits_while_a_step_makes_progress() {
    let mut world = world();
    world.stage(16, 10);
    world.stage(16, 11);
    let (first, second) = (world.key(1, 10).unwrap(), world.key(1, 11).unwrap());
    let waits = |world: &mut World, of: u8, seconds| {
        let now = Duration::from_secs(seconds);
        let counts = OlderSteps::OfSeveralHosts;
        world.core.describe_awaited_step(&job(), launch(of), counts, now)
    };
    assert_eq!(waits(&mut world, 1, 0), None, "its own steps");
    assert_eq!(waits(&mut world, 2, 50).as_deref(), Some("step 10 is being hashed"));
    assert!(waits(&mut world, 2, 65).is_some(), "a daemon may have been started just now");
    assert_eq!(waits(&mut world, 2, 66), None, "neither of them makes progress");
    world.core.hashed(&first);
    world.core.note_missing(&first, "host host-b".into());
    world.core.note_progress(&first, Duration::from_secs(100));
    assert_eq!(waits(&mut world, 2, 115).as_deref(), Some("step 10 waits for host host-b"));
    assert_eq!(waits(&mut world, 2, 116), None);
    world.core.note_progress(&second, Duration::from_secs(110));
    assert!(waits(&mut world, 2, 116).is_some(), "the other one does");
    assert!(world.core.has_earlier_uncommitted(&second));
    assert!(!world.core.has_earlier_uncommitted(&first));
    world.commit(1, 10);
    assert!(!world.core.has_earlier_uncommitted(&second));
    world.commit(1, 11);
    assert_eq!(waits(&mut world, 2, 116), None);
}

#[test]
fn a_step_that_is_not_saved_says_for_whom_it_waits() {
    let mut world = world();
    world.stage(16, 10);
    let key = world.key(1, 10).unwrap();
    assert_eq!(world.core.describe_obstacle(&key), None);
    world.core.troubled(&key, "no progress".into(), false);
    let tried = world.core.describe_obstacle(&key);
    assert_eq!(tried.as_deref(), Some("an attempt failed: no progress"));
    world.core.note_missing(&key, "host host-b".into());
    let waits_for = world.core.describe_obstacle(&key);
    assert_eq!(waits_for.as_deref(), Some("it waited for host host-b"));
}

#[test]
fn ranks_are_warned_once_of_a_host_that_does_not_report() {
    let mut world = world();
    world.stage(16, 10);
    let key = world.key(1, 10).unwrap();
    let warnings = |world: &mut World| -> Vec<String> {
        world.core.take_notices(member(16)).into_iter().map(|notice| notice.warning).collect()
    };
    for _ in 0..2 {
        world.core.note_silent(&key, "host host-b".into());
    }
    let waits = "the save of the step gets no report from host host-b, which may be lost";
    assert_eq!(warnings(&mut world), [waits]);
    world.core.hashed(&key);
    let said = world.core.progress_of(&key);
    assert_eq!(said, "step 10 is being saved; no report comes from host host-b");
    world.core.note_silent(&key, String::new());
    assert_eq!(warnings(&mut world), [""; 0], "it goes on");
    assert_eq!(world.core.progress_of(&key), "step 10 is being saved");
    world.core.note_silent(&key, "host host-b".into());
    assert_eq!(warnings(&mut world).len(), 1, "it has stopped again");
}

#[test]
fn loads_of_two_launches_do_not_prolong_each_other() {
    let mut world = world();
    world.stage(16, 10);
    let mut waits = |of: u8, seconds| {
        let (now, counts) = (Duration::from_secs(seconds), OlderSteps::OfSeveralHosts);
        world.core.describe_awaited_step(&job(), launch(of), counts, now).is_some()
    };
    assert!((50..=65).all(|seconds| waits(2, seconds) && waits(3, seconds)));
    assert!(!waits(2, 66) && !waits(3, 66));
}

#[test]
fn loads_of_several_hosts_wait_for_every_launch() {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    let mut waits = |counts| {
        world.core.describe_awaited_step(&job(), launch(2), counts, Duration::ZERO).is_some()
    };
    assert!(waits(OlderSteps::All) && !waits(OlderSteps::OfSeveralHosts));
}

#[test]
fn a_committed_step_stays_when_its_memory_is_given_up() {
    let mut world = world();
    world.stage(16, 10);
    let key = world.key(1, 10).unwrap();
    assert!(world.core.begin_saving(&key, vec![save(3)]));
    world.effects();
    world.core.drop_step(&key, Failure::new(ErrorKind::Corrupt, "why", ""));
    let effects = world.effects();
    assert!(effects.contains(&Effect::AbortIfOpen(key, vec![save(3)])), "{effects:?}");
    let removes = |effect: &Effect| matches!(effect, Effect::Settle(_));
    assert!(!effects.iter().any(removes), "the other hosts may have committed it");
    assert_eq!(world.core.next_abandoned(&job()), None);
}

#[test]
fn the_save_of_a_step_that_other_hosts_dropped_stays_open() {
    let mut world = world();
    world.stage(16, 10);
    let key = world.key(1, 10).unwrap();
    assert!(world.core.begin_saving(&key, vec![save(3)]));
    world.effects();
    world.core.drop_step_with_other_hosts(&key, Failure::new(ErrorKind::Unavailable, "why", ""));
    assert_eq!(world.phase(1, 10), None);
    let effects = world.effects();
    let ends_a_save =
        |effect: &Effect| matches!(effect, Effect::AbortIfOpen(..) | Effect::Settle(_));
    assert!(!effects.iter().any(ends_a_save), "its record names the host: {effects:?}");
    assert!(effects.iter().any(is_drop), "the host that dropped it waits for all others");
}

#[test]
fn a_filling_that_a_dead_daemon_left_is_dropped_on_all_hosts() {
    let mut world = world();
    let FillOutcome::Segment(segment, fill) = world.fill(16, 10).unwrap() else { panic!() };
    let mut next = World::new(64 * MIB);
    next.core.restore_job(world.core.job_record(&job()).unwrap());
    next.core.restore_hosts(world.core.hosts_record(&job(), launch(1)).unwrap());
    let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
    next.core.add_segment(segment, member(16), &place, MIB);
    next.core.drop_unfinished_fillings(&|id| (id == segment).then_some(fill));
    let dropped = StepOfLaunch { job: job(), step: Step(10), launch: launch(1) };
    let told = |effect: &Effect| is_drop_of(effect, &dropped, &hosts(1));
    assert!(next.effects().iter().any(told));
}

/// The daemon may end after it has dropped a step and before the other hosts know.
#[test]
fn a_drop_is_told_again_after_a_restart() {
    let restart = |world: &World| {
        let mut next = World::new(64 * MIB);
        next.core.restore_job(world.core.job_record(&job()).unwrap());
        next.core.restore_hosts(world.core.hosts_record(&job(), launch(1)).unwrap());
        next.core.drop_unfinished_fillings(&|_| None);
        next.effects().into_iter().filter(is_drop).collect::<Vec<_>>()
    };
    let mut world = world();
    assert_eq!(restart(&world), [], "no step was filled");
    let FillOutcome::Segment(_, fill) = world.fill(16, 10).unwrap() else { panic!() };
    world.core.give_up(member(16), Step(10), fill, "why").unwrap();
    let dropped = StepOfLaunch { job: job(), step: Step(10), launch: launch(1) };
    let told = restart(&world);
    assert!(told.len() == 1 && is_drop_of(&told[0], &dropped, &hosts(1)), "{told:?}");
}

/// Commits step 10 of launch 1, whose rank then ends.
fn commit_and_end(world: &mut World) {
    world.stage(16, 10);
    world.commit(1, 10);
    world.core.gone(member(16), Ending::Left);
    world.mapped.clear();
    world.core.doomed().into_iter().for_each(|segment| world.core.freed(segment));
}

#[test]
fn the_committed_part_of_a_host_stays_until_its_memory_is_needed() {
    let mut world = World::new(2 * MIB);
    world.prepare_on(1, 0, 1, Some(&hosts(1))).unwrap();
    commit_and_end(&mut world);
    let found = |world: &World, number| {
        world.core.find_committed_part(&job(), Step(10), save(number)).is_some()
    };
    assert!(found(&world, 10) && !found(&world, 11), "only as what was committed");
    assert_eq!(world.core.complete_step(&job(), Step(10)), None, "it is not whole");
    assert_eq!(world.core.resume_point(&job()), None);
    // While a rank loads it, the next launch waits for its memory.
    let place = Place { job: job(), launch: launch(2), world: 1, rank: 0 };
    let held = world.core.hold_step(&world.key(1, 10).unwrap()).unwrap();
    assert!(world.core.may_get_room(&place));
    drop(held);
    assert!(!world.core.may_get_room(&place));
    assert_eq!(world.prepare_on(2, 0, 1, Some(&hosts(1))).unwrap().len(), 2);
    assert!(!found(&world, 10));
}

#[test]
fn a_part_is_released_with_the_launch_that_says_that_it_is_one() {
    let mut world = world();
    commit_and_end(&mut world);
    world.prepare_on(2, 0, 1, Some(&hosts(1))).unwrap();
    world.effects();
    world.core.forget_launch(&job(), launch(1));
    assert_eq!(world.phase(1, 10), None);
    assert!(world.effects().contains(&Effect::ForgetHosts(launch(1))));
    assert_eq!(world.core.complete_step(&job(), Step(10)), None);
}
