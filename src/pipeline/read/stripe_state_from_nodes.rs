//! The state of a stripe as its nodes report it, for readers without a catalogue
//! (docs/semantics.md, 6).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::ReadSession;
use super::file_probe::{HeldFiles, LONG_PROBE_LIMIT, PROBE_LIMIT, WantedFiles, probe_nodes};
use super::read_session::StripeDamage;
use crate::format::file::FileName;
use crate::format::records::{ShardRoot, StripeState};
use crate::id::{Attempt, NodeId, StripeId};
use crate::pipeline::record_fetch;

/// Maximum number of attempts whose receipts are asked for in one round of the search. The attempts
/// with the most pieces come first.
const ATTEMPTS_ASKED: usize = 4;

/// The nodes of a ring that are asked for their files of a stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodesToAsk {
    /// The nodes whose leases were alive when the directory was fetched, except silent ones.
    Live,
    /// All nodes. Silent ones have longer to answer.
    All,
}

/// Returns the state in which stripe `index` of a committed shard can be read: `Replicated` if
/// there is an undamaged replica of every block, otherwise the archived state of the attempt that
/// has the most pieces and a receipt on some node. Returns `Replicated` if no receipt is found. If
/// the replicas of the stripe may be about to be dropped, a receipt is looked for first.
///
/// A receipt exists only when all n pieces were proven, so it does not matter whether the catalogue
/// had recorded that.
pub async fn find_stripe_state(
    reading: &Arc<ReadSession>,
    root: &ShardRoot,
    index: u32,
    nodes_to_ask: NodesToAsk,
) -> StripeState {
    let stripe = StripeId { shard: root.shard, index };
    let ring = reading.directory.nodes_to_ask(root);
    let (nodes, limit): (BTreeSet<NodeId>, _) = match nodes_to_ask {
        NodesToAsk::Live => {
            (ring.filter(|node| reading.directory.is_live(*node)).collect(), PROBE_LIMIT)
        }
        NodesToAsk::All => (ring.collect(), LONG_PROBE_LIMIT),
    };
    let cut = root.geometry().ok().and_then(|geometry| geometry.stripe(index));
    let blocks: BTreeSet<u8> = (0..root.k)
        .filter(|&block| cut.as_ref().is_some_and(|cut| cut.block_len(block) > 0))
        .collect();
    let mut held = HeldFiles::new();
    // While replicas are being dropped, nodes may list replicas that are gone. Look for a receipt
    // first then.
    let is_leaving = reading.is_dropping_replicas(stripe);
    let is_whole = |held: &HeldFiles| {
        // Replicas with known damage are no reason to read without the pieces.
        let damage = reading.damage_of_stripe(stripe);
        !is_leaving && blocks.is_subset(&undamaged_replicas(held, &damage))
    };
    let counting = (stripe, WantedFiles::GoodCopies);
    probe_nodes(reading, counting, &nodes, limit, &mut held, is_whole).await;
    if is_whole(&held) {
        return StripeState::Replicated;
    }
    for files in [WantedFiles::GoodCopies, WantedFiles::Sources] {
        if files == WantedFiles::Sources {
            // Some or all of the remaining files may be damaged, so list damaged files too.
            probe_nodes(reading, (stripe, files), &nodes, limit, &mut held, |_| false).await;
        }
        let mut attempts: Vec<(Attempt, BTreeSet<u8>)> =
            pieces_by_attempt(&held).into_iter().collect();
        attempts.sort_by_key(|(_, pieces)| std::cmp::Reverse(pieces.len()));
        for (attempt, _) in attempts.into_iter().take(ATTEMPTS_ASKED) {
            let (caller, directory) = (&reading.caller, &reading.directory);
            let found =
                record_fetch::fetch_receipt(caller, directory, root, (index, &[]), attempt).await;
            if let Ok(found) = found {
                let (code, generation) = (found.code, found.generation);
                return StripeState::Archived { attempt, code, generation, dropped: false };
            }
        }
    }
    StripeState::Replicated
}

fn undamaged_replicas(held: &HeldFiles, damage: &StripeDamage) -> BTreeSet<u8> {
    let mut blocks = BTreeSet::new();
    for (node, files) in held {
        for found in files.iter().filter(|found| !damage.contains_key(&(*node, found.file))) {
            if let FileName::Replica { block } = found.file {
                blocks.insert(block);
            }
        }
    }
    blocks
}

fn pieces_by_attempt(held: &HeldFiles) -> BTreeMap<Attempt, BTreeSet<u8>> {
    let mut pieces: BTreeMap<Attempt, BTreeSet<u8>> = BTreeMap::new();
    for view in held.values().flatten() {
        if let FileName::Piece { piece, attempt } = view.file {
            pieces.entry(attempt).or_default().insert(piece);
        }
    }
    pieces
}
