//! The progress of a read of one stripe.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::id::NodeId;
use crate::pipeline::busy_retry::BusyRetry;

/// The progress of a read, and the nodes that were slow or busy during it.
pub(super) struct ReadCursor {
    /// The grains that are not delivered yet.
    pub(super) left: Range<u64>,
    /// The nodes that were deprioritized because they were slow, once each. From then on the longer
    /// time limits apply to them.
    pub(super) deprioritized: BTreeSet<NodeId>,
    /// The node that was busy last. Other nodes come first.
    pub(super) busy: Option<NodeId>,
    pub(super) patience: BusyRetry,
}
