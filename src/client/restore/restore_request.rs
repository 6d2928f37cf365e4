//! The request for a restore into files.

use std::ops::Range;
use std::sync::Arc;

use crate::id::ShardName;
use crate::store::Disk;

/// A request to restore into files.
pub struct RestoreRequest {
    /// The output folder.
    pub out: Arc<dyn Disk>,
    /// Whether to overwrite files that exist.
    pub force: bool,
    /// The shard to restore; `None`: all shards.
    pub shard: Option<ShardName>,
    /// The bytes of the shard to restore; `None`: all. They become a file of this length.
    pub range: Option<Range<u64>>,
}
