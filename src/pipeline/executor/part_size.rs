//! The memory and the disk space that a node's part of a plan needs.

use super::hop_execution::hop_memory_bytes;
use crate::gf::Fingerprint;
use crate::plan::Output;
use crate::store::PIECE_WRITER_BYTES;
use crate::wire::order::Order;

/// Returns the memory, in bytes, that an order works in, including the buffers of its pieces.
pub fn order_memory_bytes(order: &Order) -> u64 {
    let pieces = pieces_to_store(order).len() as u64;
    let expected = order.hops.iter().flat_map(|hop| &hop.inputs).map(|input| input.expected.len());
    let fingerprint_bytes = (expected.sum::<usize>() * size_of::<Fingerprint>()) as u64;
    order.hops.iter().map(hop_memory_bytes).sum::<u64>()
        + pieces * PIECE_WRITER_BYTES
        + fingerprint_bytes
}

/// Returns the disk space, in bytes, of the pieces that an order writes.
pub(super) fn order_disk_bytes(order: &Order) -> u64 {
    pieces_to_store(order).len() as u64 * order.cut.block_bytes
}

/// Returns the numbers of the pieces that an order writes, in order.
pub(super) fn pieces_to_store(order: &Order) -> Vec<u8> {
    let stored = order.hops.iter().flat_map(|hop| &hop.outputs);
    let mut pieces: Vec<u8> = stored
        .filter_map(|output| match output.output {
            Output::Store(piece) => Some(piece),
            _ => None,
        })
        .collect();
    pieces.sort_unstable();
    pieces.dedup();
    pieces
}
