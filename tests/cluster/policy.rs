//! The policy: old steps are archived or removed automatically, the newest never is, and work that
//! cannot proceed is retried later.

use std::collections::BTreeMap;
use std::time::Duration;

use rapidraid::client::{Client, SaveOptions};
use rapidraid::config::{Policy, Rule};
use rapidraid::format::records::StripeState;
use rapidraid::id::{Job, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Disk, LOCK_FILE};
use rapidraid::wire::calls::{LabelChange, LabelStep};
use rapidraid::wire::policy::{PolicyAnswer, RetentionChange};

use crate::rebuild::{lose_catalogue, rebuild_on};
use world::{World, content, job, quiet, read_file, restore, save, shard};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 3 * 2 * BLOCK as usize - 1000;
const STRIPES: usize = 3;

pub fn for_all(rule: Rule) -> Policy {
    Policy { rule, jobs: BTreeMap::new() }
}

fn archive_all_but(newest: u32) -> Rule {
    Rule { archive_all_but: Some(newest), ..Rule::NOTHING }
}

pub fn keep(newest: u32) -> Rule {
    Rule { keep_newest: Some(newest), ..Rule::NOTHING }
}

/// Restarts the catalogue server with this policy.
pub async fn restart(world: &mut World, policy: Policy) {
    world.kill(0).await;
    // The last tasks of the stopped daemon release the folder a moment later.
    world.until("the lock is free", || world.machines[0].disk.lock(LOCK_FILE).is_ok()).await;
    world.policy = policy;
    world.boot(0);
}

async fn save_steps(client: &Client, steps: impl IntoIterator<Item = u64>) {
    for step in steps {
        save(client, step, &[("weights", &content(LEN, step))]).await;
    }
}

async fn steps(client: &Client, job: &Job) -> Vec<u64> {
    client.list_steps(Some(job)).await.unwrap().iter().map(|view| view.step.0).collect()
}

/// Returns the steps whose stripes are all archived, with their replicas dropped.
async fn archived(client: &Client) -> Vec<u64> {
    let mut archived = Vec::new();
    for step in steps(client, &job()).await {
        let report = client.show_step(&job(), Some(Step(step))).await.unwrap();
        let done =
            |state: StripeState| matches!(state, StripeState::Archived { dropped: true, .. });
        if report.shards.iter().all(|(_, state)| state.states().all(done)) {
            archived.push(step);
        }
    }
    archived
}

