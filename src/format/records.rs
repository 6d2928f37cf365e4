//! The records of docs/semantics.md, section 2: everything that the catalogue and the nodes store,
//! except data.
//!
//! Every record is sealed by [`envelope`]. A record's structure changes only together with its
//! version, its page in the documentation and a fixture.

use serde::{Deserialize, Serialize};

use super::FormatError;
pub use super::cluster::{
    CatchUp, Damage, Heard, Home, Maintenance, Members, Node, SeenEpoch, Standing,
};
use super::envelope::{self, RecordKind};
use super::geometry::{Geometry, GeometryError};
pub use super::joint_save::JointSave;
pub use super::launch_order::LaunchOrder;
pub use super::receipt::{PieceForm, Receipt, ReceiptPiece};
pub use super::ring_changes::{LeaveState, RingChange, RingChanges};
pub use super::save_record::SaveHead;
pub use super::save_ring::SaveRing;
pub use super::step_labels::StepLabels;
pub use super::stripe_record::{BlockInfo, StripeFixed, StripeRecord, StripeRecordError};
use crate::code::CodeId;
use crate::id::{
    Attempt, ClusterId, Generation, Job, LeaseId, NodeId, SaveId, ShardId, ShardName, Step,
};

/// The standard layout (design of the paper): position p holds block p and block p-(n-k).
pub const LAYOUT_STANDARD: u8 = 1;
/// The field GF(2^8) with polynomial 0x11D, one byte per symbol.
pub const FIELD_GF8: u8 = 1;
/// Maximum number of nodes in the ring of a shard's root. Successors of leaving nodes are not
/// counted.
pub const MAX_RING: usize = 128;
/// Maximum number of spans of stripes that a [`ShardState`] lists.
pub const MAX_RUNS: usize = 64;

/// A record with a kind and a version of its own.
pub trait Record: Serialize + for<'de> Deserialize<'de> {
    /// The record's kind in the envelope.
    const KIND: RecordKind;
    /// The version that is written. It is also the only one that is read, unless the record has a
    /// `parse` of its own.
    const VERSION: u8 = 1;

    /// Returns the sealed bytes. Fails if the record is too long or cannot be encoded.
    fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        envelope::seal_record(Self::KIND, Self::VERSION, self)
    }

    /// Opens sealed bytes. Returns an error if they are damaged, of another kind or of another
    /// version.
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
    Tombstone,
    Removing,
    Members,
    Maintenance,
    Damage,
    SaveHead
);

/// The mutable record of one step in the catalogue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The save that readers see.
    pub committed: Option<Saved>,
    /// The save in progress.
    pub writing: Option<Writing>,
    /// The saves whose files are being removed. A save that was committed comes first.
    pub removing: Vec<Removing>,
}

/// A save that is decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The id of the save.
    pub save: SaveId,
    /// The generation of the save, which is the first generation of each of its shards.
    pub generation: Generation,
    /// The number of shards.
    pub shards: u32,
    /// The length of all shards together in bytes, without padding.
    pub len_bytes: u64,
    /// The BLAKE3 hash over the sealed shard roots' hashes, in order.
    pub roots_hash: [u8; 32],
    /// The time of the save in seconds since 1970, shown to users.
    pub saved_at: u64,
}

/// A save in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Writing {
    /// The shards are being written, and the save may still fail.
    Open {
        /// The id of the save.
        save: SaveId,
        /// The generation of the save.
        generation: Generation,
        /// The lease that the client or the writers keep alive. Once it has ended, any node may
        /// abort the save.
        lease: LeaseId,
    },
    /// The save is past its commit point, and its commit marks are being written.
    Decided {
        /// The value of [`Checkpoint::committed`] once the marks are written.
        saved: Saved,
    },
}

impl Writing {
    /// Returns the id of the save.
    pub fn save(&self) -> SaveId {
        match self {
            Writing::Open { save, .. } => *save,
            Writing::Decided { saved } => saved.save,
        }
    }

    /// Returns the generation of the save.
    pub fn generation(&self) -> Generation {
        match self {
            Writing::Open { generation, .. } => *generation,
            Writing::Decided { saved } => saved.generation,
        }
    }
}

/// The reason why a save's files may be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoveReason {
    /// The save was never committed.
    Aborted,
    /// A user deleted it with `rm`.
    Deleted,
    /// Another save of the step replaced it (`save --replace`).
    Superseded,
    /// The policy retired it because of newer steps.
    Retired,
}

/// A save whose files are being removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removing {
    /// The id of the save.
    pub save: SaveId,
    /// The generation of its tombstones.
    pub generation: Generation,
    /// The reason, which is the evidence that the files may be deleted.
    pub reason: RemoveReason,
}

