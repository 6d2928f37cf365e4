//! Calls that nodes refuse: calls by the wrong role, writes over committed data, malformed
//! messages, forged evidence, and invalid orders.

#[path = "refused/orders.rs"]
mod orders;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use rapidraid::code::table;
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::records::{
    CommitMark, Leaves, Receipt, Record, RemoveReason, ShardRoot, StripeState, Tombstone,
};
use rapidraid::id::{Attempt, Epoch, Generation, NodeId, SaveId, ShardId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::call::CallError;
use rapidraid::net::frame::FramedRecv;
use rapidraid::net::{NetError, Role};
use rapidraid::wire::calls::{
    ALL, BeginSave, CompareAndSetKey, CopyReplica, DropReplicas, GetNodeStatus, Hello, PlanChoice,
    PurgeSave, PutBlock, PutLeaves, PutMark, PutPlaces, PutReceipt, PutRecord, PutTombstone,
    RecordName, RegisterNode, ReleasePart, ReservePart, RevokeLease, RunPart,
};
use rapidraid::wire::{
    AllowedCaller, Call, MAX_FRAME_BYTES, NodeAddress, StreamHeader, message_to_bytes,
    request_to_bytes,
};

use orders::order;

use world::raw::{Voice, block_call};
use world::{CLUSTER, World, content, job, options, read_file, restore, save};

/// Number of panics in this process since [`count_panics`]. A panic in a node's task ends only that
/// task, so the tests have to count.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // A failing test of another module panics on its own thread.
            let thread = std::thread::current();
            let is_test = |name: &str| name.contains("::") && !name.starts_with("refused::");
            if !thread.name().is_some_and(is_test) {
                PANICS.fetch_add(1, Ordering::SeqCst);
            }
            before(info);
        }));
    });
}

async fn assert_alive(voice: &Voice, node: &NodeAddress) {
    assert_eq!(voice.ask(node, &Hello { me: None }).await.unwrap().node, node.name);
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "something panicked");
}

fn kind_of<T: std::fmt::Debug>(answer: Result<T, CallError>) -> ErrorKind {
    answer.unwrap_err().kind()
}

