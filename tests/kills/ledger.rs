//! The reference model of a storm: the versions that each step may have, derived from the outcomes
//! that commands reported. Restores are compared with it. A single client works on a step, one
//! command after the other; any client restores it.
//!
//! A failed save may still be decided until another save of the step succeeds. A failed removal may
//! take effect at any later time.

use std::collections::{BTreeMap, BTreeSet};

/// The version of a step, or none if the step does not exist.
pub type Is = Option<u64>;
/// A job's name and a step's number.
pub type Name = (String, u64);

#[derive(Debug, Default, Clone)]
struct Entry {
    /// Versions of which the step has exactly one, as far as the commands that ended determine it.
    settled: BTreeSet<Is>,
    /// Versions of saves that are under way or have failed.
    pending: BTreeSet<u64>,
    /// Whether a removal is under way or has failed.
    may_go: bool,
    /// Whether the step was removed or found missing. Its client no longer works on it.
    is_over: bool,
    /// The version whose archiving was reported to have left no replica.
    archived: Option<u64>,
}

impl Entry {
    fn possible(&self) -> BTreeSet<Is> {
        let pending = self.pending.iter().copied().map(Some);
        self.settled.iter().copied().chain(pending).chain(self.may_go.then_some(None)).collect()
    }
}

/// All steps that were ever saved. Version numbers increase across all steps.
#[derive(Debug, Default)]
pub struct Ledger {
    steps: BTreeMap<Name, Entry>,
    versions: u64,
}

impl Ledger {
    pub fn names(&self) -> Vec<Name> {
        self.steps.keys().cloned().collect()
    }

    pub fn possible(&self, name: &Name) -> BTreeSet<Is> {
        self.steps.get(name).map_or_else(|| BTreeSet::from([None]), Entry::possible)
    }

    /// Returns the steps of a job that its client still works on.
    pub fn alive(&self, job: &str) -> Vec<Name> {
        let alive = self.steps.iter().filter(|(name, entry)| name.0 == job && !entry.is_over);
        alive.map(|(name, _)| name.clone()).collect()
    }

    /// Returns whether exactly one outcome is possible, so that no failed command can change the
    /// step any more.
    pub fn is_certain(&self, name: &Name) -> bool {
        self.possible(name).len() == 1
    }

    pub fn is_archived(&self, name: &Name, version: u64) -> bool {
        self.steps.get(name).is_some_and(|entry| entry.archived == Some(version))
    }

    /// Records that a save begins. Returns the version of the save.
    pub fn save(&mut self, name: &Name) -> u64 {
        self.versions += 1;
        let new = || Entry { settled: BTreeSet::from([None]), ..Entry::default() };
        self.steps.entry(name.clone()).or_insert_with(new).pending.insert(self.versions);
        self.versions
    }

    /// Records that a save was reported as committed. Panics if the save replaced a committed step
    /// without `--replace`.
    pub fn saved(&mut self, name: &Name, version: u64, replace: bool) {
        let entry = self.steps.get_mut(name).unwrap();
        entry.pending.remove(&version);
        let is_free = replace || entry.possible().contains(&None);
        assert!(is_free, "{name:?} was saved over without --replace");
        (entry.settled, entry.archived) = (BTreeSet::from([Some(version)]), None);
        entry.pending.clear();
    }

    /// Records that an archiving reported that it left no replica of the step. Marks the step's
    /// version as archived if it is the only possible one.
    pub fn archived(&mut self, name: &Name) {
        let possible = self.possible(name);
        let only = possible.iter().next().copied().flatten().filter(|_| possible.len() == 1);
        self.steps.get_mut(name).unwrap().archived = only;
    }

    /// Records that a removal begins.
    pub fn remove(&mut self, name: &Name) {
        self.steps.get_mut(name).unwrap().may_go = true;
    }

    /// Records that a removal succeeded or found no step.
    pub fn removed(&mut self, name: &Name) {
        let entry = self.steps.get_mut(name).unwrap();
        // `pending` stays: the removal does not affect a save that is decided and not yet visible.
        (entry.settled, entry.may_go, entry.is_over) = (BTreeSet::from([None]), false, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_may_have_happened_and_what_succeeded_has() {
        let (mut ledger, name) = (Ledger::default(), ("j".to_owned(), 1));
        let is = |of: &[Is]| BTreeSet::from_iter(of.iter().copied());
        let first = ledger.save(&name);
        assert_eq!(ledger.possible(&name), is(&[None, Some(first)]));
        ledger.saved(&name, first, false);
        assert_eq!(ledger.possible(&name), is(&[Some(first)]));
        let second = ledger.save(&name);
        assert_eq!(ledger.possible(&name), is(&[Some(first), Some(second)]));
        let third = ledger.save(&name);
        ledger.saved(&name, third, true);
        assert_eq!(ledger.possible(&name), is(&[Some(third)]));
        ledger.remove(&name);
        assert_eq!(ledger.possible(&name), is(&[None, Some(third)]));
        ledger.removed(&name);
        assert!(ledger.is_certain(&name));
    }
}
