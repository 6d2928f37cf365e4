//! Fetching the records of a shard from its nodes, and checking them against the shard root.

use std::collections::HashMap;

use futures_util::StreamExt;
use futures_util::stream;

use crate::format::records::{Leaves, Receipt, Record, ShardRoot, StripeFixed, StripeRecord};
use crate::id::{Attempt, NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::Caller;
use crate::placement::{PlacementError, place};
use crate::topology::Directory;
use crate::wire::NodeAddress;
use crate::wire::calls::{GetRecord, RecordName};

/// Maximum number of nodes that are asked at once for one record.
const ASK_AT_ONCE: usize = 4;

/// The error of a record that cannot be fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordsError {
    /// No node has a valid copy of the record.
    #[error(
        "{what} of shard {shard} was found on none of {asked} nodes ({answers}): too many nodes are lost, busy, or unreachable"
    )]
    Lost {
        /// The record, in words.
        what: String,
        /// The shard's name.
        shard: String,
        /// The number of nodes that were asked.
        asked: usize,
        /// The number of nodes that did not say whether they have the record.
        silent: usize,
        /// The number of these nodes that were busy.
        busy: usize,
        /// The answers of the nodes, as a count for each kind of answer.
        answers: String,
    },
    /// The shard's ring is too small for its code.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

impl RecordsError {
    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            RecordsError::Lost { busy: 1.., .. } => ErrorKind::Busy,
            RecordsError::Lost { .. } => ErrorKind::Lost,
            RecordsError::Placement(error) => error.kind(),
        }
    }
}

/// The contents of a stripe's record, checked against the shard's leaves.
#[derive(Debug, Clone)]
pub struct StripeInfo {
    /// The fixed part of the record.
    pub fixed: StripeFixed,
    /// The node of each position. This is a hint: the files may be on other nodes of the ring.
    pub places: Vec<NodeId>,
}

/// Asks nodes for a record, a few at a time, until `accept` accepts an answer. Returns the accepted
/// value.
async fn fetch_accepted_record<T>(
    caller: &Caller,
    directory: &Directory,
    nodes: Vec<NodeAddress>,
    root: &ShardRoot,
    record: RecordName,
    accept: impl Fn(&[u8]) -> Result<T, String>,
) -> Result<T, RecordsError> {
    let asked = nodes.len();
    let call = GetRecord { shard: root.shard, record };
    let mut answers = stream::iter(nodes)
        .map(|node| {
            let call = call.clone();
            async move { (caller.call(&node, &call).await, node) }
        })
        .buffer_unordered(ASK_AT_ONCE);
    let mut failures: HashMap<String, usize> = HashMap::new();
    let (mut silent, mut busy) = (0, 0);
    while let Some((answer, node)) = answers.next().await {
        let failure = match answer {
            Ok(Some(bytes)) => match accept(&bytes) {
                Ok(value) => return Ok(value),
                Err(reason) => {
                    tracing::warn!(node = %node.name, shard = %root.shard, ?record, reason, "a node sent an invalid record");
                    "a bad copy".to_owned()
                }
            },
            Ok(None) => "not there".to_owned(),
            Err(error) => {
                let is_busy = error.kind() == ErrorKind::Busy;
                busy += usize::from(is_busy);
                if error.is_unanswered() && !is_busy {
                    directory.heard(NodeId::of(&node.name), false);
                }
                silent += usize::from(error.is_unanswered() || error.kind().is_transient());
                format!("{:?}", error.kind()).to_lowercase()
            }
        };
        *failures.entry(failure).or_default() += 1;
    }
    let mut answers: Vec<String> =
        failures.into_iter().map(|(failure, count)| format!("{failure}: {count}")).collect();
    answers.sort_unstable();
    Err(RecordsError::Lost {
        what: describe_record(&record),
        shard: root.name.to_string(),
        asked,
        silent,
        busy,
        answers: answers.join(", "),
    })
}

