//! Checks that only a lying node, a rotten copy or an unlucky moment reaches. Each is the last
//! check before data would be lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use rapidraid::format::file::{FileKey, FileName};
use rapidraid::format::records::{
    CommitMark, Home, LAYOUT_STANDARD, Leaves, Receipt, Record, RemoveReason, ShardRoot,
    StripeRecord, StripeState, Tombstone,
};
use rapidraid::format::tree::grain_hash;
use rapidraid::gf::Fingerprint;
use rapidraid::id::{Attempt, DbId, Epoch, Generation, NodeId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::{Address, Role};
use rapidraid::node::Node;
use rapidraid::store::{BlockSpec, Disk, Kv, PieceSpec, RecordScope};
use rapidraid::wire::calls::{
    ArchiveEvent, CopyReplica, DropReplicas, GetKey, PlanChoice, PutMark, PutReceipt, PutTombstone,
    ReadFile, ReadFileAnswer, RunPart,
};
use rapidraid::wire::order::RunReport;
use rapidraid::wire::{Call, RemoteError, answer_to_bytes, parse_answer};

use world::between::Change;
use world::{
    CLUSTER, World, address, content, job, options, read_file, read_sectors, restore, save,
};

const BLOCK: u64 = 64 << 10;
/// One stripe of two blocks.
const LEN: usize = 2 * BLOCK as usize - 1000;

/// Starts four nodes and saves step 1 on them. Returns the world and the root of the step's only
/// shard.
async fn with_step() -> (World, ShardRoot) {
    let world = World::start(4, &[(4, 2)], BLOCK).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let root = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].0.clone();
    (world, root)
}

async fn assert_exact(world: &World) {
    let (out, _) = restore(&world.client(), 1).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 1));
}

fn of_names(world: &World, part: &str) -> Vec<(usize, String)> {
    world.files(|path| path.contains(part))
}

/// Archives step 1. Returns the attempt, the generation and the code id of stripe 0.
async fn archived(world: &World) -> (Attempt, Generation, u64) {
    let client = world.client();
    let chain = options(PlanChoice::Chain);
    client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await.unwrap();
    let state = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].1.stripe(0);
    let Some(StripeState::Archived { attempt, generation, code, .. }) = state else {
        panic!("{state:?}")
    };
    (attempt, generation, code.0)
}

pub type Lie = fn(&mut RunReport);

/// A proxy that falsifies the node's report of a run.
pub struct Liar(pub Lie);

impl Change for Liar {
    fn answer(&self, number: u8, frame: Bytes) -> Bytes {
        let report = (number == RunPart::NUMBER).then(|| parse_answer::<RunReport>(&frame));
        let Some(Ok(Ok(mut report))) = report else { return frame };
        self.0(&mut report);
        answer_to_bytes(&Ok(report)).unwrap().into()
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_proof_does_not_fit_is_named_and_nothing_is_dropped() {
    let lies: [(Lie, &str); 4] = [
        (|report| report.proofs[0].fingerprints[0] = Fingerprint::ZERO, "on node02"),
        (|report| report.proofs[0].fingerprints.truncate(0), "on node02"),
        (|report| report.proofs[0].fingerprints.push(Fingerprint::ZERO), "on node02"),
        (|report| report.proofs.clear(), "which no node proved"),
    ];
    for (lie, named) in lies {
        let (mut world, _) = with_step().await;
        let before = of_names(&world, ".rep");
        let _liar = world.between(2, Liar(lie)).await;
        world.until_live(4).await;
        let client = world.client();
        let chain = options(PlanChoice::Chain);
        let ended = client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await;
        let error = ended.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains(named), "{error}");
        assert_eq!(of_names(&world, ".rep"), before);
        assert_eq!(of_names(&world, "receipt-"), []);
        let state = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].1.stripe(0);
        assert!(matches!(state, Some(StripeState::Archiving { .. })), "{state:?}");
        assert_exact(&world).await;
    }
}

/// A proxy that answers with an error although its node has stored the receipt.
struct NoReceipts;

impl Change for NoReceipts {
    fn answer(&self, number: u8, frame: Bytes) -> Bytes {
        if number != PutReceipt::NUMBER {
            return frame;
        }
        let failure =
            RemoteError { kind: ErrorKind::Io, message: "no receipt is kept here".into() };
        answer_to_bytes::<()>(&Err(failure)).unwrap().into()
    }
}