/// Waits until exactly the steps `wanted` are archived. The invariant must hold in every state on
/// the way, and no step may disappear.
async fn until_archived(client: &Client, world: &World, wanted: &[u64]) {
    let all = steps(client, &job()).await;
    for _ in 0..4000 {
        for &step in &all {
            world.assert_invariant(client, step).await;
        }
        if archived(client).await == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    panic!("{:?} are archived, not {wanted:?}", archived(client).await);
}

async fn until_left(client: &Client, job: &Job, wanted: &[u64]) {
    for _ in 0..1200 {
        let left = steps(client, job).await;
        assert!(wanted.iter().all(|step| left.contains(step)), "{left:?}");
        if left == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{:?} are left, not {wanted:?}", steps(client, job).await);
}

async fn policy(client: &Client) -> PolicyAnswer {
    client.status().await.unwrap().policy.expect("the catalogue's host answers")
}

#[tokio::test(start_paused = true)]
async fn the_newest_stay_replicated_and_older_steps_become_archived() {
    let mut world = World::start(5, &[(4, 2)], BLOCK).await;
    restart(&mut world, for_all(archive_all_but(2))).await;
    let client = world.client();
    save_steps(&client, 1..=2).await;
    tokio::time::sleep(5 * world.lease).await;
    assert_eq!(archived(&client).await, [0; 0]);
    save_steps(&client, 3..=5).await;
    until_archived(&client, &world, &[1, 2, 3]).await;
    tokio::time::sleep(5 * world.lease).await;
    for step in 1..=5 {
        let held = world.assert_invariant(&client, step).await;
        let (replicas, archived) = if step <= 3 { (0, STRIPES) } else { (4 * STRIPES, 0) };
        assert_eq!((held.replicas, held.archived), (replicas, archived), "step {step}");
        let (out, _) = restore(&client, step).await.unwrap();
        assert!(read_file(&*out, "weights") == content(LEN, step));
    }
    save_steps(&client, [6]).await;
    until_archived(&client, &world, &[1, 2, 3, 4]).await;
    world.until("the wish gone", || world.catalogue_keys("a/").is_empty()).await;
    let answer = policy(&client).await;
    assert_eq!((answer.rules.len(), answer.rules[0].archive_all_but), (1, Some(2)));
    assert_eq!(answer.waiting, []);
    // A step that is saved again is replicated again, and its number is still old.
    let options = SaveOptions { replace: true };
    let again = vec![shard("weights", &content(LEN, 77))];
    client.save(&job(), Step(1), again, options, quiet()).await.unwrap();
    assert_eq!(archived(&client).await, [2, 3, 4]);
    until_archived(&client, &world, &[1, 2, 3, 4]).await;
    world.assert_swept(&client).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn the_newest_and_every_fourth_step_are_kept_and_others_go() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save_steps(&client, 0..=13).await;
    tokio::time::sleep(5 * world.lease).await;
    assert_eq!(steps(&client, &job()).await.len(), 14, "nothing goes without a rule");
    let rule = Rule { archive_all_but: Some(3), keep_every: Some(4), ..keep(2) };
    restart(&mut world, for_all(rule)).await;
    until_left(&client, &job(), &[0, 4, 8, 12, 13]).await;
    until_archived(&client, &world, &[0, 4]).await;
    world.assert_swept(&client).await;
    save_steps(&client, [14]).await;
    until_left(&client, &job(), &[0, 4, 8, 12, 13, 14]).await;
    until_archived(&client, &world, &[0, 4, 8]).await;
    let gone = client.show_step(&job(), Some(Step(5))).await.unwrap_err();
    assert_eq!(gone.kind(), rapidraid::kind::ErrorKind::NotFound);
    let answer = policy(&client).await;
    assert_eq!((answer.to_retire, answer.removing, answer.waiting), (0, 0, vec![]));
    world.assert_idle().await;
}

async fn label(client: &Client, step: u64, label: &str) {
    let label = label.parse().unwrap();
    client.label_step(job().at(Step(step)), &label, LabelChange::Add).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_newest_with_each_label_is_kept() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save_steps(&client, 1..=6).await;
    for (step, name) in [(1, "trusted"), (2, "trusted"), (2, "a"), (3, "b"), (6, "b")] {
        label(&client, step, name).await;
    }
    restart(&mut world, for_all(keep(1))).await;
    // Step 1 has no label that no newer step has, and neither has step 3.
    until_left(&client, &job(), &[2, 6]).await;
    tokio::time::sleep(3 * world.lease).await;
    assert_eq!(steps(&client, &job()).await, [2, 6]);
    // When a newer step gets the labels, the older one goes.
    save_steps(&client, [7]).await;
    until_left(&client, &job(), &[2, 6, 7]).await;
    label(&client, 7, "trusted").await;
    tokio::time::sleep(3 * world.lease).await;
    assert_eq!(steps(&client, &job()).await, [2, 6, 7], "step 2 still has `a` alone");
    label(&client, 7, "a").await;
    until_left(&client, &job(), &[6, 7]).await;
    let labels = client.list_labels(&job()).await.unwrap();
    assert_eq!(labels.keys().copied().collect::<Vec<_>>(), [Step(6), Step(7)]);
    // A person removes what has a label, and the label goes with it.
    client.remove_step(&job(), Step(6)).await.unwrap();
    world.until("its labels gone", || world.catalogue_keys("b/").len() == 1).await;
    world.assert_swept(&client).await;
    world.assert_idle().await;
}

/// The labels are lost with the catalogue, so that nothing says which older steps must stay.
#[tokio::test(start_paused = true)]
async fn a_rebuilt_catalogue_retires_nothing_until_a_person_resumes_it() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    save_steps(&world.client(), 1..=4).await;
    label(&world.client(), 1, "trusted").await;
    world.policy = for_all(keep(2));
    world.kill(1).await;
    world.boot(1);
    world.until_live(6).await;
    lose_catalogue(&mut world).await;
    let client = world.client_of(1);
    rebuild_on(&client, 1, false).await.unwrap();
    tokio::time::sleep(5 * world.lease).await;
    assert_eq!(steps(&client, &job()).await, [1, 2, 3, 4]);
    let status = client.status().await.unwrap();
    assert_eq!((status.is_retention_paused, status.policy.unwrap().to_retire), (Some(true), 2));
    assert!(client.is_retention_paused().await.unwrap());
    label(&client, 1, "trusted").await;
    assert!(!client.set_retention(RetentionChange::Resume).await.unwrap());
    until_left(&client, &job(), &[1, 3, 4]).await;
    assert!(client.set_retention(RetentionChange::Pause).await.unwrap());
    assert!(client.set_retention(RetentionChange::Pause).await.unwrap());
    save_steps(&client, [5]).await;
    tokio::time::sleep(5 * world.lease).await;
    assert_eq!(steps(&client, &job()).await, [1, 3, 4, 5]);
    assert!(!client.set_retention(RetentionChange::Resume).await.unwrap());
    until_left(&client, &job(), &[1, 4, 5]).await;
}

#[tokio::test(start_paused = true)]
async fn a_label_belongs_to_one_save() {
    let mut world = World::start(5, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save_steps(&client, [1]).await;
    let first = client.list_steps(Some(&job())).await.unwrap()[0].saved.save;
    label(&client, 1, "trusted").await;
    label(&client, 1, "trusted").await;
    assert_eq!(client.list_labels(&job()).await.unwrap()[&Step(1)].len(), 1);
    // The removal of the old save waits for a node, so its labels are still there.
    world.kill(5).await;
    let newer = vec![shard("weights", &content(LEN, 2))];
    client.save(&job(), Step(1), newer, SaveOptions { replace: true }, quiet()).await.unwrap();
    assert_eq!(world.catalogue_keys("b/").len(), 1);
    assert!(client.list_labels(&job()).await.unwrap().is_empty(), "the new save has none");
    // A request that still names the old save is refused.
    let call = LabelStep {
        job: job(),
        step: Step(1),
        save: first,
        label: "trusted".parse().unwrap(),
        change: LabelChange::Add,
    };
    let voice = world.voice(rapidraid::net::Role::Client, "late");
    let refused = voice.ask(&world.node_address(1), &call).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    for number in 0..16 {
        label(&client, 1, &format!("label-{number}")).await;
    }
    let step_ref = job();
    let step_ref = step_ref.at(Step(1));
    let more = "one-more".parse().unwrap();
    let refused = client.label_step(step_ref, &more, LabelChange::Add).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    let left = client.label_step(step_ref, &"label-3".parse().unwrap(), LabelChange::Remove).await;
    assert_eq!(left.unwrap().len(), 15);
    client.label_step(step_ref, &more, LabelChange::Add).await.unwrap();
    let missing = client.label_step(job().at(Step(9)), &more, LabelChange::Add).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
}

#[tokio::test(start_paused = true)]
async fn the_newest_is_never_removed() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    restart(&mut world, for_all(keep(1))).await;
    let client = world.client_of(0);
    for newest in [3, 5, 7] {
        save_steps(&client, [newest]).await;
        until_left(&client, &job(), &[newest]).await;
        tokio::time::sleep(3 * world.lease).await;
        assert_eq!(steps(&client, &job()).await, [newest]);
    }
    // A save in progress and an abandoned save do not count as steps.
    let voice = world.voice(rapidraid::net::Role::Client, "dying");
    voice.begin(&world.node_address(1), 9).await.unwrap();
    tokio::time::sleep(5 * world.lease).await;
    assert_eq!(steps(&client, &job()).await, [7]);
    let (out, _) = restore(&client, 7).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 7));
    // A step below the newest is already old when it is saved.
    save_steps(&client, [6]).await;
    until_left(&client, &job(), &[7]).await;
    world.assert_swept(&client).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_has_a_rule_of_its_own() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    let other: Job = "job.2".parse().unwrap();
    let mut policy_of = for_all(keep(1));
    policy_of.jobs.insert(other.clone(), keep(3));
    restart(&mut world, policy_of).await;
    let client = world.client_of(0);
    for step in 1..=5 {
        let shards = vec![shard("weights", &content(LEN, step))];
        client.save(&other, Step(step), shards, SaveOptions::default(), quiet()).await.unwrap();
    }
    save_steps(&client, 1..=3).await;
    until_left(&client, &job(), &[3]).await;
    until_left(&client, &other, &[3, 4, 5]).await;
    tokio::time::sleep(3 * world.lease).await;
    assert_eq!(steps(&client, &other).await, [3, 4, 5]);
    let rules = policy(&client).await.rules;
    assert_eq!((rules.len(), &rules[1].job, rules[1].keep_newest), (2, &Some(other), Some(3)));
}

