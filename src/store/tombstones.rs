//! Tombstones. Each has its own file if the disk has room for one; on a full disk it takes a slot
//! of a file that was allocated in advance (docs/semantics.md, 7, *A full disk*).

use std::collections::BTreeSet;
use std::sync::{MutexGuard, PoisonError};

use super::StoreError;
use super::data_folder::Store;
use super::disk::DiskError;
use super::disk_reserve::release_reserve;
use super::durable_paths::{none_if_not_found, shard_dir};
use super::record_file::RecordScope;
use super::tombstone_slots::{SLOT_BYTES, SLOT_COUNT, SLOTS, TombstoneSlot, TombstoneSlots};
use crate::format::records::{Record, Tombstone};
use crate::id::{SaveId, ShardId};

/// The name of a tombstone's file.
const TOMBSTONE: &str = "tombstone";

/// Returns the scope of records about a save as a whole.
fn tombstone_scope(save: SaveId) -> RecordScope {
    RecordScope::Shard(tombstone_shard(save))
}

fn tombstone_shard(save: SaveId) -> ShardId {
    ShardId::new(save, u32::MAX)
}

impl Store {
    fn lock_slots(&self) -> MutexGuard<'_, TombstoneSlots> {
        self.slots_mutex().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the slots at start, and creates their file if it is missing or truncated.
    pub(super) fn load_or_create_slots(&self) -> Result<(), StoreError> {
        let mut slots = TombstoneSlots::default();
        if let Some(file) = none_if_not_found(self.disk().open_to_write(SLOTS))? {
            let mut slot = [0; SLOT_BYTES];
            let mut is_whole = true;
            for number in 0..SLOT_COUNT {
                match file.read_at(&mut slot, (number * SLOT_BYTES) as u64) {
                    Ok(()) => slots.load_slot(number, &slot),
                    Err(DiskError::Short { .. }) => is_whole = false,
                    Err(error) => {
                        tracing::warn!(number, %error, "cannot read a slot");
                        slots.unusable.insert(number);
                    }
                }
            }
            slots.file = is_whole.then_some(file);
        }
        *self.lock_slots() = slots;
        if let Err(error) = self.create_slot_file() {
            tracing::warn!(%error, "cannot create the slots yet: until they exist, removals may fail on a full disk");
        }
        Ok(())
    }

    /// Returns whether the file of the slots exists, so that a tombstone can be stored on a full
    /// disk.
    pub fn has_slot_file(&self) -> bool {
        self.lock_slots().file.is_some()
    }

    /// Creates the file of the slots if it is missing or truncated, with the tombstones that a
    /// truncated file held.
    fn create_slot_file(&self) -> Result<(), StoreError> {
        let mut slots = self.lock_slots();
        if slots.file.is_some() {
            return Ok(());
        }
        let mut bytes = vec![0; SLOT_BYTES * SLOT_COUNT];
        let used = slots.used.values().map(|slot| (slot.number, &slot.bytes));
        for (number, slot) in used.chain(slots.of_later_release.iter().map(|(n, b)| (*n, b))) {
            bytes[number * SLOT_BYTES..][..slot.len()].copy_from_slice(slot);
        }
        let temporary = self.durable_names().next_temporary_path();
        let made = self.disk().create_new(&temporary).and_then(|file| {
            file.write_at(&bytes, 0)?;
            file.sync()
        });
        let made =
            made.and_then(|()| self.durable_names().rename_durably(&temporary, SLOTS, || Ok(())));
        if made.is_err() {
            let _ = self.disk().remove(&temporary);
        }
        made?;
        slots.file = Some(self.disk().open_to_write(SLOTS)?);
        slots.unusable.clear();
        Ok(())
    }