#[tokio::test(start_paused = true)]
async fn a_stripe_is_archived_only_when_all_its_nodes_have_the_receipt() {
    let (mut world, _) = with_step().await;
    let before = of_names(&world, ".rep");
    let _between = world.between(2, NoReceipts).await;
    world.until_live(4).await;
    let (client, chain) = (world.client(), options(PlanChoice::Chain));
    let ended = client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await;
    let error = ended.unwrap_err();
    assert!(error.to_string().contains("no receipt is kept here"), "{error}");
    assert_eq!(of_names(&world, ".rep"), before);
    let state = client.show_step(&job(), Some(Step(1))).await.unwrap().shards[0].1.stripe(0);
    assert!(matches!(state, Some(StripeState::Archiving { .. })), "{state:?}");
}

/// A proxy that flips one bit of one hop's stream.
#[derive(Default)]
struct Noise(AtomicBool);

impl Change for Noise {
    fn stream(&self, bytes: Bytes) -> Bytes {
        if self.0.swap(true, Ordering::SeqCst) {
            return bytes;
        }
        let mut bytes = bytes.to_vec();
        bytes[0] ^= 1;
        bytes.into()
    }
}

#[tokio::test(start_paused = true)]
async fn a_bit_that_turns_between_two_hops_ends_the_plan_and_names_the_input() {
    let (mut world, _) = with_step().await;
    // At most one of the two nodes is the chain's head, which receives no stream.
    let _noise =
        [world.between(2, Noise::default()).await, world.between(3, Noise::default()).await];
    world.until_live(4).await;
    let mut notes = Vec::new();
    let mut listen = |event: &ArchiveEvent| {
        if let ArchiveEvent::Note(text) = event {
            notes.push(text.clone());
        }
    };
    let client = world.client();
    let chain = options(PlanChoice::Chain);
    let report = client.archive(&job(), Some(Step(1)), chain, &mut listen).await.unwrap();
    assert_eq!(report.undropped, 0);
    let is_named = |note: &String| note.contains("Stream(") && note.contains("corrupt in grain 0");
    assert!(!notes.is_empty() && notes.iter().all(is_named), "{notes:?}");
    let held = world.assert_invariant(&client, 1).await;
    assert_eq!((held.pieces, held.replicas), (4, 0));
    assert_exact(&world).await;
}

/// Makes the node claim another catalogue's epoch just before the next change of its disk.
fn claim_before_the_next_change(world: &World, index: usize) {
    let store = world.nodes[&index].store().clone();
    let home = Home { name: "elsewhere".parse().unwrap(), address: "elsewhere:1".into() };
    let claim = move || store.claim_epoch(Epoch(2), DbId([9; 16]), home).unwrap();
    world.machines[index].power.cut_after(0, claim);
}

#[tokio::test(start_paused = true)]
async fn what_was_admitted_before_a_claim_and_written_after_it_is_not_answered_for() {
    let (world, root) = with_step().await;
    let boss = world.voice(Role::Node, "boss");
    let generation = Generation { epoch: Epoch(1), counter: 1000 };
    let refused = |answer: Result<(), rapidraid::net::call::CallError>, index: usize| {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
        assert_eq!(world.nodes[&index].store().highest_seen_epoch(), Epoch(2));
    };

    let saved = world.client().show_step(&job(), Some(Step(1))).await.unwrap().step.saved;
    let mark = CommitMark { cluster: CLUSTER, saved, root: root.clone() };
    let mark = PutMark { bytes: mark.to_bytes().unwrap(), epoch: Epoch(1) };
    claim_before_the_next_change(&world, 2);
    refused(boss.ask(&world.node_address(2), &mark).await, 2);

    let stripe = StripeId { shard: root.shard, index: 0 };
    let (attempt, code) = (Attempt([1; 16]), rapidraid::code::table::find(4, 2).unwrap().id());
    let receipt = Receipt {
        cluster: CLUSTER,
        stripe,
        attempt,
        generation,
        code,
        pieces: vec![],
        order: Generation::default(),
    };
    let (bytes, coordinator) = (receipt.to_bytes().unwrap(), NodeId(1));
    let receipt = PutReceipt { bytes, owner: generation, coordinator };
    claim_before_the_next_change(&world, 3);
    refused(boss.ask(&world.node_address(3), &receipt).await, 3);

    let (save, reason) = (root.save, RemoveReason::Deleted);
    let tombstone = Tombstone { cluster: CLUSTER, save, generation, reason };
    let tombstone = PutTombstone { bytes: tombstone.to_bytes().unwrap() };
    claim_before_the_next_change(&world, 4);
    refused(boss.ask(&world.node_address(4), &tombstone).await, 4);
}

