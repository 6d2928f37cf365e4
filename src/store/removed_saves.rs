//! The removed-save set: the ids of saves that this node knows to be removed. Most entries follow a
//! purge. A node that catches up also adds the ids of saves whose files it may still hold until it
//! purges them. An id remains here after the save's tombstone is gone.
//!
//! Ids are never taken out again. One small sealed record holds all ids that begin with the same
//! byte (ids are random, so that the records grow evenly). Each record is replaced as a whole, so
//! that a crash leaves either the old or the new one.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use serde::{Deserialize, Serialize};

use super::StoreError;
use super::cluster_state::refuse_older_epoch;
use super::damage_notes::is_damage_error;
use super::data_folder::Store;
use super::durable_paths::{GRAVES, none_if_not_found};
use crate::format::envelope::RecordKind;
use crate::id::{Epoch, SaveId};
use crate::kind::ErrorKind;

/// Maximum number of ids in one record: 3.6 MB, which fits into a small record.
const MAX_REMOVED_PER_FILE: usize = 300_000;

/// The body of one record of the removed-save set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct RemovedSaves {
    saves: Vec<SaveId>,
}

fn removed_saves_path(save: SaveId) -> String {
    format!("{GRAVES}/{:02x}", save.0[0])
}

impl Store {
    /// Moves the damaged records of the removed-save set to quarantine. Any save could be in such a
    /// record, so the node has to learn the removals from the other nodes again. Before each move,
    /// records durably that this node is behind, as if its disk were new. A record that cannot be set
    /// aside, or is of a later format version, stays in place, and calls that need it fail. Called
    /// only while the data folder is opened.
    pub(super) fn set_aside_damaged_removed_saves(&self) {
        let listed = none_if_not_found(self.disk().list(GRAVES));
        let entries = listed.unwrap_or_else(|error| {
            tracing::error!(%error, "the records of the removed-save set cannot be listed");
            None
        });
        for entry in entries.unwrap_or_default() {
            let path = format!("{GRAVES}/{}", entry.name);
            let opened: Result<Option<RemovedSaves>, _> =
                self.open_sealed_record(&path, RecordKind::Graves);
            let Err(error) = opened else { continue };
            let moved = match is_damaged_for_good(&error) {
                true => self.set_aside_removed_saves(&path, &error),
                false => Err(error),
            };
            if let Err(error) = moved {
                tracing::error!(path, %error, "a record of the removed-save set cannot be used: calls that need it fail");
            }
        }
    }

    fn set_aside_removed_saves(&self, path: &str, error: &StoreError) -> Result<(), StoreError> {
        self.record_behind()?;
        let why = format!("a record of the removed-save set is damaged: {error}");
        self.move_record_to_quarantine(path, &why)
    }

    /// Records durably and permanently that a save was removed. Returns `false` if there is no room
    /// for its id.
    pub fn try_record_removed(&self, save: SaveId) -> Result<bool, StoreError> {
        let _one_at_a_time =
            self.removed_saves_lock().lock().unwrap_or_else(PoisonError::into_inner);
        let path = removed_saves_path(save);
        let mut graves = self.read_removed_saves(&path)?;
        if let Err(at) = graves.saves.binary_search(&save) {
            if graves.saves.len() >= MAX_REMOVED_PER_FILE {
                return Ok(false);
            }
            graves.saves.insert(at, save);
        }
        // Write even if the id is present: an earlier call may have failed between its rename and
        // its sync.
        self.put_sealed(&path, RecordKind::Graves, &graves)?;
        Ok(true)
    }

    /// Records many saves as removed, but only while no later epoch than `epoch` was seen, because a
    /// rebuild that claimed a later epoch may have read this set already. Writes each record at most
    /// once. A record that has all of its ids already is not written again, only synced.
    ///
    /// # Errors
    /// [`StoreError::StaleEpoch`] if a later epoch was seen, and [`StoreError::RemovedSavesFull`]
    /// if there is no room for one of the ids.
    pub fn record_all_removed(
        &self,
        epoch: Epoch,
        saves: impl IntoIterator<Item = SaveId>,
    ) -> Result<(), StoreError> {
        // The epoch cannot change during the writes, so that a claim of a later epoch comes before
        // all writes or after all of them.
        let _writing = self.lock_epoch_writer();
        refuse_older_epoch(self.highest_seen_epoch(), epoch)?;
        let saves: BTreeSet<SaveId> = saves.into_iter().collect();
        let saves: Vec<SaveId> = saves.into_iter().collect();
        for ours in saves.chunk_by(|a, b| a.0[0] == b.0[0]) {
            let _one_at_a_time =
                self.removed_saves_lock().lock().unwrap_or_else(PoisonError::into_inner);
            let path = removed_saves_path(ours[0]);
            let mut graves = self.read_removed_saves(&path)?;
            let is_known = |save: &SaveId| graves.saves.binary_search(save).is_ok();
            let missing: Vec<SaveId> =
                ours.iter().filter(|save| !is_known(save)).copied().collect();
            if missing.is_empty() {
                // An earlier call may have failed between its rename and its sync.
                self.durable_names().sync_name(&path)?;
                continue;
            }
            if graves.saves.len() + missing.len() > MAX_REMOVED_PER_FILE {
                return Err(StoreError::RemovedSavesFull { path });
            }
            graves.saves.extend(missing);
            graves.saves.sort_unstable();
            self.put_sealed(&path, RecordKind::Graves, &graves)?;
        }
        Ok(())
    }

