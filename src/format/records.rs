//! The records of docs/semantics.md, section 2: what the catalogue and the nodes keep besides data.
//!
//! Every record is sealed by [`envelope`]. Shapes change only together with a version, a page and a fixture.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::FormatError;
pub use super::cluster::{CatchUp, Damage, Heard, Home, Members, Node, SeenEpoch, Standing};
use super::envelope::{self, RecordKind};
use super::geometry::{Geometry, GeometryError, StripeCut};
pub use super::save_record::SaveHead;
use crate::code::CodeId;
use crate::gf::Fingerprint;
use crate::id::{
    Attempt, ClusterId, Generation, Job, LeaseId, NodeId, SaveId, ShardId, ShardName, Step,
    StripeId,
};

/// The standard layout (design of the paper): position p holds block p and block p-(n-k).
pub const LAYOUT_STANDARD: u8 = 1;
/// GF(2^8) with polynomial 0x11D, one byte a symbol.
pub const FIELD_GF8: u8 = 1;
/// The most nodes that one shard is spread over.
pub const MAX_RING: usize = 128;
/// The most runs of stripes that a [`ShardState`] names.
pub const MAX_RUNS: usize = 64;

/// A record with a kind and a version of its own.
pub trait Record: Serialize + for<'de> Deserialize<'de> {
    /// Its kind in the envelope.
    const KIND: RecordKind;
    /// The version that is written, and the only one that exists so far.
    const VERSION: u8 = 1;

    /// The sealed bytes.
    fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        envelope::seal_record(Self::KIND, Self::VERSION, self)
    }

    /// Opens sealed bytes.
    fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        envelope::open_record(Self::KIND, Self::VERSION..=Self::VERSION, bytes)
    }
}

macro_rules! records {
    ($($name:ident),*) => { $(impl Record for $name { const KIND: RecordKind = RecordKind::$name; })* };
}
records!(
    Node,
    Checkpoint,
    ShardRoot,
    ShardState,
    StripeRecord,
    Leaves,
    CommitMark,
    Fence,
    Receipt,
    Tombstone,
    Removing,
    Members,
    Damage,
    SaveHead
);

/// The mutable record of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// What readers see.
    pub committed: Option<Saved>,
    /// The save under way.
    pub writing: Option<Writing>,
    /// Saves whose files are being removed; what was committed before comes first.
    pub removing: Vec<Removing>,
}

/// A save that was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// Which save.
    pub save: SaveId,
    /// Its generation; the first of each of its shards.
    pub generation: Generation,
    /// Number of shards.
    pub shards: u32,
    /// Their real bytes together.
    pub len_bytes: u64,
    /// BLAKE3 over the sealed shard roots' hashes, in order.
    pub roots_hash: [u8; 32],
    /// Seconds since 1970, for people.
    pub saved_at: u64,
}

/// A save under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Writing {
    /// The client is writing; it may still fail.
    Open {
        /// Which save.
        save: SaveId,
        /// Its generation.
        generation: Generation,
        /// Kept by the client; when it is over anyone may abort the save.
        lease: LeaseId,
    },
    /// Committed, marks are being written.
    Decided {
        /// What `committed` becomes.
        saved: Saved,
    },
}

impl Writing {
    /// The save.
    pub fn save(&self) -> SaveId {
        match self {
            Writing::Open { save, .. } => *save,
            Writing::Decided { saved } => saved.save,
        }
    }

    /// Its generation.
    pub fn generation(&self) -> Generation {
        match self {
            Writing::Open { generation, .. } => *generation,
            Writing::Decided { saved } => saved.generation,
        }
    }
}

/// Why a save's files may be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoveReason {
    /// It never committed.
    Aborted,
    /// `rm`.
    Deleted,
    /// `save --replace`.
    Superseded,
    /// The policy: newer steps are enough.
    Retired,
}

/// A save whose files go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removing {
    /// Which save.
    pub save: SaveId,
    /// The generation of its tombstones.
    pub generation: Generation,
    /// The evidence.
    pub reason: RemoveReason,
}

/// A node of a shard's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingNode {
    /// The node.
    pub node: NodeId,
    /// Its failure domain, numbered within this ring.
    pub domain: u16,
}

