//! Records for unit tests.

use super::records::{FIELD_GF8, LAYOUT_STANDARD, RingNode, ShardRoot};
use crate::id::{SaveId, ShardId, Step};
use crate::units::GRAIN_BYTES;

/// Returns the root of a shard of one stripe: four blocks of a grain each, for code (6,4).
pub(crate) fn shard_root(ring: Vec<RingNode>) -> ShardRoot {
    let save = SaveId([1; 12]);
    ShardRoot {
        job: "job".parse().unwrap(),
        step: Step(1),
        save,
        index: 0,
        shards: 1,
        shard: ShardId::new(save, 0),
        name: "weights".parse().unwrap(),
        len_bytes: 4 * GRAIN_BYTES,
        block_bytes: GRAIN_BYTES,
        n: 6,
        k: 4,
        layout: LAYOUT_STANDARD,
        field: FIELD_GF8,
        fingerprint_key: [2; 32],
        ring,
        stripes_root: [3; 32],
    }
}