    /// Returns at most `limit` ids of the set, in order, from the first one after `after`.
    pub fn list_removed(
        &self,
        after: Option<SaveId>,
        limit: usize,
    ) -> Result<Vec<SaveId>, StoreError> {
        let mut saves = Vec::new();
        for first in after.map_or(0, |after| after.0[0])..=u8::MAX {
            let path = removed_saves_path(SaveId([first; 12]));
            let behind = self.read_removed_saves(&path)?.saves.into_iter();
            saves.extend(behind.filter(|save| after.is_none_or(|after| *save > after)));
            if saves.len() >= limit {
                saves.truncate(limit);
                break;
            }
        }
        Ok(saves)
    }

    /// Returns whether the save is in the removed-save set. A record that does not parse is an
    /// error, because any save could be in it.
    pub fn is_recorded_removed(&self, save: SaveId) -> Result<bool, StoreError> {
        let graves = self.read_removed_saves(&removed_saves_path(save))?;
        Ok(graves.saves.binary_search(&save).is_ok())
    }

    /// Reads one record of the set, which is empty if there is none.
    fn read_removed_saves(&self, path: &str) -> Result<RemovedSaves, StoreError> {
        match self.open_sealed_record(path, RecordKind::Graves) {
            Ok(found) => Ok(found.unwrap_or_default()),
            Err(error) if is_damage_error(&error) || is_damaged_for_good(&error) => {
                let (path, reason) = (path.to_owned(), error.to_string());
                Err(StoreError::RemovedSavesDamaged { path, reason })
            }
            Err(error) => Err(error),
        }
    }
}