/// A node of a shard's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingNode {
    /// The node.
    pub node: NodeId,
    /// The number of its failure domain within this ring.
    pub domain: u16,
}

/// The fixed record of one shard. With it, a reader can verify everything that nodes send.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRoot {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The save that wrote it.
    pub save: SaveId,
    /// The shard's number in the save, from 0.
    pub index: u32,
    /// The number of shards of the save.
    pub shards: u32,
    /// The id of the shard.
    pub shard: ShardId,
    /// The name of the shard.
    pub name: ShardName,
    /// The length in bytes, without padding.
    pub len_bytes: u64,
    /// The padded length of a block in bytes, in all stripes but the last.
    pub block_bytes: u64,
    /// The number of pieces of a stripe.
    pub n: u8,
    /// The number of blocks of a stripe.
    pub k: u8,
    /// The layout of the replicas.
    pub layout: u8,
    /// The field and the layout of symbols.
    pub field: u8,
    /// The key of the linear fingerprints.
    pub fingerprint_key: [u8; 32],
    /// The ring: the nodes in the order in which placement rotates through them.
    pub ring: Vec<RingNode>,
    /// The BLAKE3 hash over the leaves. A leaf is the hash of a stripe record's fixed part.
    pub stripes_root: [u8; 32],
}

impl ShardRoot {
    /// Returns the geometry of the shard, or an error if the numbers are not valid.
    pub fn geometry(&self) -> Result<Geometry, GeometryError> {
        Geometry::checked(self.len_bytes, self.block_bytes, self.n, self.k)
    }

    /// Returns whether `leaves` are the ones that this root determines.
    pub fn admits(&self, leaves: &Leaves) -> bool {
        leaves.root == *self && stripes_root(&leaves.hashes) == self.stripes_root
    }
}

/// A shard's root and the hashes of all its stripe records, as nodes store them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaves {
    /// The root of the shard.
    pub root: ShardRoot,
    /// The leaves, one per stripe: BLAKE3 of [`StripeRecord::fixed`].
    pub hashes: Vec<[u8; 32]>,
}

/// Returns [`ShardRoot::stripes_root`]: the BLAKE3 hash over the concatenated leaves.
pub fn stripes_root(leaves: &[[u8; 32]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid stripes root v1");
    for leaf in leaves {
        hasher.update(leaf);
    }
    hasher.finalize().into()
}

/// Returns [`Saved::roots_hash`]: the BLAKE3 hash over the hashes of sealed shard roots, in order.
/// Returns `None` if a root cannot be encoded.
pub fn roots_hash<'a>(roots: impl Iterator<Item = &'a ShardRoot>) -> Option<[u8; 32]> {
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid roots hash v1");
    for root in roots {
        hasher.update(blake3::hash(&root.to_bytes().ok()?).as_bytes());
    }
    Some(hasher.finalize().into())
}

/// The mutable record of a shard in the catalogue: the progress of its archiving.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardState {
    /// The generation, which each new owner raises.
    pub generation: Generation,
    /// The coordinator that works on the shard, if there is one.
    pub owner: Option<Owner>,
    /// Whether the shard is being deleted. Nothing else happens to the shard after that.
    pub deleting: bool,
    /// The states of all stripes, in order and without gaps; at most [`MAX_RUNS`] spans.
    pub runs: Vec<Run>,
}

/// The coordinator that owns a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The node whose daemon runs the coordinator.
    pub node: NodeId,
    /// The lease of the coordinator. Once it has ended, any node may take over the shard.
    pub lease: LeaseId,
}

/// A span: consecutive stripes in the same state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The number of stripes.
    pub count: u32,
    /// The state that these stripes have in common.
    pub state: StripeState,
}

/// The state of a committed stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StripeState {
    /// Each block has two replicas.
    Replicated,
    /// All replicas are intact. Pieces of this attempt may exist.
    Archiving {
        /// The attempt.
        attempt: Attempt,
        /// The code of the attempt's pieces.
        code: CodeId,
        /// The generation that began the attempt. A later owner continues the attempt under it.
        generation: Generation,
    },
    /// The n pieces are proven.
    Archived {
        /// The attempt whose pieces are valid.
        attempt: Attempt,
        /// The code of the pieces.
        code: CodeId,
        /// The generation that began the attempt. Replicas are dropped only by orders of this
        /// generation.
        generation: Generation,
        /// Whether all replicas are known to be dropped.
        dropped: bool,
    },
}

impl ShardState {
    /// Returns the state of a shard that no coordinator has owned since its save.
    pub fn fresh(generation: Generation, stripes: u32) -> Self {
        let all = Run { count: stripes, state: StripeState::Replicated };
        let runs = Vec::from_iter((stripes > 0).then_some(all));
        Self { generation, owner: None, deleting: false, runs }
    }