/// The fixed record of one shard: everything a reader needs to check what nodes give it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRoot {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The save that wrote it.
    pub save: SaveId,
    /// Its place among the save's shards.
    pub index: u32,
    /// How many shards the save has.
    pub shards: u32,
    /// The shard.
    pub shard: ShardId,
    /// Its name.
    pub name: ShardName,
    /// Real bytes.
    pub len_bytes: u64,
    /// Padded bytes of a block in all stripes but the last.
    pub block_bytes: u64,
    /// Pieces of a stripe.
    pub n: u8,
    /// Blocks of a stripe.
    pub k: u8,
    /// Layout of the replicas.
    pub layout: u8,
    /// Field and symbol layout.
    pub field: u8,
    /// Key of the linear fingerprints.
    pub fingerprint_key: [u8; 32],
    /// The nodes, in the order that placement rotates through.
    pub ring: Vec<RingNode>,
    /// BLAKE3 over the leaves: the hash of each stripe record's fixed part, in order.
    pub stripes_root: [u8; 32],
}

impl ShardRoot {
    /// The cut, checked.
    pub fn geometry(&self) -> Result<Geometry, GeometryError> {
        Geometry::checked(self.len_bytes, self.block_bytes, self.n, self.k)
    }

    /// Whether `leaves` are the ones that the root fixes.
    pub fn admits(&self, leaves: &Leaves) -> bool {
        leaves.root == *self && stripes_root(&leaves.hashes) == self.stripes_root
    }
}

/// A shard's root and the hashes of all its stripe records, as nodes keep them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaves {
    /// The shard.
    pub root: ShardRoot,
    /// One hash a stripe: BLAKE3 of [`StripeRecord::fixed`].
    pub hashes: Vec<[u8; 32]>,
}

/// BLAKE3 over the concatenated leaves: [`ShardRoot::stripes_root`].
pub fn stripes_root(leaves: &[[u8; 32]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid stripes root v1");
    for leaf in leaves {
        hasher.update(leaf);
    }
    hasher.finalize().into()
}

/// BLAKE3 over the hashes of sealed shard roots, in order: [`Saved::roots_hash`].
pub fn roots_hash<'a>(roots: impl Iterator<Item = &'a ShardRoot>) -> Option<[u8; 32]> {
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid roots hash v1");
    for root in roots {
        hasher.update(blake3::hash(&root.to_bytes().ok()?).as_bytes());
    }
    Some(hasher.finalize().into())
}

/// How far archiving of a shard has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardState {
    /// Raised by each owner.
    pub generation: Generation,
    /// Who works on it.
    pub owner: Option<Owner>,
    /// Set by a delete: nothing else happens to the shard any more.
    pub deleting: bool,
    /// States of all stripes, in order, without gaps; at most [`MAX_RUNS`].
    pub runs: Vec<Run>,
}

/// The coordinator of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The daemon it runs in.
    pub node: NodeId,
    /// When this is over anyone may take the shard.
    pub lease: LeaseId,
}

/// Consecutive stripes in one state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// How many stripes.
    pub count: u32,
    /// Their state.
    pub state: StripeState,
}

/// The state of a committed stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StripeState {
    /// Two replicas of each block.
    Replicated,
    /// Replicas whole; pieces of this attempt may exist.
    Archiving {
        /// The attempt.
        attempt: Attempt,
        /// The code of its pieces.
        code: CodeId,
        /// The generation that began the attempt; a successor goes on under it.
        generation: Generation,
    },
    /// n proven pieces.
    Archived {
        /// The attempt whose pieces count.
        attempt: Attempt,
        /// Their code.
        code: CodeId,
        /// The generation that began the attempt; replicas go only by this one.
        generation: Generation,
        /// Whether all replicas are known to be gone.
        dropped: bool,
    },
}

impl ShardState {
    /// The state of a shard that nobody has touched since its save.
    pub fn fresh(generation: Generation, stripes: u32) -> Self {
        let all = Run { count: stripes, state: StripeState::Replicated };
        let runs = Vec::from_iter((stripes > 0).then_some(all));
        Self { generation, owner: None, deleting: false, runs }
    }

    /// The state of stripe `index`.
    pub fn stripe(&self, index: u32) -> Option<StripeState> {
        let mut first = 0u32;
        self.runs.iter().find_map(|run| {
            let inside = index >= first && index - first < run.count;
            first = first.saturating_add(run.count);
            inside.then_some(run.state)
        })
    }

