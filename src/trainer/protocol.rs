//! The messages between trainers and the staging daemon of their host (docs/staging.md).
//!
//! A connection begins with [`StagingHello`] and [`StagingHelloAnswer`], whose encoding never
//! changes. Then the trainer sends one request at a time and the daemon answers each. Daemon and
//! trainer are upgraded independently: the daemon speaks every version from [`OLDEST`] to
//! [`VERSION`], and a trainer names the range that it speaks. New variants and fields are only
//! added after the last one, with a new version.
//!
//! A frame consists of the message's length (4 bytes, little-endian), the number of its descriptors
//! (1 byte), and the message in postcard. Descriptors accompany the first byte of their frame.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::format::step_labels::LabelChange;
use crate::id::{
    ClusterId, FillId, InstanceId, Job, Label, LaunchId, MemberId, SaveId, SegmentId, Step,
};
use crate::kind::ErrorKind;

/// The newest version of the protocol.
pub const VERSION: u16 = 4;
/// The oldest version that this release speaks, as a daemon and as a trainer.
pub const OLDEST: u16 = 1;
/// The first version in which a launch can run on several hosts.
pub const HOSTS_SINCE: u16 = 2;
/// The first version in which steps have labels.
pub const LABELS_SINCE: u16 = 3;
/// The first version in which a process can report that it has no memory for another segment.
pub const NOT_MADE_SINCE: u16 = 4;
/// Maximum number of bytes of the labels in one answer. Older steps are left out.
pub const MAX_LABEL_BYTES: usize = 128 << 10;
/// Maximum length of a message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 256 << 10;
/// Maximum number of descriptors in one message.
pub const MAX_DESCRIPTORS: usize = 64;
/// Maximum total length of the extents of one [`Request::ReadExtents`], in bytes. A single extent
/// may be longer.
pub const WINDOW_BYTES: u64 = 32 << 20;
/// Maximum number of extents in one [`Request::ReadExtents`].
pub const MAX_WINDOW_EXTENTS: usize = 512;
/// Maximum number of ranks of one launch on one host. Each rank has a connection of its own.
pub const MAX_WORLD: u32 = 192;

/// The first message of a trainer. A descriptor of the trainer's own process (a pidfd) accompanies
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagingHello {
    /// The oldest version that the trainer speaks.
    pub oldest: u16,
    /// The newest version that the trainer speaks.
    pub newest: u16,
    /// A random id that the process drew when it made its checkpointer. All its connections use the
    /// same id.
    pub member: MemberId,
    /// The process id, for messages to people.
    pub pid: u32,
    /// The content of the token file; empty if the daemon requires none.
    pub token: Vec<u8>,
}

/// The daemon's answer to [`StagingHello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagingHelloAnswer {
    /// The version that both sides speak from now on; 0 if they have none in common.
    pub version: u16,
    /// The id of the staging folder.
    pub instance: InstanceId,
    /// The id of the cluster that the daemon saves to.
    pub cluster: ClusterId,
    /// The daemon's process id, for messages to people.
    pub pid: u32,
    /// The reason why the connection is refused; empty if it is accepted.
    pub refused: String,
}

