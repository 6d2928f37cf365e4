//! A client leaves a gateway that fails its calls for one that does not, and asks no more daemons
//! than it has to.

use std::time::Duration;

use rapidraid::client::{Client, SaveOptions};
use rapidraid::id::Step;
use rapidraid::kind::ErrorKind;
use rapidraid::wire::calls::{BeginSave, Hello};
use tokio::time::Instant;

use world::{World, address, content, job, quiet, save, shard};

const LEN: usize = 300_000;

/// Returns a client that has node 3 as its gateway, knows node 1 besides, and its address. Node 3 has
/// lost the catalogue server since.
pub async fn client_of_cut_off_gateway(world: &World) -> (Client, String) {
    let (client, number) = world.connect([3, 1].map(address).into());
    let own = format!("client{number}:0");
    world.network.partition(&own, &address(1));
    client.list_steps(None).await.unwrap();
    world.network.heal(&own, &address(1));
    world.network.partition(&address(0), &address(3));
    (client, own)
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_does_not_reach_the_catalogue_is_left() {
    let world = World::start(6, &[(4, 2)], 64 << 10).await;
    let (client, own) = client_of_cut_off_gateway(&world).await;
    let data = content(LEN, 1);
    save(&client, 1, &[("weights", &data)]).await;
    // From now on the client asks node 1, although node 3 answers `Hello`, too.
    let began = Instant::now();
    save(&client, 2, &[("weights", &data)]).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // If no other daemon answers, node 3 is better than none: it reads by the commit marks.
    world.network.partition(&own, &address(1));
    assert_eq!(client.list_steps(None).await.unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_every_gateway_refuses_is_asked_once_more() {
    let world = World::start(3, &[(4, 2)], 64 << 10).await;
    let client = world.client_of_all(&[0, 1, 2, 3]);
    world.requests.listen();
    for _ in 0..10 {
        let shards = vec![shard("weights", &content(LEN, 1))];
        let saved = client.save(&job(), Step(1), shards, SaveOptions::default(), quiet()).await;
        let error = saved.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("needs 4"), "{error}");
    }
    let asked = world.requests.of::<BeginSave>().len();
    assert_eq!(asked, 11, "for ten saves");
}

#[tokio::test(start_paused = true)]
async fn a_committed_step_is_fetched_without_a_question_to_the_nodes() {
    let mut world = World::start(6, &[(4, 2)], 64 << 10).await;
    let client = world.client_of(1);
    save(&client, 1, &[("weights", &content(LEN, 1))]).await;
    let _silent = world.silence(6).await;
    tokio::time::sleep(2 * world.lease).await;
    let asked_node = |world: &World| {
        let hellos = world.requests.of::<Hello>();
        hellos.iter().filter(|(from, to, _)| from.starts_with("client") && to == "node06").count()
    };
    world.requests.listen();
    let began = Instant::now();
    let found = client.fetch_committed_step(&job(), Some(Step(1))).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!((found.step.step, found.shards.len(), asked_node(&world)), (Step(1), 1, 0));
    let shown = client.show_step(&job(), Some(Step(1))).await.unwrap();
    assert_eq!(asked_node(&world), 1, "this one wants to know");
    assert!(began.elapsed() > Duration::from_secs(2));
    assert!(shown.nodes.iter().any(|view| !view.live));
}
