//! The command line: what a person types and sees. The only floor that prints.
//!
//! Commands return an [`Answer`](printer::Answer) or a [`Failure`](printer::Failure); the [`printer`] alone writes,
//! so that `--json`, colours, hints and exit codes are decided in one place.

pub mod picture;
pub mod printer;
pub mod progress;
pub mod sample;
pub mod table;
