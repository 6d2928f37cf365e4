//! Automatic repair: the catalogue server finds what is missing and has it made again
//! (docs/semantics.md, 11).

use std::time::Duration;

use rapidraid::client::Client;
use rapidraid::config::RepairRules;
use rapidraid::id::Step;
use rapidraid::store::{Disk, LOCK_FILE};
use rapidraid::wire::calls::{ListFiles, PlanChoice, RepairStatus, SurveyResult, SurveyShard};

use world::{World, content, job, options, quiet, read_file, restore, save};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 6 * BLOCK as usize - 1000;
pub const RULES: RepairRules =
    RepairRules { share_percent: 50, grace: Duration::from_secs(30), brake_percent: 20 };

/// Returns a cluster with automatic repair. Each node is a failure domain.
async fn start(nodes: usize, rules: RepairRules) -> (World, Client) {
    let mut world = World::start(nodes, &[(6, 4)], BLOCK).await;
    restart_server(&mut world, rules).await;
    let client = world.client();
    (world, client)
}

/// Restarts the catalogue server with these rules.
pub async fn restart_server(world: &mut World, rules: RepairRules) {
    world.kill(0).await;
    // The last tasks of the stopped daemon release the folder a moment later.
    world.until("the lock is free", || world.machines[0].disk.lock(LOCK_FILE).is_ok()).await;
    world.repair = rules;
    world.boot(0);
    world.until_live(world.machines.len() - 1).await;
}

async fn save_and_archive(client: &Client, step: u64) {
    save(client, step, &[("weights", &content(LEN, step)), ("more", &content(900, step))]).await;
    client
        .archive(&job(), Some(Step(step)), options(PlanChoice::Chain), &mut |_| ())
        .await
        .unwrap();
}

async fn status(client: &Client) -> RepairStatus {
    client.status().await.unwrap().repair.unwrap()
}

/// Waits for a survey that began after this call and satisfies `is_right`.
async fn until_surveyed(client: &Client, is_right: impl Fn(&SurveyResult) -> bool) -> SurveyResult {
    let mut last = None;
    for second in 0..1200 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        last = status(client).await.survey;
        if let Some(survey) = &last
            && survey.age_ms < second * 1000
            && is_right(survey)
        {
            return survey.clone();
        }
    }
    panic!("the last survey: {last:?}");
}

/// Replaces the disk of a machine by an empty one. Waits until `live` nodes are live.
pub async fn empty_disk_while(world: &mut World, machine: usize, live: usize) {
    world.kill(machine).await;
    world.replace(machine);
    world.boot(machine);
    world.until_live(live).await;
}

async fn assert_whole(client: &Client, step: u64, losses: usize) {
    let report = client.verify(&job(), Some(Step(step)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.lacking), (vec![], vec![]), "step {step}");
    assert_eq!(report.survives, Some(losses), "step {step}");
}

#[tokio::test(start_paused = true)]
async fn whatever_an_emptied_node_had_is_made_again_and_status_says_how_safe_the_rest_is() {
    let (mut world, client) = start(7, RULES).await;
    for step in 1..=3 {
        save_and_archive(&client, step).await;
    }
    save(&client, 4, &[("weights", &content(LEN, 4))]).await;
    let whole = until_surveyed(&client, |survey| survey.steps == 4).await;
    assert_eq!((whole.survives, whole.degraded, whole.unknown), (Some(1), 0, 0));

    for machine in [2, 5] {
        empty_disk_while(&mut world, machine, 7).await;
        let degraded = until_surveyed(&client, |survey| survey.degraded > 0).await;
        assert_eq!(degraded.survives, Some(0), "one copy of a block is left");
        assert!(degraded.missing > 0 && degraded.missing_bytes > 0);
        assert_eq!(degraded.worst[0].step, Step(4), "replicas survive fewer losses than pieces");
        until_surveyed(&client, |survey| survey.degraded == 0).await;
        for (step, losses) in [(1, 2), (2, 2), (3, 2), (4, 1)] {
            assert_whole(&client, step, losses).await;
        }
    }
    for step in 1..=4 {
        let (out, _) = restore(&client, step).await.unwrap();
        assert_eq!(read_file(&*out, "weights"), content(LEN, step));
    }
    assert_eq!(status(&client).await.waiting, vec![]);
    world.assert_idle().await;
}

/// Returns a machine that has both a piece of step 1 and a replica of step 2.
fn holder_of_both(world: &World) -> usize {
    let holders = |end: &str| -> Vec<usize> {
        world.files(|path| path.ends_with(end)).into_iter().map(|(machine, _)| machine).collect()
    };
    let pieces = holders(".pc");
    *holders(".rep").iter().find(|machine| pieces.contains(machine)).unwrap()
}

