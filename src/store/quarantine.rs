//! Quarantine: files that cannot be trusted under their name are moved aside, and never deleted or
//! used.
//!
//! A whole file that no record explains is not handled here. It stays in place and is reported
//! (docs/semantics.md, 5).

use std::sync::atomic::Ordering;

use super::StoreError;
use super::data_folder::Store;
use super::disk::DiskEntry;
use super::durable_paths::{QUARANTINE, file_path};
use super::reconcile_index::NAMED;
use super::stored_file::StoredFile;
use crate::format::file::FileKey;
use crate::kind::ErrorKind;

/// The suffix of the name of a note.
const NOTE: &str = ".why";
/// Maximum length of a note, in characters.
const MAX_NOTE_CHARS: usize = 2000;

impl Store {
    /// Moves a file to quarantine, writes a note with the reason `why` beside it, and returns once
    /// the move is durable. `inspected` is the file that was inspected; `None` stands for a file
    /// that does not open because it is corrupt. Returns `false` if that file is gone; a good file
    /// may have its name now.
    pub fn quarantine_file_if_unchanged(
        &self,
        key: FileKey,
        inspected: Option<&StoredFile>,
        why: &str,
    ) -> Result<bool, StoreError> {
        let moved = self.move_to_quarantine(key, inspected, why)?;
        if moved {
            self.remove_damage_note_if(key, |_| self.current_inode_number(key).is_none())?;
            self.index().increment_quarantined();
            self.remove_stale_index_entry(key);
        }
        Ok(moved)
    }

    /// Moves a file like [`quarantine_file_if_unchanged`](Self::quarantine_file_if_unchanged), but
    /// leaves the damage note, the totals and the index to the caller.
    pub(super) fn move_to_quarantine(
        &self,
        key: FileKey,
        inspected: Option<&StoredFile>,
        why: &str,
    ) -> Result<bool, StoreError> {
        let aside = self.next_quarantine_path(&key.to_string());
        let there = || StoredFile::open(self.disk(), self.cluster(), key);
        let is_it = || match (there(), inspected) {
            (Ok(there), Some(judged)) => there.is_same_file(judged),
            (Ok(_), None) => Ok(false),
            (Err(error), judged) => match error.kind() {
                ErrorKind::Corrupt => Ok(judged.is_none()),
                ErrorKind::NotFound => Ok(false),
                _ => Err(error),
            },
        };
        if !self.durable_names().move_out_of_shards_if(&file_path(key), &aside, is_it)? {
            return Ok(false);
        }
        self.write_quarantine_note(&key.to_string(), &aside, why);
        Ok(true)
    }

    /// Moves a record that is not below `shards/` to quarantine, and writes a note like
    /// [`quarantine_file_if_unchanged`](Self::quarantine_file_if_unchanged). No other call may use
    /// the record meanwhile.
    pub(super) fn move_record_to_quarantine(
        &self,
        path: &str,
        why: &str,
    ) -> Result<(), StoreError> {
        let aside = self.next_quarantine_path(path);
        self.durable_names().rename_durably(path, &aside, || Ok::<_, StoreError>(()))?;
        self.durable_names().sync_name(path)?;
        self.index().increment_quarantined();
        self.write_quarantine_note(path, &aside, why);
        Ok(())
    }

    fn next_quarantine_path(&self, name: &str) -> String {
        let number = self.next_quarantine_number().fetch_add(1, Ordering::Relaxed);
        format!("{QUARANTINE}/{number:06}-{}", name.replace('/', "-"))
    }

    fn write_quarantine_note(&self, name: &str, aside: &str, why: &str) {
        tracing::warn!(name, aside, why, "moved a file to quarantine");
        let note: String = format!("{name}\n{why}\n").chars().take(MAX_NOTE_CHARS).collect();
        if let Err(error) = self.put_record(&format!("{aside}{NOTE}"), note.as_bytes()) {
            // The move has succeeded. Without the note, only the log has the reason.
            tracing::warn!(name, %error, "cannot write the note of a file in quarantine");
        }
    }

