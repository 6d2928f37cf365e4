//! The launches of a scenario: their registrations, their joint saves, and what the catalogue must
//! say about them after a fault.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::client::{Client, ClientError, JointDecisions, JointWriter, NewShard, SaveCode};
use rapidraid::format::records::ShardRoot;
use rapidraid::id::{LaunchId, SaveId, ShardName, Step};
use rapidraid::pipeline::upload::ShardSource;
use rapidraid::wire::calls::LaunchClaim;

use super::scenario::{Shared, assert_told, patient};
use world::ledger::Shards;
use world::{content, job, quiet};

pub const FIRST: LaunchId = LaunchId([0xa; 16]);
pub const SECOND: LaunchId = LaunchId([0xb; 16]);
/// How long a writer waits for another one that makes no progress.
const STALL: Duration = Duration::from_secs(60);
/// Number of writers of a joint save.
const WRITERS: u32 = 2;
/// Size of the index of a joint save, in bytes.
const INDEX_LEN: usize = 500;
/// Time within which the catalogue must answer after the end of a fault.
const SOON: Duration = Duration::from_secs(60);

/// The registrations and labels of a scenario, and which of them were confirmed.
#[derive(Clone, Default)]
pub struct Registry(Arc<Mutex<Entries>>);

#[derive(Clone, Default)]
struct Entries {
    /// The registrations so far, in order: the launch and its resume point.
    begun: Vec<(LaunchId, Option<Step>)>,
    /// Number of registrations up to the last one that was confirmed.
    confirmed: usize,
    /// The steps with a label that was confirmed. Their saves stay committed.
    labelled: Vec<Step>,
}

