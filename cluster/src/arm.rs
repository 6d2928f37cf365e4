//! The arms that experiments compare.

use serde::{Deserialize, Serialize};

/// An arm: one of the alternatives that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// Archiving by the pipelined chain.
    Chain,
    /// Archiving by one coder that fetches every block, even those it has: the paper's baseline.
    NaiveStar,
    /// Archiving by one coder on a node with two blocks.
    BestStar,
    /// Archiving by coders that rotate from range to range.
    StripedStar,
    /// As the naive star, with each shard's coder drawn at random.
    RandomStar,
    /// The same bytes in SeaweedFS, archived by its `ec.encode`.
    #[serde(rename = "seaweedfs")]
    SeaweedFs,
    /// The transfers of a chain over the daemons' transport, between processes that only receive
    /// and send.
    LineQuic,
    /// The disk work of a chain's nodes without network and coding: each process writes, syncs and
    /// proves a piece.
    LineDisk,
    /// A stream of a checkpoint's bytes over one link, by the daemons' transport.
    LinkQuic,
    /// The same stream with a window of 4 MiB.
    LinkQuicWide,
    /// The same stream with a window of 4 MiB and BBR.
    LinkQuicBbr,
    /// The same stream over TCP.
    LinkTcp,
    /// The same stream over TLS 1.3 on TCP.
    LinkTcpTls,
    /// Restoring from replicas: a plain parallel read of k blocks.
    RestoreReplicas,
    /// Restoring from pieces with all nodes up.
    RestorePieces,
    /// Restoring from pieces, with one node stopped (SIGSTOP) once bytes flow.
    RestoreStopped,
    /// Restoring from pieces, with 1 node killed since the archiving.
    #[serde(rename = "restore-missing-1")]
    RestoreMissing1,
    /// Restoring from pieces, with 2 nodes killed.
    #[serde(rename = "restore-missing-2")]
    RestoreMissing2,
    /// Restoring from pieces, with 3 nodes killed.
    #[serde(rename = "restore-missing-3")]
    RestoreMissing3,
    /// Restoring from pieces, with 4 nodes killed.
    #[serde(rename = "restore-missing-4")]
    RestoreMissing4,
    /// Restoring from pieces, with 5 nodes killed.
    #[serde(rename = "restore-missing-5")]
    RestoreMissing5,
    /// Making one lost piece again along a chain.
    RepairChain,
    /// Making one lost piece again on its node, which receives all sources.
    RepairStar,
    /// Copying one lost replica from the other one.
    RepairCopy,
    /// Making all pieces of a lost node on the other nodes.
    RepairNode,
    /// Saving while nothing is repaired.
    Save,
    /// Saving beside an automatic repair.
    SaveBesideAutomatic,
    /// Saving beside a person's repair, which has no limit.
    SaveBesideManual,
    /// Restoring from pieces while nothing is repaired.
    Restore,
    /// Restoring beside an automatic repair.
    RestoreBesideAutomatic,
    /// Restoring beside a person's repair.
    RestoreBesideManual,
}

