//! The record of a save that belongs to a launch, with one client or several writers
//! (docs/semantics.md, 3).

use serde::{Deserialize, Serialize};

use super::envelope::RecordKind;
use super::records::{Record, RingNode, ShardRoot};
use super::table::{DATA_SHARD, INDEX_SHARD};
use crate::id::{LaunchId, LeaseId, SaveId};

/// Maximum number of writers of one save. With this many writers, the record still fits into a
/// value of the catalogue.
pub const MAX_WRITERS: usize = 128;

/// Maximum length of the reason for which a writer has dropped a step, in bytes. Only the first
/// writer that drops a step records its reason.
pub const MAX_REASON_BYTES: usize = 256;

/// A save that belongs to a launch. Its writers write it together, or one client writes it alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JointSave {
    /// The id of the save.
    pub save: SaveId,
    /// The launch.
    pub launch: LaunchId,
    /// The lease of the save, which all writers keep alive.
    pub lease: LeaseId,
    /// The seed of the shards' fingerprint keys; zeros if one client writes the save.
    pub seed: [u8; 32],
    /// The number of pieces of a stripe.
    pub n: u8,
    /// The number of blocks of a stripe.
    pub k: u8,
    /// The padded length of a full block in bytes.
    pub block_bytes: u64,
    /// The ring of shard 0. The rings of the other shards are rotations of it.
    pub ring: Vec<RingNode>,
    /// The state of each writer; empty if one client writes the save.
    pub writers: Vec<WriterState>,
}

/// The state of a writer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriterState {
    /// The writer has not said how many shards it has.
    Unknown,
    /// The writer sends its shards, or has sent them. Written by daemons before
    /// [`Reporting`](Self::Reporting) existed.
    Announced {
        /// The number of its shards.
        shards: u32,
        /// The amount of data that it has sent, in MiB, as last reported.
        sent_mib: u32,
    },
    /// The writer has dropped the step before all other writers, so that the save can never be
    /// committed. Written by daemons before [`DroppedBecause`](Self::DroppedBecause) existed.
    Dropped,
    /// The writer has dropped the step after another one.
    DroppedLater,
    /// The writer has dropped the step before all other writers, for this reason.
    DroppedBecause {
        /// The reason, for people; at most [`MAX_REASON_BYTES`] long.
        reason: String,
    },
    /// The writer sends its shards, checks them, or waits for the other writers, and reports that
    /// again and again.
    Reporting {
        /// The number of its shards.
        shards: u32,
        /// The writer's progress, as last reported: the MiB that it has sent, plus 1 for each part of
        /// its content that it has checked afterwards.
        progress: u32,
        /// The number of reports. It changes as long as the writer lives.
        reports: u32,
    },
}

impl WriterState {
    /// Returns the number of shards and the progress that the writer has reported, if it has
    /// announced its shards and has not dropped the step.
    pub fn announced(&self) -> Option<(u32, u32)> {
        match *self {
            Self::Announced { shards, sent_mib } => Some((shards, sent_mib)),
            Self::Reporting { shards, progress, .. } => Some((shards, progress)),
            _ => None,
        }
    }

    /// Returns whether the writer has dropped the step, before another one or after it.
    pub fn has_dropped(&self) -> bool {
        matches!(self, Self::Dropped | Self::DroppedLater | Self::DroppedBecause { .. })
    }
}

impl Record for JointSave {
    const KIND: RecordKind = RecordKind::JointSave;
}

impl JointSave {
    /// Returns whether one client writes the save alone. Such a save takes only its launch and its
    /// ring from this record.
    pub fn has_one_client(&self) -> bool {
        self.writers.is_empty()
    }

    /// Returns the number of shards of the save, including the index. Returns `None` if a writer
    /// has not announced its shards or has dropped the step, or if one client writes the save.
    pub fn shard_count(&self) -> Option<u32> {
        if self.has_one_client() {
            return None;
        }
        self.first_shard(self.writers.len())?.checked_add(1)
    }

    /// Returns the number of the first shard of `writer`, or `None` if a writer before it has not
    /// announced its shards or has dropped the step. If `writer` is the number of writers, returns
    /// the number of the index.
    pub fn first_shard(&self, writer: usize) -> Option<u32> {
        let mut writers = self.writers.get(..writer)?.iter();
        writers.try_fold(0u32, |sum, state| sum.checked_add(state.announced()?.0))
    }

    /// Returns the numbers of the writers in the state `Unknown`.
    pub fn unknown_writers(&self) -> Vec<u32> {
        let is_unknown = |state: &WriterState| *state == WriterState::Unknown;
        let numbered = (0..).zip(&self.writers);
        numbered.filter(|(_, state)| is_unknown(state)).map(|(writer, _)| writer).collect()
    }

    /// Returns the number of the writer that has dropped the step before all others.
    pub fn dropped_writer(&self) -> Option<u32> {
        self.first_drop().map(|(writer, _)| writer)
    }

