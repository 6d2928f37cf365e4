//! The operations that run while the fault comes. They run one after the other, whatever the
//! outcome of the previous one.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use rapidraid::client::{Client, ClientError, NewShard, SaveCode, SaveDecisions, SaveOptions};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::launch_order::LaunchOrder;
use rapidraid::id::{LaunchId, NodeId, SaveId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Address;
use rapidraid::wire::calls::{LabelChange, LaunchClaim, PlanChoice, RepairOptions};

use super::launches::{FIRST, Registry, SECOND, drop_jointly, save_jointly};
use world::ledger::{Ledger, Shards};
use world::{World, address, content, job, options, quiet, shard};

pub const BLOCK: u64 = 64 << 10;
/// Size of a shard that has a full and a short stripe with the code (6,4), in bytes.
const TWO_STRIPES: usize = 4 * BLOCK as usize + 9000;
/// Time limit of an operation, even with nodes down, in virtual time.
const PATIENCE: Duration = Duration::from_secs(1800);
/// The machine that has a new disk, or is down, before a scenario begins.
const REPLACED: usize = 3;
/// Maximum number of repairs until one succeeds.
const REPAIRS: usize = 20;
/// The time after which the removals of aborted saves are deferred: three lease periods.
const DEFERRED_BY: Duration = Duration::from_secs(21);
/// The node on which [`Scenario::Rebuild`] rebuilds the catalogue at first.
const REBUILT: usize = 3;
/// Maximum number of rebuilds until one succeeds.
const REBUILDS: usize = 20;

/// The ledger, which outlives the scenario.
pub type Shared = Arc<Mutex<Ledger>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// Save, archive and drop, replace, delete.
    Life,
    /// Archive when replicas must be made again: one machine has a new disk, and another block is
    /// corrupt.
    Mend,
    /// The catalogue server is down and its catalogue database lost: rebuild the catalogue on
    /// another node, then archive. The catalogue had a launch and a label.
    Rebuild,
    /// Repair an archived step of which one machine has lost everything with its disk.
    Repair,
    /// Repair an archived step of which one machine is down: its pieces are made on others.
    GiveUp,
    /// Two writers save a step together, and one of them drops the next step. Another launch takes
    /// over, saves a step and removes it.
    Joint,
    /// A job fails twice in one step while a machine is down, and then saves it: the removals of
    /// the aborted saves are deferred.
    Deferred,
}

pub const ALL: [Scenario; 7] = [
    Scenario::Life,
    Scenario::Mend,
    Scenario::Rebuild,
    Scenario::Repair,
    Scenario::GiveUp,
    Scenario::Joint,
    Scenario::Deferred,
];

fn shards(of: &[(&str, usize)], seed: u64) -> Shards {
    of.iter().map(|&(name, len)| (name.to_owned(), content(len, seed))).collect()
}

pub async fn patient<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("{what} stands still"))
}

/// Asserts that an error, if any, is one that faults of machines explain. Such an error never
/// reports a defect, a loss, or a fault of the client; it reports corruption only if data is
/// `rotten`.
pub fn assert_told<T>(what: &str, ended: &Result<T, ClientError>, rotten: bool) {
    use ErrorKind::{Corrupt, Denied, Internal, Invalid, Lost};
    if let Err(error) = ended {
        let untold = match error.kind() {
            Corrupt => !rotten,
            kind => matches!(kind, Denied | Internal | Invalid | Lost),
        };
        assert!(!untold, "{what}: {error}");
    }
}

/// The decisions of a save that belongs to a launch, or to none.
struct PlainSave {
    launch: Option<LaunchId>,
    shards: Vec<NewShard>,
    /// The seed of the ids, so that a run repeats exactly.
    seed: u64,
    /// Whether the client calls the save off when all shards are complete.
    is_called_off: bool,
}

#[async_trait]
impl SaveDecisions for PlainSave {
    fn assign_save_id(&self, attempt: u32) -> io::Result<SaveId> {
        let mut save = SaveId([0; 12]);
        SeededEntropy::new(self.seed + u64::from(attempt)).fill(&mut save.0);
        Ok(save)
    }

    fn launch(&self) -> Option<LaunchId> {
        self.launch
    }

    fn shards_for_code(&self, _code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        Ok(self.shards.clone())
    }

    async fn approve_commit(&self) -> Result<(), String> {
        match self.is_called_off {
            true => Err("the job fails".into()),
            false => Ok(()),
        }
    }
}

async fn save(
    client: &Client,
    ledger: &Shared,
    step: u64,
    replace: bool,
    shards: Shards,
) -> Result<(), ClientError> {
    save_of(None, client, ledger, step, replace, shards).await.map(drop)
}

