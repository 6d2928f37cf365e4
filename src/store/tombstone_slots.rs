//! The slots of the file that holds tombstones while the disk is full (docs/semantics.md, 7, *A
//! full disk*).

use std::collections::{BTreeMap, BTreeSet};

use super::StoreError;
use super::disk::{DiskError, DiskFile};
use crate::format::envelope::record_len;
use crate::format::records::{Record, Tombstone};
use crate::id::SaveId;
use crate::kind::ErrorKind;

/// The file in the data folder that holds the slots.
pub(super) const SLOTS: &str = "slots";
/// Length of a slot in bytes. A slot is one sector, so that a power cut during a write leaves that
/// slot unchanged or damaged, and affects no other slot.
pub(super) const SLOT_BYTES: usize = 512;
/// Number of slots.
pub(super) const SLOT_COUNT: usize = 128;

/// The slots of a data folder. While `file` is `None`, no tombstone can be written to a slot;
/// `used` may still hold the tombstones of a truncated file.
#[derive(Default)]
pub(super) struct TombstoneSlots {
    pub(super) file: Option<Box<dyn DiskFile>>,
    pub(super) used: BTreeMap<SaveId, TombstoneSlot>,
    /// Slots that are not used because their contents are unknown: the last read or write failed. The
    /// next start reads them again. A new slot file makes all of them usable.
    pub(super) unusable: BTreeSet<usize>,
    /// The contents of slots that a later release wrote, by slot number. They are not reused, and a
    /// new slot file has them, too.
    pub(super) of_later_release: BTreeMap<usize, Vec<u8>>,
}

pub(super) struct TombstoneSlot {
    pub(super) number: usize,
    pub(super) bytes: Vec<u8>,
}

impl TombstoneSlots {
    pub(super) fn write_slot(&mut self, number: usize, bytes: &[u8]) -> Result<(), StoreError> {
        let path = || SLOTS.to_owned();
        let file = self.file.as_ref().ok_or_else(|| DiskError::Full { path: path() })?;
        let mut slot = bytes.to_vec();
        slot.resize(SLOT_BYTES, 0);
        let written = file.write_at(&slot, (number * SLOT_BYTES) as u64);
        let written = written.and_then(|()| file.sync());
        if written.is_err() {
            self.unusable.insert(number);
        }
        Ok(written?)
    }

    pub(super) fn first_free(&self) -> Option<usize> {
        let held: BTreeSet<usize> = self.used.values().map(|slot| slot.number).collect();
        (0..SLOT_COUNT).find(|number| {
            !held.contains(number)
                && !self.unusable.contains(number)
                && !self.of_later_release.contains_key(number)
        })
    }

    /// Registers the tombstone that a slot of the file holds, if any.
    pub(super) fn load_slot(&mut self, number: usize, slot: &[u8]) {
        let Some(bytes) = record_len(slot).and_then(|len| slot.get(..len)) else { return };
        match Tombstone::parse(bytes) {
            Ok(tombstone) => {
                self.used.insert(tombstone.save, TombstoneSlot { number, bytes: bytes.to_vec() });
            }
            Err(error) => {
                tracing::warn!(number, %error, "cannot parse the tombstone in a slot");
                if error.kind() != ErrorKind::Corrupt {
                    self.of_later_release.insert(number, bytes.to_vec());
                }
            }
        }
    }
}
