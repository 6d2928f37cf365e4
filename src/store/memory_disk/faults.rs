//! Injected faults of the memory disk: at a given operation or sync, or at once.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::crash_image::TreeNode;
use super::file_contents::{FileState, SECTOR};
use super::{MemoryDisk, io_error, lock_ignoring_poison};
use crate::store::disk::DiskError;

/// The faults to inject, by the number of the operation or sync since the disk was made.
#[derive(Default)]
pub(super) struct Faults {
    operations: u64,
    syncs: u64,
    stop_at: Option<u64>,
    fail_at: Option<u64>,
    skip_sync_at: Option<u64>,
    spoil_sync_at: Option<u64>,
    /// Folders whose entries cannot be listed.
    unreadable_folders: HashSet<String>,
}

/// A callback that runs before each call to which faults apply. Its argument says whether the call
/// is a change or a sync; it returns `false` to refuse the call.
pub(super) type Guard = Arc<dyn Fn(bool) -> bool + Send + Sync>;

/// The effect of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Read,
    Change,
    Sync,
}

/// The actual result of a call that reports success.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InjectedOutcome {
    Done,
    Skipped,
    Spoilt,
}

impl MemoryDisk {
    /// Makes every call fail after the next `operations` operations, as if the power were off.
    /// Operations are changes and syncs; reads are not counted. The calls that take a lock, measure
    /// the disk or return a file's number neither count nor fail.
    pub fn stop_after(&self, operations: u64) {
        let mut faults = lock_ignoring_poison(&self.shared.faults);
        faults.stop_at = Some(faults.operations + operations);
    }

    /// Makes the operation after the next `operations` fail once, without effect.
    pub fn fail_once_after(&self, operations: u64) {
        let mut faults = lock_ignoring_poison(&self.shared.faults);
        faults.fail_at = Some(faults.operations + operations);
    }

    /// Makes the sync after the next `syncs` (of files and folders) report success once without
    /// doing anything.
    pub fn skip_sync_after(&self, syncs: u64) {
        let mut faults = lock_ignoring_poison(&self.shared.faults);
        faults.skip_sync_at = Some(faults.syncs + syncs);
    }

    /// Makes the sync after the next `syncs` flip one bit on the medium, if it is the sync of a
    /// file. The page cache keeps the right bit.
    pub fn corrupt_sync_after(&self, syncs: u64) {
        let mut faults = lock_ignoring_poison(&self.shared.faults);
        faults.spoil_sync_at = Some(faults.syncs + syncs);
    }

    /// Runs `guard` before each later call to which faults apply (with `true` if the call is a change
    /// or a sync). The guard may refuse the call.
    pub fn set_call_guard(&self, guard: impl Fn(bool) -> bool + Send + Sync + 'static) {
        *lock_ignoring_poison(&self.shared.guard) = Some(Arc::new(guard));
    }

    /// Returns the number of operations and the number of syncs so far.
    pub fn operation_and_sync_counts(&self) -> (u64, u64) {
        let faults = lock_ignoring_poison(&self.shared.faults);
        (faults.operations, faults.syncs)
    }

    /// Flips one bit of a file in both images.
    ///
    /// # Errors
    /// [`DiskError::Short`] if the file has no such bit.
    pub fn flip_bit(&self, path: &str, bit: u64) -> Result<(), DiskError> {
        self.change_file_within_len(
            path,
            |file| file.visible.flip_bit(bit) | file.durable.flip_bit(bit),
            bit / 8 + 1,
        )
    }

    /// Flips one bit on the medium only; the page cache keeps the right bit.
    pub fn flip_bit_below_page_cache(&self, path: &str, bit: u64) -> Result<(), DiskError> {
        self.change_file_within_len(path, |file| file.durable.flip_bit(bit), bit / 8 + 1)
    }

    /// Makes the sector that holds byte `byte` of a file unreadable in both images: reads that
    /// touch it fail.
    pub fn make_sector_unreadable(&self, path: &str, byte: u64) -> Result<(), DiskError> {
        let sector = byte / SECTOR as u64;
        self.change_file_within_len(
            path,
            |file| byte < file.visible.len && file.unreadable.insert(sector) | true,
            byte + 1,
        )
    }

    /// Makes every later listing of a folder fail.
    pub fn make_folder_unreadable(&self, path: &str) {
        lock_ignoring_poison(&self.shared.faults).unreadable_folders.insert(path.to_owned());
    }

    pub(super) fn check_listable(&self, path: &str) -> Result<(), DiskError> {
        match lock_ignoring_poison(&self.shared.faults).unreadable_folders.contains(path) {
            true => Err(io_error(path, "the folder cannot be read")),
            false => Ok(()),
        }
    }

    /// Truncates a file to `len_bytes`, or extends it with zeros, in both images.
    pub fn set_file_len(&self, path: &str, len_bytes: u64) -> Result<(), DiskError> {
        let (before, after) = self.change_file_state(path, |file| {
            let before = file.occupied_bytes();
            file.resize_both_images(len_bytes);
            (before, file.occupied_bytes())
        })?;
        self.shared.used_bytes.fetch_add(after, Ordering::Relaxed);
        self.shared.used_bytes.fetch_sub(before, Ordering::Relaxed);
        Ok(())
    }

    fn change_file_within_len(
        &self,
        path: &str,
        change: impl FnOnce(&mut FileState) -> bool,
        end_bytes: u64,
    ) -> Result<(), DiskError> {
        if self.change_file_state(path, change)? {
            return Ok(());
        }
        Err(DiskError::Short { path: path.to_owned(), end_bytes })
    }

    fn change_file_state<T>(
        &self,
        path: &str,
        change: impl FnOnce(&mut FileState) -> T,
    ) -> Result<T, DiskError> {
        match self.find_node(path)? {
            TreeNode::File(file) => Ok(change(&mut lock_ignoring_poison(&file.state))),
            TreeNode::Dir(_) => Err(io_error(path, "not a file")),
        }
    }

    /// Counts an operation and applies the faults. Returns the outcome to simulate.
    pub(super) fn count_and_inject_fault(
        &self,
        path: &str,
        effect: Effect,
    ) -> Result<InjectedOutcome, DiskError> {
        let guard = lock_ignoring_poison(&self.shared.guard).clone();
        if guard.is_some_and(|guard| !guard(effect != Effect::Read)) {
            return Err(io_error(path, "the disk is off"));
        }
        let mut faults = lock_ignoring_poison(&self.shared.faults);
        let number = faults.operations;
        if faults.stop_at.is_some_and(|stop| number >= stop) {
            return Err(io_error(path, "the disk is off"));
        }
        if effect == Effect::Read {
            return Ok(InjectedOutcome::Done);
        }
        faults.operations += 1;
        if faults.fail_at.take_if(|at| *at == number).is_some() {
            return Err(io_error(path, "an injected fault"));
        }
        if effect == Effect::Sync {
            let sync = faults.syncs;
            faults.syncs += 1;
            if faults.skip_sync_at.take_if(|at| *at == sync).is_some() {
                return Ok(InjectedOutcome::Skipped);
            }
            if faults.spoil_sync_at.take_if(|at| *at == sync).is_some() {
                return Ok(InjectedOutcome::Spoilt);
            }
        }
        Ok(InjectedOutcome::Done)
    }
}
