//! The theoretical duration of an archiving in block times. A block time is the time in which one
//! block's bytes cross one shaped link.
//!
//! The transfers of the plans are those of the paper, sections III and V-A. The chain makes n-1
//! transfers; each node receives one block and sends one. The naive star transfers k blocks to a
//! coder, which sends n-k-1 pieces. The best star omits the blocks that its coder has: two, or one
//! when n = 2k, because then no node has two.

use serde::Serialize;

use crate::arm::Arm;
use crate::conditions::Conditions;

/// QUIC overhead of a datagram of 8,952 bytes: the short header with our connection ids and packet
/// numbers (RFC 9000, 17.3), the stream frame's header (19.8) and the AEAD's tag (RFC 9001, 5.3).
const QUIC_BYTES: f64 = 1.0 + 8.0 + 2.0 + 12.0 + 16.0;
/// Headers of UDP, IPv4 and Ethernet, as `tbf` counts them.
const BELOW_BYTES: f64 = 8.0 + 20.0 + 14.0;
const DATAGRAM_BYTES: f64 = 8952.0;

/// Returns the share of payload in the bytes that a link carries.
pub fn payload_share() -> f64 {
    (DATAGRAM_BYTES - QUIC_BYTES) / (DATAGRAM_BYTES + BELOW_BYTES)
}

/// Returns the seconds that a block takes over a link of `rate_mbit`.
pub fn block_time_s(block_bytes: u64, rate_mbit: u32) -> f64 {
    block_bytes as f64 * 8.0 / (f64::from(rate_mbit) * 1e6 * payload_share())
}

/// The transfers and the duration of an arm according to the model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// Number of block transfers in all.
    pub transfers: u64,
    /// Duration in block times, if coders are balanced over the nodes.
    pub block_times: f64,
}

/// Returns the model of an arm, or `None` if it has none, for example because the links differ.
pub fn cost(arm: Arm, at: &Conditions) -> Option<Cost> {
    if at.stream.is_some() || at.slow_nodes > 0 || at.relayed.is_some() {
        return None;
    }
    let (n, k) = (u64::from(at.n), u64::from(at.k));
    let spare = n - k;
    let local = if n < 2 * k { 2 } else { 1 };
    let chunks = at.block_bytes.div_ceil(rapidraid::units::GRAIN_BYTES) as f64;
    // Transfers of one stripe, and how many of them its busiest direction of a link carries.
    let (transfers, busiest) = match arm {
        Arm::Chain => (n - 1, (chunks + n as f64 - 2.0) / chunks),
        Arm::NaiveStar => (k + spare - 1, k as f64),
        Arm::BestStar => (k - local + spare - 1, (k - local).max(spare - 1) as f64),
        // With several shards, the load of the busiest coder is random.
        Arm::RandomStar if at.shards == 1 => (k + spare - 1, k as f64),
        Arm::LineQuic => {
            let shards = u64::from(at.shards);
            return Some(Cost { transfers: (n - 1) * shards, block_times: shards as f64 });
        }
        Arm::LinkQuic | Arm::LinkQuicWide | Arm::LinkQuicBbr => {
            let blocks = k * u64::from(at.shards);
            return Some(Cost { transfers: blocks, block_times: blocks as f64 });
        }
        _ => return None,
    };
    let transfers = transfers * u64::from(at.shards);
    let spread = transfers as f64 / f64::from(at.nodes);
    Some(Cost { transfers, block_times: busiest.max(spread) })
}

#[cfg(test)]
mod tests {
    use rapidraid::code::{Code, RsCode};
    use rapidraid::format::geometry::StripeCut;
    use rapidraid::id::{Attempt, NodeId, PeerName, ShardId, StripeId};
    use rapidraid::planner::{Subject, best_star};

    use super::*;
    use crate::conditions::Relayed;

    fn at(shards: u32, block_bytes: u64) -> Conditions {
        Conditions {
            label: String::new(),
            rounds: 1,
            nodes: 16,
            n: 16,
            k: 11,
            block_bytes,
            shards,
            memory_bytes: 256 << 20,
            rate_mbit: Some(200),
            client_rate_mbit: None,
            slow_nodes: 0,
            slow_rate_mbit: None,
            relayed: None,
            congestion: None,
            repair_grace_s: None,
            stream: None,
        }
    }

