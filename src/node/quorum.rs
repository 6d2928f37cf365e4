//! The check whether the nodes that answered are enough to know what is committed and what was
//! removed (docs/semantics.md, 2).

use std::collections::BTreeMap;
use std::fmt;

use crate::format::records::{Node as NodeRecord, Standing};
use crate::id::{Epoch, PeerName};
use crate::wire::calls::{HelloAnswer, StandingAnswer};

/// Returns the smallest number that is more than half of `nodes`.
pub(super) fn majority(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// The storage nodes of a cluster, and the standing of each node that answered.
#[derive(Debug)]
pub(super) struct Quorum {
    storage: Vec<PeerName>,
    standings: BTreeMap<PeerName, Standing>,
    /// The bound for clusters with data folders from before catch-up records existed: the number of
    /// nodes that may be missing while too few nodes have caught up (docs/semantics.md, 2).
    max_missing: usize,
}

/// The report that too few nodes were heard.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooFewNodes {
    storage: usize,
    max_missing: usize,
    caught_up: usize,
    silent: Vec<PeerName>,
    behind: Vec<PeerName>,
}

impl Quorum {
    /// Creates a quorum from the lists that the nodes have. `members` are all known nodes;
    /// `answers` come from the storage nodes among them. A node that is not on the latest list was
    /// taken off it, and knows only what it knew then: it counts as behind.
    pub(super) fn new(members: &[NodeRecord], answers: &[(NodeRecord, StandingAnswer)]) -> Self {
        Self::from_answers(members, answers, |name| is_on_latest_list(answers, name))
    }

    /// Creates a quorum from `nodes`, the list that the catalogue has.
    pub(super) fn from_catalogue_list(
        nodes: &[NodeRecord],
        answers: &[(NodeRecord, StandingAnswer)],
    ) -> Self {
        Self::from_answers(nodes, answers, |_| true)
    }

    fn from_answers(
        members: &[NodeRecord],
        answers: &[(NodeRecord, StandingAnswer)],
        is_listed: impl Fn(&PeerName) -> bool,
    ) -> Self {
        let standing = |(node, answer): &(NodeRecord, StandingAnswer)| {
            let standing = match answer.standing {
                Standing::CaughtUp if !is_listed(&node.name) => Standing::Behind,
                standing => standing,
            };
            (node.name.clone(), standing)
        };
        let storage = members.iter().filter(|node| node.storage);
        Self {
            storage: storage.map(|node| node.name.clone()).collect(),
            standings: answers.iter().map(standing).collect(),
            max_missing: 0,
        }
    }

    /// Sets the number of nodes that may be missing while too few have caught up. `codes` are the
    /// configured codes, and those that were found.
    pub(super) fn set_max_missing(&mut self, codes: impl IntoIterator<Item = (u8, u8)>) {
        self.max_missing = tolerated_losses(codes);
    }

    /// Returns whether no storage node is known.
    pub(super) fn has_no_storage_nodes(&self) -> bool {
        self.storage.is_empty()
    }

    /// Checks that every committed save and every removal is known to at least one of the nodes
    /// for which `is_heard` returns true.
    ///
    /// # Errors
    /// [`TooFewNodes`] if a committed save or a removal could be unknown to all of them.
    pub(super) fn check_enough_heard(
        &self,
        is_heard: impl Fn(&PeerName) -> bool,
    ) -> Result<(), TooFewNodes> {
        let standing =
            |name: &PeerName| self.standings.get(name).filter(|_| is_heard(name)).copied();
        let mut too_few = TooFewNodes {
            storage: self.storage.len(),
            // The bound is always less than half of the nodes, whatever the codes: another rebuild
            // may reach the other half.
            max_missing: self.max_missing.min(self.storage.len().saturating_sub(1) / 2),
            caught_up: 0,
            silent: Vec::new(),
            behind: Vec::new(),
        };
        for name in &self.storage {
            match standing(name) {
                Some(Standing::CaughtUp) => too_few.caught_up += 1,
                Some(Standing::Unknown) => {}
                Some(Standing::Behind) => too_few.behind.push(name.clone()),
                None => too_few.silent.push(name.clone()),
            }
        }
        let missing = too_few.silent.len() + too_few.behind.len();
        match too_few.caught_up >= majority(self.storage.len()) || missing <= too_few.max_missing {
            true => Ok(()),
            false => Err(too_few),
        }
    }
}

/// Returns whether a storage node is on the list of the node that has heard of the latest revision
/// of the catalogue. Without any list, every node counts as listed.
pub(super) fn is_on_latest_list(answers: &[(NodeRecord, StandingAnswer)], name: &PeerName) -> bool {
    let lists = answers.iter().map(|(_, answer)| answer);
    let lists = lists.filter(|answer| !answer.listed.is_empty());
    // The epoch does not tell which list is the latest: a claim of an epoch raises the epoch that a
    // node has noted, but brings no list.
    let latest = lists.max_by_key(|answer| answer.revision);
    latest.is_none_or(|latest| latest.listed.contains(name))
}

