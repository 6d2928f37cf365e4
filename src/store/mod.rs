//! A node's data folder: replica and piece files, small records, and an index of them.
//!
//! Guarantees:
//! - An acknowledged change survives a power cut. The data, the name and the names of all new
//!   folders above it were synced, in this order.
//! - Anything that a failed or interrupted call leaves behind is removed or invisible.
//! - Bytes that do not match their hashes are an error and are never returned as data, except by
//!   [`StoredFile::read_unverified`] and [`UnverifiedFile`], whose callers verify the bytes.
//! - No file or record is deleted except by [`Store::remove_file`], [`Store::remove_record_file`] and
//!   [`Store::remove_tombstone`]. A new file may replace a damaged one, or one of the same content. A
//!   damage note is removed when its file is found whole, is replaced or is gone.
//!
//! The index is a cache of the folders and is rebuilt from them.
//!
//! Callers decide what the records mean, how fingerprints are computed (they are passed in as
//! closures), and when a file may be removed. All calls block; asynchronous callers run them on
//! threads for blocking work.
//!
//! ```text
//! node.id                     the cluster and the node that own the folder
//! lock                        the lock file, locked while the folder is open
//! index/                      the index (sled), rebuilt when it is lost
//! tmp/                        files being written, emptied at open
//! epoch                       the highest catalogue epoch seen, with its database and its server
//! members, ring-changes       the nodes of the cluster, and the ring changes
//! heard, catch-up             the last catalogue revision, and whether the node has caught up
//! graves/                     the removed-save set: ids of removed saves
//! slots                       tombstones that were stored while the disk was full
//! reserve                     disk space that is released when the disk is nearly full
//! quarantine/                 files moved aside, each with a note `.why`
//! shards/SHARD/INDEX/damage-* damage notes, small records of a stripe
//! shards/SHARD/NAME           small records of a shard
//! shards/SHARD/INDEX/NAME     small records of a stripe (INDEX: 8 hexadecimal digits)
//! shards/SHARD/INDEX/FILE     replica and piece files (format::file names them)
//! ```

mod block_writer;
mod cluster_state;
mod damage_note;
mod damage_notes;
mod data_folder;
pub mod disk;
mod disk_reserve;
mod durable_paths;
mod error;
mod file_index;
pub mod kv;
mod memory_disk;
mod memory_kv;
mod open_findings;
mod piece_writer;
mod quarantine;
mod real_disk;
mod reconcile_index;
mod record_file;
mod removed_saves;
pub mod sled_kv;
mod stored_file;
mod temporary_file;
mod tombstone_slots;
mod tombstones;
mod unverified_file;

pub use block_writer::{BLOCK_WRITER_BYTES, BlockSpec, BlockWriter, FingerprintFn};
pub use damage_notes::{FileCheck, GrainSource};
pub use data_folder::{INDEX_DIR, LOCK_FILE, Store};
pub use disk::{Disk, DiskError, DiskFile, Space};
pub use disk_reserve::{ReserveState, adjust_reserve_probing_space, create_or_release_reserve};
pub use error::StoreError;
pub use file_index::{FileInfo, Totals};
pub use kv::{CatalogueStorage, Kv, KvError};
pub use memory_disk::MemoryDisk;
pub use memory_kv::MemoryKv;
pub use open_findings::{OpenFindings, ReconcileCounts};
pub use piece_writer::{Extent, PIECE_WRITER_BYTES, PieceSpec, PieceWriter};
pub use real_disk::RealDisk;
pub use record_file::{MAX_RECORD_FILE_BYTES, RecordScope};
pub use sled_kv::{SledCatalogueStorage, SledKv, SledOpening};
pub use stored_file::StoredFile;
pub use temporary_file::StoreOutcome;
pub use unverified_file::UnverifiedFile;
