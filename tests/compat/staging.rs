//! One value of every message between trainers and their staging daemon, and of a segment. Both are
//! compatible between versions, because the daemon and the Python wheel are upgraded separately.

use rapidraid::format::step_labels::LabelChange;
use rapidraid::format::table::Table;
use rapidraid::id::{FillId, InstanceId, LaunchId, MemberId, SegmentId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::trainer::mapping::{Readable, Writable, reserve};
use rapidraid::trainer::protocol::{
    Answer, Failure, Hosts, JobStatus, Load, LoadSource, Loadable, Notice, Part, Pending, Place,
    Prepare, Request, Resumed, Sample, StagingHello, StagingHelloAnswer, Status, StepInfo,
    StepStatus, parse, to_bytes,
};
use rapidraid::trainer::segment::{HEADER_BYTES, Header, read_staged, stage};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::fixture::Case;
use crate::records::{CLUSTER, SAVE};
use crate::tables;

const LAUNCH: LaunchId = LaunchId([0x1a; 16]);
const FILL: FillId = FillId([0xf1; 16]);
const SEGMENT: SegmentId = SegmentId([0x5e; 16]);
const INSTANCE: InstanceId = InstanceId([0x15; 16]);
const STEP: Step = Step(1200);

fn case<T>(name: &str, message: T) -> Case
where
    T: Serialize + DeserializeOwned + PartialEq + 'static,
{
    let bytes = to_bytes(&message).unwrap();
    let read = move |bytes: &[u8]| match parse::<T>(bytes) {
        Ok(found) => Ok(found == message),
        Err(_) => Err(ErrorKind::Invalid),
    };
    Case { name: name.to_owned(), bytes, parse: Box::new(read) }
}

fn place() -> Place {
    Place { job: "gpt".parse().unwrap(), launch: LAUNCH, world: 8, rank: 3 }
}

fn requests() -> Vec<(&'static str, Request)> {
    let job = || place().job;
    let resumed =
        Resumed { loaded: Some(Step(1100)), newest_seen: Some(STEP), abandon_later: true };
    let prepare = Prepare {
        place: place(),
        segment_bytes: 1 << 30,
        launch_bytes: 8 << 30,
        born_ns: 1 << 50,
        resumed,
        keep: 3,
        limit_ms: 2_000,
    };
    let samples = vec![Sample { name: "model/embed.weight".into(), hash: [0x5a; 16] }];
    let load = Load {
        job: job(),
        launch: Some((LAUNCH, 1)),
        step: Some(STEP),
        offline: true,
        table_first: false,
        limit_ms: 2_000,
    };
    let alone =
        Load { launch: None, step: None, offline: false, table_first: true, ..load.clone() };
    let hosts = Hosts { own: 1, names: vec!["host-a".into(), "host-b".into()] };
    let label = |change| {
        let (job, label) = (job(), "trusted".parse().unwrap());
        Request::LabelStep { job, step: STEP, label, change }
    };
    let (ticket, name) = (300, "model/embed.weight".to_owned());
    vec![
        ("PrepareOnHost", Request::PrepareOnHost(prepare.clone(), hosts)),
        ("Prepare", Request::Prepare(prepare)),
        ("Attach", Request::Attach(place())),
        ("Fill", Request::Fill { step: STEP, or_skip: false, limit_ms: 2_000 }),
        ("Staged", Request::Staged { step: STEP, segment: SEGMENT, fill: FILL, samples }),
        ("GiveUp", Request::GiveUp { step: STEP, fill: FILL, why: "Ctrl-C".into() }),
        ("Wait", Request::Wait { step: STEP, limit_ms: 2_000 }),
        ("Notices", Request::Notices),
        ("Load", Request::Load(load.clone())),
        ("LoadFromCluster", Request::LoadFromCluster(load.clone())),
        ("Load, of nobody's launch", Request::Load(alone)),
        ("Open", Request::Open { ticket, first: 64 }),
        ("Verified", Request::Verified { ticket, extents: vec![0, 1, 300] }),
        ("Corrupt", Request::Corrupt { ticket, name }),
        ("Release", Request::Release { ticket }),
        ("Steps", Request::Steps { job: job() }),
        ("LabelStep", label(LabelChange::Add)),
        ("LabelStep, remove", label(LabelChange::Remove)),
        ("ListLabels", Request::ListLabels { job: job() }),
        ("NotMade", Request::NotMade { segment: SEGMENT, why: "no room".into() }),
        ("Remove", Request::Remove { job: job(), step: STEP }),
        ("Status", Request::Status),
        ("Free", Request::Free { job: job(), with_unsaved: true }),
        ("Leave", Request::Leave),
        ("ReadExtents", Request::ReadExtents { ticket, extents: vec![0, 1, 300], limit_ms: 2_000 }),
    ]
}

fn status() -> Status {
    let step =
        StepStatus { step: STEP, state: "saving".into(), len_bytes: 8 << 30, staged: 8, world: 8 };
    let job = JobStatus {
        job: place().job,
        launch: Some(LAUNCH),
        members: 8,
        segment_bytes: 16 << 30,
        steps: vec![step],
    };
    Status { instance: INSTANCE, memory_bytes: 64 << 30, used_bytes: 16 << 30, jobs: vec![job] }
}

fn part(fill: Option<FillId>) -> Part {
    Part {
        shard: 1,
        shard_offset: 1 << 20,
        file_offset: HEADER_BYTES,
        len_bytes: 1 << 29,
        file_bytes: 1 << 30,
        fill,
    }
}

fn answers() -> Vec<(&'static str, Answer)> {
    let failure = Failure::new(ErrorKind::Fenced, "launch is over", "end this process");
    let loadable = |source, verified| Loadable {
        ticket: 300,
        step: STEP,
        table_bytes: 70_000,
        parts: 8,
        source,
        verified,
        newest_committed: Some(STEP),
        world: 8,
        why_by_ranges: String::new(),
    };
    let by_ranges =
        Loadable { why_by_ranges: "no room".into(), ..loadable(LoadSource::Ranges, Vec::new()) };
    let pending =
        Pending { what: "step 1200 is being saved".into(), done_bytes: 1, total_bytes: 300 };
    let notices = vec![
        Notice { step: STEP, failure: Some(failure.clone()), warning: String::new() },
        Notice { step: STEP, failure: None, warning: "copies differ".into() },
    ];
    let info = StepInfo { step: STEP, is_committed: true, is_in_memory: true, len_bytes: 8 << 30 };
    vec![
        ("Done", Answer::Done),
        ("Failed", Answer::Failed(failure)),
        ("Prepared", Answer::Prepared { segments: vec![SEGMENT, SegmentId([0x5f; 16])] }),
        ("Attached", Answer::Attached { segments: vec![SEGMENT] }),
        ("Fill", Answer::Fill { segment: SEGMENT, fill: FILL }),
        ("Pending", Answer::Pending(pending)),
        ("Committed", Answer::Committed { save: SAVE, notes: vec!["began anew".into()] }),
        ("Notices", Answer::Notices(notices)),
        ("Loadable", Answer::Loadable(loadable(LoadSource::Memory, vec![0xff, 0x01]))),
        ("Loadable, cluster", Answer::Loadable(loadable(LoadSource::Cluster, Vec::new()))),
        ("Loadable, by ranges", Answer::Loadable(by_ranges)),
        ("Nothing", Answer::Nothing),
        ("Parts", Answer::Parts { parts: vec![part(Some(FILL)), part(None)] }),
        ("Steps", Answer::Steps(vec![info])),
        ("Status", Answer::Status(status())),
        ("Freed", Answer::Freed { bytes: 16 << 30 }),
        ("Skipped", Answer::Skipped { what: "all segments are in use".into() }),
        ("Labels", Answer::Labels(vec![(STEP, vec!["trusted".parse().unwrap()])])),
    ]
}

/// Returns the cases of all messages.
pub fn messages() -> Vec<Case> {
    let (member, token) = (MemberId([0x3e; 16]), b"token".to_vec());
    let hello = StagingHello { oldest: 1, newest: 1, member, pid: 4_000_000, token };
    let greeted = StagingHelloAnswer {
        version: 1,
        instance: INSTANCE,
        cluster: CLUSTER,
        pid: 4_000_001,
        refused: String::new(),
    };
    let refused =
        StagingHelloAnswer { version: 0, refused: "the token is wrong".into(), ..greeted.clone() };
    let mut cases = vec![
        case("hello", hello),
        case("hello answer", greeted),
        case("hello answer, refused", refused),
    ];
    let request = |(name, request)| case(&format!("request {name}"), request);
    cases.extend(requests().into_iter().map(request));
    let answer = |(name, answer)| case(&format!("answer {name}"), answer);
    cases.extend(answers().into_iter().map(answer));
    cases
}

/// Returns the names of an enumeration's variants, read from the source.
pub fn variants(name: &str) -> Vec<String> {
    let source = include_str!("../../src/trainer/protocol.rs");
    let (_, rest) = source.split_once(&format!("pub enum {name} {{\n")).unwrap();
    let body = rest.split_once("\n}\n").unwrap().0.lines();
    // Fields of variants are indented further.
    let variant = |line: &str| {
        let rest = line.strip_prefix("    ")?;
        let is_it = rest.starts_with(|first: char| first.is_ascii_uppercase());
        is_it.then(|| rest.split(['(', ',', ' ']).next().unwrap().to_owned())
    };
    body.filter_map(variant).collect()
}

fn header(table_offset: u64, table_bytes: u64) -> Header {
    Header {
        segment: SEGMENT,
        launch: LAUNCH,
        world: 8,
        rank: 3,
        step: STEP,
        fill: FILL,
        table_offset,
        table_bytes,
    }
}

/// Returns the case of a staged segment without the zeros at the end of its header: 128 bytes of
/// header, then extents and table.
pub fn segment() -> Case {
    let table = tables::one_extent();
    let bytes = table.to_bytes().unwrap();
    let header =
        header(HEADER_BYTES + table.data_end_bytes(0).next_multiple_of(64), bytes.len() as u64);
    let len_bytes = header.table_offset + header.table_bytes;
    let file = tempfile::tempfile().unwrap();
    reserve(&file, len_bytes, || Ok(())).unwrap();
    let map = Writable::map(&file, len_bytes, || Ok(())).unwrap();
    map.write(HEADER_BYTES as usize, b"what is saved").unwrap();
    stage(&map, header, &bytes).unwrap();
    let mut all = vec![0; len_bytes as usize];
    Readable::map(&file, len_bytes).unwrap().copy_to(0, &mut all).unwrap();
    let shown = [&all[..128], &all[HEADER_BYTES as usize..]].concat();
    let read = move |bytes: &[u8]| read_segment(bytes, &header, &table);
    Case { name: "segment".into(), bytes: shown, parse: Box::new(read) }
}

fn read_segment(bytes: &[u8], header: &Header, table: &Table) -> Result<bool, ErrorKind> {
    let (head, rest) = bytes.split_at_checked(128).ok_or(ErrorKind::Invalid)?;
    let all = [head, &vec![0; HEADER_BYTES as usize - 128], rest].concat();
    let file = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &all, 0).unwrap();
    let map = Readable::map(&file, all.len() as u64).map_err(|_| ErrorKind::Io)?;
    let (found, found_table) = read_staged(SEGMENT, &map).map_err(|error| error.kind())?;
    Ok(found == *header && found_table == *table)
}
