//! Errors of the trainer's side of staging.

use std::io;
use std::path::PathBuf;

use super::protocol::{Failure, MessageError};
use super::segment::SegmentError;
use crate::format::table::{SearchError, TableError};
use crate::kind::ErrorKind;
use crate::units::ByteCount;

/// Why a trainer's call failed. Nothing that was committed is affected by any of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StagingError {
    /// No daemon listens.
    #[error("no staging daemon answers in {}: {reason}", dir.display())]
    NoDaemon {
        /// The staging folder.
        dir: PathBuf,
        /// Why.
        reason: String,
    },
    /// The folder or the socket belongs to another user, or others can reach it.
    #[error("the staging folder {} {problem}", dir.display())]
    Untrusted {
        /// The staging folder.
        dir: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The daemon refuses to talk to this process.
    #[error("the staging daemon in {} refuses this process: {reason}", dir.display())]
    Refused {
        /// The staging folder.
        dir: PathBuf,
        /// Its words.
        reason: String,
    },
    /// The connection ended while an answer was waited for.
    #[error("the staging daemon went away while this process waited for {what}")]
    Disconnected {
        /// What was waited for.
        what: &'static str,
    },
    /// The deadline passed.
    #[error("{what} took longer than {limit_s:.1} s{state}")]
    Deadline {
        /// What was waited for.
        what: String,
        /// The limit, in seconds.
        limit_s: f64,
        /// How far it was, or nothing.
        state: String,
    },
    /// A control group would end the process.
    #[error(
        "segments of {} do not fit into what the control group of this process may still take: {}",
        ByteCount(*wanted_bytes), ByteCount(*room_bytes)
    )]
    NoRoom {
        /// Bytes of the segments.
        wanted_bytes: u64,
        /// Bytes that the group leaves.
        room_bytes: u64,
    },
    /// The caller asked to stop waiting.
    #[error("interrupted while waiting for {what}")]
    Interrupted {
        /// What was waited for.
        what: &'static str,
    },
    /// The process is a fork of the one that made the session.
    #[error("this process was forked from the one that made the Checkpointer, which it cannot use")]
    Forked,
    /// What was being loaded was filled again meanwhile.
    #[error("step {step} was replaced in memory while it was being loaded")]
    Stale {
        /// The step.
        step: crate::id::Step,
    },
    /// The daemon's answer is a failure.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The daemon answered something else.
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
    /// What was asked for is not in the checkpoint.
    #[error(transparent)]
    Search(#[from] SearchError),
    /// Bytes in memory are not those that were staged.
    #[error("{name} is damaged in this host's memory: its bytes are not those that were staged")]
    Corrupt {
        /// The tensor.
        name: String,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl StagingError {
    /// What kind of failure this is.
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

    /// What to do next, where the message does not say it; may be empty.
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
                "give the job (container, Slurm step, unit) as much more memory as twice its state".into()
            }
            StagingError::Forked => "make a Checkpointer in this process".into(),
            StagingError::Stale { .. } => "load once more".into(),
            StagingError::Failed(failure) => failure.hint.clone(),
            StagingError::Corrupt { .. } => {
                "load the step from the cluster: `rapidraid stage --free JOB` gives up the copy in memory".into()
            }
            _ => String::new(),
        }
    }
}
