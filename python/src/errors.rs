//! Errors of the library as exceptions of the package: one class for each kind of failure.

use pyo3::prelude::*;
use rapidraid::kind::Kind;
use rapidraid::trainer::StagingError;

/// The word by which the package knows a kind.
fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Invalid => "invalid",
        Kind::NotFound => "not_found",
        Kind::Exists => "exists",
        Kind::Denied => "denied",
        Kind::Fenced => "fenced",
        Kind::Unavailable => "unavailable",
        Kind::Busy => "busy",
        Kind::Timeout => "timeout",
        Kind::Corrupt => "corrupt",
        Kind::Lost => "lost",
        Kind::Io => "io",
        _ => "internal",
    }
}

/// The exception of a kind.
pub fn raise(py: Python<'_>, kind: Kind, message: &str, hint: &str) -> PyErr {
    let made = py
        .import("rapidraid.errors")
        .and_then(|module| module.call_method1("of_kind", (word(kind), message, hint)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// The exception of an error of the trainer's side.
pub fn of_staging(py: Python<'_>, error: &StagingError) -> PyErr {
    let kind = match error {
        StagingError::NoDaemon { .. } => "no_daemon",
        StagingError::Forked => "forked",
        StagingError::Stale { .. } => "stale",
        other => word(other.kind()),
    };
    let made = py
        .import("rapidraid.errors")
        .and_then(|module| module.call_method1("of_kind", (kind, error.to_string(), error.hint())));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}
