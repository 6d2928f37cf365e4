//! The sources that a stripe can be read from: replicas of the wanted blocks, or pieces that
//! determine these blocks.
//!
//! This module evaluates the files that the nodes say they hold. It fetches nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::file_probe::{FoundFile, HeldFiles};
use super::read_session::StripeDamage;
use super::{ReadError, ReadSession};
use crate::code::{Code, Layout, reconstruct, table};
use crate::format::file::FileName;
use crate::format::grain_set::GrainSet;
use crate::format::records::{PieceForm, Receipt, ReceiptPiece, ShardRoot, StripeState};
use crate::id::{Attempt, NodeId};
use crate::pipeline::record_fetch::StripeInfo;
use crate::units::GRAIN_BYTES;

/// Maximum number of missing sources that an error names.
const MAX_MISSING: usize = 64;

/// A file on a node that a stripe is read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RemoteFile {
    /// The node that holds the file.
    pub node: NodeId,
    /// The name of the file.
    pub file: FileName,
    /// The BLAKE3 hash that the file must have, if it is known.
    pub root: Option<[u8; 32]>,
    /// Whether the file's node knows of no damage to it. Such a file counts as a full copy.
    pub counts_as_copy: bool,
}

/// The pieces of an attempt.
#[derive(Debug, Clone)]
pub(super) struct CodedPieces {
    pub code: Code,
    pub attempt: Attempt,
    /// The holders of each piece, those of files without known damage first.
    pub pieces: BTreeMap<usize, Vec<RemoteFile>>,
}

/// The sources of a stripe.
#[derive(Debug, Clone)]
pub(super) struct SourceSet {
    /// The holders of the replicas of each wanted block, those of files without known damage first.
    pub replicas: BTreeMap<u8, Vec<RemoteFile>>,
    /// The pieces, if the stripe is archived.
    pub coded: Option<CodedPieces>,
    /// Whether the stripe is decoded from pieces. Single grains may come from replicas all the
    /// same.
    pub by_pieces: bool,
}

/// The reason why a stripe cannot be read: the sources that it needs, and those that are missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadableStripe {
    /// The shard's name.
    pub shard: String,
    /// The stripe's number in it.
    pub stripe: u32,
    /// The sources that would be enough.
    pub needs: String,
    /// The missing sources, with their nodes.
    pub missing: Vec<String>,
}

impl std::fmt::Display for UnreadableStripe {
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

/// The part of a stripe that is wanted, and the contents of the stripe's records.
pub(super) struct ReadRequest<'a> {
    pub root: &'a ShardRoot,
    pub info: &'a StripeInfo,
    pub state: StripeState,
    pub receipt: Option<&'a Receipt>,
    pub blocks: &'a [u8],
    /// The wanted grains of each block.
    pub grains: Range<u64>,
    /// Whether replicas that nodes list may be gone. An archived stripe is then read from its
    /// pieces, if they determine the wanted blocks.
    pub is_leaving: bool,
}

