//! Tests of several launches of one job: which one may write, which steps are abandoned, and which
//! answers must be the same for all ranks (docs/staging.md, 5 to 7).

use rapidraid::id::Step;
use rapidraid::trainer::protocol::Request;
use serde_json::json;

use crate::launch::{Launch, Plan, ROWS, Trainer};
use crate::machine::Cluster;
use crate::stage::{Stage, with_wait};
use crate::{Cell, cells};

pub const CELLS: &[Cell] = cells![
    an_older_launch_is_fenced,
    an_older_launch_never_takes_over,
    what_it_had_staged_is_committed_all_the_same,
    later_steps_are_refused_or_abandoned,
    later_steps_in_memory_are_abandoned_too,
    steps_that_were_committed_since_the_load_are_later_too,
    a_launch_goes_back,
    a_launch_goes_back_before_its_step_is_committed,
    a_removed_step_is_saved_again,
    a_step_is_saved_once,
    a_step_is_saved_once_also_after_a_restart,
    a_rank_that_never_fills_is_named,
    a_rank_that_stands_still_is_named,
    ranks_that_disagree_are_told,
    a_rank_has_one_process,
    ranks_get_one_answer_to_a_load,
    a_rank_that_asks_again_fills_the_same_segment,
    a_rank_that_prepares_again_saves_on,
    only_so_many_steps_are_kept,
    copies_that_differ_are_told,
];

fn stage<'a>(cluster: &'a Cluster) -> Stage<'a> {
    Stage::start(cluster, "64MiB", &[])
}

fn an_older_launch_is_fenced(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut old = Launch::ready(&stage, &Plan::new(job, 2));
    old.ranks[0].step("save", 10).unwrap();
    old.fill(1, 10);
    let mut new = Launch::ready(&stage, &Plan::new(job, 1));
    assert_eq!(stage.state(job, 10), None, "what the older one was filling is dropped");
    for rank in &mut old.ranks {
        rank.step("fill", 20).unwrap_err().says("Fenced", &["is over", "end this process"]);
    }
    old.ranks[1].tell("header").unwrap();
    old.ranks[1].tell("say").unwrap_err().says("Fenced", &["is over"]);
    let order = old.prepare_order(0);
    old.ranks[0].ask(&order).unwrap_err().says("Fenced", &["is over"]);
    old.ranks[0].step("wait", 10).unwrap_err().says("Fenced", &["newer launch"]);
    new.save(10);
    new.wait(10);
    stage.assert_sound();
}

fn an_older_launch_never_takes_over(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut old = Launch::start(&stage, &Plan::new(job, 1));
    let mut new = Launch::start(&stage, &Plan::new(job, 1));
    new.born_ns = old.born_ns + 1;
    // A load does not take the job over.
    assert!(new.load(None)[0].is_null());
    let order = old.prepare_order(0);
    old.ranks[0].ask(&order).unwrap();
    old.save(10);
    new.prepare();
    old.ranks[0].ask(&order).unwrap_err().says("Fenced", &[]);
    let mut late = Launch::start(&stage, &Plan::new(job, 1));
    late.born_ns = old.born_ns;
    let order = late.prepare_order(0);
    late.ranks[0].ask(&order).unwrap_err().says("Fenced", &[]);
    stage.until("its step is committed", || stage.committed(job) == [10]);
}

fn what_it_had_staged_is_committed_all_the_same(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut old = Launch::ready(&stage, &Plan::new(job, 2));
    let fill = old.save(10);
    let mut new = Launch::start(&stage, &Plan::new(job, 2).after(10));
    let loaded = new.load(None);
    assert!(loaded.iter().all(|loaded| loaded["fill"] == fill), "{loaded:?}");
    new.prepare();
    new.save(20);
    new.wait(20);
    assert_eq!(stage.committed(job), [10, 20]);
}

