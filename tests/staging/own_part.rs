//! Two hosts load a step, by ranges or as a whole: each takes its own part from memory as long as it
//! is there and intact, and the rest from the cluster.

use rapidraid::entropy::{Entropy, SystemEntropy};
use rapidraid::id::LaunchId;
use rapidraid::trainer::segment::HEADER_BYTES;
use serde_json::{Value, json};

use crate::hosts::{Joint, RANKS_PER_HOST, by_rank};
use crate::launch::{Launch, Plan, Told, Trainer};
use crate::machine::Cluster;
use crate::stage::Stage;
use crate::{Cell, cells};

pub const CELLS: &[Cell] = cells![
    each_host_reads_only_the_part_of_the_other,
    a_damaged_part_is_read_from_the_cluster,
    a_part_that_another_rank_has_given_up_is_read_from_the_cluster,
    a_part_that_is_not_the_committed_one_is_not_used,
    the_own_part_of_a_whole_step_is_copied_from_memory,
];

/// Two hosts that have committed step 10, and whose trainers have ended.
struct Play<'a> {
    job: &'a str,
    stages: Vec<Stage<'a>>,
    fills: Value,
}

/// Returns the bytes of a load that are read from the cluster, as a share of all.
fn share_read(found: &Value) -> f64 {
    found["read"][1].as_f64().unwrap() / found["read"][0].as_f64().unwrap()
}

impl<'a> Play<'a> {
    fn begin(cluster: &'a Cluster, job: &'a str) -> Self {
        Self::begin_with(cluster, Plan::new(job, RANKS_PER_HOST), job)
    }

    fn begin_with(cluster: &'a Cluster, plan: Plan, job: &'a str) -> Self {
        let stages: Vec<_> = (0..2).map(|_| Stage::start(cluster, "64MiB", &[])).collect();
        let all: Vec<_> = stages.iter().collect();
        let mut joint = Joint::start(&all, &plan);
        joint.prepare(None);
        let fills = by_rank(&joint.save(0..2, 10));
        joint.wait(10);
        joint.parts.iter_mut().for_each(Launch::kill);
        Self { job, stages, fills }
    }

    /// Returns an order about step 10, by ranges, of a new launch.
    fn order(&self, what: &str) -> Value {
        let launch = LaunchId(SystemEntropy.id()).to_string();
        json!({
            "do": what, "job": self.job, "step": 10, "from_cluster": true, "table_first": true,
            "launch": launch, "number": 1,
        })
    }

    /// Changes a byte of each segment of a host. Some segments may not have the step.
    fn damage(&self, host: usize) {
        let stage = &self.stages[host];
        let names = stage.files("segments");
        let segments = names.iter().filter_map(|name| name.strip_suffix(".seg"));
        segments.for_each(|id| stage.flip(&stage.segment(id), HEADER_BYTES + 100));
    }

    /// Loads step 10 by ranges on a host, and checks every byte.
    fn load(&self, host: usize) -> Told {
        self.load_by(&self.order("load"), host)
    }

    /// Loads the whole step 10 on a host, and checks every byte.
    fn load_whole(&self, host: usize) -> Told {
        let mut order = self.order("load");
        order["table_first"] = json!(false);
        self.load_by(&order, host)
    }

    fn load_by(&self, order: &Value, host: usize) -> Told {
        let found = Trainer::start(&self.stages[host].dir(), None).ask(order)?;
        assert_eq!((&found["step"], &found["fills"]), (&json!(10), &self.fills));
        Ok(found)
    }

    /// Asserts that a host reads its part from memory.
    fn assert_reads_the_other_half(&self, host: usize) {
        let share = share_read(&self.load(host).unwrap());
        assert!((0.4..0.7).contains(&share), "host {host} reads {share} from the cluster");
    }

    fn assert_reads_all(&self, host: usize) {
        let share = share_read(&self.load(host).unwrap());
        assert!(share >= 1.0, "host {host} reads {share} from the cluster");
    }
}

fn each_host_reads_only_the_part_of_the_other(cluster: &Cluster, job: &str) {
    let mut play = Play::begin(cluster, job);
    (0..2).for_each(|host| play.assert_reads_the_other_half(host));
    // The next daemon knows it, too.
    play.stages[0].restart();
    play.assert_reads_the_other_half(0);
    play.stages[0].forget(job);
    play.assert_reads_all(0);
    play.assert_reads_the_other_half(1);
    play.stages.iter().for_each(Stage::assert_sound);
}

fn a_damaged_part_is_read_from_the_cluster(cluster: &Cluster, job: &str) {
    let play = Play::begin(cluster, job);
    play.damage(0);
    play.load(0).unwrap_err().says("Corrupt", &["damaged"]);
    play.assert_reads_all(0);
    play.assert_reads_the_other_half(1);
    play.stages.iter().for_each(Stage::assert_sound);
}

/// One rank has opened the step when another one finds that the part is damaged.
fn a_part_that_another_rank_has_given_up_is_read_from_the_cluster(cluster: &Cluster, job: &str) {
    let play = Play::begin(cluster, job);
    let mut first = Trainer::start(&play.stages[0].dir(), None);
    assert_eq!(first.ask(&play.order("open")).unwrap(), 10);
    play.damage(0);
    play.load(0).unwrap_err().says("Corrupt", &["damaged"]);
    // The first rank still holds the segments.
    play.assert_reads_all(0);
    let check = json!({ "do": "check", "from_cluster": true });
    first.ask(&check).unwrap_err().says("Unavailable", &["replaced in memory"]);
    let found = first.ask(&play.order("load")).unwrap();
    assert!(share_read(&found) >= 1.0, "{found}");
    play.stages.iter().for_each(Stage::assert_sound);
}

/// An operator removes the step, and the next launch saves it with other content. None of its ranks
/// has loaded, so that no daemon has heard of the removal before.
fn a_part_that_is_not_the_committed_one_is_not_used(cluster: &Cluster, job: &str) {
    let mut play = Play::begin(cluster, job);
    cluster.run(&format!("rm {job}/10")).ok();
    let all: Vec<_> = play.stages.iter().collect();
    let mut joint = Joint::start(&all[..], &Plan::new(job, RANKS_PER_HOST));
    joint.prepare(None);
    play.fills = by_rank(&joint.save(0..2, 10));
    joint.wait(10);
    joint.parts.iter_mut().for_each(Launch::kill);
    (0..2).for_each(|host| play.assert_reads_the_other_half(host));
    play.stages.iter().for_each(Stage::assert_sound);
}

fn the_own_part_of_a_whole_step_is_copied_from_memory(cluster: &Cluster, job: &str) {
    // Each rank has 5 MiB of the shared tensor.
    let plan = Plan { rows: 5 << 14, ..Plan::new(job, RANKS_PER_HOST) };
    let mut play = Play::begin_with(cluster, plan, job);
    play.load_whole(1).unwrap();
    play.damage(0);
    // A reader that belongs to no launch leaves memory to the trainers.
    let mut order = play.order("load");
    (order["table_first"], order["launch"], order["number"]) =
        (json!(false), Value::Null, Value::Null);
    play.load_by(&order, 0).unwrap();
    play.stages[0].restart();
    // Damage shows that the bytes come from memory. The next load reads them from the cluster.
    play.load_whole(0).unwrap_err().says("Corrupt", &["damaged"]);
    play.load_whole(0).unwrap();
    play.stages.iter().for_each(Stage::assert_sound);
}