    /// Returns the names of the first three files in quarantine, each with the reason from its note.
    pub fn first_quarantined_files(&self) -> Result<Vec<String>, StoreError> {
        let mut names: Vec<String> =
            self.disk().list(QUARANTINE)?.into_iter().map(|entry| entry.name).collect();
        names.retain(|name| !name.ends_with(NOTE));
        names.sort_unstable();
        names.truncate(NAMED);
        let told = |name: String| {
            // List the file even if its note cannot be read.
            let note = self.get_record(&format!("{QUARANTINE}/{name}{NOTE}")).ok().flatten();
            let note = String::from_utf8_lossy(&note.unwrap_or_default()).into_owned();
            match note.lines().nth(1) {
                Some(why) => format!("{name} ({why})"),
                None => name,
            }
        };
        Ok(names.into_iter().map(told).collect())
    }

    /// Returns the number of files in quarantine, and sets the next quarantine number so that no
    /// number is used twice.
    pub(super) fn count_and_resume_numbering(&self) -> Result<u64, StoreError> {
        let entries = self.disk().list(QUARANTINE)?;
        let number = |entry: &DiskEntry| entry.name.split('-').next()?.parse::<u64>().ok();
        let highest = entries.iter().filter_map(number).max().unwrap_or(0);
        self.next_quarantine_number().fetch_max(highest.saturating_add(1), Ordering::Relaxed);
        Ok(entries.iter().filter(|entry| !entry.name.ends_with(NOTE)).count() as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::id::{ClusterId, ShardId, StripeId};
    use crate::store::{BlockSpec, Disk, LOCK_FILE, MemoryDisk, MemoryKv};

    const STRIPE: StripeId = StripeId { shard: ShardId([5; 16]), index: 0 };

    fn write(store: &Store) {
        let spec = BlockSpec { stripe: STRIPE, block: 1, layout: 1, len_bytes: 3 };
        let mut writer = store.create_block_writer(spec, None).unwrap();
        writer.write(b"abc").unwrap();
        writer.finish(None).unwrap();
    }

    #[test]
    fn a_good_file_that_took_the_name_of_the_judged_one_stays() {
        let disk = MemoryDisk::new(1 << 20);
        let (lock, name) = (disk.lock(LOCK_FILE).unwrap(), "n1".parse().unwrap());
        let (kv, disk) = (Arc::new(MemoryKv::new()), Arc::new(disk));
        let (store, _) = Store::open(disk.clone(), lock, kv, ClusterId([1; 16]), &name).unwrap();
        let key = FileKey::replica(STRIPE, 1);
        assert!(!store.quarantine_file_if_unchanged(key, None, "nothing is there").unwrap());
        write(&store);
        let judged = store.open_undamaged_file(key).unwrap();
        write(&store);
        assert!(
            !store.quarantine_file_if_unchanged(key, Some(&judged), "it was replaced").unwrap()
        );
        assert!(!store.quarantine_file_if_unchanged(key, None, "it opens").unwrap());
        assert_eq!(
            store.list_undamaged_files(STRIPE).unwrap(),
            [store.open_undamaged_file(key).unwrap().index_entry()]
        );

        let judged = store.open_undamaged_file(key).unwrap();
        assert!(store.quarantine_file_if_unchanged(key, Some(&judged), "it is the one").unwrap());
        write(&store);
        disk.set_file_len(&file_path(key), 7).unwrap();
        assert!(
            !store.quarantine_file_if_unchanged(key, Some(&judged), "that one is gone").unwrap()
        );
        assert!(store.quarantine_file_if_unchanged(key, None, "it does not open").unwrap());
        assert_eq!(
            (store.totals().quarantined, store.list_undamaged_files(STRIPE).unwrap()),
            (2, vec![])
        );
    }
}
