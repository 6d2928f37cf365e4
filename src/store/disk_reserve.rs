//! Disk space that is set aside, and released when the disk is nearly full (docs/semantics.md, 7,
//! *A full disk*).

use super::disk::{Disk, DiskError};
use super::durable_paths::TMP;
use super::durable_paths::none_if_not_found;

/// The file in the data folder whose allocated blocks are the reserve.
const RESERVE: &str = "reserve";
/// Maximum size of the reserve in bytes, which otherwise takes one part in [`RESERVE_PART`] of the
/// disk.
const MAX_RESERVE_BYTES: u64 = 16 << 20;
const RESERVE_PART: u64 = 16;
/// The reserve is set aside when this multiple of its size is free.
const PLENTY: u64 = 4;

/// The state of the reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReserveState {
    /// The reserve is in place.
    InPlace,
    /// No reserve is in place: it was released, it could not be created yet, or a foreign file has
    /// its name.
    Absent,
}

/// Space that must be free when sled opens, in bytes: one segment for each of its two databases (the
/// index and the catalogue), and room for records.
const OPENING_BYTES: u64 = 2 << 20;

/// Adjusts the reserve before sled opens. Unlike [`create_or_release_reserve`], it also tries to
/// allocate some space and releases the reserve if that fails, because a quota may refuse writes
/// while the file system has free space.
pub fn adjust_reserve_probing_space(disk: &dyn Disk) -> Result<ReserveState, DiskError> {
    let state = create_or_release_reserve(disk)?;
    if state == ReserveState::Absent {
        return Ok(state);
    }
    let bytes = OPENING_BYTES.min(disk.space()?.total_bytes / RESERVE_PART);
    match can_allocate(disk, bytes)? {
        true => Ok(state),
        false => release_reserve(disk).map(|_| ReserveState::Absent),
    }
}

/// Returns whether `bytes` can be allocated now, in one file that is removed again.
fn can_allocate(disk: &dyn Disk, bytes: u64) -> Result<bool, DiskError> {
    // The data folder may be new.
    disk.create_dir(TMP)?;
    let probe = format!("{TMP}/{RESERVE}-probe");
    // A killed process may have left a probe.
    let _ = disk.remove(&probe);
    let probed = disk.create_new(&probe).and_then(|file| file.reserve_space(bytes));
    let _ = disk.remove(&probe);
    match probed {
        Err(DiskError::Full { .. }) => Ok(false),
        probed => probed.map(|()| true),
    }
}

/// Removes the reserve, if it is in place. Returns whether it was.
pub fn release_reserve(disk: &dyn Disk) -> Result<bool, DiskError> {
    let Some(file) = none_if_not_found(disk.open(RESERVE))? else { return Ok(false) };
    if file.len_bytes()? > 0 {
        return Ok(false);
    }
    disk.remove(RESERVE)?;
    disk.sync_dir("")?;
    Ok(true)
}

/// Removes the reserve when less space is free than the reserve allocates, and creates it when four
/// times its size is free. Returns whether it is in place. A file of the same name that has bytes
/// is foreign and is left alone.
pub fn create_or_release_reserve(disk: &dyn Disk) -> Result<ReserveState, DiskError> {
    let space = disk.space()?;
    let bytes = (space.total_bytes / RESERVE_PART).min(MAX_RESERVE_BYTES);
    let file = none_if_not_found(disk.open(RESERVE))?;
    let is_there = file.is_some();
    if let Some(file) = file
        && file.len_bytes()? > 0
    {
        return Ok(ReserveState::Absent);
    }
    if is_there && space.free_bytes >= bytes {
        return Ok(ReserveState::InPlace);
    }
    if is_there {
        release_reserve(disk)?;
        tracing::warn!(
            free_bytes = space.free_bytes,
            reserve_bytes = bytes,
            "the disk is nearly full: the reserve is released, so that checkpoints can be removed"
        );
        return Ok(ReserveState::Absent);
    }
    // A quota may leave less room than the file system has.
    if space.free_bytes < PLENTY * bytes || !can_allocate(disk, PLENTY * bytes)? {
        return Ok(ReserveState::Absent);
    }
    let temporary = format!("{TMP}/{RESERVE}");
    let made = disk.create_new(&temporary).and_then(|file| {
        file.reserve_space(bytes)?;
        file.sync()?;
        disk.rename(&temporary, RESERVE)?;
        disk.sync_dir("")
    });
    if made.is_err() {
        let _ = disk.remove(&temporary);
    }
    made.map(|()| ReserveState::InPlace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryDisk;

    const TOTAL: u64 = 1 << 20;

    fn disk() -> MemoryDisk {
        MemoryDisk::new(TOTAL)
    }

    fn write(disk: &MemoryDisk, bytes: u64) -> Result<(), DiskError> {
        let file = disk.create_new("foreign")?;
        file.write_at(&vec![1; bytes as usize], 0)
    }

    #[test]
    fn it_is_given_up_when_little_is_free_and_set_aside_when_there_is_plenty() {
        let (disk, reserve) = (disk(), TOTAL / RESERVE_PART);
        assert_eq!(create_or_release_reserve(&disk).unwrap(), ReserveState::InPlace);
        assert_eq!(disk.space().unwrap().free_bytes, TOTAL - reserve);
        write(&disk, TOTAL - 2 * reserve).unwrap();
        assert_eq!(
            create_or_release_reserve(&disk).unwrap(),
            ReserveState::InPlace,
            "as much is free"
        );
        disk.set_capacity(TOTAL - reserve);
        assert_eq!(create_or_release_reserve(&disk).unwrap(), ReserveState::Absent);
        assert!(disk.space().unwrap().free_bytes >= reserve / 2, "what it held is free");
        assert_eq!(create_or_release_reserve(&disk).unwrap(), ReserveState::Absent);
        disk.set_capacity(TOTAL);
        assert_eq!(
            create_or_release_reserve(&disk).unwrap(),
            ReserveState::Absent,
            "that is not plenty"
        );
        disk.remove("foreign").unwrap();
        disk.sync_dir("").unwrap();
        assert_eq!(create_or_release_reserve(&disk).unwrap(), ReserveState::InPlace);
    }

    #[test]
    fn a_power_cut_or_an_error_at_any_operation_leaves_it_there_or_not() {
        for failing in 0..16 {
            for is_full in [false, true] {
                let disk = disk();
                if is_full {
                    create_or_release_reserve(&disk).unwrap();
                    write(&disk, TOTAL - 2 * TOTAL / RESERVE_PART).unwrap();
                    disk.set_capacity(TOTAL - TOTAL / RESERVE_PART);
                }
                disk.fail_once_after(failing);
                let looked = create_or_release_reserve(&disk);
                for after in [disk.crash(), disk.crash_torn(failing)] {
                    after.set_capacity(TOTAL);
                    let _ = after.remove("foreign");
                    let left = after.list(TMP).unwrap_or_default();
                    left.iter().for_each(|entry| {
                        after.remove(&format!("{TMP}/{}", entry.name)).unwrap();
                    });
                    after.sync_all().unwrap();
                    let again = create_or_release_reserve(&after).unwrap();
                    assert_eq!(again, ReserveState::InPlace, "{failing}: {looked:?}");
                }
            }
        }
    }
}
