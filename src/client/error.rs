//! The errors of a client's operations.

use std::io;
use std::time::Duration;

use crate::code::CodeError;
use crate::format::FormatError;
use crate::format::geometry::{GeometryError, MAX_SHARDS};
use crate::format::table::TableError;
use crate::id::{ClusterId, Job, ShardName, Step};
use crate::kind::ErrorKind;
use crate::net::NetError;
use crate::net::call::CallError;
use crate::pipeline::read::{ReadError, UnreadableStripe};
use crate::pipeline::record_fetch::RecordsError;
use crate::pipeline::upload::SaveError;
use crate::placement::PlacementError;
use crate::store::DiskError;
use crate::units::ByteCount;
use crate::workers::WorkerDied;

/// The reason why an operation failed. A change whose answer was lost may have been made all the
/// same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No daemon answers.
    #[error("no daemon of the cluster answers (tried {seeds}): {reason}")]
    Unreachable {
        /// The seeds that were tried.
        seeds: String,
        /// The last failure.
        reason: String,
    },
    /// The daemon that was asked knows no catalogue server.
    #[error("no daemon serves the catalogue just now")]
    NoCatalogue,
    /// No save is committed as the step.
    #[error("{job}/{step} is not committed: `rapidraid ls` shows what is")]
    NoStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// The step was removed or replaced while it was read.
    #[error("{job}/{step} was removed or replaced meanwhile")]
    Removed {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// The record belongs to another cluster.
    #[error(
        "the record is of cluster {record}, and the nodes are of {found}: use that cluster's client"
    )]
    OtherCluster {
        /// The cluster of the record.
        record: ClusterId,
        /// The cluster of the nodes.
        found: ClusterId,
    },
    /// The step has no shard of this name.
    #[error("{job}/{step} has no shard {name}: `rapidraid show {job}/{step}` lists them")]
    NoShard {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The name of the shard.
        name: ShardName,
    },
    /// The step has no index.
    #[error(
        "{job}/{step} was not saved by a trainer and has no tensors: `rapidraid show {job}/{step}` shows its shards"
    )]
    NoIndex {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// The index does not parse, or is longer than this release reads.
    #[error("the index of {job}/{step}: {source}")]
    Index {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The cause.
        source: Box<TableError>,
    },
    /// Two shards of a save have the same name.
    #[error("two of the shards are called {name}: a checkpoint's shards have different names")]
    DuplicateName {
        /// The name that occurs twice.
        name: ShardName,
    },
    /// The save has more shards than a save may have.
    #[error(
        "a save has at most {MAX_SHARDS} shards, and this one has {count}: save several small files as one"
    )]
    TooManyShards {
        /// The number of shards.
        count: usize,
    },
    /// The save has no shards.
    #[error("there is nothing to save: name at least one file")]
    NoShards,
    /// The caller could not store the id of the save.
    #[error("the id of the save could not be kept, so nothing was sent: {source}")]
    SaveId {
        /// The cause.
        source: io::Error,
    },
    /// The caller ended the save before its commit.
    #[error("the save was called off before its commit: {why}")]
    CalledOff {
        /// The caller's reason.
        why: String,
    },
    /// Other writers of a joint save have made no progress for too long.
    #[error("writers {writers:?} of the save have made no progress for {} s: check their hosts", limit.as_secs())]
    WritersMissing {
        /// The numbers of the writers.
        writers: Vec<u32>,
        /// How long the save has waited for them.
        limit: Duration,
    },
    /// Another writer of a joint save has dropped the step, before all others.
    #[error("writer {writer} of the save has dropped the step: {}; save the next step",
        if reason.is_empty() { "its log says why" } else { reason })]
    WriterDropped {
        /// The number of the writer.
        writer: u32,
        /// The reason; empty if the writer has not said it.
        reason: String,
    },
    /// Each attempt at a joint save ended without a commit: a writer aborted it, its lease or its epoch
    /// ended, or a node of its ring was gone.
    #[error("the joint save ended without a commit at each attempt: save the step again")]
    JointSaveOver,
    /// A range was given without the name of a shard.
    #[error("a range of bytes belongs to one shard: name it")]
    RangeOfMany,
    /// The range is not within the shard.
    #[error("bytes {from}..{to} are not within shard {name} of {len_bytes} bytes")]
    Range {
        /// The shard.
        name: ShardName,
        /// Offset of the first byte.
        from: u64,
        /// Offset after the last byte.
        to: u64,
        /// Length of the shard in bytes.
        len_bytes: u64,
    },
    /// Stripes cannot be read. Nothing was written.
    #[error("{} of {total} stripes cannot be read, nothing was written:\n{}", lost.len(), format_unreadable_stripes(lost))]
    Lost {
        /// The stripes and what each of them lacks.
        lost: Vec<UnreadableStripe>,
        /// Number of stripes in the request.
        total: usize,
    },
    /// The output file exists already.
    #[error("{path} exists: restore elsewhere, or overwrite with --force")]
    FileExists {
        /// The path, relative to the output folder.
        path: String,
    },
    /// The disk of the output folder has too little space.
    #[error(
        "the restore needs {}, and the disk of the output folder has {} free: free some, or restore elsewhere",
        ByteCount(*needed_bytes),
        ByteCount(*free_bytes)
    )]
    NoSpace {
        /// Number of bytes that the restore writes.
        needed_bytes: u64,
        /// Number of bytes that are free.
        free_bytes: u64,
    },
    /// A folder is in the place of an output file, or a file in the place of a folder.
    #[error("{path} exists and is {found}: restore elsewhere")]
    InTheWay {
        /// The path, relative to the output folder.
        path: String,
        /// Description of what is there.
        found: &'static str,
    },
    /// The same path would have to be the file of one shard and a folder of another.
    #[error("{path} would have to be a file and a folder: restore its shards one by one")]
    PathConflict {
        /// The path, relative to the output folder.
        path: String,
    },
    /// Writing the output failed.
    #[error("writing {path}: {source}")]
    Output {
        /// The path, relative to the output folder.
        path: String,
        /// The cause.
        source: DiskError,
    },
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The network failed.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A stripe could not be saved, or a source failed or changed.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A stripe could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Records of the shard or stripe are missing.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// There are too few nodes.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// No layout exists for the code's n and k.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// The geometry in a record is invalid.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A record does not parse, or is too long.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A job on a worker thread panicked.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

