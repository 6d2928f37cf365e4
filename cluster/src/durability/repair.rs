//! The repairs of a simulated cluster: which group comes first, which nodes get its pieces, and how
//! long it takes.

use std::collections::BTreeSet;
use std::time::Duration;

use rapidraid::id::{NodeId, SaveId};
use rapidraid::repair_policy::{PiecesByNode, RepairPriority, SparesOfStripe, is_repair_due};

use super::scenario::{RepairTime, Variant};
use super::world::{Event, Group, HOUR, World};

/// The wait after a repair that failed.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// A piece that is made, and its node.
pub(super) type NewPiece = (usize, usize);

/// A repair that runs.
#[derive(Debug, Clone)]
pub(super) struct Running {
    pub(super) number: u64,
    pub(super) group: usize,
    pub(super) survives: Option<u32>,
    pub(super) pieces: Vec<NewPiece>,
}

impl World<'_> {
    /// Returns how many further losses the group survives, as a survey counts: by the pieces on
    /// live nodes that are not known to be damaged. Returns `None` if these are fewer than k.
    fn survives(&self, group: &Group) -> Option<u32> {
        let pieces = group.piece_nodes.iter().zip(&group.is_there);
        let live = pieces.filter(|(home, there)| **there && self.views[**home].live).count();
        live.checked_sub(self.scenario.k).map(|spare| spare as u32)
    }

    /// Starts the repair that comes first, or ends the running one for one of a group that survives
    /// fewer losses.
    pub(super) fn repair(&mut self) {
        let mut best: Option<(RepairPriority, usize, Vec<NewPiece>)> = None;
        let mut rechecks = false;
        for at in 0..self.groups.len() {
            let survives = self.survives(&self.groups[at]);
            let is_whole = survives == Some((self.scenario.n - self.scenario.k) as u32);
            let group = &mut self.groups[at];
            if is_whole {
                group.since = None;
                continue;
            }
            let is_news = group.since.is_none();
            let since = *group.since.get_or_insert(self.now);
            if is_news {
                rechecks = true;
            }
            let is_urgent = survives == Some(0);
            let (saved_at, save) = (at as u64, SaveId([0; 12]));
            let priority = RepairPriority { is_whole: false, survives, saved_at, save };
            let is_first = best.as_ref().is_none_or(|(first, ..)| match self.scenario.variant {
                Variant::Reversed => priority > *first,
                _ => priority < *first,
            });
            let not_before = self.groups[at].not_before;
            if survives.is_none()
                || !is_first
                || self.now < not_before
                || !is_repair_due(is_urgent, since, self.now, self.rules.grace)
            {
                continue;
            }
            let pieces = self.choose_nodes(at, is_urgent);
            if !pieces.is_empty() {
                best = Some((priority, at, pieces));
            }
        }
        if rechecks {
            self.schedule(self.rules.grace.as_secs_f64(), Event::Recheck);
        }
        let Some((RepairPriority { survives, .. }, group, pieces)) = best else { return };
        let comes_before = |running: &Running| match self.scenario.variant {
            Variant::Reversed => survives > running.survives,
            _ => survives < running.survives,
        };
        if self.running.as_ref().is_some_and(|running| !comes_before(running)) {
            return;
        }
        self.start_repair(Running { number: self.repairs + 1, group, survives, pieces });
    }

    /// Returns the pieces that can be made, each with a node for it: the node that should have it,
    /// if that is live, or a spare if that node is given up.
    fn choose_nodes(&self, at: usize, is_urgent: bool) -> Vec<NewPiece> {
        let group = &self.groups[at];
        let given_up = self.away.given_up();
        let given_up = match (self.scenario.variant, is_urgent) {
            (_, true) => &given_up.urgent_pieces,
            (Variant::BrakeStuck, false) => &BTreeSet::new(),
            (_, false) => &given_up.pieces,
        };
        let is_live = |node: usize| self.nodes[node].is_live();
        let id = |node: usize| self.ids[node];
        let (mut pieces, mut lost) = (Vec::new(), Vec::new());
        for (piece, &home) in group.piece_nodes.iter().enumerate() {
            match is_live(home) {
                true if !group.is_there[piece] => pieces.push((piece, home)),
                false if given_up.contains(&id(home)) => lost.push(piece),
                _ => {}
            }
        }
        if lost.is_empty() {
            return pieces;
        }
        let held = (0..self.nodes.len()).filter(|node| is_live(*node)).map(|node| {
            let has = |(piece, home): (usize, &usize)| {
                (*home == node && group.is_there[piece]).then_some(piece as u8)
            };
            (id(node), group.piece_nodes.iter().enumerate().filter_map(has).collect())
        });
        let held = PiecesByNode(held.collect());
        let piece_nodes: Vec<NodeId> = group.piece_nodes.iter().map(|home| id(*home)).collect();
        let mut spares = SparesOfStripe::new(&self.ring, &piece_nodes, &held, at, &|_| true);
        let take = |piece: usize| {
            let spare = spares.take(piece as u8, &held, &|_| 0)?;
            Some((piece, *self.numbers.get(&spare)?))
        };
        pieces.extend(lost.into_iter().filter_map(take));
        pieces
    }

    fn start_repair(&mut self, running: Running) {
        self.repairs += 1;
        let wait = match self.scenario.repair_time {
            RepairTime::Never => return,
            RepairTime::Exponential(hours) => self.exponential(hours * HOUR),
            RepairTime::Rate => {
                let bytes = self.scenario.piece_bytes() * running.pieces.len() as f64;
                let share = f64::from(self.rules.share_percent) / 100.0;
                bytes * 8.0 / (self.scenario.link_gbit * 1e9 * share)
            }
        };
        self.schedule(wait, Event::EndRepair(running.number));
        self.running = Some(running);
    }

    pub(super) fn end_repair(&mut self, number: u64) {
        let Some(running) = self.running.take_if(|running| running.number == number) else {
            return;
        };
        let group = &self.groups[running.group];
        let is_source = |piece: &usize| {
            self.nodes[group.piece_nodes[*piece]].is_live()
                && group.is_there[*piece]
                && !group.hidden[*piece]
        };
        let sources = (0..self.scenario.n).filter(is_source).count();
        let fails = sources < self.scenario.k || self.uniform() < self.scenario.failed_repairs;
        // The sources are read, and damage is found.
        self.note_damage(running.group);
        let group = &mut self.groups[running.group];
        if fails {
            group.not_before = self.now + RETRY_AFTER;
            return self.schedule(RETRY_AFTER.as_secs_f64(), Event::Recheck);
        }
        for (piece, node) in running.pieces {
            group.piece_nodes[piece] = node;
            (group.is_there[piece], group.hidden[piece]) = (true, false);
            self.outcome.made_bytes += self.scenario.piece_bytes();
        }
    }
}