/// Returns whether the bytes of a record are known to be damaged. A disk that does not answer, or a
/// lack of memory, may pass.
fn is_damaged_for_good(error: &StoreError) -> bool {
    match error {
        StoreError::TooLong { .. } => true,
        StoreError::Disk(error) if error.is_bad_medium() => true,
        error => error.kind() == ErrorKind::Corrupt,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::format::records::Standing;
    use crate::id::ClusterId;
    use crate::store::{Disk, LOCK_FILE, MemoryDisk, MemoryKv};

    fn open(disk: &MemoryDisk) -> Store {
        let lock = disk.lock(LOCK_FILE).unwrap();
        let name = "node-1".parse().unwrap();
        let kv = Arc::new(MemoryKv::new());
        Store::open(Arc::new(disk.clone()), lock, kv, ClusterId([1; 16]), &name).unwrap().0
    }

    fn save(first: u8, number: u8) -> SaveId {
        SaveId([first, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, number])
    }

    #[test]
    fn what_was_removed_stays_so_over_a_power_cut_and_others_are_not() {
        let disk = MemoryDisk::new(1 << 20);
        let store = open(&disk);
        for number in [7, 3, 9, 3] {
            assert!(store.try_record_removed(save(0x5a, number)).unwrap());
        }
        assert!(store.try_record_removed(save(0x5b, 1)).unwrap());
        drop(store);
        let store = open(&disk.crash());
        let found: Vec<u8> =
            (0..12).filter(|&n| store.is_recorded_removed(save(0x5a, n)).unwrap()).collect();
        assert_eq!(found, [3, 7, 9]);
        assert!(store.is_recorded_removed(save(0x5b, 1)).unwrap());
        assert!(!store.is_recorded_removed(save(0x00, 1)).unwrap());
    }

    #[test]
    fn a_failed_write_leaves_those_that_were_there() {
        for failing in 0..12 {
            let disk = MemoryDisk::new(1 << 20);
            let store = open(&disk);
            store.try_record_removed(save(1, 1)).unwrap();
            disk.fail_once_after(failing);
            let second = store.try_record_removed(save(1, 2));
            drop(store);
            let store = open(&disk.crash());
            assert!(store.is_recorded_removed(save(1, 1)).unwrap(), "operation {failing}");
            assert!(second.is_err() || store.is_recorded_removed(save(1, 2)).unwrap());
        }
    }

    #[test]
    fn ids_that_a_failed_write_left_are_durable_once_they_are_acknowledged() {
        for failing in 0..12 {
            let disk = MemoryDisk::new(1 << 20);
            let store = open(&disk);
            disk.fail_once_after(failing);
            let first = store.record_all_removed(Epoch(1), [save(1, 1)]);
            let second = store.record_all_removed(Epoch(1), [save(1, 1)]);
            assert!(first.is_ok() || second.is_ok(), "operation {failing}");
            drop(store);
            let store = open(&disk.crash());
            assert!(store.is_recorded_removed(save(1, 1)).unwrap(), "operation {failing}");
        }
    }

    #[test]
    fn many_are_removed_at_once_and_listed_by_pages() {
        let disk = MemoryDisk::new(1 << 20);
        let store = open(&disk);
        let all: Vec<SaveId> =
            (0..=255).flat_map(|first| [save(first, 2), save(first, 9)]).collect();
        store.try_record_removed(all[9]).unwrap();
        store.record_all_removed(Epoch(2), all.iter().rev().copied().chain([all[3]])).unwrap();
        store.record_all_removed(Epoch(2), []).unwrap();
        store.raise_highest_seen_epoch(Epoch(3)).unwrap();
        assert!(store.record_all_removed(Epoch(2), [save(0, 5)]).is_err(), "that epoch is over");
        drop(store);
        let store = open(&disk.crash());
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = store.list_removed(after, 7).unwrap();
            let Some(last) = page.last() else { break };
            after = Some(*last);
            found.extend(page);
        }
        assert_eq!(found, all);
        assert!(all.iter().all(|save| store.is_recorded_removed(*save).unwrap()));
    }

    /// A power cut at any operation of the open leaves the node behind, or the damaged record there.
    #[test]
    fn an_open_sets_a_damaged_record_aside_and_the_node_is_behind() {
        let caught_up = |disk: &MemoryDisk| {
            let store = open(disk);
            store.record_all_removed(Epoch(1), [save(1, 1), save(2, 1)]).unwrap();
            store.record_caught_up(Epoch(1), 5).unwrap();
            drop(store);
            disk.open("graves/02").unwrap().write_at(b"x", 9).unwrap();
            disk.sync_all().unwrap();
        };
        let mut failed = 0;
        for failing in 0.. {
            let disk = MemoryDisk::new(1 << 20);
            caught_up(&disk);
            disk.fail_once_after(failing);
            let (lock, kv) = (disk.lock(LOCK_FILE).unwrap(), Arc::new(MemoryKv::new()));
            let (shared, name) = (Arc::new(disk.clone()), "node-1".parse().unwrap());
            let opened = Store::open(shared, lock, kv, ClusterId([1; 16]), &name);
            let is_whole = opened.is_ok();
            failed += usize::from(!is_whole);
            drop(opened);
            let store = open(&disk.crash());
            assert_eq!(store.read_catch_up_standing(), Standing::Behind, "operation {failing}");
            assert_eq!(store.list_removed(None, 9).unwrap(), [save(1, 1)]);
            assert!(store.try_record_removed(save(2, 7)).unwrap());
            // After a cut in the middle of a move the record may be at both places.
            assert!((1..=2).contains(&store.totals().quarantined));
            if is_whole {
                break;
            }
        }
        assert!(failed > 3, "{failed}");
    }

    #[test]
    fn damaged_graves_are_an_error_and_full_ones_take_no_more() {
        let disk = MemoryDisk::new(16 << 20);
        let store = open(&disk);
        let full: Vec<SaveId> = (0..MAX_REMOVED_PER_FILE as u32)
            .map(|n| {
                let [a, b, c, d] = n.to_be_bytes();
                SaveId([2, 0, 0, 0, 0, 0, 0, 0, a, b, c, d])
            })
            .collect();
        store.put_sealed("graves/02", RecordKind::Graves, &RemovedSaves { saves: full }).unwrap();
        assert!(store.try_record_removed(save(2, 0)).unwrap());
        assert!(!store.try_record_removed(SaveId([2; 12])).unwrap());
        assert!(!store.is_recorded_removed(SaveId([2; 12])).unwrap());
        let file = disk.open("graves/02").unwrap();
        file.write_at(b"x", 100).unwrap();
        assert!(store.is_recorded_removed(save(2, 0)).is_err());
        assert!(store.try_record_removed(SaveId([2; 12])).is_err());
    }
}
