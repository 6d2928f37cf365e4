//! The members of a cluster: nodes that are added and taken out again, further clients, and new keys
//! for all.

use std::fs;

use crate::machine::{Cluster, Daemon, bytes, free_ports};

const PEM_FILES: [&str; 3] = ["key.pem", "certificate.pem", "ca.pem"];

/// The data of a cluster outlives its keys, and the old keys open nothing any more.
#[test]
fn a_cluster_goes_on_with_new_keys_and_refuses_the_old_ones() {
    let mut cluster = Cluster::start(4, &["code.list=4,2"]);
    let data = bytes(300_000, 1);
    cluster.write("a.bin", &data);
    cluster.run("save job/1 a.bin").ok();
    cluster.run("cluster add-client cluster ops").ok();
    let as_ops = "status --config cluster/clients/ops/rapidraid.toml";
    cluster.run(as_ops).ok();
    fs::rename(cluster.path("cluster/clients"), cluster.path("leaked")).unwrap();

    let renewed = cluster.run("cluster renew-keys cluster renewed").ok();
    assert!(renewed.out.contains("4 nodes, 1 client\n"), "{renewed:?}");
    cluster.run("cluster renew-keys cluster renewed").fails(1, &["not an empty folder"]);
    cluster.daemons.clear();
    for member in ["nodes/n1", "nodes/n2", "nodes/n3", "nodes/n4", "client"] {
        for file in PEM_FILES {
            let new = cluster.path(&format!("renewed/{member}/{file}"));
            fs::copy(new, cluster.path(&format!("cluster/{member}/{file}"))).unwrap();
        }
    }
    let cluster = cluster.started(4);
    cluster.run("restore job/1 --out out").ok();
    assert!(cluster.read("out/a.bin") == data);
    cluster.run("save job/2 a.bin").ok();
    let refused = cluster.run("status --config leaked/ops/rapidraid.toml");
    refused.fails(1, &["check that the certificate is of this cluster"]);
}

#[test]
fn a_node_is_added_used_and_taken_out_again() {
    let mut cluster = Cluster::start(4, &["code.list=4,2", "timeouts.lease_s=3"]);
    let data = bytes(300_000, 1);
    cluster.write("a.bin", &data);
    cluster.run("save job/1 a.bin").ok();
    let port = free_ports(1)[0];
    let line = format!("cluster add-node cluster --node n5=127.0.0.1:{port}");
    let added = cluster.run(&line).ok();
    assert!(added.out.contains("cluster/nodes/n5/rapidraid.toml"), "{added:?}");
    cluster.run(&line).fails(1, &["the name n5 already"]);
    cluster.daemons.push(Daemon::start(cluster.folder.path(), &cluster.config(5), &[]).ready());
    let live =
        |nodes: &[serde_json::Value]| nodes.iter().filter(|node| node["live"] == true).count();
    cluster.until("all five are live", |nodes| live(nodes) == 5);

    // Without one of the old nodes, a save needs the new one.
    cluster.daemons.remove(3);
    cluster.until("n4 is dead", |nodes| {
        nodes.iter().any(|node| node["name"] == "n4" && node["live"] == false)
    });
    cluster.run("save job/2 a.bin").ok();
    let shown = cluster.run("show job/2 --json").ok().json();
    let ring: Vec<&str> =
        shown["shards"][0]["ring"].as_array().unwrap().iter().filter_map(|n| n.as_str()).collect();
    assert!(ring.contains(&"n5"), "{ring:?}");
    cluster.run("archive job/2").ok();
    for step in [1, 2] {
        cluster.run(&format!("restore job/{step} --out out{step}")).ok();
        assert!(cluster.read(&format!("out{step}/a.bin")) == data, "step {step}");
    }
    cluster.run("cluster remove-node n5").fails(1, &["n5 is live"]);
    let few = ["the ring of job/1 has 3 live storage nodes", "replace-node n4 --by NEW"];
    cluster.run("cluster remove-node n4").fails(1, &few);
    cluster.run("cluster replace-node n4 --by n4").fails(2, &["its own successor"]);
    let replaced = cluster.run("cluster replace-node n4 --by n5").ok();
    assert!(replaced.out.contains("n5 takes the place of n4"), "{replaced:?}");
    let status = cluster.run("status").ok();
    assert!(status.out.contains("n4 is leaving (successor: n5)"), "{status:?}");
    let missing = ["parts of job/1 would be missing without node n4", "repair --node n4"];
    cluster.run("cluster remove-node n4").fails(1, &missing);
    cluster.run("repair --node n4").ok();
    let gone = cluster.run("cluster remove-node n4").ok();
    assert!(gone.out.contains("n4 is no member any more"), "{gone:?}");
    assert!(gone.out.contains("Remove the folder nodes/n4"), "{gone:?}");
    cluster.run("restore job/1 --out without-n4").ok();
    assert!(cluster.read("without-n4/a.bin") == data);
    cluster.run("cluster maintenance n5 --for 10d").fails(2, &["at most 7 days"]);
    cluster.run("cluster maintenance nobody --for 1h").fails(1, &["nobody"]);
    let announced = cluster.run("cluster maintenance n5 --for 1h").ok();
    assert!(
        announced.out.contains("ignores the absence of n5 for the next 3600 s"),
        "{announced:?}"
    );
    let status = cluster.run("status --json").ok().json();
    assert_eq!(status["nodes"].as_array().unwrap().len(), 4);
}
