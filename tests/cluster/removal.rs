//! Removals of steps: invisible at once, and purged from all nodes, also from nodes that were down.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use rapidraid::catalogue::record_access::save_ring_key;
use rapidraid::client::SaveOptions;
use rapidraid::entropy::SeededEntropy;
use rapidraid::format::geometry::StripeCut;
use rapidraid::format::records::{
    CommitMark, LAYOUT_STANDARD, Leaves, Node, Receipt, Record, RemoveReason, Saved, StripeFixed,
    StripeRecord, Tombstone,
};
use rapidraid::id::{
    Attempt, Epoch, Generation, NodeId, PeerName, SaveId, ShardId, Step, StripeId,
};
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::store::BlockSpec;
use rapidraid::wire::NodeAddress;
use rapidraid::wire::calls::{
    CommitSave, CompleteShard, CopyReplica, PlanChoice, PurgeSave, PutLeaves, PutMark, PutPlaces,
    PutReceipt, PutRecord, PutTombstone, RecordName, RegisterNode, RemoveStep,
};
use rapidraid::workers::Workers;

use world::raw::{Voice, block_call, empty_root, finish_block, trailer};
use world::{
    CLUSTER, World, content, job, options, quiet, read_file, restore, restore_error, save, shard,
};

#[tokio::test(start_paused = true)]
async fn rm_leaves_nothing_but_graves_and_touches_nothing_else() {
    let world = World::start(6, &[(6, 4)], 64 << 10).await;
    let client = world.client();
    let bytes = content(700_000, 1);
    for step in 1..=4 {
        save(&client, step, &[("weights", &bytes), ("empty", &Bytes::new())]).await;
    }
    for step in [2, 3] {
        let (step, chain) = (Some(Step(step)), options(PlanChoice::Chain));
        client.archive(&job(), step, chain, &mut |_| ()).await.unwrap();
    }
    let listed = client.list_steps(None).await.unwrap();
    let saves: Vec<SaveId> = listed.iter().map(|view| view.saved.save).collect();
    for step in [1, 2] {
        let removed = client.remove_step(&job(), Step(step)).await.unwrap();
        assert_eq!((removed.confirmed, removed.waiting), (6, vec![]));
        assert_eq!(restore_error(&client, step).await.kind(), ErrorKind::NotFound);
        let error = client.remove_step(&job(), Step(step)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    world.assert_swept(&client).await;
    assert_eq!(world.catalogue_keys("c/").len(), 2);
    assert_eq!(world.files(|path| path.ends_with("/tombstone")), []);
    for node in world.nodes.iter().filter(|(index, _)| **index > 0).map(|(_, node)| node) {
        let is_buried = |save: &SaveId| node.store().is_recorded_removed(*save).unwrap();
        assert_eq!(saves.iter().map(is_buried).collect::<Vec<_>>(), [true, true, false, false]);
    }
    for step in [3, 4] {
        let (out, _) = restore(&client, step).await.unwrap();
        assert_eq!(read_file(&*out, "weights"), bytes);
        world.assert_invariant(&client, step).await;
    }
    // The step's number can be used again.
    save(&client, 1, &[("weights", &bytes)]).await;
    world.assert_idle().await;
}

/// A removal request that arrives late, after a gateway's pause or on a slow network: the step has
/// been saved again by then.
#[tokio::test(start_paused = true)]
async fn a_removal_that_comes_late_leaves_the_newer_save() {
    let mut world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let [old, new] = [content(100_000, 1), content(100_000, 2)];
    save(&client, 1, &[("weights", &old)]).await;
    let of = client.list_steps(None).await.unwrap()[0].saved.save;
    let again = vec![shard("weights", &new)];
    let replace = SaveOptions { replace: true };
    client.save(&job(), Step(1), again, replace, quiet()).await.unwrap();
    let late = RemoveStep { job: job(), step: Step(1), save: of };
    let (voice, gateway) = (world.voice(Role::Client, "late"), world.node_address(2));
    let error = voice.ask(&gateway, &late).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), new);
    // A removal request that arrives again during its own removal joins that removal.
    let of = client.list_steps(None).await.unwrap()[0].saved.save;
    world.kill(4).await;
    let now = RemoveStep { job: job(), step: Step(1), save: of };
    for _ in 0..2 {
        assert_eq!(voice.ask(&gateway, &now).await.unwrap().confirmed, 3);
    }
    world.boot(4);
    world.assert_swept(&client).await;
    let error = voice.ask(&gateway, &now).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

#[tokio::test(start_paused = true)]
async fn requests_that_come_again_after_a_removal_leave_nothing() {
    let world = World::simulated(4, &[(4, 2)], 64 << 10, 1).await;
    // The gateway is not the catalogue server, so that the calls that complete shards go over the
    // network.
    let client = world.client_of(2);
    save(&client, 1, &[("weights", &content(700_000, 1)), ("empty", &Bytes::new())]).await;
    client.remove_step(&job(), Step(1)).await.unwrap();
    world.assert_swept(&client).await;
    world.echo.all(&world.network, &SeededEntropy::new(1)).await;
    let keys = [world.catalogue_keys("s/"), world.catalogue_keys("t/")];
    assert_eq!(keys.map(|keys| keys.len()), [2, 2], "roots and states that were made again");
    world.assert_swept(&client).await;
    assert_eq!(world.catalogue_keys("c/"), Vec::<String>::new());
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_away_removes_when_it_is_back() {
    let mut world = World::start(6, &[(6, 4)], 64 << 10).await;
    let client = world.client_of(0);
    let bytes = content(700_000, 1);
    save(&client, 1, &[("weights", &bytes)]).await;
    let save_id = client.list_steps(None).await.unwrap()[0].saved.save;
    world.kill(3).await;
    let removed = client.remove_step(&job(), Step(1)).await.unwrap();
    let waiting: Vec<&str> = removed.waiting.iter().map(|name| name.as_str()).collect();
    assert_eq!((removed.confirmed, waiting), (5, vec!["node03"]));
    assert_eq!(restore_error(&client, 1).await.kind(), ErrorKind::NotFound);
    let left = world.files_of(save_id);
    assert!(!left.is_empty() && left.iter().all(|(machine, _)| *machine == 3), "{left:?}");
    assert_eq!(world.catalogue_keys("s/").len(), 1, "the evidence stays as long as a node is away");
    // By now the waits between two tries are long.
    tokio::time::sleep(150 * world.lease).await;
    assert!(!world.files_of(save_id).is_empty());
    world.boot(3);
    tokio::time::sleep(4 * world.lease).await;
    assert!(world.files_of(save_id).is_empty(), "the removal goes on as soon as the node is live");
    world.assert_swept(&client).await;
    world.until("the step's entry gone", || world.catalogue_keys("c/").is_empty()).await;
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn with_too_many_nodes_away_rm_says_so_and_goes_on_later() {
    let mut world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client_of(0);
    save(&client, 1, &[("weights", &content(700_000, 1))]).await;
    world.kill(2).await;
    world.kill(3).await;
    let error = client.remove_step(&job(), Step(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("node02, node03"), "{error}");
    assert_eq!(restore_error(&client, 1).await.kind(), ErrorKind::NotFound);
    assert!(
        !world.files(|path| path.ends_with(".rep")).is_empty(),
        "nothing goes before the evidence lasts"
    );
    world.boot(2);
    world.boot(3);
    world.assert_swept(&client).await;
}

#[tokio::test(start_paused = true)]
async fn a_step_that_cannot_go_on_does_not_stop_the_removal_of_others() {
    let mut world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client_of(0);
    // The save is decided with a ring of registered nodes that are down, so its marks reach no
    // node.
    let (voice, nodes) = (world.voice(Role::Client, "odd"), world.voice(Role::Node, "odd-node"));
    let gateway = world.node_address(1);
    let begun = voice.begin(&gateway, 1).await.unwrap();
    // Without the ring of the save, as a gateway of an older program leaves it, any ring is accepted.
    nodes.remove_key(&world.node_address(0), save_ring_key(begun.save)).await;
    let mut root = empty_root(&begun, 1, "weights");
    for (number, member) in root.ring.iter_mut().enumerate() {
        let name: PeerName = format!("away{number}").parse().unwrap();
        member.node = NodeId::of(&name);
        let (address, zone, rack) = (format!("{name}:7440"), String::new(), String::new());
        let node = Node { name, address, zone, rack, storage: false };
        nodes.ask(&world.node_address(0), &RegisterNode { node }).await.unwrap();
    }
    voice.ask(&gateway, &CompleteShard { root }).await.unwrap();
    let commit = CommitSave { job: job(), step: Step(1), save: begun.save, shards: 1 };
    assert_eq!(voice.ask(&gateway, &commit).await.unwrap_err().kind(), ErrorKind::Unavailable);

    save(&client, 2, &[("weights", &content(300_000, 1))]).await;
    let save_id = client.list_steps(None).await.unwrap()[0].saved.save;
    world.kill(3).await;
    client.remove_step(&job(), Step(2)).await.unwrap();
    tokio::time::sleep(5 * world.lease).await;
    world.boot(3);
    world.until("the files of step 2 gone", || world.files_of(save_id).is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn a_block_that_comes_in_while_its_save_is_removed_does_not_stay() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let (voice, node) = (world.voice(Role::Client, "slow"), world.voice(Role::Node, "boss"));
    let holder = world.node_address(2);
    let begun = voice.begin(&holder, 1).await.unwrap();
    let bytes = content(300_000, 1);
    let call = block_call(&begun, bytes.len());
    let mut exchange = voice.open_block(&holder, &call).await.unwrap();
    exchange.write(bytes.slice(..200_000)).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    bury(&node, &holder, &call.stripe, begun.generation).await;
    let error = finish_block(&mut exchange, &bytes, &bytes[200_000..]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    assert_eq!(world.files_of(begun.save), []);
    let error = voice.put_block(&holder, &call, &bytes).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    assert_eq!(world.files_of(begun.save), []);
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_is_made_again_while_its_save_is_removed_does_not_stay() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let node = world.voice(Role::Node, "boss");
    let (holder, source) = (world.node_address(2), world.node_address(3));
    let bytes = content(300_000, 1);
    let generation = Generation { epoch: Epoch(1), counter: 1 };
    // The tombstone arrives at each point of the copying.
    for turns in 0..60 {
        let save = SaveId([turns; 12]);
        let stripe = StripeId { shard: ShardId::new(save, 0), index: 0 };
        let spec = BlockSpec { stripe, block: 0, layout: LAYOUT_STANDARD, len_bytes: 300_000 };
        let mut writer = world.nodes[&3].store().create_block_writer(spec, None).unwrap();
        writer.write(&bytes).unwrap();
        writer.finish(None).unwrap();
        let fetch = CopyReplica {
            stripe,
            block: 0,
            len_bytes: 300_000,
            root: trailer(&bytes).root,
            generation,
            coordinator: NodeId(1),
            from: source.clone(),
            bytes_per_s: None,
        };
        let burying = async {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            bury(&node, &holder, &stripe, generation).await;
        };
        let (_, ()) = tokio::join!(node.ask(&holder, &fetch), burying);
        let left: Vec<_> = world.files_of(save).into_iter().filter(|(at, _)| *at == 2).collect();
        assert_eq!(left, [], "after {turns} turns");
        let error = node.ask(&holder, &fetch).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    }
    world.assert_idle().await;
}

/// Each small record, and each copied replica, is begun before the tombstone and written after the
/// save is recorded as removed. Some callers do not wait for the end of the write.
#[tokio::test(start_paused = true)]
async fn a_record_that_is_written_while_its_save_is_removed_does_not_stay() {
    let mut world = World::start(4, &[(4, 2)], 64 << 10).await;
    // With several threads, a write can block at the disk while another thread executes the
    // removal.
    world.kill(2).await;
    world.node_workers = Workers::new(4);
    world.boot(2);
    world.until_live(4).await;
    let (voice, node) = (world.voice(Role::Client, "slow"), world.voice(Role::Node, "boss"));
    let holder = world.node_address(2);
    for (kind, is_cancelled) in (0..6).flat_map(|kind| [(kind, false), (kind, true)]) {
        let step = 1 + 2 * kind + u64::from(is_cancelled);
        let begun = voice.begin(&holder, step).await.unwrap();
        let (save, generation) = (begun.save, begun.generation);
        let root = empty_root(&begun, step, "weights");
        let (shard, stripe) = (root.shard, StripeId { shard: root.shard, index: 0 });
        let coordinator = NodeId(1);
        let record = |bytes| PutPlaces { stripe, generation, coordinator, bytes };
        // The fence is written first, and only once. Behind a fence the node refuses a client's
        // record, so kind 0 has none.
        if kind > 0 {
            node.ask(&holder, &record(Vec::new())).await.unwrap_err();
        }
        let (begin, begins) = std::sync::mpsc::channel();
        let (go_on, goes_on) = std::sync::mpsc::channel::<()>();
        // Meanwhile the node stores what it has heard of the catalogue. The next change on its disk
        // is then that of the record.
        tokio::time::sleep(world.lease / 2).await;
        // A replica's first change concerns the index, which lists no such file.
        world.machines[2].power.cut_after(u64::from(kind == 3), move || {
            begin.send(()).unwrap();
            let _ = goes_on.recv();
        });
        let mut asking = Box::pin(async {
            match kind {
                0 => {
                    let bytes = Leaves { root, hashes: vec![] }.to_bytes().unwrap();
                    let call = PutRecord { shard, record: RecordName::Leaves, generation, bytes };
                    voice.ask(&holder, &call).await
                }
                1 => {
                    let roots_hash = [0; 32];
                    let (shards, len_bytes, saved_at) = (1, 0, 0);
                    let saved = Saved { save, generation, shards, len_bytes, roots_hash, saved_at };
                    let mark = CommitMark { cluster: CLUSTER, saved, root };
                    let (bytes, epoch) = (mark.to_bytes().unwrap(), generation.epoch);
                    node.ask(&holder, &PutMark { bytes, epoch }).await
                }
                2 => {
                    let (cluster, attempt, pieces) = (CLUSTER, Attempt([1; 16]), vec![]);
                    let code = rapidraid::code::table::find(4, 2).unwrap().id();
                    let receipt = Receipt {
                        cluster,
                        stripe,
                        attempt,
                        generation,
                        code,
                        pieces,
                        order: Generation::default(),
                    };
                    let (bytes, owner) = (receipt.to_bytes().unwrap(), generation);
                    node.ask(&holder, &PutReceipt { bytes, owner, coordinator }).await
                }
                3 => {
                    let (from, len_bytes) = (world.node_address(3), 300_000);
                    let bytes = content(300_000, 1);
                    let spec = BlockSpec { stripe, block: 0, layout: LAYOUT_STANDARD, len_bytes };
                    let mut writer =
                        world.nodes[&3].store().create_block_writer(spec, None).unwrap();
                    writer.write(&bytes).unwrap();
                    writer.finish(None).unwrap();
                    let (block, root) = (0, trailer(&bytes).root);
                    let call = CopyReplica {
                        stripe,
                        block,
                        len_bytes,
                        root,
                        generation,
                        coordinator,
                        from,
                        bytes_per_s: None,
                    };
                    node.ask(&holder, &call).await
                }
                4 => {
                    let bytes = Leaves { root, hashes: vec![] }.to_bytes().unwrap();
                    node.ask(&holder, &PutLeaves { bytes, owner: generation, coordinator }).await
                }
                _ => {
                    let cut = StripeCut { offset_bytes: 0, len_bytes: 0, block_bytes: 1, k: 2 };
                    let fixed = StripeFixed { stripe, cut, blocks: vec![] };
                    let bytes = StripeRecord::new(&fixed, vec![]).unwrap().to_bytes().unwrap();
                    node.ask(&holder, &record(bytes)).await
                }
            }
        });
        let begun = async {
            let mut turns = 0;
            while begins.try_recv().is_err() {
                turns += 1;
                assert!(turns < 10_000_000, "record {kind} is not begun");
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            answer = &mut asking => panic!("record {kind} is not held up: {answer:?}"),
            () = begun => {}
        }
        let here = || world.files_of(save).into_iter().filter(|(at, _)| *at == 2);
        if is_cancelled {
            drop(asking);
            // A caller that ends breaks its connection, which cancels its calls.
            let caller = if kind == 0 { &voice } else { &node };
            caller.connection(&holder).await.close(0, "gone");
            for _ in 0..10_000 {
                tokio::task::yield_now().await;
            }
            bury(&node, &holder, &stripe, generation).await;
            go_on.send(()).unwrap();
            end_running_jobs(&world.node_workers, 4).await;
            // The time stands still, so that nobody else removes the file.
            let mut turns = 0;
            while here().count() > 0 {
                turns += 1;
                assert!(turns < 10_000_000, "record {kind} is not purged");
                tokio::task::yield_now().await;
            }
        } else {
            bury(&node, &holder, &stripe, generation).await;
            go_on.send(()).unwrap();
            let error = asking.await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Fenced, "record {kind}: {error}");
        }
        assert_eq!(here().collect::<Vec<_>>(), [], "record {kind}");
        assert!(world.nodes[&2].store().is_recorded_removed(save).unwrap());
    }
}

/// Waits until these workers, which have `threads` slots, have ended all jobs that had begun.
async fn end_running_jobs(workers: &Workers, threads: usize) {
    let barrier = Arc::new(std::sync::Barrier::new(threads));
    let jobs = (0..threads).map(|_| {
        let barrier = barrier.clone();
        workers.run(move || barrier.wait())
    });
    join_all(jobs).await;
}

/// Orders a tombstone and a purge, as the catalogue server does.
async fn bury(node: &Voice, holder: &NodeAddress, stripe: &StripeId, generation: Generation) {
    let save = stripe.shard.save();
    let tombstone = Tombstone { cluster: CLUSTER, save, generation, reason: RemoveReason::Aborted };
    let bytes = tombstone.to_bytes().unwrap();
    node.ask(holder, &PutTombstone { bytes }).await.unwrap();
    node.ask(holder, &PurgeSave { save }).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_grave_fences_what_comes_late_also_after_a_restart() {
    let mut world = World::start(4, &[(4, 2)], 64 << 10).await;
    let (voice, node) = (world.voice(Role::Client, "slow"), world.voice(Role::Node, "boss"));
    let holder = world.node_address(2);
    let begun = voice.begin(&holder, 1).await.unwrap();
    let bytes = content(300_000, 1);
    let call = block_call(&begun, bytes.len());
    // The block is admitted before the tombstone, and ends after the save is recorded as removed.
    let mut exchange = voice.open_block(&holder, &call).await.unwrap();
    exchange.write(bytes.slice(..200_000)).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    bury(&node, &holder, &call.stripe, begun.generation).await;
    assert!(world.nodes[&2].store().is_recorded_removed(begun.save).unwrap());
    assert_eq!(world.files(|path| path.ends_with("/tombstone")), []);
    let error = finish_block(&mut exchange, &bytes, &bytes[200_000..]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    for _ in 0..2 {
        let error = voice.put_block(&holder, &call, &bytes).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
        let fetch = CopyReplica {
            stripe: call.stripe,
            block: 0,
            len_bytes: 300_000,
            root: trailer(&bytes).root,
            generation: Generation { counter: 1000, ..begun.generation },
            coordinator: NodeId(1),
            from: world.node_address(3),
            bytes_per_s: None,
        };
        let error = node.ask(&holder, &fetch).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
        assert_eq!(world.files_of(begun.save), []);
        // A restarted node knows the removed save from its disk.
        world.kill(2).await;
        world.boot(2);
        world.until_live(4).await;
    }
    // A repeated removal finds nothing to do and writes no new tombstone.
    bury(&node, &holder, &call.stripe, begun.generation).await;
    assert_eq!(world.files(|path| path.ends_with("/tombstone")), []);
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn whatever_fails_in_a_sweep_tombstone_or_grave_is_there() {
    let mut failures = 0;
    for failing in 0..30 {
        let world = World::start(4, &[(4, 2)], 64 << 10).await;
        let (voice, node) = (world.voice(Role::Client, "writer"), world.voice(Role::Node, "boss"));
        let holder = world.node_address(2);
        let begun = voice.begin(&holder, 1).await.unwrap();
        let bytes = content(300_000, 1);
        let call = block_call(&begun, bytes.len());
        voice.put_block(&holder, &call, &bytes).await.unwrap();
        let save = begun.save;
        let tombstone = Tombstone {
            cluster: CLUSTER,
            save,
            generation: begun.generation,
            reason: RemoveReason::Aborted,
        };
        let tombstone = PutTombstone { bytes: tombstone.to_bytes().unwrap() };
        node.ask(&holder, &tombstone).await.unwrap();
        world.machines[2].disk.fail_once_after(failing);
        let swept = node.ask(&holder, &PurgeSave { save }).await;
        let left = world.machines[2].after_power_cut();
        let has_tombstone = || {
            let scope = rapidraid::store::RecordScope::Shard(ShardId::new(save, u32::MAX));
            left.get_record_file(scope, "tombstone").unwrap().is_some()
        };
        assert!(left.is_recorded_removed(save).unwrap() || has_tombstone(), "operation {failing}");
        if swept.is_ok() {
            assert!(left.is_recorded_removed(save).unwrap(), "operation {failing}");
        }
        // The catalogue server orders both again.
        node.ask(&holder, &tombstone).await.unwrap();
        node.ask(&holder, &PurgeSave { save }).await.unwrap();
        let left = world.machines[2].after_power_cut();
        assert!(left.is_recorded_removed(save).unwrap(), "operation {failing}");
        assert_eq!(world.files(|path| path.contains(&save.to_string())), [], "operation {failing}");
        failures += u64::from(swept.is_err());
        assert!(failing < 29 || swept.is_ok(), "the sweep did not come to its end");
    }
    assert!(failures > 5, "{failures}");
}
