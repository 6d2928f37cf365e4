//! The events of one simulated cluster: nodes and racks fail and come back, pieces decay, and the
//! catalogue server repairs.
//!
//! The catalogue server's decisions are those of `rapidraid::repair_policy`, which daemons call
//! too. A *group* is a set of stripes with the same nodes, and is repaired as a whole. Its n pieces
//! lie on n nodes, and it is lost when fewer than k undamaged pieces are on disks that still exist.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use anyhow::Result;
use rapidraid::config::RepairRules;
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::records::{Node, RingNode};
use rapidraid::id::NodeId;
use rapidraid::placement;
use rapidraid::repair_policy::{AwayNodes, MAX_BRAKE, PIECES_GRACES};
use rapidraid::wire::calls::NodeView;

use super::repair::Running;
use super::scenario::{Scenario, Variant};

pub(super) const HOUR: f64 = 3600.0;
const YEAR: f64 = 365.25 * 24.0 * HOUR;

/// The result of one simulated cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outcome {
    /// The simulated years.
    pub years: f64,
    /// Number of groups that were lost.
    pub lost_groups: u64,
    /// Number of moments at which groups were lost. Groups with the same nodes are lost together.
    pub losses: u64,
    /// Number of bytes of the pieces that repairs made.
    pub made_bytes: f64,
    /// Number of disks that were lost.
    pub lost_disks: u64,
}

/// A change of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// Some node loses its disk.
    LoseDisk,
    /// Some node goes away with its disk.
    StopNode,
    /// Some rack goes away.
    StopRack,
    /// A piece on some node is damaged.
    Damage,
    /// All pieces are verified.
    Verify,
    /// A node is back, empty if its disk was lost. The second number is that of its outage: the end
    /// of an earlier outage is void.
    ReturnNode(usize, u64),
    /// A rack is back.
    ReturnRack(usize),
    /// A wait of the rules may be over.
    Recheck,
    /// The repair with this number has ended.
    EndRepair(u64),
}

/// A node.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NodeState {
    is_away: bool,
    /// Whether the disk was lost and the node is not back since.
    is_diskless: bool,
    is_rack_away: bool,
    outages: u64,
}

impl NodeState {
    pub(super) fn is_live(&self) -> bool {
        !self.is_away && !self.is_rack_away
    }
}

/// A group.
#[derive(Debug, Clone)]
pub(super) struct Group {
    /// The node of each piece.
    pub(super) piece_nodes: Vec<usize>,
    /// Whether the node of each piece has it on its disk.
    pub(super) is_there: Vec<bool>,
    /// Pieces that are there and damaged, which nobody has noticed.
    pub(super) hidden: Vec<bool>,
    /// The time since which the group is degraded.
    pub(super) since: Option<Duration>,
    pub(super) not_before: Duration,
}

/// A simulated cluster.
pub struct World<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) rules: RepairRules,
    pub(super) entropy: SeededEntropy,
    pub(super) now: Duration,
    pub(super) events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    pub(super) events_made: u64,
    pub(super) nodes: Vec<NodeState>,
    pub(super) views: Vec<NodeView>,
    pub(super) ids: Vec<NodeId>,
    pub(super) numbers: BTreeMap<NodeId, usize>,
    pub(super) ring: Vec<RingNode>,
    pub(super) groups: Vec<Group>,
    pub(super) away: AwayNodes,
    pub(super) running: Option<Running>,
    pub(super) repairs: u64,
    pub(super) outcome: Outcome,
}

impl<'a> World<'a> {
    /// Returns a cluster in which all pieces are there.
    pub fn new(scenario: &'a Scenario, seed: u64) -> Result<Self> {
        let views = (0..scenario.nodes).map(|at| view(scenario, at));
        let mut views: Vec<NodeView> = views.collect::<Result<_>>()?;
        let nodes: Vec<Node> = views.iter().map(|view| view.node.clone()).collect();
        let ids: Vec<NodeId> = nodes.iter().map(|node| NodeId::of(&node.name)).collect();
        let numbers: BTreeMap<NodeId, usize> =
            ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let ring = placement::ring(&nodes, 0);
        if scenario.variant == Variant::NoBrake {
            // Without domains, only the share of the nodes that are away puts the brake on.
            views.iter_mut().for_each(|view| view.node.rack.clear());
        }
        let (n, k) = (scenario.n, scenario.k);
        let group = |index: usize| -> Result<Group> {
            let placed = placement::place(&ring, n, k, index as u32)?;
            let piece_nodes = placed.iter().filter_map(|node| numbers.get(node).copied()).collect();
            let (is_there, hidden) = (vec![true; n], vec![false; n]);
            Ok(Group { piece_nodes, is_there, hidden, since: None, not_before: Duration::ZERO })
        };
        let groups = (0..scenario.groups).map(group).collect::<Result<_>>()?;
        let rules = scenario.rules();
        let mut world = Self {
            scenario,
            rules,
            entropy: SeededEntropy::new(seed),
            now: Duration::ZERO,
            events: BinaryHeap::new(),
            events_made: 0,
            nodes: vec![NodeState::default(); scenario.nodes],
            views,
            ids,
            numbers,
            ring,
            groups,
            away: AwayNodes::default(),
            running: None,
            repairs: 0,
            outcome: Outcome::default(),
        };
        for event in [Event::LoseDisk, Event::StopNode, Event::StopRack, Event::Damage] {
            world.schedule_next(event);
        }
        world.schedule_verify();
        Ok(world)
    }

