//! Connections and calls: admission, limits, dispatch, and errors as a caller sees them.

pub(super) mod dispatch;
pub(super) mod error;
pub(super) mod status_report;
