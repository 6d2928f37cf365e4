//! Random operations from a seed. They cover few saves, shards, stripes, generations and epochs, so
//! that they often conflict.

use std::collections::BTreeMap;

use bytes::Bytes;
use rapidraid::code::table;
use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::file::FileName;
use rapidraid::format::geometry::StripeCut;
use rapidraid::format::records::{
    CommitMark, FIELD_GF8, LAYOUT_STANDARD, Leaves, PieceForm, Receipt, ReceiptPiece, Record,
    RemoveReason, RingNode, Saved, ShardRoot, StripeFixed, StripeRecord, Tombstone, stripes_root,
};
use rapidraid::id::{
    Attempt, ClusterId, DbId, Epoch, Generation, NodeId, SaveId, ShardId, Step, StripeId,
};
use rapidraid::wire::NodeAddress;
use rapidraid::wire::calls::{
    ClaimEpoch, DropReplicas, PurgeSave, PutBlock, PutMark, PutPlaces, PutReceipt, PutRecord,
    PutTombstone, RecordName,
};

use crate::state::{Deed, State, file};
use world::raw::{KEY, trailer};
use world::{CLUSTER, content, job};

pub const BLOCK: u64 = 64 << 10;
/// Length of a piece in these tests. They compare the identity of pieces, not their length.
pub const PIECE_BYTES: u64 = 700;
const SAVES: u64 = 3;

pub struct Draw {
    entropy: SeededEntropy,
    saves: Vec<SaveId>,
    /// Whether the epoch rises in this run. It does so only in every second run, because a node
    /// refuses most operations of an older epoch.
    has_epochs: bool,
}

/// Returns the bytes of every piece with this number and attempt: each run of a plan computes the
/// same bytes.
fn piece_bytes(piece: u8, attempt: Attempt) -> Bytes {
    content(PIECE_BYTES as usize, u64::from(piece) << 8 | u64::from(attempt.0[0]))
}

fn piece_path(stripe: StripeId, piece: u8, attempt: Attempt) -> String {
    file(stripe, FileName::Piece { piece, attempt })
}

impl Draw {
    pub fn new(seed: u64) -> Self {
        let entropy = SeededEntropy::new(seed);
        let id = || SaveId(entropy.id()[..12].try_into().unwrap());
        let saves = (0..SAVES).map(|_| id()).collect();
        let has_epochs = seed % 2 == 1;
        Self { entropy, saves, has_epochs }
    }

    pub fn below(&self, bound: u64) -> u64 {
        self.entropy.below(bound)
    }