    /// The states of all stripes, one by one.
    pub fn states(&self) -> impl Iterator<Item = StripeState> + '_ {
        self.runs.iter().flat_map(|run| (0..run.count).map(|_| run.state))
    }

    /// Sets the state of stripe `index` and joins equal neighbours. Returns false, and changes nothing, when there is
    /// no such stripe or when the runs would be more than [`MAX_RUNS`].
    #[must_use]
    pub fn set(&mut self, index: u32, state: StripeState) -> bool {
        let mut runs: Vec<Run> = Vec::with_capacity(self.runs.len() + 2);
        let mut push = |count: u32, state: StripeState| match runs.last_mut() {
            Some(last) if last.state == state => last.count = last.count.saturating_add(count),
            _ if count == 0 => {}
            _ => runs.push(Run { count, state }),
        };
        let (mut first, mut found) = (0u32, false);
        for run in &self.runs {
            if index >= first && index - first < run.count {
                found = true;
                push(index - first, run.state);
                push(1, state);
                push(run.count - (index - first) - 1, run.state);
            } else {
                push(run.count, run.state);
            }
            first = first.saturating_add(run.count);
        }
        if !found || runs.len() > MAX_RUNS {
            return false;
        }
        self.runs = runs;
        true
    }
}

/// One block, as the client read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// Real bytes; 0 for a block past the end, which has no file.
    pub len_bytes: u64,
    /// BLAKE3 of the real bytes.
    pub root: [u8; 32],
    /// Linear fingerprints of its grains, up to its real end.
    pub fingerprints: Vec<Fingerprint>,
}

/// The part of a stripe record that the shard's root fixes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeFixed {
    /// The stripe.
    pub stripe: StripeId,
    /// Its cut.
    pub cut: StripeCut,
    /// Its blocks, in order.
    pub blocks: Vec<BlockInfo>,
}

impl StripeFixed {
    /// The fingerprint of grain `grain` of block `block`; zero past the block's end.
    pub fn fingerprint(&self, block: usize, grain: u64) -> Fingerprint {
        let info = self.blocks.get(block);
        let grain = usize::try_from(grain).unwrap_or(usize::MAX);
        info.and_then(|info| info.fingerprints.get(grain)).copied().unwrap_or(Fingerprint::ZERO)
    }
}

/// The record of a stripe: held by n-k+1 of its nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeRecord {
    /// A [`StripeFixed`] in postcard; its BLAKE3 is the stripe's leaf.
    pub fixed: Vec<u8>,
    /// Which node holds which position; a hint.
    pub places: Vec<NodeId>,
}

/// A stripe record does not fit its shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the record of stripe {stripe} {what}: another node's copy is needed")]
pub struct StripeRecordError {
    /// The stripe.
    pub stripe: StripeId,
    /// What is wrong with it.
    pub what: &'static str,
}

impl StripeRecord {
    /// Packs the fixed part.
    pub fn new(fixed: &StripeFixed, places: Vec<NodeId>) -> Result<Self, FormatError> {
        let kind = RecordKind::StripeRecord;
        let fixed = postcard::to_stdvec(fixed)
            .map_err(|error| FormatError::Encode { kind, why: error.to_string() })?;
        Ok(Self { fixed, places })
    }

    /// The leaf of this record.
    pub fn leaf(&self) -> [u8; 32] {
        blake3::hash(&self.fixed).into()
    }

    /// Unpacks the fixed part after checking it against `leaves`, which the caller has found [admitted](ShardRoot::admits) by `root`.
    pub fn open(
        &self,
        root: &ShardRoot,
        leaves: &Leaves,
        index: u32,
    ) -> Result<StripeFixed, StripeRecordError> {
        let stripe = StripeId { shard: root.shard, index };
        let wrong = |what| StripeRecordError { stripe, what };
        if leaves.hashes.get(index as usize) != Some(&self.leaf()) {
            return Err(wrong("does not match the hash that the commit fixed"));
        }
        let fixed: StripeFixed = envelope::parse_body(RecordKind::StripeRecord, &self.fixed)
            .map_err(|_| wrong("does not parse"))?;
        let cut = root.geometry().ok().and_then(|geometry| geometry.stripe(index));
        if fixed.stripe != stripe
            || Some(fixed.cut) != cut
            || fixed.blocks.len() != usize::from(root.k)
        {
            return Err(wrong("describes another stripe"));
        }
        let fits = |(block, info): (u8, &BlockInfo)| {
            info.len_bytes == fixed.cut.block_len(block)
                && info.fingerprints.len() as u64 == crate::units::grains(info.len_bytes)
        };
        let distinct: HashSet<&NodeId> = self.places.iter().collect();
        if self.places.len() != usize::from(root.n) || distinct.len() != self.places.len() {
            return Err(wrong("does not name n different nodes"));
        }
        if !(0..root.k).zip(&fixed.blocks).all(fits) {
            return Err(wrong("has blocks of other lengths than its shard"));
        }
        Ok(fixed)
    }
}

