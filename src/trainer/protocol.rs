//! The messages between trainers and the staging daemon of their host (docs/staging.md).
//!
//! A connection begins with [`Hello`] and [`HelloAnswer`], whose encoding never changes. Then the trainer sends one request at a time and
//! the daemon answers each. Daemon and trainer are upgraded apart: the daemon speaks every version from [`OLDEST`] to [`VERSION`], and a
//! trainer names the range that it speaks. Variants and fields are only ever added behind the last one, with a new version.
//!
//! A frame is its length (4 bytes, little-endian), the number of descriptors that come with it (1 byte), and the message in postcard.
//! Descriptors accompany the first byte of their frame.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::id::{ClusterId, FillId, InstanceId, Job, LaunchId, MemberId, SaveId, SegmentId, Step};
use crate::kind::ErrorKind;

/// The newest version of the protocol.
pub const VERSION: u16 = 1;
/// The oldest version that the daemon speaks.
pub const OLDEST: u16 = 1;
/// The longest message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 256 << 10;
/// The most descriptors that accompany one message.
pub const MAX_DESCRIPTORS: usize = 64;
/// The most bytes that [`Request::ReadExtents`] asks for, unless one extent alone is longer.
pub const WINDOW_BYTES: u64 = 32 << 20;
/// The most extents that [`Request::ReadExtents`] asks for.
pub const MAX_WINDOW_EXTENTS: usize = 512;
/// The most ranks of one launch on one host: each has a connection of its own.
pub const MAX_WORLD: u32 = 192;

/// The first message of a trainer. A descriptor of the trainer's own process (a pidfd) comes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The oldest version that the trainer speaks.
    pub oldest: u16,
    /// The newest version that the trainer speaks.
    pub newest: u16,
    /// Drawn by the process when it made its checkpointer; the same on every connection of it.
    pub member: MemberId,
    /// The process, for people.
    pub pid: u32,
    /// The content of the token file, where the daemon asks for one.
    pub token: Vec<u8>,
}

/// The daemon's answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAnswer {
    /// The version that both speak from now on; 0: there is none.
    pub version: u16,
    /// The staging folder.
    pub instance: InstanceId,
    /// The cluster that it saves to.
    pub cluster: ClusterId,
    /// The daemon's process, for people.
    pub pid: u32,
    /// Why the connection is refused; empty when it is not.
    pub refused: String,
}

/// What a trainer asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Request {
    /// Makes segments for a rank and makes the launch the newest of its job. The answer is [`Answer::Prepared`] or [`Answer::Pending`].
    Prepare(Prepare),
    /// Says again who the process is, on a new connection. The answer is [`Answer::Attached`].
    Attach(Place),
    /// Asks for a segment to fill with a step. The answer is [`Answer::Fill`], [`Answer::Pending`] or [`Answer::Skipped`].
    Fill {
        /// The step.
        step: Step,
        /// Skip the step on all ranks, at once, when no rank has begun to fill it and this one has no free segment.
        or_skip: bool,
        /// How long the daemon may wait for a segment to become free.
        limit_ms: u32,
    },
    /// Says that the rank's part of a step is in its segment. The answer is [`Answer::Done`].
    Staged {
        /// The step.
        step: Step,
        /// The segment.
        segment: SegmentId,
        /// The filling, as [`Answer::Fill`] named it.
        fill: FillId,
        /// Hashes of the same sample of the replicated content on all ranks.
        samples: Vec<Sample>,
    },
    /// Gives up filling a step. The answer is [`Answer::Done`].
    GiveUp {
        /// The step.
        step: Step,
        /// The filling.
        fill: FillId,
        /// Why, for the other ranks.
        why: String,
    },
    /// Waits for the end of a save. The answer is [`Answer::Committed`], [`Answer::Pending`] or a failure.
    Wait {
        /// The step.
        step: Step,
        /// How long the daemon may wait with its answer.
        limit_ms: u32,
    },
    /// Takes what went wrong since the last call. The answer is [`Answer::Notices`].
    Notices,
    /// Asks for a step to load. The answer is [`Answer::Loadable`], [`Answer::Pending`], or [`Answer::Nothing`].
    Load(Load),
    /// Takes descriptors of a step that is loadable. The answer is [`Answer::Parts`].
    Open {
        /// Names the load.
        ticket: u64,
        /// The first part that is wanted.
        first: u32,
    },
    /// Says which extents of a load the process has verified. The answer is [`Answer::Done`].
    Verified {
        /// Names the load.
        ticket: u64,
        /// Rows of extents in the table.
        extents: Vec<u32>,
    },
    /// Says that an extent of a load does not have its hash, and ends the load. The answer is [`Answer::Done`].
    Corrupt {
        /// Names the load.
        ticket: u64,
        /// What people call the extent.
        name: String,
    },
    /// Ends a load: the process maps nothing of it any more. The answer is [`Answer::Done`].
    Release {
        /// Names the load.
        ticket: u64,
    },
    /// Lists the steps of a job. The answer is [`Answer::Steps`].
    Steps {
        /// The job.
        job: Job,
    },
    /// Removes a committed step. The answer is [`Answer::Done`].
    Remove {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
    },
    /// Asks what the daemon holds and does. The answer is [`Answer::Status`].
    Status,
    /// Gives back the memory of a job that no process maps. The answer is [`Answer::Freed`].
    Free {
        /// The job.
        job: Job,
        /// Also of steps that are not committed; they are lost.
        with_unsaved: bool,
    },
    /// Ends the member: it fills and maps nothing any more, though its process goes on. The answer is [`Answer::Done`].
    Leave,
    /// Reads extents of a step that is loaded by ranges ([`LoadSource::Ranges`]): at most [`MAX_WINDOW_EXTENTS`] of at most
    /// [`WINDOW_BYTES`], or one that is longer. The answer is [`Answer::Parts`] with one descriptor for all parts, or
    /// [`Answer::Pending`].
    ReadExtents {
        /// Names the load.
        ticket: u64,
        /// Rows of extents in the table.
        extents: Vec<u32>,
        /// How long the daemon may wait with its answer.
        limit_ms: u32,
    },
}

