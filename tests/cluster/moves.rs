//! Transfers of the catalogue to another daemon. An old copy of the catalogue or a false claim
//! about its epoch does no harm (docs/semantics.md, 8).

use std::sync::Arc;
use std::time::Duration;

use rapidraid::client::{Client, ClientError, SaveOptions};
use rapidraid::format::envelope::{RecordKind, seal_record};
use rapidraid::format::records::SeenEpoch;
use rapidraid::id::{DbId, Epoch, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::net::{Address, Role};
use rapidraid::store::Disk;
use rapidraid::wire::calls::{
    ClaimEpoch, DbChecksum, MoveCatalogueAnswer, PauseWrites, PlanChoice, TransferCatalogue,
};

use world::raw::block_call;
use world::{World, address, content, job, options, quiet, read_file, restore, save, shard};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 5 * BLOCK as usize - 1000;

async fn move_to(client: &Client, index: usize) -> Result<MoveCatalogueAnswer, ClientError> {
    client.move_catalogue(&Address { host_port: address(index), node: None }).await
}

async fn rebuild_on(client: &Client, index: usize) {
    let on = Address { host_port: address(index), node: None };
    client.rebuild_catalogue(Some(&on)).await.unwrap();
}

async fn assert_exact(client: &Client, step: u64) {
    let (out, _) = restore(client, step).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, step), "step {step}");
}

async fn try_save(client: &Client, step: u64) -> Result<(), ClientError> {
    let shards = vec![shard("weights", &content(LEN, step))];
    client.save(&job(), Step(step), shards, SaveOptions::default(), quiet()).await.map(drop)
}

