//! Saves that conflict with each other, saves whose client dies, and saves whose holders die.

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use bytes::Bytes;
use rapidraid::client::{Client, ClientError, NewShard, SaveOptions, SaveReport};
use rapidraid::id::{NodeId, SaveId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::pipeline::upload::ShardSource;
use rapidraid::store::Disk;
use rapidraid::wire::calls::{
    AbortSave, BeginSave, CommitSave, CompleteShard, PutRecord, RecordName, RenewLease,
};
use tokio::sync::Notify;

use world::raw::{block_call, empty_root};
use world::{World, address, content, job, quiet, read_file, restore, restore_error, save, shard};

const REPLACE: SaveOptions = SaveOptions { replace: true };
const KEEP: SaveOptions = SaveOptions { replace: false };

/// A source whose reads block from byte `stop` on until it is opened.
pub struct Gated {
    bytes: Bytes,
    stop: u64,
    pub reached: Notify,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gated {
    pub fn new(bytes: &Bytes, stop: u64) -> Arc<Self> {
        let (is_open, opened) = (Mutex::default(), Condvar::new());
        Arc::new(Self { bytes: bytes.clone(), stop, reached: Notify::new(), is_open, opened })
    }

    pub fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl ShardSource for Gated {
    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if offset >= self.stop {
            self.reached.notify_one();
            let limit = Duration::from_secs(60);
            let closed = |is_open: &mut bool| !*is_open;
            let waited =
                self.opened.wait_timeout_while(self.is_open.lock().unwrap(), limit, closed);
            if waited.unwrap().1.timed_out() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        self.bytes.read_at(offset, out)
    }
}

type Saved = tokio::task::JoinHandle<Result<SaveReport, ClientError>>;

/// Starts a save that blocks at its last stripe. Returns its source and its task.
async fn half_saved(
    client: &Client,
    step: u64,
    bytes: &Bytes,
    options: SaveOptions,
) -> (Arc<Gated>, Saved) {
    // The last stripe of (4,2) with blocks of 64 KiB. Blocked reads of two stripes would take all
    // threads, also those of restores.
    let last_stripe = (bytes.len() as u64 - 1) / (128 << 10) * (128 << 10);
    let gate = Gated::new(bytes, last_stripe);
    let (client, source) = (client.clone(), gate.clone());
    let saving = tokio::spawn(async move {
        let shards = vec![NewShard { name: "weights".parse().unwrap(), source }];
        client.save(&job(), Step(step), shards, options, quiet()).await
    });
    gate.reached.notified().await;
    (gate, saving)
}

async fn save_once(
    client: &Client,
    step: u64,
    bytes: &Bytes,
    options: SaveOptions,
) -> Result<SaveReport, ClientError> {
    client.save(&job(), Step(step), vec![shard("weights", bytes)], options, quiet()).await
}

async fn assert_restores(client: &Client, step: u64, bytes: &Bytes) {
    let (out, report) = restore(client, step).await.unwrap();
    assert!(read_file(&*out, "weights") == *bytes);
    assert_eq!(report.incidents, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_committed_step_is_not_saved_again_unless_it_is_to_be_replaced() {
    let world = World::start(5, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let (old, new) = (content(600_000, 1), content(500_000, 2));
    let first = save_once(&client, 7, &old, KEEP).await.unwrap();
    let before = world.snapshot();
    let error = save_once(&client, 7, &new, KEEP).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    assert!(error.to_string().contains("--replace"), "{error}");
    assert_eq!(world.snapshot(), before);

    let (gate, saving) = half_saved(&client, 7, &new, REPLACE).await;
    assert_restores(&client, 7, &old).await;
    world.assert_invariant(&client, 7).await;
    gate.open();
    let second = saving.await.unwrap().unwrap();
    assert!(second.generation > first.generation && second.save != first.save);
    assert_restores(&client, 7, &new).await;
    world.assert_swept(&client).await;
    assert_eq!(world.files_of(first.save), []);
    assert_restores(&client, 7, &new).await;
    world.assert_invariant(&client, 7).await;
    assert_eq!(client.list_steps(None).await.unwrap().len(), 1);
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn of_two_saves_of_a_step_one_wins_and_the_other_is_told() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let clients = [world.client_of(1), world.client_of(2)];
    for step in 0..12 {
        let contents = [content(300_000, 2 * step), content(300_001, 2 * step + 1)];
        let (a, b) = tokio::join!(
            save_once(&clients[0], step, &contents[0], KEEP),
            save_once(&clients[1], step, &contents[1], KEEP)
        );
        let (won, lost) = match (a, b) {
            (Ok(_), Err(lost)) => (0, lost),
            (Err(lost), Ok(_)) => (1, lost),
            other => panic!("{other:?}"),
        };
        assert!(matches!(lost.kind(), ErrorKind::Exists | ErrorKind::Fenced), "{lost}");
        assert_restores(&clients[0], step, &contents[won]).await;
    }
    // The second save begins while the first one sends its bytes.
    let bytes = content(600_000, 99);
    let (gate, saving) = half_saved(&clients[0], 50, &bytes, KEEP).await;
    let error = save_once(&clients[1], 50, &content(9, 9), REPLACE).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists, "{error}");
    gate.open();
    saving.await.unwrap().unwrap();
    assert_restores(&clients[1], 50, &bytes).await;
    world.assert_swept(&clients[0]).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn the_save_of_a_client_that_died_gives_way_after_its_lease() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let (dead, client) = (world.client(), world.client());
    let (gate, saving) = half_saved(&dead, 3, &content(600_000, 1), KEEP).await;
    let files = world.files(|path| path.ends_with(".rep")).len();
    assert!(files > 0);
    saving.abort();
    assert!(saving.await.unwrap_err().is_cancelled());
    gate.open();
    let bytes = content(600_000, 2);
    let error = save_once(&client, 3, &bytes, KEEP).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists, "the lease lives: {error}");
    tokio::time::sleep(world.lease + Duration::from_secs(1)).await;
    let saved = save_once(&client, 3, &bytes, KEEP).await.unwrap();
    assert_restores(&client, 3, &bytes).await;
    world.assert_swept(&client).await;
    assert!(!world.files_of(saved.save).is_empty());
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_save_that_nobody_follows_is_collected_and_its_late_writes_are_refused() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let (voice, client) = (world.voice(Role::Client, "late"), world.client());
    let (gateway, holder) = (world.node_address(1), world.node_address(2));
    let begun = voice.begin(&gateway, 3).await.unwrap();
    let bytes = content(200_000, 4);
    let call = block_call(&begun, bytes.len());
    voice.put_block(&holder, &call, &bytes).await.unwrap();
    assert_eq!(world.files_of(begun.save).len(), 1);
    tokio::time::sleep(3 * world.lease).await;
    world.assert_swept(&client).await;
    assert_eq!(world.files_of(begun.save), []);

    let root = empty_root(&begun, 3, "weights");
    let (shard, generation) = (root.shard, begun.generation);
    let record = PutRecord { shard, record: RecordName::Leaves, generation, bytes: vec![1; 50] };
    let commit = CommitSave { job: job(), step: Step(3), save: begun.save, shards: 1 };
    let kinds = [
        voice.put_block(&holder, &call, &bytes).await.map(drop).unwrap_err(),
        voice.ask(&holder, &record).await.unwrap_err(),
        voice.ask(&gateway, &RenewLease { lease: begun.lease }).await.unwrap_err(),
        voice.ask(&gateway, &CompleteShard { root }).await.unwrap_err(),
    ];
    assert_eq!(kinds.map(|error| error.kind()), [ErrorKind::Fenced; 4]);
    // The step has no entry any more, so there is nothing to commit.
    let error = voice.ask(&gateway, &commit).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Fenced | ErrorKind::NotFound), "{error}");
    assert_eq!(world.files_of(begun.save), []);

    // The same after another client has saved the step meanwhile.
    let saved = save_once(&client, 3, &bytes, KEEP).await.unwrap();
    let error = voice.ask(&gateway, &commit).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    let abort = AbortSave { job: job(), step: Step(3), save: begun.save };
    voice.ask(&gateway, &abort).await.unwrap();
    assert_restores(&client, 3, &bytes).await;
    assert_eq!(client.list_steps(None).await.unwrap()[0].saved.save, saved.save);
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_dies_in_mid_save_is_replaced_by_a_spare() {
    for victim in [1, 3, 5] {
        let mut world = World::start(5, &[(4, 2)], 64 << 10).await;
        let client = world.client_of(0);
        let bytes = content(900_000, 1);
        let (gate, saving) = half_saved(&client, 1, &bytes, KEEP).await;
        world.kill(victim).await;
        let began = tokio::time::Instant::now();
        gate.open();
        saving.await.unwrap().unwrap();
        assert!(began.elapsed() < world.lease, "the save began anew");
        assert_restores_without_incident_of_others(&client, &bytes).await;
        world.assert_invariant(&client, 1).await;
        world.assert_idle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_falls_silent_costs_no_lease() {
    let mut world = World::start(6, &[(4, 2)], 64 << 10).await;
    // Only one of the seeds answers at first, so that it becomes the gateway.
    world.kill(4).await;
    let client = world.client_of_all(&[4, 3]);
    let bytes = content(900_000, 1);
    let (gate, saving) = half_saved(&client, 1, &bytes, KEEP).await;
    world.boot(4);
    let _silent = world.silence(3).await;
    let began = tokio::time::Instant::now();
    gate.open();
    saving.await.unwrap().unwrap();
    assert!(began.elapsed() > world.lease, "the save waited for node 3 as a holder");
    assert_restores_without_incident_of_others(&world.client_of(0), &bytes).await;
}

/// Restores step 1 and checks that only the dead node causes incidents.
async fn assert_restores_without_incident_of_others(client: &Client, bytes: &Bytes) {
    let (out, report) = restore(client, 1).await.unwrap();
    assert!(read_file(&*out, "weights") == *bytes);
    let other = report.incidents.iter().find(|incident| !incident.contains("is left out"));
    assert_eq!(other, None);
}

#[tokio::test(start_paused = true)]
async fn without_a_spare_the_save_begins_anew_with_a_smaller_code() {
    let mut world = World::start(6, &[(6, 4), (4, 2)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(900_000, 1);
    let (gate, saving) = half_saved(&client, 1, &bytes, KEEP).await;
    world.kill(4).await;
    gate.open();
    let saved = saving.await.unwrap().unwrap();
    assert_eq!((saved.n, saved.k), (4, 2));
    assert_restores(&client, 1, &bytes).await;
    world.boot(4);
    world.assert_swept(&client).await;
    world.assert_invariant(&client, 1).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_spare_a_holder_that_restarts_is_waited_for() {
    let mut world = World::start(6, &[(6, 4), (4, 2)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(900_000, 1);
    world.requests.listen();
    let (gate, saving) = half_saved(&client, 1, &bytes, KEEP).await;
    world.kill(4).await;
    gate.open();
    tokio::time::sleep(Duration::from_secs(5)).await;
    world.boot(4);
    let saved = saving.await.unwrap().unwrap();
    assert_eq!((saved.n, saved.k), (6, 4));
    assert_eq!(world.requests.of::<BeginSave>().len(), 1, "the save does not begin anew");
    assert_restores(&client, 1, &bytes).await;
    world.assert_idle().await;
}

/// Fills the disk of a machine above its node's high-water mark. Records still have room.
fn fill_disk(world: &World, index: usize) {
    let disk = &world.machines[index].disk;
    let used = disk.space().unwrap();
    let used_bytes = used.total_bytes - used.free_bytes;
    disk.create_new("full").unwrap().write_at(&[1; 9 << 20], 0).unwrap();
    disk.set_capacity(used_bytes + (10 << 20));
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_is_replaced_at_once() {
    let world = World::start(6, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    fill_disk(&world, 2);
    let began = tokio::time::Instant::now();
    let bytes = content(2_000_000, 1);
    save(&client, 1, &[("a", &bytes), ("b", &bytes)]).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(
        world.files(|path| path.ends_with(".rep")).iter().find(|(node, _)| *node == 2),
        None
    );
    world.assert_invariant(&client, 1).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_to_store_nothing_any_more_is_replaced_at_once() {
    let mut world = World::start(6, &[(4, 2)], 64 << 10).await;
    let client = world.client_of(0);
    // The catalogue server has not heard yet that the node stores nothing.
    world.network.partition(&address(0), &address(2));
    world.kill(2).await;
    world.without_storage.insert(2);
    world.boot(2);
    let began = tokio::time::Instant::now();
    let bytes = content(2_000_000, 1);
    let saved = save_once(&client, 1, &bytes, KEEP).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(saved.record.nodes().iter().any(|node| node.name == world.machines[2].name));
    world.network.heal(&address(0), &address(2));
    assert_restores(&client, 1, &bytes).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_without_a_spare_does_not_count_for_the_code() {
    let world = World::start(6, &[(6, 4), (4, 2)], 64 << 10).await;
    let client = world.client();
    fill_disk(&world, 2);
    let bytes = content(900_000, 1);
    let saved = save_once(&client, 1, &bytes, KEEP).await.unwrap();
    assert_eq!((saved.n, saved.k), (4, 2));
    assert_restores(&client, 1, &bytes).await;
    world.assert_swept(&client).await;
    // When no configured code can do without the full node, the save is tried with it and fails.
    for index in [3, 4] {
        fill_disk(&world, index);
    }
    let error = save_once(&client, 2, &bytes, KEEP).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("high-water mark"), "{error}");
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_begin_that_comes_twice_opens_one_save() {
    let mut world = World::start(5, &[(4, 2)], 64 << 10).await;
    let (voice, client) = (world.voice(Role::Client, "twice"), world.client());
    let gateways = [1, 2, 3].map(|index| world.node_address(index));
    let save = SaveId([9; 12]);
    let begin = async |gateway: usize, save, replace| {
        voice.begin_as(&gateways[gateway], 1, save, replace).await
    };
    let (first, second) = tokio::join!(begin(0, save, false), begin(1, save, false));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!((first.lease, first.generation), (second.lease, second.generation));
    let other = begin(2, SaveId([8; 12]), true).await.unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Exists, "{other}");
    // A begin that arrives late is refused: its save is over. The same holds if the save was
    // committed.
    world.kill(5).await;
    let abort = AbortSave { job: job(), step: Step(1), save };
    voice.ask(&gateways[0], &abort).await.unwrap();
    let late = begin(1, save, false).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Fenced, "{late}");
    world.boot(5);
    world.assert_swept(&client).await;
    let saved = save_once(&client, 1, &content(300_000, 1), KEEP).await.unwrap();
    let late = begin(1, saved.save, true).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Fenced, "{late}");
    assert_restores(&client, 1, &content(300_000, 1)).await;
    world.assert_idle().await;
}

/// The node may have left since the save began. A staging daemon gives a step up if its save is
/// invalid, and tries again if it is unavailable.
#[tokio::test(start_paused = true)]
async fn a_ring_with_a_node_that_nobody_knows_is_not_sealed() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let (voice, gateway) = (world.voice(Role::Client, "sealer"), world.node_address(1));
    let begun = voice.begin(&gateway, 1).await.unwrap();
    let root = empty_root(&begun, 1, "weights");
    let mut unknown = root.clone();
    unknown.ring[1].node = NodeId(77);
    let error = voice.ask(&gateway, &CompleteShard { root: unknown }).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("is not registered") && text.contains("save again"), "{text}");
    assert_eq!(world.catalogue_keys("s/"), Vec::<String>::new());
    voice.ask(&gateway, &CompleteShard { root }).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn too_few_nodes_are_refused_with_what_to_do() {
    let world = World::start(3, &[(6, 4), (4, 2)], 64 << 10).await;
    let client = world.client();
    let error = save_once(&client, 1, &content(9, 9), KEEP).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("3 storage nodes are live") && text.contains("needs 4"), "{text}");
    assert!(text.contains("start more nodes"), "{text}");
    assert_eq!(world.catalogue_keys("c/"), Vec::<String>::new());
    assert_eq!(world.files(|_| true), []);
}

#[tokio::test(start_paused = true)]
async fn a_save_of_several_shards_is_visible_whole_or_not_at_all() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let (good, late) = (content(300_000, 1), content(300_000, 2));
    let gate = Gated::new(&late, 0);
    let (saver, source) = (client.clone(), gate.clone());
    let first = shard("good", &good);
    let saving = tokio::spawn(async move {
        let shards = vec![first, NewShard { name: "late".parse().unwrap(), source }];
        saver.save(&job(), Step(1), shards, KEEP, quiet()).await
    });
    gate.reached.notified().await;
    assert_eq!(client.list_steps(None).await.unwrap(), []);
    let error = restore_error(&client, 1).await.to_string();
    assert!(error.contains("job/1 is not committed"), "{error}");
    gate.open();
    saving.await.unwrap().unwrap();
    save(&client, 2, &[("only", &good)]).await;
    let (out, report) = restore(&client, 1).await.unwrap();
    assert_eq!((read_file(&*out, "late"), report.shards), (late.to_vec(), 2));
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_save_needs_marks_on_all_nodes_but_so_few() {
    // Four of six nodes are more than half. Only the rule for rings refuses the second step.
    let mut world = World::start(6, &[(4, 2)], 64 << 10).await;
    let (voice, gateway) = (world.voice(Role::Client, "marks"), world.node_address(1));
    for (step, away) in [(1, vec![6]), (2, vec![5, 6])] {
        let begun = voice.begin(&gateway, step).await.unwrap();
        let root = empty_root(&begun, step, "empty");
        voice.ask(&gateway, &CompleteShard { root }).await.unwrap();
        for &index in &away {
            world.kill(index).await;
        }
        let commit = CommitSave { job: job(), step: Step(step), save: begun.save, shards: 1 };
        let committed = voice.ask(&gateway, &commit).await;
        if away.len() == 1 {
            committed.unwrap();
        } else {
            assert_eq!(committed.unwrap_err().kind(), ErrorKind::Unavailable);
            let steps = world.client().list_steps(None).await.unwrap();
            assert_eq!(steps.iter().map(|view| view.step).collect::<Vec<_>>(), [Step(1)]);
        }
        for index in away {
            world.boot(index);
        }
        world.until_live(6).await;
        voice.ask(&gateway, &commit).await.unwrap();
    }
    assert_eq!(world.client().list_steps(None).await.unwrap().len(), 2);
}