fn later_steps_are_refused_or_abandoned(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut old = Launch::ready(&stage, &Plan::new(job, 1));
    for step in [10, 20, 30] {
        old.save(step);
        old.wait(step);
    }
    old.kill();
    let mut plan = Plan { newest_seen: Some(30), ..Plan::new(job, 1).after(10) };
    let mut new = Launch::ready(&stage, &plan);
    let refused = new.ranks[0].step("fill", 20).unwrap_err();
    refused.says("Exists", &["resumed from step 10", "2 from 20 to 30", "abandon_later=True"]);
    assert_eq!(stage.committed(job), [10, 20, 30]);
    new.kill();
    plan.abandon_later = true;
    let mut new = Launch::ready(&stage, &plan);
    let fill = new.save(20);
    assert_eq!(stage.committed(job)[0], 10);
    new.wait(20);
    assert_eq!(stage.committed(job), [10, 20]);
    assert_eq!(stage.load(job, None).unwrap().unwrap().fill.to_string(), fill);
    new.kill();
    // A launch that loaded nothing counts as resumed from before step 0.
    let mut anew = Launch::ready(&stage, &Plan::new(job, 1));
    anew.ranks[0].step("fill", 5).unwrap_err().says("Exists", &["resumed from nothing"]);
}

fn later_steps_in_memory_are_abandoned_too(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut old = Launch::ready(&stage, &Plan::new(job, 2));
    old.save(10);
    old.wait(10);
    old.save(20);
    old.kill();
    // The rest holds whether step 20 is committed by now or not.
    let plan = Plan { abandon_later: true, ..Plan::new(job, 2).after(10) };
    let mut new = Launch::start(&stage, &plan);
    assert_eq!(new.load(Some(10))[0]["step"], 10);
    new.prepare();
    let fill = new.save(15);
    new.wait(15);
    assert_eq!(stage.committed(job), [10, 15]);
    assert_eq!(stage.load(job, None).unwrap().unwrap().fill.to_string(), fill);
    stage.load(job, Some(20)).unwrap_err();
}

/// The older launch commits two steps after the newer one has loaded, and only the last of them is
/// still in memory.
fn steps_that_were_committed_since_the_load_are_later_too(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut old = Launch::ready(&stage, &Plan::new(job, 1));
    old.save(10);
    old.wait(10);
    let plan = Plan { abandon_later: true, ..Plan::new(job, 1).after(10) };
    let mut new = Launch::start(&stage, &plan);
    assert_eq!(new.load(None)[0]["step"], 10);
    for step in [20, 30, 40] {
        old.save(step);
        old.wait(step);
    }
    old.kill();
    new.prepare();
    new.save(15);
    new.wait(15);
    assert_eq!(stage.committed(job), [10, 15]);
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 15);
}

fn a_launch_goes_back(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let plan = Plan { abandon_later: true, ..Plan::new(job, 2) };
    let mut launch = Launch::ready(&stage, &plan);
    for step in [10, 20] {
        launch.save(step);
        launch.wait(step);
    }
    assert_eq!(launch.load(Some(10))[1]["step"], 10);
    let fill = launch.save(20);
    launch.wait(20);
    assert_eq!(launch.ranks[0].tell("notices").unwrap(), json!([]), "it abandons its own step");
    assert_eq!(stage.committed(job), [10, 20]);
    let found = stage.load(job, None).unwrap().unwrap();
    assert_eq!((found.fill.to_string(), found.is_from_memory), (fill.clone(), true));
    launch.kill();
    stage.forget(job);
    assert_eq!(stage.load(job, None).unwrap().unwrap().fill.to_string(), fill);
}

/// The rest holds whether step 20 is committed by then or not.
fn a_launch_goes_back_before_its_step_is_committed(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let plan = Plan { abandon_later: true, ..Plan::new(job, 2) };
    let mut launch = Launch::ready(&stage, &plan);
    launch.save(10);
    launch.wait(10);
    launch.save(20);
    assert_eq!(launch.load(Some(10))[1]["step"], 10);
    launch.save(15);
    launch.wait(15);
    assert_eq!(launch.ranks[0].tell("notices").unwrap(), json!([]));
    assert_eq!(stage.committed(job), [10, 15]);
    launch.kill();
    stage.forget(job);
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 15);
}

fn a_removed_step_is_saved_again(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.save(5);
    launch.wait(5);
    let remove = Request::Remove { job: job.parse().unwrap(), step: Step(5) };
    let mut session = stage.session().unwrap();
    with_wait(|wait| session.tell("the removal", &remove, wait)).unwrap();
    launch.wait(5);
    let fill = launch.save(5);
    launch.wait(5);
    assert_eq!(stage.load(job, Some(5)).unwrap().unwrap().fill.to_string(), fill);
    launch.ranks[0].step("fill", 5).unwrap_err().says("Exists", &["saved already"]);
    stage.assert_sound();
}

