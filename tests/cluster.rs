//! The path in one process: save, archive by each plan, lose nodes, restore.

mod world;

use rapidraid::wire::calls::PlanChoice;
use world::{World, content, job, options, quiet, read_file, restore, save};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_plan_archives_and_every_byte_comes_back() {
    let world = World::start(16, &[(16, 11)], 128 << 10).await;
    let client = world.client();
    let small = content(1, 1);
    let large = content(2 * 11 * (128 << 10) + 54_321, 2);
    let empty = content(0, 3);
    let plans =
        [PlanChoice::Chain, PlanChoice::BestStar, PlanChoice::NaiveStar, PlanChoice::StripedStar];
    for (step, plan) in (1..).zip(plans) {
        save(&client, step, &[("small", &small), ("a/large.bin", &large), ("empty", &empty)]).await;
        let (out, report) = restore(&client, step).await.unwrap();
        assert_eq!(read_file(&*out, "a/large.bin"), large);
        assert_eq!((report.replica_stripes, report.decoded_stripes), (4, 0));
        let archived = client
            .archive(&job(), Some(rapidraid::id::Step(step)), options(plan), &mut |_| ())
            .await
            .unwrap();
        assert_eq!(
            (archived.stripes, archived.undropped, archived.reports.len()),
            (4, 0, 4),
            "{:?}",
            archived.notes
        );
        let (out, report) = restore(&client, step).await.unwrap();
        assert_eq!(read_file(&*out, "a/large.bin"), large, "{plan:?}");
        assert_eq!(read_file(&*out, "small"), small);
        assert_eq!(read_file(&*out, "empty"), empty);
        assert_eq!(report.incidents, Vec::<String>::new());
        client.verify(&job(), None, quiet()).await.unwrap();
    }
    for node in world.nodes.values() {
        assert_eq!(node.memory_in_use(), [0, 0, 0], "{}", node.settings().name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archiving_whose_daemon_dies_is_finished_by_another() {
    let mut world =
        World::start_with(17, &[(16, 11)], 64 << 10, std::time::Duration::from_millis(600)).await;
    let client = world.client();
    let bytes = content(12 * 11 * (64 << 10), 5);
    save(&client, 1, &[("weights", &bytes)]).await;
    // Asked of a storage node that dies as soon as the first stripe is done; nobody asks again.
    let gateway = world.client_of(1);
    let (first, mut seen) = tokio::sync::mpsc::channel(1);
    let mut slow = options(PlanChoice::Chain);
    slow.parallel = 1;
    let task = tokio::spawn(async move {
        let mut told = |event: &rapidraid::wire::calls::ArchiveEvent| {
            if matches!(event, rapidraid::wire::calls::ArchiveEvent::Stripe(_)) {
                let _ = first.try_send(());
            }
        };
        gateway.archive(&job(), Some(rapidraid::id::Step(1)), slow, &mut told).await
    });
    seen.recv().await.unwrap();
    world.kill(1).await;
    assert!(task.await.unwrap().is_err());
    for _ in 0..400 {
        let shown = client.show(&job(), None).await.unwrap();
        let archived =
            |state| matches!(state, rapidraid::format::records::StripeState::Archived { .. });
        if shown.shards.iter().all(|(_, state)| state.states().all(archived)) {
            let (out, report) = restore(&client, 1).await.unwrap();
            assert_eq!(read_file(&*out, "weights"), bytes);
            assert_eq!(report.len_bytes, bytes.len() as u64);
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("nobody went on");
}