#[tokio::test(start_paused = true)]
async fn with_a_node_away_the_policy_waits_longer_and_longer() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save_steps(&client, 1..=8).await;
    world.kill(3).await;
    restart(&mut world, for_all(archive_all_but(1))).await;
    tokio::time::sleep(Duration::from_secs(40 * 60)).await;
    let answer = policy(&client).await;
    assert_eq!((answer.to_archive, world.catalogue_keys("a/").len()), (7, 7), "{answer:?}");
    // Steps that are being retried at this moment do not count as waiting.
    assert!((1..=7).contains(&answer.waiting.len()), "{answer:?}");
    for wait in &answer.waiting {
        // Delays of 7 s, 14 s ... 10 min: ten of them take 45 minutes, over all daemons together. A
        // try may take time as well.
        assert!((5..=10).contains(&wait.failures), "{wait:?}");
        assert!(wait.why.contains("no spare node"), "{wait:?}");
    }
    for step in 1..=8 {
        let held = world.assert_invariant(&client, step).await;
        assert_eq!(held.archived, 0);
    }
    world.boot(3);
    until_archived(&client, &world, &[1, 2, 3, 4, 5, 6, 7]).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_gone_for_good_stops_no_archiving_where_another_takes_its_place() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save_steps(&client, 1..=10).await;
    world.kill(6).await;
    restart(&mut world, for_all(archive_all_but(1))).await;
    let proven = |state: StripeState| matches!(state, StripeState::Archived { .. });
    for step in 1..=9 {
        for wait in 0.. {
            let report = client.show_step(&job(), Some(Step(step))).await.unwrap();
            if report.shards.iter().all(|(_, state)| state.states().all(proven)) {
                break;
            }
            assert!(wait < 200, "step {step} waits: {:?}", policy(&client).await);
            tokio::time::sleep(world.lease).await;
        }
    }
    let answer = policy(&client).await;
    let drops = answer.waiting.iter().filter(|wait| wait.why.contains("to be dropped")).count();
    assert!(drops > 4, "the node was needed by few: {answer:?}");
    world.boot(6);
    until_archived(&client, &world, &[1, 2, 3, 4, 5, 6, 7, 8, 9]).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn retention_goes_on_with_a_node_away_and_its_files_wait() {
    let mut world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client_of(0);
    save_steps(&client, 1..=4).await;
    world.kill(3).await;
    restart(&mut world, for_all(keep(1))).await;
    until_left(&client, &job(), &[4]).await;
    tokio::time::sleep(Duration::from_secs(40 * 60)).await;
    let answer = policy(&client).await;
    assert_eq!((answer.removing, answer.waiting.len()), (3, 3), "{answer:?}");
    for wait in &answer.waiting {
        assert!((4..=10).contains(&wait.failures) && wait.why.contains("node03"), "{wait:?}");
    }
    let left = |machine: &(usize, String)| machine.0 != 3;
    let of_others: Vec<_> =
        world.files(|path| path.ends_with(".rep")).into_iter().filter(left).collect();
    let newest = client.list_steps(None).await.unwrap()[0].saved.save.to_string();
    assert!(of_others.iter().all(|(_, path)| path.contains(&newest)), "{of_others:?}");
    world.boot(3);
    tokio::time::sleep(Duration::from_secs(11 * 60)).await;
    world.assert_swept(&client).await;
    assert_eq!(policy(&client).await.waiting, []);
}

