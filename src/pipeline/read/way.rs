//! What there is to read a stripe from: whole replicas of the wanted blocks, or pieces that span.
//!
//! Pure judgement of what the nodes say they hold; nothing is fetched here.

use std::collections::BTreeMap;

use super::inspect::Held;
use super::{ReadError, Reading};
use crate::code::{Code, Layout, reconstruct, table};
use crate::format::file::FileName;
use crate::format::records::{PieceForm, Receipt, ShardRoot, StripeState};
use crate::id::{Attempt, NodeId};
use crate::pipeline::records::StripeInfo;

/// A file on a node, and the BLAKE3 that it must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Holding {
    /// Who has it.
    pub node: NodeId,
    /// Which file.
    pub file: FileName,
    /// What it must be.
    pub root: [u8; 32],
}

/// How a stripe is going to be read.
#[derive(Debug, Clone)]
pub(super) enum Way {
    /// For each wanted block its good replicas.
    Replicas(BTreeMap<u8, Vec<Holding>>),
    /// For each piece who has it.
    Pieces { code: Code, attempt: Attempt, pieces: BTreeMap<usize, Holding> },
}

/// Why a stripe cannot be read: what it needs, and what is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The shard's name.
    pub shard: String,
    /// The stripe's number in it.
    pub stripe: u32,
    /// What would do.
    pub needs: String,
    /// What is not there, by node.
    pub missing: Vec<String>,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "stripe {} of {} cannot be read: it needs {}; missing: {}",
            self.stripe,
            self.shard,
            self.needs,
            self.missing.join(", ")
        )
    }
}

/// What is wanted of a stripe, and what the records say of it.
pub(super) struct Wanted<'a> {
    pub root: &'a ShardRoot,
    pub info: &'a StripeInfo,
    pub state: StripeState,
    pub receipt: Option<&'a Receipt>,
    pub blocks: &'a [u8],
    /// Replicas that nodes list may be gone: what is archived is read by its pieces, if they span.
    pub is_leaving: bool,
}

impl Wanted<'_> {
    /// The way to read it with what the nodes hold, if there is one.
    pub(super) fn find_way(&self, held: &Held) -> Result<Option<Way>, ReadError> {
        let pieces = if self.is_leaving { self.pieces_way(held)? } else { None };
        match pieces.or_else(|| self.replicas_way(held)) {
            None if !self.is_leaving => self.pieces_way(held),
            way => Ok(way),
        }
    }

    /// Replicas, if there is one of each block.
    fn replicas_way(&self, held: &Held) -> Option<Way> {
        let &Wanted { info, blocks, .. } = self;
        let mut replicas: BTreeMap<u8, Vec<Holding>> =
            blocks.iter().map(|&block| (block, replicas_of(info, block, held))).collect();
        spread(&mut replicas);
        let empty = |block: &u8| info.fixed.cut.block_len(*block) == 0;
        let is_whole = replicas.iter().all(|(block, holders)| empty(block) || !holders.is_empty());
        is_whole.then_some(Way::Replicas(replicas))
    }

    /// Pieces of the attempt that counts, if they span.
    fn pieces_way(&self, held: &Held) -> Result<Option<Way>, ReadError> {
        let &Wanted { root, info, state, receipt, blocks, .. } = self;
        let StripeState::Archived { attempt, code, .. } = state else { return Ok(None) };
        let unknown =
            || ReadError::UnknownCode { stripe: info.fixed.stripe, code: code.to_string() };
        let code = table::by_id(code).ok_or_else(unknown)?;
        if code.n() != usize::from(root.n) || code.k() != usize::from(root.k) {
            return Err(unknown());
        }
        let pieces = pieces_of(info, attempt, &code, receipt, held);
        let available: Vec<usize> = pieces.keys().copied().collect();
        let wanted: Vec<usize> = blocks.iter().map(|&block| block.into()).collect();
        match reconstruct(&code, &available, &wanted) {
            Ok(_) => Ok(Some(Way::Pieces { code, attempt, pieces })),
            Err(_) => Ok(None),
        }
    }

    /// What it needs and what is missing, when there is no way.
    pub(super) fn explain(&self, reading: &Reading, held: &Held) -> Lost {
        let &Wanted { root, info, state, receipt, blocks, .. } = self;
        let directory = &reading.directory;
        let (n, k) = (usize::from(root.n), usize::from(root.k));
        let gone = |node: NodeId, file| match held.contains_key(&node) {
            true if reading.is_rotten(info.fixed.stripe, node, file) => "has a damaged copy",
            true => "has it no more",
            false => "is not reached",
        };
        let mut missing = Vec::new();
        let needs = match (state, receipt) {
            (StripeState::Archived { .. }, Some(receipt)) => {
                for piece in &receipt.pieces {
                    let file = match piece.form {
                        PieceForm::File => {
                            FileName::Piece { piece: piece.piece, attempt: receipt.attempt }
                        }
                        PieceForm::Replica { block } => FileName::Replica { block },
                    };
                    let files = held.get(&piece.node);
                    if !files.is_some_and(|files| {
                        files.iter().any(|view| view.file == file && view.root == piece.root)
                    }) {
                        let (number, node) = (piece.piece, directory.name(piece.node));
                        missing.push(format!(
                            "piece {number} (node {node} {})",
                            gone(piece.node, file)
                        ));
                    }
                }
                format!("{k} of its {n} pieces")
            }
            (StripeState::Archived { attempt, code, .. }, None) => {
                let code = table::by_id(code);
                let found = code.map_or(0, |c| pieces_of(info, attempt, &c, None, held).len());
                missing.push(format!("all but {found} of them"));
                missing.push("its receipt, which would name the nodes that have them".into());
                format!("{k} of its {n} pieces")
            }
            _ => {
                for &block in blocks {
                    if info.fixed.cut.block_len(block) > 0
                        && replicas_of(info, block, held).is_empty()
                    {
                        let layout = Layout::new(n, k).into_iter();
                        let file = FileName::Replica { block };
                        let at = layout.flat_map(|layout| layout.holders(block.into()));
                        let nodes = at.filter_map(|position| info.places.get(position));
                        let nodes: Vec<String> = nodes
                            .map(|&node| format!("{} {}", directory.name(node), gone(node, file)))
                            .collect();
                        missing.push(format!("block {block} ({})", nodes.join(", ")));
                    }
                }
                "one replica of each block".into()
            }
        };
        Lost { shard: root.name.to_string(), stripe: info.fixed.stripe.index, needs, missing }
    }
}

