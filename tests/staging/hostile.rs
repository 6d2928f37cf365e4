//! Tests with trainers that break the rules and with memory that changes: no other trainer is
//! harmed, and no wrong byte is committed or loaded.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::id::{FillId, LaunchId, MemberId, SegmentId, Step};
use rapidraid::trainer::daemon::trace::StagingPoint;
use rapidraid::trainer::frames::Outgoing;
use rapidraid::trainer::protocol::{
    Answer, Load, Place, Prepare, Request, Resumed, StagingHello, VERSION, to_bytes,
};
use rustix::process::{PidfdFlags, Signal, getpid, pidfd_open};
use serde_json::json;

use crate::launch::{Launch, Plan, Trainer};
use crate::machine::Cluster;
use crate::stage::{Stage, with_wait};
use crate::{Cell, cells};

pub const CELLS: &[Cell] = cells![
    bytes_that_are_no_messages,
    descriptors_that_nobody_asked_for,
    connections_that_say_nothing,
    requests_that_make_no_sense,
    a_segment_that_is_cut_off_when_its_step_is_committed,
    bits_that_turn_in_a_table,
    bits_that_turn_while_no_daemon_runs,
    bits_that_turn_in_a_committed_step,
    bits_that_turn_in_what_was_read_from_the_cluster,
    a_rank_that_calls_good_bytes_bad,
    hashes_that_are_gone,
];

/// Offset in a segment of the byte that tests change: 100 bytes into the extents, in the first
/// rank's part of the shared tensor.
pub const IN_EXTENT: u64 = 4096 + 100;

fn raw(stage: &Stage<'_>) -> UnixStream {
    let socket = UnixStream::connect(stage.dir().join("socket")).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    socket
}

fn hello() -> StagingHello {
    let (oldest, newest, pid) = (1, VERSION, std::process::id());
    StagingHello { oldest, newest, member: MemberId([7; 16]), pid, token: Vec::new() }
}

fn send(socket: &UnixStream, message: &[u8], descriptors: Vec<OwnedFd>) {
    let mut out = Outgoing::new(message, descriptors).unwrap();
    while !out.send(socket.as_fd()).unwrap() {}
}

/// Returns a connection that has sent a valid hello.
fn greeted(stage: &Stage<'_>) -> UnixStream {
    let socket = raw(stage);
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    send(&socket, &to_bytes(&hello()).unwrap(), vec![own]);
    let mut head = [0; 5];
    (&socket).read_exact(&mut head).unwrap();
    let mut rest = vec![0; u32::from_le_bytes(head[..4].try_into().unwrap()) as usize];
    (&socket).read_exact(&mut rest).unwrap();
    socket
}

/// Asserts that the daemon closes the connection.
fn is_ended(mut socket: &UnixStream, what: &str) {
    let mut rest = Vec::new();
    let ended = socket.read_to_end(&mut rest);
    let is_reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
    assert!(ended.as_ref().is_ok() || ended.as_ref().is_err_and(is_reset), "{what}: {ended:?}");
}

/// Starts a launch of one trainer that follows the rules.
fn bystander(stage: &Stage<'_>, job: &str) -> Launch {
    let mut launch = Launch::ready(stage, &Plan::new(&format!("{job}-2"), 1));
    launch.save(10);
    launch
}

fn is_unhurt(stage: &mut Stage<'_>, mut bystander: Launch) {
    assert!(stage.is_alive(), "{}", stage.watch.tail());
    bystander.wait(10);
    bystander.save(20);
    bystander.wait(20);
    stage.assert_sound();
}

