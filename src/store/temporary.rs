//! A file that is being written. It has no visible name until it is complete, verified and durable.
//!
//! The order of steps matters. Data and tail are synced before the rename, so that the name never
//! shows half a file. The folder is synced before the index is written, so that the index never
//! names a file that a crash takes back. The index is written before the call returns.

use std::sync::Arc;

use super::StoreError;
use super::damage::is_damage;
use super::data_folder::Store;
use super::disk::DiskFile;
use super::index::FileInfo;
use super::paths::file_path;
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
    /// Whether a file with the same content existed before. The name now refers to the new file.
    pub was_there: bool,
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
pub(super) struct Temporary {
    store: Store,
    plan: FileSpec,
    path: String,
    file: Arc<dyn DiskFile>,
    published: bool,
}

impl Temporary {
    /// Creates the file and reserves all the space that it will take.
    pub(super) fn create(store: &Store, plan: FileSpec) -> Result<Self, StoreError> {
        let (key, len_bytes) = (plan.key(), plan.len_bytes);
        if len_bytes > MAX_BLOCK_BYTES {
            return Err(StoreError::Misuse { key, why: "longer than a block can be" });
        }
        let path = store.names().temporary();
        let file = store.disk().create_new(&path)?.into();
        let this = Self { store: store.clone(), plan, path, file, published: false };
        let tail_bytes = grains(len_bytes) * HASH_BYTES + HEADER_ROOM_BYTES + TRAILER_BYTES;
        this.file.reserve(len_bytes + tail_bytes)?;
        Ok(this)
    }

    pub(super) fn key(&self) -> FileKey {
        self.plan.key()
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.plan.len_bytes
    }

    pub(super) fn file(&self) -> &Arc<dyn DiskFile> {
        &self.file
    }

    /// Writes the tail after the data. The caller syncs it, and may read it back.
    pub(super) fn write_tail(&self, tree: &GrainTree) -> Result<Tail, StoreError> {
        let header = FileHeader {
            cluster: self.store.cluster(),
            stripe: self.plan.stripe,
            content: self.plan.content,
            len_bytes: self.plan.len_bytes,
            root: tree.root(),
            written_by: self.store.node(),
            layout: self.plan.layout,
        };
        let bytes = tail_to_bytes(&header, tree)
            .map_err(|source| StoreError::Format { path: file_path(self.key()), source })?;
        self.file.write_at(&bytes, header.len_bytes)?;
        Ok(Tail { header, bytes })
    }

    /// Gives the complete and synced file its name, and returns once the name is durable and
    /// indexed.
    pub(super) fn publish(mut self, tail: &Tail) -> Result<StoreOutcome, StoreError> {
        let (key, header) = (self.key(), &tail.header);
        let (was_there, replaced) = self.take_name(header)?;
        self.published = true;
        let file_bytes = header.len_bytes + tail.bytes.len() as u64;
        self.store.index().update(key, Some(FileInfo::of(header, file_bytes)))?;
        if let Some(number) = replaced {
            self.store.forget_note(key, |damage| damage.number == number)?;
        }
        Ok(StoreOutcome { key, root: header.root, len_bytes: header.len_bytes, was_there })
    }

    /// Takes the name, unless a file with other content that counts has it. If the file there does
    /// not open and has no damage note, it is moved to quarantine. Returns whether the same content
    /// was there, and the number of a damaged file that was replaced.
    fn take_name(&self, header: &FileHeader) -> Result<(bool, Option<u64>), StoreError> {
        let (store, key) = (&self.store, self.key());
        let take = || {
            let path = file_path(key);
            store.names().publish(&self.path, &path, || match store.noted_number(key) {
                Some(number) => {
                    replaces_damaged(store, key, header).map(|()| (false, Some(number)))
                }
                None => same_content(store, key, header).map(|is_same| (is_same, None)),
            })
        };
        match take() {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                // Whether this call moved the file or another one came first, the name is now free
                // or has a file that opens.
                store.quarantine(key, None, &error.to_string())?;
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
fn same_content(store: &Store, key: FileKey, header: &FileHeader) -> Result<bool, StoreError> {
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
fn replaces_damaged(store: &Store, key: FileKey, header: &FileHeader) -> Result<(), StoreError> {
    match same_content(store, key, header) {
        Err(error) if is_damage(&error) => Ok(()),
        other => other.map(drop),
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.published {
            // A file that stays is removed at the next open.
            let _ = self.store.disk().remove(&self.path);
        }
    }
}
