//! Work on stripes as bounded streams: saving blocks, running a plan's hops, archiving, reading.

pub mod account;
pub mod archive;
pub mod hop;
pub mod hop_error;
pub mod patience;
pub mod piece_slot;
pub mod read;
pub mod records;
pub mod run;
pub mod save;
