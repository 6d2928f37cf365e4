//! The reference model of a job's steps: the contents that each step may have, derived from the
//! results of its saves and removals. Tests compare the cluster with it.
//!
//! A failed operation may have happened, may not have happened, or may still happen, so the ledger
//! keeps all possible contents. Saves and removals of one step run one after the other; restores
//! run at any time.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use rapidraid::client::ClientError;
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Disk, MemoryDisk};

use super::read_file;

/// The name and the bytes of each shard.
pub type Shards = Vec<(String, Bytes)>;

/// The possible contents of a step: the number of a saved version, or nothing.
pub type Possible = BTreeSet<Option<usize>>;

/// A removal in progress.
pub struct Removal {
    /// The possible contents of the step before the removal.
    pub before: Possible,
    /// Number of versions of the step when the removal began.
    versions: usize,
    /// Number of the removal among the step's removals.
    removals: usize,
}

#[derive(Default)]
pub struct Ledger {
    steps: BTreeMap<u64, Entry>,
}

struct Entry {
    versions: Vec<Shards>,
    /// The possible contents according to the operations that ended.
    settled: Possible,
    /// Saves in progress and failed saves: they may still be decided.
    pending: BTreeSet<usize>,
    /// Versions that failed removals may have named. Such a removal may still happen, even much
    /// later, when its request arrives again.
    may_go: BTreeSet<usize>,
    /// Number of removals begun.
    removals: usize,
    /// Versions that were reported as archived.
    archived: BTreeSet<usize>,
}

impl Default for Entry {
    fn default() -> Self {
        let settled = Possible::from([None]);
        Self {
            versions: Vec::new(),
            settled,
            pending: BTreeSet::new(),
            may_go: BTreeSet::new(),
            removals: 0,
            archived: BTreeSet::new(),
        }
    }
}

impl Entry {
    fn possible(&self) -> Possible {
        let pending = self.pending.iter().copied().map(Some);
        let gone = (!self.may_go.is_empty()).then_some(None);
        self.settled.iter().copied().chain(pending).chain(gone).collect()
    }
}

impl Ledger {
    fn entry(&mut self, step: u64) -> &mut Entry {
        self.steps.entry(step).or_default()
    }

    /// Returns the steps that have an entry, in ascending order.
    pub fn steps(&self) -> Vec<u64> {
        self.steps.keys().copied().collect()
    }

    pub fn possible(&mut self, step: u64) -> Possible {
        self.entry(step).possible()
    }

    /// Returns the version of the step if the step can have only one, and cannot be absent.
    pub fn certain(&mut self, step: u64) -> Option<usize> {
        let possible = self.possible(step);
        let mut possible = possible.into_iter();
        possible.next().flatten().filter(|_| possible.next().is_none())
    }

    /// Returns the shards of a version.
    pub fn shards(&self, step: u64, version: usize) -> &Shards {
        &self.steps[&step].versions[version]
    }

    /// Returns whether no save of the step is in progress and no failed save may still be decided.
    pub fn is_quiet(&mut self, step: u64) -> bool {
        self.entry(step).pending.is_empty()
    }

    /// Records that all stripes of a version are archived and their replicas dropped.
    pub fn archived(&mut self, step: u64, version: usize) {
        self.entry(step).archived.insert(version);
    }

    pub fn is_archived(&mut self, step: u64, version: usize) -> bool {
        self.entry(step).archived.contains(&version)
    }

    /// Returns the number of versions of a step.
    pub fn versions(&mut self, step: u64) -> usize {
        self.entry(step).versions.len()
    }

    /// Records the start of a save. Returns the number of its version.
    pub fn save(&mut self, step: u64, shards: Shards) -> usize {
        let entry = self.entry(step);
        let version = entry.versions.len();
        entry.versions.push(shards);
        entry.pending.insert(version);
        version
    }

    /// Records the result of a save.
    pub fn saved<T>(
        &mut self,
        step: u64,
        version: usize,
        replace: bool,
        ended: &Result<T, ClientError>,
    ) {
        let entry = self.entry(step);
        if ended.is_err() {
            return;
        }
        entry.pending.remove(&version);
        let free = replace || entry.possible().contains(&None);
        assert!(free, "step {step} was saved over without --replace");
        entry.settled = Possible::from([Some(version)]);
        entry.pending.clear();
        entry.may_go.retain(|named| *named == version);
    }

    /// Records the start of a removal. Returns the removal in progress.
    pub fn remove(&mut self, step: u64) -> Removal {
        let entry = self.entry(step);
        let before = entry.possible();
        entry.settled.insert(None);
        entry.removals += 1;
        Removal { before, versions: entry.versions.len(), removals: entry.removals }
    }

    /// Records the result of a removal.
    pub fn removed<T>(&mut self, step: u64, begun: &Removal, ended: &Result<T, ClientError>) {
        let entry = self.entry(step);
        match ended {
            Ok(_) => entry.settled = Possible::from([None]),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let is_alone = entry.removals == begun.removals;
                assert!(
                    begun.before.contains(&None) || !is_alone,
                    "step {step} is not there: {error}"
                );
                entry.settled = Possible::from([None]);
            }
            Err(error) if error.kind() == ErrorKind::Fenced => {
                let is_anew = entry.versions.len() > 1 || !entry.pending.is_empty();
                assert!(is_anew, "step {step} was never saved anew: {error}");
                if !begun.before.contains(&None) && entry.removals == begun.removals {
                    entry.settled.remove(&None);
                }
            }
            Err(_) => {
                let before = begun.before.iter().copied().flatten();
                entry.may_go.extend(before.chain(begun.versions..entry.versions.len()));
            }
        }
    }

    /// Returns the version that a restore wrote to `out`, if it is a version of the step.
    pub fn version_of(&mut self, step: u64, out: &MemoryDisk) -> Option<usize> {
        let is = |shards: &Shards| {
            shards.len() == files(out) && shards.iter().all(|(name, bytes)| has(out, name, bytes))
        };
        self.entry(step).versions.iter().position(is)
    }

    /// Records that the cluster is idle and that the content of the step is `found` for good.
    /// Panics if that content is impossible.
    pub fn settle(&mut self, step: u64, found: Option<usize>) {
        let possible = self.possible(step);
        assert!(possible.contains(&found), "step {step} is {found:?}, can only be {possible:?}");
        let entry = self.entry(step);
        entry.settled = Possible::from([found]);
        entry.may_go.retain(|named| found == Some(*named));
        entry.pending.clear();
    }
}

fn files(disk: &MemoryDisk) -> usize {
    super::look::files_below(disk, "").len()
}

fn has(disk: &MemoryDisk, name: &str, bytes: &Bytes) -> bool {
    disk.open(name).is_ok() && read_file(disk, name) == *bytes
}