    #[test]
    fn one_stripe_costs_what_the_paper_says() {
        let one = at(1, 64 << 20);
        let of = |arm| cost(arm, &one).unwrap();
        assert_eq!(of(Arm::Chain).transfers, 15);
        assert!((of(Arm::Chain).block_times - (1024.0 + 14.0) / 1024.0).abs() < 1e-9);
        assert_eq!(of(Arm::NaiveStar), Cost { transfers: 15, block_times: 11.0 });
        assert_eq!(of(Arm::BestStar), Cost { transfers: 13, block_times: 9.0 });
        assert_eq!(cost(Arm::StripedStar, &one), None);
    }

    /// Returns, for the plan that a cluster runs, the transfers in all and those over the busiest
    /// direction of a node.
    fn best_star_of_the_planner(n: u32, k: u32) -> (u64, u64) {
        const BLOCK_BYTES: u64 = 4 << 20;
        let code = Code::Rs(RsCode::new(n as usize, k as usize).unwrap());
        let name = |i| format!("n{i}").parse::<PeerName>().unwrap();
        let places: Vec<NodeId> = (0..n).map(|i| NodeId::of(&name(i))).collect();
        let k = k as u8;
        let len_bytes = BLOCK_BYTES * u64::from(k);
        let cut = StripeCut { offset_bytes: 0, len_bytes, block_bytes: BLOCK_BYTES, k };
        let stripe = StripeId { shard: ShardId([1; 16]), index: 0 };
        let attempt = Attempt([2; 16]);
        let subject = Subject { stripe, attempt, cut, places: &places, code: &code };
        let plan = best_star(&subject, 0).unwrap();
        let traffic: Vec<_> = places.iter().map(|&node| plan.traffic(node)).collect();
        let busiest = traffic.iter().map(|at| at.in_bytes.max(at.out_bytes)).max().unwrap();
        let sent: u64 = traffic.iter().map(|at| at.out_bytes).sum();
        (sent / BLOCK_BYTES, busiest / BLOCK_BYTES)
    }

    #[test]
    fn the_best_star_is_that_of_the_planner() {
        for (n, k) in [(6, 4), (7, 4), (8, 4), (12, 8), (16, 11), (20, 16)] {
            let found = cost(Arm::BestStar, &Conditions { n, k, ..at(1, 8 << 20) }).unwrap();
            let expected = best_star_of_the_planner(n, k);
            assert_eq!((found.transfers, found.block_times as u64), expected, "({n},{k})");
        }
        let eight = Conditions { n: 8, k: 4, nodes: 8, ..at(1, 8 << 20) };
        let found = cost(Arm::BestStar, &eight);
        assert_eq!(found, Some(Cost { transfers: 6, block_times: 3.0 }));
    }

    #[test]
    fn links_that_differ_have_no_model() {
        let one = at(1, 8 << 20);
        let relayed = Some(Relayed { nodes: 2, delay_ms: 50, loss_percent: 0.0 });
        for differing in
            [Conditions { slow_nodes: 4, ..one.clone() }, Conditions { relayed, ..one }]
        {
            assert_eq!(cost(Arm::Chain, &differing), None);
        }
    }

    #[test]
    fn sixteen_at_once_are_bound_by_all_links() {
        let all = at(16, 8 << 20);
        let times = [Arm::Chain, Arm::NaiveStar, Arm::BestStar].map(|arm| cost(arm, &all).unwrap());
        assert_eq!(times.map(|cost| cost.block_times), [15.0, 15.0, 13.0]);
        assert_eq!(times.map(|cost| cost.transfers), [240, 240, 208]);
        assert_eq!(cost(Arm::RandomStar, &all), None);
        assert_eq!(cost(Arm::LineQuic, &all), Some(Cost { transfers: 240, block_times: 16.0 }));
        let link = Cost { transfers: 176, block_times: 176.0 };
        assert_eq!(cost(Arm::LinkQuic, &all), Some(link));
    }

    #[test]
    fn a_block_takes_its_bytes_over_the_rate() {
        // 64 MiB at 200 Mbit/s, with 0.9 % of headers.
        let time = block_time_s(64 << 20, 200);
        assert!((2.70..2.72).contains(&time), "{time}");
    }
}
