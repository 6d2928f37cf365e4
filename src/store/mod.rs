//! A node's data folder: replica and piece files, small records, and an index of them.
//!
//! Promises: what a call has acknowledged survives a power cut (data, name and every new folder above it were
//! synced, in this order); what a failed or interrupted call leaves behind is removed or invisible; bytes
//! that do not prove themselves are an error and never data; nothing is deleted but by [`Store::remove`] and
//! [`Store::remove_record_file`]. The index is a cache of the folders and is made again from them.
//!
//! It leaves to others: which records mean what, fingerprints (they come in as closures), and when a file may
//! go. All calls block; asynchronous callers put them on threads made for blocking.
//!
//! ```text
//! node.id  lock  epoch        whose folder it is; held while open; the highest catalogue epoch seen
//! index/                      sled, made again when it is lost
//! tmp/                        files being written, emptied at open
//! epoch, members, heard       what the node remembers of its cluster and of the catalogue
//! graves/                     ids of removed saves whose files are gone
//! slots                       tombstones for which the disk has no room
//! reserve                     space that is given up when the disk is nearly full
//! quarantine/                 files moved aside, each with a `.why`
//! shards/SHARD/INDEX/damage-* damage notes, small records of a stripe
//! shards/SHARD/NAME           small records of a shard
//! shards/SHARD/INDEX/NAME     small records of a stripe (INDEX: 8 hexadecimal digits)
//! shards/SHARD/INDEX/FILE     replica and piece files (format::file names them)
//! ```

mod block_writer;
mod cluster_state;
mod damage;
mod data_folder;
pub mod disk;
mod error;
mod index;
pub mod kv;
mod memory_disk;
mod memory_kv;
mod paths;
mod piece_writer;
mod quarantine;
mod real_disk;
mod reconcile;
mod record_file;
mod removed_saves;
mod reserve;
pub mod sled_kv;
mod stored_file;
mod temporary;
mod tombstones;

pub use block_writer::{BLOCK_WRITER_BYTES, BlockSpec, BlockWriter, Fingerprint};
pub use damage::{FileCheck, GrainSource, SourceFile};
pub use data_folder::{INDEX_DIR, LOCK_FILE, Store};
pub use disk::{Disk, DiskError, DiskFile};
pub use error::StoreError;
pub use index::{FileInfo, Totals};
pub use kv::{Kv, KvError, Maps};
pub use memory_disk::MemoryDisk;
pub use memory_kv::MemoryKv;
pub use piece_writer::{Extent, PIECE_WRITER_BYTES, PieceSpec, PieceWriter};
pub use real_disk::RealDisk;
pub use reconcile::{OpenFindings, Reconciled};
pub use record_file::{MAX_RECORD_FILE_BYTES, RecordScope};
pub use reserve::{ReserveState, adjust_reserve};
pub use sled_kv::{SledKv, SledMaps};
pub use stored_file::StoredFile;
pub use temporary::StoreOutcome;
