//! Launches that go back to an earlier step, and steps that are removed from the cluster.

use super::hosts::is_drop_of;
use super::*;

fn world() -> World {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    world.commit(1, 10);
    world.effects();
    world
}

fn load_step_10(world: &mut World) {
    let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
    let resumed = Resumed { loaded: Some(Step(10)), abandon_later: true, ..Resumed::default() };
    world.core.loaded(&place, 1, resumed);
}

#[test]
fn a_launch_that_goes_back_gets_no_error_for_what_it_abandons() {
    let mut world = world();
    world.stage(16, 20);
    world.commit(1, 20);
    load_step_10(&mut world);
    world.core.abandon(&job(), Some(Step(10)), launch(1), &[(Step(20), save(20))]);
    assert_eq!(world.core.take_notices(member(16)).len(), 0, "the launch itself abandons the step");
    assert_eq!((world.phase(1, 10), world.phase(1, 20)), (Some("committed"), None));
    assert_eq!(world.core.next_abandoned(&job()), Some((Step(20), save(20))));
    let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
    world.core.checked(&place, BTreeSet::from([Step(10)]), None);
    world.stage(16, 20);
    assert_eq!(world.core.outcome(member(16), Step(20)).unwrap(), None, "it is saved again");
}

#[test]
fn the_own_later_steps_of_a_launch_that_goes_back_are_abandoned_uncommitted_too() {
    let mut world = world();
    world.stage(16, 20);
    let key = world.key(1, 20).unwrap();
    assert!(world.core.begin_saving(&key, vec![save(1)]));
    let later =
        |world: &World, loaded| world.core.later_in_memory(&job(), Some(Step(loaded)), launch(1));
    assert_eq!(later(&world, 20), [], "the launch continues from its newest step");
    load_step_10(&mut world);
    assert_eq!(later(&world, 10), [Step(20)]);
    world.effects();
    world.core.abandon(&job(), Some(Step(10)), launch(1), &[]);
    assert_eq!((world.phase(1, 10), world.phase(1, 20)), (Some("committed"), None));
    assert_eq!(world.core.next_abandoned(&job()), Some((Step(20), save(1))));
    assert!(world.effects().contains(&Effect::Settle(job())));
    assert_eq!(world.core.take_notices(member(16)).len(), 0);
    let waited = world.core.outcome(member(16), Step(20)).unwrap_err();
    assert!(waited.message.contains("was abandoned"), "{}", waited.message);
    assert_eq!(waited.kind(), ErrorKind::NotFound);
}

#[test]
fn an_own_step_of_several_hosts_that_is_abandoned_is_dropped_on_all_hosts() {
    let mut world = World::new(64 * MIB);
    let hosts = Hosts { own: 0, names: vec!["host-a".into(), "host-b".into()] };
    world.prepare_on(1, 0, 1, Some(&hosts)).unwrap();
    world.stage(16, 20);
    world.effects();
    world.core.abandon(&job(), Some(Step(10)), launch(1), &[]);
    let dropped = StepOfLaunch { job: job(), step: Step(20), launch: launch(1) };
    let told = |effect: &Effect| is_drop_of(effect, &dropped, &hosts);
    assert!(world.effects().iter().any(told));
}

#[test]
fn a_removed_step_is_saved_again() {
    let mut world = world();
    world.stage(16, 20);
    world.commit(1, 20);
    for step in [10, 20] {
        assert_eq!(world.fill(16, step).unwrap_err().kind(), ErrorKind::Exists);
    }
    world.core.note_removal(&job(), Step(20), save(99));
    assert_eq!(world.fill(16, 20).unwrap_err().kind(), ErrorKind::Exists, "another save of it");
    // A reader has the removed step.
    let held = world.core.hold_step(&world.key(1, 10).unwrap()).unwrap();
    world.core.note_removal(&job(), Step(10), save(10));
    let saved = world.core.outcome(member(16), Step(10)).unwrap();
    assert!(saved.is_some(), "a rank that waits is told of the commit");
    assert!(matches!(world.fill(16, 10), Ok(FillOutcome::Full(_))), "the reader keeps its copy");
    drop(held);
    world.stage(16, 10);
    assert_eq!(world.core.outcome(member(16), Step(10)).unwrap(), None);
    world.commit(1, 10);
    for step in [10, 20] {
        assert_eq!(world.fill(16, step).unwrap_err().kind(), ErrorKind::Exists, "{step}");
    }
}

/// The other hosts do not know of the removal and would refuse the step.
#[test]
fn a_removed_step_of_several_hosts_is_not_saved_again() {
    let mut world = World::new(64 * MIB);
    let hosts = Hosts { own: 0, names: vec!["host-a".into(), "host-b".into()] };
    world.prepare_on(1, 0, 1, Some(&hosts)).unwrap();
    world.stage(16, 10);
    world.commit(1, 10);
    world.core.note_removal(&job(), Step(10), save(10));
    assert_eq!(world.fill(16, 10).unwrap_err().kind(), ErrorKind::Exists);
}

#[test]
fn a_removed_step_of_an_older_launch_is_saved_by_the_newer_one() {
    let mut world = world();
    let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
    world.core.checked(&place, BTreeSet::from([Step(3), Step(5)]), Some(Step(5)));
    assert_eq!(world.fill(16, 5).unwrap_err().kind(), ErrorKind::Exists);
    world.effects();
    world.core.note_removal(&job(), Step(5), save(5));
    assert!(world.effects().contains(&Effect::KeepJob(job())), "also after a restart");
    assert_eq!(world.fill(16, 3).unwrap_err().kind(), ErrorKind::Exists);
    world.stage(16, 5);
}

/// Another program has removed the step.
#[test]
fn a_step_that_the_cluster_no_longer_has_is_saved_again() {
    let mut world = world();
    let place = Place { job: job(), launch: launch(1), world: 1, rank: 0 };
    world.core.checked(&place, BTreeSet::from([Step(3), Step(5)]), Some(Step(5)));
    world.effects();
    let changes = world.core.changes(&job());
    let committed = |step: Step| (step == Step(3)).then(|| save(3));
    assert!(world.core.drop_replaced(&job(), changes, &committed));
    assert!(world.effects().contains(&Effect::KeepJob(job())));
    assert_eq!(world.fill(16, 3).unwrap_err().kind(), ErrorKind::Exists);
    world.stage(16, 5);
    world.stage(16, 10);
}