async fn save_of(
    launch: Option<LaunchId>,
    client: &Client,
    ledger: &Shared,
    step: u64,
    replace: bool,
    shards: Shards,
) -> Result<SaveId, ClientError> {
    let version = ledger.lock().unwrap().save(step, shards.clone());
    let shards = shards.iter().map(|(name, bytes)| shard(name, bytes)).collect();
    let job = job();
    let seed = 100_000 * step + 1000 * version as u64;
    let decisions = Arc::new(PlainSave { launch, shards, seed, is_called_off: false });
    let options = SaveOptions { replace };
    let saving = client.save_with_decisions(&job, Step(step), options, decisions, quiet());
    let ended = patient("a save", saving).await;
    assert_told("a save", &ended, false);
    ledger.lock().unwrap().saved(step, version, replace, &ended);
    ended.map(|report| report.save)
}

/// Saves a step up to the commit, and then aborts the save.
async fn call_off(client: &Client, ledger: &Shared, step: u64, seed: u64) {
    let content = shards(&[("weights", 900)], seed);
    let version = ledger.lock().unwrap().save(step, content.clone());
    let shards = content.iter().map(|(name, bytes)| shard(name, bytes)).collect();
    let decisions = Arc::new(PlainSave { launch: None, shards, seed, is_called_off: true });
    let (job, options) = (job(), SaveOptions::default());
    let saving = client.save_with_decisions(&job, Step(step), options, decisions, quiet());
    let ended = patient("a save that is called off", saving).await;
    assert!(ended.is_err());
    // The error of a save that is called off has the kind of corruption.
    assert_told("a save that is called off", &ended, true);
    ledger.lock().unwrap().saved(step, version, false, &ended);
}

async fn label(client: &Client, step: u64) -> Result<(), ClientError> {
    let (job, label) = (job(), "trusted".parse().unwrap());
    let labelling = client.label_step(job.at(Step(step)), &label, LabelChange::Add);
    let ended = patient("a label", labelling).await;
    assert_told("a label", &ended, false);
    ended.map(drop)
}

async fn remove(client: &Client, ledger: &Shared, step: u64) -> Result<(), ClientError> {
    let before = ledger.lock().unwrap().remove(step);
    let ended = patient("a removal", client.remove_step(&job(), Step(step))).await;
    assert_told("a removal", &ended, false);
    ledger.lock().unwrap().removed(step, &before, &ended);
    ended.map(drop)
}

async fn remove_for_launch(
    launch: LaunchId,
    client: &Client,
    ledger: &Shared,
    step: u64,
    save: SaveId,
) -> Result<(), ClientError> {
    let before = ledger.lock().unwrap().remove(step);
    let job = job();
    let removing = client.remove_launch_step(job.at(Step(step)), save, launch);
    let ended = patient("a removal of a launch", removing).await;
    assert_told("a removal of a launch", &ended, false);
    ledger.lock().unwrap().removed(step, &before, &ended);
    ended.map(drop)
}

async fn archive(client: &Client, step: u64, rotten: bool) {
    let (job, mut quiet) = (job(), |_: &_| ());
    let archiving = client.archive(&job, Some(Step(step)), options(PlanChoice::Chain), &mut quiet);
    // Daemons finish an incomplete archiving later, and the checks at rest cover it.
    assert_told("an archiving", &patient("an archiving", archiving).await, rotten);
}

fn id_of(machine: usize) -> NodeId {
    NodeId::of(&format!("node{machine:02}").parse().unwrap())
}

/// Repairs step 1. Returns whether nothing is missing any more.
async fn repair(client: &Client, given_up: &[usize]) -> bool {
    let given_up: Vec<NodeId> = given_up.iter().map(|machine| id_of(*machine)).collect();
    let (job, mut ignored) = (job(), |_: &_| ());
    let options = RepairOptions::default();
    let repairing = client.repair(&job, Some(Step(1)), options, &given_up, &mut ignored);
    let ended = patient("a repair", repairing).await;
    assert_told("a repair", &ended, false);
    ended.is_ok_and(|report| report.notes.is_empty() && report.summary.unrepaired == 0)
}

async fn rebuild(client: &Client, on: usize) {
    let at = Address { host_port: address(on), node: None };
    let ended = patient("a rebuild", client.rebuild_catalogue(Some(&at))).await;
    assert_told("a rebuild", &ended, false);
    if let Ok(rebuilt) = ended {
        let lost = (rebuilt.incomplete.is_empty(), rebuilt.damaged.is_empty());
        assert_eq!(lost, (true, true), "{rebuilt:?}");
    }
}