impl fmt::Display for TooFewNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { storage, max_missing: may_miss, caught_up, silent, behind } = self;
        let missing = silent.len() + behind.len();
        if storage - missing > *caught_up {
            // Some data folders are from before catch-up records existed, so the bound for these is
            // reported.
            write!(
                f,
                "{missing} of {storage} storage nodes are missing, at most {may_miss} may be"
            )?;
        } else {
            let needed = majority(*storage);
            write!(
                f,
                "{caught_up} of {storage} storage nodes know what is committed, {needed} are needed"
            )?;
        }
        let names =
            |nodes: &[PeerName]| nodes.iter().map(PeerName::as_str).collect::<Vec<_>>().join(", ");
        if !silent.is_empty() {
            write!(f, ": start {}", names(silent))?;
        }
        if !behind.is_empty() {
            let joint = if silent.is_empty() { ":" } else { ";" };
            let them = names(behind);
            write!(f, "{joint} behind, until a catalogue is there to catch up with: {them}")?;
        }
        Ok(())
    }
}

/// Returns the nodes of `heard` that have noted an epoch of the catalogue. A node without an epoch
/// is empty, and knows of no commit and no removal.
pub(in crate::node) fn keep_nodes_with_seen_epoch(
    heard: Vec<(NodeRecord, HelloAnswer)>,
) -> Vec<NodeRecord> {
    let has_seen = heard.into_iter().filter(|(_, hello)| hello.epoch > Epoch::default());
    has_seen.map(|(node, _)| node).collect()
}

/// Returns the number of storage nodes that a rebuild can do without: the smallest for any of
/// `codes`. The other nodes then still have at least one commit mark of each committed shard, and
/// n-k+1 receipts of each archived stripe.
pub(in crate::node) fn tolerated_losses(codes: impl IntoIterator<Item = (u8, u8)>) -> usize {
    let of = |(n, k): (u8, u8)| usize::from(n.saturating_sub(k).min(k.saturating_sub(1)));
    codes.into_iter().map(of).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Epoch;

    fn node(index: usize) -> NodeRecord {
        NodeRecord {
            name: format!("n{index}").parse().unwrap(),
            address: format!("n{index}:1"),
            zone: String::new(),
            rack: String::new(),
            storage: true,
        }
    }

    fn says(standing: Standing, revision: u64, listed: std::ops::Range<usize>) -> StandingAnswer {
        let listed = listed.map(|index| node(index).name).collect();
        StandingAnswer { standing, epoch: Epoch(1), revision, listed }
    }

    #[test]
    fn more_than_half_that_have_caught_up_are_enough_and_half_are_not() {
        for all in 1..=9 {
            let members: Vec<_> = (0..all).map(node).collect();
            let answers: Vec<_> = members
                .iter()
                .map(|node| (node.clone(), says(Standing::CaughtUp, 5, 0..all)))
                .collect();
            for heard in 0..=all {
                let quorum = Quorum::new(&members, &answers[..heard]);
                assert_eq!(
                    quorum.check_enough_heard(|_| true).is_ok(),
                    heard * 2 > all,
                    "{heard} of {all}"
                );
            }
        }
    }

    #[test]
    fn a_node_that_is_behind_or_was_taken_off_the_list_counts_as_missing() {
        let members: Vec<_> = (0..5).map(node).collect();
        let caught_up = |index| (node(index), says(Standing::CaughtUp, 5, 0..5));
        let mut answers = vec![caught_up(0), caught_up(1), caught_up(2)];
        assert_eq!(Quorum::new(&members, &answers).check_enough_heard(|_| true), Ok(()));
        answers[2].1.standing = Standing::Behind;
        let refused =
            Quorum::new(&members, &answers).check_enough_heard(|_| true).unwrap_err().to_string();
        assert!(refused.contains("2 of 5") && refused.contains("start n3, n4"), "{refused}");
        assert!(refused.contains("behind") && refused.ends_with("n2"), "{refused}");
        // The list of the node that has heard of a later revision does not contain n2.
        answers[2] = caught_up(2);
        answers[0].1 = says(Standing::CaughtUp, 6, 0..2);
        assert!(Quorum::new(&members, &answers).check_enough_heard(|_| true).is_err());
    }

    #[test]
    fn older_folders_go_by_the_older_bound_in_which_one_behind_is_missing() {
        let members: Vec<_> = (0..6).map(node).collect();
        let mut answers: Vec<_> =
            (0..5).map(|index| (node(index), says(Standing::Unknown, 5, 0..6))).collect();
        let check = |answers: &[_]| {
            let mut quorum = Quorum::new(&members, answers);
            quorum.set_max_missing([(6, 4), (4, 2)]);
            quorum.check_enough_heard(|_| true).map_err(|too_few| too_few.to_string())
        };
        assert_eq!(check(&answers), Ok(()));
        answers[0].1.standing = Standing::Behind;
        let refused = check(&answers).unwrap_err();
        assert!(refused.contains("at most 1 may be"), "{refused}");
        // A code that needs more nodes than there are does not allow half of them to be missing.
        let mut few = Quorum::new(&members[..4], &answers[1..3]);
        few.set_max_missing([(16, 11)]);
        assert!(few.check_enough_heard(|_| true).is_err());
    }
}