fn bytes_that_are_no_messages(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let launch = bystander(&stage, job);
    let frame = |len: u32, descriptors: u8, bytes: &[u8]| {
        [&len.to_le_bytes()[..], &[descriptors], bytes].concat()
    };
    let good = to_bytes(&hello()).unwrap();
    let mut noise = vec![0; 70_000];
    SeededEntropy::new(1).fill(&mut noise);
    noise[3] = 0xff;
    let long = [good.clone(), vec![0]].concat();
    for (what, bytes) in [
        ("noise", noise),
        ("a length of 4 GiB", frame(u32::MAX, 0, b"x")),
        ("a length beyond the limit", frame((256 << 10) + 1, 0, b"x")),
        ("an empty message", frame(0, 0, b"")),
        ("descriptors that do not come", frame(good.len() as u32, 1, &good)),
        ("255 descriptors", frame(good.len() as u32, 255, &good)),
        ("a byte too many", frame(long.len() as u32, 0, &long)),
        ("half a greeting", frame(good.len() as u32 / 2, 0, &good[..good.len() / 2])),
    ] {
        let mut socket = raw(&stage);
        // The daemon may close the connection before all bytes are sent.
        let _ = socket.write_all(&bytes);
        is_ended(&socket, what);
        // The same bytes after a valid hello.
        let mut socket = greeted(&stage);
        let _ = socket.write_all(&bytes);
        if what != "descriptors that do not come" {
            is_ended(&socket, what);
        }
    }
    // Hellos that are cut off at every byte.
    for len in 0..good.len() + 5 {
        drop(raw(&stage).write_all(&frame(good.len() as u32, 0, &good)[..len]));
    }
    // Hellos with a version that the daemon does not speak, and without a descriptor of the
    // process.
    let socket = raw(&stage);
    send(
        &socket,
        &to_bytes(&StagingHello { oldest: 900, newest: 901, ..hello() }).unwrap(),
        Vec::new(),
    );
    is_ended(&socket, "a version of its own");
    let socket = raw(&stage);
    send(&socket, &good, Vec::new());
    is_ended(&socket, "no descriptor of the process");
    is_unhurt(&mut stage, launch);
}

fn open_descriptors(stage: &Stage<'_>) -> usize {
    let path = format!("/proc/{}/fd", stage.pid().as_raw_nonzero());
    std::fs::read_dir(path).unwrap().count()
}

