//! The storage nodes that are away, as the catalogue server sees them, and the brake: while many are
//! away, no spare takes their place by itself (docs/semantics.md, 11).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::config::RepairRules;
use crate::format::records::Node;
use crate::id::NodeId;
use crate::wire::calls::NodeView;

/// Nodes that went away within this time of one another went away together.
const TOGETHER: Duration = Duration::from_secs(3600);
/// The brake is released this long after the last node went away that it counts.
const MAX_BRAKE: Duration = Duration::from_secs(6 * 3600);

/// A storage node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KnownNode {
    /// The failure domain; empty if none is configured.
    domain: String,
    /// The time since which the node is away; `None` if it is live.
    away_since: Option<Duration>,
}

/// The storage nodes of the cluster, and the conclusions from which of them are away.
#[derive(Debug, Default)]
pub(in crate::node) struct AwayNodes {
    nodes: BTreeMap<NodeId, KnownNode>,
    awaited: BTreeSet<NodeId>,
    brake: Option<String>,
    /// Graces do not begin before this time.
    graces_from: Duration,
    updated_at: Duration,
    version: u64,
}

impl AwayNodes {
    /// Takes over the present list of nodes.
    ///
    /// Graces begin again when the brake is released, and when the last update is longer ago than
    /// a grace: this server could not see then who was live.
    pub(in crate::node) fn update(
        &mut self,
        views: &[NodeView],
        now: Duration,
        rules: &RepairRules,
    ) {
        if now > self.updated_at + rules.grace {
            self.graces_from = now;
        }
        self.updated_at = now;
        let storage = views.iter().filter(|view| view.node.storage).map(|view| {
            let id = NodeId::of(&view.node.name);
            let since = || self.nodes.get(&id).and_then(|known| known.away_since).unwrap_or(now);
            let away_since = (!view.live).then(since);
            (id, KnownNode { domain: domain_of(&view.node), away_since })
        });
        let nodes: BTreeMap<NodeId, KnownNode> = storage.collect();
        let is_changed = nodes != self.nodes;
        self.nodes = nodes;
        let brake = self.find_brake(now, rules.brake_percent);
        if brake.is_none() && self.brake.is_some() {
            self.graces_from = now;
        }
        self.brake = brake;
        let is_awaited = |since: Duration| {
            self.brake.is_some() || now < since.max(self.graces_from) + rules.grace
        };
        let awaited: BTreeSet<NodeId> =
            self.away().filter(|(_, node, _)| is_awaited(*node)).map(|(id, ..)| id).collect();
        if is_changed || awaited != self.awaited {
            self.version += 1;
        }
        self.awaited = awaited;
    }

    /// Returns the nodes that are away, each with the time at which it went away and its domain.
    fn away(&self) -> impl Iterator<Item = (NodeId, Duration, &str)> {
        let away = |(id, node): (&NodeId, &KnownNode)| Some((*id, node.away_since?));
        self.nodes.iter().filter_map(move |entry| {
            let (id, since) = away(entry)?;
            Some((id, since, entry.1.domain.as_str()))
        })
    }

    /// Returns a number that changes when a node comes back, goes away or is given up, and when the
    /// brake changes that.
    pub(in crate::node) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the nodes that are away and whose place no spare may take yet.
    pub(in crate::node) fn awaited(&self) -> &BTreeSet<NodeId> {
        &self.awaited
    }

    /// Returns the reason for which the brake is on, if it is.
    pub(in crate::node) fn brake(&self) -> Option<&String> {
        self.brake.as_ref()
    }

    /// Returns the reason for the brake: some nodes that are away went away together, and they are
    /// more than the larger of one and `percent` of all, or several of more than one domain, or all
    /// of a domain.
    fn find_brake(&self, now: Duration, percent: u8) -> Option<String> {
        let all = self.nodes.len();
        let most = (all * usize::from(percent) / 100).max(1);
        for (_, last, _) in self.away().filter(|(_, since, _)| now < *since + MAX_BRAKE) {
            let together: Vec<&str> = self
                .away()
                .filter(|(_, since, _)| *since <= last && *since + TOGETHER >= last)
                .map(|(_, _, domain)| domain)
                .collect();
            let domains: BTreeSet<&str> =
                together.iter().copied().filter(|domain| !domain.is_empty()).collect();
            let count = together.len();
            let is_whole_domain = |domain: &&str| {
                let members = self.nodes.values().filter(|node| node.domain == **domain).count();
                members > 1 && together.iter().filter(|of| *of == domain).count() == members
            };
            let why = match domains.len() {
                _ if count > most => "",
                2.. => ", in several failure domains",
                _ if domains.iter().any(is_whole_domain) => ", all of a failure domain",
                _ => continue,
            };
            return Some(format!("{count} of {all} storage nodes went away together{why}"));
        }
        None
    }
}