    fn one_in(&self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    pub fn save(&self) -> SaveId {
        self.saves[self.below(SAVES) as usize]
    }

    pub fn shard(&self) -> ShardId {
        ShardId::new(self.save(), self.below(2) as u32)
    }

    pub fn stripe(&self) -> StripeId {
        StripeId { shard: self.shard(), index: self.below(2) as u32 }
    }

    pub fn attempt(&self) -> Attempt {
        Attempt([1 + self.below(2) as u8; 16])
    }

    /// Returns the stripes that the catalogue has as archived: the first stripe of each shard, each
    /// by a drawn attempt.
    pub fn archived(&self) -> BTreeMap<StripeId, (Attempt, Generation)> {
        let shards = self.saves.iter().flat_map(|&save| [0, 1].map(|at| ShardId::new(save, at)));
        let generation = Generation { epoch: Epoch(1), counter: 1 };
        shards.map(|shard| (StripeId { shard, index: 0 }, (self.attempt(), generation))).collect()
    }

    fn epoch(&self, now: Epoch) -> Epoch {
        match self.below(40) {
            0 if self.has_epochs => Epoch(now.0 + 1),
            1 | 2 => Epoch(now.0 - 1),
            _ => now,
        }
    }

    fn generation(&self, now: Epoch) -> Generation {
        // Mostly low counters: a fence stays in force for some time.
        Generation { epoch: self.epoch(now), counter: 1 + self.below(12) / 5 }
    }

    fn cluster(&self) -> ClusterId {
        if self.one_in(12) { ClusterId([8; 16]) } else { CLUSTER }
    }

    fn coordinator(&self) -> NodeId {
        NodeId(1 + self.below(2))
    }

    fn root(&self, shard: ShardId) -> ShardRoot {
        let member = |node| RingNode { node: NodeId(node), domain: 0 };
        ShardRoot {
            job: job(),
            step: Step(1),
            save: shard.save(),
            index: shard.index(),
            shards: 2,
            shard,
            name: if self.one_in(4) { "other" } else { "weights" }.parse().unwrap(),
            len_bytes: 0,
            block_bytes: BLOCK,
            n: 4,
            k: 2,
            layout: LAYOUT_STANDARD,
            field: FIELD_GF8,
            fingerprint_key: KEY,
            ring: (1..=4).map(member).collect(),
            stripes_root: stripes_root(&[]),
        }
    }

    fn stripe_record(&self, stripe: StripeId) -> Vec<u8> {
        let stripe = if self.one_in(8) { self.stripe() } else { stripe };
        let len_bytes = if self.one_in(4) { 1 } else { 0 };
        let cut = StripeCut { offset_bytes: 0, len_bytes, block_bytes: BLOCK, k: 2 };
        let fixed = StripeFixed { stripe, cut, blocks: vec![] };
        let places = vec![self.coordinator(); 4];
        StripeRecord::new(&fixed, places).unwrap().to_bytes().unwrap()
    }

    /// Draws the next operation.
    pub fn deed(&self, model: &State) -> Deed {
        let (stripe, generation) = (self.stripe(), self.generation(model.epoch));
        let (shard, save) = (stripe.shard, stripe.shard.save());
        match self.below(30) {
            0..6 => {
                let bytes = content(1000, self.below(5) / 4);
                let call = PutBlock {
                    stripe,
                    block: self.below(2) as u8,
                    len_bytes: bytes.len() as u64,
                    generation,
                    fingerprint_key: KEY,
                    forward: None,
                };
                Deed::Block(call, bytes, self.one_in(10))
            }
            6..11 if !model.is_buried(save) => {
                let (piece, attempt) = (self.below(2) as u8, self.attempt());
                Deed::Piece(stripe, piece, attempt, piece_bytes(piece, attempt))
            }
            6..14 => {
                let record = match self.below(9) {
                    0..4 => RecordName::Leaves,
                    4..8 => RecordName::Stripe { index: stripe.index },
                    _ => RecordName::Mark,
                };
                let of = if self.one_in(8) { self.shard() } else { shard };
                let bytes = match record {
                    RecordName::Leaves => {
                        Leaves { root: self.root(of), hashes: vec![] }.to_bytes().unwrap()
                    }
                    _ => self.stripe_record(stripe),
                };
                Deed::Record(PutRecord { shard, record, generation, bytes })
            }
            14..16 => {
                let (coordinator, bytes) = (self.coordinator(), self.stripe_record(stripe));
                Deed::Places(PutPlaces { stripe, generation, coordinator, bytes })
            }
            16 => {
                let saved = Saved {
                    save,
                    generation,
                    shards: 2,
                    len_bytes: 0,
                    roots_hash: [0; 32],
                    saved_at: 0,
                };
                let mark = CommitMark { cluster: self.cluster(), saved, root: self.root(shard) };
                let bytes = mark.to_bytes().unwrap();
                Deed::Mark(PutMark { bytes, epoch: generation.epoch })
            }
            17..23 => {
                let known = model.archived.get(&stripe).filter(|_| self.below(3) > 0);
                let attempt = known.map_or_else(|| self.attempt(), |(attempt, _)| *attempt);
                let piece = |piece| {
                    let is_here = model.held.contains_key(&piece_path(stripe, piece, attempt));
                    let is_ours = is_here != self.one_in(8);
                    let node = if is_ours { model.me } else { NodeId(1) };
                    let bad = u64::from(self.one_in(12));
                    let bytes = piece_bytes(piece, attempt);
                    let bytes = if bad == 1 { content(5, 5) } else { bytes };
                    ReceiptPiece { piece, node, form: PieceForm::File, root: trailer(&bytes).root }
                };
                let receipt = Receipt {
                    cluster: self.cluster(),
                    stripe,
                    attempt,
                    generation: Generation { epoch: Epoch(1), counter: 1 + self.below(6) / 5 },
                    code: table::find(4, 2).unwrap().id(),
                    pieces: (0..2).map(piece).collect(),
                    order: match self.below(4) {
                        0 => Generation { epoch: Epoch(1), counter: 1 + self.below(3) },
                        _ => Generation::default(),
                    },
                };
                let (bytes, coordinator) = (receipt.to_bytes().unwrap(), self.coordinator());
                Deed::Receipt(PutReceipt { bytes, owner: generation, coordinator })
            }
            23 => {
                let reason = match self.below(3) {
                    0 => RemoveReason::Deleted,
                    _ => RemoveReason::Aborted,
                };
                let tombstone = Tombstone { cluster: self.cluster(), save, generation, reason };
                Deed::Tombstone(PutTombstone { bytes: tombstone.to_bytes().unwrap() })
            }
            24 => Deed::Sweep(PurgeSave { save }),
            25..29 => {
                // Mostly the archived stripe.
                let stripe = StripeId { index: stripe.index * self.below(2) as u32, ..stripe };
                let known = model.archived.get(&stripe).copied();
                let (attempt, generation) =
                    known.filter(|_| !self.one_in(6)).unwrap_or((self.attempt(), generation));
                Deed::Drop(DropReplicas { stripe, attempt, generation })
            }
            _ => {
                let home = NodeAddress {
                    name: "elsewhere".parse().unwrap(),
                    host_port: "elsewhere:1".into(),
                };
                let map = DbId([1 + self.below(2) as u8; 16]);
                Deed::Claim(ClaimEpoch { epoch: self.epoch(model.epoch), map, home })
            }
        }
    }
}
