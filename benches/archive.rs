//! Measures the time to archive one stripe, from replicas to proven pieces, on one machine over
//! real QUIC and real files.
//!
//! Sixteen daemons run in this process with the code (16,11). Beside them two lower bounds of every
//! archiving are measured: one copy of the stripe in memory, and one BLAKE3 hash of it. Throughput
//! counts the bytes of the stripe. All daemons share the machine's cores, so the figures compare
//! plans, not clusters.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)] // a bench measures time and stops at the first failure

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rapidraid::client::{Client, NewShard, SaveOptions};
use rapidraid::config::{NodeConfig, Sources};
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::id::{ClusterId, Job, PeerName, Step};
use rapidraid::net::Role;
use rapidraid::net::authority::Authority;
use rapidraid::net::identity::Identity;
use rapidraid::node::Daemon;
use rapidraid::wire::calls::{ArchiveOptions, PlanChoice};
use rapidraid::wire::order::Codec;

const NODES: usize = 16;
const STRIPE_BYTES: usize = 11 << 20;

struct Cluster {
    daemons: Vec<Daemon>,
    client: Client,
    _folder: tempfile::TempDir,
}

fn identity(authority: &Authority, role: Role, name: &PeerName) -> Identity {
    let issued = authority.issue(role, name).unwrap();
    Identity::from_pem(authority.cert_pem(), &issued.cert_pem, &issued.key_pem).unwrap()
}

async fn cluster() -> Cluster {
    let cluster = ClusterId([3; 16]);
    let authority = Authority::create(cluster).unwrap();
    let folder = tempfile::tempdir().unwrap();
    // These ports are free now, and all different, because every socket stays open until the last
    // port is known.
    let held: Vec<UdpSocket> =
        (0..NODES).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<String> =
        held.iter().map(|socket| socket.local_addr().unwrap().to_string()).collect();
    drop(held);
    let mut daemons = Vec::new();
    for (index, address) in addresses.iter().enumerate() {
        let name: PeerName = format!("n{index:02}").parse().unwrap();
        let data = folder.path().join(name.as_str());
        let text = format!(
            "cluster = \"{cluster}\"\nname = \"{name}\"\nlisten = \"{address}\"\nadvertise = \"{address}\"\ndata_dir = \"{}\"\nseeds = [\"{}\"]\n[catalogue]\nserve = {}\n[code]\nblock = \"1MiB\"\n[disk]\nhigh_water = 99\n",
            data.display(),
            addresses[0],
            index == 0,
        );
        let none = BTreeMap::new();
        let file = Path::new("rapidraid.toml");
        let config =
            NodeConfig::parse(Sources { file, text: &text, env: &none, options: &none }).unwrap();
        daemons.push(Daemon::start(config, identity(&authority, Role::Node, &name)).await.unwrap());
    }
    let name = "bench".parse().unwrap();
    let identity = identity(&authority, Role::Client, &name);
    let client = Client::connect(&identity, vec![addresses[0].clone()]).await.unwrap();
    while client.status().await.unwrap().nodes.iter().filter(|node| node.view.live).count() < NODES
    {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Cluster { daemons, client, _folder: folder }
}

async fn save_and_archive(
    cluster: &Cluster,
    step: u64,
    bytes: &Bytes,
    plan: PlanChoice,
) -> Duration {
    let job: Job = "bench".parse().unwrap();
    let shard = NewShard { name: "stripe".parse().unwrap(), source: Arc::new(bytes.clone()) };
    let quiet = Arc::new(|_| ());
    cluster
        .client
        .save(&job, Step(step), vec![shard], SaveOptions::default(), quiet)
        .await
        .unwrap();
    let options = ArchiveOptions { plan, codec: Codec::Kernel, parallel: 1 };
    let began = Instant::now();
    cluster.client.archive(&job, Some(Step(step)), options, &mut |_| ()).await.unwrap();
    let took = began.elapsed();
    cluster.client.remove_step(&job, Step(step)).await.unwrap();
    took
}

fn archive(criterion: &mut Criterion) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut bytes = vec![0; STRIPE_BYTES];
    SeededEntropy::new(1).fill(&mut bytes);
    let bytes = Bytes::from(bytes);
    let mut group = criterion.benchmark_group("one stripe of 11 MiB");
    group.throughput(Throughput::Bytes(STRIPE_BYTES as u64)).sample_size(10);
    group.bench_function("floor: copy in memory", |bencher| {
        let mut target = vec![0; STRIPE_BYTES];
        bencher.iter(|| target.copy_from_slice(std::hint::black_box(&bytes)));
    });
    group.bench_function("floor: BLAKE3", |bencher| {
        bencher.iter(|| blake3::hash(std::hint::black_box(&bytes)))
    });
    let cluster = runtime.block_on(cluster());
    let mut step = 0;
    for (name, plan) in [("chain", PlanChoice::Chain), ("best star", PlanChoice::BestStar)] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|times| {
                let mut total = Duration::ZERO;
                for _ in 0..times {
                    step += 1;
                    total += runtime.block_on(save_and_archive(&cluster, step, &bytes, plan));
                }
                total
            });
        });
    }
    group.finish();
    runtime.block_on(async {
        cluster.client.close().await;
        for daemon in &cluster.daemons {
            daemon.stop().await;
        }
    });
}

criterion_group!(benches, archive);
criterion_main!(benches);
