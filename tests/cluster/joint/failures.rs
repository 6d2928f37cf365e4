//! Joint saves whose writers restart again and again, or lose their gateway.

use super::*;
use crate::gateways::client_of_cut_off_gateway;

#[tokio::test(start_paused = true)]
async fn a_writer_that_restarts_again_and_again_is_not_waited_for() {
    let world = world().await;
    let waits = Arc::new(Writer::new(LAUNCH, 0, 1));
    let saving = start(&world, 0, 1, 2, &waits);
    let begun = tokio::time::Instant::now();
    let shards = vec![content(64 * BLOCK as usize, 1)];
    while !saving.is_finished() {
        assert!(begun.elapsed() < LIMIT, "writer 0 waits for ever");
        let (client, number) = world.connect(vec![address(1)]);
        let clock = world.machines[1].time.clock();
        world.network.set_pace(&format!("client{number}:0"), clock, Duration::from_secs(5));
        let killed = Writer { shards: shards.clone(), ..Writer::new(LAUNCH, 1, 1) };
        let killed = Arc::new(killed.waiting_at(Moment::Sent));
        let run = start_by(client, 1, 2, &killed);
        tokio::time::sleep(Duration::from_secs(25)).await;
        assert_eq!(*killed.at.borrow(), None, "killed while it sends");
        run.abort();
    }
    let error = saving.await.unwrap().unwrap_err();
    assert!(matches!(&error, ClientError::WritersMissing { writers, .. } if *writers == [1]));
    assert!(begun.elapsed() > 2 * STALL, "a few restarts count: {:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_cannot_ask_for_the_end_does_not_report_its_own_failure() {
    let world = world().await;
    let stays = Arc::new(Writer::new(LAUNCH, 0, 1).waiting_at(Moment::Index));
    let first = Arc::new(Writer::new(LAUNCH, 1, 2));
    let saving = start(&world, 0, 1, 2, &stays);
    let completes = start(&world, 1, 1, 2, &first);
    stays.has_reached(Moment::Index).await;
    completes.abort();
    // The restarted writer finds its content changed, when its gateway has just gone.
    let (client, number) = world.connect(vec![address(3)]);
    let again = Writer::new(LAUNCH, 1, 2).waiting_at(Moment::Sent);
    let again = Arc::new(Writer { is_changed: true, ..again });
    let failing = start_by(client.clone(), 1, 2, &again);
    again.has_reached(Moment::Sent).await;
    stays.may_go.send_replace(true);
    let save = saving.await.unwrap().unwrap();
    let own = format!("client{number}:0");
    world.network.partition(&own, &address(3));
    again.may_go.send_replace(true);
    let error = failing.await.unwrap().unwrap_err();
    assert!(error.kind().is_transient(), "the step may be committed: {error}");
    world.network.heal(&own, &address(3));
    assert_eq!(start_by(client, 1, 2, &again).await.unwrap().unwrap(), save);
    assert_exact(&world, 1, &[&stays, &first]).await;
}

#[tokio::test(start_paused = true)]
async fn a_joint_save_leaves_a_gateway_that_does_not_reach_the_catalogue() {
    let world = world().await;
    let (client, _) = client_of_cut_off_gateway(&world).await;
    let writers = [0, 1].map(|number| Arc::new(Writer::new(LAUNCH, number, 1)));
    let saving = [start(&world, 2, 1, 2, &writers[0]), start_by(client.clone(), 1, 2, &writers[1])];
    for saving in saving {
        saving.await.unwrap().unwrap();
    }
    assert_exact(&world, 1, &writers.each_ref()).await;
}
