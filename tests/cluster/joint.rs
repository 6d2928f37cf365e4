//! Saves of several writers: whole or not at all, whichever of them dies, pauses or contradicts the
//! others.

#[path = "joint/failures.rs"]
mod failures;

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::catalogue::record_access::joint_save_key;
use rapidraid::client::{
    Client, ClientError, JointDecisions, JointWriter, NewShard, SaveCode, SaveOptions,
};
use rapidraid::format::records::ShardRoot;
use rapidraid::id::{LaunchId, SaveId, ShardId, ShardName, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::{Address, Role};
use rapidraid::pipeline::upload::ShardSource;
use rapidraid::wire::calls::{
    CommitSave, CompareAndSetKey, CompleteShard, JoinSave, JoinSaveAnswer, WriterReport,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use world::{
    World, address, content, job, quiet, read_file, register, restore, restore_error, save, shard,
};

pub const BLOCK: u64 = 64 << 10;
pub const LEN: usize = 3 * BLOCK as usize - 100;
pub const STALL: Duration = Duration::from_secs(60);
/// Maximum time of a wait in a test.
const LIMIT: Duration = Duration::from_secs(600);
pub const LAUNCH: LaunchId = LaunchId([7; 16]);
/// The reason for which writers drop steps.
const REASON: &str = "a rank died";

/// Returns whether `error` says that `writer` has dropped the step for [`REASON`].
fn is_drop_of(error: &ClientError, writer: u32) -> bool {
    let is_it = matches!(error, ClientError::WriterDropped { writer: of, .. } if *of == writer);
    is_it && error.to_string().contains(REASON)
}

/// A moment at which a writer waits until it is let on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// All bytes of the writer's shards are sent.
    Sent,
    /// The writer is about to build the index.
    Index,
}

/// A writer that saves shards of fixed content.
pub struct Writer {
    launch: LaunchId,
    number: u32,
    pub shards: Vec<Bytes>,
    pub saves: Mutex<Vec<SaveId>>,
    missing: watch::Sender<Vec<u32>>,
    silent: watch::Sender<Vec<u32>>,
    /// The number of notes of missing writers.
    notes: AtomicU32,
    waits_at: Option<Moment>,
    /// Whether the content is found changed before the shards are completed.
    is_changed: bool,
    at: watch::Sender<Option<Moment>>,
    pub may_go: watch::Sender<bool>,
}

impl Writer {
    /// Returns writer `number` of a launch, with `count` shards. The content follows from the
    /// arguments.
    pub fn new(launch: LaunchId, number: u32, count: u64) -> Self {
        let seed = u64::from(launch.0[0]) * 1000 + u64::from(number) * 100;
        let shards = (0..count).map(|shard| content(LEN + shard as usize, seed + shard)).collect();
        Self {
            launch,
            number,
            shards,
            saves: Mutex::default(),
            missing: watch::Sender::default(),
            silent: watch::Sender::default(),
            notes: AtomicU32::default(),
            waits_at: None,
            is_changed: false,
            at: watch::Sender::default(),
            may_go: watch::Sender::default(),
        }
    }

    pub fn waiting_at(self, moment: Moment) -> Self {
        Self { waits_at: Some(moment), ..self }
    }

    async fn pass(&self, moment: Moment) {
        self.at.send_replace(Some(moment));
        if self.waits_at == Some(moment) {
            self.may_go.subscribe().wait_for(|may_go| *may_go).await.unwrap();
        }
    }

    pub async fn has_reached(&self, moment: Moment) {
        let mut at = self.at.subscribe();
        let reached = at.wait_for(|at| *at == Some(moment));
        tokio::time::timeout(LIMIT, reached).await.expect("the moment never came").unwrap();
    }

    pub async fn misses(&self, writers: &[u32]) {
        let mut missing = self.missing.subscribe();
        let misses = missing.wait_for(|missing| missing == writers);
        tokio::time::timeout(LIMIT, misses).await.expect("never waited for them").unwrap();
    }

    /// Waits until exactly `writers` are silent for this writer.
    pub async fn finds_silent(&self, writers: &[u32]) {
        let mut silent = self.silent.subscribe();
        let found = silent.wait_for(|silent| silent == writers);
        tokio::time::timeout(LIMIT, found).await.expect("never found silent").unwrap();
    }

    pub fn silent(&self) -> Vec<u32> {
        self.silent.borrow().clone()
    }

    fn joint(&self, writers: u32) -> JointWriter {
        JointWriter { launch: self.launch, writer: self.number, writers, stall: STALL }
    }
}

#[async_trait]
impl JointDecisions for Writer {
    fn note_save(&self, save: SaveId) -> io::Result<()> {
        self.saves.lock().unwrap().push(save);
        Ok(())
    }

    fn cut_shards(&self, _code: SaveCode) -> Result<Vec<Arc<dyn ShardSource>>, ClientError> {
        let source = |bytes: &Bytes| Arc::new(bytes.clone()) as Arc<dyn ShardSource>;
        Ok(self.shards.iter().map(source).collect())
    }

    fn name_shard(&self, number: u32) -> Result<ShardName, ClientError> {
        Ok(name(self.launch, number))
    }

    async fn approve_shards(&self, _count: &(dyn Fn() + Send + Sync)) -> Result<(), String> {
        self.pass(Moment::Sent).await;
        if self.is_changed { Err("weights were changed".into()) } else { Ok(()) }
    }

    fn ensure_wanted(&self) -> Result<(), String> {
        Ok(())
    }

    fn note_missing(&self, writers: &[u32], _unchanged: Duration) {
        self.notes.fetch_add(1, Ordering::Relaxed);
        self.missing.send_replace(writers.to_vec());
    }

    fn note_silent(&self, writers: &[u32]) {
        self.silent.send_replace(writers.to_vec());
    }

    async fn build_index(&self, data: Vec<ShardRoot>) -> Result<NewShard, ClientError> {
        self.pass(Moment::Index).await;
        let name = format!("index/{}", self.launch).parse().unwrap();
        Ok(NewShard { name, source: Arc::new(index_of(&data)) })
    }
}

pub fn name(launch: LaunchId, number: u32) -> ShardName {
    format!("data/{launch}/{number}").parse().unwrap()
}

fn index_of(data: &[ShardRoot]) -> Bytes {
    let lines = data.iter().map(|root| format!("{} {:?}\n", root.name, root.stripes_root));
    lines.collect::<String>().into()
}

pub async fn world() -> World {
    World::simulated(6, &[(4, 2)], BLOCK, 1).await
}

pub type Saving = JoinHandle<Result<SaveId, ClientError>>;

/// Lets a writer save a step through node `gateway`.
pub fn start(
    world: &World,
    gateway: usize,
    step: u64,
    writers: u32,
    writer: &Arc<Writer>,
) -> Saving {
    start_by(world.client_of(gateway), step, writers, writer)
}

pub fn start_by(client: Client, step: u64, writers: u32, writer: &Arc<Writer>) -> Saving {
    let writer = writer.clone();
    tokio::spawn(async move {
        let joint = writer.joint(writers);
        register(&client, writer.launch, None).await?;
        client.save_jointly(job().at(Step(step)), joint, None, writer, quiet()).await
    })
}

/// Checks that the step has exactly the shards of these writers, and their index.
pub async fn assert_exact(world: &World, step: u64, writers: &[&Arc<Writer>]) {
    let (out, report) = restore(&world.client(), step).await.unwrap();
    let shards: Vec<&Bytes> = writers.iter().flat_map(|writer| &writer.shards).collect();
    assert_eq!(report.shards as usize, shards.len() + 1);
    for (number, bytes) in (0..).zip(shards) {
        let file = name(writers[0].launch, number).to_string();
        assert!(read_file(&*out, &file) == *bytes, "shard {number}");
    }
    let roots: Vec<ShardRoot> =
        world.committed(step).unwrap().into_iter().map(|(root, _)| root).collect();
    let (index, data) = roots.split_last().unwrap();
    assert!(read_file(&*out, index.name.as_str()) == index_of(data));
}

#[tokio::test(start_paused = true)]
async fn writers_commit_one_save_together() {
    let world = world().await;
    let writers: Vec<_> =
        [(0, 2), (1, 1), (2, 3)].map(|(n, count)| Arc::new(Writer::new(LAUNCH, n, count))).into();
    let saving = writers.iter().enumerate().map(|(at, writer)| start(&world, at, 1, 3, writer));
    let mut saves = Vec::new();
    for saving in saving.collect::<Vec<_>>() {
        saves.push(saving.await.unwrap().unwrap());
    }
    assert!(saves.iter().all(|save| *save == saves[0]), "{saves:?}");
    assert_exact(&world, 1, &writers.iter().collect::<Vec<_>>()).await;
    // A writer that asks again, because it was restarted, is told that all is done.
    assert_eq!(start(&world, 4, 1, 3, &writers[1]).await.unwrap().unwrap(), saves[0]);
    world.client().remove_step(&job(), Step(1)).await.unwrap();
    assert_eq!(world.catalogue_keys("j/"), [""; 0], "removed with the save's other keys");
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_never_comes_is_named_and_the_step_is_free_again() {
    let world = world().await;
    let alone = Arc::new(Writer::new(LAUNCH, 0, 1));
    let begun = tokio::time::Instant::now();
    let saving = start(&world, 0, 1, 2, &alone);
    alone.misses(&[1]).await;
    let open = world.client_of(3).list_open_saves(Some(&job())).await.unwrap();
    let [open] = &open[..] else { panic!("{open:?}") };
    assert_eq!((open.step, open.writers, open.shards), (Step(1), 2, None));
    assert_eq!((&open.late_writers[..], open.dropped_writer), (&[1][..], None), "0 has announced");
    // A save of no launch has to wait meanwhile.
    let plain = vec![shard("a", &content(LEN, 1))];
    let refused = world
        .client()
        .save(&job(), Step(1), plain, SaveOptions::default(), quiet())
        .await
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    let error = saving.await.unwrap().unwrap_err();
    assert!(matches!(&error, ClientError::WritersMissing { writers, .. } if *writers == [1]));
    let took = begun.elapsed();
    assert!((STALL..STALL + Duration::from_secs(5)).contains(&took), "{took:?}");
    assert_eq!(restore_error(&world.client(), 1).await.kind(), ErrorKind::NotFound);
    let other = Arc::new(Writer::new(LaunchId([8; 16]), 0, 1));
    start(&world, 1, 1, 1, &other).await.unwrap().unwrap();
    assert_exact(&world, 1, &[&other]).await;
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_drops_the_step_is_heard_at_once() {
    let world = world().await;
    for drops_first in [false, true] {
        let step = 1 + u64::from(drops_first);
        let waits = Arc::new(Writer::new(LAUNCH, 0, 1));
        let drops = Writer::new(LAUNCH, 1, 1).joint(2);
        let client = world.client_of(2);
        let drop = || async {
            client.report_step_dropped(job().at(Step(step)), drops, REASON).await.unwrap()
        };
        if drops_first {
            drop().await;
        }
        let begun = tokio::time::Instant::now();
        let saving = start(&world, 0, step, 2, &waits);
        if !drops_first {
            waits.misses(&[1]).await;
            drop().await;
        }
        let error = saving.await.unwrap().unwrap_err();
        assert!(is_drop_of(&error, 1), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn the_writer_that_drops_the_step_first_is_named() {
    let world = world().await;
    let client = world.client_of(2);
    let drop = async |writer| {
        let writer = Writer::new(LAUNCH, writer, 1).joint(3);
        client.report_step_dropped(job().at(Step(1)), writer, REASON).await.unwrap()
    };
    register(&client, LAUNCH, None).await.unwrap();
    assert!(!drop(2).await);
    assert!(!drop(0).await);
    let open = client.list_open_saves(None).await.unwrap();
    assert_eq!(open.iter().map(|view| view.dropped_writer).collect::<Vec<_>>(), [Some(2)]);
    let waits = Arc::new(Writer::new(LAUNCH, 1, 1));
    let error = start(&world, 1, 1, 3, &waits).await.unwrap().unwrap_err();
    assert!(is_drop_of(&error, 2), "{error}");
    assert!(drop(1).await, "all have dropped it");
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn a_report_during_an_upload_is_no_progress() {
    let world = world().await;
    let (client, number) = world.connect(vec![address(0)]);
    let clock = world.machines[0].time.clock();
    world.network.set_pace(&format!("client{number}:0"), clock, Duration::from_secs(5));
    let writer = Writer { shards: vec![content(6 * LEN, 1)], ..Writer::new(LAUNCH, 0, 1) };
    let writer = Arc::new(writer.waiting_at(Moment::Sent));
    let begun = tokio::time::Instant::now();
    let saving = start_by(client, 1, 1, &writer);
    writer.has_reached(Moment::Sent).await;
    assert!(begun.elapsed() > STALL / 4, "too fast for a report: {:?}", begun.elapsed());
    assert_eq!(writer.notes.load(Ordering::Relaxed), 1, "one, when all had announced");
    writer.may_go.send_replace(true);
    saving.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn whoever_is_left_commits_what_is_complete() {
    let world = world().await;
    let dies = Arc::new(Writer::new(LAUNCH, 0, 2).waiting_at(Moment::Index));
    let lives = Arc::new(Writer::new(LAUNCH, 1, 1).waiting_at(Moment::Sent));
    let dying = start(&world, 0, 1, 2, &dies);
    let saving = start(&world, 1, 1, 2, &lives);
    lives.has_reached(Moment::Sent).await;
    dies.misses(&[1]).await;
    lives.may_go.send_replace(true);
    dies.has_reached(Moment::Index).await;
    let open = world.client_of(3).list_open_saves(None).await.unwrap();
    assert_eq!((open[0].complete_shards, open[0].shards), (3, Some(4)));
    assert!(open[0].late_writers.is_empty() && !open[0].is_decided);
    dying.abort();
    let save = saving.await.unwrap().unwrap();
    assert_exact(&world, 1, &[&dies, &lives]).await;
    assert_eq!(dies.saves.lock().unwrap().as_slice(), [save]);
}

#[tokio::test(start_paused = true)]
async fn two_writers_of_the_index_write_the_same_bytes() {
    let world = world().await;
    let pauses = Arc::new(Writer::new(LAUNCH, 0, 1).waiting_at(Moment::Index));
    let goes_on = Arc::new(Writer::new(LAUNCH, 1, 1).waiting_at(Moment::Index));
    let both = [start(&world, 0, 1, 2, &pauses), start(&world, 1, 1, 2, &goes_on)];
    pauses.has_reached(Moment::Index).await;
    goes_on.has_reached(Moment::Index).await;
    for writer in [&pauses, &goes_on] {
        writer.may_go.send_replace(true);
    }
    let mut saves = Vec::new();
    for saving in both {
        saves.push(saving.await.unwrap().unwrap());
    }
    assert_eq!(saves[0], saves[1]);
    assert_exact(&world, 1, &[&pauses, &goes_on]).await;
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_is_restarted_sends_its_shards_again() {
    let world = world().await;
    let stays = Arc::new(Writer::new(LAUNCH, 0, 1));
    let killed = Arc::new(Writer::new(LAUNCH, 1, 2).waiting_at(Moment::Sent));
    let saving = start(&world, 0, 1, 2, &stays);
    let first = start(&world, 1, 1, 2, &killed);
    killed.has_reached(Moment::Sent).await;
    stays.misses(&[1]).await;
    first.abort();
    tokio::time::sleep(STALL / 2).await;
    let again = Arc::new(Writer::new(LAUNCH, 1, 2));
    let save = start(&world, 3, 1, 2, &again).await.unwrap().unwrap();
    assert_eq!(saving.await.unwrap().unwrap(), save);
    assert_eq!(killed.saves.lock().unwrap().as_slice(), [save], "the save was not begun anew");
    assert_exact(&world, 1, &[&stays, &again]).await;
}

#[tokio::test(start_paused = true)]
async fn all_writers_may_die() {
    let world = world().await;
    let both = [0, 1].map(|n| Arc::new(Writer::new(LAUNCH, n, 1).waiting_at(Moment::Sent)));
    let saving = [0, 1].map(|n| start(&world, n, 1, 2, &both[n]));
    for writer in &both {
        writer.has_reached(Moment::Sent).await;
    }
    saving.iter().for_each(Saving::abort);
    world.assert_swept(&world.client()).await;
    // The next launch saves the step with other content.
    let next = Arc::new(Writer::new(LaunchId([8; 16]), 0, 2));
    start(&world, 1, 1, 1, &next).await.unwrap().unwrap();
    assert_exact(&world, 1, &[&next]).await;
}

#[tokio::test(start_paused = true)]
async fn a_save_goes_on_under_a_catalogue_that_has_moved() {
    let world = world().await;
    for (step, moment) in [(1, Moment::Sent), (2, Moment::Index)] {
        let first = Arc::new(Writer::new(LAUNCH, 0, 1).waiting_at(moment));
        let second = Arc::new(Writer::new(LAUNCH, 1, 1));
        let saving = [start(&world, 2, step, 2, &first), start(&world, 3, step, 2, &second)];
        first.has_reached(moment).await;
        let to = Address { host_port: address(step as usize), node: None };
        world.client().move_catalogue(&to).await.unwrap();
        first.may_go.send_replace(true);
        let mut saves = Vec::new();
        for saving in saving {
            saves.push(saving.await.unwrap().unwrap());
        }
        assert_eq!(saves[0], saves[1]);
        assert_exact(&world, step, &[&first, &second]).await;
    }
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_comes_after_a_move_begins_anew() {
    let world = world().await;
    let early = Arc::new(Writer::new(LAUNCH, 0, 1));
    let late = Arc::new(Writer::new(LAUNCH, 1, 1));
    let saving = start(&world, 2, 1, 2, &early);
    early.misses(&[1]).await;
    let to = Address { host_port: address(3), node: None };
    world.client().move_catalogue(&to).await.unwrap();
    let save = start(&world, 4, 1, 2, &late).await.unwrap().unwrap();
    assert_eq!(saving.await.unwrap().unwrap(), save);
    assert_eq!(late.saves.lock().unwrap().as_slice(), [save], "nodes refuse the older epoch");
    assert_exact(&world, 1, &[&early, &late]).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_a_joint_save_does_not_use_can_be_removed() {
    let mut world = world().await;
    let name = |world: &World, index: usize| world.machines[index].name.clone();
    world.kill(5).await;
    world.until_live(5).await;
    let writer = Arc::new(Writer::new(LAUNCH, 0, 1));
    let saving = start(&world, 0, 1, 2, &writer);
    writer.misses(&[1]).await;
    let client = world.client();
    client.remove_node(&name(&world, 5)).await.unwrap();
    world.kill(4).await;
    world.until_live(4).await;
    let refused = client.remove_node(&name(&world, 4)).await.unwrap_err();
    assert!(refused.to_string().contains("job/1"), "it is in the ring: {refused}");
    saving.abort();
}

/// Both launches have two writers, so that only the launch tells their saves apart. The newer one has
/// resumed from the step that the older one saves, which may therefore go on.
#[tokio::test(start_paused = true)]
async fn a_newer_launch_does_not_join_the_save_of_an_older_one() {
    let world = world().await;
    let (voice, to) = (world.voice(Role::Client, "writer"), world.node_address(1));
    let join = async |launch, writer| {
        let join = JoinSave {
            job: job(),
            step: Step(1),
            launch,
            writer,
            writers: 2,
            report: WriterReport::Joins,
            replace: None,
            avoid: Vec::new(),
        };
        voice.ask(&to, &join).await.map(|answer| match answer {
            JoinSaveAnswer::Open(joined) => joined.joint,
            other => panic!("not open: {other:?}"),
        })
    };
    let newer = LaunchId([8; 16]);
    register(&world.client(), LAUNCH, None).await.unwrap();
    let old = join(LAUNCH, 0).await.unwrap();
    assert_eq!(join(LAUNCH, 1).await.unwrap().save, old.save);
    register(&world.client(), newer, Some(1)).await.unwrap();
    assert_eq!(join(LAUNCH, 0).await.unwrap().save, old.save);
    let new = join(newer, 0).await.unwrap();
    assert_eq!((old.launch, new.launch), (LAUNCH, newer));
    assert_ne!(old.save, new.save);
    join(LAUNCH, 0).await.unwrap_err();
    assert_eq!(join(newer, 1).await.unwrap().save, new.save);
}

#[tokio::test(start_paused = true)]
async fn content_that_changed_meanwhile_is_not_committed() {
    let world = world().await;
    let writer = Arc::new(Writer { is_changed: true, ..Writer::new(LAUNCH, 0, 1) });
    let error = start(&world, 0, 1, 1, &writer).await.unwrap().unwrap_err();
    assert!(matches!(error, ClientError::CalledOff { .. }), "{error}");
    assert_eq!(restore_error(&world.client(), 1).await.kind(), ErrorKind::NotFound);
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn two_shards_of_one_name_are_no_checkpoint() {
    let world = world().await;
    let voice = world.voice(Role::Client, "writer");
    let to = world.node_address(1);
    let begun = voice.begin(&to, 1).await.unwrap();
    for index in 0..2 {
        let mut root = world::raw::empty_root(&begun, 1, "weights");
        (root.index, root.shards, root.shard) = (index, 2, ShardId::new(begun.save, index));
        voice.ask(&to, &CompleteShard { root }).await.unwrap();
    }
    let commit = CommitSave { job: job(), step: Step(1), save: begun.save, shards: 2 };
    let refused = voice.ask(&to, &commit).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
}

#[tokio::test(start_paused = true)]
async fn a_joint_record_that_comes_too_late_is_removed() {
    let world = world().await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    let node = world.voice(Role::Node, world.machines[2].name.as_str());
    let save = SaveId([9; 12]);
    // The gateway was paused until the save was aborted and forgotten.
    let (key, value) = (joint_save_key(save), Some(vec![1, 2, 3]));
    let serving = world.node_address(world.serving()[0]);
    node.ask(&serving, &CompareAndSetKey { key, expected: None, value }).await.unwrap();
    world.assert_swept(&world.client()).await;
}

#[tokio::test(start_paused = true)]
async fn only_the_save_that_is_named_is_replaced() {
    let world = world().await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    let writer = Arc::new(Writer::new(LAUNCH, 0, 1));
    let refused = start(&world, 0, 1, 1, &writer).await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    let client = world.client_of(2);
    let committed = client.list_steps(None).await.unwrap()[0].saved.save;
    for (replace, is_accepted) in [(SaveId([9; 12]), false), (committed, true)] {
        let (joint, decisions) = (writer.joint(1), writer.clone());
        let saved =
            client.save_jointly(job().at(Step(1)), joint, Some(replace), decisions, quiet()).await;
        assert_eq!(saved.is_ok(), is_accepted, "{saved:?}");
    }
    assert_exact(&world, 1, &[&writer]).await;
    world.assert_swept(&world.client()).await;
}
