//! Targets for text that people and certificates write: names and ids, words of the command line,
//! code reports, configurations.

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::path::{Component, Path};
use std::str::FromStr;

use rapidraid::catalogue::record_access::{
    archive_request_key, checkpoint_key, parse_archive_request_key, parse_checkpoint_key,
};
use rapidraid::cli::words::{AnyStep, ByteRange, ExactStep, NewNode, Setting, Shape};
use rapidraid::code::{Code, CodeId, show, table};
use rapidraid::config::{ClientConfig, HostPort, NodeConfig, Sources};
use rapidraid::format::file::FileName;
use rapidraid::format::table::Path as NamePath;
use rapidraid::id::{
    Attempt, ClusterId, DbId, Job, LeaseId, PeerName, SaveId, ShardId, ShardName, Step, StepRef,
};
use rapidraid::units::{ByteCount, GRAIN_BYTES, MAX_BLOCK_BYTES, MIB};

use crate::target::{Memory, Seen, Target, Verdict, round_trip, seen, within};

/// Memory of a name: names are bounded, and an error quotes 128 characters at most.
const NAME: Memory = Memory { base_bytes: 8 << 10, per_byte: 8 };

/// Checks a name with a single spelling: it prints as it was typed.
fn name<T: FromStr + Display + PartialEq + Debug>(text: &[u8]) -> Verdict {
    let found = number::<T>(text)?;
    let text = std::str::from_utf8(text).unwrap_or_default();
    match text.parse::<T>() {
        Ok(value) if value.to_string() != text => Err(format!("{text:?} is printed as {value}")),
        _ => Ok(found),
    }
}

/// Checks a name that may be typed with leading zeros.
fn number<T: FromStr + Display + PartialEq + Debug>(text: &[u8]) -> Verdict {
    let parse = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => text.parse::<T>().map_err(|_| ()),
        Err(_) => Err(()),
    };
    let write = |value: &T| Ok::<_, ()>(value.to_string().into_bytes());
    round_trip(NAME, text, parse, write).map(seen)
}

/// Checks a word that may print in another way than it was typed.
fn word<T: FromStr>(text: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(text) else { return Ok(Seen::default()) };
    let (value, peak_bytes) = within(NAME, text.len(), || text.parse::<T>())?;
    Ok(Seen { accepted: value.is_ok(), peak_bytes })
}

fn shard_name(text: &[u8]) -> Verdict {
    let found = name::<ShardName>(text)?;
    let path = std::str::from_utf8(text).unwrap_or_default();
    let is_inside = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    if found.accepted && !is_inside {
        return Err(format!("{path:?} leads out of its folder"));
    }
    Ok(found)
}

fn keys(text: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(text) else { return Ok(Seen::default()) };
    let of = |parsed: Option<(Job, Step)>, key: fn(StepRef<'_>) -> String, parse: fn(&str) -> _| {
        let Some((job, step)) = parsed else { return Ok(false) };
        let again: Option<(Job, Step)> = parse(&key(job.at(step)));
        if again == Some((job, step)) { Ok(true) } else { Err(format!("{text:?}: {again:?}")) }
    };
    let checkpoint = of(parse_checkpoint_key(text), checkpoint_key, parse_checkpoint_key)?;
    let archiving =
        of(parse_archive_request_key(text), archive_request_key, parse_archive_request_key)?;
    Ok(Seen { accepted: checkpoint || archiving, peak_bytes: 0 })
}

type Law = (fn(&[u8]) -> Verdict, &'static [&'static str]);

