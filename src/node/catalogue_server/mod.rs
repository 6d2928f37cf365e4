//! Serving the catalogue, its transfer to another node, its rebuild after a loss, and the removal
//! of nodes from the list of nodes.

pub(super) mod catalogue_calls;
mod catch_up_majority;
pub(super) mod cluster_inventory;
pub(super) mod error;
pub(super) mod maintenance;
pub(super) mod majority;
pub(super) mod membership;
pub(super) mod rebuild;
pub(super) mod remove_node;
pub(super) mod repair_survey;
pub(super) mod replace_node;
pub(super) mod serving;
pub(super) mod transfer;