impl Arm {
    /// Returns the name of the arm in files and results.
    pub fn word(self) -> &'static str {
        match self {
            Arm::Chain => "chain",
            Arm::NaiveStar => "naive-star",
            Arm::BestStar => "best-star",
            Arm::StripedStar => "striped-star",
            Arm::RandomStar => "random-star",
            Arm::SeaweedFs => "seaweedfs",
            Arm::LineQuic => "line-quic",
            Arm::LineDisk => "line-disk",
            Arm::LinkQuic => "link-quic",
            Arm::LinkQuicWide => "link-quic-wide",
            Arm::LinkQuicBbr => "link-quic-bbr",
            Arm::LinkTcp => "link-tcp",
            Arm::LinkTcpTls => "link-tcp-tls",
            Arm::RestoreReplicas => "restore-replicas",
            Arm::RestorePieces => "restore-pieces",
            Arm::RestoreStopped => "restore-stopped",
            Arm::RestoreMissing1 => "restore-missing-1",
            Arm::RestoreMissing2 => "restore-missing-2",
            Arm::RestoreMissing3 => "restore-missing-3",
            Arm::RestoreMissing4 => "restore-missing-4",
            Arm::RestoreMissing5 => "restore-missing-5",
            Arm::RepairChain => "repair-chain",
            Arm::RepairStar => "repair-star",
            Arm::RepairCopy => "repair-copy",
            Arm::RepairNode => "repair-node",
            Arm::Save => "save",
            Arm::SaveBesideAutomatic => "save-beside-automatic",
            Arm::SaveBesideManual => "save-beside-manual",
            Arm::Restore => "restore",
            Arm::RestoreBesideAutomatic => "restore-beside-automatic",
            Arm::RestoreBesideManual => "restore-beside-manual",
        }
    }

    /// Returns the kind of work of the arm.
    pub fn kind(self) -> Kind {
        let beside = |work, repair| Kind::Beside(Beside { work, repair });
        let transfer = |over, is_line| Kind::Transfer(Transfer { over, is_line });
        match self {
            Arm::Chain => Kind::Archive("chain"),
            Arm::NaiveStar => Kind::Archive("naive-star"),
            Arm::BestStar => Kind::Archive("star"),
            Arm::StripedStar => Kind::Archive("striped-star"),
            Arm::RandomStar => Kind::Archive("random-star"),
            Arm::SeaweedFs => Kind::SeaweedFs,
            Arm::LineQuic => transfer("quic", true),
            Arm::LineDisk => transfer("disk", true),
            Arm::LinkQuic => transfer("quic", false),
            Arm::LinkQuicWide => transfer("quic-wide", false),
            Arm::LinkQuicBbr => transfer("quic-bbr", false),
            Arm::LinkTcp => transfer("tcp", false),
            Arm::LinkTcpTls => transfer("tcp-tls", false),
            Arm::RestoreReplicas | Arm::RestorePieces | Arm::RestoreStopped => Kind::Restore(0),
            Arm::RestoreMissing1 => Kind::Restore(1),
            Arm::RestoreMissing2 => Kind::Restore(2),
            Arm::RestoreMissing3 => Kind::Restore(3),
            Arm::RestoreMissing4 => Kind::Restore(4),
            Arm::RestoreMissing5 => Kind::Restore(5),
            Arm::RepairChain => Kind::Repair(RepairOf::Piece("chain")),
            Arm::RepairStar => Kind::Repair(RepairOf::Piece("star")),
            Arm::RepairCopy => Kind::Repair(RepairOf::Replica),
            Arm::RepairNode => Kind::Repair(RepairOf::Node),
            Arm::Save => beside(Work::Save, ConcurrentRepair::None),
            Arm::SaveBesideAutomatic => beside(Work::Save, ConcurrentRepair::Automatic),
            Arm::SaveBesideManual => beside(Work::Save, ConcurrentRepair::Manual),
            Arm::Restore => beside(Work::Restore, ConcurrentRepair::None),
            Arm::RestoreBesideAutomatic => beside(Work::Restore, ConcurrentRepair::Automatic),
            Arm::RestoreBesideManual => beside(Work::Restore, ConcurrentRepair::Manual),
        }
    }

    /// Returns the number of nodes that are killed before the arm is run.
    pub fn missing(self) -> usize {
        match self.kind() {
            Kind::Restore(missing) => missing,
            _ => 0,
        }
    }
}

/// The kind of work of an arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A checkpoint is saved, and archived by this plan of `rapidraid archive --plan`.
    Archive(&'static str),
    /// A checkpoint is restored with this number of nodes killed.
    Restore(usize),
    /// A lost part of a checkpoint is made again.
    Repair(RepairOf),
    /// A checkpoint is saved or restored, alone or beside a repair of another one.
    Beside(Beside),
    /// Processes that only receive and send, or only write, without daemons.
    Transfer(Transfer),
    /// SeaweedFS beside the daemons.
    SeaweedFs,
}

/// The part that is lost and made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairOf {
    /// A piece, by this plan of `rapidraid repair --plan`.
    Piece(&'static str),
    /// A replica.
    Replica,
    /// All pieces of a node, which is lost for good.
    Node,
}

/// The work that is measured beside a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A save.
    Save,
    /// A restore from pieces.
    Restore,
}

/// A save or a restore, and the repair of another checkpoint that runs meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beside {
    /// The work that is measured.
    pub work: Work,
    /// The repair.
    pub repair: ConcurrentRepair,
}

/// The repair that runs while something else is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConcurrentRepair {
    /// Nothing is repaired.
    None,
    /// The catalogue server repairs, at a share of the links' rate (`repair.share`).
    Automatic,
    /// A person repairs, and the repair has no limit.
    Manual,
}

/// A transfer by processes that only receive and send, or only write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The value of `pump --over`.
    pub over: &'static str,
    /// Whether each of the code's nodes sends to the next; otherwise the first sends to the second.
    pub is_line: bool,
}
