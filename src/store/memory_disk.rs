//! A disk in memory that forgets what was not synced.
//!
//! The disk keeps two images: the contents that a process sees, and the contents that a power cut
//! would leave. A sync of a file copies its bytes from the first image to the second, and a sync of
//! a folder copies its names. [`Disk::sync_all`] copies everything. No other call does, so every
//! missing sync shows in [`MemoryDisk::crash`]. [`MemoryDisk::crash_torn`] also keeps a random part of
//! the unsynced changes, as real disks may. Reads past the cache see the second image.
//!
//! Tests inject faults: the disk stops at an operation, an operation fails, a sync does nothing or
//! flips a bit, bits flip, sectors become unreadable, files are truncated, space runs out. The same
//! calls, faults and seed produce the same bytes.

mod crash_image;
mod faults;
mod file_contents;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crash_image::{DirState, FileNode, SurvivingWrites, TreeNode, crash_image_of_dir, sync_tree};
use faults::{Effect, Faults, Guard, InjectedOutcome};
use file_contents::{Contents, FileState};

use super::disk::{Disk, DiskEntry, DiskError, DiskFile, DiskLock, Space, check_path, parent};
use crate::entropy::SeededEntropy;

struct DiskState {
    root: Arc<Mutex<DirState>>,
    faults: Mutex<Faults>,
    guard: Mutex<Option<Guard>>,
    locks: Mutex<HashMap<String, Weak<()>>>,
    capacity_bytes: AtomicU64,
    used_bytes: Arc<AtomicU64>,
    /// The number of the next file, shared with the images made of this disk.
    next_number: Arc<AtomicU64>,
}

/// A simulated disk. Clones share the same disk; [`crash`](Self::crash) makes an independent one.
#[derive(Clone)]
pub struct MemoryDisk {
    shared: Arc<DiskState>,
}

fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryDisk {
    /// Returns an empty disk of `capacity_bytes`.
    pub fn new(capacity_bytes: u64) -> Self {
        Self::from_parts(
            Arc::default(),
            capacity_bytes,
            Arc::default(),
            Arc::new(AtomicU64::new(1)),
        )
    }

    fn from_parts(
        root: Arc<Mutex<DirState>>,
        capacity_bytes: u64,
        used: Arc<AtomicU64>,
        next_number: Arc<AtomicU64>,
    ) -> Self {
        let shared = DiskState {
            root,
            faults: Mutex::default(),
            guard: Mutex::default(),
            locks: Mutex::default(),
            capacity_bytes: AtomicU64::new(capacity_bytes),
            used_bytes: used,
            next_number,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns the disk as a power cut would leave it now: with everything that was synced and
    /// nothing else. The new disk has no locks and no faults to inject. Sectors that were made
    /// unreadable stay so.
    pub fn crash(&self) -> Self {
        self.crash_image(SurvivingWrites::Synced)
    }

    /// Returns the disk after a power cut before which everything had reached the medium.
    pub fn crash_after_writeback(&self) -> Self {
        self.crash_image(SurvivingWrites::All)
    }

    /// Returns the disk after a power cut in the middle of write-back: each unsynced name and each
    /// unsynced sector is old or new, as `seed` decides.
    pub fn crash_torn(&self, seed: u64) -> Self {
        self.crash_image(SurvivingWrites::Torn(&SeededEntropy::new(seed)))
    }

    fn crash_image(&self, surviving: SurvivingWrites<'_>) -> Self {
        let used = Arc::default();
        let root = crash_image_of_dir(&self.shared.root, surviving, &used);
        let capacity_bytes = self.shared.capacity_bytes.load(Ordering::Relaxed);
        Self::from_parts(root, capacity_bytes, used, self.shared.next_number.clone())
    }

    /// Changes the capacity. The present contents stay.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        self.shared.capacity_bytes.store(capacity_bytes, Ordering::Relaxed);
    }

    fn find_node(&self, path: &str) -> Result<TreeNode, DiskError> {
        if path.is_empty() {
            return Ok(TreeNode::Dir(self.shared.root.clone()));
        }
        check_path(path)?;
        let mut node = TreeNode::Dir(self.shared.root.clone());
        for part in path.split('/') {
            let TreeNode::Dir(dir) = &node else { return Err(not_found_error(path)) };
            let next = lock_ignoring_poison(dir).visible.get(part).cloned();
            node = next.ok_or_else(|| not_found_error(path))?;
        }
        Ok(node)
    }

    fn find_dir(&self, path: &str) -> Result<Arc<Mutex<DirState>>, DiskError> {
        match self.find_node(path)? {
            TreeNode::Dir(dir) => Ok(dir),
            TreeNode::File(_) => Err(io_error(path, "not a folder")),
        }
    }

    /// Returns the folder that holds `path`, and the name within it.
    fn parent_and_name<'a>(
        &self,
        path: &'a str,
    ) -> Result<(Arc<Mutex<DirState>>, &'a str), DiskError> {
        check_path(path)?;
        let dir = self.find_dir(parent(path)).map_err(|_| not_found_error(path))?;
        Ok((dir, path.rsplit('/').next().unwrap_or(path)))
    }

    fn open_handle(&self, path: &str, node: Arc<FileNode>) -> Box<dyn DiskFile> {
        Box::new(MemoryFile { disk: self.clone(), path: path.to_owned(), node })
    }
}

