//! Tests that prove the plans of every code symbolically and compare their traffic with the model.

use std::collections::HashSet;

use super::*;
use crate::code::{RsCode, StripePart, reconstruct, table};
use crate::format::records::RingNode;
use crate::id::{PeerName, ShardId};
use crate::placement::place;
use crate::plan::check::{Goal, PlanError, check};
use crate::plan::{Output, Plan};

const BLOCK_BYTES: u64 = 40 * 65_536 + 128;

fn places(n: usize) -> Vec<NodeId> {
    let name = |i| format!("n{i}").parse::<PeerName>().unwrap();
    (0..n).map(|i| NodeId::of(&name(i))).collect()
}

fn subject<'a>(code: &'a Code, places: &'a [NodeId]) -> Subject<'a> {
    let k = code.k() as u8;
    let cut = StripeCut {
        offset_bytes: 0,
        len_bytes: BLOCK_BYTES * u64::from(k) - 777,
        block_bytes: BLOCK_BYTES,
        k,
    };
    let stripe = StripeId { shard: ShardId([1; 16]), index: 0 };
    Subject { stripe, attempt: Attempt([2; 16]), cut, places, code }
}

/// Returns the length of all streams of a plan together, in blocks.
fn transfers(plan: &Plan) -> f64 {
    let bytes: u64 = plan
        .hops
        .iter()
        .map(|hop| {
            let streams = hop.outputs.iter().filter(|out| matches!(out, Output::Stream(_))).count();
            plan.stream_bytes(hop.range()) * streams as u64
        })
        .sum();
    bytes as f64 / BLOCK_BYTES as f64
}

#[test]
fn chains_are_proven_and_move_one_block_in_and_one_out() {
    for code in table::all() {
        let code = Code::Chain(code.clone());
        let places = places(code.n());
        let plan = chain(&subject(&code, &places)).unwrap();
        let checked = check(&plan, &code, Goal::Archive).unwrap();
        assert_eq!(checked.streams.len(), code.n() - 1);
        assert_eq!(transfers(&plan), (code.n() - 1) as f64);
        for (hop, spec) in plan.hops.iter().enumerate() {
            let traffic = plan.traffic(spec.node.unwrap());
            let (first, last) = (hop == 0, hop + 1 == code.n());
            assert_eq!(traffic.in_bytes, if first { 0 } else { BLOCK_BYTES });
            assert_eq!(traffic.out_bytes, if last { 0 } else { BLOCK_BYTES });
        }
    }
}

/// Coder 0 is enough for many stripes at once, because placement rotates the ring.
#[test]
fn sixteen_stripes_load_sixteen_nodes_alike() {
    let node = |node| RingNode { node, domain: 0 };
    let ring: Vec<RingNode> = places(16).into_iter().map(node).collect();
    let code = Code::Rs(RsCode::new(16, 11).unwrap());
    let mut coders = [HashSet::new(), HashSet::new()];
    for stripe in 0..16 {
        let places = place(&ring, 16, 11, stripe).unwrap();
        let subject = subject(&code, &places);
        let plans = [naive_star(&subject, 0).unwrap(), best_star(&subject, 0).unwrap()];
        for (plan, coders) in plans.iter().zip(&mut coders) {
            coders.insert(plan.hops.iter().max_by_key(|hop| hop.inputs.len()).unwrap().node);
        }
    }
    assert_eq!(coders.map(|coders| coders.len()), [16, 16]);
}

#[test]
fn stars_are_proven_and_move_what_their_models_say() {
    for (n, k) in [(4, 2), (6, 4), (8, 4), (9, 6), (14, 10), (16, 11), (16, 12)] {
        let code = Code::Rs(RsCode::new(n, k).unwrap());
        let places = places(n);
        let subject = subject(&code, &places);
        for turn in 0..n {
            let naive = naive_star(&subject, turn).unwrap();
            check(&naive, &code, Goal::Archive).unwrap();
            assert_eq!(transfers(&naive), (n - 1) as f64);
            let best = best_star(&subject, turn).unwrap();
            check(&best, &code, Goal::Archive).unwrap();
            let local = if n - k < k { 2 } else { 1 };
            assert_eq!(transfers(&best), (k - local + n - k - 1) as f64, "({n},{k})");
        }
        let striped = striped_star(&subject).unwrap();
        check(&striped, &code, Goal::Archive).unwrap();
        let moved = transfers(&striped);
        assert!(moved >= (n - 3) as f64 && moved <= n as f64, "({n},{k}): {moved}");
    }
}

