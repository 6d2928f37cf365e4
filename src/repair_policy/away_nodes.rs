//! The storage nodes that are away, as the catalogue server sees them, and those that are given up:
//! their pieces and replicas are made on other nodes. While many nodes are away together, a brake
//! restricts this to the pieces of stripes that survive no further loss (docs/semantics.md, 11).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::config::RepairRules;
use crate::format::records::Node;
use crate::id::NodeId;
use crate::wire::calls::NodeView;

/// Nodes that went away within this time of one another went away together.
const TOGETHER: Duration = Duration::from_secs(3600);
/// The brake ends this long after the last of the nodes that put it on went away.
pub const MAX_BRAKE: Duration = Duration::from_secs(6 * 3600);
/// The pieces of a node are given up after this many graces. They cost more to make again than
/// replicas, and a stripe with pieces survives more losses.
pub const PIECES_GRACES: u32 = 5;

/// The nodes that are given up. Their pieces and replicas are made on other nodes, except those of
/// a node that answers after all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GivenUp {
    /// Nodes whose replicas are put on spares.
    pub replicas: BTreeSet<NodeId>,
    /// Nodes whose pieces are made on spares.
    pub pieces: BTreeSet<NodeId>,
    /// Nodes whose pieces of a stripe that survives no further loss are made on spares.
    pub urgent_pieces: BTreeSet<NodeId>,
}

/// A node, as the last update saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KnownNode {
    /// The failure domain; empty if none is configured.
    domain: String,
    /// Whether the node is to store data.
    is_storage: bool,
    /// The time since which the node is away; `None` if it is live, or in maintenance.
    away_since: Option<Duration>,
}

/// The nodes of the cluster, and the conclusions from which of them are away.
#[derive(Debug, Default)]
pub struct AwayNodes {
    nodes: BTreeMap<NodeId, KnownNode>,
    given_up: GivenUp,
    brake: Option<String>,
    /// The nodes that put the brake on, as long as they are away.
    braking: BTreeSet<NodeId>,
    /// Graces do not begin before this time.
    graces_from: Duration,
    updated_at: Duration,
    /// The last time at which the server is known to have run between two updates.
    ran_at: Duration,
    version: u64,
}

impl AwayNodes {
    /// Records that the server ran at `now`, so that the time before it is no gap between updates:
    /// the survey of a large step may take longer than a grace.
    pub fn note_run(&mut self, now: Duration) {
        self.ran_at = now;
    }

    /// Replaces the list of nodes by `views`, and decides anew on the brake and on the nodes to
    /// give up. Graces begin again when the brake ends, when a node that put the brake on is no
    /// longer away, and after a gap between updates that is longer than both `max_gap` and a grace:
    /// the server did not see which nodes were live in the gap.
    pub fn update(
        &mut self,
        views: &[NodeView],
        in_maintenance: &BTreeSet<NodeId>,
        now: Duration,
        rules: &RepairRules,
        max_gap: Duration,
    ) {
        if now > self.updated_at.max(self.ran_at) + rules.grace.max(max_gap) {
            self.graces_from = now;
        }
        self.updated_at = now;
        let nodes: BTreeMap<NodeId, KnownNode> =
            views.iter().map(|view| self.take_over(view, in_maintenance, now)).collect();
        let is_changed = nodes != self.nodes;
        self.nodes = nodes;
        let is_away =
            |id: &NodeId| self.nodes.get(id).is_some_and(|node| node.away_since.is_some());
        let before = self.braking.len();
        self.braking.retain(is_away);
        // The nodes of a rack come back one after the other.
        if self.braking.len() < before {
            self.graces_from = now;
        }
        let found = self.find_brake(now, rules.brake_percent);
        if found.is_none() && self.brake.is_some() {
            self.graces_from = now;
        }
        self.brake = found.map(|(reason, nodes)| {
            self.braking.extend(nodes);
            reason
        });
        let given_up = self.find_given_up(now, rules.grace);
        if is_changed || given_up != self.given_up {
            self.version += 1;
        }
        self.given_up = given_up;
    }

    fn take_over(
        &self,
        view: &NodeView,
        in_maintenance: &BTreeSet<NodeId>,
        now: Duration,
    ) -> (NodeId, KnownNode) {
        let id = NodeId::of(&view.node.name);
        let since = || self.nodes.get(&id).and_then(|known| known.away_since).unwrap_or(now);
        let away_since = (!view.live && !in_maintenance.contains(&id)).then(since);
        let is_storage = view.node.storage;
        (id, KnownNode { domain: domain_of(&view.node), is_storage, away_since })
    }

