//! Before a stripe is read: what the nodes say that they hold of it. Nobody waits long for one of them when the others are enough.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::Reading;
use crate::clock::deadline;
use crate::id::{NodeId, StripeId};
use crate::kind::Kind;
use crate::net::call::address;
use crate::wire::calls::{FileView, Inspect};

/// While nodes say what they have, one that keeps the others waiting for so long is left out where these are enough.
const SLOW_INSPECT_LIMIT: Duration = Duration::from_millis(500);
/// The same where the others answered at once: a node that is farther away, or busy, has time for a handshake and an answer.
const QUICK_INSPECT_LIMIT: Duration = Duration::from_millis(200);
/// In between: so many times what the latest answer took.
const SLOW_FACTOR: u32 = 4;
/// A node that does not say within this what it has is left out at first.
pub(super) const INSPECT_LIMIT: Duration = Duration::from_secs(2);
/// The same when too little was found without it.
pub(super) const PATIENT_LIMIT: Duration = Duration::from_secs(6);
/// What nodes say that they hold of a stripe, without files that gave wrong bytes.
pub(super) type Held = BTreeMap<NodeId, Vec<FileView>>;

/// Asks `nodes` what they hold, at most `limit`, and adds it to `held`. Those that are slow are waited for only until `is_enough` of
/// what the others hold; then they count as silent until their answer comes after all. Gives one that is too busy to say, and
/// what it said instead.
pub(super) async fn inspect_all(
    reading: &Arc<Reading>,
    stripe: StripeId,
    nodes: &BTreeSet<NodeId>,
    limit: Duration,
    held: &mut Held,
    is_enough: impl Fn(&Held) -> bool,
) -> Option<(NodeId, String)> {
    let clock = reading.caller.clock().clone();
    let asked = clock.now();
    let mut left: BTreeSet<NodeId> =
        nodes.iter().copied().filter(|node| reading.may_answer(*node)).collect();
    let asks = left.iter().map(|&node| {
        let reading = reading.clone();
        async move { (node, ask(&reading, stripe, node, limit).await) }
    });
    let mut asks: FuturesUnordered<_> = asks.collect();
    let mut patience = SLOW_INSPECT_LIMIT;
    let (mut is_slow, mut busy) = (false, None);
    loop {
        let next = match is_slow {
            true => Ok(asks.next().await),
            false => deadline(&*clock, patience, asks.next()).await,
        };
        match next {
            Ok(None) => return busy,
            Ok(Some((node, answer))) => {
                left.remove(&node);
                match answer {
                    Answer::Files(files) => {
                        held.insert(node, files);
                        let took = clock.now().saturating_sub(asked) * SLOW_FACTOR;
                        patience = took.clamp(QUICK_INSPECT_LIMIT, SLOW_INSPECT_LIMIT);
                        // The pause counts from the latest answer: others may be on their way.
                        is_slow = false;
                    }
                    Answer::Busy(reason) => busy = Some((node, reason)),
                    Answer::Silence => {}
                }
            }
            Err(_) => is_slow = true,
        }
        if is_slow && is_enough(held) {
            break;
        }
    }
    for node in left {
        if reading.directory.heard(node, false) {
            let node = reading.directory.name(node);
            tracing::info!(node, "slow: it is left out at first");
        }
    }
    // Whoever answers yet takes part in the stripes that come. Ends within `limit`.
    tokio::spawn(async move { while asks.next().await.is_some() {} });
    busy
}

enum Answer {
    Files(Vec<FileView>),
    /// It has what it has, and no time now: what it said.
    Busy(String),
    Silence,
}

async fn ask(reading: &Reading, stripe: StripeId, node: NodeId, limit: Duration) -> Answer {
    let Some(to) = reading.directory.address(node) else { return Answer::Silence };
    let answer = reading.caller.call_within(&address(&to), &Inspect { stripe }, limit).await;
    let error = match answer {
        Ok(mut files) => {
            reading.directory.heard(node, true);
            reading.answered(node);
            files.retain(|view| !reading.is_rotten(stripe, node, view.file));
            return Answer::Files(files);
        }
        Err(error) if error.kind() == Kind::Busy => {
            reading.answered(node);
            return Answer::Busy(error.to_string());
        }
        Err(error) => error,
    };
    if reading.directory.heard(node, false) {
        reading.note(format!("{} is left out: {error}", to.name));
    }
    if limit >= PATIENT_LIMIT && error.kind() == Kind::Timeout {
        reading.gave_no_answer(node);
    }
    Answer::Silence
}