fn a_step_is_saved_once(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    launch.save(10);
    launch.ranks[0].step("fill", 10).unwrap_err().says("Exists", &["step 10", "saved already"]);
    launch.wait(10);
    launch.ranks[0].step("fill", 10).unwrap_err().says("Exists", &["step 10", "saved already"]);
    launch.kill();
    let mut next = Launch::ready(&stage, &Plan::new(job, 1).after(10));
    next.ranks[0].step("fill", 10).unwrap_err().says("Exists", &["step 10", "saved already"]);
}

/// By then the daemon has forgotten the steps that the launch has saved.
fn a_step_is_saved_once_also_after_a_restart(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    let first = launch.save(10);
    for step in [20, 30, 40] {
        launch.wait(step - 10);
        launch.save(step);
    }
    launch.wait(40);
    stage.kill();
    stage.restart();
    launch.ranks[0].step("fill", 10).unwrap_err().says("Unavailable", &["went away"]);
    let refused = match launch.ranks[0].step("save", 10) {
        Err(refused) => refused,
        Ok(_) => launch.ranks[0].step("wait", 10).unwrap_err(),
    };
    refused.says("Exists", &["10"]);
    drop(launch);
    let loaded = stage.load(job, Some(10)).unwrap().unwrap();
    assert_eq!(loaded.fill.to_string(), first, "it is what was committed");
}

fn a_rank_that_never_fills_is_named(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &["staging.fill_s=1"]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 3));
    launch.ranks[0].step("save", 10).unwrap();
    launch.ranks[2].step("save", 10).unwrap();
    let told = launch.ranks[0].step("wait", 10).unwrap_err();
    told.says("Timeout", &["rank 1 has not staged step 10", "staging.fill_s"]);
    launch.ranks[1].step("fill", 20).unwrap();
    assert_eq!(stage.load(job, None).unwrap(), None);
    stage.assert_sound();
}

