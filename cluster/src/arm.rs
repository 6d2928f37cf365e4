//! What experiments compare.

use serde::{Deserialize, Serialize};

/// One of the things that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// Archiving by the pipelined chain.
    Chain,
    /// Archiving by one coder that fetches every block, whatever it has: the paper's baseline.
    NaiveStar,
    /// Archiving by one coder on a node with two blocks.
    BestStar,
    /// Archiving by coders that change from range to range.
    StripedStar,
    /// As the naive star, each shard's coder drawn at random.
    RandomStar,
    /// The same bytes in SeaweedFS, archived by its `ec.encode`.
    #[serde(rename = "seaweedfs")]
    SeaweedFs,
    /// The transfers of a chain, of processes that only receive and send: the daemons' transport.
    LineQuic,
    /// What the nodes of a chain do with their disks, of processes that receive, send and code nothing.
    LineDisk,
    /// One stream of a checkpoint's bytes over one link: the daemons' transport.
    LinkQuic,
    /// The same with a window of 4 MiB.
    LinkQuicWide,
    /// The same, wide, with BBR.
    LinkQuicBbr,
    /// The same by TCP.
    LinkTcp,
    /// The same by TLS 1.3 over TCP.
    LinkTcpTls,
    /// Restoring from replicas: a plain parallel read of k blocks.
    RestoreReplicas,
    /// Restoring from pieces, all nodes up.
    RestorePieces,
    /// Restoring from pieces, one node stopped (SIGSTOP) once bytes flow.
    RestoreStopped,
    /// Restoring from pieces with 1 node killed since the archiving.
    #[serde(rename = "restore-missing-1")]
    RestoreMissing1,
    /// The same with 2.
    #[serde(rename = "restore-missing-2")]
    RestoreMissing2,
    /// The same with 3.
    #[serde(rename = "restore-missing-3")]
    RestoreMissing3,
    /// The same with 4.
    #[serde(rename = "restore-missing-4")]
    RestoreMissing4,
    /// The same with 5.
    #[serde(rename = "restore-missing-5")]
    RestoreMissing5,
}

impl Arm {
    /// As it is written in files and results.
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
        }
    }

    /// What playing it takes.
    pub fn kind(self) -> Kind {
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
        }
    }

    /// How many nodes are killed before it.
    pub fn missing(self) -> usize {
        match self.kind() {
            Kind::Restore(missing) => missing,
            _ => 0,
        }
    }
}

/// What playing an arm takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A checkpoint that is saved and archived, by this word of `rapidraid archive --plan`.
    Archive(&'static str),
    /// A checkpoint that is read back, with so many nodes killed.
    Restore(usize),
    /// Processes that only receive and send, or only write.
    Transfer(Transfer),
    /// SeaweedFS beside the daemons.
    SeaweedFs,
}

/// A transfer by processes that only receive and send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The word of `pump --over`.
    pub over: &'static str,
    /// From each of the code's nodes to the next, or from the first to the second.
    pub is_line: bool,
}