/// Each kind of name, with examples.
const NAMES: &[Law] = &[
    (name::<Job>, &["gpt-2_small.v1", "a"]),
    (name::<PeerName>, &["node-1", "n.example_org"]),
    (shard_name, &["model/rank 7.bin", "..a/b", "ü"]),
    (number::<Step>, &["0", "18446744073709551615", "007"]),
    (name::<ClusterId>, &["c1c1c1c1c1c1c1c1c1c1c1c1c1c1c1c1"]),
    (name::<DbId>, &["3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c"]),
    (name::<ShardId>, &["5a5a5a5a5a5a5a5a5a5a5a5a00000001"]),
    (name::<SaveId>, &["5a5a5a5a5a5a5a5a5a5a5a5a"]),
    (name::<Attempt>, &["a7a7a7a7a7a7a7a7a7a7a7a7a7a7a7a7"]),
    (name::<LeaseId>, &["1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e1e"]),
    (name::<CodeId>, &["0102030405060708"]),
    (name::<FileName>, &["block-03.rep", "piece-07-a7a7a7a7a7a7a7a7a7a7a7a7a7a7a7a7.pc"]),
    (name::<HostPort>, &["node-1:7440", "[::1]:7440", "10.0.0.1:1"]),
    (number::<ExactStep>, &["gpt/1200"]),
    (word::<AnyStep>, &["gpt/1200", "gpt/latest"]),
    (word::<ByteCount>, &["262144", "64KiB", "1 GB"]),
    (word::<ByteRange>, &["0..4096", "1MiB..2MiB"]),
    (word::<Shape>, &["16,11", "16, 11"]),
    (word::<NewNode>, &["n1=[::1]:7440,north/r7", "n1=h:1"]),
    (word::<Setting>, &["memory=512MiB"]),
    (
        name::<NamePath>,
        &[
            "model/layers.0.weight",
            "optim/state{-7}/exp_avg",
            "data/files[3]",
            "\"a/b\"/\"\"/\"\\u0000\\n\"",
        ],
    ),
    (keys, &["c/gpt/00000000000000001000", "a/gpt/00000000000000001000"]),
];

/// Fuzzes names. The first byte selects the kind of the name that follows.
pub fn names() -> Target {
    let of = |(kind, (_, texts)): (u8, &Law)| {
        texts.iter().map(move |text| [&[kind], text.as_bytes()].concat()).collect::<Vec<_>>()
    };
    let corpus = (0u8..).zip(NAMES).flat_map(of).collect();
    let words: [&[u8]; 20] = [
        b"\"",
        b"\\u00",
        b"{",
        b"}",
        b"/",
        b"..",
        b".",
        b"=",
        b":",
        b",",
        b"-",
        b"+",
        b"\0",
        b"latest",
        b"0",
        b"[",
        b"]",
        b"KiB",
        "\u{fc}".as_bytes(),
        b" ",
    ];
    let check = |bytes: &[u8]| match bytes.split_first() {
        Some((kind, text)) => {
            NAMES.get(usize::from(*kind)).map_or(Ok(Seen::default()), |(law, _)| law(text))
        }
        None => Ok(Seen::default()),
    };
    Target { name: "names", cases: 300_000, corpus, words: words.to_vec(), check: Box::new(check) }
}

/// Fuzzes code reports: every code that is read from a report can be reported again.
pub fn code_reports() -> Target {
    let report = |n, k| {
        let code = table::all().iter().find(|code| (code.n(), code.k()) == (n, k)).unwrap();
        let report = show::CodeReport::of(&Code::Chain(code.clone())).unwrap();
        serde_json::to_value(&report).unwrap()
    };
    // A report with only the fields that define the code, without the properties that it claims.
    let mut short = report(6, 4);
    let needed = ["schema", "n", "k", "field", "polynomial", "order", "psi", "xi"];
    short.as_object_mut().unwrap().retain(|name, _| needed.contains(&name.as_str()));
    let corpus = [report(6, 4), report(16, 11), short].map(|report| report.to_string().into());
    let corpus = corpus.to_vec();
    let words: [&[u8]; 12] = [
        b"\"n\":",
        b"\"k\":",
        b"\"order\":",
        b"\"psi\":",
        b"\"xi\":",
        b"[",
        b"]",
        b",",
        b"0",
        b"-1",
        b"18446744073709551615",
        b"1e999",
    ];
    let memory = Memory { base_bytes: 256 << 10, per_byte: 120 };
    let check = move |bytes: &[u8]| {
        let Ok(text) = std::str::from_utf8(bytes) else { return Ok(Seen::default()) };
        let (code, peak_bytes) = within(memory, text.len(), || show::parse(text))?;
        let Ok(code) = code else { return Ok(Seen::default()) };
        if code.k() == 0 || code.n() <= code.k() || code.generator().iter().count() != code.n() {
            return Err(format!("({},{}) is no code", code.n(), code.k()));
        }
        Ok(Seen { accepted: true, peak_bytes })
    };
    Target {
        name: "code_reports",
        cases: 40_000,
        corpus,
        words: words.to_vec(),
        check: Box::new(check),
    }
}