    /// Returns the storage nodes that are away, each with the time at which it went away and its
    /// domain.
    fn away(&self) -> impl Iterator<Item = (NodeId, Duration, &str)> {
        let storage = self.nodes.iter().filter(|(_, node)| node.is_storage);
        storage.filter_map(|(id, node)| Some((*id, node.away_since?, node.domain.as_str())))
    }

    /// Returns a number that changes when the list of nodes or the set of nodes given up changes.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the time of the last update.
    pub fn updated_at(&self) -> Duration {
        self.updated_at
    }

    /// Returns the nodes that are given up.
    pub fn given_up(&self) -> &GivenUp {
        &self.given_up
    }

    /// Returns the reason for which the brake is on, if it is.
    pub fn brake(&self) -> Option<&String> {
        self.brake.as_ref()
    }

    /// Returns the nodes that are given up. The brake applies neither to pieces of urgent stripes
    /// nor to nodes that are to store nothing, which are given up at once.
    fn find_given_up(&self, now: Duration, grace: Duration) -> GivenUp {
        let retired = || {
            let retired = self.nodes.iter().filter(|(_, node)| !node.is_storage);
            retired.map(|(id, _)| *id)
        };
        let away_for = |graces: u32| {
            let is_over = move |since: Duration| {
                now >= since.max(self.graces_from).saturating_add(grace * graces)
            };
            let over = self.away().filter(move |(_, since, _)| is_over(*since));
            over.map(|(id, ..)| id).chain(retired()).collect()
        };
        let unless_braked = |graces| match self.brake {
            Some(_) => retired().collect(),
            None => away_for(graces),
        };
        GivenUp {
            replicas: unless_braked(1),
            pieces: unless_braked(PIECES_GRACES),
            urgent_pieces: away_for(PIECES_GRACES),
        }
    }

    /// Returns the reason for the brake, if it is on, and the nodes that put it on. These nodes
    /// went away together. They are more than one node and more than `percent` of all storage
    /// nodes, or they lie in several failure domains, or they include every storage node of a
    /// failure domain that has more than one.
    fn find_brake(&self, now: Duration, percent: u8) -> Option<(String, BTreeSet<NodeId>)> {
        let storage = || self.nodes.values().filter(|node| node.is_storage);
        let all = storage().count();
        let most = (all * usize::from(percent) / 100).max(1);
        for (_, last, _) in self.away().filter(|(_, since, _)| now < *since + MAX_BRAKE) {
            let (nodes, together): (BTreeSet<NodeId>, Vec<&str>) = self
                .away()
                .filter(|(_, since, _)| *since <= last && *since + TOGETHER >= last)
                .map(|(id, _, domain)| (id, domain))
                .unzip();
            let domains: BTreeSet<&str> =
                together.iter().copied().filter(|domain| !domain.is_empty()).collect();
            let count = together.len();
            let is_whole_domain = |domain: &&str| {
                let members = storage().filter(|node| node.domain == **domain).count();
                members > 1 && together.iter().filter(|of| *of == domain).count() == members
            };
            let why = match domains.len() {
                _ if count > most => "",
                2.. => ", in several failure domains",
                _ if domains.iter().any(is_whole_domain) => ", the whole of a failure domain",
                _ => continue,
            };
            let since = "went away at about the same time";
            return Some((format!("{count} of {all} storage nodes {since}{why}"), nodes));
        }
        None
    }
}