    /// Stores the tombstone of a save, in a slot if the disk is full, and returns once it is
    /// durable. If no slot can be written, the reserve is released, and the tombstone takes its
    /// space: a quota may be reached while the file system has room, and a file system that never
    /// writes in place needs new blocks for a slot.
    ///
    /// # Errors
    /// [`DiskError::Full`] if the disk is full, no slot can be written, and the reserve is absent or
    /// does not free enough space.
    pub fn put_tombstone(&self, save: SaveId, bytes: &[u8]) -> Result<(), StoreError> {
        match self.try_put_tombstone(save, bytes) {
            Err(StoreError::Disk(DiskError::Full { .. })) if release_reserve(self.disk())? => {
                tracing::warn!(%save, "released the disk reserve for a tombstone");
                self.try_put_tombstone(save, bytes)
            }
            put => put,
        }
    }

    fn try_put_tombstone(&self, save: SaveId, bytes: &[u8]) -> Result<(), StoreError> {
        let full = match self.put_record_file(tombstone_scope(save), TOMBSTONE, bytes) {
            Err(full @ StoreError::Disk(DiskError::Full { .. })) => full,
            put => return put,
        };
        let file = self.get_record_file(tombstone_scope(save), TOMBSTONE)?;
        if file.is_some_and(|bytes| Tombstone::parse(&bytes).is_ok()) {
            // The name of the existing file may not be durable yet.
            return Ok(self
                .durable_names()
                .sync_name(&format!("{}/{TOMBSTONE}", shard_dir(tombstone_shard(save))))?);
        }
        let mut slots = self.lock_slots();
        if slots.used.contains_key(&save) {
            return Ok(());
        }
        let number =
            slots.first_free().filter(|_| slots.file.is_some() && bytes.len() <= SLOT_BYTES);
        let Some(number) = number else { return Err(full) };
        slots.write_slot(number, bytes)?;
        slots.used.insert(save, TombstoneSlot { number, bytes: bytes.to_vec() });
        tracing::warn!(%save, number, "the disk is full: stored a tombstone in a slot");
        Ok(())
    }

    /// Returns the tombstone of a save, or `None`.
    pub fn get_tombstone(&self, save: SaveId) -> Result<Option<Vec<u8>>, StoreError> {
        // Read the slot first: a tombstone's file is written before its slot is freed.
        let slot = self.lock_slots().used.get(&save).map(|slot| slot.bytes.clone());
        match slot {
            Some(bytes) => Ok(Some(bytes)),
            None => self.get_record_file(tombstone_scope(save), TOMBSTONE),
        }
    }

    /// Removes the tombstone of a save and returns once the removal is durable.
    pub fn remove_tombstone(&self, save: SaveId) -> Result<(), StoreError> {
        self.remove_record_file(tombstone_scope(save), TOMBSTONE)?;
        self.free_slot(save)
    }

    fn free_slot(&self, save: SaveId) -> Result<(), StoreError> {
        let mut slots = self.lock_slots();
        let Some(number) = slots.used.get(&save).map(|slot| slot.number) else { return Ok(()) };
        slots.write_slot(number, &[])?;
        slots.used.remove(&save);
        Ok(())
    }

    /// Creates the file of the slots if it is missing. Then writes each tombstone from its slot to
    /// a file of its own and frees the slot. The slot of a save in the removed-save set is freed
    /// without such a file. Continues after a failure and returns the last error.
    pub fn move_slots_to_files(&self) -> Result<(), StoreError> {
        let mut result = self.create_slot_file();
        let held: Vec<(SaveId, Vec<u8>)> =
            self.lock_slots().used.iter().map(|(save, slot)| (*save, slot.bytes.clone())).collect();
        for (save, bytes) in held {
            let emptied = self.is_recorded_removed(save).and_then(|is_removed| {
                if !is_removed {
                    self.put_record_file(tombstone_scope(save), TOMBSTONE, &bytes)?;
                }
                self.free_slot(save)
            });
            result = emptied.and(result);
        }
        result
    }