/// A request of a trainer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Request {
    /// Makes segments for a rank and makes the launch the newest of its job. The answer is
    /// [`Answer::Prepared`] or [`Answer::Pending`].
    Prepare(Prepare),
    /// Identifies the process again on a new connection. The answer is [`Answer::Attached`].
    Attach(Place),
    /// Asks for a segment to fill with a step. The answer is [`Answer::Fill`], [`Answer::Pending`]
    /// or [`Answer::Skipped`], or [`Answer::Prepared`] with another segment, after which the
    /// trainer asks again.
    Fill {
        /// The step.
        step: Step,
        /// Skip the step on all ranks, immediately, if no rank has begun to fill it and this rank
        /// has no free segment.
        or_skip: bool,
        /// How long the daemon may wait for a free segment, in milliseconds.
        limit_ms: u32,
    },
    /// Reports that the rank's part of a step is in its segment. The answer is [`Answer::Done`].
    Staged {
        /// The step.
        step: Step,
        /// The segment.
        segment: SegmentId,
        /// The filling, as named in [`Answer::Fill`].
        fill: FillId,
        /// Hashes over samples of replicated tensors; all ranks hash the same samples.
        samples: Vec<Sample>,
    },
    /// Abandons the filling of a step. The answer is [`Answer::Done`].
    GiveUp {
        /// The step.
        step: Step,
        /// The filling.
        fill: FillId,
        /// The reason, for the other ranks.
        why: String,
    },
    /// Waits for the end of a save. The answer is [`Answer::Committed`], [`Answer::Pending`] or a
    /// failure.
    Wait {
        /// The step.
        step: Step,
        /// How long the daemon may delay its answer, in milliseconds.
        limit_ms: u32,
    },
    /// Takes the notices that arose since the last call. The answer is [`Answer::Notices`].
    Notices,
    /// Asks for a step to load. The answer is [`Answer::Loadable`], [`Answer::Pending`], or
    /// [`Answer::Nothing`].
    Load(Load),
    /// Takes descriptors of the parts of a loadable step. The answer is [`Answer::Parts`].
    Open {
        /// The ticket of the load.
        ticket: u64,
        /// The number of the first part to return.
        first: u32,
    },
    /// Reports which extents of a load the process has verified. The answer is [`Answer::Done`].
    Verified {
        /// The ticket of the load.
        ticket: u64,
        /// Row numbers of the extents in the table.
        extents: Vec<u32>,
    },
    /// Reports that an extent of a load does not match its hash, and ends the load. The answer is
    /// [`Answer::Done`].
    Corrupt {
        /// The ticket of the load.
        ticket: u64,
        /// The name of the tensor that the extent belongs to.
        name: String,
    },
    /// Ends a load. The process no longer maps any part of it. The answer is [`Answer::Done`].
    Release {
        /// The ticket of the load.
        ticket: u64,
    },
    /// Lists the committed steps of a job. The answer is [`Answer::Steps`].
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
    /// Asks for the daemon's status. The answer is [`Answer::Status`].
    Status,
    /// Frees the memory of a job that no process maps. The answer is [`Answer::Freed`].
    Free {
        /// The job.
        job: Job,
        /// Also free steps that are not committed. They are lost.
        with_unsaved: bool,
    },
    /// Ends the membership of the process, which may keep running but no longer fills or maps any
    /// segment. The answer is [`Answer::Done`].
    Leave,
    /// Reads extents of a step that is loaded by ranges ([`LoadSource::Ranges`]): at most
    /// [`MAX_WINDOW_EXTENTS`] extents of together at most [`WINDOW_BYTES`], or a single longer one.
    /// The answer is [`Answer::Parts`] with one descriptor for all parts, or [`Answer::Pending`].
    ReadExtents {
        /// The ticket of the load.
        ticket: u64,
        /// Row numbers of the extents in the table.
        extents: Vec<u32>,
        /// How long the daemon may delay its answer, in milliseconds.
        limit_ms: u32,
    },
    /// Does the same as [`Request::Prepare`] for a rank of a launch that runs on several hosts. The
    /// numbers and lengths in the request are those of this host. Since version 2.
    PrepareOnHost(Prepare, Hosts),
    /// Does the same as [`Request::Load`], but chooses only among the committed steps
    /// ([`LoadFrom::Cluster`]). Since version 2.
    LoadFromCluster(Load),
    /// Adds a label to a committed step, or removes one. The answer is [`Answer::Done`]. Since
    /// version 3.
    LabelStep {
        /// The job.
        job: Job,
        /// The step.
        step: Step,
        /// The label.
        label: Label,
        /// The change.
        change: LabelChange,
    },
    /// Lists the labels of a job's committed steps. The answer is [`Answer::Labels`]. Since version 3.
    ListLabels {
        /// The job.
        job: Job,
    },
    /// Reports that the process has no memory for a segment of an [`Answer::Prepared`]. The rank is
    /// ordered to make no other until it prepares again. The answer is [`Answer::Done`]. Since
    /// version 4.
    NotMade {
        /// The segment.
        segment: SegmentId,
        /// The reason, for the log.
        why: String,
    },
}

/// The hosts of a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hosts {
    /// The number of this host, from 0.
    pub own: u32,
    /// The names of all hosts, for messages to people, in the order of their numbers.
    pub names: Vec<String>,
}

/// A rank of a launch. If the launch runs on several hosts, `world` and `rank` count the ranks of
/// this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The job.
    pub job: Job,
    /// The launch.
    pub launch: LaunchId,
    /// Number of ranks of the launch.
    pub world: u32,
    /// The rank's number, from 0.
    pub rank: u32,
}

/// The arguments of [`Request::Prepare`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepare {
    /// The rank.
    pub place: Place,
    /// Length of each segment, in bytes.
    pub segment_bytes: u64,
    /// Sum of the length of one segment over all ranks of the launch on this host, in bytes. Either
    /// all these ranks get memory, or none does.
    pub launch_bytes: u64,
    /// When rank 0 made the launch, in nanoseconds since the host's boot. An older launch never
    /// replaces a newer one.
    pub born_ns: u64,
    /// The resume point of the launch.
    pub resumed: Resumed,
    /// How many committed steps the daemon keeps; 0 means that it removes none.
    pub keep: u32,
    /// How long the daemon may wait for free memory, in milliseconds.
    pub limit_ms: u32,
}