/// After the grace the second copies of a dead node's blocks go to spares, and after five graces
/// its pieces.
#[tokio::test(start_paused = true)]
async fn a_dead_node_is_given_up() {
    let (mut world, client) = start(8, RULES).await;
    save_and_archive(&client, 1).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    let dead = holder_of_both(&world);
    world.kill(dead).await;
    let died_at = tokio::time::Instant::now();
    let has = |survey: &SurveyResult, step: u64| {
        survey.worst.iter().any(|found| found.step == Step(step) && found.missing > 0)
    };
    until_surveyed(&client, |survey| has(survey, 1) && has(survey, 2)).await;
    until_surveyed(&client, |survey| has(survey, 1) && !has(survey, 2)).await;
    let grace = RULES.grace;
    assert!((grace..3 * grace).contains(&died_at.elapsed()), "{:?}", died_at.elapsed());
    until_surveyed(&client, |survey| survey.degraded == 0).await;
    assert!((5 * grace..7 * grace).contains(&died_at.elapsed()), "{:?}", died_at.elapsed());
    let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.survives), (vec![], Some(2)));
    world.boot(dead);
    until_surveyed(&client, |survey| survey.degraded == 0).await;
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), content(LEN, 1));
}

/// Without a node outside the stripe, the pieces of a dead node are missing until it is back, and
/// no repair is tried in vain meanwhile.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_made_is_tried_once() {
    let (mut world, client) = start(6, RULES).await;
    save_and_archive(&client, 1).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    let dead = holder_of_both(&world);
    world.kill(dead).await;
    let degraded = until_surveyed(&client, |survey| survey.degraded == 2).await;
    assert_eq!(degraded.survives, Some(0), "one copy of a block is left");
    tokio::time::sleep(10 * RULES.grace).await;
    world.requests.listen();
    tokio::time::sleep(Duration::from_secs(1200)).await;
    assert_eq!(world.requests.of::<ListFiles>(), [], "nothing can be made");
    assert!(!world.requests.of::<SurveyShard>().is_empty());
    let idle = status(&client).await;
    assert_eq!(idle.running, None);
    assert!(idle.waiting[0].why.contains("no spare is live"), "{:?}", idle.waiting);
    world.boot(dead);
    until_surveyed(&client, |survey| survey.degraded == 0).await;
    assert_whole(&client, 1, 2).await;
}

/// A node that restarts, and two nodes that are away together, move nothing. What can be made on
/// nodes that answer is made also while the brake is on.
#[tokio::test(start_paused = true)]
async fn restarts_and_the_brake_move_nothing() {
    let (mut world, client) = start(9, RULES).await;
    save_and_archive(&client, 1).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    until_surveyed(&client, |survey| survey.steps == 2 && survey.degraded == 0).await;
    let files = |world: &World| world.files(|path| path.ends_with(".pc") || path.ends_with(".rep"));
    let before = files(&world);
    for machine in 1..=9 {
        world.kill(machine).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        world.boot(machine);
        world.until_live(9).await;
    }
    assert_eq!(files(&world), before);
    for machine in [1, 2] {
        world.kill(machine).await;
    }
    empty_disk_while(&mut world, 3, 7).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let of_third = |files: Vec<(usize, String)>| -> Vec<(usize, String)> {
        files.into_iter().filter(|(machine, _)| *machine == 3).collect()
    };
    assert_eq!(of_third(files(&world)), of_third(before.clone()), "made again under the brake");
    let braked = status(&client).await;
    assert!(braked.brake.unwrap().contains("2 of 9"));
    for machine in [1, 2] {
        world.boot(machine);
    }
    world.until_live(9).await;
    until_surveyed(&client, |survey| survey.degraded == 0).await;
    assert_eq!(files(&world), before, "machine 3 has its files again, and nothing else has moved");
    assert_eq!(status(&client).await.brake, None);
}

/// Asserts that the files are the same, and says which are not.
fn assert_unmoved(files: &[(usize, String)], before: &[(usize, String)]) {
    let lost: Vec<_> = before.iter().filter(|file| !files.contains(file)).collect();
    let new: Vec<_> = files.iter().filter(|file| !before.contains(file)).collect();
    assert!(
        lost.is_empty() && new.is_empty(),
        "{} lost, {} new: {lost:?} {new:?}",
        lost.len(),
        new.len()
    );
}

