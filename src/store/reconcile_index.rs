//! Corrects the index from the folders at every open.
//!
//! Names and lengths are compared, and no data is read. The tail is read only of files that the index
//! lacks or has with another length. A file with a damaged tail gets a damage note, and a file whose
//! header does not match its name goes to quarantine. Unknown files stay in place and are reported.

use std::collections::HashSet;

use super::StoreError;
use super::damage_notes::is_damage_error;
use super::data_folder::Store;
use super::disk::DiskEntry;
use super::durable_paths::is_record_name;
use super::durable_paths::{SHARDS, parse_stripe_index, shard_dir, stripe_dir};
use super::file_index::{FileInfo, Totals};
use super::open_findings::{OpenFindings, ReconcileCounts};
use super::stored_file::StoredFile;
use crate::format::file::{FileKey, FileName};
use crate::id::{ShardId, StripeId};
use crate::kind::ErrorKind;

/// Maximum number of names of each kind that are reported.
pub(super) const NAMED: usize = 3;

/// Adds a name while there are fewer than [`NAMED`].
fn push_if_few(names: &mut Vec<String>, name: String) {
    if names.len() < NAMED {
        names.push(name);
    }
}

impl Store {
    /// Corrects the index and the totals from the folders. Returns the findings.
    pub(super) fn reconcile_index(&self) -> Result<OpenFindings, StoreError> {
        let (report, seen) = (ReconcileCounts::default(), HashSet::new());
        let (strangers, unreadable) = (Vec::new(), Vec::new());
        let mut walk = FolderScan {
            store: self,
            counts: report,
            scanned_stripes: seen,
            unknown_files: strangers,
            unreadable_files: unreadable,
        };
        let report = self.index().recompute_totals(|totals| {
            let quarantined = self.count_and_resume_numbering()?;
            walk.scan_shards(totals)?;
            walk.counts.dropped +=
                self.index().retain_stripes(|stripe| walk.scanned_stripes.contains(&stripe))?;
            totals.quarantined = quarantined + walk.counts.quarantined;
            Ok::<_, StoreError>(walk.counts)
        })?;
        if report != ReconcileCounts::default() {
            tracing::warn!(
                ?report,
                "files differ from the index, or are unknown, damaged, misplaced or unreadable: the index is corrected"
            );
        }
        let FolderScan { unknown_files: strangers, unreadable_files: unreadable, .. } = walk;
        Ok(OpenFindings { counts: report, unknown_files: strangers, unreadable_files: unreadable })
    }
}

/// Returns the stripe's index if the entry is the folder of a stripe.
fn stripe_index_of_dir(entry: &DiskEntry) -> Option<u32> {
    if entry.is_dir { parse_stripe_index(&entry.name) } else { None }
}

/// A scan of `shards/`.
struct FolderScan<'a> {
    store: &'a Store,
    counts: ReconcileCounts,
    scanned_stripes: HashSet<StripeId>,
    unknown_files: Vec<String>,
    unreadable_files: Vec<String>,
}

impl FolderScan<'_> {
    fn scan_shards(&mut self, totals: &mut Totals) -> Result<(), StoreError> {
        for entry in self.store.disk().list(SHARDS)? {
            match entry.name.parse().ok().filter(|_| entry.is_dir) {
                Some(shard) => self.scan_shard(shard, totals)?,
                None => self.record_unknown(SHARDS, &entry),
            }
        }
        Ok(())
    }

    fn record_unknown(&mut self, folder: &str, entry: &DiskEntry) {
        self.counts.strangers += 1;
        push_if_few(&mut self.unknown_files, format!("{folder}/{}", entry.name));
    }

    fn scan_shard(&mut self, shard: ShardId, totals: &mut Totals) -> Result<(), StoreError> {
        let folder = shard_dir(shard);
        for entry in self.store.disk().list(&folder)? {
            match stripe_index_of_dir(&entry) {
                Some(index) => self.reconcile_stripe_entries(StripeId { shard, index }, totals)?,
                None => self.count_record_or_note_unknown(&folder, &entry, totals),
            }
        }
        Ok(())
    }

    fn count_record_or_note_unknown(
        &mut self,
        folder: &str,
        entry: &DiskEntry,
        totals: &mut Totals,
    ) {
        if !entry.is_dir && is_record_name(&entry.name) {
            totals.small_bytes += entry.len_bytes;
        } else {
            self.record_unknown(folder, entry);
        }
    }

    fn reconcile_stripe_entries(
        &mut self,
        stripe: StripeId,
        totals: &mut Totals,
    ) -> Result<(), StoreError> {
        self.scanned_stripes.insert(stripe);
        let known = self.store.index().list_stripe_files(stripe)?;
        let mut files = Vec::new();
        let folder = stripe_dir(stripe);
        let entries = self.store.disk().list(&folder)?;
        let notes: Vec<String> = entries.iter().map(|entry| entry.name.clone()).collect();
        self.store.load_damage_notes(stripe, &notes)?;
        for entry in entries {
            match entry.name.parse::<FileName>().ok().filter(|_| !entry.is_dir) {
                Some(name) => {
                    files.extend(self.index_entry_or_set_aside(
                        FileKey { stripe, name },
                        entry.len_bytes,
                        &known,
                        totals,
                    )?);
                }
                None => self.count_record_or_note_unknown(&folder, &entry, totals),
            }
        }
        let gone = |info: &&FileInfo| !files.iter().any(|file: &FileInfo| file.key() == info.key());
        self.counts.dropped += known.iter().filter(gone).count() as u64;
        self.store.index().replace_stripe_entries(stripe, &files, totals)
    }

    /// Returns the index entry of a file if its length matches, and otherwise an entry made from the
    /// file's header. Returns `None` for a file that cannot be indexed, after it was noted as damaged,
    /// moved to quarantine or counted as unreadable.
    fn index_entry_or_set_aside(
        &mut self,
        key: FileKey,
        file_bytes: u64,
        known: &[FileInfo],
        totals: &mut Totals,
    ) -> Result<Option<FileInfo>, StoreError> {
        let fits = |info: &&FileInfo| info.key() == key && info.file_bytes == file_bytes;
        if let Some(info) = known.iter().find(fits) {
            return Ok(Some(*info));
        }
        match StoredFile::open(self.store.disk(), self.store.cluster(), key) {
            Ok(file) => {
                self.counts.added += 1;
                Ok(Some(file.index_entry()))
            }
            Err(_) if self.store.is_damaged(key) => Ok(None),
            Err(error) if is_damage_error(&error) => {
                totals.small_bytes += self.store.note_damaged_tail(key, &error).unwrap_or_default();
                self.counts.damaged += 1;
                Ok(None)
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let moved = self.store.move_to_quarantine(key, None, &error.to_string())?;
                self.counts.quarantined += u64::from(moved);
                Ok(None)
            }
            Err(error) => {
                tracing::error!(%key, %error, "cannot read a file; it is left where it is");
                self.counts.unreadable += 1;
                push_if_few(&mut self.unreadable_files, key.to_string());
                Ok(None)
            }
        }
    }
}
