//! Records about the cluster itself: its nodes, and the catalogue's epochs (docs/semantics.md, 8).

use serde::{Deserialize, Serialize};

use super::grain_set::GrainSet;
use crate::id::{DbId, Epoch, PeerName};

/// A registered node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// The name of the node. [`NodeId::of`](crate::id::NodeId::of) returns its id.
    pub name: PeerName,
    /// The address at which nodes and clients reach it, HOST:PORT.
    pub address: String,
    /// The outer failure domain; may be empty.
    pub zone: String,
    /// The rack within the zone; may be empty.
    pub rack: String,
    /// Whether the node stores data.
    pub storage: bool,
}

/// The list of registered nodes, as a node last received it. A node asks these nodes while it has
/// no catalogue to ask.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// The nodes, by name.
    pub nodes: Vec<Node>,
}

/// The maintenance of a node, in the catalogue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maintenance {
    /// The node.
    pub node: PeerName,
    /// When the maintenance ends, in seconds since 1970.
    pub until: u64,
}

/// The record of whether a node has caught up (docs/semantics.md, 2). A folder of a release before
/// this record has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatchUp {
    /// The revision of the node's entry in the catalogue's list of nodes under which it caught up.
    /// `None`: the node is behind.
    pub registered: Option<u64>,
}

/// The knowledge that a node has of commits and removals (docs/semantics.md, 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// Not recorded: the node's folder or its program is from before catch-up records existed.
    Unknown,
    /// The node has not caught up since its folder was made, or since it was off the list of
    /// nodes, so it may lack any commit mark.
    Behind,
    /// The node has a commit mark, or the record of the removal, of every save that was published
    /// or removed before this was recorded. Of each later save, more than half of the nodes have
    /// such a mark or record; this node need not be among them.
    CaughtUp,
}

/// The damage note of a replica or piece file, stored beside it (docs/semantics.md, 6). The note is
/// bound to the file, not to the file's name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The inode number of the file; 0 if the file could not be opened.
    pub number: u64,
    /// Whether the file's table, header and trailer are intact. Without them no grain can be
    /// checked by the file alone.
    pub has_tail: bool,
    /// The damaged grains.
    pub grains: GrainSet,
}

/// The catalogue server of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// The name of its node.
    pub name: PeerName,
    /// The address at which it is reached, HOST:PORT.
    pub address: String,
}

/// The highest epoch that a node has seen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenEpoch {
    /// The epoch.
    pub epoch: Epoch,
    /// The id of that epoch's catalogue database. `None` while the node only knows that the epoch
    /// exists.
    pub map: Option<DbId>,
    /// The catalogue server that claimed the epoch on this node; `None` if none did.
    pub home: Option<Home>,
}

/// The last change of the catalogue that a node knows of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// The id of the catalogue database.
    pub map: DbId,
    /// The revision of the catalogue at that change.
    pub revision: u64,
}
