//! Epochs and generations that a client sends bind no node.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits until it is up

use std::sync::Arc;
use std::time::Duration;

use rapidraid::clock::SystemClock;
use rapidraid::id::{Epoch, Generation, ShardId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::call::Caller;
use rapidraid::net::pool::Pool;
use rapidraid::net::{Peer, Role};
use rapidraid::wire::NodeAddress;
use rapidraid::wire::calls::{PutRecord, RecordName};
use world::{World, address, content, save};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_does_not_end_an_epoch() {
    let world = World::start(6, &[(6, 4)], 64 << 10).await;
    let peer = Peer { role: Role::Client, name: "stranger".parse().unwrap() };
    let transport = Arc::new(world.network.join(peer, "stranger:0"));
    let clock = SystemClock::new();
    let pool = Pool::new(transport, clock.clone());
    let caller = Caller::new(pool, clock, Duration::from_secs(10));
    for index in 1..=6 {
        let name = world.machines[index].name.clone();
        let to = NodeAddress { name, host_port: address(index) };
        let call = PutRecord {
            shard: ShardId([9; 16]),
            record: RecordName::Leaves,
            generation: Generation { epoch: Epoch(u64::MAX), counter: 1 },
            bytes: Vec::new(),
        };
        assert_eq!(caller.call(&to, &call).await.unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(world.nodes[&index].store().highest_seen_epoch(), Epoch(1));
    }
    save(&world.client(), 1, &[("shard", &content(1000, 1))]).await;
}
