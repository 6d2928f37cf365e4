//! Saves of several writers that get wrong input: reports that contradict the save, ids and roots
//! of other saves, other bytes for a stored shard, early commits, and writers of other steps or of
//! an older launch.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use rapidraid::catalogue::record_access::{joint_save_key, launch_order_key};
use rapidraid::client::ClientError;
use rapidraid::format::joint_save::JointSave;
use rapidraid::format::joint_save::MAX_REASON_BYTES;
use rapidraid::format::records::{
    BlockInfo, Leaves, Record, ShardRoot, StripeFixed, StripeRecord, Writing, stripes_root,
};
use rapidraid::id::{Generation, LaunchId, SaveId, ShardId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::net::call::CallError;
use rapidraid::wire::calls::{
    AbortSave, BeginSaveAnswer, BlockTrailer, CommitSave, CompareAndSetKey, CompleteShard,
    CompletedShards, GetKey, JoinSave, JoinSaveAnswer, ListCompletedShards, PutBlock, PutRecord,
    RecordName, WriterReport,
};

use world::raw::{KEY, empty_root, trailer};
use world::{World, content, job, read_file, register, restore_error};

use crate::joint::{BLOCK, LAUNCH, LEN, Moment, STALL, Saving, Writer, assert_exact, name, start};

/// Number of shards of a [`SentSave`], including the index.
const SHARDS: u32 = 3;

async fn world() -> World {
    World::simulated(6, &[(4, 2)], BLOCK, 1).await
}

/// Returns writer `number` of a step, with one shard. The content follows from the arguments.
fn writer_of(step: u64, number: u32) -> Writer {
    let mut writer = Writer::new(LAUNCH, number, 1);
    writer.shards = vec![content(LEN, 10 * step + u64::from(number))];
    writer
}

/// An open save of two writers, which have sent all bytes of their shards and wait.
struct SentSave {
    step: u64,
    save: SaveId,
    writers: [Arc<Writer>; 2],
    saving: [Saving; 2],
}

impl SentSave {
    async fn start(world: &World, step: u64) -> Self {
        let waiting = |number| Arc::new(writer_of(step, number).waiting_at(Moment::Sent));
        let writers = [waiting(0), waiting(1)];
        let saving = [0, 1].map(|number| start(world, number, step, 2, &writers[number]));
        for writer in &writers {
            writer.has_reached(Moment::Sent).await;
        }
        let save = open_save(world, step).0.save;
        Self { step, save, writers, saving }
    }

    /// Lets writer 0 go on, and waits until only the shards of writer 1 and the index are missing.
    async fn complete_first_shard(&self) {
        self.writers[0].may_go.send_replace(true);
        self.writers[0].misses(&[1]).await;
    }

    /// Lets both writers go on, and checks that they commit the save with their content. Returns
    /// the writers.
    async fn finish(self, world: &World) -> [Arc<Writer>; 2] {
        for writer in &self.writers {
            writer.may_go.send_replace(true);
        }
        for saving in self.saving {
            assert_eq!(saving.await.unwrap().unwrap(), self.save);
        }
        assert_eq!(world.checkpoint(self.step).committed.unwrap().save, self.save);
        assert_exact(world, self.step, &self.writers.each_ref()).await;
        self.writers
    }
}

/// Returns the record that the writers of the open save share, and the save's generation.
fn open_save(world: &World, step: u64) -> (JointSave, Generation) {
    let writing = world.checkpoint(step).writing;
    let Some(Writing::Open { save, generation, .. }) = writing else {
        panic!("not open: {writing:?}")
    };
    (world.record(&joint_save_key(save)).unwrap(), generation)
}

/// Returns the machines that have a file of a shard, and the bytes of the file on the first one.
fn stored(world: &World, shard: ShardId, name: &str) -> (Vec<usize>, Vec<u8>) {
    let path = format!("shards/{shard}/{name}");
    let files = world.files(|found| found == path);
    let bytes = read_file(&*world.machines[files[0].0].disk, &path);
    (files.into_iter().map(|(machine, _)| machine).collect(), bytes)
}

/// Returns the root of a shard whose bytes are sent.
fn sent_root(world: &World, shard: ShardId) -> ShardRoot {
    Leaves::parse(&stored(world, shard, "leaves").1).unwrap().root
}

/// Returns the machine, the path and the bytes of each file of a save.
fn files_and_bytes(world: &World, save: SaveId) -> Vec<(usize, String, Vec<u8>)> {
    let read = |(machine, path): (usize, String)| {
        let bytes = read_file(&*world.machines[machine].disk, &path);
        (machine, path, bytes)
    };
    world.files_of(save).into_iter().map(read).collect()
}

/// Returns the report of a writer on step 1.
fn join(writer: u32, writers: u32, report: WriterReport) -> JoinSave {
    let (replace, avoid) = (None, Vec::new());
    let (job, step, launch) = (job(), Step(1), LAUNCH);
    JoinSave { job, step, launch, writer, writers, report, replace, avoid }
}

/// Returns the call that commits a save of step 1.
fn commit_of(save: SaveId) -> CommitSave {
    CommitSave { job: job(), step: Step(1), save, shards: SHARDS }
}

/// Checks that a call was refused with an error of this kind that contains `text`.
fn assert_refused<T: Debug>(answer: Result<T, CallError>, kind: ErrorKind, text: &str) {
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(text), "{error}, and not: {text}");
}