/// Four nodes answer but cannot store the epoch that they would have to claim, so a rebuild cannot
/// rely on them.
#[tokio::test(start_paused = true)]
async fn a_rebuild_that_too_few_nodes_have_claimed_ends() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    world.kill(0).await;
    world.machines[0].catalogue.set(None);
    for machine in &world.machines[3..=6] {
        machine.disk.set_call_guard(|changes| !changes);
    }
    let client = world.client_of(1);
    let on = Address { host_port: address(1), node: None };
    let refused = client.rebuild_catalogue(Some(&on)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("2 of 6 storage nodes"), "{refused}");
    assert!(world.nodes.values().all(|node| !node.is_writable_catalogue_server()));
    // A catalogue database without entries and without an epoch.
    let map = world.machines[1].catalogue.get().unwrap();
    assert!(map.scan(b"", None, 10).unwrap().is_empty());
    for machine in &world.machines[3..=6] {
        machine.disk.set_call_guard(|_| true);
    }
    let report = client.rebuild_catalogue(Some(&on)).await.unwrap();
    assert_eq!((report.epoch, report.reached.len()), (Epoch(3), 6));
}

#[tokio::test(start_paused = true)]
async fn a_save_that_has_a_mark_is_not_aborted() {
    let (world, root) = with_step().await;
    let boss = world.voice(Role::Node, "boss");
    let generation = Generation { epoch: Epoch(1), counter: 1000 };
    let (save, reason) = (root.save, RemoveReason::Aborted);
    let tombstone = Tombstone { cluster: CLUSTER, save, generation, reason };
    let call = PutTombstone { bytes: tombstone.to_bytes().unwrap() };
    let before = world.snapshot();
    for index in 1..=4 {
        let refused = boss.ask(&world.node_address(index), &call).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
        assert!(refused.to_string().contains("commit mark"), "{refused}");
    }
    assert_eq!(world.snapshot(), before);
    assert_exact(&world).await;
}

#[tokio::test(start_paused = true)]
async fn replicas_stay_where_the_piece_or_its_receipt_is_not() {
    let (world, root) = with_step().await;
    let (attempt, generation, _) = archived(&world).await;
    let boss = world.voice(Role::Node, "boss");
    let stripe = StripeId { shard: root.shard, index: 0 };
    for (index, part) in [(2, "/piece-"), (3, "/receipt-")] {
        recreate_replica(&world, index, stripe);
        let found = of_names(&world, part).into_iter().find(|(machine, _)| *machine == index);
        world.machines[index].disk.remove(&found.unwrap().1).unwrap();
        let call = DropReplicas { stripe, attempt, generation };
        let refused = boss.ask(&world.node_address(index), &call).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
    }
    let left: Vec<usize> = of_names(&world, ".rep").iter().map(|(index, _)| *index).collect();
    assert_eq!(left, [2, 3]);
}

/// Writes a replica of the first block to a node, as if it had been recreated late.
fn recreate_replica(world: &World, index: usize, stripe: StripeId) {
    let spec = BlockSpec { stripe, block: 0, layout: LAYOUT_STANDARD, len_bytes: 1000 };
    let mut writer = world.nodes[&index].store().create_block_writer(spec, None).unwrap();
    writer.write(&content(1000, 5)).unwrap();
    writer.finish(None).unwrap();
}

/// A proxy of the catalogue server: a node notes a later epoch at the moment when the first answer
/// reaches it.
struct EpochBegins {
    node: Arc<Node>,
    is_armed: Arc<AtomicBool>,
}