#[tokio::test(start_paused = true)]
async fn the_catalogue_moves_with_all_that_is_in_it_and_back() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client();
    for step in 1..=4 {
        save(&client, step, &[("weights", &content(LEN, step)), ("empty", &content(0, 1))]).await;
    }
    client.archive(&job(), Some(Step(1)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    // A removal waits for node 6.
    world.kill(6).await;
    client.remove_step(&job(), Step(4)).await.unwrap();
    let listed = client.list_steps(None).await.unwrap();
    let keys = |world: &World| {
        ["n/", "c/", "s/", "t/", "o/", "nothing"].map(|prefix| world.catalogue_keys(prefix))
    };
    let before = keys(&world);

    let moved = move_to(&client, 3).await.unwrap();
    assert_eq!(
        (moved.epoch, moved.home.as_str(), moved.from.as_str()),
        (Epoch(2), "node03", "node00")
    );
    assert_eq!(moved.entries, before.iter().map(|keys| keys.len() as u64).sum::<u64>());
    assert!(
        world.nodes[&3].is_writable_catalogue_server()
            && !world.nodes[&0].is_writable_catalogue_server()
    );
    assert_eq!((client.list_steps(None).await.unwrap(), keys(&world)), (listed.clone(), before));
    for step in 1..=3 {
        world.assert_invariant(&client, step).await;
        assert_exact(&client, step).await;
    }
    save(&client, 5, &[("weights", &content(LEN, 5))]).await;
    client.archive(&job(), Some(Step(2)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
    // The removal that waited for node 6 resumes on the new catalogue server.
    world.boot(6);
    world.until_live(6).await;
    world.until("the removal is done", || world.catalogue_keys("s/").len() == 7).await;

    // The old catalogue server comes back as a node, and takes the catalogue again when it is
    // ordered to.
    world.kill(0).await;
    world.boot(0);
    tokio::time::sleep(2 * world.lease).await;
    assert!(!world.nodes[&0].is_writable_catalogue_server());
    let back = move_to(&client, 0).await.unwrap();
    assert_eq!(
        (back.epoch, back.home.as_str(), back.from.as_str()),
        (Epoch(3), "node00", "node03")
    );
    assert_exact(&world.client_of(3), 5).await;
    client.remove_step(&job(), Step(5)).await.unwrap();
    world.assert_idle().await;
}

/// A transfer at any moment of a save: the save succeeds, and its client does not have to repeat
/// it.
#[tokio::test(start_paused = true)]
async fn a_save_that_a_move_meets_is_whole_afterwards() {
    let mut world = World::simulated(6, &[(4, 2)], BLOCK, 1).await;
    world.set_lag(3);
    let client = world.client_of_all(&[1, 2]);
    let mut homes = [3, 0].into_iter().cycle();
    for step in 1..=40 {
        let saving = {
            let client = world.client_of(1 + (step as usize % 6));
            tokio::spawn(async move { try_save(&client, step).await })
        };
        tokio::time::sleep(Duration::from_millis(3 * step)).await;
        move_to(&client, homes.next().unwrap()).await.unwrap();
        saving.await.unwrap().unwrap();
        assert_exact(&client, step).await;
    }
    assert_eq!(client.list_steps(None).await.unwrap().len(), 40);
    world.kill(0).await;
}

/// A transfer at any moment of an archiving that another daemon coordinates: the archiving resumes
/// without a new request.
#[tokio::test(start_paused = true)]
async fn an_archiving_that_a_move_meets_goes_on() {
    let mut world = World::simulated(6, &[(4, 2)], BLOCK, 1).await;
    world.set_lag(3);
    let client = world.client_of_all(&[1, 2]);
    let mut homes = [3, 0].into_iter().cycle();
    let mut met = 0;
    for step in 1..=20 {
        try_save(&client, step).await.unwrap();
        let archiving = {
            let client = world.client_of(2);
            let archive = async move {
                let plan = options(PlanChoice::Chain);
                client.archive(&job(), Some(Step(step)), plan, &mut |_| ()).await.is_ok()
            };
            tokio::spawn(archive)
        };
        tokio::time::sleep(Duration::from_millis(10 * step)).await;
        move_to(&client, homes.next().unwrap()).await.unwrap();
        met += u32::from(!archiving.await.unwrap());
        let is_done = || {
            world.files(|path| path.ends_with(".rep")).is_empty()
                && world.catalogue_keys("a/").is_empty()
        };
        world.until("the archiving to go on", is_done).await;
        assert_exact(&client, step).await;
    }
    assert!(met > 0, "no move has met one");
    world.kill(0).await;
}

#[tokio::test(start_paused = true)]
async fn a_home_hands_over_only_for_a_whole_copy() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let (voice, to) = (world.voice(Role::Node, "node09"), world.node_address(0));
    let held = voice.ask(&to, &PauseWrites {}).await.unwrap();
    let home = world.node_address(3);
    let order = |copied, epoch| TransferCatalogue {
        copied,
        epoch: Epoch(epoch),
        map: DbId([9; 16]),
        home: home.clone(),
    };
    let other = DbChecksum { sum: [0; 16], ..held };
    let older = DbChecksum { revision: held.revision - 1, ..held };
    for (copied, epoch, kind) in [
        (other, 2, ErrorKind::Exists),
        (older, 2, ErrorKind::Exists),
        (held, 1, ErrorKind::Fenced),
        (held, 0, ErrorKind::Fenced),
    ] {
        assert_eq!(voice.ask(&to, &order(copied, epoch)).await.unwrap_err().kind(), kind);
    }
    // A client may make neither call.
    let client_voice = world.voice(Role::Client, "somebody");
    assert_eq!(client_voice.ask(&to, &PauseWrites {}).await.unwrap_err().kind(), ErrorKind::Denied);
    let denied = client_voice.ask(&to, &order(held, 2)).await.unwrap_err();
    assert_eq!(denied.kind(), ErrorKind::Denied);
    // While its writes are paused, the catalogue server changes nothing and still answers reads.
    // Later it resumes, and the copy is outdated.
    let refused = try_save(&client, 2).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    assert_exact(&client, 1).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    try_save(&client, 2).await.unwrap();
    assert_eq!(voice.ask(&to, &order(held, 2)).await.unwrap_err().kind(), ErrorKind::Exists);
    assert!(world.nodes[&0].is_writable_catalogue_server());
    // The catalogue server hears only half of the nodes. A later catalogue may exist, and a copy of
    // this one must not succeed it.
    let held = voice.ask(&to, &PauseWrites {}).await.unwrap();
    for index in [4, 5, 6] {
        world.kill(index).await;
    }
    world.until("it changes nothing", || !world.nodes[&0].is_writable_catalogue_server()).await;
    let refused = voice.ask(&to, &PauseWrites {}).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    let refused = voice.ask(&to, &order(held, 2)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    world.boot(4);
    world.until("it serves again", || world.nodes[&0].is_writable_catalogue_server()).await;
}

/// A rebuild has begun elsewhere while the old catalogue server was cut off. The transfer is
/// requested from a node that knows only the old one.
#[tokio::test(start_paused = true)]
async fn an_older_catalogue_than_nodes_have_heard_of_is_not_moved() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(3);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let claim = ClaimEpoch { epoch: Epoch(2), map: DbId([9; 16]), home: world.node_address(5) };
    let voice = world.voice(Role::Node, "node05");
    voice.ask(&world.node_address(6), &claim).await.unwrap();
    let refused = move_to(&client, 3).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    assert!(refused.to_string().contains("node06"), "{refused}");
    assert_eq!(world.nodes[&3].store().highest_seen_epoch(), Epoch(1));
}

/// The new catalogue server dies just after the old one has stepped down. The new server's copy is
/// not a catalogue.
#[tokio::test(start_paused = true)]
async fn a_move_that_ends_in_the_middle_leaves_everything_to_a_rebuild() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let files = world.files(|_| true);
    let (voice, to) = (world.voice(Role::Node, "node09"), world.node_address(0));
    let copied = voice.ask(&to, &PauseWrites {}).await.unwrap();
    let order = TransferCatalogue {
        copied,
        epoch: Epoch(2),
        map: DbId([9; 16]),
        home: world.node_address(3),
    };
    for _ in 0..2 {
        voice.ask(&to, &order).await.unwrap();
    }
    assert!(!world.nodes[&0].is_writable_catalogue_server());
    let other = TransferCatalogue { map: DbId([8; 16]), ..order };
    assert_eq!(voice.ask(&to, &other).await.unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(try_save(&client, 2).await.unwrap_err().kind(), ErrorKind::Unavailable);
    let refused = move_to(&client, 4).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert_eq!(world.files(|_| true), files);
    rebuild_on(&client, 4).await;
    assert_exact(&client, 1).await;
    try_save(&client, 2).await.unwrap();
    assert_eq!(world.nodes[&0].store().highest_seen_epoch(), Epoch(3));
}

#[tokio::test(start_paused = true)]
async fn a_move_is_refused_where_it_would_help_nobody() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of_all(&[0, 1, 2]);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    assert_eq!(move_to(&client, 0).await.unwrap_err().kind(), ErrorKind::Exists);
    for index in [4, 5, 6] {
        world.kill(index).await;
    }
    let refused = move_to(&client, 3).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("node04, node05, node06"), "{refused}");
    world.boot(4);
    move_to(&client, 3).await.unwrap();
    assert_exact(&client, 1).await;
}

