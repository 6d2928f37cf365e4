//! Conversions of this program's errors to the error that a caller receives.

use crate::catalogue::CatalogueError;
use crate::clock::Elapsed;
use crate::format::FormatError;
use crate::format::geometry::GeometryError;
use crate::kind::ErrorKind;
use crate::net::NetError;
use crate::net::call::CallError;
use crate::pipeline::coordinator::ArchiveError;
use crate::pipeline::executor::RunError;
use crate::pipeline::record_fetch::RecordsError;
use crate::store::StoreError;
use crate::wire::{RemoteError, WireError};
use crate::workers::WorkerDied;

macro_rules! failures {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for RemoteError {
            fn from(error: $error) -> Self {
                Self { kind: error.kind(), message: error.to_string() }
            }
        })*
    };
}
failures!(
    CatalogueError,
    FormatError,
    GeometryError,
    NetError,
    ArchiveError,
    RecordsError,
    RunError,
    StoreError,
    WireError,
);

impl From<CallError> for RemoteError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Failed(failure) => failure,
            other => Self { kind: other.kind(), message: other.to_string() },
        }
    }
}

impl From<WorkerDied> for RemoteError {
    fn from(error: WorkerDied) -> Self {
        Self { kind: ErrorKind::Internal, message: error.to_string() }
    }
}

impl From<Elapsed> for RemoteError {
    fn from(error: Elapsed) -> Self {
        Self { kind: ErrorKind::Timeout, message: error.to_string() }
    }
}

/// Returns an error of `kind` with `message`.
pub(in crate::node) fn remote_error(kind: ErrorKind, message: impl Into<String>) -> RemoteError {
    RemoteError { kind, message: message.into() }
}