/// A rank of a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The job.
    pub job: Job,
    /// The launch.
    pub launch: LaunchId,
    /// How many ranks the launch has.
    pub world: u32,
    /// The rank, from 0.
    pub rank: u32,
}

/// See [`Request::Prepare`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepare {
    /// The rank.
    pub place: Place,
    /// Length of each segment.
    pub segment_bytes: u64,
    /// Length of one segment of each rank together, so that the launch gets memory for all of its ranks or for none.
    pub launch_bytes: u64,
    /// When rank 0 made the launch, by the host's clock that goes on from boot: an older launch never takes over from a newer one.
    pub born_ns: u64,
    /// What the launch was resumed from.
    pub resumed: Resumed,
    /// How many committed steps the daemon keeps; 0: it removes none.
    pub keep: u32,
    /// How long the daemon may wait for memory to become free.
    pub limit_ms: u32,
}

/// What a launch knew when it began to write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// The step that it loaded. `None` counts as before step 0.
    pub loaded: Option<Step>,
    /// The newest committed step that it saw when it loaded.
    pub newest_seen: Option<Step>,
    /// Remove the committed steps between the two.
    pub abandon_later: bool,
}

/// A hash over a sample of one replicated tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The tensor, as people read it.
    pub name: String,
    /// The hash.
    pub hash: [u8; 16],
}

/// See [`Request::Load`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The job.
    pub job: Job,
    /// The launch, and the how-manieth load of it this is: its ranks get the same step. `None`: the process is alone.
    pub launch: Option<(LaunchId, u32)>,
    /// The step; `None`: the resume point.
    pub step: Option<Step>,
    /// Take what is in the host's memory when the cluster does not say what is committed.
    pub offline: bool,
    /// Give out the table before anything else is read from the cluster: the process may want only a part of the step.
    pub table_first: bool,
    /// How long the daemon may wait with its answer.
    pub limit_ms: u32,
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Answer {
    /// It is done.
    Done,
    /// The request was refused or has failed.
    Failed(Failure),
    /// The segments that were made; a descriptor for writing comes with each.
    Prepared {
        /// Their ids.
        segments: Vec<SegmentId>,
    },
    /// The process is known.
    Attached {
        /// Its segments that are left.
        segments: Vec<SegmentId>,
    },
    /// The segment to fill.
    Fill {
        /// The segment.
        segment: SegmentId,
        /// Names the filling.
        fill: FillId,
    },
    /// Not yet.
    Pending(Pending),
    /// The step is committed.
    Committed {
        /// The save.
        save: SaveId,
        /// Things worth knowing, such as that the save began anew.
        notes: Vec<String>,
    },
    /// What went wrong.
    Notices(Vec<Notice>),
    /// A step can be loaded. The descriptor of its table comes with it.
    Loadable(Loadable),
    /// There is nothing to load.
    Nothing,
    /// Descriptors for reading, one for each part from `first` on; fewer when they do not fit into one message.
    Parts {
        /// The parts.
        parts: Vec<Part>,
    },
    /// The steps of a job.
    Steps(Vec<StepInfo>),
    /// What the daemon holds.
    Status(Status),
    /// How much memory was given back.
    Freed {
        /// Bytes.
        bytes: u64,
    },
    /// The step is skipped: a rank that allows it had no free segment.
    Skipped {
        /// Why, in words.
        what: String,
    },
}

