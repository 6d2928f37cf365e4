//! The clients of a storm. They run the operations of the schedule, record the outcomes in the
//! ledger, and assert that operations do not fail when they must not.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rapidraid::client::{Client, ClientError, RestoreRequest, SaveOptions};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::id::{NodeId, PeerName, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::store::MemoryDisk;
use rapidraid::wire::calls::RepairOptions;

use super::schedule::{Deed, STEPS};
use super::weather::Report;
use world::ledger::{Ledger, Possible, Shards};
use world::{content, job, options, quiet, shard};

/// Time limit of an operation under any faults, in virtual time.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Number of tries to take a node off the list, and the wait before each.
const DEPARTURE_TRIES: usize = 6;
const DEPARTURE_WAIT: Duration = Duration::from_secs(15);

/// Number of lost nodes that an archived step survives, with any of the codes.
const N_MINUS_K: usize = 2;

pub type Shared = Arc<Mutex<Ledger>>;

/// Returns small shards. Now and then one has two stripes, and now and then one is empty. The names
/// distinguish versions that have no bytes.
fn shards(shape: u64) -> Shards {
    let draw = SeededEntropy::new(shape);
    let len = || match draw.below(8) {
        0 => 0,
        1..4 => 1 + draw.below(2000),
        4..7 => 1 + draw.below(60_000),
        _ => 128 * 1024 + draw.below(20_000),
    };
    let of = |index| (format!("{shape:x}-{index}"), content(len() as usize, shape ^ index));
    (0..1 + draw.below(2)).map(of).collect()
}

async fn patient<T>(deed: Deed, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("{deed:?} stands still"))
}

pub async fn work(client: Client, deeds: Vec<(u64, Deed)>, ledger: Shared, weather: Report) {
    for (wait_ms, deed) in deeds {
        tokio::time::sleep(Duration::from_millis(wait_ms)).await;
        patient(deed, act(&client, deed, &ledger, &weather)).await;
    }
}

async fn act(client: &Client, deed: Deed, ledger: &Shared, weather: &Report) {
    let job = job();
    let before = weather.lock().unwrap().clone();
    let calm = || before.is_calm() && weather.lock().unwrap().changes == before.changes;
    match deed {
        Deed::Save { step, replace, shape, patience_ms } => {
            let shards = shards(shape);
            let (version, free) = {
                let mut ledger = ledger.lock().unwrap();
                let free = replace || ledger.possible(step) == Possible::from([None]);
                // An abandoned save holds the step until its lease ends.
                let free = free && ledger.is_quiet(step);
                (ledger.save(step, shards.clone()), free)
            };
            let named = shards.iter().map(|(name, bytes)| shard(name, bytes)).collect();
            let replace = SaveOptions { replace };
            let saving = client.save(&job, Step(step), named, replace, quiet());
            let Some(ended) = within(patience_ms, saving).await else { return };
            ledger.lock().unwrap().saved(step, version, replace.replace, &ended);
            let is_open = ended.as_ref().is_err_and(|error| error.kind() == ErrorKind::Exists);
            let free = free && !(before.echoes && is_open);
            assert!(ended.is_ok() || !free || !calm(), "a save of step {step}: {ended:?}");
        }
        Deed::Remove { step } => {
            let begun = ledger.lock().unwrap().remove(step);
            let ended = client.remove_step(&job, Step(step)).await;
            ledger.lock().unwrap().removed(step, &begun, &ended);
            let there = !begun.before.contains(&None);
            // Another save or removal of the step runs at the same time.
            let is_raced = ended.as_ref().is_err_and(|error| {
                let is_other = error.kind() == ErrorKind::Fenced && begun.before.len() > 1;
                is_other || error.kind() == ErrorKind::NotFound
            });
            let is_well = ended.is_ok() || is_raced || !there;
            assert!(is_well || !calm(), "a removal of step {step}: {ended:?}");
        }
        Deed::Archive { step, plan } => {
            let version = ledger.lock().unwrap().certain(step);
            let options = options(plan);
            let ended = client.archive(&job, Some(Step(step)), options, &mut |_| ()).await;
            let mut ledger = ledger.lock().unwrap();
            let Some(version) = version.filter(|_| ledger.certain(step) == version) else { return };
            match ended {
                Ok(report) if report.undropped == 0 => ledger.archived(step, version),
                Err(error) if error.kind() != ErrorKind::Exists => {
                    assert!(!calm(), "an archiving of step {step}: {error}");
                }
                // The checks after the storm cover the rest of an incomplete archiving.
                _ => {}
            }
        }
        Deed::Repair { step, plan, gives_up } => {
            let version = ledger.lock().unwrap().certain(step);
            let options = RepairOptions { plan, ..RepairOptions::default() };
            let members = match gives_up {
                true => client.fetch_members().await.unwrap_or_default(),
                false => Vec::new(),
            };
            let nodes: Vec<NodeId> = members.iter().map(|node| NodeId::of(&node.name)).collect();
            let ended = client.repair(&job, Some(Step(step)), options, &nodes, &mut |_| ()).await;
            let mut ledger = ledger.lock().unwrap();
            let Some(_) = version.filter(|_| ledger.certain(step) == version) else { return };
            match ended {
                Ok(report) => {
                    assert!(report.notes.is_empty() || !calm(), "step {step}: {:?}", report.notes);
                }
                // An archiving of the step, or another repair, is under way.
                Err(error) if error.kind() == ErrorKind::Exists => {}
                Err(error) => assert!(!calm(), "a repair of step {step}: {error}"),
            }
        }
        Deed::Restore { step } => restore(client, step, ledger, weather).await,
    }
}

