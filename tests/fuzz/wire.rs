//! Targets for messages: requests and answers of every call, other frames, and the verdicts of a
//! catalogue rebuild about the inventories that nodes report.

use rapidraid::catalogue::save_evidence::SaveEvidence;
use rapidraid::id::{ClusterId, Epoch, Generation, NodeId};
use rapidraid::wire::calls::*;
use rapidraid::wire::{
    Call, RemoteError, StreamHeader, answer_to_bytes, message_to_bytes, parse_answer,
    parse_message, parse_request, request_to_bytes, split_request,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::fixtures;
use crate::records::{body_of, sealed};
use crate::target::{Memory, Seen, Target, Verdict, round_trip, seen, within};

/// Memory of a parsed message. A list is allocated at the length that it claims, but for no more
/// elements than bytes follow, and up to 1 MiB; the largest element has about 500 bytes. A list
/// that grows exists twice for a moment.
pub const MESSAGE: Memory = Memory { base_bytes: 16 << 10, per_byte: 600 };

/// Maximum length in characters of a failure's text when it is written; a longer one is read whole.
const MAX_FAILURE_CHARS: usize = 4096;

fn request<C: Call + PartialEq + std::fmt::Debug>(frame: &[u8]) -> Verdict {
    let parse = |frame: &[u8]| split_request(frame).and_then(|(_, body)| parse_request::<C>(body));
    round_trip(MESSAGE, frame, parse, request_to_bytes).map(seen)
}

fn answer<C: Call>(frame: &[u8]) -> Verdict
where
    C::Answer: PartialEq + std::fmt::Debug,
{
    let parse = |frame: &[u8]| {
        let mut answer = parse_answer::<C::Answer>(frame)?;
        if let Err(RemoteError { message, .. }) = &mut answer {
            *message = message.chars().take(MAX_FAILURE_CHARS).collect();
        }
        Ok::<_, rapidraid::wire::WireError>(answer)
    };
    round_trip(MESSAGE, frame, parse, answer_to_bytes).map(seen)
}

fn message<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(frame: &[u8]) -> Verdict {
    let parse = |frame: &[u8]| parse_message::<T>(frame, "a message");
    round_trip(MESSAGE, frame, parse, |value| message_to_bytes(value, "a message")).map(seen)
}

type Laws = (u8, fn(&[u8]) -> Verdict, fn(&[u8]) -> Verdict);

macro_rules! laws {
    ($($name:ident),* $(,)?) => { &[$(($name::NUMBER, request::<$name>, answer::<$name>)),*] };
}

/// Every call, by its number.
const CALLS: &[Laws] = laws![
    Hello,
    BeginSave,
    RenewLease,
    CompleteShard,
    CommitSave,
    AbortSave,
    ArchiveStep,
    RemoveStep,
    ListSteps,
    ShowStep,
    GetShardState,
    ListNodes,
    GetNodeStatus,
    RebuildCatalogue,
    GetPolicyStatus,
    RemoveNode,
    MoveCatalogue,
    JoinSave,
    ListCompletedShards,
    ListOpenSaves,
    RegisterLaunch,
    BeginLaunchSave,
    ListLaunches,
    RemoveLaunchStep,
    LabelStep,
    ListLabels,
    RepairStep,
    GetRepairStatus,
    PutBlock,
    PutRecord,
    GetRecord,
    ListFiles,
    ReadFile,
    VerifyFile,
    FindRemovedSaves,
    ListMembers,
    ListSources,
    ReadSource,
    ExamineStripe,
    RegisterNode,
    GetKey,
    CompareAndSetKey,
    ListKeys,
    GrantLease,
    TouchLease,
    RevokeLease,
    CompareAndSetKeyGuarded,
    ReservePart,
    RunPart,
    ReleasePart,
    PutMark,
    PutReceipt,
    PutTombstone,
    DropReplicas,
    CopyReplica,
    PurgeSave,
    ClaimEpoch,
    ListInventory,
    ListMarkedSaves,
    PauseWrites,
    TransferCatalogue,
    GetStanding,
    ListRemovedSaves,
    CatchUp,
    ListDamagedMarks,
    PutLeaves,
    SurveyShard,
    ListRingChanges,
    ReplaceNode,
    SetMaintenance,
    SetRetention,
    PutPlaces,
];

fn laws_of(number: u8) -> Option<&'static Laws> {
    CALLS.iter().find(|(of, ..)| *of == number)
}

/// Returns the golden requests or answers of calls; each answer is preceded by the number of its
/// call.
fn golden(side: &str) -> Vec<Vec<u8>> {
    let of = |(name, bytes): (String, Vec<u8>)| {
        let number: u8 = name.split(' ').next().unwrap().parse().unwrap();
        let has_side = name.split([' ', ',']).nth(2) == Some(side);
        let head = if side == "answer" { vec![number] } else { Vec::new() };
        has_side.then(|| [head, bytes].concat())
    };
    fixtures::lines("wire/v1/calls.txt").into_iter().filter_map(of).collect()
}