/// An operator restores an old backup of the catalogue server's disk. The database has the right
/// epoch and lacks the latest changes.
#[tokio::test(start_paused = true)]
async fn an_old_copy_of_the_catalogue_is_not_served() {
    for all_restart in [false, true] {
        let mut world = World::start(6, &[(4, 2)], BLOCK).await;
        let client = world.client_of(1);
        save(&client, 1, &[("weights", &content(LEN, 1))]).await;
        // The copy lacks step 2 and has a save of step 3 in progress.
        let (voice, to) = (world.voice(Role::Client, "slow"), world.node_address(1));
        let begun = voice.begin(&to, 3).await.unwrap();
        let bytes = content(60_000, 1);
        voice.put_block(&to, &block_call(&begun, bytes.len()), &bytes).await.unwrap();
        let old = Arc::new(world.machines[0].catalogue.get().unwrap().copy());
        try_save(&client, 2).await.unwrap();
        tokio::time::sleep(world.lease).await;
        let files = world.files(|_| true);
        let all = if all_restart { 0..7 } else { 0..1 };
        for index in all.clone() {
            world.kill(index).await;
        }
        world.machines[0].catalogue.set(Some(old));
        for index in all {
            world.boot(index);
        }
        tokio::time::sleep(20 * world.lease).await;
        assert!(!world.nodes[&0].is_writable_catalogue_server());
        assert_eq!(world.files(|_| true), files);
        let status = world.client_of(0).status().await.unwrap();
        let notes: Vec<String> = status
            .nodes
            .iter()
            .flat_map(|node| node.held.as_ref().unwrap().notes.clone())
            .collect();
        assert!(notes[0].contains("old copy"), "{notes:?}");
        rebuild_on(&client, 0).await;
        for step in [1, 2] {
            assert_exact(&client, step).await;
        }
    }
}

/// A node's stored epoch is corrupted, or a peer claims a false epoch.
#[tokio::test(start_paused = true)]
async fn an_epoch_out_of_all_reach_ends_nothing() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let far = Epoch(u64::MAX);
    let voice = world.voice(Role::Node, "node09");
    for index in 0..=6 {
        let to = world.node_address(index);
        let claim = ClaimEpoch { epoch: far, map: DbId([9; 16]), home: world.node_address(3) };
        assert_eq!(voice.ask(&to, &claim).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    world.kill(6).await;
    let seen = SeenEpoch { epoch: far, map: None, home: None };
    let bytes = seal_record(RecordKind::Epoch, 1, &seen).unwrap();
    world.machines[6].disk.remove("epoch").unwrap();
    let file = world.machines[6].disk.create_new("epoch").unwrap();
    file.write_at(&bytes, 0).unwrap();
    world.boot(6);
    tokio::time::sleep(5 * world.lease).await;
    assert!(world.nodes[&0].is_writable_catalogue_server());
    try_save(&client, 2).await.unwrap();
    world.kill(0).await;
    world.machines[0].catalogue.set(None);
    rebuild_on(&client, 3).await;
    for step in [1, 2] {
        assert_exact(&client, step).await;
    }
    assert_eq!(world.nodes[&1].store().highest_seen_epoch(), Epoch(2));
}

#[tokio::test(start_paused = true)]
async fn a_map_that_is_taken_away_under_its_daemon_is_missed() {
    let world = World::start(6, &[(4, 2)], BLOCK).await;
    save(&world.client(), 1, &[("weights", &content(LEN, 1))]).await;
    world.machines[0].catalogue.set(None);
    world
        .until("a home that serves nothing", || !world.nodes[&0].is_writable_catalogue_server())
        .await;
    let status = world.client_of(1).status().await.unwrap();
    let home = status.nodes.iter().find(|node| node.view.node.name == world.machines[0].name);
    let notes = &home.unwrap().held.as_ref().unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("was removed while")), "{notes:?}");
    rebuild_on(&world.client_of(1), 2).await;
    assert_exact(&world.client_of(3), 1).await;
}
