//! Conclusions of the demo from the nodes' reports: whether the chain moves what the model says,
//! and how to draw it.

use crate::cli::picture::{HopSpan, Stop};
use crate::cli::printer::CommandFailure;
use crate::code::{Code, table};
use crate::kind::ErrorKind;
use crate::units::ByteCount;
use crate::wire::calls::StripeReport;

/// The bytes that the hops at one position of the chain received and sent, summed over all stripes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HopSum {
    /// The node of this hop in the first stripe.
    pub node: String,
    /// Payload bytes received.
    pub in_bytes: u64,
    /// Payload bytes sent.
    pub out_bytes: u64,
}

/// Compares each stripe with the model of the paper (section IV): a chain of n nodes moves n-1
/// blocks, and each node receives at most one block and sends at most one. Returns the sums of the
/// hops over all stripes, or `Internal` if a stripe differs from the model.
pub fn check_model(reports: &[StripeReport], n: usize) -> Result<Vec<HopSum>, CommandFailure> {
    let mut sums: Vec<HopSum> = Vec::new();
    for report in reports {
        let block = report.block_bytes;
        let wrong = |what: String| {
            let message = format!("stripe {} is not what the model says: {what}", report.stripe);
            CommandFailure::new(ErrorKind::Internal, message)
        };
        if report.hops.len() != n {
            return Err(wrong(format!("{} hops instead of {n}", report.hops.len())));
        }
        for (at, hop) in report.hops.iter().enumerate() {
            let expected = (if at == 0 { 0 } else { block }, if at + 1 == n { 0 } else { block });
            if (hop.work.in_bytes, hop.work.out_bytes) != expected {
                return Err(wrong(format!(
                    "{} received {} and sent {}, expected {} and {}",
                    hop.node, hop.work.in_bytes, hop.work.out_bytes, expected.0, expected.1
                )));
            }
            match sums.get_mut(at) {
                Some(sum) => {
                    sum.in_bytes += hop.work.in_bytes;
                    sum.out_bytes += hop.work.out_bytes;
                }
                None => sums.push(HopSum {
                    node: hop.node.to_string(),
                    in_bytes: hop.work.in_bytes,
                    out_bytes: hop.work.out_bytes,
                }),
            }
        }
    }
    Ok(sums)
}

/// Returns the hops of a stripe's chain for a picture.
pub fn stops(report: &StripeReport) -> Vec<Stop> {
    let code = table::by_id(report.code);
    let blocks = |hop: usize| match &code {
        Some(Code::Chain(chain)) => {
            chain.blocks_of_hop(hop).map(|block| format!("o{}", block + 1)).collect()
        }
        _ => Vec::new(),
    };
    let stop = |(at, hop): (usize, &crate::wire::calls::HopView)| {
        let pieces: Vec<String> =
            hop.pieces.iter().map(|piece| format!("c{}", u32::from(*piece) + 1)).collect();
        Stop { node: hop.node.to_string(), blocks: blocks(at), piece: pieces.join(" ") }
    };
    report.hops.iter().enumerate().map(stop).collect()
}

/// Returns the work of a stripe's hops over time.
pub fn spans(report: &StripeReport) -> Vec<HopSpan> {
    let span = |hop: &crate::wire::calls::HopView| HopSpan {
        node: hop.node.to_string(),
        start_ms: hop.work.span_us.0 / 1000,
        end_ms: hop.work.span_us.1.div_ceil(1000),
        in_bytes: hop.work.in_bytes,
        out_bytes: hop.work.out_bytes,
    };
    report.hops.iter().map(span).collect()
}

/// Returns a size and its ratio to the input, such as `372.4 MiB (1.45x)`.
pub fn times(stored_bytes: u64, input_bytes: u64) -> String {
    format!("{} ({:.2}x)", ByteCount(stored_bytes), stored_bytes as f64 / input_bytes.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ShardId, StripeId};
    use crate::wire::calls::HopView;
    use crate::wire::order::HopWork;

    fn report(traffic: &[(u64, u64)]) -> StripeReport {
        let hop = |(at, (in_bytes, out_bytes)): (usize, &(u64, u64))| HopView {
            node: format!("node-{at}").parse().unwrap(),
            pieces: vec![at as u8],
            work: HopWork {
                in_bytes: *in_bytes,
                out_bytes: *out_bytes,
                span_us: (1999, 2001),
                ..HopWork::default()
            },
        };
        StripeReport {
            stripe: StripeId { shard: ShardId([0; 16]), index: 0 },
            code: table::find(4, 2).unwrap().id(),
            block_bytes: 128,
            hops: traffic.iter().enumerate().map(hop).collect(),
            phases_us: [0; 4],
        }
    }

    #[test]
    fn a_chain_moves_one_block_less_than_it_has_nodes() {
        let good = report(&[(0, 128), (128, 128), (128, 128), (128, 0)]);
        let sums = check_model(&[good.clone(), good.clone()], 4).unwrap();
        assert_eq!(sums.iter().map(|sum| sum.in_bytes).sum::<u64>(), 2 * 3 * 128);
        for bad in [
            &[(0, 128), (128, 128), (128, 0)][..],
            &[(0, 128), (128, 128), (128, 128), (128, 128)],
            &[(0, 128), (128, 256), (256, 128), (128, 0)],
            &[(0, 128), (128, 127), (127, 128), (128, 0)],
        ] {
            assert!(check_model(&[good.clone(), report(bad)], 4).is_err(), "{bad:?}");
        }
        assert_eq!(stops(&good).len(), 4);
        assert_eq!((spans(&good)[0].start_ms, spans(&good)[0].end_ms), (1, 3));
    }
}