fn a_rank_that_stands_still_is_named(cluster: &Cluster, job: &str) {
    use rustix::process::Signal;
    let stage = Stage::start(cluster, "64MiB", &["staging.fill_s=1"]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.fill(1, 10);
    launch.ranks[1].signal(Signal::STOP);
    launch.ranks[0].step("save", 10).unwrap();
    let told = launch.ranks[0].step("wait", 10).unwrap_err();
    told.says("Timeout", &["rank 1 has not staged step 10 after 1 s"]);
    launch.ranks[1].signal(Signal::CONT);
    launch.ranks[1].tell("header").unwrap();
    launch.ranks[1].tell("say").unwrap_err().says("Timeout", &["rank 1 has not staged step 10"]);
    launch.save(20);
    launch.wait(20);
    assert_eq!(stage.committed(job), [20]);
}

fn ranks_that_disagree_are_told(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = Launch::start(&stage, &Plan::new(job, 2));
    let (first, mut second) = (launch.prepare_order(0), launch.prepare_order(1));
    launch.ranks[0].ask(&first).unwrap();
    second["world"] = json!(3);
    let refused = launch.ranks[1].ask(&second).unwrap_err();
    refused.says("Invalid", &["3 ranks, others say 2", "same process group"]);
    second["world"] = json!(2);
    launch.ranks[1].ask(&second).unwrap();
    launch.ranks[0].step("save", 10).unwrap();
    launch.ranks[1].step("save", 11).unwrap();
    let told = launch.ranks[0].step("wait", 10).unwrap_err();
    told.says("Invalid", &["rank 1 saves step 11", "step 10", "same steps"]);
    let wrong = json!({ "rank": 5, "world": 2 });
    let mut order = launch.prepare_order(0);
    for (field, value) in wrong.as_object().unwrap() {
        order[field] = value.clone();
    }
    let mut other = Trainer::start(&stage.dir(), None);
    other
        .ask(&order)
        .unwrap_err()
        .says("Invalid", &["rank 5 is not a rank of a launch of 2 ranks"]);
}

fn a_rank_has_one_process(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let order = launch.prepare_order(1);
    let mut twin = Trainer::start(&stage.dir(), None);
    twin.ask(&order).unwrap_err().says("Exists", &["rank 1", "another live process"]);
    launch.ranks[1].kill();
    stage.until("its successor is taken", || twin.ask(&order).is_ok());
    launch.ranks[1] = twin;
    launch.save(10);
    launch.wait(10);
}

fn ranks_get_one_answer_to_a_load(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut old = Launch::ready(&stage, &Plan::new(job, 2));
    old.save(10);
    let mut new = Launch::start(&stage, &Plan::new(job, 2).after(10));
    let order = |launch: &Launch, number: u64| json!({ "do": "load", "job": job, "launch": launch.id.to_string(), "number": number });
    let first = order(&new, 1);
    assert_eq!(new.ranks[0].ask(&first).unwrap()["step"], 10);
    old.save(20);
    old.wait(20);
    assert_eq!(
        new.ranks[1].ask(&first).unwrap()["step"],
        10,
        "the same, though 20 is there by now"
    );
    let mut other = first.clone();
    other["step"] = json!(20);
    let refused = new.ranks[1].ask(&other).unwrap_err();
    refused.says("Invalid", &["loads step 20", "step 10", "all ranks must load the same step"]);
    let second = order(&new, 2);
    assert_eq!(new.ranks[1].ask(&second).unwrap()["step"], 20);
    stage.kill();
    stage.restart();
    let after = new.ranks[0].ask(&second);
    let after = after.or_else(|_| new.ranks[0].ask(&second)).unwrap();
    assert_eq!(after["step"], 20, "also after a restart");
    drop((old, new));
    // If there was nothing to load for the first rank, there is nothing for the others.
    let lonely = format!("{job}-2");
    let mut old = Launch::ready(&stage, &Plan::new(&lonely, 1));
    let mut new = Launch::start(&stage, &Plan::new(&lonely, 2));
    let first = json!({ "do": "load", "job": lonely, "launch": new.id.to_string(), "number": 1 });
    assert!(new.ranks[0].ask(&first).unwrap().is_null());
    old.save(10);
    old.wait(10);
    assert!(new.ranks[1].ask(&first).unwrap().is_null());
}

fn a_rank_that_asks_again_fills_the_same_segment(cluster: &Cluster, job: &str) {
    let mut stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let first = launch.ranks[0].step("fill", 10).unwrap();
    assert_eq!(launch.ranks[0].step("fill", 10).unwrap(), first);
    launch.ranks[0].tell("write").unwrap();
    launch.ranks[0].tell("header").unwrap();
    // The header counts, whether the answer to *staged* arrived or not.
    let twice = launch.ranks[0].step("fill", 10).unwrap_err();
    twice.says("Exists", &["step 10", "saved already"]);
    launch.ranks[0].step("save", 20).unwrap();
    launch.ranks[1].step("save", 10).unwrap();
    launch.ranks[1].step("save", 20).unwrap();
    stage.kill();
    launch.kill();
    stage.restart();
    stage.until("both are committed", || stage.committed(job) == [10, 20]);
    assert_eq!(stage.load(job, Some(10)).unwrap().unwrap().step, 10);
}

fn a_rank_that_prepares_again_saves_on(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    launch.save(10);
    launch.plan.rows = 2 * ROWS;
    launch.prepare();
    for step in [20, 30, 40, 50] {
        launch.save(step);
    }
    launch.wait(50);
    assert_eq!(stage.committed(job), [10, 20, 30, 40, 50]);
    for step in [10, 50] {
        assert_eq!(stage.load(job, Some(step)).unwrap().unwrap().step, step);
    }
    // The memory of the first layout is freed.
    launch.save(60);
    launch.wait(60);
    launch.save(70);
    launch.wait(70);
    let parts = stage.files("segments").iter().filter(|name| name.ends_with(".seg")).count();
    assert_eq!(parts, 4, "{:?}", stage.files("segments"));
}

fn only_so_many_steps_are_kept(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let plan = Plan { keep: 2, ..Plan::new(job, 1) };
    let mut launch = Launch::ready(&stage, &plan);
    for step in [10, 20, 30, 40] {
        launch.save(step);
        launch.wait(step);
    }
    stage.until("the newest two are left", || stage.committed(job) == [30, 40]);
}

fn copies_that_differ_are_told(cluster: &Cluster, job: &str) {
    let stage = stage(cluster);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    for rank in 0..2 {
        let order = json!({ "do": "save", "step": 10, "sample": rank });
        launch.ranks[rank].ask(&order).unwrap();
    }
    launch.wait(10);
    for rank in &mut launch.ranks {
        let notices = rank.tell("notices").unwrap();
        let told = notices[0][1].as_str().unwrap();
        assert!(told.contains("weights differs between ranks 0 and 1"), "{told}");
    }
}
