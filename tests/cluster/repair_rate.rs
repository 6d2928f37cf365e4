//! The rate of an automatic repair: the first transfer measures what the links carry, and the
//! others send at a share of that rate (docs/semantics.md, 11, *Automatic repair*, 4).

use std::collections::BTreeSet;
use std::time::Duration;

use rapidraid::client::Client;
use rapidraid::config::RepairRules;
use rapidraid::id::Step;
use rapidraid::wire::calls::{CopyReplica, PlanChoice, ReservePart};
use tokio::time::Instant;

use crate::by_itself::{RULES, empty_disk_while, restart_server};
use crate::repair::{CHAIN, assert_whole, repair};
use world::{World, content, job, options, save};

const BLOCK: u64 = 2 << 20;
const LEN: usize = 16 * BLOCK as usize - 1000;
const EMPTIED: usize = 2;
const SHARE_PERCENT: u8 = 25;
/// The time that a machine takes to send 64 KiB.
const GRAIN_TIME: Duration = Duration::from_millis(10);
const LOOK_EVERY: Duration = Duration::from_millis(10);
const LOOKS: usize = 100_000;

/// Longest pause after a transfer: the first one pauses for three times its duration.
const PAUSE: Duration = Duration::from_millis(1500);

/// A transfer of a repair: the limit that it was given, in bytes a second, and the times of its
/// order and of the file that it made.
#[derive(Debug)]
struct Transfer {
    bytes_per_s: Option<u64>,
    ordered_at: Instant,
    ended_at: Instant,
}

impl Transfer {
    fn took_s(&self) -> f64 {
        (self.ended_at - self.ordered_at).as_secs_f64()
    }
}

/// Returns the paths of the files with this ending on the machine that is emptied.
fn files(world: &World, ending: &str) -> BTreeSet<String> {
    let all = world.files(|path| path.ends_with(ending)).into_iter();
    all.filter(|(machine, _)| *machine == EMPTIED).map(|(_, path)| path).collect()
}

/// Saves a step, prepares it, and empties a machine. The links are slow then. Returns the cluster
/// and the number of files with this ending that the machine has lost.
async fn emptied_world(ending: &str, prepare: impl AsyncFnOnce(&Client)) -> (World, usize) {
    let mut world = World::start(7, &[(6, 4)], BLOCK).await;
    restart_server(&mut world, RepairRules { share_percent: SHARE_PERCENT, ..RULES }).await;
    let client = world.client();
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    prepare(&client).await;
    let lost = files(&world, ending).len();
    empty_disk_while(&mut world, EMPTIED, 7).await;
    world.requests.listen();
    for machine in 0..=7 {
        world.slow(machine, GRAIN_TIME);
    }
    (world, lost)
}

async fn archive(client: &Client) {
    client.archive(&job(), Some(Step(1)), options(PlanChoice::Chain), &mut |_| ()).await.unwrap();
}

/// Returns the limits of the plans that were ordered so far.
fn limits_of_plans(world: &World) -> Vec<Option<u64>> {
    let mut runs = BTreeSet::new();
    let orders = world.requests.of::<ReservePart>().into_iter().map(|(_, _, call)| call.order);
    orders.filter(|order| runs.insert(order.run)).map(|order| order.bytes_per_s).collect()
}

/// Returns the limits of the copies that were ordered so far.
fn limits_of_copies(world: &World) -> Vec<Option<u64>> {
    let calls = world.requests.of::<CopyReplica>().into_iter();
    calls.map(|(_, _, call)| call.bytes_per_s).collect()
}

/// Waits until this many files with this ending are made again. Returns the transfers.
async fn watch_transfers(
    world: &World,
    (ending, lost): (&str, usize),
    list_limits: fn(&World) -> Vec<Option<u64>>,
) -> Vec<Transfer> {
    let (mut ordered_at, mut ended_at) = (Vec::new(), Vec::new());
    for _ in 0..LOOKS {
        tokio::time::sleep(LOOK_EVERY).await;
        ordered_at.resize(list_limits(world).len(), Instant::now());
        ended_at.resize(files(world, ending).len(), Instant::now());
        if ended_at.len() == lost {
            let times = ordered_at.into_iter().zip(ended_at);
            let transfer = |(bytes_per_s, (ordered_at, ended_at))| Transfer {
                bytes_per_s,
                ordered_at,
                ended_at,
            };
            return list_limits(world).into_iter().zip(times).map(transfer).collect();
        }
    }
    panic!("only {} of {lost} files were made again", ended_at.len());
}

/// Asserts that the first transfer has no limit, that the others keep to their share of its rate,
/// and that these are followed by short pauses.
fn assert_limited(transfers: &[Transfer]) {
    let [first, others @ ..] = transfers else { panic!("no transfers") };
    assert_eq!(first.bytes_per_s, None);
    assert!(others.len() > 1, "{transfers:?}");
    let share = f64::from(SHARE_PERCENT) / 100.0;
    let expected_rate = share * BLOCK as f64 / first.took_s();
    for transfer in others {
        let rate = transfer.bytes_per_s.expect("only the first transfer has no limit") as f64;
        let of_expected = rate / expected_rate;
        assert!((0.9..1.3).contains(&of_expected), "{of_expected}: {transfers:?}");
        // The first chunk passes at once. A chunk of a copy is an eighth of the block.
        let of_limited = transfer.took_s() / (BLOCK as f64 / rate);
        assert!((0.75..1.3).contains(&of_limited), "{of_limited}: {transfers:?}");
    }
    for pair in transfers.windows(2) {
        assert!(pair[1].ordered_at - pair[0].ended_at < PAUSE, "{transfers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_pieces_are_made_at_a_share_of_the_links_rate() {
    let (world, lost) = emptied_world(".pc", archive).await;
    assert_limited(&watch_transfers(&world, (".pc", lost), limits_of_plans).await);
}

#[tokio::test(start_paused = true)]
async fn lost_replicas_are_copied_at_a_share_of_the_links_rate() {
    let (world, lost) = emptied_world(".rep", async |_: &Client| ()).await;
    assert_limited(&watch_transfers(&world, (".rep", lost), limits_of_copies).await);
}

/// A person does not wait for an automatic repair: a requested one gets the shard after the stripe,
/// and goes on at the full rate.
#[tokio::test(start_paused = true)]
async fn a_requested_repair_takes_the_shard_from_an_automatic_one() {
    let (world, lost) = emptied_world(".pc", archive).await;
    let has_begun = || limits_of_plans(&world).last().is_some_and(Option::is_some);
    world.until("a limited plan", has_begun).await;
    let client = world.client();
    let report = repair(&client, 1, CHAIN).await;
    assert_eq!(report.notes, Vec::<String>::new());
    assert_eq!(report.summary.pieces as usize, lost - 2, "two were made automatically");
    let limits = limits_of_plans(&world);
    assert!(limits.len() == lost && limits[2..].iter().all(Option::is_none), "{limits:?}");
    assert_whole(&client, 1, 2).await;
}
