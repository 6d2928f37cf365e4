//! Files that do not prove themselves, or that nobody knows, are moved aside: never deleted, never used.

use std::sync::atomic::Ordering;

use super::StoreError;
use super::disk::DiskEntry;
use super::folder::Store;
use super::names::{QUARANTINE, file_path};
use crate::format::file::FileKey;

/// The end of the name of a note.
const NOTE: &str = ".why";
/// A note is no longer than this.
const MAX_NOTE_CHARS: usize = 2000;

impl Store {
    /// Moves a file out of the way and returns when that is durable, with a note beside it that says why.
    pub fn quarantine(&self, key: FileKey, why: &str) -> Result<(), StoreError> {
        self.move_to_quarantine(key, why)?;
        self.index().count_quarantined();
        self.index().update(key, None)
    }

    /// As [`quarantine`](Self::quarantine), for who counts and indexes himself.
    pub(super) fn move_to_quarantine(&self, key: FileKey, why: &str) -> Result<(), StoreError> {
        let number = self.next_quarantine().fetch_add(1, Ordering::Relaxed);
        let aside = format!("{QUARANTINE}/{number:06}-{}", key.to_string().replace('/', "-"));
        self.names().move_out(&file_path(key), &aside)?;
        tracing::warn!(%key, aside, why, "moved a file to quarantine");
        let note: String = format!("{key}\n{why}\n").chars().take(MAX_NOTE_CHARS).collect();
        if let Err(error) = self.put_record(&format!("{aside}{NOTE}"), note.as_bytes()) {
            // The file is out of the way; that its reason is in the log alone is no failure.
            tracing::warn!(%key, %error, "cannot write the note of a file in quarantine");
        }
        Ok(())
    }

    /// Counts what is in quarantine, and makes sure that no number is used twice.
    pub(super) fn count_quarantine(&self) -> Result<u64, StoreError> {
        let entries = self.disk().list(QUARANTINE)?;
        let number = |entry: &DiskEntry| entry.name.split('-').next()?.parse::<u64>().ok();
        let highest = entries.iter().filter_map(number).max().unwrap_or(0);
        self.next_quarantine().fetch_max(highest.saturating_add(1), Ordering::Relaxed);
        Ok(entries.iter().filter(|entry| !entry.name.ends_with(NOTE)).count() as u64)
    }
}