fn not_found_error(path: &str) -> DiskError {
    DiskError::NotFound { path: path.to_owned() }
}

fn io_error(path: &str, why: &'static str) -> DiskError {
    DiskError::Io { op: "use", path: path.to_owned(), source: io::Error::other(why) }
}

impl Disk for MemoryDisk {
    fn create_new(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        self.count_and_inject_fault(path, Effect::Change)?;
        let (dir, name) = self.parent_and_name(path)?;
        let mut dir = lock_ignoring_poison(&dir);
        if dir.visible.contains_key(name) {
            return Err(DiskError::Exists { path: path.to_owned() });
        }
        let number = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
        let (state, used) = (Mutex::default(), self.shared.used_bytes.clone());
        let node = Arc::new(FileNode { state, disk_used_bytes: used, number });
        dir.visible.insert(name.to_owned(), TreeNode::File(node.clone()));
        Ok(self.open_handle(path, node))
    }

    fn open(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        self.count_and_inject_fault(path, Effect::Read)?;
        check_path(path)?;
        match self.find_node(path)? {
            TreeNode::File(file) => Ok(self.open_handle(path, file)),
            TreeNode::Dir(_) => Err(io_error(path, "not a file")),
        }
    }

    fn open_to_write(&self, path: &str) -> Result<Box<dyn DiskFile>, DiskError> {
        self.open(path)
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), DiskError> {
        self.count_and_inject_fault(from, Effect::Change)?;
        let ((from_dir, from_name), (to_dir, to_name)) =
            (self.parent_and_name(from)?, self.parent_and_name(to)?);
        if let Some(TreeNode::Dir(_)) = lock_ignoring_poison(&to_dir).visible.get(to_name) {
            return Err(io_error(to, "a folder has that name"));
        }
        let node = lock_ignoring_poison(&from_dir)
            .visible
            .remove(from_name)
            .ok_or_else(|| not_found_error(from))?;
        lock_ignoring_poison(&to_dir).visible.insert(to_name.to_owned(), node);
        Ok(())
    }

    fn remove(&self, path: &str) -> Result<(), DiskError> {
        self.count_and_inject_fault(path, Effect::Change)?;
        let (dir, name) = self.parent_and_name(path)?;
        let mut dir = lock_ignoring_poison(&dir);
        match dir.visible.get(name) {
            Some(TreeNode::File(_)) => drop(dir.visible.remove(name)),
            Some(TreeNode::Dir(_)) => return Err(io_error(path, "not a file")),
            None => return Err(not_found_error(path)),
        }
        Ok(())
    }

    fn create_dir(&self, path: &str) -> Result<bool, DiskError> {
        self.count_and_inject_fault(path, Effect::Change)?;
        let (dir, name) = self.parent_and_name(path)?;
        let mut dir = lock_ignoring_poison(&dir);
        if dir.visible.contains_key(name) {
            return Ok(false);
        }
        dir.visible.insert(name.to_owned(), TreeNode::Dir(Arc::default()));
        Ok(true)
    }

    fn remove_dir_if_empty(&self, path: &str) -> Result<bool, DiskError> {
        self.count_and_inject_fault(path, Effect::Change)?;
        let (dir, name) = self.parent_and_name(path)?;
        if !lock_ignoring_poison(&*self.find_dir(path)?).visible.is_empty() {
            return Ok(false);
        }
        lock_ignoring_poison(&dir).visible.remove(name);
        Ok(true)
    }

    fn list(&self, path: &str) -> Result<Vec<DiskEntry>, DiskError> {
        self.count_and_inject_fault(path, Effect::Read)?;
        self.check_listable(path)?;
        let dir = self.find_dir(path)?;
        let entry = |(name, node): (&String, &TreeNode)| {
            let (is_dir, len_bytes) = match node {
                TreeNode::Dir(_) => (true, 0),
                TreeNode::File(file) => (false, lock_ignoring_poison(&file.state).visible.len),
            };
            DiskEntry { name: name.clone(), is_dir, len_bytes }
        };
        let entries = lock_ignoring_poison(&dir).visible.iter().map(entry).collect();
        Ok(entries)
    }

