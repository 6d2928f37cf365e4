//! What a client's operation can fail with.

use std::io;

use crate::code::CodeError;
use crate::format::FormatError;
use crate::format::geometry::GeometryError;
use crate::format::table::TableError;
use crate::id::{ClusterId, Job, ShardName, Step};
use crate::kind::ErrorKind;
use crate::net::NetError;
use crate::net::call::CallError;
use crate::pipeline::read::{Lost, ReadError};
use crate::pipeline::shard_records::RecordsError;
use crate::pipeline::upload::SaveError;
use crate::placement::PlacementError;
use crate::store::DiskError;
use crate::workers::WorkerDied;

/// Why an operation failed. What was committed before is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No daemon answers.
    #[error("no daemon of the cluster answers (tried {seeds}): {reason}")]
    Unreachable {
        /// The seeds.
        seeds: String,
        /// The last failure.
        reason: String,
    },
    /// No catalogue is known to the daemon that was asked.
    #[error("no daemon serves the catalogue just now")]
    NoCatalogue,
    /// Nothing is committed as the step.
    #[error("{job}/{step} is not committed: `rapidraid ls` shows what is")]
    NoStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// The step went away while it was read.
    #[error("{job}/{step} was removed or replaced meanwhile")]
    Removed {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// A record of another cluster.
    #[error(
        "the record is of cluster {record}, and the nodes are of {found}: use that cluster's client"
    )]
    OtherCluster {
        /// The record's.
        record: ClusterId,
        /// The nodes'.
        found: ClusterId,
    },
    /// No shard has the name.
    #[error("{job}/{step} has no shard {name}: `rapidraid show {job}/{step}` lists them")]
    NoShard {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The name.
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
    /// The index is not one that this release reads.
    #[error("the index of {job}/{step}: {source}")]
    Index {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// Why.
        source: Box<TableError>,
    },
    /// Two shards of a save have one name.
    #[error("two of the shards are called {name}: a checkpoint's shards have different names")]
    DuplicateName {
        /// The name.
        name: ShardName,
    },
    /// A save needs something to save.
    #[error("there is nothing to save: name at least one file")]
    NoShards,
    /// The caller could not keep the id of a save.
    #[error("the id of the save could not be kept, so nothing was sent: {source}")]
    SaveId {
        /// Why.
        source: io::Error,
    },
    /// The caller called the save off before its commit.
    #[error("the save was called off before its commit: {why}")]
    CalledOff {
        /// The caller's words.
        why: String,
    },
    /// A range needs one shard.
    #[error("a range of bytes belongs to one shard: name it")]
    RangeOfMany,
    /// A range is not within its shard.
    #[error("bytes {from}..{to} are not within shard {name} of {len_bytes} bytes")]
    Range {
        /// The shard.
        name: ShardName,
        /// First byte.
        from: u64,
        /// Behind the last byte.
        to: u64,
        /// The shard's length.
        len_bytes: u64,
    },
    /// Stripes cannot be read; nothing was written.
    #[error("{} of {total} stripes cannot be read, nothing was written:\n{}", lost.len(), lines(lost))]
    Lost {
        /// Which, and what they lack.
        lost: Vec<Lost>,
        /// All stripes of the request.
        total: usize,
    },
    /// A file is there already.
    #[error("{path} exists: restore elsewhere, or overwrite with --force")]
    FileExists {
        /// The path below the output folder.
        path: String,
    },
    /// A folder where a file has to be, or a file where a folder has to be.
    #[error("{path} exists and is {found}: restore elsewhere")]
    InTheWay {
        /// The path below the output folder.
        path: String,
        /// What is there.
        found: &'static str,
    },
    /// A shard's file and another's folder have one name.
    #[error("{path} would have to be a file and a folder: restore its shards one by one")]
    PathConflict {
        /// The path below the output folder.
        path: String,
    },
    /// The destination failed.
    #[error("writing {path}: {source}")]
    Output {
        /// The path below the output folder.
        path: String,
        /// Why.
        source: DiskError,
    },
    /// A local file failed.
    #[error("{path}: {source}")]
    Input {
        /// Its path.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The network failed.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A block could not be saved.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A stripe could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Records are missing.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// Too few nodes.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// No layout has the code's numbers.
    #[error(transparent)]
    Code(#[from] CodeError),
    /// A record's numbers are wrong.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A record does not fit or parse.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A worker died.
    #[error(transparent)]
    Worker(#[from] WorkerDied),
}

fn lines(lost: &[Lost]) -> String {
    const SHOWN: usize = 20;
    let mut lines: Vec<String> = lost.iter().take(SHOWN).map(|lost| format!("  {lost}")).collect();
    if lost.len() > SHOWN {
        lines.push(format!("  and {} more", lost.len() - SHOWN));
    }
    lines.join("\n")
}

impl ClientError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ClientError::Unreachable { .. } | ClientError::NoCatalogue => ErrorKind::Unavailable,
            ClientError::NoStep { .. }
            | ClientError::Removed { .. }
            | ClientError::NoShard { .. }
            | ClientError::NoIndex { .. } => ErrorKind::NotFound,
            ClientError::Index { source, .. } => source.kind(),
            ClientError::DuplicateName { .. }
            | ClientError::NoShards
            | ClientError::RangeOfMany
            | ClientError::OtherCluster { .. }
            | ClientError::Range { .. }
            | ClientError::PathConflict { .. } => ErrorKind::Invalid,
            ClientError::Lost { .. } => ErrorKind::Lost,
            ClientError::FileExists { .. } | ClientError::InTheWay { .. } => ErrorKind::Exists,
            ClientError::Output { source, .. } => source.kind(),
            ClientError::Input { .. } | ClientError::SaveId { .. } => ErrorKind::Io,
            ClientError::CalledOff { .. } => ErrorKind::Corrupt,
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

    /// What to do next, where the message does not say it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            ClientError::Unreachable { .. } => {
                Some("check that the daemons run and that the seeds in rapidraid.toml are theirs")
            }
            other => hint_for(other.kind()),
        };
        hint.map(str::to_owned)
    }
}

/// What the CLI prints under a failure.
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
