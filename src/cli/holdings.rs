//! The states of a shard's stripes, and the files that each node holds of one stripe. Both follow
//! from the shard's records alone, without a question to the nodes.

use super::picture::Holding;
use crate::code::{Layout, table};
use crate::format::records::{ShardRoot, ShardState, StripeState};
use crate::id::NodeId;
use crate::placement::place;
use crate::wire::calls::NodeView;

/// The number of stripes of a shard in each state.
#[derive(Debug, Default, Clone, Copy)]
pub struct States {
    /// Stripes with two replicas of each block.
    pub replicated: u64,
    /// Stripes that are being archived.
    pub archiving: u64,
    /// Stripes stored as coded pieces.
    pub archived: u64,
    /// Archived stripes that may still have replicas.
    pub undropped: u64,
}

impl States {
    /// Counts the stripes of `state`.
    pub fn of(state: &ShardState) -> Self {
        let mut states = Self::default();
        for run in &state.runs {
            let count = u64::from(run.count);
            match run.state {
                StripeState::Replicated => states.replicated += count,
                StripeState::Archiving { .. } => states.archiving += count,
                StripeState::Archived { dropped, .. } => {
                    states.archived += count;
                    states.undropped += if dropped { 0 } else { count };
                }
            }
        }
        states
    }

    /// Returns the counts as text, such as `3 replicated, 1 archived`, or `empty` without a stripe.
    pub fn words(self) -> String {
        let parts = [
            (self.replicated, "replicated"),
            (self.archiving, "archiving"),
            (self.archived, "archived"),
            (self.undropped, "of them with replicas still to drop"),
        ];
        let words: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        if words.is_empty() { "empty".to_owned() } else { words.join(", ") }
    }
}

/// Returns what each storage node of `nodes` holds of one stripe according to the rule of
/// placement. If a node was down during the save, another node holds its share; only the stripe's
/// record names that node.
pub fn holdings(
    root: &ShardRoot,
    state: &ShardState,
    stripe: u32,
    nodes: &[NodeView],
) -> Vec<Holding> {
    let (n, k) = (usize::from(root.n), usize::from(root.k));
    let places = place(&root.ring, n, k, stripe).unwrap_or_default();
    let archived = match state.stripe(stripe) {
        Some(StripeState::Archived { code, dropped: true, .. }) => table::by_id(code),
        _ => None,
    };
    let lengths = root.geometry().ok().and_then(|geometry| geometry.stripe(stripe));
    let layout = Layout::new(n, k).ok();
    let holding = |view: &NodeView| {
        let id = NodeId::of(&view.node.name);
        let position = places.iter().position(|place| *place == id);
        let mut replicas = Vec::new();
        let mut piece = None;
        if let (Some(position), Some(layout)) = (position, layout) {
            match &archived {
                Some(code) => {
                    piece = code.piece_at_position(position).map(|piece| format!("c{}", piece + 1))
                }
                None => {
                    // A block entirely past the end of the shard has no file.
                    let real = |block: &usize| {
                        let block = u8::try_from(*block).unwrap_or(u8::MAX);
                        lengths.as_ref().is_some_and(|cut| cut.block_len(block) > 0)
                    };
                    replicas = layout
                        .blocks_at(position)
                        .filter(real)
                        .map(|block| format!("o{}", block + 1))
                        .collect();
                }
            }
        }
        Holding { node: view.node.name.to_string(), replicas, piece, dead: !view.live }
    };
    nodes.iter().filter(|view| view.node.storage).map(holding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::{Node, RingNode};
    use crate::format::samples;
    use crate::id::{Attempt, Generation};

    fn view(name: &str) -> NodeView {
        let node = Node {
            name: name.parse().unwrap(),
            address: "h:1".into(),
            zone: String::new(),
            rack: String::new(),
            storage: true,
        };
        NodeView { node, live: name != "d" }
    }

    #[test]
    fn the_map_shows_what_a_stripe_has_in_each_state() {
        let nodes: Vec<NodeView> = ["a", "b", "c", "d", "e", "f"].map(view).into();
        let ring =
            nodes.iter().map(|view| RingNode { node: NodeId::of(&view.node.name), domain: 0 });
        let root = samples::shard_root(ring.collect());
        let mut state = ShardState::fresh(Generation::default(), 1);
        let held = holdings(&root, &state, 0, &nodes);
        let replicas: Vec<String> = held.iter().map(|h| h.replicas.join(" ")).collect();
        assert_eq!(replicas, ["o2", "o4", "o1", "o3", "o1 o3", "o2 o4"]);
        assert!(held[3].dead && held.iter().all(|h| h.piece.is_none()));

        let code = table::find(6, 4).unwrap().id();
        let archived = |dropped| StripeState::Archived {
            attempt: Attempt([1; 16]),
            code,
            generation: Generation::default(),
            dropped,
        };
        assert!(state.set(0, archived(false)));
        assert_eq!(States::of(&state).words(), "1 archived, 1 of them with replicas still to drop");
        assert!(state.set(0, archived(true)));
        assert_eq!(States::of(&state).words(), "1 archived");
        let mut pieces: Vec<String> =
            holdings(&root, &state, 0, &nodes).into_iter().filter_map(|h| h.piece).collect();
        pieces.sort();
        assert_eq!(pieces, ["c1", "c2", "c3", "c4", "c5", "c6"]);
    }
}