impl ReadRequest<'_> {
    /// Returns the sources among the files in `held` from which the stripe can be read. Returns
    /// `None` if, given the known `damage`, some wanted grain is good in no replica and cannot be
    /// decoded from good pieces.
    pub(super) fn find_sources(
        &self,
        damage: &StripeDamage,
        held: &HeldFiles,
    ) -> Result<Option<SourceSet>, ReadError> {
        let replicas = self.replicas_by_block(held);
        let coded = self.find_coded_pieces(held)?;
        let counts = |holders: &[RemoteFile]| holders.iter().any(|holding| holding.counts_as_copy);
        let has_all = |is_fit: &dyn Fn(&[RemoteFile]) -> bool| {
            let is_fit = |(block, holders): (&u8, &Vec<RemoteFile>)| {
                self.info.fixed.cut.block_len(*block) == 0 || is_fit(holders)
            };
            replicas.iter().all(is_fit)
        };
        let spans = |is_fit: &dyn Fn(&[RemoteFile]) -> bool| {
            coded.as_ref().is_some_and(|coded| {
                let fit = coded.pieces.iter().filter(|(_, holders)| is_fit(holders));
                let fit: Vec<usize> = fit.map(|(piece, _)| *piece).collect();
                reconstruct(&coded.code, &fit, &self.block_numbers()).is_ok()
            })
        };
        let any = |holders: &[RemoteFile]| !holders.is_empty();
        let by_pieces = if has_all(&counts) && !(self.is_leaving && spans(&counts)) {
            false
        } else {
            spans(&counts) || (!has_all(&any) && spans(&any))
        };
        let way = SourceSet { replicas, coded, by_pieces };
        // A block may have only replicas and another block only pieces. The same holds for single
        // grains.
        let first = self.grains.start;
        let is_there = self.unreadable_blocks(&StripeDamage::new(), &way, first).is_empty();
        let is_readable = |grain| self.unreadable_blocks(damage, &way, grain).is_empty();
        let is_whole = is_there && self.damaged_grains(damage).into_iter().all(is_readable);
        Ok(is_whole.then_some(way))
    }

    fn block_numbers(&self) -> Vec<usize> {
        self.blocks.iter().map(|&block| block.into()).collect()
    }

    /// Returns the wanted grains that are damaged in at least one source.
    fn damaged_grains(&self, damage: &StripeDamage) -> BTreeSet<u64> {
        let all = damage.values().flat_map(GrainSet::iter);
        all.filter(|grain| self.grains.contains(grain)).collect()
    }

    /// Returns the wanted blocks whose grain `grain` is good in no replica and cannot be decoded
    /// from good pieces.
    fn unreadable_blocks(&self, damage: &StripeDamage, sources: &SourceSet, grain: u64) -> Vec<u8> {
        let is_good = |holding: &RemoteFile| {
            let damaged = damage.get(&(holding.node, holding.file));
            !damaged.is_some_and(|grains| grains.contains(grain))
        };
        let has_replica = |block: &u8| {
            let len = self.info.fixed.cut.block_len(*block);
            len <= grain * GRAIN_BYTES || sources.replicas[block].iter().any(is_good)
        };
        let rest: Vec<u8> = self.blocks.iter().copied().filter(|b| !has_replica(b)).collect();
        let Some(coded) = &sources.coded else { return rest };
        let good = coded.pieces.iter().filter(|(_, holders)| holders.iter().any(is_good));
        let good: Vec<usize> = good.map(|(piece, _)| *piece).collect();
        let is_coded = |block: &u8| reconstruct(&coded.code, &good, &[(*block).into()]).is_ok();
        rest.into_iter().filter(|block| !is_coded(block)).collect()
    }

    /// Returns the replicas of each wanted block.
    fn replicas_by_block(&self, held: &HeldFiles) -> BTreeMap<u8, Vec<RemoteFile>> {
        let of = |&block: &u8| (block, replicas_of_block(self.info, block, held));
        self.blocks.iter().map(of).collect()
    }

    /// Returns the pieces of the attempt in the stripe's state; `None` if the stripe is not
    /// archived, or if its code is unknown and the replicas are enough.
    fn find_coded_pieces(&self, held: &HeldFiles) -> Result<Option<CodedPieces>, ReadError> {
        let &ReadRequest { root, info, state, receipt, .. } = self;
        let StripeState::Archived { attempt, code, .. } = state else { return Ok(None) };
        let unknown =
            || ReadError::UnknownCode { stripe: info.fixed.stripe, code: code.to_string() };
        let Some(code) = table::by_id(code) else {
            // Replicas may be enough.
            let whole = self.blocks.iter().all(|&block| {
                info.fixed.cut.block_len(block) == 0
                    || !replicas_of_block(info, block, held).is_empty()
            });
            return if whole { Ok(None) } else { Err(unknown()) };
        };
        if code.n() != usize::from(root.n) || code.k() != usize::from(root.k) {
            return Err(unknown());
        }
        let pieces = pieces_of_attempt(info, attempt, &code, receipt, held);
        Ok(Some(CodedPieces { code, attempt, pieces }))
    }

    /// Returns what the stripe needs and what is missing, for a stripe that cannot be read.
    pub(super) fn explain_unreadable(
        &self,
        reading: &ReadSession,
        held: &HeldFiles,
    ) -> UnreadableStripe {
        let &ReadRequest { root, info, state, receipt, .. } = self;
        let pieces_needed = format!("{} of its {} pieces", root.k, root.n);
        let (needs, mut missing) = match (state, receipt) {
            (StripeState::Archived { .. }, Some(receipt)) => {
                (pieces_needed, self.missing_pieces(receipt, reading, held))
            }
            (StripeState::Archived { attempt, code, .. }, None) => {
                let code = table::by_id(code);
                let found =
                    code.map_or(0, |c| pieces_of_attempt(info, attempt, &c, None, held).len());
                let receipt = "its receipt, which would name the nodes that have them".to_owned();
                (pieces_needed, vec![format!("all but {found} of them"), receipt])
            }
            _ => ("one replica of each block".to_owned(), self.missing_replicas(reading, held)),
        };
        if let Ok(coded) = self.find_coded_pieces(held) {
            let sources =
                SourceSet { replicas: self.replicas_by_block(held), coded, by_pieces: false };
            let damage = reading.damage_of_stripe(info.fixed.stripe);
            for grain in self.damaged_grains(&damage) {
                for block in self.unreadable_blocks(&damage, &sources, grain) {
                    missing.push(format!("grain {grain} of block {block} (no copy has it good)"));
                }
            }
            missing.truncate(MAX_MISSING);
        }
        let (shard, stripe) = (root.name.to_string(), info.fixed.stripe.index);
        UnreadableStripe { shard, stripe, needs, missing }
    }

    /// Describes the pieces of the receipt that are not among the files held.
    fn missing_pieces(
        &self,
        receipt: &Receipt,
        reading: &ReadSession,
        held: &HeldFiles,
    ) -> Vec<String> {
        let is_missing = |piece: &&ReceiptPiece| {
            let file = receipt.file_of(piece);
            let is_it = |found: &FoundFile| {
                found.file == file && found.content.is_none_or(|(_, root)| root == piece.root)
            };
            !held.get(&piece.node).is_some_and(|files| files.iter().any(is_it))
        };
        let describe = |piece: &ReceiptPiece| {
            let (number, node) = (piece.piece, reading.directory.name(piece.node));
            let why = self.why_absent(piece.node, receipt.file_of(piece), reading, held);
            format!("piece {number} (node {node} {why})")
        };
        receipt.pieces.iter().filter(is_missing).map(describe).collect()
    }

    /// Describes the wanted blocks without a replica among the files held.
    fn missing_replicas(&self, reading: &ReadSession, held: &HeldFiles) -> Vec<String> {
        let &ReadRequest { root, info, blocks, .. } = self;
        let mut missing = Vec::new();
        for &block in blocks {
            if info.fixed.cut.block_len(block) > 0
                && replicas_of_block(info, block, held).is_empty()
            {
                let layout = Layout::new(root.n.into(), root.k.into()).into_iter();
                let file = FileName::Replica { block };
                let at = layout.flat_map(|layout| layout.holders(block.into()));
                let nodes = at.filter_map(|position| info.places.get(position));
                let describe = |&node: &NodeId| {
                    let why = self.why_absent(node, file, reading, held);
                    format!("{} {why}", reading.directory.name(node))
                };
                let nodes: Vec<String> = nodes.map(describe).collect();
                missing.push(format!("block {block} ({})", nodes.join(", ")));
            }
        }
        missing
    }

    fn why_absent(
        &self,
        node: NodeId,
        file: FileName,
        reading: &ReadSession,
        held: &HeldFiles,
    ) -> &'static str {
        match held.contains_key(&node) {
            true if reading.is_corrupt(self.info.fixed.stripe, node, file) => "has a damaged copy",
            true => "no longer has it",
            false => "is unreachable",
        }
    }
}