#[test]
fn direct_reads_are_proven() {
    let chain_code = Code::Chain(table::find(16, 11).unwrap().clone());
    let rs = Code::Rs(RsCode::new(16, 11).unwrap());
    for code in [chain_code, rs] {
        let places = places(16);
        for available in [(0..11).collect::<Vec<_>>(), (5..16).collect(), (2..15).collect()] {
            for blocks in [vec![0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], vec![3], vec![10, 2]] {
                let wanted: Vec<usize> = blocks.iter().map(|&block: &u8| block.into()).collect();
                let program = reconstruct(&code, &available, &wanted).unwrap();
                let homes: Vec<NodeId> =
                    program.pieces().iter().map(|&piece| places[piece]).collect();
                let plan = direct_read(&subject(&code, &places), &program, &homes, &blocks, (3, 9))
                    .unwrap();
                check(&plan, &code, Goal::Read(&blocks)).unwrap();
            }
        }
    }
}

fn repair_subject<'a>(subject: &Subject<'a>) -> RepairSubject<'a> {
    let Subject { stripe, attempt, cut, code, .. } = *subject;
    RepairSubject { stripe, attempt, cut, code }
}

fn sources(places: &[NodeId], pieces: impl IntoIterator<Item = usize>) -> Vec<RepairSource> {
    let source = |piece| RepairSource { node: places[piece], part: StripePart::Piece(piece) };
    pieces.into_iter().map(source).collect()
}

fn targets(places: &[NodeId], pieces: &[usize]) -> Vec<RepairTarget> {
    pieces.iter().map(|&piece| RepairTarget { node: places[piece], piece }).collect()
}

