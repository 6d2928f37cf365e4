//! Admission: no circular waits between nodes, and a wait for memory is not a failure
//! (docs/semantics.md, 7).

use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use rapidraid::format::records::{Leaves, MAX_RING, Record, StripeRecord};
use rapidraid::id::{Generation, NodeId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::{Connection, RecvStream, Role, SendStream};
use rapidraid::node::Node;
use rapidraid::store::RecordScope;
use rapidraid::wire::NodeAddress;
use rapidraid::wire::calls::{
    ArchiveOptions, GetRecord, Hello, ListFiles, PlanChoice, PutBlock, PutReceipt, PutRecord,
    ReadFile, ReadFileAnswer, RecordName,
};
use tokio::time::Instant;

use world::raw::{Voice, block_call, finish_block};
use world::{World, content, job, options, read_file, restore, save};

/// A memory size whose share for saves holds one block and not two.
const TIGHT_BYTES: u64 = 12 << 20;

#[tokio::test(start_paused = true)]
async fn blocks_that_two_nodes_forward_to_each_other_do_not_wait_in_a_circle() {
    let world = World::with_memory(4, &[(4, 2)], 64 << 10, TIGHT_BYTES).await;
    let voice = world.voice(Role::Client, "crossing");
    let (one, two) = (world.node_address(1), world.node_address(2));
    let begun = voice.begin(&one, 1).await.unwrap();
    let bytes = content(60_000, 1);
    let call = block_call(&begun, bytes.len());
    let began = Instant::now();
    let there = PutBlock { block: 0, forward: Some(two.clone()), ..call.clone() };
    let back = PutBlock { block: 1, forward: Some(one.clone()), ..call.clone() };
    for _ in 0..20 {
        // Both blocks arrive at the same moment. The block that is admitted first at its own node
        // must not keep the other block out.
        let (there, back) = tokio::join!(
            voice.put_block(&one, &there, &bytes),
            voice.put_block(&two, &back, &bytes),
        );
        assert_eq!(there.unwrap().forwarded, Some(Ok(())));
        assert_eq!(back.unwrap().forwarded, Some(Ok(())));
    }
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_block_without_memory_at_its_second_holder_is_refused_before_its_bytes_come() {
    let world = World::with_memory(4, &[(4, 2)], 64 << 10, TIGHT_BYTES).await;
    let voice = world.voice(Role::Client, "waiting");
    let (one, two) = (world.node_address(1), world.node_address(2));
    let begun = voice.begin(&one, 1).await.unwrap();
    let bytes = content(60_000, 1);
    let call = block_call(&begun, bytes.len());
    let mut first = voice.open_block(&two, &call).await.unwrap();
    let forwarded = PutBlock { block: 1, forward: Some(two.clone()), ..call.clone() };
    let refusal = voice.admission(&one, &forwarded).await.unwrap().1.second_refused;
    assert_eq!(refusal.map(|(code, _)| code), Some(ErrorKind::Busy.wire_code()));
    assert_eq!(world.nodes[&1].used_memory_by_share(), [0; 5], "all or none");
    finish_block(&mut first, &bytes, &bytes).await.unwrap();
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn at_most_128_blocks_of_one_node_wait_at_a_busy_one() {
    let world = World::with_memory(4, &[(4, 2)], 64 << 10, TIGHT_BYTES).await;
    let id = |index: &usize| NodeId::of(&world.machines[*index].name);
    // A first holder with the greater id asks the second holder for memory before it takes its own.
    // So its own memory does not bound the number of blocks that wait at the second holder.
    let first = (1..=4).max_by_key(id).unwrap();
    let second = (1..=4).min_by_key(id).unwrap();
    let (first, second) = (world.node_address(first), world.node_address(second));
    let voices = ["one", "two"].map(|name| world.voice(Role::Client, name));
    let begun = voices[0].begin(&first, 1).await.unwrap();
    let bytes = content(60_000, 1);
    let call = block_call(&begun, bytes.len());
    let mut held = voices[0].open_block(&second, &call).await.unwrap();
    let forwarded = PutBlock { block: 1, forward: Some(second.clone()), ..call.clone() };
    let waiting = voices.iter().flat_map(|voice| std::iter::repeat_n(voice, 150));
    let answers = join_all(waiting.map(|voice| voice.admission(&first, &forwarded))).await;
    let over_the_limit = answers.into_iter().filter(|answer| {
        let (_, admitted) = answer.as_ref().ok().unwrap();
        let (code, message) = admitted.second_refused.as_ref().unwrap();
        assert_eq!(*code, ErrorKind::Busy.wire_code(), "{message}");
        message.contains("too many blocks")
    });
    assert_eq!(over_the_limit.count(), 300 - 128);
    finish_block(&mut held, &bytes, &bytes).await.unwrap();
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn saves_and_archives_that_are_short_of_memory_wait_and_succeed() {
    let world = World::with_memory(6, &[(6, 4)], 128 << 10, TIGHT_BYTES + (8 << 20)).await;
    let client = world.client();
    let bytes = content(2_000_000, 3);
    let names: Vec<String> = (0..6).map(|rank| format!("rank{rank}")).collect();
    let shards: Vec<(&str, &Bytes)> = names.iter().map(|name| (name.as_str(), &bytes)).collect();
    join_all((1..=3).map(|step| save(&client, step, &shards))).await;
    let archives = (1..=3).map(|step| {
        let client = &client;
        async move {
            let at_once = ArchiveOptions { parallel: 8, ..options(PlanChoice::Chain) };
            client.archive(&job(), Some(Step(step)), at_once, &mut |_| ()).await.unwrap()
        }
    });
    for report in join_all(archives).await {
        assert_eq!((report.stripes, report.undropped, report.notes), (6 * 4, 0, Vec::new()));
    }
    world.assert_idle().await;
    for node in client.status().await.unwrap().nodes {
        for (share, _, peak_bytes, total_bytes) in node.held.unwrap().budgets {
            assert!(peak_bytes <= total_bytes, "{share} of {}", node.view.node.name);
        }
    }
    for step in 1..=3 {
        world.assert_invariant(&client, step).await;
        let (out, _) = restore(&client, step).await.unwrap();
        assert_eq!(read_file(&*out, "rank5"), bytes);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_committed_shard_fixed_is_not_replaced_where_its_mark_is_missing() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let voice = world.voice(Role::Client, "rewriter");
    save(&client, 1, &[("weights", &content(100_000, 1))]).await;
    let shown = client.show_step(&job(), None).await.unwrap();
    let (generation, root) = (shown.step.saved.generation, shown.shards[0].0.clone());
    let to = world.node_address(2);
    let mark =
        |node: &Node| node.store().remove_record_file(RecordScope::Shard(root.shard), "commit");
    assert!(mark(&world.nodes[&2]).unwrap());
    let get = |record| GetRecord { shard: root.shard, record };
    let put = |record, bytes| PutRecord { shard: root.shard, record, generation, bytes };

    let name = RecordName::Stripe { index: 0 };
    let bytes = voice.ask(&to, &get(name)).await.unwrap().unwrap();
    let record = StripeRecord::parse(&bytes).unwrap();
    let mut other = record.clone();
    // The last byte of the fixed part belongs to a fingerprint.
    *other.fixed.last_mut().unwrap() ^= 1;
    let refused = voice.ask(&to, &put(name, other.to_bytes().unwrap())).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    assert_eq!(voice.ask(&to, &get(name)).await.unwrap(), Some(bytes));
    // Places are hints and may change.
    let moved = StripeRecord { places: vec![NodeId(9); 4], ..record };
    voice.ask(&to, &put(name, moved.to_bytes().unwrap())).await.unwrap();

    let bytes = voice.ask(&to, &get(RecordName::Leaves)).await.unwrap().unwrap();
    let mut leaves = Leaves::parse(&bytes).unwrap();
    voice.ask(&to, &put(RecordName::Leaves, bytes.clone())).await.unwrap();
    assert!(leaves.root.ring.len() < MAX_RING);
    leaves.root.len_bytes += 1;
    let other = leaves.to_bytes().unwrap();
    let refused = voice.ask(&to, &put(RecordName::Leaves, other)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Exists, "{refused}");
    assert_eq!(voice.ask(&to, &get(RecordName::Leaves)).await.unwrap(), Some(bytes));
}

/// Announces requests of this length and never sends them. They end when the result is dropped.
async fn announce_requests(
    connection: &dyn Connection,
    count: usize,
    len_bytes: u32,
) -> Vec<(Box<dyn SendStream>, Box<dyn RecvStream>)> {
    let mut open = Vec::new();
    for _ in 0..count {
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write(Bytes::copy_from_slice(&len_bytes.to_le_bytes())).await.unwrap();
        open.push((send, recv));
    }
    open
}

async fn assert_answers_promptly(voice: &Voice, to: &NodeAddress) {
    let began = Instant::now();
    for _ in 0..20 {
        voice.ask(to, &Hello { me: None }).await.unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn short_requests_do_not_wait_for_long_ones() {
    let world = World::with_memory(4, &[(4, 2)], 64 << 10, TIGHT_BYTES).await;
    let voice = world.voice(Role::Client, "wordy");
    let to = world.node_address(2);
    // They take most of the memory share for long requests.
    let open = announce_requests(&*voice.connection(&to).await, 8, 700 << 10).await;
    world.until("a long request", || world.nodes[&2].used_memory_by_share()[3] != 0).await;
    assert_answers_promptly(&voice, &to).await;
    drop(open);
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_announced_and_not_sent_hold_up_only_their_sender() {
    let world = World::with_memory(4, &[(4, 2)], 64 << 10, TIGHT_BYTES).await;
    let (silent, other) = (world.voice(Role::Client, "silent"), world.voice(Role::Client, "other"));
    let to = world.node_address(2);
    let open = announce_requests(&*silent.connection(&to).await, 100, 64 << 10).await;
    let requests = || world.nodes[&2].used_memory_by_share()[4];
    world.until("a request has memory", || requests() != 0).await;
    assert_answers_promptly(&other, &to).await;
    drop(open);
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn long_requests_that_are_announced_and_not_sent_hold_up_only_their_connection() {
    let world = World::with_memory(4, &[(4, 2)], 64 << 10, 256 << 20).await;
    let (silent, other) = (world.voice(Role::Client, "silent"), world.voice(Role::Node, "other"));
    let to = world.node_address(2);
    // Four of them would take all of the memory share for long requests.
    let open = announce_requests(&*silent.connection(&to).await, 8, 4 << 20).await;
    let reserved = || world.nodes[&2].used_memory_by_share()[3];
    world.until("a request has memory", || reserved() != 0).await;
    let began = Instant::now();
    let long = PutReceipt {
        bytes: vec![0; 1 << 20],
        owner: Generation::default(),
        coordinator: NodeId(1),
    };
    let refused = other.ask(&to, &long).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    drop(open);
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_without_calls_is_disconnected_and_comes_back() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let (voice, to) = (world.voice(Role::Client, "quiet"), world.node_address(2));
    voice.ask(&to, &Hello { me: None }).await.unwrap();
    let connection = voice.connection(&to).await;
    tokio::time::sleep(Duration::from_secs(50)).await;
    voice.ask(&to, &Hello { me: None }).await.unwrap();
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert!(!connection.is_closed(), "its last call was 50 s ago");
    tokio::time::sleep(Duration::from_secs(75)).await;
    assert!(connection.is_closed());
    voice.ask(&to, &Hello { me: None }).await.unwrap();
}

/// Opens slow reads on each of these nodes, until they take all of its memory for reads, and keeps
/// them open for `held`.
async fn read_slowly(world: &World, step: u64, nodes: RangeInclusive<usize>, held: Duration) {
    let voice = world.voice(Role::Client, &format!("slow{step}-{}", nodes.start()));
    let root =
        &world.client().show_step(&job(), Some(Step(step))).await.unwrap().shards[0].0.clone();
    let stripe = StripeId { shard: root.shard, index: 0 };
    let mut open = Vec::new();
    for index in nodes {
        let to = world.node_address(index);
        let view = voice.ask(&to, &ListFiles { stripe }).await.unwrap().remove(0);
        let len_bytes = view.len_bytes;
        let call = ReadFile { stripe, file: view.file, from: 0, len_bytes, hashes: false };
        let mut exchange = voice.open(&to, &call).await;
        exchange.finish().await.unwrap();
        exchange.answer::<ReadFileAnswer>().await.unwrap();
        assert_ne!(world.nodes[&index].used_memory_by_share()[2], 0);
        open.push(exchange);
    }
    tokio::spawn(async move {
        let until = Instant::now() + held;
        while Instant::now() < until {
            // Shorter than the time after which a node gives up a stalled reader.
            tokio::time::sleep(Duration::from_secs(10)).await;
            for exchange in &mut open {
                exchange.recv.read_exact(256 << 10).await.unwrap();
            }
        }
        drop(voice);
    });
}

#[tokio::test(start_paused = true)]
async fn a_restore_waits_for_nodes_that_are_busy_and_loses_nothing() {
    let held = Duration::from_secs(100);
    let world = World::with_memory(4, &[(4, 2)], 4 << 20, TIGHT_BYTES).await;
    let client = world.client();
    let bytes = content(8 << 20, 1);
    for step in [1, 2] {
        save(&client, step, &[("weights", &bytes)]).await;
    }
    client.archive(&job(), Some(Step(2)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    for step in [1, 2] {
        read_slowly(&world, step, 1..=4, held).await;
        let began = Instant::now();
        let (out, report) = restore(&client, step).await.unwrap();
        assert!(read_file(&*out, "weights") == bytes);
        assert_eq!(report.incidents, Vec::<String>::new(), "busy is no incident");
        let took = began.elapsed();
        assert!(took >= held && took < held + Duration::from_secs(20), "step {step}: {took:?}");
        world.assert_idle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_restore_does_without_nodes_that_are_busy_when_others_are_enough() {
    let world = World::with_memory(4, &[(4, 2)], 4 << 20, TIGHT_BYTES).await;
    let client = world.client();
    let bytes = content(8 << 20, 1);
    save(&client, 1, &[("weights", &bytes)]).await;
    client.archive(&job(), Some(Step(1)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    for busy in [1..=2, 3..=4] {
        read_slowly(&world, 1, busy.clone(), Duration::from_secs(20)).await;
        let began = Instant::now();
        let (out, _) = restore(&client, 1).await.unwrap();
        assert!(read_file(&*out, "weights") == bytes);
        assert!(began.elapsed() < Duration::from_secs(4), "{busy:?}: {:?}", began.elapsed());
        world.assert_idle().await;
    }
}