/// Checks that launches and labels are lost with the catalogue: the launch that committed step 2
/// must register again, a launch that it has overtaken is refused, and retention is paused.
async fn assert_labels_and_launches_lost(client: &Client, ledger: &Shared) {
    let job = job();
    assert_eq!(client.fetch_launch_order(&job).await.unwrap(), LaunchOrder::default());
    assert!(client.list_labels(&job).await.unwrap().is_empty(), "labels without their catalogue");
    assert!(client.is_retention_paused().await.unwrap(), "steps may go whose labels are lost");
    let third = |seed| shards(&[(format!("index/{FIRST}").as_str(), 700)], seed);
    let refused = save_of(Some(FIRST), client, ledger, 3, false, third(3)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    let again = LaunchClaim::Again;
    let refused = client.register_launch(&job, SECOND, None, again).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    client.register_launch(&job, FIRST, None, again).await.unwrap();
    save_of(Some(FIRST), client, ledger, 3, false, third(4)).await.unwrap();
    label(client, 1).await.unwrap();
    let labelled: Vec<Step> = client.list_labels(&job).await.unwrap().into_keys().collect();
    assert_eq!(labelled, [Step(1)]);
}

async fn until_repaired(client: &Client, given_up: &[usize], lease: Duration) {
    for _ in 0..REPAIRS {
        if repair(client, given_up).await {
            return;
        }
        tokio::time::sleep(3 * lease).await;
    }
    panic!("no repair makes everything again");
}

/// Plays [`Scenario::Joint`].
async fn play_jointly(client: &Client, ledger: &Shared, registry: &Registry, fair: bool) {
    let registered = registry.register(client, FIRST, None, None).await;
    assert!(!fair || registered.is_ok(), "a registration: {registered:?}");
    save_jointly(client, ledger, FIRST, 1, [900, 1700], fair).await;
    drop_jointly(client, ledger, FIRST, 2, fair).await;
    // The open save of step 2 is one of the first launch. The second call lowers the resume point.
    for resumed in [Some(Step(1)), None] {
        let registered = registry.register(client, SECOND, resumed, Some(FIRST)).await;
        assert!(!fair || registered.is_ok(), "a registration: {registered:?}");
        if fair {
            assert_ended(client, resumed).await;
        }
    }
    let third = shards(&[("weights", 800)], 3);
    let saved = save_of(Some(SECOND), client, ledger, 3, false, third).await;
    assert!(!fair || saved.is_ok(), "a save of a launch: {saved:?}");
    registry.note_label(1, &label(client, 1).await);
    if let Ok(save) = saved {
        let ended = remove_for_launch(SECOND, client, ledger, 3, save).await;
        assert!(!fair || ended.is_ok(), "a removal of a launch: {ended:?}");
    }
}

/// Asserts that no save of a later step than the resume point is open: the registration that has
/// returned has ended them all. A save whose gateway has died before it recorded the launch may
/// stay open, so this holds only without such a fault.
async fn assert_ended(client: &Client, resumed: Option<Step>) {
    let open = client.list_open_saves(Some(&job())).await.unwrap();
    let is_later = |step: Step| resumed.is_none_or(|resumed| step > resumed);
    assert!(!open.iter().any(|view| is_later(view.step)), "{open:?}");
}

impl Scenario {
    /// Returns the addresses of the nodes that the scenario's client asks.
    pub fn seeds(self) -> Vec<String> {
        let seeds = match self {
            Scenario::Life | Scenario::Mend | Scenario::Joint => [2, 3, 0],
            Scenario::Repair | Scenario::GiveUp | Scenario::Deferred => [2, 4, 0],
            Scenario::Rebuild => [2, 3, 4],
        };
        seeds.map(address).to_vec()
    }

    /// Creates the state in which the scenario begins. No fault is active yet.
    pub async fn prepare(self, world: &mut World, client: &Client, ledger: &Shared) {
        match self {
            Scenario::Life | Scenario::Joint => {}
            Scenario::Mend => {
                let large = shards(&[("large", TWO_STRIPES)], 1);
                save(client, ledger, 1, false, large).await.unwrap();
                world.kill(REPLACED).await;
                world.replace(REPLACED);
                world.boot(REPLACED);
                world.until_live(world.machines.len() - 1).await;
                let files = world.files(|path| path.ends_with(".rep"));
                let twin = |at: usize| files[at + 1..].iter().any(|file| file.1 == files[at].1);
                let at = (0..files.len()).find(|&at| twin(at)).expect("no block has both replicas");
                let (machine, path) = &files[at];
                world.machines[*machine].disk.flip_bit(path, 8 * 1000).unwrap();
            }
            Scenario::Deferred => {
                world.kill(REPLACED).await;
                world.until_live(world.machines.len() - 2).await;
            }
            Scenario::Repair | Scenario::GiveUp => {
                let large = shards(&[("large", TWO_STRIPES)], 1);
                save(client, ledger, 1, false, large).await.unwrap();
                archive(client, 1, false).await;
                world.kill(REPLACED).await;
                if self == Scenario::Repair {
                    world.replace(REPLACED);
                    world.boot(REPLACED);
                    world.until_live(world.machines.len() - 1).await;
                } else {
                    world.until_live(world.machines.len() - 2).await;
                }
            }
            Scenario::Rebuild => {
                world.until_acquainted().await;
                let large = shards(&[("large", TWO_STRIPES)], 1);
                save(client, ledger, 1, false, large).await.unwrap();
                archive(client, 1, false).await;
                let claim = LaunchClaim::After { newest: None };
                client.register_launch(&job(), FIRST, None, claim).await.unwrap();
                let small = shards(&[(format!("index/{FIRST}").as_str(), 900)], 2);
                save_of(Some(FIRST), client, ledger, 2, false, small).await.unwrap();
                label(client, 1).await.unwrap();
                world.kill(0).await;
                world.machines[0].catalogue.set(None);
            }
        }
    }

    /// Plays the scenario. If `fair`, no registration, no save and no removal may fail.
    pub async fn play(self, client: Client, ledger: Shared, registry: Registry, fair: bool) {
        let ledger = &ledger;
        let save = async |client, ledger, step, replace, shards| {
            let ended = save(client, ledger, step, replace, shards).await;
            assert!(!fair || ended.is_ok(), "a save of step {step}: {ended:?}");
        };
        match self {
            Scenario::Life => {
                let first = shards(&[("large", TWO_STRIPES), ("small", 700)], 1);
                save(&client, ledger, 1, false, first).await;
                archive(&client, 1, false).await;
                let second = shards(&[("weights", 900), ("empty", 0)], 2);
                let registered = registry.register(&client, FIRST, None, None).await;
                assert!(!fair || registered.is_ok(), "a registration: {registered:?}");
                let launch = registered.is_ok().then_some(FIRST);
                let ended = save_of(launch, &client, ledger, 2, false, second).await;
                assert!(!fair || ended.is_ok(), "a save of a launch: {ended:?}");
                // The label goes with the save that is replaced.
                let _ = label(&client, 2).await;
                save(&client, ledger, 2, true, shards(&[("weights", 800)], 3)).await;
                archive(&client, 2, false).await;
                let ended = remove(&client, ledger, 2).await;
                assert!(!fair || ended.is_ok(), "a removal: {ended:?}");
            }
            Scenario::Joint => play_jointly(&client, ledger, &registry, fair).await,
            Scenario::Deferred => {
                for seed in [1, 2] {
                    call_off(&client, ledger, 1, seed).await;
                }
                tokio::time::sleep(DEFERRED_BY).await;
                save(&client, ledger, 1, false, shards(&[("weights", 800)], 3)).await;
            }
            Scenario::Mend => archive(&client, 1, true).await,
            Scenario::Repair => drop(repair(&client, &[]).await),
            Scenario::GiveUp => drop(repair(&client, &[REPLACED]).await),
            Scenario::Rebuild => {
                rebuild(&client, REBUILT).await;
                archive(&client, 2, false).await;
            }
        }
    }

    /// Does what an operator must do by hand after the fault has ended: repeats the repair, or
    /// rebuilds the catalogue and starts its former server.
    pub async fn mend(self, world: &mut World, client: &Client) {
        match self {
            Scenario::Life | Scenario::Mend | Scenario::Joint => return,
            Scenario::Repair => return until_repaired(client, &[], world.lease).await,
            Scenario::GiveUp => {
                until_repaired(client, &[REPLACED], world.lease).await;
                return world.boot(REPLACED);
            }
            Scenario::Deferred => return world.boot(REPLACED),
            Scenario::Rebuild => {}
        }
        for attempt in 0..REBUILDS {
            tokio::time::sleep(3 * world.lease).await;
            if world.serving().len() == 1 {
                world.boot(0);
                return;
            }
            rebuild(client, 1 + attempt % (world.machines.len() - 1)).await;
        }
        panic!("no rebuild brings the catalogue back; these serve: {:?}", world.serving());
    }

    /// Checks what the ledger does not know, when all nodes are live again.
    pub async fn check(self, world: &World, client: &Client, ledger: &Shared) {
        if self == Scenario::Rebuild {
            // The catalogue server changes nothing until it has heard from the other nodes again.
            tokio::time::sleep(world.lease).await;
            assert_labels_and_launches_lost(client, ledger).await;
        }
    }
}
