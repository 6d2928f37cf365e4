//! Targets for replica and piece files: whole files as a store finds them on its disk, and tails
//! whose every checksum is right.

use std::sync::Arc;

use rapidraid::format::file::{FileHeader, TRAILER_BYTES, parse_tail, tail_to_bytes};
use rapidraid::format::tree::{GrainTree, grain_len};
use rapidraid::id::PeerName;
use rapidraid::store::{Disk, LOCK_FILE, MemoryDisk, MemoryKv, Store, StoreError, StoredFile};
use rapidraid::units::GRAIN_BYTES;

use crate::fixtures;
use crate::target::{Memory, Seen, Target, round_trip, seen, within};

/// Returns the header of a golden file and its tail (table and header as bytes).
fn tail_of(file: &[u8]) -> (FileHeader, &[u8]) {
    let data_bytes = u64::from_le_bytes(file[file.len() - 20..][..8].try_into().unwrap());
    let tail = &file[data_bytes as usize..];
    (parse_tail(file.len() as u64, tail).unwrap().0, tail)
}

fn open(disk: &MemoryDisk, header: &FileHeader) -> Result<(Store, StoredFile), StoreError> {
    let name: PeerName = "node-1".parse().unwrap();
    let lock = disk.lock(LOCK_FILE)?;
    let kv = Arc::new(MemoryKv::new());
    let (store, _) = Store::open(Arc::new(disk.clone()), lock, kv, header.cluster, &name)?;
    let file = store.open_undamaged_file(header.key())?;
    Ok((store, file))
}

/// Returns a disk with `bytes` at the path of the file that `header` describes.
fn disk_with(header: &FileHeader, bytes: &[u8]) -> MemoryDisk {
    let disk = MemoryDisk::new(1 << 20);
    let path = format!("shards/{}", header.key());
    for (at, _) in path.match_indices('/') {
        disk.create_dir(&path[..at]).unwrap();
    }
    disk.create_new(&path).unwrap().write_at(bytes, 0).unwrap();
    // The folder needs a node identity: a store changes nothing in a folder without one.
    let records = fixtures::lines("format/v1/records.txt");
    let identity = records.iter().find(|(name, _)| name == "node identity").unwrap();
    disk.create_new("node.id").unwrap().write_at(&identity.1, 0).unwrap();
    disk
}

/// Fuzzes whole files. The first byte selects the golden file under whose name the other bytes are
/// stored. A file that opens has the golden tail, and the scrub names exactly the grains that
/// differ from the golden ones.
pub fn files() -> Target {
    let golden = fixtures::files();
    let corpus = (0u8..).zip(&golden).map(|(at, file)| [&[at][..], file].concat()).collect();
    let memory = Memory { base_bytes: 2 << 20, per_byte: 8 };
    let check = move |input: &[u8]| {
        let Some((first, bytes)) = input.split_first() else { return Ok(Seen::default()) };
        let Some(whole) = golden.get(usize::from(*first)) else { return Ok(Seen::default()) };
        let (header, tail) = tail_of(whole);
        let (opened, peak_bytes) = within(memory, bytes.len(), || {
            let (store, file) = open(&disk_with(&header, bytes), &header).ok()?;
            let listed = store.list_undamaged_files(header.stripe).ok()?.len();
            Some((file.header() == &header, listed, file.scrub()))
        })?;
        let Some((is_golden, listed, found)) = opened else { return Ok(Seen::default()) };
        let data = bytes.len() - tail.len();
        if !is_golden || listed != 1 || bytes.get(data..) != Some(tail) {
            return Err("a damaged tail is believed".into());
        }
        let damaged: Vec<u64> = (0u64..)
            .zip(whole[..data].chunks(GRAIN_BYTES as usize))
            .zip(bytes[..data].chunks(GRAIN_BYTES as usize))
            .filter(|((_, golden), found)| golden != found)
            .map(|((grain, _), _)| grain)
            .collect();
        if found != damaged {
            return Err(format!("the damaged grains are {damaged:?}, {found:?} were named"));
        }
        Ok(Seen { accepted: true, peak_bytes })
    };
    Target { name: "files", cases: 10_000, corpus, words: Vec::new(), check: Box::new(check) }
}

fn put_checksum(bytes: &mut [u8], len: usize) {
    let (sealed, sum) = bytes.split_at_mut(bytes.len() - len);
    sum.copy_from_slice(&blake3::hash(sealed).as_bytes()[..len]);
}

/// Fuzzes tails: data length (8 bytes), table length (2 bytes), table, body of the header. The
/// target adds a correct trailer and correct checksums.
pub fn tails() -> Target {
    let golden = fixtures::files();
    let entry = |file: &Vec<u8>| {
        let (header, tail) = tail_of(file);
        let table = GrainTree::of(&file[..file.len() - tail.len()]);
        let body = postcard::to_stdvec(&header).unwrap();
        let table = table.hashes().as_flattened().to_vec();
        let len = (table.len() as u16).to_le_bytes();
        [&header.len_bytes.to_le_bytes()[..], &len, &table, &body].concat()
    };
    let corpus = golden.iter().map(entry).collect();
    let memory = Memory { base_bytes: 1 << 10, per_byte: 4 };
    let check = move |input: &[u8]| {
        let Some((data_bytes, rest)) = input.split_first_chunk() else {
            return Ok(Seen::default());
        };
        let Some((table, rest)) = rest.split_first_chunk() else { return Ok(Seen::default()) };
        let data_bytes = u64::from_le_bytes(*data_bytes);
        let table = usize::from(u16::from_le_bytes(*table)).min(rest.len());
        let (table, body) = rest.split_at(table);
        let len = (body.len() as u32).to_le_bytes();
        let mut header = [b"rRd1\x0a\x01", &len[..], body, &[0; 16]].concat();
        put_checksum(&mut header, 16);
        let len = (header.len() as u32).to_le_bytes();
        let data = data_bytes.to_le_bytes();
        let mut trailer = [b"rRdT\x01\0\0\0", &len[..], &data, &[0; 12]].concat();
        put_checksum(&mut trailer, 12);
        assert_eq!(trailer.len() as u64, TRAILER_BYTES);
        let tail = [table, &header, &trailer].concat();
        let parse = |tail: &[u8]| parse_tail(data_bytes.saturating_add(tail.len() as u64), tail);
        let write = |(header, tree): &(FileHeader, GrainTree)| tail_to_bytes(header, tree);
        let found = round_trip(memory, &tail, parse, write)?;
        if let (Some((header, tree)), _) = &found {
            let grains = tree.hashes().len() as u64;
            let len: u64 = (0..grains).map(|grain| grain_len(header.len_bytes, grain)).sum();
            if len != header.len_bytes || grain_len(header.len_bytes, grains) != 0 {
                return Err("the grains are not the data".into());
            }
            let name = header.key().name;
            if name.to_string().parse() != Ok(name) {
                return Err(format!("{name} does not read back"));
            }
        }
        Ok(seen(found))
    };
    Target { name: "tails", cases: 150_000, corpus, words: Vec::new(), check: Box::new(check) }
}
