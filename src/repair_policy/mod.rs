//! The decisions of automatic repair (docs/semantics.md, 11): which nodes are given up, which step
//! is repaired first, and which node gets a piece.
//!
//! These are functions of what is known about the cluster. They call no node and read no clock, so
//! that the durability model (`cluster/src/durability`) makes the same decisions as a daemon.

mod away_nodes;
mod repair_order;
mod spares;

pub use away_nodes::{AwayNodes, GivenUp, MAX_BRAKE, PIECES_GRACES};
pub use repair_order::{RepairPriority, is_repair_due};
pub use spares::{PiecesByDomain, PiecesByNode, SparesOfStripe};