/// Starts a world with step 1 archived and step 2 in replicas. Returns the world and the root of
/// step 2's shard.
async fn world_with_steps() -> (World, ShardRoot) {
    count_panics();
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    for step in [1, 2] {
        save(&client, step, &[("weights", &content(300_000, step))]).await;
    }
    client.archive(&job(), Some(Step(1)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    let shown = client.show_step(&job(), Some(Step(2))).await.unwrap();
    (world, shown.shards[0].0.clone())
}

async fn assert_both_steps(world: &World) {
    for step in [1, 2] {
        let (out, report) = restore(&world.client(), step).await.unwrap();
        assert_eq!(read_file(&*out, "weights"), content(300_000, step));
        assert_eq!(report.incidents, Vec::<String>::new());
    }
    world.assert_idle().await;
}

const GENERATION: Generation = Generation { epoch: Epoch(1), counter: 1000 };

/// Returns valid frames of all calls that would change something.
fn orders(root: &ShardRoot, mark: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let stripe = StripeId { shard: root.shard, index: 0 };
    let tombstone = Tombstone {
        cluster: CLUSTER,
        save: root.save,
        generation: GENERATION,
        reason: RemoveReason::Deleted,
    };
    let receipt = Receipt {
        cluster: CLUSTER,
        stripe,
        attempt: Attempt([1; 16]),
        generation: GENERATION,
        code: table::find(4, 2).unwrap().id(),
        pieces: vec![],
        order: Generation::default(),
    };
    let node = rapidraid::format::records::Node {
        name: "node02".parse().unwrap(),
        address: "nowhere:1".into(),
        zone: String::new(),
        rack: String::new(),
        storage: true,
    };
    let (coordinator, owner) = (NodeId(1), GENERATION);
    let (attempt, generation) = (Attempt([1; 16]), GENERATION);
    let from = NodeAddress { name: "node03".parse().unwrap(), host_port: "node03:7440".into() };
    let tombstone = tombstone.to_bytes().unwrap();
    let receipt = receipt.to_bytes().unwrap();
    let key = format!("s/{}/00000000", root.save);
    fn frame<C: Call>(call: C) -> (u8, Vec<u8>) {
        (C::NUMBER, request_to_bytes(&call).unwrap())
    }
    vec![
        frame(RegisterNode { node }),
        frame(CompareAndSetKey { key, expected: Some(1), value: None }),
        frame(CompareAndSetKey { key: "c/job/x".into(), expected: None, value: Some(vec![1]) }),
        frame(RevokeLease { lease: rapidraid::id::LeaseId([0; 16]) }),
        frame(ReservePart { order: order(stripe) }),
        frame(RunPart { run: [3; 16] }),
        frame(ReleasePart { run: [3; 16] }),
        frame(PutMark { bytes: mark.to_vec(), epoch: Epoch(1) }),
        frame(PutReceipt { bytes: receipt, owner, coordinator }),
        frame(PutTombstone { bytes: tombstone }),
        frame(DropReplicas { stripe, attempt, generation }),
        frame(CopyReplica {
            stripe,
            block: 0,
            len_bytes: 10,
            root: [0; 32],
            generation,
            coordinator,
            from,
            bytes_per_s: None,
        }),
        frame(PurgeSave { save: root.save }),
        frame(PutLeaves { bytes: vec![], owner, coordinator }),
        frame(PutPlaces { stripe, generation, coordinator, bytes: vec![] }),
    ]
}

#[tokio::test(start_paused = true)]
async fn a_client_may_make_no_call_of_nodes() {
    let (world, root) = world_with_steps().await;
    let client = world.voice(Role::Client, "client");
    let mark = world.files(|path| path.ends_with("/commit")).remove(0);
    let mark = read_file(&*world.machines[mark.0].disk, &mark.1);
    let before = world.snapshot();
    let mut frames = orders(&root, &mark);
    let told = frames.len();
    for &(number, name, who) in ALL.iter().filter(|(_, _, who)| *who == AllowedCaller::Nodes) {
        assert_eq!(who, AllowedCaller::Nodes, "{name}");
        frames.push((number, vec![number]));
        frames.push((number, [vec![number], vec![7; 100]].concat()));
    }
    assert!(frames.len() > 2 * told);
    for node in (0..=4).map(|index| world.node_address(index)) {
        for (number, frame) in &frames {
            let error = client.send(&node, frame).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "call {number}: {error}");
            assert!(error.to_string().contains("client is a client"), "{error}");
        }
        assert_alive(&client, &node).await;
    }
    assert_eq!(world.snapshot(), before);
    assert_both_steps(&world).await;
}

#[tokio::test(start_paused = true)]
async fn a_clients_stream_into_a_hop_is_stopped() {
    let (world, _) = world_with_steps().await;
    let (client, node) = (world.voice(Role::Client, "client"), world.voice(Role::Node, "stranger"));
    let to = world.node_address(2);
    let header = message_to_bytes(&StreamHeader { run: [1; 16], stream: 1 }, "a header").unwrap();
    let header = [(header.len() as u32).to_le_bytes().to_vec(), header].concat();
    let garbage = vec![1, 0, 0, 0, 255];
    for (voice, bytes, kind) in [
        (&client, &header, ErrorKind::Denied),
        (&client, &garbage, ErrorKind::Denied),
        // A node's stream that no hop expects, and a stream with a malformed header.
        (&node, &header, ErrorKind::NotFound),
        (&node, &garbage, ErrorKind::Invalid),
    ] {
        let connection = voice.connection(&to).await;
        let mut stream = connection.open_uni().await.unwrap();
        let mut stopped = None;
        for _ in 0..100 {
            if let Err(error) = stream.write(Bytes::copy_from_slice(bytes)).await {
                stopped = Some(error);
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(stopped, Some(NetError::Stopped { code: kind.wire_code() }));
        assert_alive(voice, &to).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_committed_is_not_overwritten() {
    let (world, root) = world_with_steps().await;
    let client = world.voice(Role::Client, "client");
    let before = world.snapshot();
    let stripe = StripeId { shard: root.shard, index: 0 };
    let other = content(65_536, 77);
    let mark = RecordName::Mark;
    let receipt = RecordName::Receipt { index: 0, attempt: Attempt([1; 16]) };
    let leaves = Leaves { root: root.clone(), hashes: vec![] }.to_bytes().unwrap();
    for index in 1..=4 {
        let node = world.node_address(index);
        for generation in [GENERATION, Generation { epoch: Epoch(1), counter: 1 }] {
            for block in 0..2 {
                let call = PutBlock {
                    stripe,
                    block,
                    len_bytes: other.len() as u64,
                    generation,
                    fingerprint_key: world::raw::KEY,
                    forward: None,
                };
                let answer = client.put_block(&node, &call, &other).await;
                assert_eq!(kind_of(answer), ErrorKind::Denied);
            }
            for record in [RecordName::Leaves, RecordName::Stripe { index: 0 }, mark, receipt] {
                let bytes = leaves.clone();
                let call = PutRecord { shard: root.shard, record, generation, bytes };
                assert_eq!(kind_of(client.ask(&node, &call).await), ErrorKind::Denied);
            }
        }
    }
    assert_eq!(world.snapshot(), before);
    assert_both_steps(&world).await;
}

#[tokio::test(start_paused = true)]
async fn marks_and_receipts_do_not_come_from_clients_of_open_saves_either() {
    let (world, _) = world_with_steps().await;
    let client = world.voice(Role::Client, "client");
    let node = world.node_address(2);
    let begun = client.begin(&node, 9).await.unwrap();
    let shard = ShardId::new(begun.save, 0);
    let receipt = RecordName::Receipt { index: 0, attempt: Attempt([1; 16]) };
    for record in [RecordName::Mark, receipt] {
        let call = PutRecord { shard, record, generation: begun.generation, bytes: vec![1; 60] };
        assert_eq!(kind_of(client.ask(&node, &call).await), ErrorKind::Denied);
    }
    for record in [RecordName::Leaves, RecordName::Stripe { index: u32::MAX }] {
        let call = PutRecord { shard, record, generation: begun.generation, bytes: vec![1; 60] };
        let kind = kind_of(client.ask(&node, &call).await);
        assert!(matches!(kind, ErrorKind::Corrupt | ErrorKind::Invalid), "{kind:?}");
    }
    // The number under which nodes store records of the save as a whole.
    let stripe = StripeId { shard: ShardId::new(begun.save, u32::MAX), index: 0 };
    let call = PutBlock { stripe, ..block_call(&begun, 1000) };
    let refused = client.put_block(&node, &call, &content(1000, 1)).await;
    assert_eq!(kind_of(refused), ErrorKind::Invalid);
    assert_eq!(world.files_of(begun.save), []);
    // Blocks of length zero, above the maximum length, and with other bytes than announced.
    let bytes = content(1000, 1);
    let good = block_call(&begun, 1000);
    for len_bytes in [0, (128 << 20) + 1, u64::MAX] {
        let call = PutBlock { len_bytes, ..good.clone() };
        assert_eq!(kind_of(client.put_block(&node, &call, &bytes).await), ErrorKind::Invalid);
    }
    for len_bytes in [999, 1001] {
        let call = PutBlock { len_bytes, ..good.clone() };
        client.put_block(&node, &call, &bytes).await.unwrap_err();
    }
    let call = PutBlock { fingerprint_key: [6; 32], ..good.clone() };
    assert_eq!(kind_of(client.put_block(&node, &call, &bytes).await), ErrorKind::Corrupt);
    assert_eq!(world.files_of(begun.save), []);
    assert_both_steps(&world).await;
}

#[tokio::test(start_paused = true)]
async fn a_clients_word_does_not_raise_the_epoch() {
    let (world, root) = world_with_steps().await;
    let client = world.voice(Role::Client, "client");
    let node = world.node_address(2);
    let begun = client.begin(&node, 9).await.unwrap();
    let bytes = content(1000, 1);
    // An epoch that has not begun, and one that no valid message contains.
    for epoch in [Epoch(2), Epoch(u64::MAX)] {
        let generation = Generation { epoch, counter: 0 };
        let call = PutBlock { generation, ..block_call(&begun, 1000) };
        client.put_block(&node, &call, &bytes).await.unwrap_err();
        let call = PutRecord {
            shard: call.stripe.shard,
            record: RecordName::Leaves,
            generation,
            bytes: vec![],
        };
        client.ask(&node, &call).await.unwrap_err();
    }
    assert_eq!(client.ask(&node, &Hello { me: None }).await.unwrap().epoch, Epoch(1));
    save(&world.client(), 3, &[("weights", &content(300_000, 3))]).await;
    let archive = world.client();
    archive
        .archive(&job(), Some(root.step), options(PlanChoice::Chain), &mut |_| ())
        .await
        .unwrap();
    assert_both_steps(&world).await;
}

#[tokio::test(start_paused = true)]
async fn messages_that_are_none_disturb_nobody() {
    let (world, _) = world_with_steps().await;
    let before = world.snapshot();
    let (client, node) = (world.voice(Role::Client, "client"), world.voice(Role::Node, "stranger"));
    let to = world.node_address(2);
    let entropy = SeededEntropy::new(7);
    for voice in [&client, &node] {
        assert_eq!(kind_of(voice.send(&to, &[]).await), ErrorKind::Invalid);
        for number in (0..=255u8).filter(|number| ALL.iter().all(|(known, _, _)| known != number)) {
            let error = voice.send(&to, &[number, 1, 2, 3]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("newer version"), "{error}");
        }
        // Random bodies: most do not parse, and none may stop the node.
        for (number, _, _) in ALL {
            for len in [0, 1, 2, 3, 7, 16, 17, 33, 64, 200, 5000] {
                let mut frame = vec![*number; len + 1];
                entropy.fill(&mut frame[1..]);
                let _ =
                    tokio::time::timeout(Duration::from_secs(90), voice.send(&to, &frame)).await;
            }
        }
        assert_alive(voice, &to).await;
    }
    let after = world.snapshot();
    let changed: Vec<_> =
        before.iter().filter(|(key, value)| after.get(*key) != Some(value)).collect();
    // Only the node's own registration may have been written again.
    assert!(
        changed.iter().all(|(key, _)| key.starts_with("k/n/")),
        "{:?}",
        changed.iter().map(|(key, _)| key).collect::<Vec<_>>()
    );
    assert_both_steps(&world).await;
}

#[tokio::test(start_paused = true)]
async fn a_frame_beyond_the_limit_and_a_request_that_never_comes_end() {
    let (world, _) = world_with_steps().await;
    let client = world.voice(Role::Client, "client");
    let to = world.node_address(2);
    let connection = client.connection(&to).await;
    let beyond = (MAX_FRAME_BYTES as u32 + 1).to_le_bytes();
    for head in [beyond, [255; 4]] {
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write(Bytes::copy_from_slice(&head)).await.unwrap();
        let answer = FramedRecv::new(recv).read_frame(MAX_FRAME_BYTES).await.unwrap().unwrap();
        assert_eq!(answer[0], 1, "a failure");
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(matches!(
            send.write(Bytes::from_static(&[0; 9])).await,
            Err(NetError::Stopped { .. })
        ));
    }
    // A list that takes many times its encoded size in memory once it is parsed.
    let call = BeginSave {
        job: job(),
        step: Step(9),
        replace: false,
        save: SaveId([9; 12]),
        avoid: vec![NodeId(1); 70_000],
    };
    let refused = client.ask(&to, &call).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    assert!(refused.to_string().contains("at most 65536 are allowed"), "{refused}");
    // Open as many streams as a connection may have, each with the start of a request and no more.
    let mut halves = Vec::new();
    for _ in 0..200 {
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write(Bytes::from_static(&[9, 0])).await.unwrap();
        halves.push((send, recv));
    }
    assert_alive(&client, &to).await;
    let began = tokio::time::Instant::now();
    for (send, _) in &mut halves {
        let stopped = loop {
            match send.write(Bytes::from_static(&[0])).await {
                Err(error) => break error,
                Ok(()) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
            // Nine bytes would complete a request. The node must end the stream before that.
            assert!(began.elapsed() < Duration::from_secs(30));
        };
        assert!(matches!(stopped, NetError::Stopped { .. }), "{stopped}");
    }
    // A block whose bytes never arrive releases its memory.
    let begun = client.begin(&to, 9).await.unwrap();
    let exchange = client.open(&to, &block_call(&begun, 60_000)).await;
    world.until("a block under way", || world.nodes[&2].used_memory_by_share()[1] != 0).await;
    world.assert_idle().await;
    drop(exchange);
    assert_both_steps(&world).await;
}

#[tokio::test(start_paused = true)]
async fn evidence_of_another_cluster_is_none() {
    let (world, root) = world_with_steps().await;
    let node = world.voice(Role::Node, "boss");
    let to = world.node_address(2);
    let before = world.snapshot();
    let other = rapidraid::id::ClusterId([8; 16]);
    let save = root.save;
    let tombstone =
        Tombstone { cluster: other, save, generation: GENERATION, reason: RemoveReason::Deleted };
    let bytes = tombstone.to_bytes().unwrap();
    assert_eq!(kind_of(node.ask(&to, &PutTombstone { bytes }).await), ErrorKind::Denied);
    assert_eq!(kind_of(node.ask(&to, &PurgeSave { save }).await), ErrorKind::Denied);
    let client = world.client();
    let saved = client.show_step(&job(), Some(Step(2))).await.unwrap().step.saved;
    let mark = CommitMark { cluster: other, saved, root: root.clone() };
    let bytes = mark.to_bytes().unwrap();
    assert_eq!(
        kind_of(node.ask(&to, &PutMark { bytes, epoch: Epoch(1) }).await),
        ErrorKind::Denied
    );
    let (attempt, code) = (Attempt([9; 16]), table::find(4, 2).unwrap().id());
    let (stripe, owner) = (StripeId { shard: root.shard, index: 0 }, GENERATION);
    let receipt = Receipt {
        cluster: other,
        stripe,
        attempt,
        generation: owner,
        code,
        pieces: vec![],
        order: Generation::default(),
    };
    let (bytes, coordinator) = (receipt.to_bytes().unwrap(), NodeId(1));
    let call = PutReceipt { bytes, owner, coordinator };
    assert_eq!(kind_of(node.ask(&to, &call).await), ErrorKind::Denied);
    // Orders to drop replicas that the catalogue does not confirm.
    let stripe = StripeId { shard: root.shard, index: 0 };
    let call = DropReplicas { stripe, attempt: Attempt([1; 16]), generation: GENERATION };
    assert_eq!(kind_of(node.ask(&to, &call).await), ErrorKind::Fenced);
    let archived = client.show_step(&job(), Some(Step(1))).await.unwrap().shards.remove(0);
    let Some(StripeState::Archived { attempt, generation, .. }) = archived.1.stripe(0) else {
        panic!("step 1 is archived");
    };
    let stripe = StripeId { shard: archived.0.shard, index: 0 };
    for (attempt, generation) in [(Attempt([1; 16]), generation), (attempt, GENERATION)] {
        let call = DropReplicas { stripe, attempt, generation };
        assert_eq!(kind_of(node.ask(&to, &call).await), ErrorKind::Fenced);
    }
    assert_eq!(world.snapshot(), before);
    let status = node.ask(&to, &GetNodeStatus {}).await.unwrap();
    assert_eq!(status.quarantined, 0);
    assert_both_steps(&world).await;
}