    /// Returns the shards under which the tombstones in slots are listed, in order.
    pub(super) fn shards_in_slots(&self) -> BTreeSet<ShardId> {
        self.lock_slots().used.keys().map(|save| tombstone_shard(*save)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::format::envelope::{RecordKind, seal_record};
    use crate::format::records::RemoveReason;
    use crate::id::{ClusterId, Epoch, Generation};
    use crate::store::disk::{DiskEntry, DiskFile, DiskLock, Space};
    use crate::store::{
        Disk, LOCK_FILE, MemoryDisk, MemoryKv, ReserveState, create_or_release_reserve,
    };

    const CAPACITY: u64 = 1 << 20;

    fn open(disk: &MemoryDisk) -> Store {
        let lock = disk.lock(LOCK_FILE).unwrap();
        let (name, kv) = ("node-1".parse().unwrap(), Arc::new(MemoryKv::new()));
        Store::open(Arc::new(disk.clone()), lock, kv, ClusterId([1; 16]), &name).unwrap().0
    }

    fn save(number: u8) -> SaveId {
        SaveId([number; 12])
    }

    fn tombstone(number: u8) -> Vec<u8> {
        let generation = Generation { epoch: Epoch(1), counter: 4 };
        let (cluster, reason) = (ClusterId([1; 16]), RemoveReason::Deleted);
        Tombstone { cluster, save: save(number), generation, reason }.to_bytes().unwrap()
    }

    fn fill(disk: &MemoryDisk) {
        let used = disk.space().unwrap();
        disk.set_capacity(used.total_bytes - used.free_bytes);
    }

    #[test]
    fn a_full_disk_takes_tombstones_and_they_are_as_others() {
        let disk = MemoryDisk::new(CAPACITY);
        let store = open(&disk);
        store.put_tombstone(save(9), &tombstone(9)).unwrap();
        fill(&disk);
        for number in [5, 3, 5] {
            store.put_tombstone(save(number), &tombstone(number)).unwrap();
        }
        drop(store);
        let disk = disk.crash();
        let store = open(&disk);
        for number in [3, 5, 9] {
            assert_eq!(store.get_tombstone(save(number)).unwrap(), Some(tombstone(number)));
        }
        assert_eq!(store.get_tombstone(save(4)).unwrap(), None);
        let listed: Vec<ShardId> = store.shards_after(None).unwrap().collect();
        assert_eq!(listed, [3, 5, 9].map(|number| tombstone_shard(save(number))));
        let behind: Vec<ShardId> =
            store.shards_after(Some(tombstone_shard(save(3)))).unwrap().collect();
        assert_eq!(behind, [5, 9].map(|number| tombstone_shard(save(number))));
        assert!(store.move_slots_to_files().is_err(), "there is still no room");
        // With room, each tombstone gets a file or its save joins the removed-save set, and the
        // slots are free.
        disk.set_capacity(CAPACITY);
        assert!(store.try_record_removed(save(3)).unwrap());
        store.remove_tombstone(save(3)).unwrap();
        store.move_slots_to_files().unwrap();
        assert!(store.lock_slots().used.is_empty());
        drop(store);
        let disk = disk.crash();
        let store = open(&disk);
        assert!(store.lock_slots().used.is_empty());
        let there = [3, 5, 9].map(|number| store.get_tombstone(save(number)).unwrap().is_some());
        assert_eq!(there, [false, true, true]);
        assert!(store.is_recorded_removed(save(3)).unwrap());
    }

    #[test]
    fn without_a_slot_a_tombstone_takes_the_space_of_the_reserve() {
        let disk = MemoryDisk::new(CAPACITY);
        let store = open(&disk);
        assert_eq!(create_or_release_reserve(&disk).unwrap(), ReserveState::InPlace);
        fill(&disk);
        let last = SLOT_COUNT as u8;
        for number in 0..=last {
            store.put_tombstone(save(number), &tombstone(number)).unwrap();
            let is_released = number == last;
            assert_eq!(disk.space().unwrap().free_bytes > 0, is_released, "{number}");
        }
        drop(store);
        let store = open(&disk.crash());
        assert!((0..=last).all(|number| store.get_tombstone(save(number)).unwrap().is_some()));
    }

    type Hook = Box<dyn FnOnce() + Send>;

    /// A disk that runs a hook right after a lookup of a tombstone's file, or after a listing of
    /// the folders, has taken its result.
    struct Hooked {
        inner: MemoryDisk,
        hook: Arc<std::sync::Mutex<Option<Hook>>>,
    }

    impl Hooked {
        fn ran<T>(&self, is_now: bool, result: T) -> T {
            let hook = if is_now { self.hook.lock().unwrap().take() } else { None };
            if let Some(hook) = hook {
                hook();
            }
            result
        }
    }

    impl Disk for Hooked {
        fn create_new(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
            self.inner.create_new(path)
        }
        fn open(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
            self.ran(path.ends_with(TOMBSTONE), self.inner.open(path))
        }
        fn open_to_write(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
            self.inner.open_to_write(path)
        }
        fn rename(&self, from: &str, to: &str) -> Result<(), DiskError> {
            self.inner.rename(from, to)
        }
        fn remove(&self, path: &str) -> Result<(), DiskError> {
            self.inner.remove(path)
        }
        fn create_dir(&self, path: &str) -> Result<bool, DiskError> {
            self.inner.create_dir(path)
        }
        fn remove_dir_if_empty(&self, path: &str) -> Result<bool, DiskError> {
            self.inner.remove_dir_if_empty(path)
        }
        fn list(&self, path: &str) -> Result<Vec<DiskEntry>, DiskError> {
            self.inner.list(path)
        }
        fn list_folders(&self, path: &str) -> Result<Vec<String>, DiskError> {
            self.ran(true, self.inner.list_folders(path))
        }
        fn sync_dir(&self, path: &str) -> Result<(), DiskError> {
            self.inner.sync_dir(path)
        }
        fn sync_all(&self) -> Result<(), DiskError> {
            self.inner.sync_all()
        }
        fn space(&self) -> Result<Space, DiskError> {
            self.inner.space()
        }
        fn lock(&self, path: &str) -> Result<DiskLock, DiskError> {
            self.inner.lock(path)
        }
    }

    #[test]
    fn a_tombstone_is_seen_while_it_moves_to_its_file() {
        for lists in [false, true] {
            let (inner, hook) = (MemoryDisk::new(CAPACITY), Arc::default());
            let disk = Hooked { inner: inner.clone(), hook: Arc::clone(&hook) };
            let (lock, kv) = (inner.lock(LOCK_FILE).unwrap(), Arc::new(MemoryKv::new()));
            let (cluster, name) = (ClusterId([1; 16]), "node-1".parse().unwrap());
            let (store, _) = Store::open(Arc::new(disk), lock, kv, cluster, &name).unwrap();
            fill(&inner);
            store.put_tombstone(save(7), &tombstone(7)).unwrap();
            inner.set_capacity(CAPACITY);
            let mover = store.clone();
            let moves: Hook = Box::new(move || mover.move_slots_to_files().unwrap());
            *hook.lock().unwrap() = Some(moves);
            let is_seen = match lists {
                false => store.get_tombstone(save(7)).unwrap().is_some(),
                true => store.shards_after(None).unwrap().any(|shard| shard.save() == save(7)),
            };
            assert!(is_seen, "lists: {lists}");
            // A reader that needed no file did not run the hook. The hook must not run within a
            // change of names.
            hook.lock().unwrap().take();
            store.move_slots_to_files().unwrap();
            assert!(
                store.lock_slots().used.is_empty()
                    && store.get_tombstone(save(7)).unwrap().is_some()
            );
        }
    }

    #[test]
    fn what_has_a_file_takes_no_slot_and_a_sector_that_fails_is_no_reason_not_to_start() {
        let disk = MemoryDisk::new(CAPACITY);
        let store = open(&disk);
        store.put_tombstone(save(1), &tombstone(1)).unwrap();
        fill(&disk);
        store.put_tombstone(save(1), &tombstone(1)).unwrap();
        assert!(store.lock_slots().used.is_empty());
        store.put_tombstone(save(2), &tombstone(2)).unwrap();
        drop(store);
        let disk = disk.crash();
        disk.make_sector_unreadable(SLOTS, 5 * SLOT_BYTES as u64).unwrap();
        let store = open(&disk);
        assert!(store.get_tombstone(save(2)).unwrap().is_some());
        assert!(store.lock_slots().unusable.contains(&5));
        // A node whose disk was full when it was upgraded gets its slots later.
        drop(store);
        disk.remove(SLOTS).unwrap();
        disk.sync_dir("").unwrap();
        fill(&disk);
        let store = open(&disk);
        assert!(!store.has_slot_file());
        disk.set_capacity(CAPACITY);
        store.move_slots_to_files().unwrap();
        assert!(store.has_slot_file());
    }

    #[test]
    fn a_new_slot_file_keeps_the_tombstone_of_a_later_release() {
        let disk = MemoryDisk::new(CAPACITY);
        drop(open(&disk));
        let later = seal_record(RecordKind::Tombstone, u8::MAX, &1u8).unwrap();
        let slots = disk.open_to_write(SLOTS).unwrap();
        slots.write_at(&later, 2 * SLOT_BYTES as u64).unwrap();
        slots.sync().unwrap();
        // The truncated file still has slots 0 to 2, and the next start makes a new one.
        disk.set_file_len(SLOTS, 3 * SLOT_BYTES as u64).unwrap();
        let store = open(&disk);
        fill(&disk);
        for number in 0..3 {
            store.put_tombstone(save(number), &tombstone(number)).unwrap();
        }
        let mut slot = vec![0; later.len()];
        let file = disk.crash().open(SLOTS).unwrap();
        file.read_at(&mut slot, 2 * SLOT_BYTES as u64).unwrap();
        assert_eq!(slot, later);
    }

    #[test]
    fn slots_end_and_are_used_again() {
        let disk = MemoryDisk::new(CAPACITY);
        let store = open(&disk);
        fill(&disk);
        for number in 0..SLOT_COUNT as u8 {
            store.put_tombstone(save(number), &tombstone(number)).unwrap();
        }
        let more = store.put_tombstone(save(200), &tombstone(200));
        assert!(matches!(more, Err(StoreError::Disk(DiskError::Full { .. }))));
        store.remove_tombstone(save(70)).unwrap();
        store.put_tombstone(save(200), &tombstone(200)).unwrap();
        drop(store);
        let store = open(&disk.crash());
        assert!(store.get_tombstone(save(200)).unwrap().is_some());
        assert!(store.get_tombstone(save(70)).unwrap().is_none());
    }

    #[test]
    fn what_was_acknowledged_survives_a_power_cut_at_every_operation() {
        for failing in 0..40 {
            for seed in 0..4 {
                let disk = MemoryDisk::new(CAPACITY);
                let store = open(&disk);
                fill(&disk);
                store.put_tombstone(save(1), &tombstone(1)).unwrap();
                disk.fail_once_after(failing);
                let second = store.put_tombstone(save(2), &tombstone(2));
                let is_gone = store.remove_tombstone(save(1)).is_ok();
                drop(store);
                let store = open(&disk.crash_torn(seed));
                let has = |number| store.get_tombstone(save(number)).unwrap().is_some();
                assert!(second.is_err() || has(2), "operation {failing}, {seed}");
                assert!(has(1) || is_gone || second.is_ok() || failing > 0);
            }
        }
    }

    #[test]
    fn a_file_of_another_length_is_made_again_with_what_it_holds() {
        let disk = MemoryDisk::new(CAPACITY);
        let store = open(&disk);
        fill(&disk);
        store.put_tombstone(save(1), &tombstone(1)).unwrap();
        drop(store);
        disk.set_file_len(SLOTS, 3 * SLOT_BYTES as u64 + 9).unwrap();
        disk.set_capacity(CAPACITY);
        let store = open(&disk);
        assert!(store.get_tombstone(save(1)).unwrap().is_some());
        drop(store);
        let disk = disk.crash();
        let len = disk.open(SLOTS).unwrap().len_bytes().unwrap();
        assert_eq!(len, (SLOT_BYTES * SLOT_COUNT) as u64);
        assert!(open(&disk).get_tombstone(save(1)).unwrap().is_some());
        // Foreign bytes are not tombstones and do not prevent the start.
        let file = disk.open(SLOTS).unwrap();
        file.write_at(&[0xff; SLOT_BYTES * SLOT_COUNT], 0).unwrap();
        assert!(open(&disk).get_tombstone(save(1)).unwrap().is_none());
    }
}
