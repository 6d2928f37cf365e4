//! The state that the readers of one restore share: the nodes, and the known faults of nodes and
//! files.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::file_probe::HeldFiles;
use super::read_cursor::ReadCursor;
use crate::entropy::Entropy;
use crate::format::file::FileName;
use crate::format::grain_set::GrainSet;
use crate::id::{NodeId, StripeId};
use crate::net::call::Caller;
use crate::pipeline::busy_retry::BusyRetry;
use crate::topology::Directory;
use crate::workers::Workers;

/// Maximum number of bad files that one restore remembers. In a cluster with more of them, avoiding
/// bad files no longer helps.
pub(super) const MAX_BAD_FILES: usize = 65_536;

/// A source that delivers each grain within this time (about 1 MB/s) is never slow. If the average
/// time for a grain is long, because the reader's own link is slow, the limit is [`SLOW_FACTOR`]
/// times that average.
const SLOW_PACE: Duration = Duration::from_millis(64);
/// A source is slow only if a grain takes more than this many times the average time.
const SLOW_FACTOR: u32 = 4;
/// With each grain, the average moves towards the new wait by one part in this number of the
/// difference.
const WAITS_KEPT: u64 = 16;
/// How long a node is not asked again after it failed to list its files within the longest limit. A
/// restore has thousands of stripes and must not wait for the node in each of them.
const UNREACHED_LIMIT: Duration = Duration::from_secs(10);

/// A file of a stripe on a node.
pub(super) type NodeFileKey = (StripeId, NodeId, FileName);

/// The damaged grains of the files of a stripe, by node and file.
pub(super) type StripeDamage = BTreeMap<(NodeId, FileName), GrainSet>;

/// The state that the readers of one operation share: a restore, a verification, or the mending of
/// a block.
pub struct ReadSession {
    /// The client for calls to nodes.
    pub caller: Arc<Caller>,
    /// The workers that verify and decode.
    pub workers: Workers,
    /// The source of the random pauses that keep readers apart that wait for the same node.
    pub entropy: Arc<dyn Entropy>,
    /// The nodes.
    pub directory: Directory,
    /// The faults that the restore survived, for its report.
    pub incidents: Mutex<Vec<String>>,
    /// The damaged grains, by file.
    pub(super) damaged: Mutex<BTreeMap<NodeFileKey, GrainSet>>,
    /// The damaged files that were reported to their nodes.
    pub(super) reported: Mutex<BTreeSet<NodeFileKey>>,
    /// The files that are not what they should be, whatever their nodes say. They are not used as
    /// sources again.
    pub(super) corrupt: Mutex<BTreeSet<NodeFileKey>>,
    /// The files that their nodes list and do not deliver. Other sources come first, however slow
    /// their nodes are.
    pub(super) unreadable: Mutex<BTreeSet<NodeFileKey>>,
    /// The nodes that gave no answer within the longest limit, and the time when that was.
    pub(super) unreached: Mutex<BTreeMap<NodeId, Duration>>,
    /// The average wait for a grain, over the latest grains, in microseconds.
    pub(super) grain_wait_us: AtomicU64,
    /// The stripes with a replica that its node listed although it was gone. A node takes a file
    /// off its list after the file is gone. So the lists mislead while replicas are dropped. From
    /// then on, reads of such a stripe prefer pieces.
    pub(super) replicas_dropping: Mutex<BTreeSet<StripeId>>,
    /// The number of files that the readers have open or are opening, by node.
    open_files: Mutex<BTreeMap<NodeId, usize>>,
}

/// A file that a reader has open or is opening. Dropping it takes the file out of the count of its
/// node.
pub(super) struct CountedFile {
    reading: Arc<ReadSession>,
    node: NodeId,
}

