//! What the cluster is asked to do while the power goes: one of everything, each after the other, whatever became of the one before.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rapidraid::client::{Client, SaveOptions};
use rapidraid::id::Step;
use rapidraid::wire::calls::PlanChoice;

use crate::world::ledger::{Ledger, Shards};
use crate::world::{content, job, options, quiet, shard};

pub const BLOCK: u64 = 64 << 10;
/// Of the code (6,4): one full stripe, and a short one.
const TWO_STRIPES: usize = 4 * BLOCK as usize + 9000;
/// No operation takes longer, even with nodes gone; in virtual time.
const PATIENCE: Duration = Duration::from_secs(1800);

/// The ledger, which outlives the scenario.
pub type Shared = Arc<Mutex<Ledger>>;

fn shards(of: &[(&str, usize)], seed: u64) -> Shards {
    of.iter().map(|&(name, len)| (name.to_owned(), content(len, seed))).collect()
}

async fn patient<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("{what} stands still"))
}

async fn save(client: &Client, ledger: &Shared, step: u64, replace: bool, shards: Shards) {
    let version = ledger.lock().unwrap().save(step, shards.clone());
    let named = shards.iter().map(|(name, bytes)| shard(name, bytes)).collect();
    let job = job();
    let saving = client.save(&job, Step(step), named, SaveOptions { replace }, quiet());
    let ended = patient("a save", saving).await;
    ledger.lock().unwrap().saved(step, version, replace, &ended);
}

async fn remove(client: &Client, ledger: &Shared, step: u64) {
    let before = ledger.lock().unwrap().remove(step);
    let ended = patient("a removal", client.remove(&job(), Step(step))).await;
    ledger.lock().unwrap().removed(step, &before, &ended);
}

async fn archive(client: &Client, step: u64) {
    let (job, mut quiet) = (job(), |_: &_| ());
    let archiving = client.archive(&job, Some(Step(step)), options(PlanChoice::Chain), &mut quiet);
    // What it leaves is finished by others, and looked at when the cluster has come to rest.
    let _ = patient("an archiving", archiving).await;
}

/// Save, archive and drop, replace, delete.
pub async fn play(client: Client, ledger: Shared) {
    save(&client, &ledger, 1, false, shards(&[("large", TWO_STRIPES), ("small", 700)], 1)).await;
    archive(&client, 1).await;
    save(&client, &ledger, 2, false, shards(&[("weights", 900), ("empty", 0)], 2)).await;
    save(&client, &ledger, 2, true, shards(&[("weights", 800)], 3)).await;
    archive(&client, 2).await;
    remove(&client, &ledger, 2).await;
}
