//! Conversions of this program's errors to the error that a caller receives, with the kind of each.

use super::background::error::BackgroundError;
use super::catalogue_server::error::CatalogueServerError;
use super::gateway::error::GatewayError;
use super::rpc::error::RpcError;
use super::storage::error::StorageError;
use crate::catalogue::CatalogueError;
use crate::clock::Elapsed;
use crate::format::FormatError;
use crate::format::geometry::GeometryError;
use crate::kind::ErrorKind;
use crate::net::NetError;
use crate::net::call::CallError;
use crate::pipeline::coordinator::CoordinatorError;
use crate::pipeline::executor::RunError;
use crate::pipeline::read::ReadError;
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
    CoordinatorError,
    RecordsError,
    RunError,
    StoreError,
    WireError,
    ReadError,
    StorageError,
    CatalogueServerError,
    GatewayError,
    BackgroundError,
    RpcError,
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

impl StorageError {
    fn kind(&self) -> ErrorKind {
        use StorageError as E;
        match self {
            E::SaveRemoved { .. }
            | E::SaveRemovedMeanwhile { .. }
            | E::GenerationOver { .. }
            | E::StripeArchived { .. }
            | E::CatalogueOutdated { .. }
            | E::StripeNotArchived { .. } => ErrorKind::Fenced,
            E::EpochNotBegun { .. }
            | E::MemoryShareTooSmall(_)
            | E::ReplicaLengthInvalid { .. }
            | E::BlockLengthInvalid { .. }
            | E::NoSuchBlock { .. }
            | E::TrailerMissing
            | E::RangePastEnd { .. }
            | E::RangeOverBlock { .. }
            | E::RecordOfOtherStripe { .. }
            | E::LeavesMismatch { .. }
            | E::NoSuchShard { .. } => ErrorKind::Invalid,
            E::NoMemory { .. }
            | E::TooManyExaminations { .. }
            | E::TooManyForwards { .. }
            | E::FileChanging { .. }
            | E::PurgeRunning { .. } => ErrorKind::Busy,
            E::ShardCommitted { .. }
            | E::ForeignTombstone
            | E::ForeignMark
            | E::ForeignReceipt
            | E::RecordNotWritable
            | E::SaveMarked { .. }
            | E::NoTombstone { .. } => ErrorKind::Denied,
            E::ShardGone { .. } | E::NoReceipt { .. } => ErrorKind::NotFound,
            E::ReplicaLengthMismatch { .. }
            | E::FingerprintMismatch { .. }
            | E::ReceiptMismatch { .. }
            | E::PieceMismatch { .. } => ErrorKind::Corrupt,
            // Not `Busy`: the disk does not become free while the client waits, and another node
            // can take the block. Not `Invalid`: the client would end its save.
            E::HighWaterReached { .. } | E::NodeStoresNoData { .. } => ErrorKind::Unavailable,
            E::ForwardUnanswered(_) | E::ForwardLate { .. } => ErrorKind::Timeout,
            E::BlockIncomplete | E::TaskLost { .. } => ErrorKind::Internal,
        }
    }
}