    fn sync_dir(&self, path: &str) -> Result<(), DiskError> {
        let dir = self.find_dir(path)?;
        if self.count_and_inject_fault(path, Effect::Sync)? != InjectedOutcome::Skipped {
            let mut dir = lock_ignoring_poison(&dir);
            dir.durable = dir.visible.clone();
        }
        Ok(())
    }

    fn sync_all(&self) -> Result<(), DiskError> {
        if self.count_and_inject_fault("", Effect::Sync)? != InjectedOutcome::Skipped {
            sync_tree(&self.shared.root);
        }
        Ok(())
    }

    fn space(&self) -> Result<Space, DiskError> {
        let total_bytes = self.shared.capacity_bytes.load(Ordering::Relaxed);
        let used = self.shared.used_bytes.load(Ordering::Relaxed);
        Ok(Space { total_bytes, free_bytes: total_bytes.saturating_sub(used) })
    }

    fn lock(&self, path: &str) -> Result<DiskLock, DiskError> {
        check_path(path)?;
        let mut locks = lock_ignoring_poison(&self.shared.locks);
        if locks.get(path).is_some_and(|held| held.strong_count() > 0) {
            return Err(DiskError::InUse { path: path.to_owned() });
        }
        let held = Arc::new(());
        locks.insert(path.to_owned(), Arc::downgrade(&held));
        Ok(DiskLock::new(held))
    }
}

struct MemoryFile {
    disk: MemoryDisk,
    path: String,
    node: Arc<FileNode>,
}

impl MemoryFile {
    fn read_image(
        &self,
        image: fn(&FileState) -> &Contents,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<(), DiskError> {
        self.disk.count_and_inject_fault(&self.path, Effect::Read)?;
        let state = lock_ignoring_poison(&self.node.state);
        if state.is_unreadable(offset, buf.len() as u64) {
            return Err(io_error(&self.path, "a sector cannot be read"));
        }
        if image(&state).read(buf, offset) {
            return Ok(());
        }
        let end_bytes = offset.saturating_add(buf.len() as u64);
        Err(DiskError::Short { path: self.path.clone(), end_bytes })
    }

    /// Accounts for growth of the file to `space` bytes, or fails with [`DiskError::Full`].
    fn claim_space(&self, file: &FileState, space: u64) -> Result<(), DiskError> {
        let more = space.saturating_sub(file.occupied_bytes());
        let shared = &self.disk.shared;
        let capacity = shared.capacity_bytes.load(Ordering::Relaxed);
        let fits = |used: u64| used.checked_add(more).filter(|total| *total <= capacity);
        if more > 0
            && shared.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err()
        {
            return Err(DiskError::Full { path: self.path.clone() });
        }
        Ok(())
    }
}

impl DiskFile for MemoryFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError> {
        self.read_image(|file| &file.visible, buf, offset)
    }

