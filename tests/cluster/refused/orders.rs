//! Orders that nodes refuse: numbers out of bounds and outdated owners. Their reservations are
//! released.

use rapidraid::code::table;
use rapidraid::format::geometry::StripeCut;
use rapidraid::gf::Fingerprint;
use rapidraid::id::{Attempt, Epoch, Generation, NodeId, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::plan::{Input, MAX_HOP_EDGES, MAX_HOPS, Output};
use rapidraid::wire::NodeAddress;
use rapidraid::wire::calls::{CopyReplica, PutPlaces, ReservePart, RunPart};
use rapidraid::wire::order::{Codec, HopOrder, InputOrder, Order, OutputOrder};

use super::{GENERATION, assert_alive, assert_both_steps, kind_of, world_with_steps};

/// Returns an order that a node with a replica of block 0 could run.
pub(super) fn order(stripe: StripeId) -> Order {
    let cut = StripeCut { offset_bytes: 0, len_bytes: 131_072, block_bytes: 65_536, k: 2 };
    let input = InputOrder { input: Input::Block(0), expected: vec![Fingerprint::ZERO] };
    let output = OutputOrder { output: Output::Store(0), to: None };
    Order {
        run: [3; 16],
        stripe,
        attempt: Attempt([4; 16]),
        generation: GENERATION,
        coordinator: NodeId(1),
        code: table::find(4, 2).unwrap().id(),
        cut,
        fingerprint_key: [1; 32],
        codec: Codec::Kernel,
        bytes_per_s: None,
        hops: vec![HopOrder {
            grains: (0, 1),
            inputs: vec![input],
            outputs: vec![output],
            matrix: vec![vec![1]],
        }],
        kept: vec![],
    }
}

#[tokio::test(start_paused = true)]
async fn orders_with_absurd_numbers_are_refused() {
    let (world, root) = world_with_steps().await;
    let node = world.voice(Role::Node, "boss");
    let to = world.node_address(2);
    let base = order(StripeId { shard: root.shard, index: 0 });
    let hop = &base.hops[0];
    let with = |change: &dyn Fn(&mut Order)| {
        let mut changed = base.clone();
        change(&mut changed);
        changed
    };
    let hop_with = |change: &dyn Fn(&mut HopOrder)| {
        let mut changed = base.clone();
        change(&mut changed.hops[0]);
        changed
    };
    let fingerprints = |count| vec![Fingerprint::ZERO; count];
    let refused = [
        with(&|order| order.code = rapidraid::code::CodeId(0)),
        with(&|order| order.code = rapidraid::code::CodeId(u64::MAX)),
        with(&|order| order.cut.k = 0),
        with(&|order| order.cut.k = 255),
        with(&|order| order.cut.block_bytes = 0),
        with(&|order| order.cut.block_bytes = u64::MAX),
        with(&|order| order.cut.block_bytes = (128 << 20) + 1),
        with(&|order| order.cut.len_bytes = u64::MAX),
        with(&|order| order.hops = vec![hop.clone(); MAX_HOPS + 1]),
        hop_with(&|hop| hop.grains = (0, 0)),
        hop_with(&|hop| hop.grains = (1, 0)),
        hop_with(&|hop| hop.grains = (0, 2)),
        hop_with(&|hop| hop.grains = (0, u64::MAX)),
        hop_with(&|hop| hop.grains = (u64::MAX, 0)),
        hop_with(&|hop| hop.grains = (u64::MAX - 1, u64::MAX)),
        hop_with(&|hop| hop.inputs = vec![]),
        hop_with(&|hop| hop.inputs = vec![hop.inputs[0].clone(); MAX_HOP_EDGES + 1]),
        hop_with(&|hop| hop.inputs[0].input = Input::Block(2)),
        hop_with(&|hop| hop.inputs[0].input = Input::Block(255)),
        hop_with(&|hop| hop.inputs[0].input = Input::Piece(4)),
        hop_with(&|hop| hop.inputs[0].expected = fingerprints(0)),
        hop_with(&|hop| hop.inputs[0].expected = fingerprints(2)),
        hop_with(&|hop| hop.outputs = vec![]),
        hop_with(&|hop| hop.outputs = vec![hop.outputs[0].clone(); MAX_HOP_EDGES + 1]),
        hop_with(&|hop| hop.outputs[0].output = Output::Store(4)),
        hop_with(&|hop| hop.outputs[0].output = Output::Store(255)),
        hop_with(&|hop| hop.outputs[0].output = Output::Deliver(0)),
        hop_with(&|hop| hop.outputs[0].output = Output::Stream(1)),
        hop_with(&|hop| hop.matrix = vec![]),
        hop_with(&|hop| hop.matrix = vec![vec![]]),
        hop_with(&|hop| hop.matrix = vec![vec![1, 1]]),
        hop_with(&|hop| hop.matrix = vec![vec![1], vec![1]]),
        with(&|order| order.kept = vec![(0, 255)]),
        with(&|order| order.kept = vec![(255, 0)]),
        with(&|order| order.kept = vec![(0, 0); 1000]),
        // More memory than the daemon ever has.
        with(&|order| {
            let input = InputOrder { input: Input::Stream(1), expected: fingerprints(1) };
            let edges = vec![input; MAX_HOP_EDGES];
            let matrix = vec![vec![1; MAX_HOP_EDGES]];
            let one = HopOrder { inputs: edges, matrix, ..hop.clone() };
            order.hops = vec![one; 100];
        }),
    ];
    for (at, order) in refused.into_iter().enumerate() {
        let answer = node.ask(&to, &ReservePart { order: order.clone() }).await;
        assert_eq!(kind_of(answer), ErrorKind::Invalid, "order {at}");
        assert_eq!(kind_of(node.ask(&to, &RunPart { run: order.run }).await), ErrorKind::NotFound);
        assert_eq!(world.nodes[&2].used_memory_by_share(), [0; 5], "order {at}");
    }
    assert_alive(&node, &to).await;
    // Orders that are in bounds and make no sense end with an error and leave nothing.
    let odd = [
        base.clone(),
        with(&|order| order.hops = vec![hop.clone(), hop.clone()]),
        with(&|order| order.stripe.index = 77),
        with(&|order| order.cut.offset_bytes = u64::MAX),
        with(&|order| order.cut.len_bytes = 0),
        with(&|order| order.cut = StripeCut { block_bytes: 1, len_bytes: 1, ..order.cut }),
        with(&|order| order.cut = StripeCut { block_bytes: 77, len_bytes: 100, ..order.cut }),
        hop_with(&|hop| hop.inputs[0].input = Input::Stream(9)),
        hop_with(&|hop| {
            hop.outputs.push(hop.outputs[0].clone());
            hop.matrix.push(vec![1]);
        }),
        hop_with(&|hop| {
            let to = NodeAddress { name: "nobody".parse().unwrap(), host_port: "nowhere:1".into() };
            hop.outputs[0] = OutputOrder { output: Output::Stream(1), to: Some(to) };
        }),
        with(&|order| order.codec = Codec::ReedSolomonErasure),
    ];
    for (at, order) in odd.into_iter().enumerate() {
        node.ask(&to, &ReservePart { order: order.clone() }).await.unwrap();
        let again = node.ask(&to, &ReservePart { order: order.clone() }).await;
        assert_eq!(kind_of(again), ErrorKind::Busy, "one run, one reservation");
        let ran = node.ask(&to, &RunPart { run: order.run }).await;
        // The stripe's replica differs from the order. Only an order for a block past the end,
        // which reads as zeros, succeeds.
        let is_empty = order.cut.len_bytes == 0;
        assert_eq!(ran.is_ok(), is_empty, "order {at}: {ran:?}");
        world.assert_idle().await;
    }
    assert_alive(&node, &to).await;
    assert_eq!(
        world
            .files(|path| path.contains("piece-") && path.contains(&Attempt([4; 16]).to_string()))
            .len(),
        1
    );
    assert_both_steps(&world).await;
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_nobody_runs_is_given_back() {
    let (world, root) = world_with_steps().await;
    let node = world.voice(Role::Node, "boss");
    let to = world.node_address(2);
    for run in 0..5 {
        let order = Order { run: [run; 16], ..order(StripeId { shard: root.shard, index: 0 }) };
        node.ask(&to, &ReservePart { order }).await.unwrap();
    }
    assert_ne!(world.nodes[&2].used_memory_by_share()[0], 0);
    // The daemon releases the reservation by itself.
    world.assert_idle().await;
    assert_eq!(kind_of(node.ask(&to, &RunPart { run: [0; 16] }).await), ErrorKind::NotFound);
}

#[tokio::test(start_paused = true)]
async fn orders_of_an_owner_that_is_over_are_refused_and_name_the_newer() {
    let (mut world, root) = world_with_steps().await;
    let (old, new) = (NodeId(0xaaaa), NodeId(0xbbbb));
    let stripe = StripeId { shard: root.shard, index: 0 };
    let places = |epoch, counter, coordinator| {
        let generation = Generation { epoch: Epoch(epoch), counter };
        PutPlaces { stripe, generation, coordinator, bytes: vec![] }
    };
    let from = world.node_address(3);
    for round in 0..2 {
        let node = world.voice(Role::Node, &format!("boss{round}"));
        let to = world.node_address(2);
        if round == 0 {
            // The node stores the fence and then refuses the call: its bytes are no record.
            assert_eq!(kind_of(node.ask(&to, &places(1, 50, old)).await), ErrorKind::Corrupt);
            assert_eq!(kind_of(node.ask(&to, &places(1, 51, new)).await), ErrorKind::Corrupt);
        }
        for (epoch, counter) in [(1, 50), (1, 1), (0, 50), (0, u64::MAX)] {
            let generation = Generation { epoch: Epoch(epoch), counter };
            let mut plan = order(stripe);
            (plan.generation, plan.coordinator) = (generation, old);
            let (len_bytes, from) = (10, from.clone());
            let fetch = CopyReplica {
                stripe,
                block: 0,
                len_bytes,
                root: [0; 32],
                generation,
                coordinator: old,
                from,
                bytes_per_s: None,
            };
            let refusals = [
                node.ask(&to, &places(epoch, counter, old)).await.unwrap_err(),
                node.ask(&to, &ReservePart { order: plan }).await.unwrap_err(),
                node.ask(&to, &fetch).await.unwrap_err(),
            ];
            for refusal in refusals {
                assert_eq!(refusal.kind(), ErrorKind::Fenced, "{refusal}");
                let text = refusal.to_string();
                let named = text.contains(&new.to_string()) && text.contains("1.51");
                assert!(named || (epoch == 0 && text.contains("epoch")), "{text}");
            }
        }
        // The newest owner is still accepted, also after a restart of the node, which must remember
        // the fence.
        assert_eq!(kind_of(node.ask(&to, &places(1, 51, new)).await), ErrorKind::Corrupt);
        if round == 0 {
            world.kill(2).await;
            world.boot(2);
            world.until_live(4).await;
        }
    }
}