/// Returns the failure domain of a node: its zone and rack, or its zone alone if it has no rack.
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
    const GAP: Duration = Duration::from_secs(7);

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
        watched.update(&nodes(away, rack), &BTreeSet::new(), MINUTE, &RULES, GAP);
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
            watched.update(&nodes(away, 4), &BTreeSet::new(), minute * MINUTE, &RULES, GAP);
            watched.brake().is_some()
        };
        assert!(!is_braked(1, &[1]));
        assert!(!is_braked(62, &[1, 9]), "an hour later");
        assert!(is_braked(63, &[1, 4, 9]), "two racks within an hour");
        assert!(is_braked(200, &[0, 1, 4, 9]), "the two are still away");
        assert!(!is_braked(63 + 360, &[1, 4, 9]), "six hours later");
    }

    /// Updates the list every minute, and returns after each how many nodes are given up for
    /// replicas, for pieces and for urgent pieces.
    fn given_up(away: impl Fn(u32) -> Vec<usize>, minutes: u32) -> Vec<[usize; 3]> {
        let mut watched = AwayNodes::default();
        let counts = (0..minutes).map(|minute| {
            let nodes = nodes(&away(minute), 4);
            watched.update(&nodes, &BTreeSet::new(), minute * MINUTE, &RULES, GAP);
            let GivenUp { replicas, pieces, urgent_pieces } = watched.given_up();
            [replicas, pieces, urgent_pieces].map(BTreeSet::len)
        });
        counts.collect()
    }

    #[test]
    fn a_node_is_given_up_after_its_grace_and_for_pieces_after_five() {
        let alone = given_up(|minute| if minute > 0 { vec![4] } else { vec![] }, 12);
        let first = |at: usize| alone.iter().position(|counts| counts[at] == 1);
        assert_eq!([0, 1, 2].map(first), [Some(3), Some(11), Some(11)]);
        // The brake is on from minute 4 to 6, and then the graces begin again. Urgent pieces do not
        // wait for the brake.
        let braked = |minute| if (4..7).contains(&minute) { vec![4, 8] } else { vec![4] };
        let counts = given_up(braked, 20);
        assert_eq!([3, 4, 6, 8, 9].map(|minute| counts[minute][0]), [1, 0, 0, 0, 1]);
        let always = given_up(|_| vec![4, 8], 20);
        assert_eq!(always[19], [0, 0, 2]);
        assert_eq!(always[9], [0, 0, 0]);
    }

    #[test]
    fn a_rack_that_comes_back_node_by_node_is_not_given_up() {
        // Rack 1 is away until minute 200. Then a node comes back each minute.
        let away = |minute: u32| (4..8).skip(minute.saturating_sub(200) as usize).collect();
        let counts = given_up(away, 203);
        assert!(counts.iter().all(|counts| counts[0] == 0), "{counts:?}");
    }

    #[test]
    fn a_node_that_is_to_store_nothing_is_given_up_at_once() {
        let mut watched = AwayNodes::default();
        let mut views = nodes(&[4, 8], 4);
        views[3].node.storage = false;
        watched.update(&views, &BTreeSet::new(), MINUTE, &RULES, GAP);
        let retired = BTreeSet::from([NodeId::of(&views[3].node.name)]);
        assert!(watched.brake().is_some());
        assert_eq!(
            (&watched.given_up().replicas, &watched.given_up().pieces),
            (&retired, &retired)
        );
    }

    #[test]
    fn a_server_that_could_not_see_gives_up_no_node() {
        let mut watched = AwayNodes::default();
        let mut count_after = |minute: u32| {
            watched.update(&nodes(&[4], 4), &BTreeSet::new(), minute * MINUTE, &RULES, GAP);
            watched.given_up().replicas.len()
        };
        assert_eq!([1, 30, 31, 32].map(&mut count_after), [0, 0, 0, 1]);
        // A grace that is shorter than the time between updates ends all the same.
        let rules = RepairRules { grace: Duration::from_secs(1), ..RULES };
        let mut watched = AwayNodes::default();
        for second in [2, 4, 6] {
            watched.update(
                &nodes(&[4], 4),
                &BTreeSet::new(),
                Duration::from_secs(second),
                &rules,
                GAP,
            );
        }
        assert_eq!(watched.given_up().replicas.len(), 1);
    }

    /// The grace of a node that does not come back begins at the end of its maintenance.
    #[test]
    fn a_node_in_maintenance_is_not_away() {
        let mut watched = AwayNodes::default();
        let both = nodes(&[4, 8], 4);
        let excused = BTreeSet::from([NodeId::of(&both[4].node.name)]);
        for minute in 1..100 {
            watched.update(&both, &excused, minute * MINUTE, &RULES, GAP);
            assert!(watched.brake().is_none() && !watched.given_up().pieces.contains(&both_id(4)));
        }
        assert!(watched.given_up().pieces.contains(&both_id(8)));
        let before = watched.version();
        watched.update(&both, &excused, 100 * MINUTE, &RULES, GAP);
        assert_eq!(watched.version(), before, "a node in maintenance changes nothing");
        let counts = (100..112).map(|minute| {
            watched.update(&both, &BTreeSet::new(), minute * MINUTE, &RULES, GAP);
            watched.given_up().pieces.contains(&both_id(4))
        });
        let counts: Vec<bool> = counts.collect();
        assert_eq!(counts.iter().filter(|is_given_up| !**is_given_up).count(), 10);
    }

    fn both_id(number: usize) -> NodeId {
        NodeId::of(&format!("n{number}").parse().unwrap())
    }
}
