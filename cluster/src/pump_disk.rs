//! The cost of a piece without network and coding: it is written, synced, read back past the page
//! cache and hashed, as in a hop.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use rapidraid::id::{Attempt, ClusterId, SaveId, ShardId, StripeId};
use rapidraid::store::{Extent, PieceSpec, Store};
use rapidraid::units::GRAIN_BYTES;

/// Index cache of a store that holds one piece.
const INDEX_CACHE_BYTES: u64 = 1 << 20;

/// Writes a piece of `bytes` in a new folder below `home`, proves it, and removes the folder.
/// Returns the seconds that the piece took.
pub fn piece(home: &Path, bytes: u64) -> Result<f64> {
    let folder = home.join("alone");
    let done = write(&folder, bytes).with_context(|| format!("a piece in {}", folder.display()));
    // After a failure the folder may not exist.
    let _ = std::fs::remove_dir_all(&folder);
    done
}

fn write(folder: &Path, bytes: u64) -> Result<f64> {
    std::fs::create_dir(folder)?;
    let name = "alone".parse()?;
    let (store, ..) = Store::open_folder(folder, INDEX_CACHE_BYTES, ClusterId([1; 16]), &name)?;
    let stripe = StripeId { shard: ShardId::new(SaveId([1; 12]), 0), index: 0 };
    let attempt = Attempt([1; 16]);
    let began = Instant::now();
    let spec = PieceSpec { stripe, piece: 0, attempt, code: 0, layout: 1, len_bytes: bytes };
    let mut piece = store.create_piece_writer(spec)?;
    let mut buffer = Extent::new_read_back_buffer(bytes);
    let grain = vec![0x5a; GRAIN_BYTES as usize];
    for index in 0..bytes.div_ceil(GRAIN_BYTES) {
        let len = (bytes - index * GRAIN_BYTES).min(GRAIN_BYTES) as usize;
        piece.write_grain(index, &grain[..len])?;
        if let Some(extent) = piece.take_extent_to_prove()? {
            extent.sync_and_verify_read_back(&mut buffer, &mut |_, _| ())?;
        }
    }
    piece.finish(&mut |_, _| ())?;
    Ok(began.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stays() {
        let home = tempfile::tempdir().unwrap();
        for bytes in [1, GRAIN_BYTES, (9 << 20) + 5] {
            assert!(piece(home.path(), bytes).unwrap() > 0.0);
        }
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }
}
