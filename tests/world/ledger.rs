//! What each step of a job may hold now, by what its saves and removals answered: the reference that a cluster is compared with.
//!
//! An operation that failed may have happened, not have happened, or happen later: the ledger keeps all that is possible. Saves and
//! removals of one step come one after the other; restores come at any time.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use rapidraid::client::ClientError;
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Disk, MemoryDisk};

use super::read_file;

/// Name and bytes of each shard.
pub type Shards = Vec<(String, Bytes)>;

/// What a step may be: a version that was saved, or nothing.
pub type Possible = BTreeSet<Option<usize>>;

/// A removal under way.
pub struct Removal {
    /// What the step could be before.
    pub before: Possible,
    /// How many versions there were.
    versions: usize,
    /// Which one of the step's removals it is.
    removals: usize,
}

#[derive(Default)]
pub struct Ledger {
    steps: BTreeMap<u64, Entry>,
}

struct Entry {
    versions: Vec<Shards>,
    /// One of these, as far as ended operations say.
    settled: Possible,
    /// Saves under way, and saves that failed: they may be decided yet.
    pending: BTreeSet<usize>,
    /// Versions that removals which failed may have named: they may happen yet, also when the request comes again much later.
    may_go: BTreeSet<usize>,
    /// Removals that were begun.
    removals: usize,
    /// Versions that were reported to be archived.
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

    /// The steps that were ever saved.
    pub fn steps(&self) -> Vec<u64> {
        self.steps.keys().copied().collect()
    }

    pub fn possible(&mut self, step: u64) -> Possible {
        self.entry(step).possible()
    }

    /// The one version that the step can be.
    pub fn certain(&mut self, step: u64) -> Option<usize> {
        let possible = self.possible(step);
        let mut possible = possible.into_iter();
        possible.next().flatten().filter(|_| possible.next().is_none())
    }

    /// What a version is.
    pub fn shards(&self, step: u64, version: usize) -> &Shards {
        &self.steps[&step].versions[version]
    }

    /// No save is under way, or may be.
    pub fn is_quiet(&mut self, step: u64) -> bool {
        self.entry(step).pending.is_empty()
    }

    /// All stripes of a version are archived, and their replicas dropped.
    pub fn archived(&mut self, step: u64, version: usize) {
        self.entry(step).archived.insert(version);
    }

    pub fn is_archived(&mut self, step: u64, version: usize) -> bool {
        self.entry(step).archived.contains(&version)
    }

    /// How many versions of a step there are.
    pub fn versions(&mut self, step: u64) -> usize {
        self.entry(step).versions.len()
    }

    /// A save begins. Gives its version.
    pub fn save(&mut self, step: u64, shards: Shards) -> usize {
        let entry = self.entry(step);
        let version = entry.versions.len();
        entry.versions.push(shards);
        entry.pending.insert(version);
        version
    }

    /// A save has ended.
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

    /// A removal begins.
    pub fn remove(&mut self, step: u64) -> Removal {
        let entry = self.entry(step);
        let before = entry.possible();
        entry.settled.insert(None);
        entry.removals += 1;
        Removal { before, versions: entry.versions.len(), removals: entry.removals }
    }

    /// A removal has ended.
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

    /// Which version a restore gave, if it was one.
    pub fn version_of(&mut self, step: u64, out: &MemoryDisk) -> Option<usize> {
        let is = |shards: &Shards| {
            shards.len() == files(out) && shards.iter().all(|(name, bytes)| has(out, name, bytes))
        };
        self.entry(step).versions.iter().position(is)
    }

    /// The cluster has come to rest: the step is `found` for good.
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
