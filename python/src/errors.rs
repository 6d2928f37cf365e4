//! Errors of the library as exceptions of the package, with one class for each kind of error.

use pyo3::prelude::*;
use rapidraid::kind::ErrorKind;
use rapidraid::trainer::StagingError;

/// Returns the package's name for an error kind.
fn word(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "invalid",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Exists => "exists",
        ErrorKind::Denied => "denied",
        ErrorKind::Fenced => "fenced",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Busy => "busy",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Lost => "lost",
        ErrorKind::Io => "io",
        _ => "internal",
    }
}

/// Returns the exception for an error kind.
pub fn raise(py: Python<'_>, kind: ErrorKind, message: &str, hint: &str) -> PyErr {
    let made = py
        .import("rapidraid.errors")
        .and_then(|module| module.call_method1("of_kind", (word(kind), message, hint)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// Returns the exception for an error of the trainer's side.
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