fn descriptors_that_nobody_asked_for(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let launch = bystander(&stage, job);
    let before = open_descriptors(&stage);
    let many = |count: usize| -> Vec<OwnedFd> {
        (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
    };
    let sockets: Vec<UnixStream> = (0..40)
        .map(|at| {
            let socket = if at % 2 == 0 { greeted(&stage) } else { raw(&stage) };
            // The frame is incomplete, so that its descriptors wait in the queue.
            let mut out = Outgoing::new(&[0; 64], many(60)).unwrap();
            out.send(socket.as_fd()).unwrap();
            socket
        })
        .collect();
    // The daemon closes the connections that received too many descriptors, and with them the
    // descriptors.
    sockets.iter().for_each(|socket| is_ended(socket, "60 descriptors"));
    stage.until("their descriptors are closed", || open_descriptors(&stage) < before + 20);
    is_unhurt(&mut stage, launch);
}

fn connections_that_say_nothing(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = bystander(&stage, job);
    let silent: Vec<UnixStream> = (0..600).map(|_| raw(&stage)).collect();
    // The daemon serves connected trainers; a new one is refused and does not wait for the silent
    // ones.
    launch.wait(10);
    let mut late = Trainer::start(&stage.dir(), None);
    assert!(late.tell("connect").is_err());
    // The daemon closes silent connections after 10 s. The test closes them at once.
    drop(silent);
    stage.until("there is room again", || late.tell("connect").is_ok());
    is_unhurt(&mut stage, launch);
}

fn requests_that_make_no_sense(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let launch = bystander(&stage, job);
    let mut session = stage.session().unwrap();
    let mut refused = |request: Request, kind: &str| {
        let answer = with_wait(|wait| session.ask("nonsense", &request, wait));
        let found = answer.map(|_| ()).unwrap_err();
        assert_eq!(format!("{:?}", found.kind()), kind, "{request:?}: {found}");
    };
    let place = Place {
        job: launch.plan.job.parse().unwrap(),
        launch: LaunchId([9; 16]),
        world: 1,
        rank: 0,
    };
    let (step, fill, segment) = (Step(10), FillId([1; 16]), SegmentId([1; 16]));
    let samples = Vec::new();
    let prepare = |place: Place, segment_bytes, launch_bytes| {
        let (resumed, keep, limit_ms) = (Resumed::default(), 0, 0);
        let born_ns = 1;
        Request::Prepare(Prepare {
            place,
            segment_bytes,
            launch_bytes,
            born_ns,
            resumed,
            keep,
            limit_ms,
        })
    };
    refused(Request::Fill { step, or_skip: true, limit_ms: u32::MAX }, "Invalid");
    refused(Request::Staged { step, segment, fill, samples: samples.clone() }, "Invalid");
    refused(Request::GiveUp { step, fill, why: "w".repeat(200_000) }, "Invalid");
    refused(Request::Wait { step, limit_ms: u32::MAX }, "NotFound");
    refused(Request::Attach(place.clone()), "Fenced");
    // This launch is far older than the launch that writes.
    refused(prepare(place.clone(), 1 << 20, 1 << 20), "Fenced");
    let other = Place { job: "other".parse().unwrap(), ..place.clone() };
    refused(prepare(other.clone(), 0, 0), "Invalid");
    refused(prepare(other.clone(), u64::MAX, u64::MAX), "Busy");
    refused(prepare(Place { world: 193, ..other.clone() }, 1 << 20, 1 << 20), "Invalid");
    refused(prepare(Place { world: 0, ..other }, 1 << 20, 1 << 20), "Invalid");
    for request in [
        Request::Open { ticket: 1, first: 0 },
        Request::Verified { ticket: 1, extents: vec![u32::MAX; 40_000] },
        Request::Corrupt { ticket: 1, name: "weights".into() },
    ] {
        refused(request, "Invalid");
    }
    let mut own = Launch::ready(&stage, &Plan::new(job, 1));
    let filled = own.ranks[0].step("fill", 10).unwrap();
    own.save(20);
    own.wait(20);
    let stale = Request::Staged {
        step,
        segment: filled["segment"].as_str().unwrap().parse().unwrap(),
        fill: filled["fill"].as_str().unwrap().parse().unwrap(),
        samples,
    };
    refused(stale, "Unavailable");
    // Loads whose process never releases them.
    let load = Load {
        job: job.parse().unwrap(),
        launch: None,
        step: None,
        offline: false,
        table_first: false,
        limit_ms: 0,
    };
    for _ in 0..16 {
        let request = Request::Load(load.clone());
        let (answer, _) = with_wait(|wait| session.ask("a load", &request, wait)).unwrap();
        assert!(matches!(answer, Answer::Loadable(_)), "{answer:?}");
    }
    let busy = with_wait(|wait| session.ask("a load", &Request::Load(load), wait)).unwrap_err();
    assert!(busy.to_string().contains("16 loads open"), "{busy}");
    // Read a rank beyond the last part, and rows beyond the last extent.
    let tell = |session: &mut rapidraid::trainer::session::Session, request: Request| {
        with_wait(|wait| session.ask("a load", &request, wait)).unwrap().0
    };
    let none = tell(&mut session, Request::Open { ticket: 1, first: u32::MAX });
    assert_eq!(none, Answer::Parts { parts: Vec::new() });
    let extents = vec![0, 1, u32::MAX];
    assert_eq!(tell(&mut session, Request::Verified { ticket: 1, extents }), Answer::Done);
    assert_eq!(tell(&mut session, Request::Release { ticket: 99 }), Answer::Done);
    drop((session, own));
    is_unhurt(&mut stage, launch);
}

pub fn cut_off(stage: &Stage<'_>, segment: &str) {
    let file = File::options().write(true).open(stage.segment(segment)).unwrap();
    file.set_len(0).unwrap();
}

fn a_segment_that_is_cut_off_when_its_step_is_committed(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    let saved = launch.ranks[0].step("save", 10).unwrap();
    launch.wait(10);
    // The upload has unmapped the memory.
    stage.until("nobody maps it", || {
        let maps = format!("/proc/{}/maps", stage.pid().as_raw_nonzero());
        !std::fs::read_to_string(maps).unwrap().contains(saved["segment"].as_str().unwrap())
    });
    cut_off(&stage, saved["segment"].as_str().unwrap());
    stage.until("it is loaded from the cluster", || match stage.load(job, None) {
        Ok(Some(found)) => !found.is_from_memory && found.step == 10,
        _ => false,
    });
    stage.assert_sound();
}

fn bits_that_turn_in_a_table(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    for (step, at) in [(10, 0), (20, 100)] {
        let saved = launch.ranks[0].step("save", step).unwrap();
        // Change the magic bytes, or the hash over header and table.
        stage.flip(&stage.segment(saved["segment"].as_str().unwrap()), at);
        launch.ranks[1].step("save", step).unwrap();
        let told = launch.ranks[0].step("wait", step).unwrap_err();
        assert!(["Corrupt", "Invalid"].contains(&told.kind.as_str()), "{told:?}");
        told.says(&told.kind, &["rank 0", "is damaged"]);
    }
    launch.save(30);
    launch.wait(30);
    assert_eq!(stage.committed(job), [30]);
    stage.assert_sound();
}

fn bits_that_turn_while_no_daemon_runs(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    launch.save(10);
    launch.wait(10);
    stage.watch.set_trap(StagingPoint::Saving, &[stage.pid()], Signal::KILL);
    let saved = launch.ranks[0].step("save", 20).unwrap();
    stage.until("the daemon is at the save", || stage.watch.has_sprung());
    stage.bury();
    stage.flip(&stage.segment(saved["segment"].as_str().unwrap()), IN_EXTENT);
    launch.kill();
    stage.restart();
    // The hashes of step 20 were computed before the change.
    stage.until("step 20 is dropped", || stage.state(job, 20).is_none());
    assert_eq!(stage.committed(job), [10]);
    assert_eq!(stage.load(job, None).unwrap().unwrap().step, 10);
    stage.assert_sound();
}

fn bits_that_turn_in_a_committed_step(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 2));
    let saved = launch.ranks[0].step("save", 10).unwrap();
    launch.ranks[1].step("save", 10).unwrap();
    launch.wait(10);
    assert!(stage.load(job, None).unwrap().unwrap().is_from_memory);
    stage.flip(&stage.segment(saved["segment"].as_str().unwrap()), IN_EXTENT);
    let mut reader = Trainer::start(&stage.dir(), None);
    let load = json!({ "do": "load", "job": job });
    reader.ask(&load).unwrap_err().says("Corrupt", &["weights is damaged in this host's memory"]);
    let healed = reader.ask(&load).unwrap();
    assert_eq!((&healed["memory"], &healed["fill"]), (&json!(false), &saved["fill"]), "{healed}");
    assert_eq!(stage.committed(job), [10]);
    launch.save(20);
    launch.wait(20);
    stage.assert_sound();
}

