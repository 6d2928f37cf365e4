//! The lengths of pages in answers to clients.

/// Maximum number of shards in one page of an answer.
pub(super) const SHARDS_SHOWN: usize = 128;
/// Maximum number of open saves in a list.
pub(super) const OPEN_SAVES_SHOWN: usize = 64;
/// Maximum number of labelled steps in a page.
pub(super) const LABELLED_STEPS_SHOWN: usize = 64;
/// Maximum number of launches in a page.
pub(super) const LAUNCHES_SHOWN: usize = 64;
/// Maximum number of saves in a page of steps that were found by commit marks, and in one question
/// about removals.
pub(super) const SAVES_PER_PAGE: usize = 256;