/// A commit mark: with one of them on a node, the catalogue can be rebuilt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitMark {
    /// The cluster.
    pub cluster: ClusterId,
    /// What was committed.
    pub saved: Saved,
    /// The shard.
    pub root: ShardRoot,
}

/// The highest generation that a node has seen for a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The generation.
    pub generation: Generation,
    /// Who had it.
    pub holder: NodeId,
}

/// How a piece is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PieceForm {
    /// A piece file of the attempt.
    File,
    /// The replica of this block, left in place (a systematic piece).
    Replica {
        /// The block, from 0.
        block: u8,
    },
}

/// One proven piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiptPiece {
    /// Its number in the code, from 0.
    pub piece: u8,
    /// Who holds it.
    pub node: NodeId,
    /// How.
    pub form: PieceForm,
    /// BLAKE3 of its bytes (of the replica's real bytes for a replica).
    pub root: [u8; 32],
}

/// The receipt of an archived stripe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The cluster.
    pub cluster: ClusterId,
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt.
    pub attempt: Attempt,
    /// The generation that began the attempt.
    pub generation: Generation,
    /// The code.
    pub code: CodeId,
    /// All n pieces, in order.
    pub pieces: Vec<ReceiptPiece>,
}

/// A removed save: evidence for deleting its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The cluster.
    pub cluster: ClusterId,
    /// The save.
    pub save: SaveId,
    /// At least that of every order for its shards.
    pub generation: Generation,
    /// Why.
    pub reason: RemoveReason,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_split_and_join() {
        let mut state = ShardState::fresh(Generation::default(), 10);
        let (attempt, generation) = (Attempt([1; 16]), Generation::default());
        let archiving = StripeState::Archiving { attempt, code: CodeId(7), generation };
        for index in [3, 5, 4] {
            assert!(state.set(index, archiving));
        }
        assert_eq!(state.runs.iter().map(|run| run.count).collect::<Vec<_>>(), [3, 3, 4]);
        assert_eq!(state.stripe(4), Some(archiving));
        assert_eq!(state.stripe(2), Some(StripeState::Replicated));
        assert_eq!(state.stripe(10), None);
        for index in 0..10 {
            assert!(state.set(index, archiving));
        }
        assert_eq!(state.runs.len(), 1);
        assert!(!state.set(10, archiving));
        assert_eq!(state.states().count(), 10);
    }

    #[test]
    fn a_state_never_names_more_than_its_limit_of_runs() {
        let mut state = ShardState::fresh(Generation::default(), 1000);
        let (attempt, generation) = (Attempt([1; 16]), Generation::default());
        let archiving = StripeState::Archiving { attempt, code: CodeId(7), generation };
        let taken = (0..1000).step_by(2).take_while(|&index| state.set(index, archiving)).count();
        assert_eq!(taken, MAX_RUNS / 2);
        assert!(state.runs.len() <= MAX_RUNS);
    }

    #[test]
    fn the_largest_catalogue_records_stay_below_4_kib() {
        let root = ShardRoot {
            job: "j".repeat(128).parse().unwrap(),
            step: Step(u64::MAX),
            save: SaveId([1; 12]),
            index: u32::MAX,
            shards: u32::MAX,
            shard: ShardId([2; 16]),
            name: "n/".repeat(511).trim_end_matches('/').parse().unwrap(),
            len_bytes: u64::MAX,
            block_bytes: u64::MAX,
            n: 16,
            k: 11,
            layout: LAYOUT_STANDARD,
            field: FIELD_GF8,
            fingerprint_key: [9; 32],
            ring: vec![RingNode { node: NodeId(u64::MAX), domain: u16::MAX }; MAX_RING],
            stripes_root: [3; 32],
        };
        assert!(root.to_bytes().unwrap().len() <= 4096);
        let generation = Generation { epoch: crate::id::Epoch(u64::MAX), counter: u64::MAX };
        let archived = StripeState::Archived {
            attempt: Attempt([255; 16]),
            code: CodeId(u64::MAX),
            generation,
            dropped: true,
        };
        let state = ShardState {
            generation,
            owner: Some(Owner { node: NodeId(u64::MAX), lease: LeaseId([255; 16]) }),
            deleting: true,
            runs: vec![Run { count: u32::MAX, state: archived }; MAX_RUNS],
        };
        assert!(state.to_bytes().unwrap().len() <= 4096, "{}", state.to_bytes().unwrap().len());
    }
}
