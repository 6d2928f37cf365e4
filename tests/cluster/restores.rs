//! The files that a restore writes: below its folder, never over existing files without force, and
//! all or none.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rapidraid::client::{Client, ClientError, RestoreRequest, SaveOptions};
use rapidraid::id::Step;
use rapidraid::kind::ErrorKind;
use rapidraid::net::Role;
use rapidraid::store::{Disk, MemoryDisk};
use rapidraid::wire::calls::{CompleteShard, PlanChoice};
use rapidraid::wire::request_to_bytes;

use world::look::files_below;
use world::raw::empty_root;
use world::{World, content, job, options, quiet, read_file, restore, restore_error, save, shard};

/// Returns a disk with one file.
fn holding(path: &str) -> Arc<MemoryDisk> {
    let out = Arc::new(MemoryDisk::new(1 << 20));
    if let Some((folder, _)) = path.split_once('/') {
        out.create_dir(folder).unwrap();
    }
    out.create_new(path).unwrap().write_at(b"old", 0).unwrap();
    out
}

fn into(out: &Arc<MemoryDisk>, force: bool) -> RestoreRequest {
    RestoreRequest { out: out.clone(), force, shard: None, range: None }
}

#[tokio::test(start_paused = true)]
async fn a_name_that_leaves_the_folder_does_not_pass_the_wire() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let gateway = world.node_address(1);
    let client = world.voice(Role::Client, "evil");
    let begun = client.begin(&gateway, 1).await.unwrap();
    let seal = CompleteShard { root: empty_root(&begun, 1, "aa/bb") };
    let frame = request_to_bytes(&seal).unwrap();
    let at = frame.windows(5).position(|window| window == b"aa/bb").unwrap();
    for bad in [b"../bb", b"/aabb", b"aabb/", b"aa/..", b"a//bb", b"./aab", b"aa\0bb", b"aa\xffbb"]
    {
        let mut evil = frame.clone();
        evil[at..at + 5].copy_from_slice(bad);
        let error = client.send(&gateway, &evil).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{bad:?}: {error}");
    }
    assert_eq!(world.catalogue_keys("s/"), Vec::<String>::new());
    client.send(&gateway, &frame).await.unwrap();
    assert_eq!(world.catalogue_keys("s/").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn two_shards_of_one_name_are_refused_before_anything_is_begun() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let bytes = content(10, 1);
    let shards = vec![shard("a", &bytes), shard("b", &bytes), shard("a", &bytes)];
    let error = client.save(&job(), Step(1), shards, SaveOptions::default(), quiet()).await;
    assert!(
        matches!(error.unwrap_err(), ClientError::DuplicateName { name } if name.as_str() == "a")
    );
    let error = client.save(&job(), Step(1), vec![], SaveOptions::default(), quiet()).await;
    assert!(matches!(error.unwrap_err(), ClientError::NoShards));
    assert_eq!(world.catalogue_keys("c/"), Vec::<String>::new());
    assert_eq!(world.catalogue_keys("s/"), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_tree_comes_back_as_it_was_and_nothing_beside_it() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let names = ["a/b/c", "a/b/d", "a/e", ".hidden", "x y/ü", "..z", "deep/er/and/er/still"];
    let contents: Vec<_> = (0..).map(|seed| content(100_000 + seed, seed as u64)).take(7).collect();
    let named: Vec<_> = names.into_iter().zip(&contents).collect();
    save(&client, 1, &named).await;
    let (out, _) = restore(&client, 1).await.unwrap();
    let mut expected = names.to_vec();
    expected.sort_unstable();
    let mut found = files_below(&*out, "");
    found.sort_unstable();
    assert_eq!(found, expected);
    for (name, bytes) in named {
        assert_eq!(read_file(&*out, name), *bytes);
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_in_the_way_is_refused_before_anything_is_written() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let (a, b) = (content(70_000, 1), content(10, 2));
    save(&client, 1, &[("a", &a), ("dir/b", &b), ("z", &a)]).await;
    for there in ["z", "dir/b"] {
        let out = holding(there);
        let error = client.restore(&job(), None, into(&out, false), quiet()).await.unwrap_err();
        assert!(matches!(&error, ClientError::FileExists { path } if path == there), "{error}");
        assert_eq!(error.kind(), ErrorKind::Exists);
        assert_eq!(files_below(&*out, ""), [there]);
        assert_eq!(read_file(&*out, there), b"old");
        client.restore(&job(), None, into(&out, true), quiet()).await.unwrap();
        assert_eq!(files_below(&*out, ""), ["a", "dir/b", "z"]);
        assert_eq!((read_file(&*out, "z"), read_file(&*out, "dir/b")), (a.to_vec(), b.to_vec()));
    }
    // A file where a folder is needed, and a folder where a file is needed: force does not help.
    for (there, named) in [("dir", "dir"), ("z/inside", "z")] {
        for force in [false, true] {
            let out = holding(there);
            let error = client.restore(&job(), None, into(&out, force), quiet()).await.unwrap_err();
            let is_named = matches!(&error, ClientError::InTheWay { path, .. } if path == named);
            assert!(is_named && error.kind() == ErrorKind::Exists, "{there}: {error}");
            assert_eq!(files_below(&*out, ""), [there]);
            assert_eq!(read_file(&*out, there), b"old");
        }
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_is_the_folder_of_another_is_refused_and_restored_alone() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let (a, b) = (content(10, 1), content(20, 2));
    save(&client, 1, &[("a", &a), ("a/b/c", &b)]).await;
    let error = restore_error(&client, 1).await;
    assert!(matches!(&error, ClientError::PathConflict { path } if path == "a"), "{error}");
    for (name, bytes) in [("a", &a), ("a/b/c", &b)] {
        let out = Arc::new(MemoryDisk::new(1 << 20));
        let request = RestoreRequest { shard: Some(name.parse().unwrap()), ..into(&out, false) };
        client.restore(&job(), None, request, quiet()).await.unwrap();
        assert_eq!(files_below(&*out, ""), [name]);
        assert_eq!(read_file(&*out, name), *bytes);
    }
}

/// Archives a step of fourteen stripes. Each of the six nodes has a piece of each stripe.
async fn archived_stripes(world: &World) -> (Client, Bytes) {
    let (client, bytes) = (world.client(), content(14 * (4 << 16) - 5, 3));
    save(&client, 1, &[("a", &bytes)]).await;
    let chain = options(PlanChoice::Chain);
    let archived = client.archive(&job(), Some(Step(1)), chain, &mut |_| ()).await.unwrap();
    assert_eq!(archived.undropped, 0);
    (client, bytes)
}

#[tokio::test(start_paused = true)]
async fn a_node_that_says_nothing_is_not_waited_for_when_others_are_enough() {
    let mut world = World::start(6, &[(6, 4)], 64 << 10).await;
    let (_, bytes) = archived_stripes(&world).await;
    let _silent = world.silence(4).await;
    let client = world.client();
    let began = tokio::time::Instant::now();
    let (out, report) = restore(&client, 1).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}: {report:?}", began.elapsed());
    assert_eq!(read_file(&*out, "a"), bytes);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_falls_silent_is_waited_for_once_in_a_restore() {
    // On one thread and with a slow network, so that the node falls silent in the middle of the
    // restore.
    let mut world = World::simulated(6, &[(6, 4)], 64 << 10, 5).await;
    world.set_lag(2);
    let (client, bytes) = archived_stripes(&world).await;
    let (began, first) = (tokio::time::Instant::now(), Arc::new(tokio::sync::Notify::new()));
    let (out, told) = (Arc::new(MemoryDisk::new(1 << 23)), first.clone());
    let request = RestoreRequest { out: out.clone(), force: false, shard: None, range: None };
    let restoring = tokio::spawn(async move {
        let progress = Arc::new(move |_| told.notify_one());
        client.restore(&job(), Some(Step(1)), request, progress).await
    });
    first.notified().await;
    let _silent = world.silence(4).await;
    let report = restoring.await.unwrap().unwrap();
    // Four stripes are read at the same time.
    assert!((1..=4).contains(&report.incidents.len()), "{report:?}");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}: {report:?}", began.elapsed());
    assert_eq!(read_file(&*out, "a"), bytes);
}

#[tokio::test(start_paused = true)]
async fn the_stripes_of_many_small_shards_are_planned_at_the_same_time() {
    let world = World::simulated(6, &[(4, 2)], 64 << 10, 5).await;
    let client = world.client();
    let names: Vec<String> = (0..200).map(|number| format!("shard-{number:03}")).collect();
    let bytes: Vec<Bytes> = (0..200).map(|number| content(1000 + number, 1)).collect();
    let shards: Vec<_> = names.iter().map(String::as_str).zip(&bytes).collect();
    save(&client, 1, &shards).await;
    world.set_lag(20);
    let began = tokio::time::Instant::now();
    let (out, report) = restore(&client, 1).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_eq!((report.shards, report.replica_stripes), (200, 200));
    for (name, bytes) in shards {
        assert!(read_file(&*out, name) == *bytes, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_restore_that_is_cancelled_in_the_middle_leaves_no_file_behind() {
    let world = World::simulated(6, &[(6, 4)], 64 << 10, 5).await;
    world.set_lag(2);
    let (client, _) = archived_stripes(&world).await;
    let (out, first) = (Arc::new(MemoryDisk::new(1 << 23)), Arc::new(tokio::sync::Notify::new()));
    let (request, told) = (into(&out, false), first.clone());
    let restoring = tokio::spawn(async move {
        let progress = Arc::new(move |_| told.notify_one());
        client.restore(&job(), Some(Step(1)), request, progress).await
    });
    first.notified().await;
    assert_eq!(files_below(&*out, "").len(), 1);
    restoring.abort();
    assert!(restoring.await.unwrap_err().is_cancelled());
    assert_eq!(files_below(&*out, ""), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fills_leaves_no_file_behind() {
    let world = World::start(4, &[(4, 2)], 64 << 10).await;
    let client = world.client();
    let bytes = content(500_000, 1);
    save(&client, 1, &[("a", &content(10, 2)), ("b", &bytes)]).await;
    let out = Arc::new(MemoryDisk::new(200_000));
    client.restore(&job(), None, into(&out, false), quiet()).await.unwrap_err();
    assert_eq!(files_below(&*out, ""), Vec::<String>::new());
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_step_that_is_replaced_meanwhile_is_read_as_it_is_then() {
    let world = World::simulated(4, &[(4, 2)], 64 << 10, 5).await;
    let (writer, reader) = (world.client(), world.client());
    let versions: Vec<Bytes> = (0..12).map(|seed| content(300_000, seed)).collect();
    save(&writer, 1, &[("a", &versions[0])]).await;
    let replacing = async {
        for bytes in &versions[1..] {
            let options = SaveOptions { replace: true };
            writer.save(&job(), Step(1), vec![shard("a", bytes)], options, quiet()).await.unwrap();
        }
    };
    let restoring = async {
        let mut newest = 0;
        while newest + 1 < versions.len() {
            let (out, _) = restore(&reader, 1).await.unwrap();
            let found = read_file(&*out, "a");
            let version = versions.iter().position(|bytes| *bytes == found).unwrap();
            assert!(version >= newest, "{version} after {newest}");
            newest = version;
        }
    };
    tokio::join!(replacing, restoring);
}

#[tokio::test(start_paused = true)]
async fn a_restore_outlives_an_outage_of_all_nodes_and_not_a_loss() {
    for is_lost in [false, true] {
        let mut world = World::start(6, &[(6, 4)], 64 << 10).await;
        let (client, bytes) = (world.client(), content(2 << 20, 1));
        save(&client, 1, &[("weights", &bytes)]).await;
        let out = Arc::new(MemoryDisk::new(8 << 20));
        (1..=6).for_each(|node| world.slow(node, Duration::from_millis(200)));
        let request = into(&out, false);
        let restoring =
            tokio::spawn(
                async move { client.restore(&job(), Some(Step(1)), request, quiet()).await },
            );
        world.until("the restore has begun", || !files_below(&*out, "").is_empty()).await;
        for node in 1..=6 {
            world.kill(node).await;
        }
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert!(!restoring.is_finished());
        for node in 1..=6 {
            if is_lost {
                world.replace(node);
            }
            world.boot(node);
        }
        match restoring.await.unwrap() {
            Ok(_) => assert!(!is_lost && read_file(&*out, "weights") == bytes),
            Err(error) => {
                assert!(is_lost, "{error}");
                assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
                assert_eq!(files_below(&*out, ""), Vec::<String>::new());
            }
        }
    }
}
