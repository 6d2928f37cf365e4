//! Records about the cluster itself: its nodes, and the catalogue's epochs (docs/semantics.md, 8).

use serde::{Deserialize, Serialize};

use super::grain_set::GrainSet;
use crate::id::{DbId, Epoch, PeerName};

/// A registered node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its name; [`NodeId::of`](crate::id::NodeId::of) gives its number.
    pub name: PeerName,
    /// Where peers and clients reach it, HOST:PORT.
    pub address: String,
    /// Failure domain, outermost first; may be empty.
    pub zone: String,
    /// Rack within the zone; may be empty.
    pub rack: String,
    /// Whether it stores data.
    pub storage: bool,
}

/// The registered nodes, as a node last heard of them: who is asked when there is no catalogue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// By name.
    pub nodes: Vec<Node>,
}

/// Whether a node has caught up (docs/semantics.md, 2); a folder from before there was this record has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatchUp {
    /// The revision of its entry in the catalogue's list of nodes, under which it caught up; `None`: it is behind.
    pub registered: Option<u64>,
}

/// Whether a node knows of all commits and removals (docs/semantics.md, 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// Its folder is from before nodes noted this, or its program is.
    Unknown,
    /// Its folder is new, or was emptied: it may know of nothing.
    Behind,
    /// It has a mark or grave of everything that was published or removed before its note. Of later saves more than half of the nodes have
    /// one.
    CaughtUp,
}

/// Damage of a replica or piece file, noted beside it (docs/semantics.md, 6). It is bound to the file and not to its name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The number of the file on its disk.
    pub number: u64,
    /// Whether its table, header and trailer are good. Without them no grain can be judged by the file alone.
    pub has_tail: bool,
    /// Its damaged grains.
    pub grains: GrainSet,
}

/// The daemon that serves the catalogue of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Its node.
    pub name: PeerName,
    /// Where it is reached, HOST:PORT.
    pub address: String,
}

/// The highest epoch that a node has seen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenEpoch {
    /// The epoch.
    pub epoch: Epoch,
    /// The map of that epoch; `None` as long as the epoch was only heard of.
    pub map: Option<DbId>,
    /// Who claimed it from this node; `None` when nobody did.
    pub home: Option<Home>,
}

/// The last change of the catalogue that a node has heard of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// The catalogue's map.
    pub map: DbId,
    /// Its revision then.
    pub revision: u64,
}