/// Puts first of each block's holders the one that is first for the fewest blocks so far: blocks are read at once, and two from one
/// node take twice as long.
fn spread(replicas: &mut BTreeMap<u8, Vec<Holding>>) {
    let mut firsts: BTreeMap<NodeId, usize> = BTreeMap::new();
    for holders in replicas.values_mut() {
        let load = |holding: &Holding| firsts.get(&holding.node).copied().unwrap_or(0);
        let least = holders.iter().enumerate().min_by_key(|(at, holding)| (load(holding), *at));
        if let Some((at, &Holding { node, .. })) = least {
            holders[..=at].rotate_right(1);
            *firsts.entry(node).or_default() += 1;
        }
    }
}

/// Good replicas of a block, spread: which holder comes first depends on the block.
fn replicas_of(info: &StripeInfo, block: u8, held: &Held) -> Vec<Holding> {
    let Some(expected) = info.fixed.blocks.get(usize::from(block)) else { return Vec::new() };
    let file = FileName::Replica { block };
    let mut holders: Vec<Holding> = held
        .iter()
        .filter(|(_, files)| {
            files.iter().any(|view| {
                view.file == file
                    && view.root == expected.root
                    && view.len_bytes == expected.len_bytes
            })
        })
        .map(|(&node, _)| Holding { node, file, root: expected.root })
        .collect();
    if holders.len() > 1 {
        let turn = (usize::from(block) + info.fixed.stripe.index as usize) % holders.len();
        holders.rotate_left(turn);
    }
    holders
}

