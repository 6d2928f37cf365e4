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
    for step in [9, 10] {
        for own in [16, 17] {
            assert_eq!(world.fill(own, step).unwrap_err().kind(), ErrorKind::Exists, "{own}");
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
    assert_eq!(again.fill(16, 11).unwrap_err().kind(), ErrorKind::Exists);
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
    assert!(world.core.saving(&key, vec![save(11)]));
    world.effects();
    world.prepare(2, 0, 1).unwrap();
    assert_eq!((world.phase(1, 10), world.phase(1, 11)), (Some("committed"), None));
    let effects = world.effects();
    assert!(effects.contains(&Effect::Settle(job())), "its save is aborted: {effects:?}");
    assert!(!effects.iter().any(is_drop), "the other hosts have the newer launch too");
}

#[test]
fn a_load_waits_while_the_hosts_make_progress() {
    let mut world = world();
    world.stage(16, 10);
    let key = world.key(1, 10).unwrap();
    let waits = |world: &World, of: u8, seconds| {
        world.core.saving_on_several_hosts(&job(), launch(of), Duration::from_secs(seconds))
    };
    assert_eq!(waits(&world, 1, 0), None, "its own step");
    assert!(waits(&world, 2, 1_000).is_some());
    world.core.hashed(&key);
    let heard = |world: &mut World, name: &str, seconds| {
        world.core.note_missing(&key, name.to_owned(), Duration::from_secs(seconds))
    };
    assert!(heard(&mut world, "host host-b", 100));
    assert_eq!(waits(&world, 2, 115).as_deref(), Some("step 10 waits for host host-b"));
    assert_eq!(waits(&world, 2, 116), None);
    assert!(heard(&mut world, "host host-b", 110), "it has made progress");
    assert!(waits(&world, 2, 116).is_some());
    world.commit(1, 10);
    assert_eq!(waits(&world, 2, 116), None);
    assert!(!heard(&mut World::new(MIB), "host host-b", 1), "the step is gone");
}