    /// Simulates until the horizon, or until the scenario's number of losses.
    pub fn run(mut self) -> Outcome {
        let horizon = Duration::from_secs_f64(self.scenario.years * YEAR);
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            if at > horizon || self.outcome.lost_groups >= self.scenario.stop_after_losses {
                break;
            }
            self.now = at;
            self.play(event);
            if matches!(event, Event::LoseDisk | Event::Damage) {
                self.count_losses();
            }
            self.watch_nodes();
            self.repair();
        }
        let reached_horizon = self.outcome.lost_groups < self.scenario.stop_after_losses;
        let end = if reached_horizon { horizon } else { self.now };
        Outcome { years: end.as_secs_f64() / YEAR, ..self.outcome }
    }

    fn play(&mut self, event: Event) {
        match event {
            Event::LoseDisk => {
                self.schedule_next(event);
                let node = self.any_node();
                self.lose_disk(node);
            }
            Event::StopNode => {
                self.schedule_next(event);
                let node = self.any_node();
                if !self.nodes[node].is_away {
                    self.stop(node, self.scenario.outage_hours);
                }
            }
            Event::StopRack => {
                self.schedule_next(event);
                let rack = self.entropy.below(self.scenario.racks as u64) as usize;
                if !self.members(rack).any(|node| self.nodes[node].is_rack_away) {
                    self.set_rack(rack, true);
                    let hours = self.exponential(self.scenario.rack_outage_hours * HOUR);
                    self.schedule(hours, Event::ReturnRack(rack));
                }
            }
            Event::ReturnRack(rack) => self.set_rack(rack, false),
            Event::ReturnNode(node, outage) => {
                let state = &mut self.nodes[node];
                if state.outages == outage {
                    (state.is_away, state.is_diskless) = (false, false);
                }
            }
            Event::Damage => {
                self.schedule_next(event);
                let group = self.entropy.below(self.groups.len() as u64) as usize;
                let piece = self.entropy.below(self.scenario.n as u64) as usize;
                self.groups[group].hidden[piece] = self.groups[group].is_there[piece];
            }
            Event::Verify => {
                self.schedule_verify();
                for at in 0..self.groups.len() {
                    self.note_damage(at);
                }
            }
            Event::EndRepair(number) => self.end_repair(number),
            Event::Recheck => {}
        }
    }

    /// Loses a node's disk. The node is away until it is replaced by an empty one of the same name.
    fn lose_disk(&mut self, node: usize) {
        if self.nodes[node].is_diskless {
            return;
        }
        self.outcome.lost_disks += 1;
        for group in &mut self.groups {
            for (piece, home) in group.piece_nodes.iter().enumerate() {
                if *home == node {
                    (group.is_there[piece], group.hidden[piece]) = (false, false);
                }
            }
        }
        if self.scenario.replacement_hours > 0.0 {
            self.nodes[node].is_diskless = true;
            self.stop(node, self.scenario.replacement_hours);
        }
    }

    fn stop(&mut self, node: usize, hours: f64) {
        let state = &mut self.nodes[node];
        (state.is_away, state.outages) = (true, state.outages + 1);
        let back = Event::ReturnNode(node, state.outages);
        let wait = self.exponential(hours * HOUR);
        self.schedule(wait, back);
    }

    fn members(&self, rack: usize) -> impl Iterator<Item = usize> + use<> {
        let (nodes, racks) = (self.scenario.nodes, self.scenario.racks.max(1));
        (0..nodes).filter(move |node| node % racks == rack)
    }

    fn set_rack(&mut self, rack: usize, is_away: bool) {
        for node in self.members(rack) {
            self.nodes[node].is_rack_away = is_away;
        }
    }

    /// Makes the hidden damage of a group known: each damaged piece on a live node counts as missing
    /// from now on.
    pub(super) fn note_damage(&mut self, at: usize) {
        let group = &mut self.groups[at];
        for (piece, home) in group.piece_nodes.iter().enumerate() {
            if group.hidden[piece] && self.nodes[*home].is_live() {
                (group.is_there[piece], group.hidden[piece]) = (false, false);
            }
        }
    }

    /// Counts the groups that are lost, and makes them whole again, so that each is counted once.
    fn count_losses(&mut self) {
        let k = self.scenario.k;
        let mut lost = 0;
        for (at, group) in self.groups.iter_mut().enumerate() {
            let good = group.is_there.iter().zip(&group.hidden);
            if good.filter(|(there, hidden)| **there && !**hidden).count() >= k {
                continue;
            }
            lost += 1;
            group.is_there.fill(true);
            group.hidden.fill(false);
            (group.since, group.not_before) = (None, Duration::ZERO);
            self.running.take_if(|running| running.group == at);
        }
        self.outcome.lost_groups += lost;
        self.outcome.losses += u64::from(lost > 0);
    }

    /// Gives the catalogue server the list of nodes. When it changes, the running repair ends.
    fn watch_nodes(&mut self) {
        for (view, state) in self.views.iter_mut().zip(&self.nodes) {
            view.live = state.is_live();
        }
        let (version, was_braked) = (self.away.version(), self.away.brake().is_some());
        // The server sees each change at once, so it has no gaps.
        let no_gap = Duration::MAX / 2;
        self.away.update(&self.views, &BTreeSet::new(), self.now, &self.rules, no_gap);
        let is_changed = self.away.version() != version;
        if is_changed {
            self.running = None;
        }
        if !is_changed && self.away.brake().is_some() == was_braked {
            return;
        }
        let grace = self.rules.grace;
        for wait in [grace, grace * PIECES_GRACES, MAX_BRAKE] {
            self.schedule(wait.as_secs_f64(), Event::Recheck);
        }
    }

    fn any_node(&self) -> usize {
        self.entropy.below(self.nodes.len() as u64) as usize
    }

    /// Schedules the next event of a kind that happens at a constant rate in the whole cluster.
    fn schedule_next(&mut self, event: Event) {
        let per_year = match event {
            Event::LoseDisk => self.scenario.lost_disks_per_year * self.nodes.len() as f64,
            Event::StopNode => self.scenario.outages_per_year * self.nodes.len() as f64,
            Event::StopRack => self.scenario.rack_outages_per_year * self.scenario.racks as f64,
            Event::Damage => self.scenario.damaged_pieces_per_year * self.nodes.len() as f64,
            _ => 0.0,
        };
        if per_year > 0.0 {
            let wait = self.exponential(YEAR / per_year);
            self.schedule(wait, event);
        }
    }

    fn schedule_verify(&mut self) {
        if self.scenario.verify_days > 0.0 {
            self.schedule(self.scenario.verify_days * 24.0 * HOUR, Event::Verify);
        }
    }

    pub(super) fn schedule(&mut self, wait_s: f64, event: Event) {
        let at = self.now + Duration::from_secs_f64(wait_s);
        self.events_made += 1;
        self.events.push(Reverse((at, self.events_made, event)));
    }

    /// Returns a number from 0 to 1, without 0.
    pub(super) fn uniform(&self) -> f64 {
        (self.entropy.below(1 << 53) + 1) as f64 / (1_u64 << 53) as f64
    }

    pub(super) fn exponential(&self, mean: f64) -> f64 {
        -mean * self.uniform().ln()
    }
}

