//! Errors of the trainer's side of staging.

use std::io;
use std::path::PathBuf;

use super::protocol::{Failure, MessageError};
use super::segment::SegmentError;
use crate::format::table::{SearchError, TableError};
use crate::kind::ErrorKind;
use crate::units::ByteCount;

/// The reason why a trainer's call failed. No error here affects what was committed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// No daemon answers in the staging folder. The folder or its socket is missing, no process
    /// listens on the socket, or the daemon is ending.
    #[error("no staging daemon answers in {}: {reason}", dir.display())]
    NoDaemon {
        /// The staging folder.
        dir: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The folder or the socket belongs to another user, or other users can access the folder.
    #[error("the staging folder {} {problem}", dir.display())]
    Untrusted {
        /// The staging folder.
        dir: PathBuf,
        /// The problem, as the end of a sentence about the folder.
        problem: String,
    },
    /// The daemon refuses this process, or this process cannot use the daemon: its version does not
    /// fit, or it has another staging folder than before.
    #[error("the staging daemon in {} refuses this process: {reason}", dir.display())]
    Refused {
        /// The staging folder.
        dir: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The connection ended before the answer arrived.
    #[error("the staging daemon went away while this process waited for {what}")]
    Disconnected {
        /// The operation that was in progress.
        what: &'static str,
    },
    /// The caller's deadline passed.
    #[error("{what} took longer than {limit_s:.1} s{state}")]
    Deadline {
        /// The operation that was in progress.
        what: String,
        /// The limit, in seconds.
        limit_s: f64,
        /// The progress at that time; empty if unknown.
        state: String,
    },
    /// The segments exceed the memory limit of the process's control group. The kernel would kill
    /// the process.
    #[error(
        "segments of {} do not fit into what the control group of this process may still take: {}",
        ByteCount(*wanted_bytes), ByteCount(*room_bytes)
    )]
    NoRoom {
        /// Total length of the segments, in bytes.
        wanted_bytes: u64,
        /// Memory that the group still allows, in bytes.
        room_bytes: u64,
    },
    /// The caller ended the wait.
    #[error("interrupted while waiting for {what}")]
    Interrupted {
        /// The operation that was in progress.
        what: &'static str,
    },
    /// This process is a fork of the one that opened the session, or it has ended the session.
    #[error(
        "this process cannot use the session: the session is closed, or it belongs to the process that this one was forked from"
    )]
    Forked,
    /// A segment stopped holding the step while the step was being loaded from it.
    #[error("step {step} was replaced in memory while it was being loaded")]
    Stale {
        /// The step.
        step: crate::id::Step,
    },
    /// The daemon answered that the request failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The daemon's answer is of a kind that does not belong to the request.
    #[error(
        "the staging daemon gave an answer that does not belong to {what}: upgrade it or the package"
    )]
    Unexpected {
        /// The request.
        what: &'static str,
    },
    /// A message does not decode.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A segment cannot be used.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// A table cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The checkpoint does not contain the requested tensor or region.
    #[error(transparent)]
    Search(#[from] SearchError),
    /// Bytes in this host's memory are not those that were staged.
    #[error("{name} is damaged in this host's memory: its bytes are not those that were staged")]
    Corrupt {
        /// The tensor.
        name: String,
    },
    /// A call to the operating system failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl StagingError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            StagingError::NoDaemon { .. }
            | StagingError::Disconnected { .. }
            | StagingError::Stale { .. } => ErrorKind::Unavailable,
            StagingError::NoRoom { .. } => ErrorKind::Busy,
            StagingError::Forked => ErrorKind::Invalid,
            StagingError::Untrusted { .. } | StagingError::Refused { .. } => ErrorKind::Denied,
            StagingError::Deadline { .. } | StagingError::Interrupted { .. } => ErrorKind::Timeout,
            StagingError::Failed(failure) => failure.kind(),
            StagingError::Unexpected { .. } | StagingError::Message(_) => ErrorKind::Internal,
            StagingError::Segment(error) => error.kind(),
            StagingError::Table(error) => error.kind(),
            StagingError::Search(error) => error.kind(),
            StagingError::Corrupt { .. } => ErrorKind::Corrupt,
            StagingError::Io { .. } => ErrorKind::Io,
        }
    }

    /// Returns advice on what to do next. Empty where the message already says it.
    pub fn hint(&self) -> String {
        match self {
            StagingError::NoDaemon { .. } => {
                "start it with `rapidraid stage`, or let the Python package start it; `rapidraid stage --status` shows whether it runs".into()
            }
            StagingError::Untrusted { .. } => {
                "the folder must belong to you and have mode 0700; set staging.dir to a folder of your own".into()
            }
            StagingError::Disconnected { .. } => {
                "call it again: what was staged by all ranks is safe, a step that was being filled is not".into()
            }
            StagingError::Deadline { .. } => "`rapidraid stage --status` shows what is under way".into(),
            StagingError::NoRoom { .. } => {
                "give the job (container, Slurm step, unit) as much more memory as its state has, or twice as much, so that no save waits for the one before".into()
            }
            StagingError::Forked => "make a Checkpointer in this process".into(),
            StagingError::Stale { .. } => "load once more".into(),
            StagingError::Failed(failure) => failure.hint.clone(),
            StagingError::Corrupt { .. } => {
                "load the step from the cluster: `rapidraid stage --free JOB` frees the copy in memory".into()
            }
            _ => String::new(),
        }
    }
}
