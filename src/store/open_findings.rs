//! The findings of an open: how the index and the folders differed.

use serde::Serialize;

/// The differences that [`Store::open`](super::Store::open) found between the index and the
/// folders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ReconcileCounts {
    /// Files that the index did not have, or had with another length.
    pub added: u64,
    /// Index entries that were deleted, because their file is missing or cannot be indexed.
    pub dropped: u64,
    /// Files whose tail does not open: they got a damage note and do not count as copies.
    pub damaged: u64,
    /// Files whose header does not match their name: they were moved to quarantine.
    pub quarantined: u64,
    /// Files that could not be read for a reason other than damage (files of a later release, too many
    /// open files): they stay in place and are not in the index.
    pub unreadable: u64,
    /// Unknown files: they are left alone.
    pub strangers: u64,
}

/// The findings of the last open, for the status of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpenFindings {
    /// The counts.
    pub counts: ReconcileCounts,
    /// The paths of the first three unknown files.
    pub unknown_files: Vec<String>,
    /// The first three files that could not be read.
    pub unreadable_files: Vec<String>,
}
