//! Tests of loads by ranges: of a step in the cluster only the wanted extents are read, and a step
//! that does not fit into memory can be loaded.

use std::time::Duration;

use rapidraid::trainer::StagingError;
use rapidraid::trainer::load::LoadedStep;
use rapidraid::trainer::protocol::{
    Load, LoadFrom, LoadSource, MAX_WINDOW_EXTENTS, Request, WINDOW_BYTES,
};
use rapidraid::trainer::session::Session;

use crate::content;
use crate::launch::{Launch, Plan};
use crate::machine::Cluster;
use crate::stage::{Stage, with_wait};
use crate::{Cell, cells};

pub const CELLS: &[Cell] = cells![
    extents_are_read_as_they_are_asked_for,
    a_step_that_does_not_fit_is_loaded_all_the_same,
    windows_are_as_long_as_they_may_be,
    requests_for_extents_that_make_no_sense,
    a_window_that_nobody_takes_is_read_again,
];

/// Number of rows of the shared tensor with which a rank's part takes more than half of a window.
const MANY_ROWS: u64 = 320_000;

/// Creates a job whose step 10 is only in the cluster.
fn archived(stage: &Stage<'_>, plan: &Plan) {
    let mut launch = Launch::ready(stage, plan);
    launch.save(10);
    launch.wait(10);
    launch.kill();
    stage.forget(&plan.job);
}

fn load_of(job: &str, table_first: bool) -> Load {
    let job = job.parse().unwrap();
    Load { job, launch: None, step: None, offline: false, table_first, limit_ms: 0 }
}

fn open(session: &mut Session, load: &Load) -> LoadedStep {
    with_wait(|wait| session.load(load, LoadFrom::Anywhere, &mut |_, _| (), wait)).unwrap().unwrap()
}

fn release(session: &mut Session, step: LoadedStep) {
    with_wait(|wait| session.release(step, wait)).unwrap();
}

fn extents_are_read_as_they_are_asked_for(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    archived(&stage, &Plan::new(job, 2));
    let mut session = stage.session().unwrap();
    let mut step = open(&mut session, &load_of(job, true));
    assert_eq!(step.about.source, LoadSource::Ranges);
    assert_eq!((step.about.why_by_ranges.as_str(), stage.status().used_bytes), ("", 0));
    // An extent outside of the window is not readable.
    let extents = step.table.extents().iter();
    let last = extents.filter(|extent| extent.len_bytes > 0).count() as u32 - 1;
    assert!(step.bytes(last).is_err());
    with_wait(|wait| session.read_extents(&mut step, &[last], &mut |_, _| (), wait)).unwrap();
    step.bytes(last).unwrap();
    assert!(step.bytes(0).is_err());
    let found = with_wait(|wait| content::check(&mut session, &mut step, wait)).unwrap();
    assert_eq!((found.step, found.world, found.is_from_memory), (10, 2, false));
    release(&mut session, step);
    assert_eq!((stage.status().used_bytes, stage.files("fetched").len()), (0, 0));
    // The daemon reads the whole step for a process that wants it, and from then on for all.
    for (table_first, source) in [(false, LoadSource::Cluster), (true, LoadSource::Cluster)] {
        let step = open(&mut session, &load_of(job, table_first));
        assert_eq!(step.about.source, source);
        release(&mut session, step);
    }
    stage.assert_sound();
}

fn a_step_that_does_not_fit_is_loaded_all_the_same(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    archived(&stage, &Plan { rows: 20_000, ..Plan::new(job, 2) });
    stage.kill();
    stage.set("staging.memory=2MiB");
    stage.restart();
    // All ranks of a launch get it too.
    let plan = Plan::new(job, 2);
    let mut launch = Launch::start(&stage, &plan);
    for found in launch.load(None) {
        assert_eq!((found["step"].as_u64(), found["memory"].as_bool()), (Some(10), Some(false)));
    }
    let mut session = stage.session().unwrap();
    let step = open(&mut session, &load_of(job, false));
    assert_eq!(step.about.source, LoadSource::Ranges);
    assert!(
        step.about.why_by_ranges.contains("do not fit into 2.0 MiB"),
        "{}",
        step.about.why_by_ranges
    );
    release(&mut session, step);
    assert_eq!((stage.status().used_bytes, stage.files("fetched").len()), (0, 0));
    stage.assert_sound();
}