/// Checks that no shard is complete.
fn assert_none_complete(world: &World) {
    let keys = ["s/", "t/"].map(|prefix| world.catalogue_keys(prefix)).concat();
    assert_eq!(keys, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn what_contradicts_the_save_is_refused() {
    let world = world().await;
    let voice = world.voice(Role::Client, "writer");
    let to = world.node_address(1);
    let unknown = voice.ask(&to, &join(0, 2, WriterReport::Joins)).await;
    assert_refused(unknown, ErrorKind::Fenced, "is not registered");
    register(&world.client(), LAUNCH, None).await.unwrap();
    let numbers = "its writers have the numbers 0 to 1";
    let all = "a save has 1 to 128 writers";
    for (writer, writers, hint) in [(0, 0, all), (2, 2, numbers), (0, 129, all)] {
        let refused = voice.ask(&to, &join(writer, writers, WriterReport::Joins)).await;
        assert_refused(refused, ErrorKind::Invalid, hint);
    }
    assert_eq!(world.checkpoint(1).writing, None);
    let JoinSaveAnswer::Open(joined) =
        voice.ask(&to, &join(0, 2, WriterReport::Joins)).await.unwrap()
    else {
        panic!("not open")
    };
    let save = joined.joint.save;
    let announces = |shards| WriterReport::Announces { save, shards, sent_mib: 0 };
    voice.ask(&to, &join(0, 2, announces(1))).await.unwrap();
    let before = open_save(&world, 1);
    let too_long = WriterReport::DropsBecause("x".repeat(MAX_REASON_BYTES + 1));
    for (wrong, reason) in [
        (join(0, 3, WriterReport::Joins), "the save has 2 writers, this call names 3"),
        (join(1, 3, announces(1)), "the save has 2 writers, this call names 3"),
        (join(0, 2, announces(2)), "its number of shards was 1, and is 2 now"),
        (join(1, 2, announces(65_536)), "a save has at most 65536 shards"),
        (join(1, 2, too_long), "a reason has at most 256 bytes"),
    ] {
        let text = format!("writer {} contradicts the save of job/1: {reason}", wrong.writer);
        let text = format!("{text}; start the job again on all hosts");
        assert_refused(voice.ask(&to, &wrong).await, ErrorKind::Invalid, &text);
    }
    assert_eq!(open_save(&world, 1), before);
    voice.ask(&to, &join(1, 2, announces(1))).await.unwrap();
    let joint = &joined.joint;
    let mut root = empty_root(
        &BeginSaveAnswer {
            save,
            generation: joined.generation,
            lease: joint.lease,
            lease_ms: joined.lease_ms,
            n: joint.n,
            k: joint.k,
            block_bytes: joint.block_bytes,
            nodes: joined.nodes.clone(),
        },
        1,
        "weights",
    );
    root.shards = 3;
    root.ring = joint.ring_of(0);
    root.fingerprint_key = joint.fingerprint_key(0);
    let refused = voice.ask(&to, &CompleteShard { root: root.clone() }).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "a name that is not the shard's: {refused}");
    root.name = name(LAUNCH, 0);
    voice.ask(&to, &CompleteShard { root: root.clone() }).await.unwrap();
    root.fingerprint_key = [1; 32];
    let refused = voice.ask(&to, &CompleteShard { root }).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "another key: {refused}");
}

