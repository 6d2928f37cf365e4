//! Deferred removals: removals of aborted saves that some storage nodes have not purged yet
//! (docs/semantics.md, 5). They have keys of their own, so that a job that crashes again and again
//! while a node is down does not fill the record of its step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    /// Number of consecutive passes after which removals remained. A node that becomes live or
    /// leaves the list sets it to 0.
    incomplete_passes: u32,
    /// The time at which the next pass begins.
    due: Duration,
    /// Whether a node became live or left the list during this pass.
    has_changed: bool,
    /// The live nodes for which removals of this pass wait.
    live_waiting: BTreeSet<PeerName>,
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
            (self.incomplete_passes, self.due) = (0, Duration::ZERO);
            self.has_changed = self.after.is_some();
        }
        self.nodes = nodes;
    }

    /// Notes the nodes for which a removal waits; `None` if it failed otherwise.
    fn note_waiting(&mut self, waiting: Option<Vec<PeerName>>) {
        self.is_incomplete |= waiting.as_ref().is_none_or(|names| !names.is_empty());
        let is_live = |name: &PeerName| self.nodes.get(name).copied().unwrap_or(false);
        self.live_waiting.extend(waiting.into_iter().flatten().filter(is_live));
    }

    /// Notes that this pass has tried the removals up to `key`.
    fn note_tried_up_to(&mut self, key: String) {
        self.after = Some(key);
    }

    /// Ends a pass at the time `now`.
    fn end_pass(&mut self, now: Duration, lease: Duration) {
        self.after = None;
        let is_incomplete = std::mem::take(&mut self.is_incomplete);
        let live_waiting = std::mem::take(&mut self.live_waiting);
        if !live_waiting.is_empty() {
            let names: Vec<&str> = live_waiting.iter().map(PeerName::as_str).collect();
            tracing::warn!(nodes = %names.join(", "), "these nodes are live and have not purged all aborted saves; retrying");
        }
        // This pass tried some removals before the change. The next pass begins at once.
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
    /// Number of deferred removals at the last round, changed by what was deferred and completed
    /// since. `None` before the first round.
    count: Mutex<Option<u64>>,
}

impl DeferredRemovals {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>, removal: Arc<SaveRemoval>) -> Self {
        Self { context, removal, count: Mutex::default() }
    }

    fn lock_count(&self) -> MutexGuard<'_, Option<u64>> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns about how many removals are deferred. Only the catalogue server knows it.
    pub(in crate::node) fn count(&self) -> u64 {
        self.lock_count().unwrap_or_default()
    }

    /// Defers the removal of an aborted save if every live storage node has a tombstone of it, and
    /// if not too many removals are deferred already. Returns whether it is deferred now.
    pub(in crate::node) async fn try_defer(
        &self,
        step_ref: StepRef<'_>,
        entry: &Removing,
        outcome: &RemovalOutcome,
    ) -> Result<bool, RemoteError> {
        if !has_room(*self.lock_count()) {
            return Ok(false);
        }
        let is_deferred =
            self.removal.defer_if_tombstoned_on_live_nodes(step_ref, entry, outcome).await?;
        if is_deferred {
            if let Some(count) = &mut *self.lock_count() {
                *count += 1;
            }
            let names: Vec<&str> = outcome.answer.waiting.iter().map(PeerName::as_str).collect();
            tracing::info!(step = %step_ref, save = %entry.save, waits_for = %names.join(", "), "the removal of an aborted save is deferred");
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

    /// Counts the deferred removals, and tries the next ones if a pass is due. Stops early after
    /// [`TRIED_A_ROUND`] of them, and begins no further batch after a lease period.
    async fn run_round(
        &self,
        catalogue: &dyn Catalogue,
        state: &mut PassState,
    ) -> Result<(), RemoteError> {
        let (clock, lease) = (&self.context.clock, self.context.settings.lease);
        let storage = catalogue.list_nodes().await?.into_iter().filter(|view| view.node.storage);
        state.note_nodes(storage.map(|view| (view.node.name, view.live)).collect());
        let count = count_deferred(catalogue).await?;
        *self.lock_count() = Some(count);
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
            for waiting in join_all(tried).await {
                state.note_waiting(waiting);
            }
            state.note_tried_up_to(last);
            if clock.now().saturating_sub(began) >= lease {
                break;
            }
        }
        Ok(())
    }

    /// Continues one deferred removal, and forgets it if all nodes have purged the save. Returns the
    /// nodes that have not, or `None` if an error occurred.
    async fn try_removal(
        &self,
        catalogue: &dyn Catalogue,
        key: &str,
        entry: &Entry,
    ) -> Option<Vec<PeerName>> {
        let work = async {
            let removing: Removing = parse_record(key, &entry.value)?;
            let waiting = self.removal.advance_unnamed_removal(&removing).await?;
            if waiting.is_empty() {
                catalogue.compare_and_set(key, Some(entry.revision), None).await?;
                if let Some(count) = &mut *self.lock_count() {
                    *count = count.saturating_sub(1);
                }
            }
            Ok::<_, RemoteError>(waiting)
        };
        let tried = work.await;
        tried
            .inspect_err(
                |error| tracing::info!(key, %error, "a deferred removal is tried again later"),
            )
            .ok()
    }
}

/// Returns whether a further removal may be deferred when `count` of them are deferred.
fn has_room(count: Option<u64>) -> bool {
    count.is_some_and(|count| count < MAX_DEFERRED)
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
        assert_eq!(play(&mut state, 0..20), [0, 1, 3, 7, 15]);
        state.note_nodes(nodes(&[("a", true), ("b", false), ("c", false)]));
        assert_eq!(play(&mut state, 20..40), [31], "nothing has changed");
        state.note_nodes(nodes(&[("a", true), ("b", true), ("c", false)]));
        assert_eq!(play(&mut state, 40..45), [40, 41, 43], "a node is back");
        state.note_nodes(nodes(&[("a", false), ("b", true), ("c", false)]));
        assert_eq!(play(&mut state, 45..46), [0; 0], "nothing waits for a node that goes away");
        state.note_nodes(nodes(&[("a", false), ("b", true)]));
        assert_eq!(play(&mut state, 46..47), [46], "a node has left the list");
    }

    #[test]
    fn nothing_is_deferred_before_the_first_count_or_over_the_limit() {
        let counts = [None, Some(0), Some(MAX_DEFERRED - 1), Some(MAX_DEFERRED)];
        assert_eq!(counts.map(has_room), [false, true, true, false]);
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
        state.note_waiting(Some(vec!["a".parse().unwrap()]));
        assert_eq!(state.live_waiting, BTreeSet::new(), "it is away");
        state.note_tried_up_to("d/1".into());
        state.note_nodes(nodes(&[("a", true)]));
        assert_eq!(state.after.as_deref(), Some("d/1"), "the pass goes on where it stopped");
        state.note_waiting(None);
        state.end_pass(5 * SECOND, SECOND);
        assert_eq!((state.after.as_deref(), state.due), (None, Duration::ZERO));
    }
}