/// Four racks of four nodes, with spares for every stripe. A rack is away for an hour, with
/// replicas and pieces, and then all nodes restart one after the other. No file moves.
#[tokio::test(start_paused = true)]
async fn a_rack_that_is_away_for_an_hour_and_a_rolling_restart_move_nothing() {
    let mut world = World::start(16, &[(6, 4)], BLOCK).await;
    world.racks = 4;
    for machine in 1..=16 {
        world.kill(machine).await;
        world.boot(machine);
    }
    restart_server(&mut world, RULES).await;
    let client = world.client();
    for step in 1..=4 {
        save_and_archive(&client, step).await;
    }
    save(&client, 5, &[("weights", &content(20 * LEN, 5))]).await;
    until_surveyed(&client, |survey| survey.steps == 5 && survey.degraded == 0).await;
    // A node that has just restarted may drop its replicas only when it is asked again.
    world.until("all is dropped", || world.catalogue_keys("a/").is_empty()).await;
    let files = |world: &World| world.files(|path| path.ends_with(".pc") || path.ends_with(".rep"));
    let before = files(&world);
    let of_rack = [2, 6, 10, 14];
    for machine in of_rack {
        world.kill(machine).await;
    }
    world.until_live(12).await;
    until_surveyed(&client, |survey| survey.degraded > 0).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let braked = status(&client).await;
    assert!(braked.brake.unwrap().contains("4 of 16"));
    assert_unmoved(&files(&world), &before);
    for machine in of_rack {
        world.boot(machine);
        tokio::time::sleep(Duration::from_secs(20)).await;
    }
    for machine in 1..=16 {
        world.kill(machine).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        world.boot(machine);
        world.until_live(16).await;
    }
    until_surveyed(&client, |survey| survey.steps == 5 && survey.degraded == 0).await;
    assert_unmoved(&files(&world), &before);
}

/// With a share of 0 nothing is repaired automatically, and the survey goes on.
#[tokio::test(start_paused = true)]
async fn nothing_is_repaired_when_it_is_turned_off() {
    let (mut world, client) = start(7, RepairRules { share_percent: 0, ..RULES }).await;
    save_and_archive(&client, 1).await;
    empty_disk_while(&mut world, 1, 7).await;
    let degraded = until_surveyed(&client, |survey| survey.degraded == 1).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    let later = status(&client).await;
    assert_eq!((later.share_percent, later.survey.unwrap().missing), (0, degraded.missing));
}

/// The step of that folder is not known, and all others are surveyed and repaired.
#[tokio::test(start_paused = true)]
async fn a_folder_that_a_node_cannot_read_concerns_its_step_alone() {
    let (mut world, client) = start(7, RULES).await;
    for step in 1..=2 {
        save_and_archive(&client, step).await;
    }
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
    let files = world.files_of(shown.step.saved.save);
    let (machine, path) =
        files.iter().find(|(machine, path)| *machine != 2 && path.ends_with(".pc")).unwrap();
    world.machines[*machine].disk.make_folder_unreadable(path.rsplit_once('/').unwrap().0);
    empty_disk_while(&mut world, 2, 7).await;
    until_surveyed(&client, |survey| survey.unknown == 1 && survey.degraded == 0).await;
    assert_whole(&client, 2, 2).await;
}

/// A node is away for an hour that was announced. Nothing is made on others before the hour is over.
#[tokio::test(start_paused = true)]
async fn nothing_moves_for_a_node_in_maintenance() {
    let (mut world, client) = start(8, RULES).await;
    save_and_archive(&client, 1).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    let before = world.files(|path| path.ends_with(".rep") || path.ends_with(".pc"));
    let node = world.machines[3].name.clone();
    client.set_maintenance(&node, 3600).await.unwrap();
    world.kill(3).await;
    tokio::time::sleep(Duration::from_secs(3400)).await;
    // The dates of the machines stand still unless they jump.
    world.machines[0].time.jump(3400);
    tokio::time::sleep(world.lease).await;
    let files = |world: &World| world.files(|path| path.ends_with(".rep") || path.ends_with(".pc"));
    assert_eq!(files(&world), before);
    let told = status(&client).await.maintenance;
    assert!(matches!(&told[..], [(of, 1..=300)] if *of == node), "{told:?}");
    // It does not come back. Its graces begin at the end of the hour.
    world.machines[0].time.jump(300);
    tokio::time::sleep(Duration::from_secs(20 * 60)).await;
    assert_ne!(files(&world), before);
    assert_eq!(status(&client).await.maintenance, []);
    for (step, losses) in [(1, 2), (2, 1)] {
        assert_whole(&client, step, losses).await;
    }
    let unknown = client.set_maintenance(&"nobody".parse().unwrap(), 60).await.unwrap_err();
    assert_eq!(unknown.kind(), rapidraid::kind::ErrorKind::NotFound, "{unknown}");
    client.set_maintenance(&"nobody".parse().unwrap(), 0).await.unwrap();
    let too_long = client.set_maintenance(&node, 8 * 24 * 3600).await.unwrap_err();
    assert_eq!(too_long.kind(), rapidraid::kind::ErrorKind::Invalid, "{too_long}");
}