/// The resume point of a launch: the step that it loaded, the newest committed step that it saw,
/// and whether it abandons later steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// The step that the launch loaded. `None` counts as before step 0.
    pub loaded: Option<Step>,
    /// The newest committed step that the launch saw when it loaded.
    pub newest_seen: Option<Step>,
    /// Whether to remove the committed steps later than `loaded`, and to drop the later steps that
    /// older launches have staged on this host. If false, the launch may fill no step while there
    /// are such later steps.
    pub abandon_later: bool,
}

/// A hash over a sample of one replicated tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The name of the tensor.
    pub name: String,
    /// The hash.
    pub hash: [u8; 16],
}

/// The places that a load may read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadFrom {
    /// The host's memory, and the cluster.
    Anywhere,
    /// The committed saves alone, so that ranks on several hosts load the same one. A load by ranges
    /// takes from this host's memory the bytes that it still has of that save.
    Cluster,
}

/// The arguments of [`Request::Load`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The job.
    pub job: Job,
    /// The launch, and the number of this load within the launch. All ranks that give the same pair
    /// get the same step. `None` if the process loads on its own.
    pub launch: Option<(LaunchId, u32)>,
    /// The step to load; `None` for the resume point.
    pub step: Option<Step>,
    /// Accept a step from the host's memory if the cluster cannot say which steps are committed.
    pub offline: bool,
    /// Return the table before anything else is read from the cluster. The process may want only a
    /// part of the step.
    pub table_first: bool,
    /// How long the daemon may delay its answer, in milliseconds.
    pub limit_ms: u32,
}

/// An answer of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Answer {
    /// The request is done.
    Done,
    /// The request was refused or failed.
    Failed(Failure),
    /// The segments that were made. A descriptor for writing accompanies each.
    Prepared {
        /// The ids of the segments.
        segments: Vec<SegmentId>,
    },
    /// The daemon knows the process.
    Attached {
        /// The segments that the process still has.
        segments: Vec<SegmentId>,
    },
    /// The segment that the rank is to fill.
    Fill {
        /// The segment.
        segment: SegmentId,
        /// The id of the filling.
        fill: FillId,
    },
    /// The request is still in progress; the trainer asks again.
    Pending(Pending),
    /// The step is committed.
    Committed {
        /// The id of the save.
        save: SaveId,
        /// Remarks for people, such as that the save was restarted.
        notes: Vec<String>,
    },
    /// The notices that arose since the last call.
    Notices(Vec<Notice>),
    /// A step can be loaded. The descriptor of its table accompanies the answer.
    Loadable(Loadable),
    /// The job has no step to load.
    Nothing,
    /// Descriptors for reading: after [`Request::Open`] one for each part from `first` on, or fewer
    /// if they do not fit into one message; after [`Request::ReadExtents`] one for all parts.
    Parts {
        /// The parts.
        parts: Vec<Part>,
    },
    /// The committed steps of a job.
    Steps(Vec<StepInfo>),
    /// The daemon's status.
    Status(Status),
    /// The memory was freed.
    Freed {
        /// Amount of freed memory, in bytes.
        bytes: u64,
    },
    /// The step is skipped, because a rank that allows this had no free segment.
    Skipped {
        /// The reason, for people.
        what: String,
    },
    /// The labelled steps of a job, in order, with their labels.
    Labels(Vec<(Step, Vec<Label>)>),
}

/// The description of a failure as a trainer receives it: its kind, a message and advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The kind of the failure, as [`ErrorKind::wire_code`] encodes it.
    pub code: u32,
    /// A sentence that says what happened, and to what.
    pub message: String,
    /// Advice on what to do next; may be empty.
    pub hint: String,
}

impl Failure {
    /// Creates a failure with a hint.
    pub fn new(kind: ErrorKind, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: kind.wire_code(), message: message.into(), hint: hint.into() }
    }

    /// Returns the kind of the failure.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::from_wire_code(self.code)
    }
}

/// The progress of a request that is not done yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// The current activity, for people.
    pub what: String,
    /// Bytes processed so far.
    pub done_bytes: u64,
    /// Total number of bytes; 0 if unknown.
    pub total_bytes: u64,
}