fn windows_are_as_long_as_they_may_be(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "256MiB", &[]);
    archived(&stage, &Plan { rows: MANY_ROWS, ..Plan::new(job, 2) });
    let mut session = stage.session().unwrap();
    let mut step = open(&mut session, &load_of(job, true));
    let wanted: Vec<Vec<u32>> =
        (0..step.table.extents().len() as u32).map(|row| vec![row]).collect();
    let windows = step.windows(&wanted);
    // The empty extents need no read, and are a window of their own.
    let read = windows.iter().filter(|window| !window.extents.is_empty()).count();
    assert!(step.len_bytes() > WINDOW_BYTES && read == 2, "{windows:?}");
    with_wait(|wait| content::check(&mut session, &mut step, wait)).unwrap();
    let Err(StagingError::Failed(_)) = with_wait(|wait| {
        let all: Vec<u32> = wanted.iter().flatten().copied().collect();
        session.read_extents(&mut step, &all, &mut |_, _| (), wait)
    }) else {
        panic!("two windows at once");
    };
    release(&mut session, step);
    stage.assert_sound();
}

fn a_window_that_nobody_takes_is_read_again(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    archived(&stage, &Plan::new(job, 1));
    let mut session = stage.session().unwrap();
    let mut step = open(&mut session, &load_of(job, true));
    // The daemon reads the window and frees it after 10 s if its process has not taken it.
    let request = Request::ReadExtents { ticket: step.about.ticket, extents: vec![0], limit_ms: 0 };
    with_wait(|wait| session.ask("a part", &request, wait)).unwrap();
    std::thread::sleep(Duration::from_secs(12));
    with_wait(|wait| session.read_extents(&mut step, &[0], &mut |_, _| (), wait)).unwrap();
    step.bytes(0).unwrap();
    release(&mut session, step);
    stage.assert_sound();
}

fn requests_for_extents_that_make_no_sense(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    archived(&stage, &Plan::new(job, 1));
    let mut session = stage.session().unwrap();
    let step = open(&mut session, &load_of(job, true));
    let ticket = step.about.ticket;
    let refused = |session: &mut Session, ticket, extents: Vec<u32>, says: &str| {
        let request = Request::ReadExtents { ticket, extents, limit_ms: 100 };
        let error = with_wait(|wait| session.ask("a part", &request, wait)).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    };
    refused(&mut session, ticket, vec![u32::MAX], "no extent");
    refused(&mut session, ticket, vec![0; MAX_WINDOW_EXTENTS + 1], "at most");
    refused(&mut session, ticket + 1, vec![0], "no longer open");
    release(&mut session, step);
    refused(&mut session, ticket, vec![0], "no longer open");
    let whole = open(&mut session, &load_of(job, false));
    let ticket = whole.about.ticket;
    refused(&mut session, ticket, vec![0], "not by ranges");
    release(&mut session, whole);
    stage.free(job);
    // A process asks for a part and ends.
    let step = open(&mut session, &load_of(job, true));
    let request = Request::ReadExtents { ticket: step.about.ticket, extents: vec![0], limit_ms: 0 };
    with_wait(|wait| session.ask("a part", &request, wait)).unwrap();
    drop((step, session));
    let again =
        with_wait(|wait| content::load(&mut stage.session().unwrap(), &load_of(job, true), wait));
    assert_eq!(again.unwrap().unwrap().step, 10);
    stage.assert_sound();
}
