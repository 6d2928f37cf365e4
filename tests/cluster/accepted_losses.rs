//! A catalogue that was rebuilt from too few nodes, because losses were accepted (semantics, 8).

use crate::rebuild::{lose_catalogue, rebuild_on};
use world::{World, content, read_file, restore, save};

const BLOCK: u64 = 64 << 10;
const LEN: usize = 5 * BLOCK as usize - 1000;

/// The nodes that were not reached may obey another catalogue, which accepts changes.
#[tokio::test(start_paused = true)]
async fn a_catalogue_made_again_from_half_of_the_nodes_accepts_no_changes_at_first() {
    let mut world = World::start(6, &[(4, 2)], BLOCK).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    lose_catalogue(&mut world).await;
    for machine in 4..=6 {
        world.kill(machine).await;
    }
    rebuild_on(&client, 2, true).await.unwrap();
    assert!(!world.nodes[&2].is_writable_catalogue_server());
    for machine in 4..=6 {
        world.boot(machine);
    }
    world.until("it may", || world.nodes[&2].is_writable_catalogue_server()).await;
    save(&client, 2, &[("weights", &content(LEN, 2))]).await;
    for step in 1..=2 {
        let (out, _) = restore(&client, step).await.unwrap();
        assert!(read_file(&*out, "weights") == content(LEN, step), "step {step}");
    }
}