#[tokio::test(start_paused = true)]
async fn calls_with_the_id_of_another_save_do_not_change_the_present_one() {
    let world = world().await;
    let (sent, later) = (SentSave::start(&world, 1).await, SentSave::start(&world, 2).await);
    let (voice, to) = (world.voice(Role::Client, "writer"), world.node_address(1));
    let before = [open_save(&world, 1), open_save(&world, 2)];
    let root = sent_root(&world, ShardId::new(sent.save, 0));
    for save in [SaveId([9; 12]), later.save] {
        // Numbers of shards: the announced one, and another one.
        for shards in [1, 2] {
            let report = WriterReport::Announces { save, shards, sent_mib: 70 };
            let answer = voice.ask(&to, &join(0, 2, report)).await.unwrap();
            let JoinSaveAnswer::Open(joined) = answer else { panic!("not open: {answer:?}") };
            assert_eq!((joined.joint, joined.generation), before[0]);
        }
        let shard = ShardId::new(save, 0);
        let foreign = ShardRoot { save, shard, ..root.clone() };
        let refused = voice.ask(&to, &CompleteShard { root: foreign }).await;
        assert_refused(refused, ErrorKind::Fenced, &format!("save {save} is not open"));
        let mixed = ShardRoot { shard, ..root.clone() };
        let refused = voice.ask(&to, &CompleteShard { root: mixed }).await;
        assert_refused(refused, ErrorKind::Invalid, "contradict each other");
        let refused = voice.ask(&to, &commit_of(save)).await;
        assert_refused(refused, ErrorKind::Fenced, &format!("save {save} of job/1 was aborted"));
        let list = ListCompletedShards { job: job(), step: Step(1), save, first: 0 };
        assert_eq!(voice.ask(&to, &list).await.unwrap(), CompletedShards::Over);
        voice.ask(&to, &AbortSave { job: job(), step: Step(1), save }).await.unwrap();
    }
    assert_eq!([open_save(&world, 1), open_save(&world, 2)], before);
    assert_none_complete(&world);
    sent.finish(&world).await;
    later.finish(&world).await;
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn the_root_of_another_step_is_refused() {
    let world = world().await;
    let (sent, later) = (SentSave::start(&world, 1).await, SentSave::start(&world, 2).await);
    let (voice, to) = (world.voice(Role::Client, "writer"), world.node_address(1));
    let (save, generation) = (sent.save, open_save(&world, 1).1);
    let (shard, other) = (ShardId::new(save, 0), ShardId::new(later.save, 0));
    let (own, foreign) = (sent_root(&world, shard), sent_root(&world, other));
    let before = [save, later.save].map(|save| files_and_bytes(&world, save));
    let not_open = |save: SaveId| format!("save {save} is not open");
    for (root, kind, text) in [
        (ShardRoot { step: Step(1), ..foreign.clone() }, ErrorKind::Fenced, not_open(later.save)),
        (ShardRoot { step: Step(2), ..own.clone() }, ErrorKind::Fenced, not_open(save)),
        (
            ShardRoot { step: Step(1), save, shard, ..foreign },
            ErrorKind::Invalid,
            format!("the fields of the root of shard data/{LAUNCH}/0 contradict each other"),
        ),
    ] {
        assert_refused(voice.ask(&to, &CompleteShard { root }).await, kind, &text);
    }
    assert_none_complete(&world);

    let leaves = Leaves::parse(&stored(&world, shard, "leaves").1).unwrap();
    let moved = Leaves { root: ShardRoot { step: Step(2), ..own }, ..leaves };
    let first_stripe = RecordName::Stripe { index: 0 };
    let (stripe, other_stripe) =
        (StripeId { shard, index: 0 }, StripeId { shard: other, index: 0 });
    for (record, bytes, kind, text) in [
        (
            RecordName::Leaves,
            stored(&world, other, "leaves").1,
            ErrorKind::Invalid,
            format!("the leaves are not those of shard {shard}"),
        ),
        (
            RecordName::Leaves,
            moved.to_bytes().unwrap(),
            ErrorKind::Exists,
            "already exists with other content and never changes".to_owned(),
        ),
        (
            first_stripe,
            stored(&world, other, "00000000/record").1,
            ErrorKind::Invalid,
            format!("the record is of stripe {other_stripe}, not of {stripe}"),
        ),
    ] {
        let put = PutRecord { shard, record, generation, bytes };
        for machine in stored(&world, shard, "leaves").0 {
            let refused = voice.ask(&world.node_address(machine), &put).await;
            assert_refused(refused, kind, &text);
        }
    }
    assert!([save, later.save].map(|save| files_and_bytes(&world, save)) == before);
    sent.finish(&world).await;
    later.finish(&world).await;
}

/// Equal bytes, which a restarted writer sends, are accepted.
#[tokio::test(start_paused = true)]
async fn other_bytes_do_not_replace_a_stored_shard_of_an_open_save() {
    let world = world().await;
    let sent = SentSave::start(&world, 1).await;
    let voice = world.voice(Role::Client, "writer");
    let (save, generation) = (sent.save, open_save(&world, 1).1);
    let shard = ShardId::new(save, 0);
    let stripe = StripeId { shard, index: 0 };
    let before = files_and_bytes(&world, save);

    let (own, other) = (&sent.writers[0].shards[0], content(BLOCK as usize, 99));
    let call = PutBlock {
        stripe,
        block: 0,
        len_bytes: BLOCK,
        generation,
        fingerprint_key: KEY,
        forward: None,
    };
    let shorter = PutBlock { len_bytes: 1000, ..call.clone() };
    let (holders, _) = stored(&world, shard, "00000000/block-00.rep");
    assert_eq!(holders.len(), 2);
    for node in holders.into_iter().map(|machine| world.node_address(machine)) {
        voice.put_block(&node, &call, &own.slice(..BLOCK as usize)).await.unwrap();
        for (call, bytes) in [(&call, other.clone()), (&shorter, own.slice(..1000))] {
            let refused = voice.put_block(&node, call, &bytes).await;
            assert_refused(refused, ErrorKind::Exists, "exists with other content and is kept");
        }
    }

    let leaves = Leaves::parse(&stored(&world, shard, "leaves").1).unwrap();
    let hashes = vec![[1; 32]; leaves.hashes.len()];
    let root = ShardRoot { stripes_root: stripes_root(&hashes), ..leaves.root.clone() };
    let other_leaves = Leaves { root: root.clone(), hashes };
    let record = StripeRecord::parse(&stored(&world, shard, "00000000/record").1).unwrap();
    let BlockTrailer { root: block_root, fingerprints } = trailer(&other);
    let block = BlockInfo { len_bytes: BLOCK, root: block_root, fingerprints };
    let cut = root.geometry().unwrap().stripe(0).unwrap();
    let fixed = StripeFixed { stripe, cut, blocks: vec![block; 2] };
    let other_record = StripeRecord::new(&fixed, record.places).unwrap();
    for (record, file, other) in [
        (RecordName::Leaves, "leaves", other_leaves.to_bytes().unwrap()),
        (RecordName::Stripe { index: 0 }, "00000000/record", other_record.to_bytes().unwrap()),
    ] {
        let (nodes, first) = stored(&world, shard, file);
        let put = |bytes: &[u8]| PutRecord { shard, record, generation, bytes: bytes.to_vec() };
        for node in nodes.into_iter().map(|machine| world.node_address(machine)) {
            voice.ask(&node, &put(&first)).await.unwrap();
            let refused = voice.ask(&node, &put(&other)).await;
            assert_refused(refused, ErrorKind::Exists, "exists with other content and never");
        }
    }
    assert!(files_and_bytes(&world, save) == before, "files have changed");

    sent.complete_first_shard().await;
    let gateway = world.node_address(1);
    voice.ask(&gateway, &CompleteShard { root: leaves.root }).await.unwrap();
    let refused = voice.ask(&gateway, &CompleteShard { root }).await;
    assert_refused(refused, ErrorKind::Fenced, "exists with other content");
    sent.finish(&world).await;
}

#[tokio::test(start_paused = true)]
async fn writers_of_different_steps_are_told_who_is_missing() {
    let world = world().await;
    let client = world.client();
    let earlier = SentSave::start(&world, 9).await.finish(&world).await;
    let begun = tokio::time::Instant::now();
    let apart = [(10, 0), (11, 1)].map(|(step, number)| (step, Arc::new(writer_of(step, number))));
    let saving = [0, 1].map(|number| start(&world, number, apart[number].0, 2, &apart[number].1));
    for (saving, missing) in saving.into_iter().zip([1u32, 0]) {
        let error = saving.await.unwrap().unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, ClientError::WritersMissing { writers, .. } if writers == [missing]),
            "{text}"
        );
        assert!(text.contains(&format!("writers [{missing}] of the save")), "{text}");
    }
    let took = begun.elapsed();
    assert!((STALL..STALL + Duration::from_secs(5)).contains(&took), "{took:?}");
    for step in [10, 11] {
        assert_eq!(restore_error(&client, step).await.kind(), ErrorKind::NotFound);
    }
    assert!(client.list_open_saves(None).await.unwrap().is_empty());
    // Both steps are free again.
    for step in [10, 11] {
        SentSave::start(&world, step).await.finish(&world).await;
    }
    assert_exact(&world, 9, &earlier.each_ref()).await;
    world.assert_swept(&client).await;
}

