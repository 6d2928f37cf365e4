//! The states of a shard's stripes, and the files that each node holds of one stripe.

use super::picture::Holding;
use crate::client::StripeFiles;
use crate::code::{Code, Layout, table};
use crate::format::file::FileName;
use crate::format::geometry::StripeCut;
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

/// Returns what each storage node of `nodes` holds of one stripe. For a node that is not in `files`,
/// the result follows the rule of placement, which is not always right: if a node was down during
/// the save, another node holds its share; only the stripe's record names that node.
pub fn holdings(
    root: &ShardRoot,
    state: &ShardState,
    stripe: u32,
    nodes: &[NodeView],
    files: &StripeFiles,
) -> Vec<Holding> {
    let by_rule = PlacementRule::new(root, state, stripe);
    let holding = |view: &NodeView| {
        let id = NodeId::of(&view.node.name);
        let (replicas, pieces) = match files.get(&id) {
            Some(files) => labels_of(files, state.stripe(stripe)),
            None => by_rule.labels_at(id),
        };
        let piece = (!pieces.is_empty()).then(|| pieces.join(","));
        Holding { node: view.node.name.to_string(), replicas, piece, dead: !view.live }
    };
    nodes.iter().filter(|view| view.node.storage).map(holding).collect()
}

/// Returns the labels of the replicas and of the pieces among `files`. Pieces of other attempts than
/// the one that archived the stripe do not count.
fn labels_of(files: &[FileName], state: Option<StripeState>) -> (Vec<String>, Vec<String>) {
    let archived_by = match state {
        Some(StripeState::Archived { attempt, .. }) => Some(attempt),
        _ => None,
    };
    let (mut replicas, mut pieces) = (Vec::new(), Vec::new());
    for file in files {
        match *file {
            FileName::Replica { block } => replicas.push(replica_label(block.into())),
            FileName::Piece { piece, attempt } if archived_by == Some(attempt) => {
                pieces.push(piece_label(piece.into()));
            }
            FileName::Piece { .. } => {}
        }
    }
    (replicas, pieces)
}

fn replica_label(block: usize) -> String {
    format!("o{}", block + 1)
}

fn piece_label(piece: usize) -> String {
    format!("c{}", piece + 1)
}

/// The files that each node of a shard's ring has of a stripe if all nodes were live when it was
/// saved and archived by a chain.
struct PlacementRule {
    places: Vec<NodeId>,
    layout: Option<Layout>,
    /// The code of the pieces, if the stripe has no replicas any more.
    archived: Option<Code>,
    cut: Option<StripeCut>,
}

impl PlacementRule {
    fn new(root: &ShardRoot, state: &ShardState, stripe: u32) -> Self {
        let (n, k) = (usize::from(root.n), usize::from(root.k));
        let archived = match state.stripe(stripe) {
            Some(StripeState::Archived { code, dropped: true, .. }) => table::by_id(code),
            _ => None,
        };
        Self {
            places: place(&root.ring, n, k, stripe).unwrap_or_default(),
            layout: Layout::new(n, k).ok(),
            archived,
            cut: root.geometry().ok().and_then(|geometry| geometry.stripe(stripe)),
        }
    }

    fn labels_at(&self, node: NodeId) -> (Vec<String>, Vec<String>) {
        let Some(position) = self.places.iter().position(|place| *place == node) else {
            return Default::default();
        };
        if let Some(code) = &self.archived {
            let piece = code.piece_at_position(position).map(piece_label);
            return (Vec::new(), piece.into_iter().collect());
        }
        let Some(layout) = self.layout else { return Default::default() };
        // A block entirely past the end of the shard has no file.
        let real = |block: &usize| {
            let block = u8::try_from(*block).unwrap_or(u8::MAX);
            self.cut.as_ref().is_some_and(|cut| cut.block_len(block) > 0)
        };
        (layout.blocks_at(position).filter(real).map(replica_label).collect(), Vec::new())
    }
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
        let held = holdings(&root, &state, 0, &nodes, &StripeFiles::new());
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
        let mut pieces: Vec<String> = holdings(&root, &state, 0, &nodes, &StripeFiles::new())
            .into_iter()
            .filter_map(|h| h.piece)
            .collect();
        pieces.sort();
        assert_eq!(pieces, ["c1", "c2", "c3", "c4", "c5", "c6"]);
    }

    #[test]
    fn the_answer_of_a_node_counts_more_than_the_rule() {
        let nodes: Vec<NodeView> = ["a", "b"].map(view).into();
        let root = samples::shard_root(Vec::new());
        let mut state = ShardState::fresh(Generation::default(), 1);
        let (attempt, code) = (Attempt([1; 16]), table::find(6, 4).unwrap().id());
        let generation = Generation::default();
        assert!(state.set(0, StripeState::Archived { attempt, code, generation, dropped: false }));
        let of_another = FileName::Piece { piece: 3, attempt: Attempt([2; 16]) };
        let piece = |piece| FileName::Piece { piece, attempt };
        let files = vec![FileName::Replica { block: 1 }, piece(0), piece(4), of_another];
        let files = StripeFiles::from([(NodeId::of(&nodes[0].node.name), files)]);
        let held = holdings(&root, &state, 0, &nodes, &files);
        assert_eq!(
            (held[0].replicas.join(" "), held[0].piece.as_deref()),
            ("o2".into(), Some("c1,c5"))
        );
        assert!(held[1].replicas.is_empty() && held[1].piece.is_none());
    }
}
