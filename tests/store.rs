//! Tests of the whole store: every awkward size, every kind of damage, a crash at every operation
//! of every call.

#[path = "store/crashes.rs"]
mod crashes;
#[path = "store/damage.rs"]
mod damage;
#[path = "store/files.rs"]
mod files;
#[path = "store/folder.rs"]
mod folder;

use std::collections::BTreeMap;
use std::sync::Arc;

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::format::file::FileKey;
use rapidraid::format::tree::GrainTree;
use rapidraid::id::{Attempt, ClusterId, PeerName, ShardId, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{
    BlockSpec, Disk, Extent, Kv, MemoryDisk, MemoryKv, PieceSpec, ReconcileCounts, Store,
    StoreError, StoreOutcome, StoredFile,
};
use rapidraid::units::{GRAIN_BYTES, grains};

const G: usize = GRAIN_BYTES as usize;
const CLUSTER: ClusterId = ClusterId([0xc1; 16]);
const STRIPE: StripeId = StripeId { shard: ShardId([0x5a; 16]), index: 3 };
const ATTEMPT: Attempt = Attempt([0xa7; 16]);
const REPLICA: FileKey =
    FileKey { stripe: STRIPE, name: rapidraid::format::file::FileName::Replica { block: 2 } };
/// Length of a file of four whole grains and a partial one.
const LEN: usize = 4 * G + 3;
const CACHE_BYTES: u64 = 1 << 20;

fn name(text: &str) -> PeerName {
    text.parse().unwrap()
}

fn open_with(disk: &dyn Disk, shared: Arc<dyn Disk>, kv: Arc<dyn Kv>) -> (Store, ReconcileCounts) {
    let lock = disk.lock("lock").unwrap();
    Store::open(shared, lock, kv, CLUSTER, &name("n1")).unwrap()
}

/// Opens the store on a memory disk with an empty index. Returns the store and the report of its
/// reconciliation.
fn open(disk: &MemoryDisk) -> (Store, ReconcileCounts) {
    open_with(disk, Arc::new(disk.clone()), Arc::new(MemoryKv::new()))
}

fn new_store() -> (MemoryDisk, Store) {
    let disk = MemoryDisk::new(1 << 30);
    let (store, _) = open(&disk);
    (disk, store)
}

fn content(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SeededEntropy::new(len as u64).fill(&mut bytes);
    bytes
}

fn block_spec(len: usize) -> BlockSpec {
    BlockSpec { stripe: STRIPE, block: 2, layout: 1, len_bytes: len as u64 }
}

fn piece_spec(len: usize) -> PieceSpec {
    let len_bytes = len as u64;
    PieceSpec { stripe: STRIPE, piece: 7, attempt: ATTEMPT, code: 42, layout: 1, len_bytes }
}

fn piece_key() -> FileKey {
    FileKey::piece(STRIPE, 7, ATTEMPT)
}

fn write_block(store: &Store, data: &[u8]) -> Result<StoreOutcome, StoreError> {
    let mut writer = store.create_block_writer(block_spec(data.len()), None)?;
    // The chunk length is deliberately neither a multiple of a grain nor a power of two.
    data.chunks(50_021).try_for_each(|chunk| writer.write(chunk))?;
    writer.finish(Some(GrainTree::of(data).root()))
}

/// Writes the grains in the order in which three hops would send them, and syncs every two grains.
fn write_piece(store: &Store, data: &[u8]) -> Result<StoreOutcome, StoreError> {
    let mut back = BTreeMap::new();
    let mut readback = |grain: u64, bytes: &[u8]| {
        assert!(back.insert(grain, bytes.to_vec()).is_none(), "grain {grain} twice");
    };
    let mut writer = store.create_piece_writer(piece_spec(data.len()))?;
    let mut buffer = Extent::new_read_back_buffer(data.len() as u64);
    writer.set_min_extent_bytes(2 * GRAIN_BYTES);
    let all: Vec<(u64, &[u8])> = (0..).zip(data.chunks(G)).collect();
    for hop in [1, 2, 0] {
        for (index, grain) in all.iter().filter(|(index, _)| index % 3 == hop) {
            writer.write_grain(*index, grain)?;
            if let Some(extent) = writer.take_extent_to_prove()? {
                extent.sync_and_verify_read_back(&mut buffer, &mut readback)?;
            }
        }
    }
    let stored = writer.finish(&mut readback)?;
    assert_eq!(back.into_values().flatten().collect::<Vec<u8>>(), data);
    Ok(stored)
}

/// Reads a range of the data and verifies every grain that it touches.
fn read_verified(file: &StoredFile, from: usize, out: &mut [u8]) -> Result<(), StoreError> {
    let len_bytes = file.header().len_bytes;
    for grain in from as u64 / GRAIN_BYTES..grains((from + out.len()) as u64) {
        let first = grain * GRAIN_BYTES;
        let mut bytes = vec![0; (len_bytes.saturating_sub(first)).min(GRAIN_BYTES) as usize];
        file.read_unverified(first, &mut bytes)?;
        if !file.tree().verify_grain(grain, &bytes) {
            return Err(StoreError::Grain { key: file.key(), grain });
        }
    }
    file.read_unverified(from as u64, out)
}

/// Asserts that the file is found and opens, and that every byte of it verifies.
fn assert_whole(store: &Store, key: FileKey, data: &[u8]) {
    let file = store.open_undamaged_file(key).unwrap();
    let mut bytes = vec![0; data.len()];
    read_verified(&file, 0, &mut bytes).unwrap();
    assert!(bytes == data, "{key} has other bytes");
    assert_eq!(file.scrub(), Vec::<u64>::new());
    assert!(
        store.list_undamaged_files(key.stripe).unwrap().contains(&file.index_entry()),
        "{key} is not in the index"
    );
}

fn is_absent(store: &Store, key: FileKey) -> bool {
    let indexed =
        store.list_undamaged_files(key.stripe).unwrap().iter().any(|info| info.key() == key);
    match store.open_undamaged_file(key) {
        Ok(_) => false,
        Err(error) => error.kind() == ErrorKind::NotFound && !indexed,
    }
}
