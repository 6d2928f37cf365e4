//! Surplus copies of pieces: a node that comes back after its pieces were made elsewhere drops its
//! copies, but only after the other copies were read whole (docs/semantics.md, 11, *On another
//! node*).

use std::collections::BTreeSet;
use std::time::Duration;

use rapidraid::client::Client;
use rapidraid::format::records::{Receipt, Record};
use rapidraid::id::{Generation, Step};
use rapidraid::wire::calls::{ListFiles, PlanChoice, VerifyFile};

use crate::by_itself::{RULES, restart_server};
use crate::given_up::NoMovedReceipts;
use crate::repair::{CHAIN, LEN, archive, archived_world, assert_whole, give_up, repair};
use world::{World, content, job, quiet, read_file, restore, save};

/// Pieces, each with its storage node and path.
type Pieces = BTreeSet<(usize, String)>;

/// Returns the storage nodes and paths of the step's pieces: its piece files, and the replicas that
/// a classical code keeps.
async fn pieces(world: &World) -> Pieces {
    let files = world.files_of_step(1, "").await.into_iter();
    let is_piece = |path: &str| path.contains("/piece-") || path.contains("/block-");
    files.filter(|(machine, path)| *machine > 0 && is_piece(path)).collect()
}

/// Returns the first storage node that has a piece, and its pieces.
async fn first_holder(world: &World) -> (usize, Pieces) {
    let mut all = pieces(world).await;
    let first = all.first().unwrap().0;
    all.retain(|(machine, _)| *machine == first);
    (first, all)
}

async fn kill(world: &mut World, machine: usize) {
    world.kill(machine).await;
    let live = world.nodes.len() - 1;
    world.until_live(live).await;
}

async fn boot(world: &mut World, machine: usize) {
    world.boot(machine);
    let live = world.nodes.len() - 1;
    world.until_live(live).await;
    world.until_caught_up().await;
}

