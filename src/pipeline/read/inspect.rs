//! Before a stripe is read: what the nodes say that they hold of it. Nobody waits long for one of them when the others are enough.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::Reading;
use crate::clock::deadline;
use crate::id::{NodeId, StripeId};
use crate::net::call::address;
use crate::wire::calls::{FileView, Inspect};

/// While nodes say what they have, one that keeps the others waiting for so long is left out where these are enough.
const SLOW_INSPECT_LIMIT: Duration = Duration::from_millis(500);
/// The same where the others answered at once: what a busy machine may take before it answers.
const QUICK_INSPECT_LIMIT: Duration = Duration::from_millis(100);
/// In between: so many times what the latest answer took. On long links that is more than `SLOW_INSPECT_LIMIT`, which then holds.
const SLOW_FACTOR: u32 = 4;
/// A node that does not say within this what it has is left out at first.
pub(super) const INSPECT_LIMIT: Duration = Duration::from_secs(2);
/// The same when too little was found without it.
pub(super) const PATIENT_LIMIT: Duration = Duration::from_secs(6);
/// What nodes say that they hold of a stripe.
pub(super) type Held = BTreeMap<NodeId, Vec<FileView>>;

/// Asks `nodes` what they hold, at most `limit`, and adds it to `held`. Those that are slow are waited for only until `is_enough` of
/// what the others hold; then they count as silent.
pub(super) async fn inspect_all(
    reading: &Reading,
    stripe: StripeId,
    nodes: &BTreeSet<NodeId>,
    limit: Duration,
    held: &mut Held,
    is_enough: impl Fn(&Held) -> bool,
) {
    let asks = nodes.iter().map(|&node| async move {
        let Some(to) = reading.directory.address(node) else { return (node, None) };
        let answer = reading.caller.call_within(&address(&to), &Inspect { stripe }, limit).await;
        let news = reading.directory.heard(node, answer.is_ok());
        if let (Err(error), true) = (&answer, news) {
            reading.note(format!("{} is left out: {error}", to.name));
        }
        (node, answer.ok())
    });
    let mut asks: FuturesUnordered<_> = asks.collect();
    let mut left = nodes.clone();
    let clock = &**reading.caller.clock();
    let asked = clock.now();
    let mut patience = SLOW_INSPECT_LIMIT;
    let mut is_slow = false;
    loop {
        let next = match is_slow {
            true => Ok(asks.next().await),
            false => deadline(clock, patience, asks.next()).await,
        };
        match next {
            Ok(None) => return,
            Ok(Some((node, answer))) => {
                left.remove(&node);
                if let Some(mut files) = answer {
                    let took = clock.now().saturating_sub(asked) * SLOW_FACTOR;
                    patience = took.clamp(QUICK_INSPECT_LIMIT, SLOW_INSPECT_LIMIT);
                    files.retain(|view| !reading.is_rotten(stripe, node, view.file));
                    held.insert(node, files);
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
}
