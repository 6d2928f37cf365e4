//! The judgement of a stripe by the results of its nodes' examinations. The functions here are pure
//! and ask no node.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use crate::code::{Code, Layout, NodeShare, SurvivableLossCache, table};
use crate::format::digest;
use crate::format::file::FileName;
use crate::format::grain_set::GrainSet;
use crate::format::records::{PieceForm, Receipt, ShardRoot, StripeState};
use crate::id::{Attempt, NodeId};
use crate::pipeline::record_fetch::StripeInfo;
use crate::units::GRAIN_BYTES;
use crate::wire::calls::{ExamineAnswer, RecordName, SourceView};

/// A file or record of a checkpoint that a node may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeldItem {
    /// A replica of a block, from 0.
    Replica(u8),
    /// A piece, from 0.
    Piece(u8),
    /// A shard's list of stripes.
    Leaves,
    /// A shard's commit mark.
    Mark,
    /// A stripe's record.
    Record,
    /// A stripe's receipt.
    Receipt,
}

impl fmt::Display for HeldItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeldItem::Replica(block) => write!(f, "replica of block {block}"),
            HeldItem::Piece(piece) => write!(f, "piece {piece}"),
            HeldItem::Leaves => f.write_str("list of stripes"),
            HeldItem::Mark => f.write_str("commit mark"),
            HeldItem::Record => f.write_str("record"),
            HeldItem::Receipt => f.write_str("receipt"),
        }
    }
}

/// A defect of a file or record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Problem {
    /// This number of grains is damaged. The others are good.
    Grains(u64),
    /// The record does not parse, or the tail of the file is broken, or the file cannot be opened.
    Damaged,
    /// The file or record is intact, but its contents are not those that were committed.
    Other,
    /// The node does not have the file or record.
    Missing,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Grains(1) => f.write_str("1 grain damaged"),
            Problem::Grains(many) => write!(f, "{many} grains damaged"),
            Problem::Damaged => f.write_str("damaged"),
            Problem::Other => f.write_str("not what was committed"),
            Problem::Missing => f.write_str("missing"),
        }
    }
}

/// A defective or missing file or record on a node that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::client) struct JudgedFault {
    pub node: NodeId,
    pub held: HeldItem,
    pub wrong: Problem,
}

/// The judgement of a stripe.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::client) struct StripeJudgement {
    pub faults: Vec<JudgedFault>,
    /// Records that nodes lack although no copy is required there, because as many copies exist as
    /// the commit promised.
    pub lacking: Vec<JudgedFault>,
    /// Files that are intact.
    pub good: BTreeSet<(NodeId, FileName)>,
    /// The nodes that answered.
    pub answered: BTreeSet<NodeId>,
    /// Number of further nodes that may be lost, whichever they are; `None` if the stripe cannot be
    /// read from the nodes that answered.
    pub survives: Option<usize>,
    pub files: u64,
    pub file_bytes: u64,
    pub records: u64,
}

/// The records of a stripe, and the answers of its nodes.
pub(in crate::client) struct ExaminedStripe<'a> {
    pub root: &'a ShardRoot,
    /// The shard's current ring.
    pub ring: &'a [NodeId],
    /// The stripe record and its hash that the commit fixed; `None` if no node has it, and for a
    /// shard without stripes.
    pub info: Option<(&'a StripeInfo, [u8; 32])>,
    pub state: StripeState,
    pub receipt: Option<&'a Receipt>,
    pub answers: &'a BTreeMap<NodeId, ExamineAnswer>,
    /// Whether the records of the shard were examined too.
    pub with_shard: bool,
}

/// A file from which at least a part can be read.
#[derive(Clone, Copy)]
struct ReadableFile<'a> {
    node: NodeId,
    held: HeldItem,
    /// Whether the file is to be dropped, or is left over.
    is_extra: bool,
    /// The damaged grains.
    damaged: Option<&'a GrainSet>,
}

