//! A node's part of a plan: admission, its hops, and the proof of its pieces.

mod error;
mod hop_error;
mod hop_execution;
mod hop_timing;
mod part_execution;
mod part_size;
mod part_table;
mod proving_piece_writer;

pub use error::RunError;
pub use hop_error::HopError;
pub use hop_execution::{IncomingStream, SEND_BYTES, STREAM_WINDOW_BYTES, hop_memory_bytes};
pub use part_execution::{ADMIT_ALL_LIMIT, Executor, PartInputs, local_file};
pub use part_size::order_memory_bytes;

use std::time::Duration;

/// How long a reservation waits for memory.
pub const ADMISSION_LIMIT: Duration = Duration::from_secs(10);
