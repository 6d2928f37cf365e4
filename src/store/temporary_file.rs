//! A file that is being written. It stays in `tmp/` until it is complete, verified and durable.
//!
//! The order of steps matters. Data and tail are synced before the rename, so that the name never
//! shows half a file. The folder is synced before the index is written, so that the index never
//! names a file that a crash takes back. The index is written before the call returns.

use std::sync::Arc;

use super::StoreError;
use super::damage_notes::is_damage_error;
use super::data_folder::Store;
use super::disk::DiskFile;
use super::durable_paths::file_path;
use super::file_index::FileInfo;
use super::stored_file::StoredFile;
use crate::format::file::{Content, FileHeader, FileKey, TRAILER_BYTES, tail_to_bytes};
use crate::format::tree::{GrainTree, HASH_BYTES, Hash};
use crate::id::StripeId;
use crate::kind::ErrorKind;
use crate::units::{MAX_BLOCK_BYTES, grains};

/// Space for the sealed header within the reserved space, in bytes.
const HEADER_ROOM_BYTES: u64 = 256;

/// The result of storing a file: it is durable under its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreOutcome {
    /// The key of the file.
    pub key: FileKey,
    /// BLAKE3 of the data.
    pub root: Hash,
    /// The length of the data, in bytes.
    pub len_bytes: u64,
    /// Whether an undamaged file with the same content had the name before. The name now refers to
    /// the new file.
    pub already_existed: bool,
}

/// The description of the file that a writer is about to write.
#[derive(Debug, Clone, Copy)]
pub(super) struct FileSpec {
    pub(super) stripe: StripeId,
    pub(super) content: Content,
    pub(super) layout: u8,
    pub(super) len_bytes: u64,
}

impl FileSpec {
    pub(super) fn key(&self) -> FileKey {
        FileKey { stripe: self.stripe, name: self.content.name() }
    }
}

/// The tail that follows the data.
pub(super) struct Tail {
    header: FileHeader,
    pub(super) bytes: Vec<u8>,
}

/// The file in `tmp/`. Dropping it before it is published removes the file.
pub(super) struct TemporaryFile {
    store: Store,
    spec: FileSpec,
    path: String,
    file: Arc<dyn DiskFile>,
    is_published: bool,
}

impl TemporaryFile {
    /// Creates the file and reserves all the space that it will take.
    pub(super) fn create(store: &Store, spec: FileSpec) -> Result<Self, StoreError> {
        let (key, len_bytes) = (spec.key(), spec.len_bytes);
        if len_bytes > MAX_BLOCK_BYTES {
            return Err(StoreError::Misuse { key, why: "longer than a block can be" });
        }
        let path = store.durable_names().next_temporary_path();
        let file = store.disk().create_new(&path)?.into();
        let this = Self { store: store.clone(), spec, path, file, is_published: false };
        let tail_bytes = grains(len_bytes) * HASH_BYTES + HEADER_ROOM_BYTES + TRAILER_BYTES;
        this.file.reserve_space(len_bytes + tail_bytes)?;
        Ok(this)
    }

    pub(super) fn key(&self) -> FileKey {
        self.spec.key()
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.spec.len_bytes
    }

    pub(super) fn file(&self) -> &Arc<dyn DiskFile> {
        &self.file
    }

    /// Writes the tail after the data. The caller syncs it, and may read it back.
    pub(super) fn write_tail(&self, tree: &GrainTree) -> Result<Tail, StoreError> {
        let header = FileHeader {
            cluster: self.store.cluster(),
            stripe: self.spec.stripe,
            content: self.spec.content,
            len_bytes: self.spec.len_bytes,
            root: tree.root(),
            written_by: self.store.node(),
            layout: self.spec.layout,
        };
        let bytes = tail_to_bytes(&header, tree)
            .map_err(|source| StoreError::Format { path: file_path(self.key()), source })?;
        self.file.write_at(&bytes, header.len_bytes)?;
        Ok(Tail { header, bytes })
    }

    /// Gives the complete and synced file its name, and returns once the name is durable and
    /// indexed.
    pub(super) fn publish_under_key(mut self, tail: &Tail) -> Result<StoreOutcome, StoreError> {
        let (key, header) = (self.key(), &tail.header);
        let (was_there, replaced) = self.rename_unless_other_content(header)?;
        self.is_published = true;
        let file_bytes = header.len_bytes + tail.bytes.len() as u64;
        self.store.index().reconcile_entry(key, Some(FileInfo::from_header(header, file_bytes)))?;
        if let Some(number) = replaced {
            self.store.remove_damage_note_if(key, |damage| damage.number == number)?;
        }
        Ok(StoreOutcome {
            key,
            root: header.root,
            len_bytes: header.len_bytes,
            already_existed: was_there,
        })
    }

    /// Renames the temporary file to its name, unless a file with this name is known to have other
    /// content (the tail of a damaged file may still state its content). A file that is corrupt and
    /// has no damage note is moved to quarantine. Returns whether an undamaged file with the same
    /// content was there, and the inode number in the damage note of the file that was replaced, if
    /// it had one.
    fn rename_unless_other_content(
        &self,
        header: &FileHeader,
    ) -> Result<(bool, Option<u64>), StoreError> {
        let (store, key) = (&self.store, self.key());
        let take = || {
            let path = file_path(key);
            store.durable_names().rename_durably(&self.path, &path, || {
                match store.noted_inode_number(key) {
                    Some(number) => check_may_replace_damaged(store, key, header)
                        .map(|()| (false, Some(number))),
                    None => is_already_stored_or_conflict(store, key, header)
                        .map(|is_same| (is_same, None)),
                }
            })
        };
        match take() {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                // Whether this call moved the file or another call did, the name is now free or has a
                // file that opens.
                store.quarantine_file_if_unchanged(key, None, &error.to_string())?;
                take()
            }
            done => done,
        }
    }
}

/// Returns whether the file under `key` has the content that `header` describes; `false` if there
/// is no file.
///
/// # Errors
/// [`StoreError::Conflict`] if it has other content.
fn is_already_stored_or_conflict(
    store: &Store,
    key: FileKey,
    header: &FileHeader,
) -> Result<bool, StoreError> {
    match StoredFile::open(store.disk(), store.cluster(), key) {
        Ok(there) if FileHeader { written_by: header.written_by, ..*there.header() } == *header => {
            Ok(true)
        }
        Ok(_) => Err(StoreError::Conflict { key }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Refuses to replace a damaged file by one with other content. A file whose tail does not open
/// does not reveal its content, and may be replaced.
fn check_may_replace_damaged(
    store: &Store,
    key: FileKey,
    header: &FileHeader,
) -> Result<(), StoreError> {
    match is_already_stored_or_conflict(store, key, header) {
        Err(error) if is_damage_error(&error) => Ok(()),
        other => other.map(drop),
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.is_published {
            // A file that stays is removed at the next open.
            let _ = self.store.disk().remove(&self.path);
        }
    }
}
