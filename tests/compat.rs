//! Compatibility of bytes: every later release reads what an earlier one has written, and no change
//! of bytes is accidental. Golden files hold every record, every message, and the values derived
//! from bytes (hashes, fingerprints, code ids).
//!
//! A failure here means that a format has changed. Such a change is a decision: page, version,
//! fixture and changelog change together.
#![allow(clippy::disallowed_methods)] // reads fixtures

#[path = "compat/fixture.rs"]
mod fixture;
#[path = "compat/messages.rs"]
mod messages;
#[path = "compat/records.rs"]
mod records;
#[path = "compat/repairs.rs"]
mod repairs;
#[path = "compat/staging.rs"]
mod staging;
#[path = "compat/tables.rs"]
mod tables;

use std::collections::BTreeSet;

use fixture::{Case, damage, hold};
use rapidraid::code::{RsCode, table};
use rapidraid::format::records::RingNode;
use rapidraid::format::tree::GrainTree;
use rapidraid::gf::FingerprintKey;
use rapidraid::id::{NodeId, PeerName, ShardId};
use rapidraid::placement::place;
use rapidraid::wire::calls::ALL;

/// Returns data with a prime period, so that no two grains are equal.
fn data(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

#[test]
fn records() {
    let cases = records::cases();
    hold("format/v1/records.txt", &cases);
    let kinds: BTreeSet<u8> = cases.iter().map(|case| case.bytes[4]).collect();
    let source = include_str!("../src/format/envelope.rs").lines();
    let kind = |line: &str| line.trim().strip_suffix(',')?.split_once(" = ")?.1.parse().ok();
    let all: BTreeSet<u8> = source.filter_map(kind).collect();
    assert!(all.len() > 12, "the kinds are not where they were");
    assert_eq!(kinds, all, "every kind of record has a fixture");
}

#[test]
fn a_damaged_record_is_refused() {
    damage(&records::cases(), true);
}

#[test]
fn a_record_that_lies_under_a_right_checksum_does_no_harm() {
    for Case { name, bytes, parse } in records::cases() {
        for at in 0..bytes.len() - 26 {
            for byte in (0..8).map(|bit| bytes[10 + at] ^ 1 << bit).chain([0, 0x7f, 0xff]) {
                let bad = records::resealed(&bytes, at, byte);
                assert_ne!(parse(&bad), Err(rapidraid::kind::ErrorKind::Internal), "{name}: {at}");
                records::use_hostile(&bad);
            }
        }
    }
}

#[test]
fn tables() {
    let cases: Vec<Case> = tables::cases().into_iter().chain(tables::paths()).collect();
    hold("format/v1/tables.txt", &cases);
}

#[test]
fn a_damaged_table_is_refused() {
    damage(&tables::cases(), true);
}

#[test]
fn messages() {
    let cases = messages::calls();
    hold("wire/v1/calls.txt", &cases);
    hold("wire/v1/messages.txt", &messages::others());
    for (number, name, _) in ALL {
        for side in ["request", "answer"] {
            let wanted = format!("{number:02} {name} {side}");
            let found = cases.iter().any(|case| case.name.starts_with(&wanted));
            assert!(found, "no fixture of {wanted}");
        }
    }
}

#[test]
fn a_damaged_message_is_an_error_or_another_message() {
    damage(&messages::calls(), false);
    damage(&messages::others(), false);
}

#[test]
fn messages_of_trainers() {
    let cases = staging::messages();
    hold("wire/v1/staging.txt", &cases);
    for (side, name) in [("request", "Request"), ("answer", "Answer")] {
        let variants = staging::variants(name);
        assert!(variants.len() > 10, "the variants are not where they were: {variants:?}");
        for variant in variants {
            let wanted = format!("{side} {variant}");
            let is_it = |case: &Case| case.name.split(',').next() == Some(&wanted);
            assert!(cases.iter().any(is_it), "no fixture of {wanted}");
        }
    }
}

#[test]
fn a_damaged_message_of_a_trainer_is_an_error_or_another_message() {
    damage(&staging::messages(), false);
}

#[test]
fn segments() {
    let case = staging::segment();
    // These bytes are protected: magic bytes and version, the range that the hash covers, and the
    // hash. The state lies between them. Extents have their own hashes.
    let covered = (0..12).chain(16..128).chain(192..case.bytes.len());
    for at in covered {
        let mut bad = case.bytes.clone();
        bad[at] ^= 1;
        assert!((case.parse)(&bad).is_err(), "byte {at} was believed");
    }
    hold("format/v1/segments.txt", &[case]);
}

/// Receipts and piece files contain a code id for as long as they exist, and the generator of that
/// code decodes them.
#[test]
fn codes() {
    let line = |name: String, id: u64, generator: &rapidraid::gf::Matrix| {
        let mut hasher = blake3::Hasher::new();
        for row in generator.iter() {
            hasher.update(row);
        }
        let bytes = [&id.to_be_bytes()[..], hasher.finalize().as_bytes()].concat();
        Case::computed(name, bytes)
    };
    let chain = |code: &rapidraid::code::ChainCode| {
        line(format!("chain {},{}", code.n(), code.k()), code.id().0, code.generator())
    };
    let mut cases: Vec<Case> = table::all().iter().map(chain).collect();
    for code in table::all() {
        let rs = RsCode::new(code.n(), code.k()).unwrap();
        cases.push(line(format!("rs {},{}", rs.n(), rs.k()), rs.id().0, rs.generator()));
    }
    // All other ids of the classical code, hashed into one line.
    let mut hasher = blake3::Hasher::new();
    for (n, k) in (2..=32).flat_map(|n| (1..n).map(move |k| (n, k))) {
        let rs = RsCode::new(n, k).unwrap();
        hasher.update(&rs.id().0.to_be_bytes());
    }
    cases.push(Case::computed("rs, ids of all n up to 32", *hasher.finalize().as_bytes()));
    hold("format/v1/codes.txt", &cases);
}

/// A replica without a recorded location is read from the place that placement gave it, so
/// placement must not change.
#[test]
fn places() {
    let mut cases = Vec::new();
    for (n, k) in [(16, 11), (6, 4), (12, 6)] {
        for domains in [1, 3, 20] {
            let member = |at: u16| RingNode { node: NodeId(at.into()), domain: at % domains };
            let ring: Vec<RingNode> = (0..20).map(member).collect();
            for stripe in [0, 7, 33] {
                let places = place(&ring, n, k, stripe).unwrap();
                let bytes: Vec<u8> = places.iter().map(|node| node.0 as u8).collect();
                let name = format!("({n},{k}), {domains} domains, stripe {stripe}");
                cases.push(Case::computed(name, bytes));
            }
        }
    }
    hold("format/v1/places.txt", &cases);
}

#[test]
fn hashes_and_fingerprints() {
    let key = FingerprintKey::derive(&std::array::from_fn(|i| i as u8));
    let mut cases = Vec::new();
    for len in [0, 1, 2, 64, 65, 1000, 65_535, 65_536] {
        let found = key.fingerprint(&data(len)).unwrap();
        cases.push(Case::computed(format!("fingerprint of {len} bytes"), found.0));
    }
    cases.push(Case::computed("root of 0 bytes", GrainTree::of(&[]).root()));
    for len in [1, 65_536, 65_537, 3 * 65_536, 5 * 65_536 + 17] {
        let tree = GrainTree::of(&data(len));
        assert_eq!(tree.root(), *blake3::hash(&data(len)).as_bytes());
        cases.push(Case::computed(format!("root of {len} bytes"), tree.root()));
        let hashes = tree.hashes().as_flattened();
        cases.push(Case::computed(format!("grain hashes of {len} bytes"), hashes));
    }
    let name: PeerName = "node-1".parse().unwrap();
    cases.push(Case::computed("node id of node-1", NodeId::of(&name).0.to_be_bytes()));
    cases
        .push(Case::computed("shard id of a save's shard 258", ShardId::new(records::SAVE, 258).0));
    let root = records::root();
    cases.push(Case::computed("stripes root", root.stripes_root));
    hold("format/v1/derived.txt", &cases);
}