/// Waits until this many pieces are left.
async fn until_pieces(world: &World, count: usize) {
    for _ in 0..600 {
        if pieces(world).await.len() == count {
            return;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    panic!("not {count} pieces: {:?}", pieces(world).await);
}

/// Asserts that all receipts on this machine are those that the repair wrote.
fn assert_told(world: &World, machine: usize) {
    let receipts = world.files(|path| path.contains("/receipt-"));
    let orders = receipts.into_iter().filter(|(at, _)| *at == machine).map(|(_, path)| {
        Receipt::parse(&read_file(&*world.machines[machine].disk, &path)).unwrap().order
    });
    assert!(orders.into_iter().all(|order| order > Generation::default()));
}

async fn assert_restores(world: &World) {
    let (out, _) = restore(&world.client(), 1).await.unwrap();
    assert!(read_file(&*out, "weights") == content(LEN, 1));
}

/// Automatic repair does all of it: a node is away until its pieces are made on other nodes, and
/// drops its own copies after it has come back.
#[tokio::test(start_paused = true)]
async fn a_node_that_comes_back_drops_what_was_made_elsewhere() {
    for plan in [PlanChoice::Chain, PlanChoice::BestStar] {
        let mut world = World::start(8, &[(6, 4)], 64 << 10).await;
        restart_server(&mut world, RULES).await;
        let client = world.client();
        save(&client, 1, &[("weights", &content(LEN, 1))]).await;
        archive(&client, 1, plan).await;
        world.until("all is dropped", || world.catalogue_keys("a/").is_empty()).await;
        let all = pieces(&world).await.len();
        let (dead, had) = first_holder(&world).await;
        kill(&mut world, dead).await;
        until_pieces(&world, all + had.len()).await;
        world.requests.listen();
        boot(&mut world, dead).await;
        until_pieces(&world, all).await;
        let left = pieces(&world).await;
        assert!(had.iter().all(|copy| !left.contains(copy)), "{plan:?}: {left:?}");
        assert_eq!(world.requests.of::<VerifyFile>().len(), had.len(), "each is read once");
        let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
        assert_eq!((report.faults, report.survives), (vec![], Some(2)), "{plan:?}");
        assert_restores(&world).await;
        // Nothing is left to do.
        tokio::time::sleep(5 * RULES.grace).await;
        world.requests.listen();
        tokio::time::sleep(Duration::from_secs(1200)).await;
        assert_eq!(world.requests.of::<ListFiles>(), [], "{plan:?}");
        let status = client.status().await.unwrap().repair.unwrap();
        assert_eq!(status.survey.unwrap().degraded, 0, "{plan:?}");
        assert_eq!(status.waiting, vec![], "{plan:?}");
    }
}

/// Returns a cluster of seven nodes in which the pieces of a node were made elsewhere while it was
/// away, and all of these are damaged now, which nobody knows yet. Also returns the node, which is
/// back, its copies, and the damaged pieces.
async fn rotten_world() -> (World, Client, usize, Pieces, Pieces) {
    let (mut world, client) = archived_world(7, LEN).await;
    let (returned, copies) = first_holder(&world).await;
    let before = pieces(&world).await;
    kill(&mut world, returned).await;
    assert_eq!(give_up(&client, 1, CHAIN, &[returned]).await.notes, Vec::<String>::new());
    let made: Pieces = pieces(&world).await.difference(&before).cloned().collect();
    for (machine, path) in &made {
        world.machines[*machine].disk.flip_bit(path, 0).unwrap();
    }
    boot(&mut world, returned).await;
    (world, client, returned, copies, made)
}

/// While the other copy is damaged, the surplus copy is the good one.
#[tokio::test(start_paused = true)]
async fn a_surplus_copy_stays_until_the_other_copy_is_read_whole() {
    let (world, client, _, copies, made) = rotten_world().await;
    let told = repair(&client, 1, CHAIN).await;
    assert_eq!((told.summary.records, told.notes), (copies.len() as u64, vec![]));
    world.requests.listen();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(world.requests.of::<VerifyFile>().len(), made.len(), "each is read once");
    let left = pieces(&world).await;
    assert!(copies.is_subset(&left), "{left:?}");
    // The damage is known now: the pieces are made again, and then the copies go.
    let made_again = repair(&client, 1, CHAIN).await;
    assert_eq!((made_again.summary.pieces, made_again.notes), (made.len() as u64, vec![]));
    let surplus = made.len();
    until_pieces(&world, left.len() - surplus).await;
    assert_whole(&client, 1, 2).await;
    assert_restores(&world).await;
}

/// A node with a surplus copy is the only spare for another piece. Its new receipt ascribes only
/// the new piece to it.
#[tokio::test(start_paused = true)]
async fn a_spare_keeps_its_surplus_copy_until_the_other_copy_is_read_whole() {
    let (mut world, client, returned, copies, made) = rotten_world().await;
    let spares: BTreeSet<usize> = made.iter().map(|(machine, _)| *machine).collect();
    let next = (1..=7).find(|at| *at != returned && !spares.contains(at)).unwrap();
    kill(&mut world, next).await;
    assert_eq!(give_up(&client, 1, CHAIN, &[next]).await.notes, Vec::<String>::new());
    tokio::time::sleep(Duration::from_secs(300)).await;
    let left = pieces(&world).await;
    assert!(copies.is_subset(&left), "{left:?}");
    assert_eq!(give_up(&client, 1, CHAIN, &[next]).await.notes, Vec::<String>::new());
    let on_next = pieces(&world).await.iter().filter(|(at, _)| *at == next).count();
    until_pieces(&world, 12 + on_next).await;
    let report = client.verify(&job(), Some(Step(1)), quiet()).await.unwrap();
    assert_eq!((report.faults, report.survives), (vec![], Some(2)));
    assert_restores(&world).await;
}

/// A node that has its piece, and an older receipt or none, might drop the piece.
#[tokio::test(start_paused = true)]
async fn a_surplus_copy_stays_while_a_node_lacks_the_receipt() {
    let (mut world, client) = archived_world(7, LEN).await;
    let (returned, copies) = first_holder(&world).await;
    kill(&mut world, returned).await;
    give_up(&client, 1, CHAIN, &[returned]).await;
    let holders: BTreeSet<usize> = pieces(&world).await.into_iter().map(|(at, _)| at).collect();
    let mut proxies = Vec::new();
    for machine in holders.into_iter().filter(|machine| *machine != returned).take(2) {
        proxies.push(world.between(machine, NoMovedReceipts).await);
    }
    boot(&mut world, returned).await;
    assert_eq!(repair(&client, 1, CHAIN).await.notes, Vec::<String>::new());
    assert_told(&world, returned);
    tokio::time::sleep(Duration::from_secs(300)).await;
    let left = pieces(&world).await;
    assert!(copies.is_subset(&left), "{left:?}");
}

/// A node drops nothing if the answers of the other nodes are older than half a lease period.
#[tokio::test(start_paused = true)]
async fn a_surplus_copy_stays_while_nodes_answer_slowly() {
    let mut world = World::simulated(7, &[(6, 4)], 64 << 10, 1).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    archive(&client, 1, PlanChoice::Chain).await;
    let (returned, copies) = first_holder(&world).await;
    kill(&mut world, returned).await;
    give_up(&client, 1, CHAIN, &[returned]).await;
    boot(&mut world, returned).await;
    repair(&client, 1, CHAIN).await;
    assert_told(&world, returned);
    world.set_lag(1000);
    world.requests.listen();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(!world.requests.of::<VerifyFile>().is_empty(), "the node wants to drop its copies");
    assert!(copies.is_subset(&pieces(&world).await));
    let count = pieces(&world).await.len();
    world.set_lag(0);
    until_pieces(&world, count - copies.len()).await;
}

/// A rack is away until its pieces were made in the other racks, and comes back. Its copies stay:
/// without them, the loss of another rack would be the loss of the step.
#[tokio::test(start_paused = true)]
async fn copies_in_a_failure_domain_with_fewer_pieces_stay() {
    let mut world = World::start(15, &[(6, 4)], 64 << 10).await;
    world.racks = 3;
    for machine in 1..=15 {
        world.kill(machine).await;
        world.boot(machine);
    }
    world.until_live(15).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    archive(&client, 1, PlanChoice::Chain).await;
    let before = pieces(&world).await;
    let racks = |found: &Pieces, rack: usize| found.iter().filter(|it| it.0 % 3 == rack).count();
    // With a rack away, the others have three pieces of each stripe.
    let away: Vec<usize> = (1..=15).filter(|machine| machine % 3 == 0).collect();
    for &machine in &away {
        world.kill(machine).await;
    }
    world.until_live(10).await;
    assert_eq!(give_up(&client, 1, CHAIN, &away).await.notes, Vec::<String>::new());
    for &machine in &away {
        world.boot(machine);
    }
    world.until_live(15).await;
    world.until_caught_up().await;
    assert_eq!(repair(&client, 1, CHAIN).await.summary.records, 0);
    tokio::time::sleep(Duration::from_secs(300)).await;
    let left = pieces(&world).await;
    assert!(before.is_subset(&left), "{left:?}");
    assert_eq!(racks(&left, 0), racks(&before, 0));
    assert!(racks(&left, 1) > racks(&before, 1) && racks(&left, 2) > racks(&before, 2));
}
