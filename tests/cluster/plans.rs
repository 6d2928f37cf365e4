//! The main path in one process: save, archive with each plan, lose nodes, restore.

use rapidraid::wire::calls::{ArchiveOptions, PlanChoice};
use world::{World, content, job, options, quiet, read_file, restore, save};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_plan_archives_and_every_byte_comes_back() {
    let world = World::start(16, &[(16, 11)], 128 << 10).await;
    let client = world.client();
    let small = content(1, 1);
    let large = content(2 * 11 * (128 << 10) + 54_321, 2);
    let empty = content(0, 3);
    let plans = [
        PlanChoice::Chain,
        PlanChoice::BestStar,
        PlanChoice::NaiveStar,
        PlanChoice::StripedStar,
        PlanChoice::RandomStar,
    ];
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
        let report = client.verify(&job(), None, quiet()).await.unwrap();
        assert_eq!((report.faults, report.survives), (vec![], Some(5)), "{plan:?}");
    }
    world.assert_idle().await;
}

#[tokio::test(start_paused = true)]
async fn eight_stripes_at_once_fit_into_daemons_of_64_mib() {
    let world = World::with_memory(6, &[(6, 4)], 128 << 10, 64 << 20).await;
    let client = world.client();
    let bytes = content(8 * 4 * (128 << 10), 5);
    save(&client, 1, &[("weights", &bytes)]).await;
    let at_once = ArchiveOptions { parallel: 8, ..options(PlanChoice::Chain) };
    let report = client.archive(&job(), None, at_once, &mut |_| ()).await.unwrap();
    assert_eq!((report.stripes, report.undropped, report.notes), (8, 0, Vec::new()));
    let held = world.assert_invariant(&client, 1).await;
    assert_eq!((held.archived, held.pieces, held.replicas), (8, 8 * 6, 0));
    let (out, _) = restore(&client, 1).await.unwrap();
    assert_eq!(read_file(&*out, "weights"), bytes);
    for node in client.status().await.unwrap().nodes {
        for (share, _, peak_bytes, total_bytes) in node.held.unwrap().budgets {
            assert!(peak_bytes <= total_bytes, "{share} of {}", node.view.node.name);
        }
    }
    world.assert_idle().await;
}
