//! The record of the ring of a save that belongs to no launch (docs/semantics.md, 3).

use serde::{Deserialize, Serialize};

use super::envelope::RecordKind;
use super::joint_save::JointSave;
use super::records::{Record, RingNode, ShardRoot};
use crate::id::NodeId;

/// The code and the nodes that were chosen for a save when it was begun. The rings of the save's
/// shards consist of these nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveRing {
    /// The number of pieces of a stripe.
    pub n: u8,
    /// The number of blocks of a stripe.
    pub k: u8,
    /// The padded length of a full block in bytes.
    pub block_bytes: u64,
    /// The ring of shard 0. The rings of the other shards are rotations of it.
    pub ring: Vec<RingNode>,
}

impl Record for SaveRing {
    const KIND: RecordKind = RecordKind::SaveRing;
}

impl From<JointSave> for SaveRing {
    fn from(joint: JointSave) -> Self {
        let JointSave { n, k, block_bytes, ring, .. } = joint;
        Self { n, k, block_bytes, ring }
    }
}

impl SaveRing {
    /// Returns whether node `node` was chosen for the save.
    pub fn contains(&self, node: NodeId) -> bool {
        self.ring.iter().any(|member| member.node == node)
    }

    /// Returns whether `root` has the code and the block length of this save, and a ring of nodes
    /// that were chosen for it.
    pub fn admits(&self, root: &ShardRoot) -> bool {
        (root.n, root.k, root.block_bytes) == (self.n, self.k, self.block_bytes)
            && root.ring.iter().all(|member| self.contains(member.node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::samples::shard_root;

    #[test]
    fn a_root_must_have_the_code_and_nodes_of_the_ring() {
        let ring: Vec<RingNode> =
            (1..=6).map(|node| RingNode { node: NodeId(node), domain: 0 }).collect();
        let root = shard_root(ring.clone());
        let of_save = SaveRing { n: root.n, k: root.k, block_bytes: root.block_bytes, ring };
        assert!(of_save.admits(&root));
        let mut rotated = root.clone();
        rotated.ring.rotate_left(1);
        assert!(of_save.admits(&rotated));
        let mut foreign = root.clone();
        foreign.ring[0].node = NodeId(7);
        assert!(!of_save.admits(&foreign));
        assert!(!of_save.admits(&ShardRoot { k: root.k - 1, ..root.clone() }));
        assert!(!of_save.admits(&ShardRoot { n: root.n + 1, ..root.clone() }));
        assert!(!of_save.admits(&ShardRoot { block_bytes: root.block_bytes * 2, ..root }));
    }
}
