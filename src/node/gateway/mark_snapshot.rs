//! Snapshots of the nodes' commit marks, and the cache of the last one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::error::GatewayError;
use crate::format::records::Node as NodeRecord;
use crate::id::PeerName;
use crate::node::quorum::{Quorum, TooFewNodes};
use crate::wire::RemoteError;
use crate::wire::calls::MarkedSave;

/// How long a snapshot of the nodes' commit marks is kept after its collection, to serve calls that
/// waited for it and further pages of an answer.
const SNAPSHOT_LASTS: Duration = Duration::from_secs(5);

/// A snapshot of the nodes, and of the committed steps that they have marks of.
pub(super) struct MarkSnapshot {
    /// The storage nodes whose marks were read.
    pub(super) heard: Vec<NodeRecord>,
    pub(super) quorum: Quorum,
    /// The committed steps by their catalogue keys, so that they are in the catalogue's order.
    pub(super) steps: BTreeMap<String, MarkedSave>,
}

impl MarkSnapshot {
    /// Checks that every committed save and every removal is known to one of `heard`.
    ///
    /// # Errors
    /// [`GatewayError::NoQuorum`] with the nodes that are missing or behind.
    pub(super) fn check_quorum(&self, heard: &[NodeRecord]) -> Result<(), RemoteError> {
        self.check_quorum_without(heard, &BTreeSet::new())
            .map_err(|too_few| GatewayError::NoQuorum { reason: too_few.to_string() }.into())
    }

    /// Checks `heard` like [`check_quorum`](Self::check_quorum), but counts the nodes of `excluded`
    /// as missing.
    pub(super) fn check_quorum_without(
        &self,
        heard: &[NodeRecord],
        excluded: &BTreeSet<PeerName>,
    ) -> Result<(), TooFewNodes> {
        let names: BTreeSet<&PeerName> = heard.iter().map(|node| &node.name).collect();
        self.quorum.check_enough_heard(|name| names.contains(name) && !excluded.contains(name))
    }
}

/// The place at which a page ends and the next one begins.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cursor {
    /// A page of a list of steps ends with the step that has this catalogue key.
    Steps(String),
    /// A page has some shards of the step that has this catalogue key. The snapshot serves all
    /// further shards of that step.
    Shards(String),
}

/// How recent a snapshot must be to answer a call.
#[derive(Clone)]
pub(super) struct Freshness {
    /// The time at which the call arrived. A snapshot whose collection began later has every save
    /// whose commit was reported before the call, and no save whose removal was reported before the
    /// call.
    pub(super) asked_at: Duration,
    /// The cursor of a call for a further page. The snapshot that gave the page before serves this
    /// call, too.
    pub(super) cursor: Option<Cursor>,
}

/// The last snapshot.
#[derive(Default)]
pub(super) struct SnapshotCache {
    last: Mutex<Option<CachedSnapshot>>,
    /// Held by the task that collects a snapshot. The others wait for its result.
    pub(super) collecting: tokio::sync::Mutex<()>,
}

/// The result of a collection, the times at which it began and ended, and the number of times that
/// a catalogue had answered before it began.
pub(super) struct CachedSnapshot {
    pub(super) started_at: Duration,
    pub(super) ended_at: Duration,
    pub(super) catalogue_answers: u64,
    pub(super) result: Result<Arc<MarkSnapshot>, RemoteError>,
    /// The ends of the pages that were answered from this snapshot.
    pub(super) cursors: BTreeSet<Cursor>,
}

impl SnapshotCache {
    /// Returns the result of the last collection if it is recent enough: it began after the call
    /// arrived, or it gave the page before and no catalogue has answered since. `catalogue_answers`
    /// is the number of times that a catalogue has answered by `now`.
    pub(super) fn get(
        &self,
        freshness: &Freshness,
        now: Duration,
        catalogue_answers: u64,
    ) -> Option<Result<Arc<MarkSnapshot>, RemoteError>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.take_if(|cached| now >= cached.ended_at.saturating_add(SNAPSHOT_LASTS));
        let cached = last.as_ref()?;
        let gave_page_before = || {
            cached.catalogue_answers == catalogue_answers
                && freshness.cursor.as_ref().is_some_and(|cursor| cached.cursors.contains(cursor))
        };
        (cached.started_at > freshness.asked_at || gave_page_before())
            .then(|| cached.result.clone())
    }

    /// Replaces the result of the last collection.
    pub(super) fn put(&self, collected: CachedSnapshot) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(collected);
    }

    /// Records that a page answered from `snapshot` ends at `cursor`.
    pub(super) fn add_cursor(&self, snapshot: &Arc<MarkSnapshot>, cursor: Cursor) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cached) = &mut *last
            && cached.result.as_ref().is_ok_and(|held| Arc::ptr_eq(held, snapshot))
        {
            cached.cursors.insert(cursor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn asked(seconds: u64, cursor: Option<&str>) -> Freshness {
        let cursor = cursor.map(|key| Cursor::Steps(key.to_owned()));
        Freshness { asked_at: at(seconds), cursor }
    }

    /// A cache whose snapshot was collected from 10 s to 12 s, after one answer of the catalogue.
    fn cache() -> (SnapshotCache, Arc<MarkSnapshot>) {
        let quorum = Quorum::new(&[], &[]);
        let snapshot = Arc::new(MarkSnapshot { heard: Vec::new(), quorum, steps: BTreeMap::new() });
        let cache = SnapshotCache::default();
        cache.put(CachedSnapshot {
            started_at: at(10),
            ended_at: at(12),
            catalogue_answers: 1,
            result: Ok(snapshot.clone()),
            cursors: BTreeSet::new(),
        });
        (cache, snapshot)
    }

    #[test]
    fn a_snapshot_serves_the_calls_that_arrived_before_it_began() {
        let (cache, _) = cache();
        assert!(cache.get(&asked(9, None), at(12), 1).is_some());
        assert!(cache.get(&asked(9, None), at(12), 2).is_some());
        for later in [10, 11, 12] {
            assert!(cache.get(&asked(later, None), at(12), 1).is_none(), "{later}");
        }
    }

    #[test]
    fn a_snapshot_serves_the_page_after_one_that_it_gave() {
        let (cache, snapshot) = cache();
        assert!(cache.get(&asked(13, Some("a")), at(13), 1).is_none());
        cache.add_cursor(&snapshot, Cursor::Steps("a".to_owned()));
        assert!(cache.get(&asked(13, Some("a")), at(13), 1).is_some());
        assert!(cache.get(&asked(13, Some("b")), at(13), 1).is_none());
        let shards = Freshness { asked_at: at(13), cursor: Some(Cursor::Shards("a".to_owned())) };
        assert!(cache.get(&shards, at(13), 1).is_none());
        // A catalogue has answered since.
        assert!(cache.get(&asked(13, Some("a")), at(13), 2).is_none());
        assert!(cache.get(&asked(13, Some("a")), at(17), 1).is_none());
    }
}