fn bits_that_turn_in_what_was_read_from_the_cluster(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    let fill = launch.save(10);
    launch.wait(10);
    launch.kill();
    stage.forget(job);
    let mut reader = Trainer::start(&stage.dir(), None);
    assert_eq!(reader.ask(&json!({ "do": "open", "job": job })).unwrap(), 10);
    reader.tell("release").unwrap();
    let files = stage.files("fetched");
    stage.flip(&stage.dir().join("fetched").join(&files[0]), 5_000);
    let load = json!({ "do": "load", "job": job });
    reader.ask(&load).unwrap_err().says("Corrupt", &["is damaged"]);
    let healed = reader.ask(&load).unwrap();
    assert_eq!((&healed["memory"], &healed["fill"]), (&json!(false), &json!(fill)), "read anew");
    stage.assert_sound();
}

fn a_rank_that_calls_good_bytes_bad(cluster: &Cluster, job: &str) {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    stage.watch.set_trap(StagingPoint::Saving, &[stage.pid()], Signal::STOP);
    let fill = launch.save(10);
    stage.until("the daemon is at the save", || stage.watch.has_sprung());
    let mut reader = Trainer::start(&stage.dir(), None);
    reader.send(&json!({ "do": "open", "job": job, "offline": true }));
    stage.signal(Signal::CONT);
    assert_eq!(reader.answer().unwrap(), 10);
    reader.tell("corrupt").unwrap();
    launch.wait(10);
    let found = stage.load(job, None).unwrap().unwrap();
    assert_eq!((found.fill.to_string(), found.is_from_memory), (fill, true), "it was not");
    stage.assert_sound();
}

fn hashes_that_are_gone(cluster: &Cluster, job: &str) {
    let mut stage = Stage::start(cluster, "64MiB", &[]);
    let mut launch = Launch::ready(&stage, &Plan::new(job, 1));
    let saved = launch.ranks[0].step("save", 10).unwrap();
    launch.wait(10);
    launch.kill();
    stage.kill();
    let tables: Vec<String> =
        stage.files("steps").into_iter().filter(|name| name.ends_with(".table")).collect();
    std::fs::remove_file(stage.dir().join("steps").join(&tables[0])).unwrap();
    stage.flip(&stage.segment(saved["segment"].as_str().unwrap()), IN_EXTENT);
    stage.restart();
    // If the daemon hashed the bytes now, it would take them for right.
    let found = stage.load(job, None).unwrap().unwrap();
    assert_eq!((found.step, found.is_from_memory), (10, false));
    stage.assert_sound();
}