impl Registry {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap()
    }

    /// Registers a launch that has loaded the step `resumed` and follows launch `newest`.
    pub async fn register(
        &self,
        client: &Client,
        launch: LaunchId,
        resumed: Option<Step>,
        newest: Option<LaunchId>,
    ) -> Result<(), ClientError> {
        let number = {
            let mut entries = self.entries();
            entries.begun.push((launch, resumed));
            entries.begun.len()
        };
        let (job, claim) = (job(), LaunchClaim::After { newest });
        let registering = client.register_launch(&job, launch, resumed, claim);
        let ended = patient("a registration", registering).await;
        assert_told("a registration", &ended, false);
        if ended.is_ok() {
            self.entries().confirmed = number;
        }
        ended
    }

    /// Notes the outcome of labelling a step whose save stays committed.
    pub fn note_label(&self, step: u64, ended: &Result<(), ClientError>) {
        if ended.is_ok() {
            self.entries().labelled.push(Step(step));
        }
    }

    /// Asserts that the newest launch and its resume point are those of the last confirmed
    /// registration, or of a later one, and that every confirmed label is there. Does nothing if
    /// nothing was confirmed.
    pub async fn assert_kept(&self, reader: &Client) {
        let before = self.entries().clone();
        if before.confirmed == 0 && before.labelled.is_empty() {
            return;
        }
        let (job, began) = (job(), tokio::time::Instant::now());
        let (order, labels) = loop {
            let read = (reader.fetch_launch_order(&job).await, reader.list_labels(&job).await);
            match read {
                (Ok(order), Ok(labels)) => break (order, labels),
                read => assert!(began.elapsed() < SOON, "launches and labels: {read:?}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let newest = order.newest().map(|newest| (newest.launch, newest.resumed));
        if let Some(last) = before.confirmed.checked_sub(1) {
            let begun = self.entries().begun.clone();
            let is_kept = newest.is_some_and(|newest| begun[last..].contains(&newest));
            assert!(is_kept, "{newest:?} is the newest launch, not one of {:?}", &begun[last..]);
        }
        for step in before.labelled {
            assert!(labels.contains_key(&step), "step {step} has lost its label: {labels:?}");
        }
    }
}

/// A writer of one shard. The bytes of the index are known before the save.
struct Writer {
    launch: LaunchId,
    shard: Bytes,
    index: Bytes,
}

#[async_trait]
impl JointDecisions for Writer {
    fn note_save(&self, _save: SaveId) -> io::Result<()> {
        Ok(())
    }

    fn cut_shards(&self, _code: SaveCode) -> Result<Vec<Arc<dyn ShardSource>>, ClientError> {
        let source: Arc<dyn ShardSource> = Arc::new(self.shard.clone());
        Ok(vec![source])
    }

    fn name_shard(&self, number: u32) -> Result<ShardName, ClientError> {
        Ok(data_name(self.launch, number).parse().unwrap())
    }

    async fn approve_shards(&self, _count: &(dyn Fn() + Send + Sync)) -> Result<(), String> {
        Ok(())
    }

    fn ensure_wanted(&self) -> Result<(), String> {
        Ok(())
    }

    fn note_missing(&self, _writers: &[u32], _unchanged: Duration) {}

    fn note_silent(&self, _writers: &[u32]) {}

    async fn build_index(&self, _data: Vec<ShardRoot>) -> Result<NewShard, ClientError> {
        let name = index_name(self.launch).parse().unwrap();
        Ok(NewShard { name, source: Arc::new(self.index.clone()) })
    }
}

fn data_name(launch: LaunchId, number: u32) -> String {
    format!("data/{launch}/{number}")
}

fn index_name(launch: LaunchId) -> String {
    format!("index/{launch}")
}

fn joint(launch: LaunchId, writer: u32) -> JointWriter {
    JointWriter { launch, writer, writers: WRITERS, stall: STALL }
}

/// Returns the shard of a writer, `len` bytes long, and the index of the step.
fn bytes_of(step: u64, writer: u32, len: usize) -> (Bytes, Bytes) {
    let seed = 100 * step;
    (content(len, seed + 1 + u64::from(writer)), content(INDEX_LEN, seed))
}

async fn save_part(
    client: &Client,
    launch: LaunchId,
    step: u64,
    writer: u32,
    len: usize,
) -> Result<SaveId, ClientError> {
    let (shard, index) = bytes_of(step, writer, len);
    let (job, decisions) = (job(), Arc::new(Writer { launch, shard, index }));
    client.save_jointly(job.at(Step(step)), joint(launch, writer), None, decisions, quiet()).await
}

/// Lets two writers save a step together, each a shard of the given length. The step is committed
/// if one of them says so. If `fair`, both must.
pub async fn save_jointly(
    client: &Client,
    ledger: &Shared,
    launch: LaunchId,
    step: u64,
    lens: [usize; 2],
    fair: bool,
) {
    let data = (0..).zip(lens);
    let data = data.map(|(writer, len)| (data_name(launch, writer), bytes_of(step, writer, len).0));
    let index = (index_name(launch), bytes_of(step, 0, 0).1);
    let shards: Shards = data.chain([index]).collect();
    let version = ledger.lock().unwrap().save(step, shards);
    let parts = async {
        let [first, second] = lens;
        tokio::join!(
            save_part(client, launch, step, 0, first),
            save_part(client, launch, step, 1, second),
        )
    };
    let (first, second) = patient("a joint save", parts).await;
    for part in [&first, &second] {
        assert_told("a joint save", part, false);
        assert!(!fair || part.is_ok(), "a joint save: {part:?}");
    }
    if let (Ok(first), Ok(second)) = (&first, &second) {
        assert_eq!(first, second, "two saves of step {step}");
    }
    ledger.lock().unwrap().saved(step, version, false, &first.or(second));
}

/// Lets one writer drop a step while the other one waits to save it. The step must never be
/// committed. If `fair`, the drop must be heard.
pub async fn drop_jointly(
    client: &Client,
    ledger: &Shared,
    launch: LaunchId,
    step: u64,
    fair: bool,
) {
    // The ledger has no version of the step, and so allows nothing but its absence.
    let _ = ledger.lock().unwrap().possible(step);
    let job = job();
    let parts = async {
        tokio::join!(
            save_part(client, launch, step, 0, 800),
            client.report_step_dropped(job.at(Step(step)), joint(launch, 1), "a rank died"),
        )
    };
    let (waited, dropped) = patient("a step that is dropped", parts).await;
    assert_told("a drop", &dropped, false);
    match waited {
        Err(ClientError::WriterDropped { writer: 1, .. }) => {}
        waited => {
            assert_told("a step that is dropped", &waited, false);
            assert!(!fair && waited.is_err(), "a step that is dropped: {waited:?}");
        }
    }
}