fn format_unreadable_stripes(lost: &[UnreadableStripe]) -> String {
    const SHOWN: usize = 20;
    let mut lines: Vec<String> = lost.iter().take(SHOWN).map(|lost| format!("  {lost}")).collect();
    if lost.len() > SHOWN {
        lines.push(format!("  and {} more", lost.len() - SHOWN));
    }
    lines.join("\n")
}

impl ClientError {
    /// Returns the error kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ClientError::Unreachable { .. } | ClientError::NoCatalogue => ErrorKind::Unavailable,
            ClientError::NoStep { .. }
            | ClientError::Removed { .. }
            | ClientError::NoShard { .. }
            | ClientError::NoIndex { .. } => ErrorKind::NotFound,
            ClientError::Index { source, .. } => source.kind(),
            ClientError::DuplicateName { .. }
            | ClientError::TooManyShards { .. }
            | ClientError::NoShards
            | ClientError::RangeOfMany
            | ClientError::OtherCluster { .. }
            | ClientError::Range { .. }
            | ClientError::PathConflict { .. } => ErrorKind::Invalid,
            ClientError::Lost { .. } => ErrorKind::Lost,
            ClientError::FileExists { .. } | ClientError::InTheWay { .. } => ErrorKind::Exists,
            ClientError::Output { source, .. } => source.kind(),
            ClientError::SaveId { .. } | ClientError::NoSpace { .. } => ErrorKind::Io,
            ClientError::CalledOff { .. } | ClientError::WriterDropped { .. } => ErrorKind::Corrupt,
            ClientError::WritersMissing { .. } | ClientError::JointSaveOver => {
                ErrorKind::Unavailable
            }
            ClientError::Call(error) => error.kind(),
            ClientError::Net(error) => error.kind(),
            ClientError::Save(error) => error.kind(),
            ClientError::Read(error) => error.kind(),
            ClientError::Records(error) => error.kind(),
            ClientError::Placement(error) => error.kind(),
            ClientError::Code(error) => error.kind(),
            ClientError::Geometry(error) => error.kind(),
            ClientError::Format(error) => error.kind(),
            ClientError::Worker(_) => ErrorKind::Internal,
        }
    }

    /// Returns a hint what to do next, if the message itself does not give one.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            ClientError::Unreachable { .. } => {
                Some("check that the daemons run and that the seeds in rapidraid.toml are theirs")
            }
            ClientError::Save(SaveError::NoHolders { .. }) => {
                Some("`rapidraid status` shows which nodes are live, and how full their disks are")
            }
            // Their texts say what to do.
            ClientError::WritersMissing { .. }
            | ClientError::WriterDropped { .. }
            | ClientError::JointSaveOver => None,
            other => hint_for(other.kind()),
        };
        hint.map(str::to_owned)
    }
}

/// Returns the hint that the CLI prints below a failure of this kind.
pub(crate) fn hint_for(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::Unavailable | ErrorKind::Timeout => {
            Some("`rapidraid status` shows which nodes are live")
        }
        ErrorKind::Busy => Some("try again in a moment"),
        ErrorKind::Lost => Some("bring back nodes that hold what is missing, then run it again"),
        ErrorKind::Denied => {
            Some("check that the certificate is of this cluster and of the right role")
        }
        _ => None,
    }
}
