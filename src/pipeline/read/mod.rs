//! Reads stripes back from replicas or pieces, with every grain verified.

mod error;
mod file_probe;
mod grain_decoding;
mod read_cursor;
mod read_session;
mod source_reader;
mod source_selection;
mod stripe_reader;
mod stripe_sources;
mod stripe_state_from_nodes;

pub use error::ReadError;
pub use file_probe::request_verification;
pub use grain_decoding::Sink;
pub use read_session::ReadSession;
pub use source_selection::UnreadableStripe;
pub use stripe_reader::StripeReader;
pub use stripe_state_from_nodes::{NodesToAsk, find_stripe_state};
