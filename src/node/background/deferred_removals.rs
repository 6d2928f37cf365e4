//! Deferred removals: aborted saves that nodes which are away have still to purge
//! (docs/semantics.md, 5). They have keys of their own, so that a job that crashes again and again
//! while a node is down does not fill the record of its step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;

use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{DEFERRED_REMOVALS, parse_record};
use crate::catalogue::{Catalogue, Entry};
use crate::format::records::Removing;
use crate::id::{PeerName, StepRef};
use crate::node::context::NodeContext;
use crate::node::gateway::removal::{RemovalOutcome, SaveRemoval};
use crate::node::retry_schedule::backoff;
use crate::wire::RemoteError;

/// Maximum number of deferred removals. Further ones stay with their steps.
const MAX_DEFERRED: u64 = 65_536;
/// Maximum number of deferred removals that are tried in one round.
const TRIED_A_ROUND: usize = 256;
/// Maximum number of deferred removals that are tried at once.
const TRIED_AT_ONCE: usize = 16;

/// The state that a round leaves to the next one. A *pass* tries every deferred removal once, in
/// one or more rounds.
#[derive(Debug, Default)]
struct PassState {
    /// The last key that this pass has tried.
    after: Option<String>,
    /// Whether a removal of this pass has to be tried again.
    is_incomplete: bool,
    /// Number of passes in a row that have left something, since the list of nodes has changed.
    incomplete_passes: u32,
    /// The time at which the next pass begins.
    due: Duration,
    /// Whether a node came back or left the list during this pass.
    has_changed: bool,
    /// The storage nodes, and whether each was live, in the last round.
    nodes: BTreeMap<PeerName, bool>,
}

impl PassState {
    /// Notes the storage nodes, each with whether it is live. If a node has become live or has left
    /// the list, removals that waited for it can be completed now.
    fn note_nodes(&mut self, nodes: BTreeMap<PeerName, bool>) {
        let has_left = self.nodes.keys().any(|name| !nodes.contains_key(name));
        let was_live = |name: &PeerName| self.nodes.get(name).copied().unwrap_or(false);
        if has_left || nodes.iter().any(|(name, is_live)| *is_live && !was_live(name)) {
            (self.incomplete_passes, self.due, self.has_changed) = (0, Duration::ZERO, true);
        }
        self.nodes = nodes;
    }

    /// Notes that this pass has tried the removals up to `key`.
    fn note_tried_up_to(&mut self, key: String) {
        self.after = Some(key);
    }

    /// Ends a pass at the time `now`.
    fn end_pass(&mut self, now: Duration, lease: Duration) {
        self.after = None;
        let is_incomplete = std::mem::take(&mut self.is_incomplete);
        // The first keys were tried before the change, so they are tried again at once.
        if std::mem::take(&mut self.has_changed) || !is_incomplete {
            (self.incomplete_passes, self.due) = (0, Duration::ZERO);
        } else {
            self.incomplete_passes = self.incomplete_passes.saturating_add(1);
            self.due = now.saturating_add(backoff(lease, self.incomplete_passes));
        }
    }
}

/// The service that defers removals, and completes them when the nodes are back.
pub(in crate::node) struct DeferredRemovals {
    context: Arc<NodeContext>,
    removal: Arc<SaveRemoval>,
    /// Number of deferred removals: those of the last round, and those deferred since.
    count: AtomicU64,
}