    /// Returns the number of the writer that has dropped the step before all others, and the reason;
    /// an empty one if the writer did not say it.
    pub fn first_drop(&self) -> Option<(u32, &str)> {
        (0..).zip(&self.writers).find_map(|(writer, state)| match state {
            WriterState::Dropped => Some((writer, "")),
            WriterState::DroppedBecause { reason } => Some((writer, reason.as_str())),
            _ => None,
        })
    }

    /// Returns whether all writers have dropped the step.
    pub fn is_dropped_by_all(&self) -> bool {
        self.writers.iter().all(WriterState::has_dropped)
    }

    /// Returns the progress that all writers have reported, added up.
    pub fn progress(&self) -> u64 {
        let announced = self.writers.iter().filter_map(WriterState::announced);
        announced.map(|(_, progress)| u64::from(progress)).sum()
    }

    /// Returns the key of the fingerprints of shard `index`.
    pub fn fingerprint_key(&self, index: u32) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("rapidraid joint save key v1");
        hasher.update(&self.seed).update(&index.to_le_bytes());
        hasher.finalize().into()
    }

    /// Returns the ring of shard `index`.
    pub fn ring_of(&self, index: u32) -> Vec<RingNode> {
        let mut ring = self.ring.clone();
        let turn = (index as usize).checked_rem(ring.len()).unwrap_or_default();
        ring.rotate_left(turn);
        ring
    }

    /// Returns the name that shard `index` must have, or `None` while the number of shards is not
    /// known or if there is no such shard.
    pub fn name_of(&self, index: u32) -> Option<String> {
        let launch = self.launch;
        match self.shard_count()?.checked_sub(index)? {
            0 => None,
            1 => Some(format!("{INDEX_SHARD}{launch}")),
            _ => Some(format!("{DATA_SHARD}{launch}/{index}")),
        }
    }

    /// Returns whether `root` has the values that this save determines: its id, code, block length,
    /// ring, fingerprint key, name, and the number of shards.
    pub fn admits(&self, root: &ShardRoot) -> bool {
        root.save == self.save
            && (root.n, root.k, root.block_bytes) == (self.n, self.k, self.block_bytes)
            && Some(root.shards) == self.shard_count()
            && Some(root.name.as_str()) == self.name_of(root.index).as_deref()
            && root.ring == self.ring_of(root.index)
            && root.fingerprint_key == self.fingerprint_key(root.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::samples::shard_root;
    use crate::id::{NodeId, ShardId};

    const SAVE: SaveId = SaveId([7; 12]);

    /// A save whose writers have announced these numbers of shards.
    fn joint(writers: &[Option<u32>]) -> JointSave {
        let state = |shards: &Option<u32>| {
            shards.map_or(WriterState::Unknown, |shards| WriterState::Reporting {
                shards,
                progress: 1,
                reports: 2,
            })
        };
        let ring = (0..5).map(|node| RingNode { node: NodeId(node), domain: node as u16 % 2 });
        JointSave {
            save: SAVE,
            launch: LaunchId([2; 16]),
            lease: LeaseId([1; 16]),
            seed: [3; 32],
            n: 4,
            k: 3,
            block_bytes: 1 << 20,
            ring: ring.collect(),
            writers: writers.iter().map(state).collect(),
        }
    }

    #[test]
    fn shards_are_numbered_writer_by_writer_and_the_index_is_last() {
        let all = joint(&[Some(2), Some(0), Some(3)]);
        let firsts: Vec<_> = (0..=4).map(|writer| all.first_shard(writer)).collect();
        assert_eq!(firsts, [Some(0), Some(2), Some(2), Some(5), None]);
        assert_eq!(all.shard_count(), Some(6));
        let some = joint(&[Some(2), None, Some(3)]);
        assert_eq!((some.first_shard(1), some.first_shard(2)), (Some(2), None));
        assert_eq!((some.shard_count(), some.unknown_writers()), (None, vec![1]));
        assert_eq!(joint(&[Some(u32::MAX)]).shard_count(), None);
    }

    #[test]
    fn only_roots_that_follow_from_the_save_are_admitted() {
        let all = joint(&[Some(2), Some(3)]);
        let mut good = shard_root(all.ring_of(4));
        good.save = SAVE;
        good.index = 4;
        good.shards = 6;
        good.shard = ShardId::new(SAVE, 4);
        (good.n, good.k, good.block_bytes) = (4, 3, 1 << 20);
        good.fingerprint_key = all.fingerprint_key(4);
        good.name = all.name_of(4).unwrap().parse().unwrap();
        assert!(good.name.as_str().starts_with("data/") && good.name.as_str().ends_with("/4"));
        assert!(all.name_of(5).unwrap().starts_with("index/") && all.name_of(6).is_none());
        assert!(all.admits(&good));
        let mut changed: Vec<ShardRoot> = vec![good.clone(); 6];
        changed[0].shards = 5;
        changed[1].ring.rotate_left(1);
        changed[2].fingerprint_key = all.fingerprint_key(3);
        changed[3].block_bytes += 64;
        changed[4].save = SaveId([9; 12]);
        changed[5].name = all.name_of(3).unwrap().parse().unwrap();
        assert!(changed.iter().all(|root| !all.admits(root)));
        assert!(!joint(&[Some(2), None]).admits(&good));
    }
}