impl ExaminedStripe<'_> {
    pub(in crate::client) fn judge_stripe(
        &self,
        cache: &mut SurvivableLossCache,
    ) -> StripeJudgement {
        let answered = self.answers.keys().copied().collect();
        let mut exam = StripeJudgement { answered, ..StripeJudgement::default() };
        let readable = self.judge_files(&mut exam);
        let least_copies = self.judge_records_and_count_copies(&mut exam);
        // Replicas of an archived stripe may be dropped at any time. They are taken into account
        // only if the pieces do not suffice.
        let lasting: Vec<ReadableFile<'_>> =
            readable.iter().filter(|file| !file.is_extra).copied().collect();
        let of_data = self
            .count_survivable_losses(&lasting, cache)
            .or_else(|| self.count_survivable_losses(&readable, cache));
        exam.survives =
            of_data.and_then(|losses| least_copies.checked_sub(1).map(|most| losses.min(most)));
        exam
    }

    fn is_shard_non_empty(&self) -> bool {
        self.root.len_bytes > 0
    }

    /// Returns the attempt by which the stripe is archived, and its code, if this program has the
    /// code and the code fits the shard.
    fn archived_attempt_and_code(&self) -> Option<(Attempt, Code)> {
        let StripeState::Archived { attempt, code, .. } = self.state else { return None };
        let code = table::by_id(code)?;
        let fits = code.n() == usize::from(self.root.n) && code.k() == usize::from(self.root.k);
        fits.then_some((attempt, code))
    }

    /// Returns the files that the nodes should have, with the hashes of their contents.
    fn expected_files(&self) -> BTreeMap<(NodeId, FileName), [u8; 32]> {
        let mut expected = BTreeMap::new();
        match (self.state, self.receipt) {
            (StripeState::Archived { .. }, None) => {}
            (StripeState::Archived { .. }, Some(receipt)) => {
                for piece in &receipt.pieces {
                    // A block past the shard's end has no file.
                    if let PieceForm::Replica { block } = piece.form
                        && self.block_number_and_root(block.into()).is_none()
                    {
                        continue;
                    }
                    expected.insert((piece.node, receipt.file_of(piece)), piece.root);
                }
            }
            _ => {
                let layout = Layout::new(self.root.n.into(), self.root.k.into()).ok();
                let places = self.info.map(|(info, _)| &info.places).into_iter().flatten();
                for (position, &node) in places.enumerate() {
                    let blocks = layout.iter().flat_map(|layout| layout.blocks_at(position));
                    for (number, block) in blocks.filter_map(|at| self.block_number_and_root(at)) {
                        expected.insert((node, FileName::Replica { block: number }), block);
                    }
                }
            }
        }
        expected
    }

    /// Returns the number and root of a block, if the block has a file.
    fn block_number_and_root(&self, block: usize) -> Option<(u8, [u8; 32])> {
        let info = self.info?.0.fixed.blocks.get(block).filter(|info| info.len_bytes > 0)?;
        Some((u8::try_from(block).ok()?, info.root))
    }

    fn judge_files(&self, exam: &mut StripeJudgement) -> Vec<ReadableFile<'_>> {
        let expected = self.expected_files();
        let coded = self.archived_attempt_and_code();
        let is_archived = matches!(self.state, StripeState::Archived { .. });
        let mut readable = Vec::new();
        let mut there: BTreeSet<(NodeId, FileName)> = BTreeSet::new();
        let mut good: BTreeMap<FileName, usize> = BTreeMap::new();
        for (&node, answer) in self.answers {
            for view in &answer.files {
                exam.files += 1;
                exam.file_bytes += view.content.map_or(0, |(len_bytes, _)| len_bytes);
                let is_expected = expected.get(&(node, view.file));
                let (held, root) = match view.file {
                    FileName::Replica { block } => match self.block_number_and_root(block.into()) {
                        Some((_, root)) => (HeldItem::Replica(block), Some(root)),
                        None if self.info.is_some() => continue,
                        None => (HeldItem::Replica(block), None),
                    },
                    FileName::Piece { piece, attempt } => match &coded {
                        Some((counts, _)) if *counts == attempt => {
                            (HeldItem::Piece(piece), self.root_of_piece(piece))
                        }
                        // The piece belongs to another attempt than the one by which the stripe is
                        // archived.
                        _ => continue,
                    },
                };
                there.insert((node, view.file));
                let is_extra = is_archived && is_expected.is_none();
                let wrong = judge_file(view, root);
                if let Some(wrong) = wrong.filter(|_| !is_extra) {
                    exam.faults.push(JudgedFault { node, held, wrong });
                }
                match wrong {
                    None => {
                        *good.entry(view.file).or_default() += usize::from(!is_extra);
                        exam.good.insert((node, view.file));
                    }
                    Some(Problem::Grains(_)) => {}
                    Some(_) => continue,
                }
                let damaged = view.damaged.as_ref();
                readable.push(ReadableFile { node, held, is_extra, damaged });
            }
        }
        let mut copies: BTreeMap<FileName, usize> = BTreeMap::new();
        for (_, file) in expected.keys() {
            *copies.entry(*file).or_default() += 1;
        }
        for (node, file) in expected.into_keys() {
            let is_elsewhere = good.get(&file) >= copies.get(&file);
            if self.answers.contains_key(&node) && !there.contains(&(node, file)) && !is_elsewhere {
                let held = match file {
                    FileName::Replica { block } => HeldItem::Replica(block),
                    FileName::Piece { piece, .. } => HeldItem::Piece(piece),
                };
                exam.faults.push(JudgedFault { node, held, wrong: Problem::Missing });
            }
        }
        readable
    }

    /// Returns the root that a piece file must have, if the receipt names a file.
    fn root_of_piece(&self, piece: u8) -> Option<[u8; 32]> {
        let piece = self.receipt?.pieces.get(usize::from(piece))?;
        (piece.form == PieceForm::File).then_some(piece.root)
    }

    /// Returns the records that nodes should have: for each its node, and its digest if that is known.
    fn list_expected_records(&self) -> Vec<(NodeId, HeldItem, Option<[u8; 32]>)> {
        let mut expected = Vec::new();
        let on_ring = self.ring.iter().copied();
        if self.with_shard {
            let digest = digest::of_root(self.root);
            let both = [HeldItem::Leaves, HeldItem::Mark];
            expected.extend(on_ring.flat_map(|node| both.map(|held| (node, held, digest))));
        }
        let mut named: BTreeSet<NodeId> = BTreeSet::new();
        if let Some(receipt) = self.receipt {
            named.extend(receipt.pieces.iter().map(|piece| piece.node));
        }
        if let Some((info, leaf)) = self.info {
            // The stripe records of several nodes may have different places. A receipt names the
            // nodes of an archived stripe, and a repair completes the records of these.
            let nodes: Vec<NodeId> = match named.is_empty() {
                true => info.places.clone(),
                false => named.iter().copied().collect(),
            };
            expected.extend(nodes.into_iter().map(|node| (node, HeldItem::Record, Some(leaf))));
        }
        if let Some(receipt) = self.receipt {
            let digest = digest::of_receipt(receipt);
            expected.extend(named.iter().map(|&node| (node, HeldItem::Receipt, digest)));
        } else if let (StripeState::Archived { .. }, Some((info, _))) = (self.state, self.info) {
            // No receipt is left that names its nodes, so every node of the stripe should have one.
            named.extend(&info.places);
            expected.extend(named.iter().map(|&node| (node, HeldItem::Receipt, None)));
        }
        expected
    }

    /// Judges the records. Returns the number of good copies of the stripe record, or of the leaves
    /// if these were examined too and have fewer good copies.
    fn judge_records_and_count_copies(&self, exam: &mut StripeJudgement) -> usize {
        let expected = self.list_expected_records();
        let digests: HashMap<HeldItem, Option<[u8; 32]>> =
            expected.iter().map(|(_, held, digest)| (*held, *digest)).collect();
        let should_have =
            |node, held| expected.iter().any(|&(at, item, _)| (at, item) == (node, held));
        let mut copies: HashMap<HeldItem, usize> = HashMap::new();
        let mut there: Vec<(NodeId, HeldItem)> = Vec::new();
        for (&node, answer) in self.answers {
            for view in &answer.records {
                exam.records += 1;
                let Some(held) = self.held_item_of_record(view.record) else { continue };
                // This is an earlier receipt of the attempt, on a node that was replaced.
                if held == HeldItem::Receipt && !should_have(node, held) {
                    continue;
                }
                there.push((node, held));
                let wrong = match view.digest {
                    None => Problem::Damaged,
                    digest if digests.get(&held).is_none_or(|expected| *expected == digest) => {
                        *copies.entry(held).or_default() += 1;
                        continue;
                    }
                    Some(_) => Problem::Other,
                };
                exam.faults.push(JudgedFault { node, held, wrong });
            }
        }
        let copies = |held| copies.get(&held).copied().unwrap_or(0);
        for &(node, held, _) in &expected {
            if self.answers.contains_key(&node) && !there.contains(&(node, held)) {
                let fault = JudgedFault { node, held, wrong: Problem::Missing };
                // A node that was down, or took its place late, never receives some of the records.
                let has_enough = copies(held) >= self.promised_copies(held);
                if has_enough { &mut exam.lacking } else { &mut exam.faults }.push(fault);
            }
        }
        let of_record =
            if self.is_shard_non_empty() { copies(HeldItem::Record) } else { usize::MAX };
        if self.with_shard { of_record.min(copies(HeldItem::Leaves)) } else { of_record }
    }

    /// Returns the minimum number of nodes that have a record when the object it belongs to is
    /// committed (docs/semantics.md, 2). A receipt must be on every node that it names, so no number
    /// of copies suffices.
    fn promised_copies(&self, held: HeldItem) -> usize {
        let (n, k) = (usize::from(self.root.n), usize::from(self.root.k));
        match held {
            HeldItem::Leaves | HeldItem::Mark => (self.ring.len() + 1).saturating_sub(k),
            HeldItem::Record => (n + 1).saturating_sub(k),
            _ => usize::MAX,
        }
    }

    /// Returns the kind of a record, or `None` for a receipt of another attempt than the one by
    /// which the stripe is archived.
    fn held_item_of_record(&self, record: RecordName) -> Option<HeldItem> {
        match record {
            RecordName::Leaves => Some(HeldItem::Leaves),
            RecordName::Mark => Some(HeldItem::Mark),
            RecordName::Stripe { .. } => Some(HeldItem::Record),
            RecordName::Receipt { attempt, .. } => {
                let counts = matches!(self.state, StripeState::Archived { attempt: of, .. } if of == attempt);
                counts.then_some(HeldItem::Receipt)
            }
        }
    }

    /// Returns the number of further nodes that may be lost, judged by the files alone, or `None`
    /// if the stripe cannot be read. Grains of one number are read together, and damage in other
    /// grains does not matter. For each grain number at which some file is damaged, this therefore
    /// judges the files that are good at that grain, and returns the worst result.
    fn count_survivable_losses(
        &self,
        readable: &[ReadableFile<'_>],
        cache: &mut SurvivableLossCache,
    ) -> Option<usize> {
        if !self.is_shard_non_empty() {
            return Some(usize::MAX);
        }
        let (info, _) = self.info?;
        let code = self.archived_attempt_and_code().map(|(_, code)| code);
        let grains: BTreeSet<u64> =
            readable.iter().filter_map(|file| file.damaged).flat_map(GrainSet::iter).collect();
        let wanted_at = |grain: u64| -> Vec<u8> {
            let is_wanted = |block: &u8| info.fixed.cut.block_len(*block) > grain * GRAIN_BYTES;
            (0..self.root.k).filter(is_wanted).collect()
        };
        let undamaged = (wanted_at(0), readable.iter().collect::<Vec<_>>());
        let at_grain = |grain| {
            let is_good = |file: &&ReadableFile<'_>| {
                file.damaged.is_none_or(|damaged| !damaged.contains(grain))
            };
            (wanted_at(grain), readable.iter().filter(is_good).collect())
        };
        // In the classical code a replica is the systematic piece of the same number, and blocks
        // past the shard's end are known without a file.
        let is_classical = matches!(code, Some(Code::Rs(_)));
        let past_end: Vec<u8> =
            (0..self.root.k).filter(|&block| info.fixed.cut.block_len(block) == 0).collect();
        let mut least = None;
        for (wanted, files) in std::iter::once(undamaged).chain(grains.into_iter().map(at_grain)) {
            let mut shares: BTreeMap<NodeId, NodeShare> = BTreeMap::new();
            for file in files {
                let share = shares.entry(file.node).or_default();
                match file.held {
                    HeldItem::Replica(block) if is_classical => share.pieces.push(block),
                    HeldItem::Replica(block) => share.blocks.push(block),
                    HeldItem::Piece(piece) => share.pieces.push(piece),
                    _ => {}
                }
            }
            if is_classical {
                shares.values_mut().for_each(|share| share.pieces.extend(&past_end));
            }
            let shares = shares.into_values().collect();
            let survives = cache.survivable_losses(wanted, code.as_ref(), shares)?;
            least = Some(least.map_or(survives, |least: usize| least.min(survives)));
        }
        least
    }
}

fn judge_file(view: &SourceView, root: Option<[u8; 32]>) -> Option<Problem> {
    match (&view.content, &view.damaged) {
        (None, _) => Some(Problem::Damaged),
        (Some((_, found)), _) if root.is_some_and(|root| root != *found) => Some(Problem::Other),
        (Some(_), None) => None,
        // The file does not count as a copy, although no grain of it is known to be damaged: it
        // cannot be opened, perhaps only for now.
        (Some(_), Some(grains)) if grains.is_empty() => Some(Problem::Damaged),
        (Some(_), Some(grains)) => Some(Problem::Grains(grains.len() as u64)),
    }
}

#[cfg(test)]
mod tests;