/// A request that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// [`ErrorKind::wire_code`].
    pub code: u32,
    /// What happened, to what.
    pub message: String,
    /// What to do next; may be empty.
    pub hint: String,
}

impl Failure {
    /// A failure with a hint.
    pub fn new(kind: ErrorKind, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: kind.wire_code(), message: message.into(), hint: hint.into() }
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::from_wire_code(self.code)
    }
}

/// What is being waited for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// In words.
    pub what: String,
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes in all; 0 when nobody knows.
    pub total_bytes: u64,
}

/// Something that went wrong with a save, for the rank's next call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// The step.
    pub step: Step,
    /// What happened. `None`: a warning.
    pub failure: Option<Failure>,
    /// The warning.
    pub warning: String,
}

/// A step that can be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loadable {
    /// Names the load on this connection.
    pub ticket: u64,
    /// The step.
    pub step: Step,
    /// Length of the table.
    pub table_bytes: u64,
    /// How many parts there are.
    pub parts: u32,
    /// Where the bytes come from.
    pub source: LoadSource,
    /// Extents that other ranks verified in the same load of the launch: one bit for each row, the lowest first. Empty: none.
    pub verified: Vec<u8>,
    /// The newest committed step of the job.
    pub newest_committed: Option<Step>,
    /// The world of the launch that saved the step.
    pub world: u32,
    /// Why the step is loaded by ranges though all of it may be wanted; empty otherwise.
    pub why_by_ranges: String,
}

/// Where the bytes of a load come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadSource {
    /// Segments of the launch that staged it.
    Memory,
    /// The cluster: the whole step was read into the host's memory.
    Cluster,
    /// The cluster: extents are read when they are asked for ([`Request::ReadExtents`]).
    Ranges,
}

/// A file of which a range holds a range of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The shard, as the table numbers it.
    pub shard: u32,
    /// Where in the shard the part begins.
    pub shard_offset: u64,
    /// Where in the file it begins.
    pub file_offset: u64,
    /// Length of the part.
    pub len_bytes: u64,
    /// Length of the file that has memory.
    pub file_bytes: u64,
    /// The filling that the file must hold, if it is a segment: a reader compares it with the header after it has copied.
    pub fill: Option<FillId>,
}

/// One step of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepInfo {
    /// The step.
    pub step: Step,
    /// Whether the cluster has it.
    pub is_committed: bool,
    /// Whether the host's memory has it.
    pub is_in_memory: bool,
    /// Its bytes.
    pub len_bytes: u64,
}

/// What the daemon holds and does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The staging folder.
    pub instance: InstanceId,
    /// The limit on all segments.
    pub memory_bytes: u64,
    /// What all segments take.
    pub used_bytes: u64,
    /// The jobs.
    pub jobs: Vec<JobStatus>,
}

/// One job on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The job.
    pub job: Job,
    /// Its newest launch.
    pub launch: Option<LaunchId>,
    /// Processes that are connected.
    pub members: u32,
    /// What its segments take.
    pub segment_bytes: u64,
    /// Steps that are in memory or under way.
    pub steps: Vec<StepStatus>,
}

/// One step on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepStatus {
    /// The step.
    pub step: Step,
    /// Its state in one word.
    pub state: String,
    /// Its bytes.
    pub len_bytes: u64,
    /// Ranks that have staged it.
    pub staged: u32,
    /// Ranks of its launch.
    pub world: u32,
}

/// A message that cannot be sent or understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// It is too long.
    #[error("a message of {bytes} bytes is over the limit of {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It does not decode, or has bytes left over.
    #[error(
        "a message does not decode ({why}): daemon and trainer are of versions that do not go together"
    )]
    Body {
        /// The decoder's words.
        why: String,
    },
    /// Descriptors are missing, or there are more than announced.
    #[error("a message came with {found} descriptors, {expected} expected")]
    Descriptors {
        /// How many came.
        found: usize,
        /// How many were announced.
        expected: usize,
    },
}

/// The bytes of a message, without its frame.
pub fn to_bytes<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_stdvec(message)
        .map_err(|error| MessageError::Body { why: error.to_string() })?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(MessageError::TooLong { bytes: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes a message; every byte must be used.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(MessageError::Body { why: format!("{} bytes left over", rest.len()) }),
        Err(error) => Err(MessageError::Body { why: error.to_string() }),
    }
}