impl DeferredRemovals {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>, removal: Arc<SaveRemoval>) -> Self {
        Self { context, removal, count: AtomicU64::new(0) }
    }

    /// Returns about how many removals are deferred. Only the catalogue server knows it.
    pub(in crate::node) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Defers the removal of an aborted save if it waits only for nodes that are away, and if not
    /// too many removals are deferred already. Returns whether it is deferred now.
    pub(in crate::node) async fn try_defer(
        &self,
        step_ref: StepRef<'_>,
        entry: &Removing,
        outcome: &RemovalOutcome,
    ) -> Result<bool, RemoteError> {
        if self.count() >= MAX_DEFERRED {
            return Ok(false);
        }
        let is_deferred =
            self.removal.defer_if_waiting_for_absent_nodes(step_ref, entry, outcome).await?;
        if is_deferred {
            self.count.fetch_add(1, Ordering::Relaxed);
            tracing::info!(step = %step_ref, save = %entry.save, "an aborted save waits for nodes that are away: its removal is deferred");
        }
        Ok(is_deferred)
    }

    /// Tries deferred removals again, once per lease period, while this daemon serves the
    /// catalogue. Runs until the node stops.
    pub(in crate::node) async fn run_deferred_removals(self: Arc<Self>) {
        let mut state = PassState::default();
        loop {
            self.context.clock.sleep(self.context.settings.lease).await;
            if !self.context.is_writable_catalogue_server() {
                continue;
            }
            if let Err(error) = self.run_round(&*self.context.catalogue(), &mut state).await {
                tracing::warn!(%error, "failed to go through the deferred removals; retrying");
            }
        }
    }

    /// Counts the deferred removals, and tries the next ones if a pass is due. Ends before the last
    /// one if it has tried [`TRIED_A_ROUND`] of them or has worked for a lease period.
    async fn run_round(
        &self,
        catalogue: &dyn Catalogue,
        state: &mut PassState,
    ) -> Result<(), RemoteError> {
        let (clock, lease) = (&self.context.clock, self.context.settings.lease);
        let storage = catalogue.list_nodes().await?.into_iter().filter(|view| view.node.storage);
        state.note_nodes(storage.map(|view| (view.node.name, view.live)).collect());
        self.count.store(count_deferred(catalogue).await?, Ordering::Relaxed);
        let began = clock.now();
        if began < state.due {
            return Ok(());
        }
        let mut scan = KeyScan::of_prefix(catalogue, DEFERRED_REMOVALS);
        if let Some(after) = state.after.clone() {
            scan = scan.starting_after(after);
        }
        for _ in 0..TRIED_A_ROUND / TRIED_AT_ONCE {
            let mut batch = Vec::new();
            while batch.len() < TRIED_AT_ONCE
                && let Some(found) = scan.next().await?
            {
                batch.push(found);
            }
            let Some((last, _)) = batch.last().cloned() else {
                state.end_pass(clock.now(), lease);
                return Ok(());
            };
            let tried = batch.iter().map(|(key, entry)| self.try_removal(catalogue, key, entry));
            state.is_incomplete |= join_all(tried).await.contains(&false);
            state.note_tried_up_to(last);
            if clock.now().saturating_sub(began) >= lease {
                break;
            }
        }
        Ok(())
    }

    /// Continues one deferred removal, and forgets it if all nodes have purged the save. Returns
    /// whether they have.
    async fn try_removal(&self, catalogue: &dyn Catalogue, key: &str, entry: &Entry) -> bool {
        let work = async {
            let removing: Removing = parse_record(key, &entry.value)?;
            let is_complete = self.removal.advance_unnamed_removal(&removing).await?;
            if is_complete {
                catalogue.compare_and_set(key, Some(entry.revision), None).await?;
            }
            Ok::<bool, RemoteError>(is_complete)
        };
        work.await.unwrap_or_else(|error| {
            tracing::info!(key, %error, "a deferred removal is tried again later");
            false
        })
    }
}

/// Returns the number of deferred removals in the catalogue.
async fn count_deferred(catalogue: &dyn Catalogue) -> Result<u64, RemoteError> {
    let (mut count, mut scan) = (0, KeyScan::of_prefix(catalogue, DEFERRED_REMOVALS));
    while scan.next().await?.is_some() {
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn nodes(live: &[(&str, bool)]) -> BTreeMap<PeerName, bool> {
        live.iter().map(|(name, is_live)| (name.parse().unwrap(), *is_live)).collect()
    }

    /// Plays rounds, one a second, of passes that fit into one round and leave something. Returns
    /// the times at which a pass began.
    fn play(state: &mut PassState, seconds: std::ops::Range<u32>) -> Vec<u32> {
        let mut began = Vec::new();
        for second in seconds {
            let now = second * SECOND;
            if now >= state.due {
                began.push(second);
                state.is_incomplete = true;
                state.end_pass(now, SECOND);
            }
        }
        began
    }

    #[test]
    fn waits_grow_until_a_node_is_back_or_is_gone() {
        let mut state = PassState::default();
        state.note_nodes(nodes(&[("a", true), ("b", false), ("c", false)]));
        assert_eq!(play(&mut state, 0..20), [0, 1, 2, 4, 8, 16]);
        state.note_nodes(nodes(&[("a", true), ("b", false), ("c", false)]));
        assert_eq!(play(&mut state, 20..40), [32], "nothing has changed");
        state.note_nodes(nodes(&[("a", true), ("b", true), ("c", false)]));
        assert_eq!(play(&mut state, 40..46), [40, 41, 42, 44], "a node is back");
        state.note_nodes(nodes(&[("a", false), ("b", true), ("c", false)]));
        assert_eq!(play(&mut state, 46..47), [0; 0], "nothing waits for a node that goes away");
        state.note_nodes(nodes(&[("a", false), ("b", true)]));
        assert_eq!(play(&mut state, 47..48), [47], "a node has left the list");
    }

    #[test]
    fn a_pass_that_leaves_nothing_is_followed_by_the_next_one() {
        let mut state = PassState::default();
        play(&mut state, 0..10);
        state.end_pass(10 * SECOND, SECOND);
        assert_eq!((state.due, state.incomplete_passes), (Duration::ZERO, 0));
    }

    #[test]
    fn a_node_that_comes_back_during_a_pass_makes_the_next_one_due() {
        let mut state = PassState::default();
        state.note_nodes(nodes(&[("a", false)]));
        state.end_pass(Duration::ZERO, SECOND);
        state.note_tried_up_to("d/1".into());
        state.note_nodes(nodes(&[("a", true)]));
        assert_eq!(state.after.as_deref(), Some("d/1"), "the pass goes on where it stopped");
        state.is_incomplete = true;
        state.end_pass(5 * SECOND, SECOND);
        assert_eq!((state.after.as_deref(), state.due), (None, Duration::ZERO));
    }
}