/// A requeued job saves on other writers as a newer launch, while the writers of the older launch
/// still upload.
#[tokio::test(start_paused = true)]
async fn a_launch_whose_job_was_requeued_does_not_commit_what_it_uploads() {
    let world = world().await;
    let client = world.client();
    let older = SentSave::start(&world, 1).await;
    older.complete_first_shard().await;
    // The gateway that registers the newer launch dies before it aborts the open save.
    let newer = LaunchId([8; 16]);
    let mut order = client.fetch_launch_order(&job()).await.unwrap();
    order.register(newer, 0, None);
    let node = world.voice(Role::Node, "node01");
    let (to, key) = (world.node_address(0), launch_order_key(&job()));
    let (_, revision) = node.ask(&to, &GetKey { key: key.clone() }).await.unwrap().unwrap();
    let (expected, value) = (Some(revision), Some(order.to_bytes().unwrap()));
    node.ask(&to, &CompareAndSetKey { key, expected, value }).await.unwrap();

    let (voice, gateway) = (world.voice(Role::Client, "writer"), world.node_address(1));
    let replaced = format!("launch 2 ({newer}) has been saving for the job since ");
    let commit = commit_of(older.save);
    assert_refused(voice.ask(&gateway, &commit).await, ErrorKind::Fenced, &replaced);
    assert_eq!(open_save(&world, 1).0.save, older.save);

    let writers = [0, 1].map(|number| Arc::new(Writer::new(newer, number, 2)));
    let saving = [0, 1].map(|number| start(&world, number + 2, 1, 2, &writers[number]));
    for saving in saving {
        assert_ne!(saving.await.unwrap().unwrap(), older.save);
    }
    older.writers[1].may_go.send_replace(true);
    for saving in older.saving {
        let error = saving.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
        assert!(error.to_string().contains(&replaced), "{error}");
    }
    let refused = voice.ask(&gateway, &commit).await;
    assert_refused(refused, ErrorKind::Fenced, "was aborted, or another one took its place");
    assert_exact(&world, 1, &writers.each_ref()).await;
    world.assert_swept(&client).await;
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_comes_too_early_names_the_missing_shards() {
    let world = world().await;
    let sent = SentSave::start(&world, 1).await;
    sent.complete_first_shard().await;
    let (voice, to) = (world.voice(Role::Client, "writer"), world.node_address(1));
    let error = voice.ask(&to, &commit_of(sent.save)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let text = error.to_string();
    assert!(text.contains("shards 1, 2") || text.contains("shard 1"), "{text}");
    assert_eq!(open_save(&world, 1).0.save, sent.save);
    assert_eq!(restore_error(&world.client(), 1).await.kind(), ErrorKind::NotFound);
    sent.finish(&world).await;
}