fn pieces_of(
    info: &StripeInfo,
    attempt: Attempt,
    code: &Code,
    receipt: Option<&Receipt>,
    held: &Held,
) -> BTreeMap<usize, Holding> {
    let mut pieces = BTreeMap::new();
    for (&node, files) in held {
        for view in files {
            let piece = match view.file {
                FileName::Piece { piece, attempt: of } if of == attempt => usize::from(piece),
                // In the classical code a replica is the systematic piece of the same number.
                FileName::Replica { block } if matches!(code, Code::Rs(_)) => {
                    let expected = info.fixed.blocks.get(usize::from(block));
                    if expected.is_none_or(|expected| expected.root != view.root) {
                        continue;
                    }
                    usize::from(block)
                }
                _ => continue,
            };
            // With a receipt a piece is what the receipt says; without one the decoded bytes decide.
            let proven = receipt.and_then(|receipt| receipt.pieces.get(piece));
            if piece < code.n() && proven.is_none_or(|proven| proven.root == view.root) {
                pieces.insert(piece, Holding { node, file: view.file, root: view.root });
            }
        }
    }
    if matches!(code, Code::Rs(_)) {
        // A block past the shard's end has no file anywhere, and is known all the same: all zero.
        for block in (0..info.fixed.cut.k).filter(|&block| info.fixed.cut.block_len(block) == 0) {
            if let Some(node) = held.keys().next() {
                let (node, file) = (*node, FileName::Replica { block });
                let root = *blake3::hash(&[]).as_bytes();
                pieces.entry(block.into()).or_insert(Holding { node, file, root });
            }
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::{BlockInfo, FIELD_GF8, LAYOUT_STANDARD, StripeFixed};
    use crate::id::{Generation, SaveId, ShardId, Step, StripeId};
    use crate::units::GRAIN_BYTES;
    use crate::wire::answers::FileView;

    fn root() -> ShardRoot {
        let save = SaveId([1; 12]);
        ShardRoot {
            job: "job".parse().unwrap(),
            step: Step(1),
            save,
            index: 0,
            shards: 1,
            shard: ShardId::new(save, 0),
            name: "weights".parse().unwrap(),
            len_bytes: 4 * GRAIN_BYTES,
            block_bytes: GRAIN_BYTES,
            n: 6,
            k: 4,
            layout: LAYOUT_STANDARD,
            field: FIELD_GF8,
            fingerprint_key: [2; 32],
            ring: Vec::new(),
            stripes_root: [3; 32],
        }
    }

    #[test]
    fn no_node_is_first_for_two_blocks() {
        for code in table::all() {
            let (n, k) = (code.n(), code.k());
            let layout = Layout::new(n, k).unwrap();
            let of = |block: usize| {
                let holding = |node: usize| Holding {
                    node: NodeId(node as u64),
                    file: FileName::Replica { block: block as u8 },
                    root: [0; 32],
                };
                let mut holders: Vec<Holding> = layout.holders(block).map(holding).collect();
                holders.rotate_left(block % 2);
                (block as u8, holders)
            };
            let mut replicas: BTreeMap<u8, Vec<Holding>> = (0..k).map(of).collect();
            let before: Vec<usize> = replicas.values().map(Vec::len).collect();
            spread(&mut replicas);
            let firsts: std::collections::BTreeSet<NodeId> =
                replicas.values().map(|holders| holders[0].node).collect();
            assert_eq!(firsts.len(), k, "({n},{k})");
            assert!(replicas.values().map(Vec::len).eq(before), "nobody is left out");
        }
    }

    #[test]
    fn what_is_leaving_is_read_by_its_pieces_if_there_are_any() {
        let root = root();
        let stripe = StripeId { shard: root.shard, index: 0 };
        let cut = root.geometry().unwrap().stripe(0).unwrap();
        let block = BlockInfo { len_bytes: GRAIN_BYTES, root: [7; 32], fingerprints: Vec::new() };
        let fixed = StripeFixed { stripe, cut, blocks: vec![block; 4] };
        let info = StripeInfo { fixed, places: (0..6).map(NodeId).collect() };
        let attempt = Attempt([1; 16]);
        let code = table::find(6, 4).unwrap().id();
        let generation = Generation::default();
        let archived = StripeState::Archived { attempt, code, generation, dropped: false };
        let view = |file| FileView { file, len_bytes: GRAIN_BYTES, root: [7; 32] };
        let held = |pieces| -> Held {
            let on = |node: u8| {
                let mut files = vec![view(FileName::Replica { block: node % 4 })];
                files.extend(
                    (node < pieces).then(|| view(FileName::Piece { piece: node, attempt })),
                );
                (NodeId(node.into()), files)
            };
            (0..6).map(on).collect()
        };
        let way = |state, is_leaving, pieces| {
            let blocks = &[0, 1, 2, 3];
            let wanted =
                Wanted { root: &root, info: &info, state, receipt: None, blocks, is_leaving };
            wanted.find_way(&held(pieces)).unwrap().unwrap()
        };
        assert!(matches!(way(archived, false, 6), Way::Replicas(_)));
        assert!(matches!(way(archived, true, 6), Way::Pieces { .. }));
        assert!(matches!(way(archived, true, 3), Way::Replicas(_)));
        assert!(matches!(way(StripeState::Replicated, true, 6), Way::Replicas(_)));
    }
}