impl CatalogueServerError {
    fn kind(&self) -> ErrorKind {
        use CatalogueServerError as E;
        match self {
            E::NodeNotRegistered { .. } => ErrorKind::NotFound,
            E::SuccessorOfItself { .. }
            | E::SuccessorStoresNothing { .. }
            | E::MaintenanceTooLong => ErrorKind::Invalid,
            E::RebuildUnderWay
            | E::CatalogueServed { .. }
            | E::CatalogueServedElsewhere
            | E::ChangeUnderWay
            | E::CatalogueServedHere
            | E::MissingWithoutNode { .. }
            | E::RingTooSmall { .. }
            | E::TooManySuccessors { .. }
            | E::TooManyRingChanges { .. } => ErrorKind::Exists,
            E::EpochRefused { .. }
            | E::OtherCatalogueKnown { .. }
            | E::OlderCatalogueNotServed { .. } => ErrorKind::Fenced,
            E::CatalogueNotServed
            | E::StoppingDuringRebuild
            | E::NoKnownStorageNode
            | E::TooFewNodesReached { .. }
            | E::CommitMarkDamaged { .. }
            | E::HoldersUnknown { .. }
            | E::ShardStateUncertain { .. }
            | E::TooFewCommitMarks { .. }
            | E::StoppingDuringMove
            | E::StoppingDuringTransfer
            | E::CatalogueJustMoved
            | E::MajorityNotReached { .. }
            | E::TransferOutcomeUnknown { .. }
            | E::CatalogueReadOnly
            | E::TooFewCaughtUp { .. }
            | E::SuccessorAway { .. }
            | E::SuccessorLeaving { .. }
            | E::StepNotSurveyed { .. } => ErrorKind::Unavailable,
            E::CatalogueNotNoted { .. }
            | E::NodeLive { .. }
            | E::SaveOpen { .. }
            | E::MarkUnknown { .. }
            | E::NodeChanging { .. } => ErrorKind::Busy,
            E::StepsIncomplete { .. } => ErrorKind::Lost,
            E::DatabaseNotCreated { .. } => ErrorKind::Io,
        }
    }
}

impl GatewayError {
    fn kind(&self) -> ErrorKind {
        use GatewayError as E;
        match self {
            E::NoLiveStorageNode
            | E::TooFewStorageNodes { .. }
            | E::CommitInterrupted
            | E::RingMarksMissing { .. }
            | E::MajorityMarksMissing { .. }
            | E::RemovalInterrupted
            | E::TombstonesMissing { .. }
            | E::ArchivingInterrupted
            | E::RepairInterrupted
            | E::ReadInterrupted
            | E::NoQuorum { .. }
            | E::NoKnownStorageNode
            | E::RingNodeUnregistered { .. }
            | E::MarkDamaged { .. }
            | E::RemovalsUnderWay
            | E::TooManyCheckpoints
            | E::TooManyShards => ErrorKind::Unavailable,
            E::StepBeingSaved { .. } | E::StepCommitted { .. } | E::SaveDecided { .. } => {
                ErrorKind::Exists
            }
            E::SaveOver { .. }
            | E::LaunchReplaced { .. }
            | E::LaunchUnregistered { .. }
            | E::LaunchOvertaken { .. }
            | E::LeaseOver
            | E::SaveNotOpen { .. }
            | E::SaveAbortedOrReplaced { .. }
            | E::RecordConflict { .. }
            | E::StepLabelledLate { .. }
            | E::StepSavedAnew { .. } => ErrorKind::Fenced,
            E::StepNotCommitted { .. }
            | E::NoStepCommitted { .. }
            | E::StepNotMarked { .. }
            | E::SaveNotCommitted { .. } => ErrorKind::NotFound,
            E::RootInconsistent { .. }
            | E::ShardsIncomplete { .. }
            | E::ShardCountDiffers { .. }
            | E::NoShards { .. }
            | E::ShardNamesEqual { .. }
            | E::WriterUnfit { .. }
            | E::TooManyLabels { .. }
            | E::TooManySaves { .. } => ErrorKind::Invalid,
            E::TooManyRemovals { .. } => ErrorKind::Busy,
            E::RootNotEncodable => ErrorKind::Internal,
            E::EvidenceIncomplete { .. } => ErrorKind::Lost,
        }
    }
}

impl BackgroundError {
    fn kind(&self) -> ErrorKind {
        use BackgroundError as E;
        match self {
            E::NodeNotRegistered { .. }
            | E::ProgramOutdated { .. }
            | E::EpochOver { .. }
            | E::TooFewWitnesses { .. }
            | E::PolicyNotApplied
            | E::NotRepairing => ErrorKind::Unavailable,
            E::RemovalForgotten => ErrorKind::Busy,
            E::TooManyDamagedMarks { .. } => ErrorKind::Corrupt,
        }
    }
}

impl RpcError {
    fn kind(&self) -> ErrorKind {
        use RpcError as E;
        match self {
            E::RequestTooLong { .. } => ErrorKind::Invalid,
            E::CallerNotNode { .. } => ErrorKind::Denied,
            E::NoHandler { .. } => ErrorKind::Internal,
        }
    }
}
