//! What each step may be, by what the commands about it reported: the reference that restores are compared with. One client works
//! on a step, one command after the other; anybody restores it.
//!
//! A save that failed may be decided yet, until another save of the step succeeds. A removal that failed may happen at any later time.

use std::collections::{BTreeMap, BTreeSet};

/// The version that a step has, or none.
pub type Is = Option<u64>;
/// A job and a step's number.
pub type Name = (String, u64);

#[derive(Debug, Default, Clone)]
struct Entry {
    /// One of these, as far as commands have ended.
    settled: BTreeSet<Is>,
    /// Saves under way, and those that failed.
    pending: BTreeSet<u64>,
    /// A removal is under way or has failed.
    may_go: bool,
    /// It was removed, or was not there to be: its client leaves it alone from then on.
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

/// All steps that were ever saved. Versions are numbers that grow.
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

    /// The steps of a job that its client still works on.
    pub fn alive(&self, job: &str) -> Vec<Name> {
        let alive = self.steps.iter().filter(|(name, entry)| name.0 == job && !entry.is_over);
        alive.map(|(name, _)| name.clone()).collect()
    }

    /// Nothing that failed can change it any more.
    pub fn is_certain(&self, name: &Name) -> bool {
        self.possible(name).len() == 1
    }

    pub fn is_archived(&self, name: &Name, version: u64) -> bool {
        self.steps.get(name).is_some_and(|entry| entry.archived == Some(version))
    }

    /// A save begins. Gives its version.
    pub fn save(&mut self, name: &Name) -> u64 {
        self.versions += 1;
        let new = || Entry { settled: BTreeSet::from([None]), ..Entry::default() };
        self.steps.entry(name.clone()).or_insert_with(new).pending.insert(self.versions);
        self.versions
    }

    /// A save was reported to be committed.
    pub fn saved(&mut self, name: &Name, version: u64, replace: bool) {
        let entry = self.steps.get_mut(name).unwrap();
        entry.pending.remove(&version);
        let is_free = replace || entry.possible().contains(&None);
        assert!(is_free, "{name:?} was saved over without --replace");
        (entry.settled, entry.archived) = (BTreeSet::from([Some(version)]), None);
        entry.pending.clear();
    }

    /// An archiving was reported to have left no replica of what the step is.
    pub fn archived(&mut self, name: &Name) {
        let possible = self.possible(name);
        let only = possible.iter().next().copied().flatten().filter(|_| possible.len() == 1);
        self.steps.get_mut(name).unwrap().archived = only;
    }

    /// A removal begins.
    pub fn remove(&mut self, name: &Name) {
        self.steps.get_mut(name).unwrap().may_go = true;
    }

    /// A removal was reported to be done, or found nothing.
    pub fn removed(&mut self, name: &Name) {
        let entry = self.steps.get_mut(name).unwrap();
        // What was decided and not yet visible is not removed with it.
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