fn view(scenario: &Scenario, at: usize) -> Result<NodeView> {
    let rack =
        at.checked_rem(scenario.racks).map_or_else(String::new, |rack| format!("rack{rack}"));
    let node = Node {
        name: format!("node{at}").parse()?,
        address: String::new(),
        zone: String::new(),
        rack,
        storage: true,
    };
    Ok(NodeView { node, live: true })
}

#[cfg(test)]
mod tests {
    use super::super::chain::mean_time_to_loss;
    use super::super::scenario::{Model, RepairTime};
    use super::*;

    fn scenario(name: &str) -> Scenario {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("durability.toml");
        let model = Model::read(&file).unwrap();
        model.scenario.into_iter().find(|scenario| scenario.name == name).unwrap()
    }

    #[test]
    fn one_group_is_lost_as_often_as_its_markov_chain_says() {
        let scenario = Scenario { stop_after_losses: 1000, ..scenario("chain") };
        let Scenario { n, k, lost_disks_per_year, chain_hours, .. } = scenario;
        let repairs_per_year = 365.25 * 24.0 / chain_hours;
        let chain = mean_time_to_loss(n, k, lost_disks_per_year, repairs_per_year);
        let outcome = World::new(&scenario, 3).unwrap().run();
        let found = outcome.years / outcome.lost_groups as f64;
        // Three standard errors.
        assert!((found / chain - 1.0).abs() < 3.0 / 1000_f64.sqrt(), "{found} and {chain}");
    }

    #[test]
    fn a_seed_replays_and_what_is_repaired_is_not_lost() {
        let scenario = Scenario { years: 2.0, ..scenario("16 nodes") };
        let outcome = World::new(&scenario, 7).unwrap().run();
        assert_eq!(outcome, World::new(&scenario, 7).unwrap().run());
        assert!(outcome.lost_disks > 0 && outcome.made_bytes > 0.0 && outcome.losses == 0);
        let never = Scenario { repair_time: RepairTime::Never, years: 20.0, ..scenario };
        let outcome = World::new(&never, 7).unwrap().run();
        assert!(outcome.made_bytes == 0.0 && outcome.losses > 0, "{outcome:?}");
        assert!(outcome.losses <= outcome.lost_groups);
    }
}