/// Returns the replicas of a block, files without known damage first. Their order depends on the
/// stripe and the block. It decides between nodes of which equally many files are open.
fn replicas_of_block(info: &StripeInfo, block: u8, held: &HeldFiles) -> Vec<RemoteFile> {
    let Some(expected) = info.fixed.blocks.get(usize::from(block)) else { return Vec::new() };
    let (file, expected) = (FileName::Replica { block }, (expected.len_bytes, expected.root));
    let found = |files: &[FoundFile]| {
        files.iter().copied().find(|found| {
            found.file == file && found.content.is_none_or(|content| content == expected)
        })
    };
    let holding = |(&node, files): (&NodeId, &Vec<FoundFile>)| {
        let counts = found(files)?.counts_as_copy;
        Some(RemoteFile { node, file, root: Some(expected.1), counts_as_copy: counts })
    };
    let mut holders: Vec<RemoteFile> = held.iter().filter_map(holding).collect();
    if holders.len() > 1 {
        let turn = (usize::from(block) + info.fixed.stripe.index as usize) % holders.len();
        holders.rotate_left(turn);
    }
    holders.sort_by_key(|holding| !holding.counts_as_copy);
    holders
}

fn pieces_of_attempt(
    info: &StripeInfo,
    attempt: Attempt,
    code: &Code,
    receipt: Option<&Receipt>,
    held: &HeldFiles,
) -> BTreeMap<usize, Vec<RemoteFile>> {
    let mut pieces: BTreeMap<usize, Vec<RemoteFile>> = BTreeMap::new();
    for (&node, files) in held {
        for found in files {
            let found_root = found.content.map(|(_, root)| root);
            let (piece, root) = match found.file {
                FileName::Piece { piece, attempt: of } if of == attempt => {
                    let proven = receipt.and_then(|receipt| receipt.pieces.get(usize::from(piece)));
                    let root = match proven {
                        // Without the receipt, the fingerprints of the decoded blocks decide.
                        None => found_root,
                        Some(proven) if proven.form == PieceForm::File => Some(proven.root),
                        // A later receipt may name a piece in the place of this kept replica.
                        Some(_) => None,
                    };
                    (usize::from(piece), root)
                }
                // In the classical code, a replica is the systematic piece with the number of its
                // block.
                FileName::Replica { block } if matches!(code, Code::Rs(_)) => {
                    let Some(expected) = info.fixed.blocks.get(usize::from(block)) else {
                        continue;
                    };
                    (usize::from(block), Some(expected.root))
                }
                _ => continue,
            };
            let is_right = root.is_none() || found_root.is_none() || found_root == root;
            if piece < code.n() && is_right {
                let holding = RemoteFile {
                    node,
                    file: found.file,
                    root,
                    counts_as_copy: found.counts_as_copy,
                };
                pieces.entry(piece).or_default().push(holding);
            }
        }
    }
    if matches!(code, Code::Rs(_)) {
        // A block past the shard's end has no file on any node. Its content is known: it is all
        // zero.
        for block in (0..info.fixed.cut.k).filter(|&block| info.fixed.cut.block_len(block) == 0) {
            if let Some(&node) = held.keys().next() {
                let file = FileName::Replica { block };
                let root = Some(*blake3::hash(&[]).as_bytes());
                let holders = pieces.entry(block.into()).or_default();
                if holders.is_empty() {
                    holders.push(RemoteFile { node, file, root, counts_as_copy: true });
                }
            }
        }
    }
    for holders in pieces.values_mut() {
        holders.sort_by_key(|holding| !holding.counts_as_copy);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::{BlockInfo, StripeFixed};
    use crate::format::samples;
    use crate::id::{Generation, StripeId};

    #[test]
    fn what_is_leaving_is_read_by_its_pieces_if_there_are_any() {
        let root = samples::shard_root(Vec::new());
        let stripe = StripeId { shard: root.shard, index: 0 };
        let cut = root.geometry().unwrap().stripe(0).unwrap();
        let block = BlockInfo { len_bytes: GRAIN_BYTES, root: [7; 32], fingerprints: Vec::new() };
        let fixed = StripeFixed { stripe, cut, blocks: vec![block; 4] };
        let info = StripeInfo { fixed, places: (0..6).map(NodeId).collect() };
        let attempt = Attempt([1; 16]);
        let code = table::find(6, 4).unwrap().id();
        let generation = Generation::default();
        let archived = StripeState::Archived { attempt, code, generation, dropped: false };
        let view =
            |file| FoundFile { file, content: Some((GRAIN_BYTES, [7; 32])), counts_as_copy: true };
        let held = |pieces| -> HeldFiles {
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
            let (root, info, receipt, grains) = (&root, &info, None, 0..1);
            let wanted = ReadRequest { root, info, state, receipt, blocks, grains, is_leaving };
            wanted.find_sources(&StripeDamage::new(), &held(pieces)).unwrap().unwrap()
        };
        assert!(!way(archived, false, 6).by_pieces);
        assert!(way(archived, true, 6).by_pieces);
        assert!(!way(archived, true, 3).by_pieces);
        assert!(!way(StripeState::Replicated, true, 6).by_pieces);
    }
}
