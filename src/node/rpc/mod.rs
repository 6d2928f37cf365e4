//! Connections and calls: admission, limits and dispatch; the status of the node.

pub(super) mod dispatch;
pub(super) mod error;
pub(super) mod status_report;
