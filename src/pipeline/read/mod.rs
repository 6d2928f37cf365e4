//! Reads stripes back from replicas or pieces, with every grain verified.

mod error;
mod grain_stream;
mod probe;
mod reader;
mod session;
mod source;
mod sources;
mod state;

pub use error::ReadError;
pub use probe::report_damage;
pub use reader::{Sink, StripeReader};
pub use session::ReadSession;
pub use sources::Lost;
pub use state::find_stripe_state;