#[test]
fn repairs_are_proven_and_load_no_link_of_a_chain_with_more_than_the_missing_pieces() {
    let chains = table::all().iter().cloned().map(Code::Chain);
    let rs = [(6, 4), (16, 11)].map(|(n, k)| Code::Rs(RsCode::new(n, k).unwrap()));
    for code in chains.chain(rs) {
        let (n, k, places) = (code.n(), code.k(), places(code.n()));
        let subject = repair_subject(&subject(&code, &places));
        for (lost, first) in (1..=n - k).flat_map(|lost| (0..n).map(move |first| (lost, first))) {
            let missing: Vec<usize> = (0..lost).map(|i| (first + i) % n).collect();
            let mut left = sources(&places, (0..n).filter(|piece| !missing.contains(piece)));
            left.rotate_left(first % (n - lost));
            let targets = targets(&places, &missing);
            let wanted: Vec<u8> = missing.iter().map(|&piece| piece as u8).collect();
            let chain = repair_chain(&subject, &left, &targets).unwrap();
            check(&chain, &code, Goal::Repair(&wanted)).unwrap();
            let most = BLOCK_BYTES * lost as u64;
            for node in &places {
                let traffic = chain.traffic(*node);
                assert!(traffic.in_bytes <= most && traffic.out_bytes <= most);
            }
            let star = repair_star(&subject, &left, &targets).unwrap();
            check(&star, &code, Goal::Repair(&wanted)).unwrap();
            assert!(transfers(&star) <= (k + lost - 1) as f64);
        }
        let missing: Vec<usize> = (0..=n - k).collect();
        let left = sources(&places, missing.len()..n);
        let error = repair_chain(&subject, &left, &targets(&places, &missing)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    }
}

#[test]
fn a_copy_elsewhere_and_replicas_are_sources_too() {
    let code = Code::Chain(table::find(6, 4).unwrap().clone());
    let places = places(7);
    let subject = repair_subject(&subject(&code, &places[..6]));
    let copy = RepairSource { node: places[6], part: StripePart::Piece(2) };
    let plan = repair_chain(&subject, &[copy], &targets(&places, &[2])).unwrap();
    check(&plan, &code, Goal::Repair(&[2])).unwrap();
    assert_eq!(transfers(&plan), 1.0);
    let block = |block: usize| RepairSource { node: places[block], part: StripePart::Block(block) };
    let replicas: Vec<RepairSource> = (0..4).map(block).collect();
    let plan = repair_chain(&subject, &replicas, &targets(&places, &[4, 5])).unwrap();
    check(&plan, &code, Goal::Repair(&[4, 5])).unwrap();
}

#[test]
fn a_repair_with_one_wrong_number_or_another_output_is_refused() {
    let code = Code::Chain(table::find(6, 4).unwrap().clone());
    let places = places(6);
    let subject = repair_subject(&subject(&code, &places));
    let left = sources(&places, [0, 2, 3, 5]);
    let good = repair_chain(&subject, &left, &targets(&places, &[1, 4])).unwrap();
    check(&good, &code, Goal::Repair(&[1, 4])).unwrap();
    let refused = |change: &dyn Fn(&mut Plan), pieces: &[u8]| {
        let mut plan = good.clone();
        change(&mut plan);
        check(&plan, &code, Goal::Repair(pieces)).unwrap_err()
    };
    for hop in 0..good.hops.len() {
        for row in 0..good.hops[hop].matrix.len() {
            for column in 0..good.hops[hop].matrix[row].len() {
                let error = refused(&|plan| plan.hops[hop].matrix[row][column] ^= 1, &[1, 4]);
                assert!(matches!(error, PlanError::Wrong { .. }), "{error}");
            }
        }
    }
    let coverage = |error| assert!(matches!(error, PlanError::Coverage { .. }), "{error}");
    coverage(refused(&|_| (), &[1]));
    let more = refused(&|_| (), &[1, 4, 5]);
    assert_eq!(more, PlanError::Homes { distinct: 2, pieces: 3 });
    coverage(refused(&|plan| plan.kept.push((1, places[1])), &[1, 4]));
    coverage(refused(&|plan| plan.kept.push((5, places[5])), &[1, 4]));
    let crowded = refused(&|plan| plan.hops[4].node = plan.hops[5].node, &[1, 4]);
    assert_eq!(crowded, PlanError::Homes { distinct: 1, pieces: 2 });
}

#[test]
fn a_plan_with_one_wrong_number_is_refused() {
    let code = Code::Chain(table::find(6, 4).unwrap().clone());
    let places = places(6);
    let good = chain(&subject(&code, &places)).unwrap();
    let refused = |change: &dyn Fn(&mut Plan)| {
        let mut plan = good.clone();
        change(&mut plan);
        check(&plan, &code, Goal::Archive).unwrap_err()
    };
    for hop in 0..6 {
        for output in 0..good.hops[hop].outputs.len() {
            for input in 0..good.hops[hop].inputs.len() {
                let error = refused(&|plan| plan.hops[hop].matrix[output][input] ^= 1);
                assert!(matches!(error, PlanError::Wrong { .. }), "{error}");
            }
        }
    }
    assert!(matches!(refused(&|plan| plan.hops[2].grains.1 -= 1), PlanError::Stream { .. }));
    assert!(matches!(refused(&|plan| drop(plan.hops.pop())), PlanError::Stream { .. }));
    assert!(matches!(refused(&|plan| plan.hops[5].outputs.clear()), PlanError::Shape { .. }));
    let twice = refused(&|plan| {
        let store = plan.hops[0].clone();
        plan.hops.push(crate::plan::Hop {
            outputs: vec![Output::Store(0)],
            matrix: vec![store.matrix[0].clone()],
            ..store
        });
    });
    assert!(matches!(twice, PlanError::Coverage { .. }), "{twice}");
    let crowded = refused(&|plan| plan.hops[1].node = plan.hops[0].node);
    assert_eq!(crowded, PlanError::Homes { distinct: 5, pieces: 6 });
    let circle = refused(&|plan| {
        plan.hops[0].inputs.push(crate::plan::Input::Stream(90));
        plan.hops[0].matrix.iter_mut().for_each(|row| row.push(0));
        plan.hops[4].outputs.push(Output::Stream(90));
        let width = plan.hops[4].inputs.len();
        plan.hops[4].matrix.push(vec![0; width]);
    });
    assert_eq!(circle, PlanError::Cycle);
}

#[test]
fn a_star_makes_no_chain_code_and_the_other_way_round() {
    let chain_code = Code::Chain(table::find(6, 4).unwrap().clone());
    let rs = Code::Rs(RsCode::new(6, 4).unwrap());
    let places = places(6);
    assert!(matches!(best_star(&subject(&chain_code, &places), 0), Err(PlannerError::Code { .. })));
    assert!(matches!(chain(&subject(&rs, &places)), Err(PlannerError::Code { .. })));
    assert!(matches!(chain(&subject(&chain_code, &places[..5])), Err(PlannerError::Places { .. })));
}