/// Returns the name of a record for messages.
pub(super) fn describe_record(record: &RecordName) -> String {
    match record {
        RecordName::Leaves => "the list of stripes".into(),
        RecordName::Stripe { index } => format!("the record of stripe {index}"),
        RecordName::Receipt { index, .. } => format!("the receipt of stripe {index}"),
        RecordName::Mark => "the commit mark".into(),
    }
}

/// Returns the addresses of the nodes to ask. Live nodes come before those that seem dead, and in
/// both groups the nodes in `preferred` come before the other nodes of the ring.
fn ring_nodes_live_first(
    directory: &Directory,
    root: &ShardRoot,
    preferred: &[NodeId],
) -> Vec<NodeAddress> {
    let mut order: Vec<NodeId> = preferred.to_vec();
    order.extend(directory.nodes_to_ask(root));
    let mut seen = std::collections::HashSet::new();
    order.retain(|node| seen.insert(*node));
    order.sort_by_key(|node| !directory.is_live(*node));
    order.into_iter().filter_map(|node| directory.address(node)).collect()
}

/// Fetches the leaves of a shard from its ring. Returns the leaves that the shard root admits.
///
/// # Errors
/// [`RecordsError::Lost`] if no node has a valid copy.
pub async fn fetch_leaves(
    caller: &Caller,
    directory: &Directory,
    root: &ShardRoot,
) -> Result<Leaves, RecordsError> {
    fetch_accepted_record(
        caller,
        directory,
        ring_nodes_live_first(directory, root, &[]),
        root,
        RecordName::Leaves,
        |bytes| {
            let leaves = Leaves::parse(bytes).map_err(|error| error.to_string())?;
            if root.admits(&leaves) { Ok(leaves) } else { Err("not those of the commit".into()) }
        },
    )
    .await
}

/// Fetches the record of stripe `index` and checks it against the root and the leaves.
///
/// # Errors
/// [`RecordsError::Lost`] if no node has a valid copy; [`RecordsError::Placement`] if the ring is
/// too small for the code.
pub async fn fetch_stripe_record(
    caller: &Caller,
    directory: &Directory,
    root: &ShardRoot,
    leaves: &Leaves,
    index: u32,
) -> Result<StripeInfo, RecordsError> {
    let places = place(&root.ring, root.n.into(), root.k.into(), index)?;
    let nodes = ring_nodes_live_first(directory, root, &places);
    fetch_accepted_record(caller, directory, nodes, root, RecordName::Stripe { index }, |bytes| {
        let record = StripeRecord::parse(bytes).map_err(|error| error.to_string())?;
        let fixed = record.open(root, leaves, index).map_err(|error| error.to_string())?;
        Ok(StripeInfo { fixed, places: record.places })
    })
    .await
}

/// Fetches the receipt of an attempt on stripe `index`. Live nodes in `preferred` are asked before
/// the other nodes of the ring.
///
/// # Errors
/// [`RecordsError::Lost`] if no node has a valid copy.
pub async fn fetch_receipt(
    caller: &Caller,
    directory: &Directory,
    root: &ShardRoot,
    (index, preferred): (u32, &[NodeId]),
    attempt: Attempt,
) -> Result<Receipt, RecordsError> {
    let stripe = StripeId { shard: root.shard, index };
    let nodes = ring_nodes_live_first(directory, root, preferred);
    fetch_accepted_record(
        caller,
        directory,
        nodes,
        root,
        RecordName::Receipt { index, attempt },
        |bytes| {
            let receipt = Receipt::parse(bytes).map_err(|error| error.to_string())?;
            let fits = receipt.stripe == stripe
                && receipt.attempt == attempt
                && receipt.pieces.len() == usize::from(root.n)
                && (0..).zip(&receipt.pieces).all(|(number, piece)| piece.piece == number);
            if fits { Ok(receipt) } else { Err("of another stripe or attempt".into()) }
        },
    )
    .await
}
