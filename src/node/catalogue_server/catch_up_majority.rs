//! Making more than half of the storage nodes catch up before one of them leaves
//! (docs/semantics.md, 2 and 10).

use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::error::CatalogueServerError;
use crate::catalogue::Catalogue;
use crate::catalogue::record_access::read_ring_changes;
use crate::id::PeerName;
use crate::net::call::{CallError, address};
use crate::node::context::NodeContext;
use crate::node::quorum::majority;
use crate::wire::calls::{CatchUp, ListRingChanges};
use crate::wire::{NodeAddress, RemoteError};

/// Time limit for a node to catch up: it reads all of its commit marks, and the removed saves of all
/// other nodes.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(600);
/// Maximum number of nodes that catch up at once.
const AT_ONCE: usize = 32;
/// Maximum number of failed nodes that a refusal names.
const NAMED: usize = 8;

/// Makes the storage nodes other than `name` catch up and store the ring changes. More than half of
/// them must succeed: they then still overlap with any majority that a reader without a catalogue
/// asks. A node succeeds if it has caught up and, if `name` has a ring change, has stored that
/// change.
///
/// # Errors
/// Fails with kind `Unavailable` if half or fewer of these nodes succeed.
pub(super) async fn catch_up_majority_without(
    context: &NodeContext,
    catalogue: &dyn Catalogue,
    name: &PeerName,
) -> Result<(), RemoteError> {
    let nodes = catalogue.list_nodes().await?.into_iter().map(|view| view.node);
    let others: Vec<_> = nodes.filter(|node| node.storage && node.name != *name).collect();
    let call = CatchUp { without: Some(name.clone()) };
    let change = read_ring_changes(catalogue).await?.find(name).cloned();
    let change = change.as_ref();
    let asks: Vec<_> = others
        .iter()
        .map(|node| async {
            let to = address(&NodeAddress::of(node));
            let failed = |error: CallError| format!("{}: {error}", node.name);
            context.caller.call_within(&to, &call, CATCH_UP_LIMIT).await.map_err(failed)?;
            let Some(change) = change else { return Ok(()) };
            // A program without ring changes catches up and stores none.
            let known = context
                .caller
                .call_within(&to, &ListRingChanges { only_stored: true }, CATCH_UP_LIMIT)
                .await;
            match known.map_err(failed)?.find(&change.node) == Some(change) {
                true => Ok(()),
                false => {
                    Err(format!("{} has not stored the ring change of {}", node.name, change.node))
                }
            }
        })
        .collect();
    let mut answers = stream::iter(asks).buffer_unordered(AT_ONCE);
    let (mut caught_up, mut why) = (0, Vec::new());
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(()) => caught_up += 1,
            Err(error) if why.len() < NAMED => why.push(error),
            Err(_) => {}
        }
    }
    if others.is_empty() || caught_up >= majority(others.len()) {
        return Ok(());
    }
    let too_few = CatalogueServerError::TooFewCaughtUp {
        caught_up,
        others: others.len(),
        node: name.clone(),
        needed: majority(others.len()),
        reason: why.join("; "),
    };
    Err(too_few.into())
}
