//! The standing of this node and of others: whether they know what is committed and what was
//! removed (docs/semantics.md, 2).

use futures_util::{StreamExt, stream};

use super::context::NodeContext;
use crate::format::records::{Node as NodeRecord, Standing};
use crate::kind::ErrorKind;
use crate::net::call::CallError;
use crate::wire::calls::{GetStanding, StandingAnswer};
use crate::wire::{NodeAddress, RemoteError};

/// Maximum number of nodes that are asked at once.
const AT_ONCE: usize = 32;

/// Returns the standing of this node, the highest epoch and the last revision of a catalogue that
/// it knows, and the storage nodes on its list of nodes.
pub(super) async fn get_standing(context: &NodeContext) -> Result<StandingAnswer, RemoteError> {
    context
        .run_on_store(|store| {
            // The list is stored before the revision. Reading the revision first ensures that
            // the list is at least as new as the reported revision.
            let (epoch, revision) = (store.highest_seen_epoch(), store.revision_of_any_db());
            let nodes = store.read_members().unwrap_or_default().nodes;
            let listed = nodes.into_iter().filter(|node| node.storage).map(|node| node.name);
            let (standing, listed) = (store.read_catch_up_standing(), listed.collect());
            Ok::<_, RemoteError>(StandingAnswer { standing, epoch, revision, listed })
        })
        .await
}

/// Asks `nodes` for their standing. Returns the nodes that answer, in any order. A node whose
/// program does not know the call is returned with the standing `Unknown`.
pub(super) async fn fetch_standings(
    context: &NodeContext,
    nodes: &[NodeRecord],
) -> Vec<(NodeRecord, StandingAnswer)> {
    let asks: Vec<_> = nodes
        .iter()
        .map(|node| async move {
            match context.caller.call(&NodeAddress::of(node), &GetStanding {}).await {
                Ok(answer) => Some((node.clone(), answer)),
                Err(error) if is_unknown_call(&error) => Some((node.clone(), unknown_standing())),
                Err(error) => {
                    tracing::info!(node = %node.name, %error, "failed to ask a node whether it has caught up: the node does not count as heard");
                    None
                }
            }
        })
        .collect();
    let answers = stream::iter(asks).buffer_unordered(AT_ONCE);
    answers.filter_map(|answer| async move { answer }).collect().await
}

/// Returns whether a call failed because the other node's program is older than the call.
pub(super) fn is_unknown_call(error: &CallError) -> bool {
    matches!(error, CallError::Failed(failure) if failure.kind == ErrorKind::Invalid)
}

/// Returns the standing of a node whose program is too old to report one.
fn unknown_standing() -> StandingAnswer {
    let (epoch, revision) = Default::default();
    StandingAnswer { standing: Standing::Unknown, epoch, revision, listed: Vec::new() }
}