impl Change for EpochBegins {
    fn answer(&self, number: u8, frame: Bytes) -> Bytes {
        if number == GetKey::NUMBER && self.is_armed.swap(false, Ordering::Relaxed) {
            self.node.store().raise_highest_seen_epoch(Epoch(2)).unwrap();
        }
        frame
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_stay_if_an_epoch_begins_while_the_catalogue_is_asked() {
    let (mut world, root) = with_step().await;
    let (attempt, generation, _) = archived(&world).await;
    let stripe = StripeId { shard: root.shard, index: 0 };
    recreate_replica(&world, 2, stripe);
    let is_armed = Arc::new(AtomicBool::new(false));
    let begins = EpochBegins { node: world.nodes[&2].clone(), is_armed: is_armed.clone() };
    let _between = world.between(0, begins).await;
    world.until_live(4).await;
    let boss = world.voice(Role::Node, "boss");
    is_armed.store(true, Ordering::Relaxed);
    let call = DropReplicas { stripe, attempt, generation };
    let refused = boss.ask(&world.node_address(2), &call).await.unwrap_err();
    assert!(refused.to_string().contains("epoch 2 has begun"), "{refused}");
    assert_eq!(of_names(&world, ".rep").len(), 1);
}

/// A receipt of an earlier attempt whose pieces are dropped goes with them.
#[tokio::test(start_paused = true)]
async fn a_drop_leaves_no_receipt_of_another_attempt() {
    let (world, root) = with_step().await;
    let (attempt, generation, _) = archived(&world).await;
    let stripe = StripeId { shard: root.shard, index: 0 };
    recreate_replica(&world, 2, stripe);
    let (scope, store) = (RecordScope::Stripe(stripe), world.nodes[&2].store());
    let receipt = of_names(&world, "/receipt-").into_iter().find(|(machine, _)| *machine == 2);
    let bytes = read_sectors(&*world.machines[2].disk, &receipt.unwrap().1);
    let earlier = format!("receipt-{}", Attempt([1; 16]));
    store.put_record_file(scope, &earlier, &bytes).unwrap();
    let names = || -> Vec<String> {
        let files = store.list_record_files(scope).unwrap().into_iter().map(|(name, _)| name);
        files.filter(|name| name.starts_with("receipt-")).collect()
    };
    assert_eq!(names().len(), 2);
    let boss = world.voice(Role::Node, "boss");
    let call = DropReplicas { stripe, attempt, generation };
    let dropped = boss.ask(&world.node_address(2), &call).await.unwrap();
    assert_eq!(dropped.files, 1);
    assert_eq!(names(), [format!("receipt-{attempt}")]);
}

#[tokio::test(start_paused = true)]
async fn records_that_the_commit_did_not_fix_are_passed_over() {
    let (world, root) = with_step().await;
    let scopes = [
        RecordScope::Shard(root.shard),
        RecordScope::Stripe(StripeId { shard: root.shard, index: 0 }),
    ];
    for (scope, name) in scopes.into_iter().zip(["leaves", "record"]) {
        for good in 1..=4 {
            let mut kept = Vec::new();
            for index in (1..=4).filter(|index| *index != good) {
                let store = world.nodes[&index].store();
                let bytes = store.get_record_file(scope, name).unwrap().unwrap();
                let other = if name == "leaves" {
                    let mut leaves = Leaves::parse(&bytes).unwrap();
                    leaves.hashes[0][0] ^= 1;
                    leaves.to_bytes()
                } else {
                    let mut record = StripeRecord::parse(&bytes).unwrap();
                    *record.fixed.last_mut().unwrap() ^= 1;
                    record.to_bytes()
                };
                store.put_record_file(scope, name, &other.unwrap()).unwrap();
                kept.push((index, bytes));
            }
            assert_exact(&world).await;
            for (index, bytes) in kept {
                world.nodes[&index].store().put_record_file(scope, name, &bytes).unwrap();
            }
        }
    }
}

/// A proxy that replaces the bytes of its node's files and sends hashes that match the forged
/// bytes.
struct Forger;

impl Change for Forger {
    fn answer(&self, number: u8, frame: Bytes) -> Bytes {
        let answer = (number == ReadFile::NUMBER).then(|| parse_answer::<ReadFileAnswer>(&frame));
        let Some(Ok(Ok(mut answer))) = answer else { return frame };
        let forged = vec![7; answer.len_bytes as usize];
        answer.hashes = vec![grain_hash(answer.len_bytes, 0, &forged).unwrap()];
        answer_to_bytes(&Ok(answer)).unwrap().into()
    }

    fn bulk(&self, number: u8, bytes: Bytes) -> Bytes {
        if number == ReadFile::NUMBER { vec![7; bytes.len()].into() } else { bytes }
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_gives_other_bytes_with_hashes_that_fit_them_is_left_out() {
    for is_archived in [false, true] {
        let mut named = 0;
        for forger in 1..=4 {
            let (mut world, _) = with_step().await;
            if is_archived {
                archived(&world).await;
            }
            let _forger = world.between(forger, Forger).await;
            world.until_live(4).await;
            let (out, report) = restore(&world.client(), 1).await.unwrap();
            assert!(read_file(&*out, "weights") == content(LEN, 1));
            let is_named = |text: &String| text.contains("hashes are not those of the record");
            assert!(report.incidents.iter().all(is_named), "{:?}", report.incidents);
            named += report.incidents.len();
        }
        // A restore first asks one of the two holders of each of two blocks, or the holders of two
        // of the four pieces.
        assert_eq!(named, 2, "archived: {is_archived}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_replica_is_made_again_of_the_bytes_that_were_saved_or_not_at_all() {
    let (mut world, root) = with_step().await;
    let stripe = StripeId { shard: root.shard, index: 0 };
    let holders = of_names(&world, "/block-00.rep");
    let [(here, path), (source, _)] = &holders[..] else { panic!("{holders:?}") };
    let key = FileKey::replica(stripe, 0);
    let (len_bytes, expected) = {
        let info = world.nodes[source].store().open_undamaged_file(key).unwrap().index_entry();
        (info.len_bytes, info.root)
    };
    world.machines[*here].disk.remove(path).unwrap();
    let call = CopyReplica {
        stripe,
        block: 0,
        len_bytes,
        root: expected,
        generation: Generation { epoch: Epoch(1), counter: 1000 },
        coordinator: NodeId(1),
        from: world.node_address(*source),
        bytes_per_s: None,
    };
    let forger = world.between(*source, Forger).await;
    world.until_live(4).await;
    let (boss, to) = (world.voice(Role::Node, "boss"), world.node_address(*here));
    let refused = boss.ask(&to, &call).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Lost, "{refused}");
    assert_eq!(of_names(&world, "/block-00.rep"), holders[1..]);
    drop(forger);
    world.doors.clear();
    world.kill(*source).await;
    world.boot(*source);
    boss.ask(&to, &call).await.unwrap();
    assert_eq!(of_names(&world, "/block-00.rep"), holders);
}

/// Without receipts the correct bytes of a piece are unknown. The blocks decoded from the pieces
/// are still checked.
#[tokio::test(start_paused = true)]
async fn decoded_bytes_are_what_was_saved_or_none() {
    for piece in 0..4 {
        let (world, root) = with_step().await;
        let (attempt, _, code) = archived(&world).await;
        let stripe = StripeId { shard: root.shard, index: 0 };
        for index in 1..=4 {
            let store = world.nodes[&index].store();
            store
                .remove_record_file(RecordScope::Stripe(stripe), &format!("receipt-{attempt}"))
                .unwrap();
            let name = FileName::Piece { piece, attempt };
            let key = FileKey { stripe, name };
            let Ok(file) = store.open_undamaged_file(key) else { continue };
            let (layout, len_bytes) = (LAYOUT_STANDARD, file.index_entry().len_bytes);
            store.remove_file(key).unwrap();
            let spec = PieceSpec { stripe, piece, attempt, code, layout, len_bytes };
            let mut writer = store.create_piece_writer(spec).unwrap();
            writer.write_grain(0, &content(len_bytes as usize, 9)).unwrap();
            writer.finish(&mut |_, _| ()).unwrap();
        }
        match restore(&world.client(), 1).await {
            Ok((out, _)) => assert!(read_file(&*out, "weights") == content(LEN, 1), "{piece}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_plan_that_one_node_refuses_holds_nothing_on_the_others() {
    let (world, _) = with_step().await;
    let id = |index: &usize| NodeId::of(&world.machines[*index].name);
    let last = (1..=4).max_by_key(id).unwrap();
    let disk = &world.machines[last].disk;
    let space = disk.space().unwrap();
    // The disk has room for records, but not for a piece and a block.
    disk.set_capacity(space.total_bytes - space.free_bytes + BLOCK);
    let (client, chain) = (world.client(), options(PlanChoice::Chain));
    let ended = client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await;
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // The memory is released at once, not after a timeout.
    let held: Vec<_> = world.nodes.values().map(|node| node.used_memory_by_share()[0]).collect();
    assert_eq!(held, [0; 5]);
    assert_exact(&world).await;
}
