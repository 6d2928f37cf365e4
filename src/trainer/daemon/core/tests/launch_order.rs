//! Launches that another host has replaced (docs/semantics.md, 3).

use super::*;
use crate::format::launch_order::LaunchOrder;

fn order(launches: &[(u8, Option<u64>)]) -> LaunchOrder {
    let mut order = LaunchOrder::default();
    for (number, resumed) in launches {
        order.register(launch(*number), 0, resumed.map(Step));
    }
    order
}

/// A world whose launch 1 has committed step 10 and is saving step 20.
fn world() -> World {
    let mut world = World::new(64 * MIB);
    world.prepare(1, 0, 1).unwrap();
    world.stage(16, 10);
    world.commit(1, 10);
    world.stage(16, 20);
    let key = world.key(1, 20).unwrap();
    assert!(world.core.begin_saving(&key, vec![save(20)]));
    world.effects();
    world
}

#[test]
fn a_load_finds_no_step_that_its_launch_may_no_longer_save() {
    let mut world = world();
    let key = world.key(1, 20).unwrap();
    for harmless in [order(&[]), order(&[(1, None)]), order(&[(1, None), (9, Some(20))])] {
        world.core.drop_unsavable_steps(&job(), &harmless);
        assert_eq!(world.phase(1, 20), Some("saving"), "{harmless:?}");
    }
    world.core.drop_unsavable_steps(&job(), &order(&[(1, None), (9, None)]));
    assert_eq!((world.phase(1, 10), world.phase(1, 20)), (Some("committed"), None));
    let effects = world.effects();
    assert!(effects.contains(&Effect::AbortIfOpen(key, vec![save(20)])), "{effects:?}");
    let settles = effects.iter().any(|effect| matches!(effect, Effect::Settle(_)));
    assert!(!settles, "a newer launch may have resumed from what is committed: {effects:?}");
}

#[test]
fn the_newest_launch_of_the_host_registers_again_before_its_steps_are_judged() {
    let mut world = world();
    // The catalogue was rebuilt, and another launch has registered first.
    world.core.drop_unsavable_steps(&job(), &order(&[(9, None)]));
    assert_eq!(world.phase(1, 20), Some("saving"));
    world.prepare(2, 0, 1).unwrap();
    world.core.drop_unsavable_steps(&job(), &order(&[(9, None)]));
    assert_eq!(world.phase(1, 20), None);
}

#[test]
fn a_fenced_launch_fills_no_step() {
    let mut world = world();
    let why = Failure::new(ErrorKind::Fenced, "launch 9 writes for the job", "");
    world.core.fence_launch(&job(), launch(1), why.clone());
    assert_eq!(world.fill(16, 40).unwrap_err(), why);
    world.prepare(2, 0, 1).unwrap();
    assert!(world.fill(32, 40).is_ok(), "its successor on this host is another launch");
}

#[test]
fn which_launches_have_run_here_and_still_live() {
    let mut world = world();
    assert!(
        world.core.has_run_here(&job(), launch(1)) && world.core.has_members(&job(), launch(1))
    );
    world.core.gone(member(16), Ending::Died);
    assert!(
        world.core.has_run_here(&job(), launch(1)) && !world.core.has_members(&job(), launch(1))
    );
    world.prepare(2, 0, 1).unwrap();
    assert!(
        world.core.has_run_here(&job(), launch(1)) && world.core.has_run_here(&job(), launch(2))
    );
    assert!(
        !world.core.has_run_here(&job(), launch(3)) && !world.core.has_members(&job(), launch(3))
    );
}

#[test]
fn the_launch_before_a_launch_is_the_one_that_was_noted_first() {
    let mut world = World::new(64 * MIB);
    assert_eq!(world.core.predecessor(&job(), launch(2)), None);
    world.core.note_predecessor(&job(), launch(2), Some(launch(1)));
    world.core.note_predecessor(&job(), launch(2), Some(launch(9)));
    assert_eq!(world.core.predecessor(&job(), launch(2)), Some(Some(launch(1))));
    world.core.note_predecessor(&job(), launch(3), None);
    assert_eq!(world.core.predecessor(&job(), launch(3)), Some(None));
    for number in 4..=3 + MAX_OLD_LAUNCHES as u8 {
        world.core.note_predecessor(&job(), launch(number), None);
    }
    assert_eq!(world.core.predecessor(&job(), launch(2)), None, "the list is bounded");
}

/// The daemon removes them even if the launch ends before it has done so itself.
#[test]
fn committed_steps_that_are_abandoned_are_settled_once() {
    let mut world = World::new(64 * MIB);
    world.prepare(2, 0, 1).unwrap();
    world.effects();
    let mut settles = || {
        world.core.abandon(&job(), Some(Step(10)), launch(2), &[(Step(15), save(2))]);
        world.effects().contains(&Effect::Settle(job()))
    };
    assert!(settles() && !settles());
}