    /// Returns the state of stripe `index`, or `None` when there is no such stripe.
    pub fn stripe(&self, index: u32) -> Option<StripeState> {
        let mut first = 0u32;
        self.runs.iter().find_map(|run| {
            let inside = index >= first && index - first < run.count;
            first = first.saturating_add(run.count);
            inside.then_some(run.state)
        })
    }

    /// Returns an iterator over the states of all stripes, one by one.
    pub fn states(&self) -> impl Iterator<Item = StripeState> + '_ {
        self.runs.iter().flat_map(|run| (0..run.count).map(|_| run.state))
    }

    /// Sets the state of stripe `index` and joins equal neighbours. If there would be more than
    /// [`MAX_RUNS`] runs, some other dropped stripes are marked as not dropped: their drops are
    /// ordered and confirmed once more. Returns false, and changes nothing, when there is no such
    /// stripe or when there are too many runs all the same.
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
        while runs.len() > MAX_RUNS {
            let Some(joined) = forget_shortest_drop(&runs, index) else { return false };
            runs = joined;
        }
        if !found {
            return false;
        }
        self.runs = runs;
        true
    }
}

/// Joins the shortest run of dropped stripes that does not contain stripe `except` with a neighbour
/// that differs from it only in not being dropped. Returns `None` if there is no such run.
fn forget_shortest_drop(runs: &[Run], except: u32) -> Option<Vec<Run>> {
    let mut shortest: Option<(usize, u32, StripeState)> = None;
    let mut first = 0u32;
    for (at, run) in runs.iter().enumerate() {
        let is_excepted = except >= first && except - first < run.count;
        first = first.saturating_add(run.count);
        let StripeState::Archived { attempt, code, generation, dropped: true } = run.state else {
            continue;
        };
        let state = StripeState::Archived { attempt, code, generation, dropped: false };
        let neighbours = [at.checked_sub(1), at.checked_add(1)].into_iter().flatten();
        let has_equal = neighbours.filter_map(|at| runs.get(at)).any(|other| other.state == state);
        let is_shorter = shortest.is_none_or(|(_, count, _)| run.count < count);
        if has_equal && is_shorter && !is_excepted {
            shortest = Some((at, run.count, state));
        }
    }
    let (changed, _, undropped) = shortest?;
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for (at, run) in runs.iter().enumerate() {
        let state = if at == changed { undropped } else { run.state };
        match joined.last_mut() {
            Some(last) if last.state == state => last.count = last.count.saturating_add(run.count),
            _ => joined.push(Run { count: run.count, state }),
        }
    }
    Some(joined)
}

/// A commit mark: the proof that a shard was committed, from which the catalogue can be rebuilt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitMark {
    /// The cluster.
    pub cluster: ClusterId,
    /// The save that was committed.
    pub saved: Saved,
    /// The root of the shard.
    pub root: ShardRoot,
}

/// The highest generation that a node has seen for a shard. The node refuses lower ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    /// The generation.
    pub generation: Generation,
    /// The node that had this generation.
    pub holder: NodeId,
}

/// A tombstone: the record that a save was removed, which is the evidence for deleting its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The cluster.
    pub cluster: ClusterId,
    /// The save.
    pub save: SaveId,
    /// A generation that is at least that of every order for the save's shards.
    pub generation: Generation,
    /// The reason of the removal.
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

    /// A node that does not answer keeps the drops of its stripes open, here six of seven.
    #[test]
    fn a_shard_of_any_length_is_archived_while_drops_are_open() {
        let mut state = ShardState::fresh(Generation::default(), 1000);
        let (attempt, generation) = (Attempt([1; 16]), Generation::default());
        let archived = |dropped| {
            let code = CodeId(7);
            StripeState::Archived { attempt, code, generation, dropped }
        };
        for index in 0..1000 {
            assert!(state.set(index, archived(false)), "stripe {index}");
            assert!(index % 7 > 0 || state.set(index, archived(true)), "stripe {index}");
            assert!(state.runs.len() <= MAX_RUNS);
            assert_eq!(state.stripe(index), Some(archived(index % 7 == 0)), "the newest is kept");
        }
        assert_eq!(state.states().count(), 1000);
        assert!(state.states().all(|stripe| [archived(false), archived(true)].contains(&stripe)));
        let dropped = state.states().filter(|stripe| *stripe == archived(true)).count();
        assert!(dropped > MAX_RUNS / 2 - 2, "{dropped} drops are remembered");
        // The node is back.
        assert!((0..1000).all(|index| state.set(index, archived(true))));
        assert_eq!(state.runs.len(), 1);
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
