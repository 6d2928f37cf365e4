//! The record of whether a catalogue answers this node.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Whether a catalogue answers this node, and how often one has answered.
#[derive(Default)]
pub(in crate::node) struct CatalogueContact {
    /// Whether the last registration got no answer from a catalogue, and no read has got one since.
    is_silent: AtomicBool,
    /// Number of times that a catalogue has answered a registration or a read, or has begun.
    answers: AtomicU64,
}

impl CatalogueContact {
    /// Records that a catalogue has answered, or that a new one has begun.
    pub(in crate::node) fn record_answer(&self) {
        self.is_silent.store(false, Ordering::Relaxed);
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that no catalogue has answered.
    pub(in crate::node) fn record_silence(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    /// Returns whether the last registration got no answer from a catalogue, and no read has got
    /// one since.
    pub(in crate::node) fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Relaxed)
    }

    /// Returns the number of answers so far. Results that were collected without a catalogue are
    /// outdated as soon as this number has changed.
    pub(in crate::node) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }
}