#[tokio::test(start_paused = true)]
async fn a_catalogue_that_restarts_in_the_middle_goes_on() {
    let (mut with_wish, mut with_removal) = (0, 0);
    for point in 0..20 {
        let mut world = World::start(4, &[(4, 2)], BLOCK).await;
        let client = world.client_of(0);
        save_steps(&client, 1..=7).await;
        let rule = Rule { keep_newest: Some(4), ..archive_all_but(2) };
        restart(&mut world, for_all(rule)).await;
        // The policy's first round begins now. The restart interrupts it after this many turns of
        // the scheduler.
        tokio::time::sleep(world.lease).await;
        for _ in 0..if point < 12 { point } else { point * 10 } {
            tokio::task::yield_now().await;
        }
        with_wish += u32::from(!world.catalogue_keys("a/").is_empty());
        with_removal += u32::from(world.catalogue_keys("s/").len() + steps_left(&world) > 4 + 4);
        restart(&mut world, for_all(rule)).await;
        until_left(&client, &job(), &[4, 5, 6, 7]).await;
        until_archived(&client, &world, &[4, 5]).await;
        world.assert_swept(&client).await;
        world.until("no wish left", || world.catalogue_keys("a/").is_empty()).await;
        for step in 4..=7 {
            let (out, _) = restore(&client, step).await.unwrap();
            assert!(read_file(&*out, "weights") == content(LEN, step));
        }
        world.assert_idle().await;
    }
    assert!(with_wish > 1 && with_removal > 1, "{with_wish} {with_removal}: not in the middle");
}

fn steps_left(world: &World) -> usize {
    world.catalogue_keys("c/").len()
}
