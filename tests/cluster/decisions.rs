//! Saves that their caller controls, and reads of ranges into memory: the interface on which the
//! staging daemon is built.

use std::io;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::client::{
    ClientError, MemorySink, NewShard, ReadRange, SaveCode, SaveDecisions, SaveFate, SaveOptions,
};
use rapidraid::id::{SaveId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::pipeline::read::Sink;
use rapidraid::wire::calls::CommitSave;

use world::{World, content, job, quiet, save, shard};

const BLOCK: u64 = 64 << 10;

/// Decisions that save one shard and record the calls that they receive.
struct RecordedDecisions {
    bytes: Bytes,
    begun: Mutex<Vec<SaveId>>,
    code: Mutex<Option<SaveCode>>,
    refuses: bool,
}

impl RecordedDecisions {
    fn new(bytes: &Bytes, refuses: bool) -> Arc<Self> {
        let (begun, code) = (Mutex::default(), Mutex::default());
        Arc::new(Self { bytes: bytes.clone(), begun, code, refuses })
    }

    fn last(&self) -> SaveId {
        *self.begun.lock().unwrap().last().unwrap()
    }
}

#[async_trait]
impl SaveDecisions for RecordedDecisions {
    fn assign_save_id(&self, attempt: u32) -> io::Result<SaveId> {
        let mut begun = self.begun.lock().unwrap();
        assert_eq!(begun.len(), attempt as usize);
        begun.push(SaveId([attempt as u8 + 1; 12]));
        Ok(begun[begun.len() - 1])
    }

    fn shards_for_code(&self, code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        *self.code.lock().unwrap() = Some(code);
        Ok(vec![shard("weights", &self.bytes)])
    }

    async fn approve_commit(&self) -> Result<(), String> {
        if self.refuses { Err("embed.weight was changed".into()) } else { Ok(()) }
    }
}

/// Memory into which a range is read.
struct Memory {
    start: u64,
    bytes: Mutex<Vec<u8>>,
}

impl Sink for Memory {
    fn write_at(&self, shard_offset: u64, bytes: &[u8]) -> io::Result<()> {
        let at = (shard_offset - self.start) as usize;
        self.bytes.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_save_has_the_id_that_its_caller_gave_and_can_be_asked_for_by_it() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let decisions = RecordedDecisions::new(&content(5 * BLOCK as usize, 1), false);
    let options = SaveOptions::default();
    let report = client
        .save_with_decisions(&job(), Step(1), options, decisions.clone(), quiet())
        .await
        .unwrap();
    assert_eq!(report.save, decisions.last());
    let code = decisions.code.lock().unwrap().unwrap();
    assert_eq!((code.n, code.k, code.block_bytes), (4, 2, BLOCK));
    assert_eq!(code.stripe_bytes(), 2 * BLOCK);
    let fate = client.settle_save(job().at(Step(1)), report.save).await.unwrap();
    assert_eq!(fate, SaveFate::Committed);
    // A save id that was never begun, as after a crash between recording the id and beginning the
    // save.
    let fate = client.settle_save(job().at(Step(1)), SaveId([99; 12])).await.unwrap();
    assert_eq!(fate, SaveFate::Aborted);
}

#[tokio::test(start_paused = true)]
async fn a_save_that_is_not_confirmed_leaves_nothing() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let decisions = RecordedDecisions::new(&content(5 * BLOCK as usize, 1), true);
    let options = SaveOptions::default();
    let error =
        client.save_with_decisions(&job(), Step(1), options, decisions.clone(), quiet()).await;
    assert!(error.unwrap_err().to_string().contains("embed.weight was changed"));
    let fate = client.settle_save(job().at(Step(1)), decisions.last()).await.unwrap();
    assert_eq!(fate, SaveFate::Aborted);
    assert_eq!(client.list_steps(Some(&job())).await.unwrap().len(), 0);
    world.assert_swept(&client).await;
}

#[tokio::test(start_paused = true)]
async fn an_open_save_is_settled_as_aborted_and_never_commits() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let (client, voice) = (world.client(), world.voice(Role::Client, "stray"));
    let to = world.node_address(1);
    let begun = voice.begin(&to, 1).await.unwrap();
    let commit = |shards| CommitSave { job: job(), step: Step(1), save: begun.save, shards };
    // No shard is complete, so every number of shards is wrong, also zero.
    for shards in [0, 1] {
        let refused = voice.ask(&to, &commit(shards)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{shards} shards: {refused}");
    }
    assert_eq!(client.settle_save(job().at(Step(1)), begun.save).await.unwrap(), SaveFate::Aborted);
    assert_eq!(voice.ask(&to, &commit(1)).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(client.list_steps(Some(&job())).await.unwrap().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn ranges_whose_plans_do_not_fit_in_memory_are_planned_again() {
    let world = World::start(4, &[(4, 2)], BLOCK).await;
    let (client, bytes) = (world.client(), content(17_000, 1));
    save(&client, 1, &[("a", &bytes)]).await;
    let memory = Arc::new(MemorySink::new(0..17_000));
    let range =
        |at| ReadRange { shard: "a".parse().unwrap(), range: at..at + 1, sink: memory.clone() };
    let ranges: Vec<ReadRange> = (0..17_000).map(range).collect();
    let report = client.read_ranges(&job(), Some(Step(1)), &ranges, quiet()).await.unwrap();
    assert_eq!(report.replica_stripes, 17_000);
    assert!(memory.take_bytes() == bytes);
}

#[tokio::test(start_paused = true)]
async fn ranges_of_several_shards_are_read_into_memory() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    let contents = [content(7 * BLOCK as usize - 5, 1), content(3 * BLOCK as usize, 2)];
    save(&client, 1, &[("a", &contents[0]), ("b", &contents[1])]).await;
    let wanted = [(0, 0..1), (0, BLOCK - 1..4 * BLOCK + 77), (1, 0..3 * BLOCK), (0, 5..5)];
    let memory: Vec<Arc<Memory>> = wanted
        .iter()
        .map(|(_, range)| {
            let bytes = Mutex::new(vec![0; (range.end - range.start) as usize]);
            Arc::new(Memory { start: range.start, bytes })
        })
        .collect();
    let ranges: Vec<ReadRange> = wanted
        .iter()
        .zip(&memory)
        .map(|((shard, range), to)| ReadRange {
            shard: ["a", "b"][*shard].parse().unwrap(),
            range: range.clone(),
            sink: to.clone(),
        })
        .collect();
    client.read_ranges(&job(), Some(Step(1)), &ranges, quiet()).await.unwrap();
    for ((shard, range), memory) in wanted.iter().zip(&memory) {
        let expected = &contents[*shard][range.start as usize..range.end as usize];
        assert!(*memory.bytes.lock().unwrap() == expected, "{shard} {range:?}");
    }
    let beyond =
        ReadRange { shard: "b".parse().unwrap(), range: 0..3 * BLOCK + 1, sink: memory[2].clone() };
    let error = client.read_ranges(&job(), Some(Step(1)), &[beyond], quiet()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}