    fn read_past_cache_at(&self, buf: &mut [u8], offset: u64) -> Result<(), DiskError> {
        self.read_image(|file| &file.durable, buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError> {
        self.disk.count_and_inject_fault(&self.path, Effect::Change)?;
        let mut file = lock_ignoring_poison(&self.node.state);
        self.claim_space(&file, offset.saturating_add(bytes.len() as u64))?;
        file.write(bytes, offset);
        Ok(())
    }

    fn reserve_space(&self, len_bytes: u64) -> Result<(), DiskError> {
        self.disk.count_and_inject_fault(&self.path, Effect::Change)?;
        let mut file = lock_ignoring_poison(&self.node.state);
        self.claim_space(&file, len_bytes)?;
        file.reserved = file.reserved.max(len_bytes);
        Ok(())
    }

    fn sync(&self) -> Result<(), DiskError> {
        match self.disk.count_and_inject_fault(&self.path, Effect::Sync)? {
            InjectedOutcome::Done => lock_ignoring_poison(&self.node.state).sync(),
            InjectedOutcome::Spoilt => lock_ignoring_poison(&self.node.state).sync_flipping_bit(),
            InjectedOutcome::Skipped => {}
        }
        Ok(())
    }

    fn len_bytes(&self) -> Result<u64, DiskError> {
        self.disk.count_and_inject_fault(&self.path, Effect::Read)?;
        Ok(lock_ignoring_poison(&self.node.state).visible.len)
    }

    fn inode_number(&self) -> Result<u64, DiskError> {
        Ok(self.node.number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::file_contents::SECTOR;
    use super::*;

    fn read(disk: &MemoryDisk, path: &str) -> Result<Vec<u8>, DiskError> {
        let file = disk.open(path)?;
        let mut bytes = vec![0; file.len_bytes()? as usize];
        file.read_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    #[test]
    fn a_crash_leaves_what_was_synced_and_nothing_else() {
        let disk = MemoryDisk::new(1 << 20);
        let file = disk.create_new("f").unwrap();
        file.write_at(b"one", 0).unwrap();
        file.sync().unwrap();
        assert!(read(&disk.crash(), "f").is_err(), "the name was not synced");
        disk.sync_dir("").unwrap();
        file.write_at(b"two!", 0).unwrap();
        assert_eq!(read(&disk.crash(), "f").unwrap(), b"one");
        assert_eq!(read(&disk.crash_after_writeback(), "f").unwrap(), b"two!");
        assert_eq!(read(&disk, "f").unwrap(), b"two!");

        disk.create_dir("d").unwrap();
        disk.rename("f", "d/g").unwrap();
        disk.sync_dir("d").unwrap();
        let crashed = disk.crash();
        assert_eq!(read(&crashed, "f").unwrap(), b"one", "neither rename nor folder is durable");
        assert!(crashed.list("d").is_err());
        disk.sync_dir("").unwrap();
        assert_eq!(read(&disk.crash(), "d/g").unwrap(), b"one");
        file.sync().unwrap();
        assert_eq!(read(&disk.crash(), "d/g").unwrap(), b"two!");
        assert_eq!(disk.crash().space().unwrap().free_bytes, (1 << 20) - 4);
    }

    #[test]
    fn a_torn_crash_mixes_old_and_new_and_replays() {
        let disk = MemoryDisk::new(1 << 20);
        let file = disk.create_new("f").unwrap();
        file.write_at(&[1; 20_000], 0).unwrap();
        file.sync().unwrap();
        disk.sync_dir("").unwrap();
        file.write_at(&[2; 30_000], 0).unwrap();
        let mut outcomes = BTreeSet::new();
        for seed in 0..20 {
            let torn = read(&disk.crash_torn(seed), "f").unwrap();
            assert_eq!(torn, read(&disk.crash_torn(seed), "f").unwrap());
            assert!(torn.len() == 20_000 || torn.len() == 30_000);
            assert!(torn.chunks(SECTOR).all(|s| s.iter().take(32).all(|byte| *byte == s[0])));
            outcomes.insert(torn);
        }
        assert!(outcomes.len() > 10);
    }

    #[test]
    fn faults_come_when_they_were_ordered() {
        let disk = MemoryDisk::new(10_000);
        let file = disk.create_new("f").unwrap();
        disk.fail_once_after(1);
        file.write_at(b"a", 0).unwrap();
        assert!(file.write_at(b"b", 0).is_err());
        file.write_at(b"c", 0).unwrap();

        disk.skip_sync_after(1);
        file.sync().unwrap();
        disk.sync_dir("").unwrap();
        assert!(read(&disk.crash(), "f").is_err());
        disk.sync_dir("").unwrap();
        assert_eq!(read(&disk.crash(), "f").unwrap(), b"c");

        assert!(matches!(file.write_at(&[0; 10_001], 0), Err(DiskError::Full { .. })));
        file.reserve_space(9_000).unwrap();
        let other = disk.create_new("g").unwrap();
        assert!(matches!(other.write_at(&[0; 1_001], 0), Err(DiskError::Full { .. })));
        file.write_at(&[0; 9_000], 0).unwrap();
        disk.remove("f").unwrap();
        drop(file);
        disk.sync_dir("").unwrap();
        other.write_at(&[0; 1_001], 0).unwrap();

        other.sync().unwrap();
        disk.flip_bit_below_page_cache("g", 3).unwrap();
        assert_eq!(read(&disk, "g").unwrap()[0], 0);
        let mut byte = [0];
        other.read_past_cache_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [8]);
        disk.set_file_len("g", 2).unwrap();
        assert!(disk.flip_bit("g", 16).is_err());

        disk.set_call_guard(|changes| !changes);
        assert!(disk.open("g").is_ok() && disk.create_new("h").is_err());
        disk.set_call_guard(|_| true);
        disk.create_new("h").unwrap();
        disk.stop_after(0);
        assert!(disk.open("g").is_err() && disk.create_new("i").is_err());
    }
}