pub fn requests() -> Target {
    let check = |frame: &[u8]| match frame.first().and_then(|number| laws_of(*number)) {
        Some((_, request, _)) => request(frame),
        None => Ok(Seen::default()),
    };
    Target {
        name: "requests",
        cases: 200_000,
        corpus: golden("request"),
        words: Vec::new(),
        check: Box::new(check),
    }
}

pub fn answers() -> Target {
    let mut corpus = golden("answer");
    let failures = fixtures::lines("wire/v1/messages.txt").into_iter();
    let failures = failures.filter(|(name, _)| name.starts_with("failure"));
    corpus.extend(failures.map(|(_, bytes)| [vec![RenewLease::NUMBER], bytes].concat()));
    let check = |bytes: &[u8]| match bytes.split_first() {
        Some((number, frame)) => {
            laws_of(*number).map_or(Ok(Seen::default()), |(_, _, answer)| answer(frame))
        }
        None => Ok(Seen::default()),
    };
    Target { name: "answers", cases: 200_000, corpus, words: Vec::new(), check: Box::new(check) }
}

/// Fuzzes messages. The first byte selects the kind of the message.
pub fn messages() -> Target {
    let kinds = ["stream header", "block admitted", "block trailer"];
    let of = |(name, bytes): (String, Vec<u8>)| {
        let kind = kinds.iter().position(|kind| name.starts_with(kind))?;
        Some([vec![kind as u8], bytes].concat())
    };
    let corpus = fixtures::lines("wire/v1/messages.txt").into_iter().filter_map(of).collect();
    let check = |bytes: &[u8]| match bytes.split_first() {
        Some((0, frame)) => message::<StreamHeader>(frame),
        Some((1, frame)) => message::<BlockAdmitted>(frame),
        Some((2, frame)) => message::<BlockTrailer>(frame),
        _ => Ok(Seen::default()),
    };
    Target { name: "messages", cases: 100_000, corpus, words: Vec::new(), check: Box::new(check) }
}

fn judge(page: InventoryPage) {
    let Some(save) = page.shards.first().map(|held| held.shard.save()) else { return };
    let mut evidence = SaveEvidence::default();
    for held in &page.shards {
        evidence.add_holdings(ClusterId([0xc1; 16]), NodeId(1), held);
    }
    evidence.judge(save, Generation { epoch: Epoch(4), counter: 1 });
}

/// Fuzzes the evidence for a catalogue rebuild. The first byte selects the rest of the input: `0`
/// is a page of a node's inventory; any other value is the kind of a record in such a page, and its
/// body follows.
pub fn evidence() -> Target {
    let golden =
        golden("answer").into_iter().find(|bytes| bytes[0] == ListInventory::NUMBER).unwrap();
    let golden = parse_answer::<InventoryPage>(&golden[1..]).unwrap().unwrap();
    let mut full = golden.clone();
    let mut corpus = Vec::new();
    for (name, bytes) in fixtures::lines("format/v1/records.txt") {
        for held in &mut full.shards {
            match name.as_str() {
                "commit mark" => held.mark = Some(bytes.clone()),
                "tombstone" => held.tombstone = Some(bytes.clone()),
                _ => continue,
            }
            corpus.push([&bytes[4..5], body_of(&bytes)].concat());
        }
    }
    for page in [golden.clone(), full] {
        corpus.push([vec![0], answer_to_bytes(&Ok(page)).unwrap()].concat());
    }
    // A verdict names each damaged stripe of a shard; a shard has at most 100,000.
    let memory = Memory { base_bytes: 2 << 20, ..MESSAGE };
    let check = move |bytes: &[u8]| {
        let Some((kind, body)) = bytes.split_first() else { return Ok(Seen::default()) };
        let judged = within(memory, bytes.len(), || {
            let mut page = golden.clone();
            for held in &mut page.shards {
                match kind {
                    5 => held.mark = Some(sealed(*kind, body)),
                    7 => held.tombstone = Some(sealed(*kind, body)),
                    _ => {}
                }
            }
            match parse_answer::<InventoryPage>(body) {
                Ok(Ok(found)) if *kind == 0 => page = found,
                _ if *kind == 0 => return false,
                _ => {}
            }
            judge(page);
            true
        });
        judged.map(|(accepted, peak_bytes)| Seen { accepted, peak_bytes })
    };
    Target { name: "evidence", cases: 80_000, corpus, words: Vec::new(), check: Box::new(check) }
}

#[test]
fn every_call_is_fuzzed() {
    let fuzzed: Vec<u8> = CALLS.iter().map(|(number, ..)| *number).collect();
    let all: Vec<u8> = ALL.iter().map(|(number, ..)| *number).collect();
    assert_eq!(fuzzed, all);
}