impl Drop for CountedFile {
    fn drop(&mut self) {
        if let Some(count) = lock(&self.reading.open_files).get_mut(&self.node) {
            *count = count.saturating_sub(1);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReadSession {
    /// Returns the session of a restore from these nodes. No faults are known yet, except for
    /// `incidents`.
    pub fn new(
        caller: Arc<Caller>,
        workers: Workers,
        entropy: Arc<dyn Entropy>,
        directory: Directory,
        incidents: Vec<String>,
    ) -> Arc<Self> {
        Arc::new(Self {
            caller,
            workers,
            entropy,
            directory,
            incidents: Mutex::new(incidents),
            damaged: Mutex::default(),
            reported: Mutex::default(),
            corrupt: Mutex::default(),
            unreadable: Mutex::default(),
            unreached: Mutex::default(),
            grain_wait_us: AtomicU64::new(0),
            replicas_dropping: Mutex::default(),
            open_files: Mutex::default(),
        })
    }

    /// Counts a file of `node` as open until the result is dropped.
    pub(super) fn count_file(self: &Arc<Self>, node: NodeId) -> CountedFile {
        *lock(&self.open_files).entry(node).or_default() += 1;
        CountedFile { reading: self.clone(), node }
    }

    /// Returns the number of files that the readers have open or are opening on a node.
    pub(super) fn open_file_count(&self, node: NodeId) -> usize {
        lock(&self.open_files).get(&node).copied().unwrap_or(0)
    }

    pub(super) fn new_cursor(&self, left: Range<u64>) -> ReadCursor {
        ReadCursor {
            left,
            deprioritized: BTreeSet::new(),
            busy: None,
            patience: self.new_busy_retry(),
        }
    }

    /// Returns a retry state for a reader that waits for a busy node.
    pub fn new_busy_retry(&self) -> BusyRetry {
        BusyRetry::new(self.caller.clock().clone(), self.entropy.clone())
    }

    pub(super) fn is_corrupt(&self, stripe: StripeId, node: NodeId, file: FileName) -> bool {
        lock(&self.corrupt).contains(&(stripe, node, file))
    }

    /// Adds the damaged grains that a node lists of a file to those that arrived damaged. The node
    /// may not have verified the file yet, so its list does not replace them.
    pub(super) fn add_damaged_grains(&self, file: NodeFileKey, grains: &GrainSet) {
        let mut damaged = lock(&self.damaged);
        let has_room = damaged.contains_key(&file) || damaged.len() < MAX_BAD_FILES;
        if has_room && !grains.is_empty() {
            let known = damaged.entry(file).or_default();
            grains.iter().for_each(|grain| known.insert(grain));
        }
    }

    /// Records that a grain arrived damaged. Returns `false` if no more files can be remembered.
    pub(super) fn try_record_damaged_grain(&self, file: NodeFileKey, grain: u64) -> bool {
        let mut damaged = lock(&self.damaged);
        let has_room = damaged.contains_key(&file) || damaged.len() < MAX_BAD_FILES;
        if has_room {
            damaged.entry(file).or_default().insert(grain);
        }
        has_room
    }

    pub(super) fn is_grain_damaged(&self, file: NodeFileKey, grain: u64) -> bool {
        lock(&self.damaged).get(&file).is_some_and(|grains| grains.contains(grain))
    }

    /// Returns the damaged grains of each file of a stripe.
    pub(super) fn damage_of_stripe(&self, stripe: StripeId) -> StripeDamage {
        let damaged = lock(&self.damaged);
        let from = (stripe, NodeId(0), FileName::Replica { block: 0 });
        let files = damaged.range(from..).take_while(|((of, ..), _)| *of == stripe);
        files.map(|(&(_, node, file), grains)| ((node, file), grains.clone())).collect()
    }

    /// Returns the number of damaged grains of a file.
    pub(super) fn damaged_grain_count(&self, file: NodeFileKey) -> usize {
        lock(&self.damaged).get(&file).map_or(0, GrainSet::len)
    }

    pub(super) fn is_dropping_replicas(&self, stripe: StripeId) -> bool {
        lock(&self.replicas_dropping).contains(&stripe)
    }

    /// Returns `held` without the files that could not be read.
    pub(super) fn without_unreadable(&self, stripe: StripeId, held: &HeldFiles) -> HeldFiles {
        let unreadable = lock(&self.unreadable);
        let is_good = |node, file| !unreadable.contains(&(stripe, node, file));
        let mut good = held.clone();
        for (node, files) in &mut good {
            files.retain(|view| is_good(*node, view.file));
        }
        good
    }

    pub(super) fn record_incident(&self, incident: String) {
        tracing::warn!("{incident}");
        let mut incidents = lock(&self.incidents);
        if incidents.len() < 1000 {
            incidents.push(incident);
        }
    }

    /// Returns the time for a grain up to which a source is not slow.
    pub(super) fn slow_threshold(&self) -> Duration {
        let mean = Duration::from_micros(self.grain_wait_us.load(Ordering::Relaxed));
        SLOW_PACE.max(mean * SLOW_FACTOR)
    }

    /// Records how long a grain was waited for. A wait far above the average counts only in part;
    /// otherwise a slow source would raise its own limit. The average is approximate: two waits
    /// recorded at once may count as one.
    pub(super) fn record_grain_wait(&self, took: Duration) {
        let took = took.as_micros() as u64;
        let mean = match self.grain_wait_us.load(Ordering::Relaxed) {
            // The first source may be a slow one, which is not known yet.
            0 => took.min((SLOW_PACE / SLOW_FACTOR).as_micros() as u64),
            mean => {
                let most = mean * u64::from(SLOW_FACTOR) + 1000;
                mean - mean / WAITS_KEPT + took.min(most) / WAITS_KEPT
            }
        };
        self.grain_wait_us.store(mean, Ordering::Relaxed);
    }

    /// Returns whether `node` may be asked: the last call that it left unanswered, if any, is
    /// longer ago than [`UNREACHED_LIMIT`].
    pub(super) fn may_be_asked(&self, node: NodeId) -> bool {
        let unreached = lock(&self.unreached);
        let now = self.caller.clock().now();
        unreached.get(&node).is_none_or(|since| now.saturating_sub(*since) > UNREACHED_LIMIT)
    }

    pub(super) fn record_unreached(&self, node: NodeId) {
        lock(&self.unreached).insert(node, self.caller.clock().now());
    }

    pub(super) fn clear_unreached(&self, node: NodeId) {
        lock(&self.unreached).remove(&node);
    }
}