/// Returns the failure domain of a node: its rack, or its zone if it has no rack.
fn domain_of(Node { zone, rack, .. }: &Node) -> String {
    match (zone.as_str(), rack.as_str()) {
        (_, "") => zone.clone(),
        _ => format!("{zone}/{rack}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const RULES: RepairRules =
        RepairRules { share_percent: 25, grace: Duration::from_secs(120), brake_percent: 15 };

    /// Returns nodes in racks of `rack`, of which these are away; 0: without racks.
    fn nodes(away: &[usize], rack: usize) -> Vec<NodeView> {
        let node = |number: usize| Node {
            name: format!("n{number}").parse().unwrap(),
            address: "a:1".into(),
            zone: String::new(),
            rack: number.checked_div(rack).map_or_else(String::new, |rack| format!("r{rack}")),
            storage: true,
        };
        (0..16).map(|at| NodeView { node: node(at), live: !away.contains(&at) }).collect()
    }

    fn has_brake(away: &[usize], rack: usize) -> bool {
        let mut watched = AwayNodes::default();
        watched.update(&nodes(away, rack), MINUTE, &RULES);
        watched.brake().is_some()
    }

    #[test]
    fn the_brake_is_on_while_many_nodes_or_a_rack_or_nodes_of_two_racks_are_away() {
        assert!(!has_brake(&[], 4) && !has_brake(&[3], 4));
        assert!(!has_brake(&[1, 2], 4), "15 % of 16 are two, of one rack");
        assert!(has_brake(&[1, 2, 3], 4));
        assert!(has_brake(&[1, 5], 4), "two racks");
        assert!(has_brake(&[0, 1], 2), "a whole rack");
        assert!(!has_brake(&[3], 1), "a rack of one node");
        assert!(!has_brake(&[1, 5], 0), "without racks");
    }

    #[test]
    fn nodes_that_went_away_long_ago_are_not_counted_and_no_other_one_releases_the_brake() {
        let mut watched = AwayNodes::default();
        let mut is_braked = |minute: u32, away: &[usize]| {
            watched.update(&nodes(away, 4), minute * MINUTE, &RULES);
            watched.brake().is_some()
        };
        assert!(!is_braked(1, &[1]));
        assert!(!is_braked(62, &[1, 9]), "an hour later");
        assert!(is_braked(63, &[1, 4, 9]), "two racks within an hour");
        assert!(is_braked(200, &[0, 1, 4, 9]), "the two are still away");
        assert!(!is_braked(63 + 360, &[1, 4, 9]), "six hours later");
    }

    #[test]
    fn a_node_is_awaited_until_its_grace_is_over_and_each_change_is_noticed() {
        let mut watched = AwayNodes::default();
        watched.update(&nodes(&[], 4), Duration::ZERO, &RULES);
        let mut versions = vec![watched.version()];
        let steps: [(&[usize], u32, usize); 6] = [
            (&[4], 1, 1),
            (&[4], 2, 1),
            (&[4], 3, 0),
            // The brake is on, and its release begins the graces again.
            (&[4, 8], 4, 2),
            (&[4], 5, 1),
            (&[4], 7, 0),
        ];
        for (away, minute, awaited) in steps {
            watched.update(&nodes(away, 4), minute * MINUTE, &RULES);
            assert_eq!(watched.awaited().len(), awaited, "minute {minute}");
            versions.push(watched.version());
        }
        assert_eq!(versions, [1, 2, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_server_that_could_not_see_gives_up_no_node() {
        let mut watched = AwayNodes::default();
        watched.update(&nodes(&[4], 4), MINUTE, &RULES);
        watched.update(&nodes(&[4], 4), 30 * MINUTE, &RULES);
        assert_eq!(watched.awaited().len(), 1);
        watched.update(&nodes(&[4], 4), 32 * MINUTE, &RULES);
        assert_eq!(watched.awaited().len(), 0);
    }
}
