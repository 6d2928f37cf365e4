//! A node's part of a plan: admission, its hops, and the proof of its pieces.

mod error;
mod hop;
mod hop_error;
mod piece_slot;
mod run;
mod timing;

pub use error::RunError;
pub use hop::{IncomingStream, SEND_BYTES, STREAM_WINDOW_BYTES, hop_bytes};
pub use hop_error::HopError;
pub use run::{ADMIT_ALL_LIMIT, Executor, order_bytes};
