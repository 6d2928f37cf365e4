//! The errors of the services on the data that this node stores.

use crate::budget::BudgetError;
use crate::clock::Elapsed;
use crate::format::file::FileKey;
use crate::format::records::StripeState;
use crate::id::{Attempt, Epoch, Generation, NodeId, PeerName, SaveId, ShardId, StripeId};
use crate::net::call::CallError;
use crate::units::MAX_BLOCK_BYTES;

/// The reason why a call on this node's own data was refused or failed.
#[derive(Debug, thiserror::Error)]
pub(in crate::node) enum StorageError {
    /// The save was aborted, removed or replaced by a newer one.
    #[error("save {save} was aborted, removed or superseded")]
    SaveRemoved { save: SaveId },
    /// The save was removed while something was written for it.
    #[error("save {save} was removed meanwhile")]
    SaveRemovedMeanwhile { save: SaveId },
    /// A later owner of the shard has given this node an order.
    #[error("generation {generation} of shard {shard} is over: node {holder} has {newest}")]
    GenerationOver { generation: Generation, shard: ShardId, holder: NodeId, newest: Generation },
    /// The stripe is archived, so no replica of it is stored.
    #[error("stripe {stripe} is archived: it needs no replicas")]
    StripeArchived { stripe: StripeId },
    /// The catalogue that this node asks is older than the newest epoch that the node has seen.
    #[error(
        "the catalogue that node {node} asks is of epoch {asked}, and epoch {seen} has begun: try again"
    )]
    CatalogueOutdated { node: PeerName, asked: Epoch, seen: Epoch },
    /// The catalogue does not record the stripe as archived by the attempt of the order.
    #[error("stripe {stripe} is {state:?} in the catalogue, not archived by {attempt}")]
    StripeNotArchived { stripe: StripeId, state: Option<StripeState>, attempt: Attempt },

    /// The node is a gateway, which stores no data.
    #[error("node {node} stores no data (storage = false)")]
    NodeStoresNoData { node: PeerName },
    /// The number of the shard is the one under which nodes store records of the save as a whole.
    #[error("{shard} is no shard: its number is reserved")]
    NoSuchShard { shard: ShardId },
    /// The epoch of a client's call is later than that of the catalogue.
    #[error("epoch {epoch} has not begun: the catalogue is at {newest}")]
    EpochNotBegun { epoch: Epoch, newest: Epoch },
    /// The memory share is smaller than the work needs.
    #[error(transparent)]
    MemoryShareTooSmall(BudgetError),
    /// No slot for a block to the second holder became free within the time limit.
    #[error("node {node} is sending too many blocks to node {second}: try again")]
    TooManyForwards { node: PeerName, second: PeerName },
    /// The length of the replica to copy is zero or more than that of the longest block.
    #[error(
        "a replica of {len_bytes} bytes cannot be copied: a block has 1 to {MAX_BLOCK_BYTES} bytes"
    )]
    ReplicaLengthInvalid { len_bytes: u64 },
    /// The length of the block to store is zero or more than that of the longest block.
    #[error(
        "a block of {len_bytes} bytes cannot be stored: a block has 1 to {MAX_BLOCK_BYTES} bytes"
    )]
    BlockLengthInvalid { len_bytes: u64 },
    /// The stripe has no block of that number, or an empty one.
    #[error("stripe {stripe} has no block {block}")]
    NoSuchBlock { stripe: StripeId, block: u8 },
    /// The stream of a block ends before its trailer.
    #[error("the block's trailer is missing")]
    TrailerMissing,
    /// The asked range ends after the end of the file.
    #[error("{key} has {len_bytes} bytes; asked for {asked_bytes} from {from}")]
    RangePastEnd { key: FileKey, len_bytes: u64, asked_bytes: u64, from: u64 },
    /// The asked range ends after the end of the longest block.
    #[error("{asked_bytes} bytes from {from} on are more than a block")]
    RangeOverBlock { asked_bytes: u64, from: u64 },
    /// The record describes another stripe than the call names.
    #[error("the record is of stripe {found}, not of {stripe}")]
    RecordOfOtherStripe { found: StripeId, stripe: StripeId },
    /// The leaves belong to another shard than the call names, or do not match their root.
    #[error("the leaves are not those of shard {shard}")]
    LeavesMismatch { shard: ShardId },

    /// The memory share has no room for the work within the time limit.
    #[error("node {node} has no memory free for this now: try again")]
    NoMemory { node: PeerName },
    /// The maximum number of examinations runs or waits already.
    #[error("{limit} stripes wait to be examined here: ask again")]
    TooManyExaminations { limit: usize },
    /// The file was replaced during each of its checks.
    #[error("{key} changes while it is examined: ask again")]
    FileChanging { key: FileKey },
    /// Another purge of the save still runs on this node.
    #[error("save {save} is being purged on this node: ask again")]
    PurgeRunning { save: SaveId },

    /// The shard is committed, so clients cannot write to it.
    #[error("shard {shard} is committed: it does not change")]
    ShardCommitted { shard: ShardId },
    /// The tombstone was written for another cluster.
    #[error("the tombstone belongs to another cluster")]
    ForeignTombstone,
    /// The commit mark was written for another cluster or names two saves.
    #[error("the commit mark belongs to another cluster or save")]
    ForeignMark,
    /// The receipt was written for another cluster.
    #[error("the receipt belongs to another cluster")]
    ForeignReceipt,
    /// The record is a receipt or a commit mark, which no client may write.
    #[error("clients cannot write receipts or commit marks")]
    RecordNotWritable,
    /// The save to abort has a commit mark on this node.
    #[error("save {save} has a commit mark here: it was not aborted")]
    SaveMarked { save: SaveId },
    /// This node has no evidence that the save was removed.
    #[error("this node has no tombstone of save {save}: nothing is removed")]
    NoTombstone { save: SaveId },

    /// The catalogue has no root of the shard.
    #[error("shard {shard} is gone")]
    ShardGone { shard: ShardId },
    /// This node has no intact receipt of the attempt that the order names.
    #[error("this node has no receipt of stripe {stripe}")]
    NoReceipt { stripe: StripeId },

    /// The replica on the source node has another length than the record gives.
    #[error("{key} on node {node} has another length than the block in the record")]
    ReplicaLengthMismatch { key: FileKey, node: PeerName },
    /// The received block has other fingerprints than its sender computed.
    #[error(
        "the fingerprints of block {block} of stripe {stripe} differ from those that its sender computed: send it again"
    )]
    FingerprintMismatch { block: u8, stripe: StripeId },
    /// The receipt on this node differs from the attempt in the catalogue.
    #[error("the receipt of stripe {stripe} here does not match the catalogue")]
    ReceiptMismatch { stripe: StripeId },
    /// The file on this node has another root than its piece in the receipt.
    #[error("{key} on this node is not the piece of the receipt")]
    PieceMismatch { key: FileKey },

    /// The disk has no room for a new block below its high-water mark.
    #[error(
        "the disk of node {node} is over its high-water mark of {percent} %: archive or remove checkpoints, or add disk"
    )]
    HighWaterReached { node: PeerName, percent: u8 },

    /// The call to the second holder of a block has no valid answer.
    #[error(transparent)]
    ForwardUnanswered(CallError),
    /// The second holder of a block does not admit it within the time limit.
    #[error("{node}: {late}")]
    ForwardLate { node: PeerName, late: Elapsed },

    /// The reader of a block ended before all its bytes arrived.
    #[error("a gathered block is incomplete")]
    BlockIncomplete,
    /// A task of the node did not end, or did not begin because the node stops.
    #[error("this node's {work} was not completed: the node stops, or its log has the reason")]
    TaskLost { work: &'static str },
}
