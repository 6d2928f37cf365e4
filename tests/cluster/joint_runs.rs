//! Seeded runs of joint saves: writers die, pause, come back and give up, nodes lose power, the
//! catalogue moves, answers are late, and a second launch begins while writers of the first one still
//! save. Each step is whole and of one launch, no step of the first launch is committed after the
//! second has begun beyond it, and nothing is left that no record explains.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::client::{ClientError, JointDecisions, JointWriter, NewShard, SaveCode};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::records::ShardRoot;
use rapidraid::id::{LaunchId, SaveId, ShardName, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Address;
use rapidraid::pipeline::upload::ShardSource;
use rapidraid::wire::calls::LaunchClaim;
use tokio::task::JoinHandle;

use world::runs::{number, play, play_all};
use world::{World, address, content, job, quiet, read_file, restore};

/// Number of seeds in the test suite. `RAPIDRAID_JOINT_SEEDS=2000` runs more.
const SEEDS: u64 = 20;
const FIRST: LaunchId = LaunchId([1; 16]);
const SECOND: LaunchId = LaunchId([2; 16]);
const NODES: usize = 7;
const BLOCK: u64 = 64 << 10;
const STEPS: u64 = 2;
const STALL: Duration = Duration::from_secs(40);
/// Number of times that a writer tries to save a step.
const TRIES: u32 = 4;
const TRY_PAUSE: Duration = Duration::from_millis(700);
/// The time by which every run must be at rest.
const REST: Duration = Duration::from_secs(1_800);

/// The saves that writers have reported as committed, by step.
type Reports = Arc<Mutex<BTreeMap<u64, Vec<(LaunchId, SaveId)>>>>;

/// The committed steps right after the second launch had registered.
type CommittedBefore = Arc<Mutex<Option<Vec<u64>>>>;

/// The part of a step that one writer of a launch has.
#[derive(Clone)]
struct Part {
    launch: LaunchId,
    writer: u32,
    writers: u32,
    step: u64,
    seed: u64,
    /// The launch that was the newest when this one began, and the step that this one loaded.
    begun: (Option<LaunchId>, Option<Step>),
}

impl Part {
    /// Returns the contents of the shards, which follow from the seed.
    fn shards(&self) -> Vec<Bytes> {
        let seed = self.seed * 10_000 + u64::from(self.launch.0[0]) * 1_000 + self.step * 100;
        let random = SeededEntropy::new(seed + u64::from(self.writer));
        let count = 1 + random.below(2);
        let len = |shard| random.below(3 * BLOCK) as usize + shard as usize;
        (0..count).map(|shard| content(len(shard), seed + shard)).collect()
    }
}

#[async_trait]
impl JointDecisions for Part {
    fn note_save(&self, _save: SaveId) -> io::Result<()> {
        Ok(())
    }

    fn cut_shards(&self, _code: SaveCode) -> Result<Vec<Arc<dyn ShardSource>>, ClientError> {
        let source = |bytes| Arc::new(bytes) as Arc<dyn ShardSource>;
        Ok(self.shards().into_iter().map(source).collect())
    }

    fn name_shard(&self, number: u32) -> Result<ShardName, ClientError> {
        Ok(format!("data/{}/{number}", self.launch).parse().unwrap())
    }

    async fn approve_shards(&self, _count: &(dyn Fn() + Send + Sync)) -> Result<(), String> {
        Ok(())
    }

    fn ensure_wanted(&self) -> Result<(), String> {
        Ok(())
    }

    fn note_missing(&self, _writers: &[u32], _unchanged: Duration) {}

    fn note_silent(&self, _writers: &[u32]) {}

    async fn build_index(&self, data: Vec<ShardRoot>) -> Result<NewShard, ClientError> {
        let name = format!("index/{}", self.launch).parse().unwrap();
        let lines = data.iter().map(|root| format!("{} {:?}\n", root.name, root.stripes_root));
        let bytes: Bytes = lines.collect::<String>().into();
        Ok(NewShard { name, source: Arc::new(bytes) })
    }
}

/// Lets a writer save its part, again and again, until it is committed or given up.
fn start(
    world: &World,
    gateway: usize,
    part: Part,
    reports: &Reports,
    before: &CommittedBefore,
) -> JoinHandle<()> {
    let (client, reports, before) = (world.client_of(gateway), reports.clone(), before.clone());
    tokio::spawn(async move {
        let Part { launch, writer, writers, step, .. } = part;
        let joint = JointWriter { launch, writer, writers, stall: STALL };
        let (newest, resumed) = part.begun;
        for _ in 0..TRIES {
            let claim = LaunchClaim::After { newest };
            match client.register_launch(&job(), launch, resumed, claim).await {
                Ok(()) if launch == SECOND && before.lock().unwrap().is_none() => {
                    if let Ok(steps) = client.list_steps(Some(&job())).await {
                        let steps = steps.into_iter().map(|view| view.step.0).collect();
                        before.lock().unwrap().get_or_insert(steps);
                    }
                }
                Ok(()) => {}
                // An older launch may still save the steps that its successor resumed from.
                Err(error) if error.kind() == ErrorKind::Fenced => {}
                Err(_) => {
                    tokio::time::sleep(TRY_PAUSE).await;
                    continue;
                }
            }
            let decisions = Arc::new(part.clone());
            let step_ref = job();
            let saved =
                client.save_jointly(step_ref.at(Step(step)), joint, None, decisions, quiet()).await;
            match saved {
                Ok(save) => {
                    reports.lock().unwrap().entry(step).or_default().push((launch, save));
                    return;
                }
                Err(ClientError::WriterDropped { .. }) => return,
                Err(error) if error.kind() == ErrorKind::Invalid => panic!("{error}"),
                Err(_) => tokio::time::sleep(TRY_PAUSE).await,
            }
        }
    })
}

struct Run {
    world: World,
    random: SeededEntropy,
    parts: Vec<Part>,
    tasks: Vec<Option<JoinHandle<()>>>,
    reports: Reports,
    before: CommittedBefore,
    /// The machine that has no power.
    down: Option<usize>,
}

impl Run {
    fn gateway(&self) -> usize {
        self.random.below(NODES as u64) as usize
    }

    fn start(&mut self, at: usize) {
        let part = self.parts[at].clone();
        let gateway = self.gateway();
        self.tasks[at] = Some(start(&self.world, gateway, part, &self.reports, &self.before));
    }

    /// Adds the parts of a launch that begins now, and starts most of its writers.
    async fn begin_launch(&mut self, launch: LaunchId) {
        let client = self.world.client_of(self.gateway());
        let Ok(steps) = client.list_steps(Some(&job())).await else { return };
        let Ok(order) = client.fetch_launch_order(&job()).await else { return };
        let loaded = steps.last().map(|view| view.step);
        let begun = (order.newest().map(|newest| newest.launch), loaded);
        let seed = self.world.seed;
        // A few runs have as many writers as a large job has hosts.
        let writers = if seed % 25 == 7 { 64 } else { 2 + self.random.below(4) as u32 };
        let first = self.parts.len();
        for step in 1 + loaded.map_or(0, |step| step.0)..=STEPS {
            let part = |writer| Part { launch, writer, writers, step, seed, begun };
            self.parts.extend((0..writers).map(part));
        }
        self.tasks.resize_with(self.parts.len(), || None);
        for at in first..self.parts.len() {
            if self.random.below(8) > 0 {
                self.start(at);
            }
            tokio::time::sleep(Duration::from_millis(self.random.below(20))).await;
        }
    }

    /// Does one random thing: kills, starts or drops a writer, cuts or restores power, or moves the
    /// catalogue.
    async fn happen(&mut self) {
        let at = self.random.below(self.parts.len() as u64) as usize;
        match self.random.below(8) {
            0..=2 => {
                if let Some(task) = self.tasks[at].take() {
                    task.abort();
                }
            }
            3 | 4 => {
                if self.tasks[at].is_none() {
                    self.start(at);
                }
            }
            5 => {
                let Part { launch, writer, writers, step, .. } = self.parts[at];
                let joint = JointWriter { launch, writer, writers, stall: STALL };
                // A writer that has given up does not come back.
                if let Some(task) = self.tasks[at].take() {
                    task.abort();
                    let client = self.world.client_of(self.gateway());
                    let _ = client
                        .report_step_dropped(job().at(Step(step)), joint, "a seed says so")
                        .await;
                    self.tasks[at] = Some(tokio::spawn(async {}));
                }
            }
            6 => match self.down.take() {
                Some(index) => {
                    self.world.kill(index).await;
                    self.world.boot(index);
                }
                None => {
                    let index = self.gateway();
                    self.world.cut_power(index);
                    self.down = Some(index);
                }
            },
            _ => {
                let to = Address { host_port: address(self.gateway()), node: None };
                let client = self.world.client();
                let moved = client.move_catalogue(&to);
                let _ = tokio::time::timeout(Duration::from_secs(20), moved).await;
            }
        }
    }

    /// Checks that the step is not there, or is whole and of the launch that reported it. Returns
    /// whether it is there.
    async fn check_step(&self, step: u64) -> bool {
        let reports = self.reports.lock().unwrap().get(&step).cloned().unwrap_or_default();
        let committed = self.world.committed(step);
        let Some(shards) = committed else {
            assert!(reports.is_empty(), "step {step} was reported and is gone: {reports:?}");
            return false;
        };
        let roots: Vec<ShardRoot> = shards.into_iter().map(|(root, _)| root).collect();
        let (index, data) = roots.split_last().unwrap();
        let launch: LaunchId = index.name.as_str().strip_prefix("index/").unwrap().parse().unwrap();
        for (of, save) in reports {
            assert_eq!((of, save), (launch, index.save), "step {step}");
        }
        let second = self.parts.iter().find(|part| part.launch == SECOND);
        if let (Some(second), Some(before)) = (second, &*self.before.lock().unwrap())
            && launch == FIRST
            && second.begun.1.is_none_or(|resumed| step > resumed.0)
        {
            assert!(before.contains(&step), "step {step} was committed behind the second launch");
        }
        let parts = self.parts.iter().filter(|part| part.launch == launch && part.step == step);
        let contents: Vec<Bytes> = parts.flat_map(Part::shards).collect();
        assert_eq!(contents.len(), data.len(), "step {step}");
        let (out, _) = restore(&self.world.client(), step).await.unwrap();
        for (root, bytes) in data.iter().zip(contents) {
            assert!(read_file(&*out, root.name.as_str()) == bytes, "step {step}, {}", root.name);
        }
        true
    }
}

/// Plays a run. Returns the number of its steps that are committed.
async fn run(seed: u64) -> u64 {
    let world = World::simulated(NODES, &[(5, 3), (4, 2)], BLOCK, seed).await;
    let random = SeededEntropy::new(seed);
    world.set_lag(random.below(30));
    let (parts, tasks) = (Vec::new(), Vec::new());
    let (reports, before) = (Reports::default(), CommittedBefore::default());
    let mut run = Run { world, random, parts, tasks, reports, before, down: None };
    run.begin_launch(FIRST).await;
    let events = run.random.below(14);
    // In half of the runs there is no second launch.
    let begins_at = run.random.below(2 * events + 1);
    for event in 0..=events {
        if event == begins_at {
            run.begin_launch(SECOND).await;
        }
        if event < events {
            let pause = if run.random.below(4) == 0 { 15_000 } else { 400 };
            tokio::time::sleep(Duration::from_millis(run.random.below(pause))).await;
            run.happen().await;
        }
    }
    if let Some(index) = run.down.take() {
        run.world.kill(index).await;
        run.world.boot(index);
    }
    let ended = async {
        for task in run.tasks.iter_mut().filter_map(Option::take) {
            if let Err(error) = task.await {
                assert!(error.is_cancelled(), "{error}");
            }
        }
        while !run.world.unfinished(false).is_empty() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    if tokio::time::timeout(REST, ended).await.is_err() {
        panic!("not at rest: {:?}", run.world.unfinished(false));
    }
    let mut committed = 0;
    for step in 1..=STEPS {
        committed += u64::from(run.check_step(step).await);
    }
    run.world.assert_swept(&run.world.client()).await;
    committed
}

#[test]
fn each_step_is_whole_and_of_one_launch() {
    let first = number("RAPIDRAID_JOINT_FIRST").unwrap_or(1);
    let seeds = number("RAPIDRAID_JOINT_SEEDS").unwrap_or(SEEDS);
    let all: Vec<u64> = (first..first + seeds).collect();
    let committed = AtomicU64::new(0);
    play_all(&all, |seed| {
        let steps = play(run(seed))?;
        committed.fetch_add(steps, Ordering::Relaxed);
        Ok(())
    });
    let (committed, steps) = (committed.into_inner(), seeds * STEPS);
    println!("{committed} of {steps} steps were committed");
    let shows_little = seeds >= SEEDS && (committed < steps / 4 || committed == steps);
    assert!(!shows_little, "{committed} of {steps} committed: the runs show too little");
}