/// A failure of a step, or a warning about it. It waits in the daemon until the rank takes it by
/// [`Request::Notices`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// The step.
    pub step: Step,
    /// The failure; `None` if the notice is a warning.
    pub failure: Option<Failure>,
    /// The warning; empty if the notice is a failure.
    pub warning: String,
}

/// A step that can be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loadable {
    /// The id of the load on this connection.
    pub ticket: u64,
    /// The step.
    pub step: Step,
    /// Length of the table, in bytes.
    pub table_bytes: u64,
    /// Number of parts. In a load by ranges these are the parts of the step that are in this host's
    /// memory.
    pub parts: u32,
    /// The source of the bytes.
    pub source: LoadSource,
    /// The extents that other ranks verified in the same load of the launch, as a bit map with one
    /// bit per row, lowest bit first. Empty if there are none.
    pub verified: Vec<u8>,
    /// The newest committed step of the job.
    pub newest_committed: Option<Step>,
    /// Number of ranks of the launch that staged the step; 0 unless `source` is
    /// [`LoadSource::Memory`].
    pub world: u32,
    /// The reason why the step is loaded by ranges although all of it may be wanted; empty
    /// otherwise.
    pub why_by_ranges: String,
}

/// The source of the bytes of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadSource {
    /// The segments of the launch that staged the step.
    Memory,
    /// The cluster. The whole step was read into the host's memory.
    Cluster,
    /// The cluster. Extents that are in no part are read on request ([`Request::ReadExtents`]).
    Ranges,
}

/// A range of a shard, and the range of a file that holds its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The number of the shard in the table.
    pub shard: u32,
    /// Offset of the part in the shard, in bytes.
    pub shard_offset: u64,
    /// Offset of the part in the file, in bytes.
    pub file_offset: u64,
    /// Length of the part, in bytes.
    pub len_bytes: u64,
    /// Length of the file's prefix that has memory, in bytes.
    pub file_bytes: u64,
    /// The filling that the file must hold, if it is a segment. A reader compares this id with that
    /// in the segment's header after it has copied the bytes.
    pub fill: Option<FillId>,
}

/// A committed step of a job, as the daemon lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepInfo {
    /// The step.
    pub step: Step,
    /// Whether the step is committed in the cluster.
    pub is_committed: bool,
    /// Whether the step is in the host's memory.
    pub is_in_memory: bool,
    /// Length of the step, in bytes.
    pub len_bytes: u64,
}

/// The status of a staging daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The id of the staging folder.
    pub instance: InstanceId,
    /// Memory limit for all segments and all shards read from the cluster together, in bytes.
    pub memory_bytes: u64,
    /// Memory that all segments and all shards read from the cluster use, in bytes.
    pub used_bytes: u64,
    /// The jobs on this host.
    pub jobs: Vec<JobStatus>,
}

/// The status of a job on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The job.
    pub job: Job,
    /// The newest launch of the job.
    pub launch: Option<LaunchId>,
    /// Number of living processes that have joined a launch of the job.
    pub members: u32,
    /// Memory that the job's segments use, in bytes.
    pub segment_bytes: u64,
    /// The steps that are in memory or in progress.
    pub steps: Vec<StepStatus>,
}

/// The status of a step on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepStatus {
    /// The step.
    pub step: Step,
    /// The state of the step, in one word, or the hosts that its save waits for.
    pub state: String,
    /// Length of the step, in bytes.
    pub len_bytes: u64,
    /// Number of ranks that have staged the step.
    pub staged: u32,
    /// Number of ranks of the launch.
    pub world: u32,
}

/// The reason why a message cannot be sent or decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The message is too long.
    #[error("a message of {bytes} bytes is over the limit of {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Length of the message, in bytes.
        bytes: usize,
    },
    /// The message does not decode, or bytes are left over after it.
    #[error(
        "a message does not decode ({why}): daemon and trainer are of versions that do not go together"
    )]
    Body {
        /// The decoder's error.
        why: String,
    },
    /// The number of descriptors differs from the announced one, or exceeds the limit.
    #[error("a message came with {found} descriptors, {expected} expected")]
    Descriptors {
        /// Number of file descriptors that came with the message.
        found: usize,
        /// Number that was announced, or that is allowed.
        expected: usize,
    },
}

/// Encodes a message, without its frame. Fails if the result is over [`MAX_MESSAGE_BYTES`].
pub fn to_bytes<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_stdvec(message)
        .map_err(|error| MessageError::Body { why: error.to_string() })?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(MessageError::TooLong { bytes: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes a message. Fails if the bytes do not decode or are not all used.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(MessageError::Body { why: format!("{} bytes left over", rest.len()) }),
        Err(error) => Err(MessageError::Body { why: error.to_string() }),
    }
}