/// Takes a node off the list that does not run. Repairs all steps without it first. Returns whether
/// the node was taken off.
pub async fn take_off(client: &Client, machine: usize, by: Option<usize>) -> bool {
    let node = name(machine);
    for _ in 0..DEPARTURE_TRIES {
        tokio::time::sleep(DEPARTURE_WAIT).await;
        if let Some(by) = by.filter(|by| *by != machine) {
            let replaced = client.replace_node(&node, &name(by)).await;
            assert!(replaced.as_ref().err().is_none_or(is_told), "{node}: {replaced:?}");
        }
        for step in 1..=STEPS {
            let nodes = [NodeId::of(&node)];
            let options = RepairOptions::default();
            let repaired =
                client.repair(&job(), Some(Step(step)), options, &nodes, &mut |_| ()).await;
            assert!(repaired.as_ref().err().is_none_or(is_told), "{node}: {repaired:?}");
        }
        let removed = client.remove_node(&node).await;
        assert!(removed.as_ref().err().is_none_or(is_told), "{node}: {removed:?}");
        if removed.is_ok() {
            return true;
        }
    }
    false
}

fn name(machine: usize) -> PeerName {
    format!("node{machine:02}").parse().unwrap()
}

/// Returns whether the error is one that faults explain.
fn is_told(error: &ClientError) -> bool {
    !matches!(error.kind(), ErrorKind::Internal | ErrorKind::Denied | ErrorKind::Invalid)
}

/// Runs `work` for at most `patience_ms`, or to its end if that is 0. Returns its result, or `None`
/// if the time ran out and the work was dropped where it stood.
async fn within<T>(patience_ms: u64, work: impl Future<Output = T>) -> Option<T> {
    if patience_ms == 0 {
        return Some(work.await);
    }
    tokio::time::timeout(Duration::from_millis(patience_ms), work).await.ok()
}

/// Restores a step, and asserts that it has a version that the step had at some time since the
/// restore began. The restore may fail only if the step is missing, or if more faults are active
/// than the step is promised to survive.
async fn restore(client: &Client, step: u64, ledger: &Shared, weather: &Report) {
    let look = || {
        let mut ledger = ledger.lock().unwrap();
        (ledger.possible(step), ledger.versions(step), weather.lock().unwrap().clone())
    };
    let (before, versions, weather_before) = look();
    let out = Arc::new(MemoryDisk::new(64 << 20));
    let request = RestoreRequest { out: out.clone(), force: false, shard: None, range: None };
    let ended = client.restore(&job(), Some(Step(step)), request, quiet()).await;
    let (after, later, weather_after) = look();
    let error = match ended {
        Ok(_) => {
            let version = ledger.lock().unwrap().version_of(step, &out);
            let version = version.unwrap_or_else(|| panic!("step {step} came back as no version"));
            let known = before.contains(&Some(version)) || version >= versions;
            assert!(known, "step {step} came back as version {version}, it was {before:?}");
            return;
        }
        Err(error) => error,
    };
    assert!(is_told(&error), "step {step}: {error}");
    let mut ledger = ledger.lock().unwrap();
    if let Some(version) = ledger.certain(step).filter(|_| before == after && versions == later) {
        assert_ne!(error.kind(), ErrorKind::NotFound, "step {step} is there: {error}");
        let survived = if ledger.is_archived(step, version) { N_MINUS_K } else { 1 };
        let fair =
            weather_before.is_fair(survived) && weather_before.changes == weather_after.changes;
        assert!(!fair, "step {step} must come back: {error}");
    }
}
