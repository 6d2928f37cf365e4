//! What the readers of one restore share: whom they reach, and what they have learned of nodes and files.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::probe::HeldFiles;
use super::reader::ReadCursor;
use crate::entropy::Entropy;
use crate::format::file::FileName;
use crate::format::grain_set::GrainSet;
use crate::id::{NodeId, StripeId};
use crate::net::call::Caller;
use crate::pipeline::busy_retry::BusyRetry;
use crate::topology::Directory;
use crate::workers::Workers;

/// Bad files that one restore remembers; a cluster with more is past reading around them.
pub(super) const MAX_BAD_FILES: usize = 65_536;

/// The time in which the slowest source that nobody minds gives a grain while it is waited for: 1 MB/s. Where all are slow, because the
/// reader's own link is, it is [`SLOW_FACTOR`] times what they take on average.
const SLOW_PACE: Duration = Duration::from_millis(64);
/// A source is not slow before it takes so many times what the others take.
const SLOW_FACTOR: u32 = 4;
/// How many of the latest grains the average is over.
const WAITS_KEPT: u64 = 16;
/// Whoever did not answer within the longest limit for its list is not waited for again before this has passed: a restore has thousands of stripes.
const UNREACHED_LIMIT: Duration = Duration::from_secs(10);

/// A file that is not what its node says.
pub(super) type BadFile = (StripeId, NodeId, FileName);

/// The damaged grains of files of a stripe.
pub(super) type DamageOf = BTreeMap<(NodeId, FileName), GrainSet>;

/// What readers of one restore share.
pub struct ReadSession {
    /// Calls to nodes.
    pub caller: Arc<Caller>,
    /// Verifying and decoding.
    pub workers: Workers,
    /// Tells readers apart that wait for the same node.
    pub entropy: Arc<dyn Entropy>,
    /// The nodes.
    pub directory: Directory,
    /// What went wrong and was survived, for the report.
    pub incidents: Mutex<Vec<String>>,
    /// Grains that are damaged in a file.
    pub(super) damaged: Mutex<BTreeMap<BadFile, GrainSet>>,
    /// Damaged files whose nodes were told.
    pub(super) reported: Mutex<BTreeSet<BadFile>>,
    /// Files that are not what they should be, whatever their nodes say: no further way leads over them.
    pub(super) corrupt: Mutex<BTreeSet<BadFile>>,
    /// Files that their nodes list and do not give: a way over others comes first, however slow their nodes are.
    pub(super) unreadable: Mutex<BTreeSet<BadFile>>,
    /// Nodes that gave no answer though they were waited for, and when that was.
    pub(super) unreached: Mutex<BTreeMap<NodeId, Duration>>,
    /// How long a source is waited for until a grain is there, on average of the latest, in microseconds.
    pub(super) grain_wait_us: AtomicU64,
    /// Stripes of which a replica was gone though its node has it on its list. A node takes a file off its list after the file is gone, so
    /// that while replicas are dropped their lists lead nowhere: pieces come first from now on.
    pub(super) replicas_dropping: Mutex<BTreeSet<StripeId>>,
}

pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReadSession {
    /// A restore over these nodes that has met nothing yet, but for `incidents`.
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
        })
    }

    pub(super) fn cursor(&self, left: Range<u64>) -> ReadCursor {
        ReadCursor { left, passed: BTreeSet::new(), busy: None, patience: self.busy_retry() }
    }

    /// For one that waits for a busy node.
    pub fn busy_retry(&self) -> BusyRetry {
        BusyRetry::new(self.caller.clock().clone(), self.entropy.clone())
    }

    pub(super) fn is_corrupt(&self, stripe: StripeId, node: NodeId, file: FileName) -> bool {
        lock(&self.corrupt).contains(&(stripe, node, file))
    }

    /// Adds the damaged grains that a node lists of a file to those that came damaged: it may not have looked yet.
    pub(super) fn add_damaged(&self, file: BadFile, grains: &GrainSet) {
        let mut damaged = lock(&self.damaged);
        let has_room = damaged.contains_key(&file) || damaged.len() < MAX_BAD_FILES;
        if has_room && !grains.is_empty() {
            let known = damaged.entry(file).or_default();
            grains.iter().for_each(|grain| known.insert(grain));
        }
    }

    /// Notes that a grain came damaged; `false` when no more can be remembered.
    pub(super) fn record_damaged_grain(&self, file: BadFile, grain: u64) -> bool {
        let mut damaged = lock(&self.damaged);
        let has_room = damaged.contains_key(&file) || damaged.len() < MAX_BAD_FILES;
        if has_room {
            damaged.entry(file).or_default().insert(grain);
        }
        has_room
    }

    pub(super) fn is_damaged(&self, file: BadFile, grain: u64) -> bool {
        lock(&self.damaged).get(&file).is_some_and(|grains| grains.contains(grain))
    }

    /// The damaged grains of each file of a stripe.
    pub(super) fn damage_of(&self, stripe: StripeId) -> DamageOf {
        let damaged = lock(&self.damaged);
        let from = (stripe, NodeId(0), FileName::Replica { block: 0 });
        let files = damaged.range(from..).take_while(|((of, ..), _)| *of == stripe);
        files.map(|(&(_, node, file), grains)| ((node, file), grains.clone())).collect()
    }

    /// How many grains of a file are damaged.
    pub(super) fn damaged_count(&self, file: BadFile) -> usize {
        lock(&self.damaged).get(&file).map_or(0, GrainSet::len)
    }

    pub(super) fn is_dropping(&self, stripe: StripeId) -> bool {
        lock(&self.replicas_dropping).contains(&stripe)
    }

    /// What of `held` has not failed to be read.
    pub(super) fn readable(&self, stripe: StripeId, held: &HeldFiles) -> HeldFiles {
        let unreadable = lock(&self.unreadable);
        let is_good = |node, file| !unreadable.contains(&(stripe, node, file));
        let mut good = held.clone();
        for (node, files) in &mut good {
            files.retain(|view| is_good(*node, view.file));
        }
        good
    }

    pub(super) fn note(&self, incident: String) {
        tracing::warn!("{incident}");
        let mut incidents = lock(&self.incidents);
        if incidents.len() < 1000 {
            incidents.push(incident);
        }
    }

    /// The time for a grain that makes no source slow.
    pub(super) fn slow_threshold(&self) -> Duration {
        let mean = Duration::from_micros(self.grain_wait_us.load(Ordering::Relaxed));
        SLOW_PACE.max(mean * SLOW_FACTOR)
    }

    /// A grain was waited for so long. One that is much later than the others hardly counts, or a slow source would excuse itself.
    /// Approximate: two at once may count as one.
    pub(super) fn record_wait(&self, took: Duration) {
        let took = took.as_micros() as u64;
        let mean = match self.grain_wait_us.load(Ordering::Relaxed) {
            // It is not known yet whether the first is one of the slow.
            0 => took.min((SLOW_PACE / SLOW_FACTOR).as_micros() as u64),
            mean => {
                let most = mean * u64::from(SLOW_FACTOR) + 1000;
                mean - mean / WAITS_KEPT + took.min(most) / WAITS_KEPT
            }
        };
        self.grain_wait_us.store(mean, Ordering::Relaxed);
    }

    pub(super) fn is_in_backoff(&self, node: NodeId) -> bool {
        let unreached = lock(&self.unreached);
        let now = self.caller.clock().now();
        unreached.get(&node).is_none_or(|since| now.saturating_sub(*since) > UNREACHED_LIMIT)
    }

    pub(super) fn record_timeout(&self, node: NodeId) {
        lock(&self.unreached).insert(node, self.caller.clock().now());
    }

    pub(super) fn record_answer(&self, node: NodeId) {
        lock(&self.unreached).remove(&node);
    }
}
