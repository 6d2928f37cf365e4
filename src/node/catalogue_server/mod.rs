//! Serving the catalogue: who serves it, its transfer to another node, its rebuild after a loss, and changes of the list of nodes.

pub(super) mod cluster_inventory;
pub(super) mod rebuild;
pub(super) mod remove_node;
pub(super) mod serving;
pub(super) mod transfer;
