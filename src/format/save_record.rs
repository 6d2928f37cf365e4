//! The record of a save that a client keeps, so that it can read the save when no catalogue answers
//! (docs/semantics.md, 6): a head, then the shard roots.
//!
//! The bytes of a save record are sealed records in a row, so that a save of any number of shards
//! fits. A record that parses is complete: its roots are those whose hash was committed.

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::envelope::split_record;
use super::records::{Node, Record, Saved, ShardRoot, roots_hash};
use crate::id::{ClusterId, Job, Step};

/// The longest save record in bytes. It has room for 100,000 roots of 2 KiB, more than a save has
/// shards.
pub const MAX_SAVE_RECORD_BYTES: usize = 200 << 20;

/// The first record: the identity of the save, and the nodes that may hold it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveHead {
    /// The cluster.
    pub cluster: ClusterId,
    /// The save that was committed.
    pub saved: Saved,
    /// The nodes that the save could use, with their addresses at that time.
    pub nodes: Vec<Node>,
}

/// The record of a committed save, as its client knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveRecord {
    job: Job,
    step: Step,
    head: SaveHead,
    roots: Vec<ShardRoot>,
}

fn bounded(bytes: &[u8]) -> Result<(), FormatError> {
    let (bytes, limit_bytes) = (bytes.len() as u64, MAX_SAVE_RECORD_BYTES as u64);
    match bytes > limit_bytes {
        true => Err(FormatError::TooLong { what: "the record of a save", bytes, limit_bytes }),
        false => Ok(()),
    }
}

impl SaveRecord {
    /// Returns the record of a head and its roots, or an error when the roots are not those that
    /// were committed.
    pub fn new(head: SaveHead, roots: Vec<ShardRoot>) -> Result<Self, FormatError> {
        let wrong = |part| Err(FormatError::Contradiction { part });
        let Some(first) = roots.first() else { return wrong("list of shard roots") };
        let saved = &head.saved;
        let fits = |(index, root): (u32, &ShardRoot)| {
            root.index == index
                && root.save == saved.save
                && root.shard.save() == saved.save
                && (&root.job, root.step) == (&first.job, first.step)
        };
        let is_whole = u32::try_from(roots.len()) == Ok(saved.shards);
        if !is_whole || !(0..).zip(&roots).all(fits) {
            return wrong("list of shard roots");
        }
        if roots_hash(roots.iter()) != Some(saved.roots_hash) {
            return wrong("hash of its shard roots");
        }
        let (job, step) = (first.job.clone(), first.step);
        Ok(Self { job, step, head, roots })
    }

    /// Returns the sealed bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        let mut bytes = self.head.to_bytes()?;
        for root in &self.roots {
            bytes.extend(root.to_bytes()?);
        }
        bounded(&bytes)?;
        Ok(bytes)
    }

    /// Parses sealed bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        bounded(bytes)?;
        // Bytes without any complete record fail when they are parsed as one.
        let (head, mut rest) = split_record(bytes).unwrap_or((bytes, &[]));
        let head = SaveHead::parse(head)?;
        let mut roots = Vec::new();
        while !rest.is_empty() {
            let (root, behind) = split_record(rest).unwrap_or((rest, &[]));
            roots.push(ShardRoot::parse(root)?);
            rest = behind;
        }
        Self::new(head, roots)
    }

    /// Returns the id of the cluster.
    pub fn cluster(&self) -> ClusterId {
        self.head.cluster
    }

    /// Returns the save that was committed.
    pub fn saved(&self) -> &Saved {
        &self.head.saved
    }

    /// Returns the nodes that the save could use.
    pub fn nodes(&self) -> &[Node] {
        &self.head.nodes
    }

    /// Returns the roots of the shards, in order. There is at least one.
    pub fn roots(&self) -> &[ShardRoot] {
        &self.roots
    }

    /// Returns the job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Returns the step.
    pub fn step(&self) -> Step {
        self.step
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::records::{FIELD_GF8, LAYOUT_STANDARD};
    use crate::id::{Generation, SaveId, ShardId};

    const SAVE: SaveId = SaveId([7; 12]);

    fn root(index: u32) -> ShardRoot {
        ShardRoot {
            job: "j".parse().unwrap(),
            step: Step(1),
            save: SAVE,
            index,
            shards: 3,
            shard: ShardId::new(SAVE, index),
            name: format!("rank{index}").parse().unwrap(),
            len_bytes: 0,
            block_bytes: 1 << 16,
            n: 6,
            k: 4,
            layout: LAYOUT_STANDARD,
            field: FIELD_GF8,
            fingerprint_key: [0; 32],
            ring: Vec::new(),
            stripes_root: [0; 32],
        }
    }

    fn head(roots: &[ShardRoot]) -> SaveHead {
        let saved = Saved {
            save: SAVE,
            generation: Generation::default(),
            shards: roots.len() as u32,
            len_bytes: 0,
            roots_hash: roots_hash(roots.iter()).unwrap(),
            saved_at: 0,
        };
        SaveHead { cluster: ClusterId([1; 16]), saved, nodes: Vec::new() }
    }

    #[test]
    fn what_parses_is_whole_and_what_was_committed() {
        let roots: Vec<ShardRoot> = (0..3).map(root).collect();
        let record = SaveRecord::new(head(&roots), roots.clone()).unwrap();
        let bytes = record.to_bytes().unwrap();
        assert_eq!(SaveRecord::parse(&bytes), Ok(record));
        for len in 0..bytes.len() {
            assert!(SaveRecord::parse(&bytes[..len]).is_err(), "cut to {len}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(SaveRecord::parse(&bad).is_err(), "bit {bit}");
        }
        assert!(SaveRecord::parse(&[bytes.as_slice(), b"x"].concat()).is_err());
    }

    #[test]
    fn roots_that_were_not_committed_together_are_refused() {
        let roots: Vec<ShardRoot> = (0..3).map(root).collect();
        let refused = |change: &dyn Fn(&mut Vec<ShardRoot>)| {
            let mut other = roots.clone();
            change(&mut other);
            // The head matches the changed roots, so the error is in the roots themselves.
            let made = SaveRecord::new(head(&other), other.clone());
            assert!(made.is_err(), "{made:?}");
            assert!(SaveRecord::new(head(&roots), other).is_err());
        };
        refused(&|roots| roots.clear());
        refused(&|roots| roots.swap(0, 1));
        refused(&|roots| roots[1].step = Step(2));
        refused(&|roots| roots[1].save = SaveId([8; 12]));
        refused(&|roots| roots[1].shard = ShardId::new(SaveId([8; 12]), 1));
        let mut other = roots.clone();
        other[2].len_bytes = 1;
        assert!(SaveRecord::new(head(&roots), other).is_err());
        assert!(SaveRecord::new(head(&roots), roots[..2].to_vec()).is_err());
    }
}