const MEMBER: &str = r#"cluster = "c1c1c1c1c1c1c1c1c1c1c1c1c1c1c1c1"
name = "node-1"
certificate = "tls/certificate.pem"
seeds = ["node-1:7440", "[::1]:7440"]
"#;

const NODE: &str = r#"listen = "0.0.0.0:7440"
advertise = "node-1:7440"
zone = "north"
data_dir = "/data"
storage = true
memory = "256MiB"
[log]
level = "info"
format = "json"
[catalogue]
serve = true
[code]
list = ["16,11", "6,4"]
block = "64MiB"
[timeouts]
lease_s = 10
[disk]
high_water = 85
[policy]
archive_all_but = 2
keep_newest = 5
keep_every = 1000
[policy.job."gpt"]
keep_newest = 3
"#;

fn node_is_in_range(node: &NodeConfig) -> bool {
    node.memory_bytes >= 64 * MIB
        && node.block_bytes.is_multiple_of(GRAIN_BYTES)
        && (GRAIN_BYTES..=MAX_BLOCK_BYTES).contains(&node.block_bytes)
        && (1..=99).contains(&node.high_water_percent)
        && (1..=86_400).contains(&node.timeouts.lease.as_secs())
        && (1..=8).contains(&node.codes.len())
        && node.codes.iter().all(|code| code.k < code.n && code.n <= 32 && code.n <= 2 * code.k)
        && node.membership.seeds.len() <= 64
}

/// Fuzzes configurations. The input is a file, then, each after a NUL, one option and one
/// environment variable, as `NAME=VALUE`.
pub fn configurations() -> Target {
    let node = |over: &str| format!("{MEMBER}{NODE}\0{over}").into_bytes();
    let corpus = vec![
        node(""),
        node("code.block=128KiB"),
        node("\0RAPIDRAID_LOG_LEVEL=debug"),
        node("code.list=12,8 6,4\0RAPIDRAID_MEMORY=1GiB"),
        MEMBER.as_bytes().to_vec(),
    ];
    let words: [&[u8]; 18] = [
        b"\n",
        b"[",
        b"]",
        b"[policy.job.",
        b"\"",
        b"'''",
        b" = ",
        b".",
        b"true",
        b"-1",
        b"0x7f",
        b"1e9",
        b"1979-05-27",
        b"{",
        b"}",
        b"code.list",
        b"18446744073709551616",
        b"\\u0000",
    ];
    // Memory of a document as the parser keeps it, and of a value's text in an error.
    let memory = Memory { base_bytes: 256 << 10, per_byte: 400 };
    let check = move |bytes: &[u8]| {
        let Ok(text) = std::str::from_utf8(bytes) else { return Ok(Seen::default()) };
        let mut parts = text.splitn(3, '\0');
        let text = parts.next().unwrap_or_default();
        let mut pair = || {
            let (name, value) = parts.next()?.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        let options: BTreeMap<String, String> = pair().into_iter().collect();
        let env: BTreeMap<String, String> = pair().into_iter().collect();
        let file = Path::new("/etc/rapidraid/rapidraid.toml");
        let sources = Sources { file, text, env: &env, options: &options };
        let ((node, client), peak_bytes) = within(memory, bytes.len(), || {
            (NodeConfig::parse(sources), ClientConfig::parse(sources))
        })?;
        if let Ok(node) = &node
            && !node_is_in_range(node)
        {
            return Err(format!("out of range: {node:?}"));
        }
        let said = [node.as_ref().err(), client.as_ref().err()].into_iter().flatten();
        if let Some(error) = said.map(ToString::to_string).find(|text| text.len() > 4096) {
            return Err(format!("an error of {} bytes", error.len()));
        }
        Ok(Seen { accepted: node.is_ok() || client.is_ok(), peak_bytes })
    };
    Target {
        name: "configurations",
        cases: 20_000,
        corpus,
        words: words.to_vec(),
        check: Box::new(check),
    }
}
