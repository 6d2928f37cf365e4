//! The probe before a stripe is read: it asks the nodes which files of the stripe they hold. A slow
//! node is not waited for long if the files of the others are enough.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::ReadSession;
use crate::clock::deadline;
use crate::format::file::FileName;
use crate::id::{NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Caller, address};
use crate::wire::NodeAddress;
use crate::wire::calls::{FileView, ListFiles, ListSources, SourceView, VerifyFile};

/// Longest wait for the next answer of a probe. After this, the nodes that are still silent are
/// skipped if the files of the others are enough.
const SLOW_PROBE_LIMIT: Duration = Duration::from_millis(500);
/// Shortest wait for the next answer of a probe, if other nodes answered at once. It leaves a node
/// that is farther away, or busy, time for a handshake and an answer.
const QUICK_PROBE_LIMIT: Duration = Duration::from_millis(200);
/// The wait for the next answer is this many times the time from the start of the probe to the most
/// recent answer with files, but at least [`QUICK_PROBE_LIMIT`] and at most [`SLOW_PROBE_LIMIT`].
const SLOW_FACTOR: u32 = 4;
/// Time limit for a node's answer in the first probe of a stripe. The read continues without a node
/// that exceeds it. If the other nodes have too few files, the node is asked again with
/// [`LONG_PROBE_LIMIT`].
pub(super) const PROBE_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for a node's answer when too few files were found without the node.
pub(super) const LONG_PROBE_LIMIT: Duration = Duration::from_secs(6);
/// Maximum number of files that are taken from one answer to [`ListSources`].
const MAX_SOURCES: usize = 64;
/// The files of a stripe that nodes say they hold, by node, without the files known to be corrupt.
pub(super) type HeldFiles = BTreeMap<NodeId, Vec<FoundFile>>;

/// A file that a node holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FoundFile {
    /// The name of the file.
    pub file: FileName,
    /// The length of the data in bytes, and its BLAKE3 hash; `None` when the file's tail is broken.
    pub content: Option<(u64, [u8; 32])>,
    /// Whether the file's node knows of no damage to it. Such a file counts as a full copy.
    pub counts_as_copy: bool,
}

impl From<FileView> for FoundFile {
    fn from(view: FileView) -> Self {
        Self { file: view.file, content: Some((view.len_bytes, view.root)), counts_as_copy: true }
    }
}

/// The kind of files that a probe asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WantedFiles {
    /// The files of which the node knows no damage, as its index lists them.
    GoodCopies,
    /// All files that grains can be read from, damaged ones included, from the stripe's folder.
    Sources,
}

/// Asks `nodes` which files they hold, for at most `limit`, and adds the answers to `held`. Skips
/// nodes that did not answer within the longest limit a short time ago. Slow nodes are waited for only
/// until `is_enough` accepts the files of the others. After that they count as silent until their
/// answer comes after all. Returns a node that was too busy to answer, and its message.
pub(super) async fn probe_nodes(
    reading: &Arc<ReadSession>,
    (stripe, files): (StripeId, WantedFiles),
    nodes: &BTreeSet<NodeId>,
    limit: Duration,
    held: &mut HeldFiles,
    is_enough: impl Fn(&HeldFiles) -> bool,
) -> Option<(NodeId, String)> {
    let clock = reading.caller.clock().clone();
    let asked = clock.now();
    let mut left: BTreeSet<NodeId> =
        nodes.iter().copied().filter(|node| reading.may_be_asked(*node)).collect();
    let asks = left.iter().map(|&node| {
        let reading = reading.clone();
        async move { (node, probe_node(&reading, stripe, files, node, limit).await) }
    });
    let mut asks: FuturesUnordered<_> = asks.collect();
    let mut patience = SLOW_PROBE_LIMIT;
    let (mut is_slow, mut busy) = (false, None);
    loop {
        let next = match is_slow {
            true => Ok(asks.next().await),
            false => deadline(&*clock, patience, asks.next()).await,
        };
        match next {
            Ok(None) => return busy,
            Ok(Some((node, answer))) => {
                left.remove(&node);
                match answer {
                    ProbeAnswer::Files(files) => {
                        held.insert(node, files);
                        let took = clock.now().saturating_sub(asked) * SLOW_FACTOR;
                        patience = took.clamp(QUICK_PROBE_LIMIT, SLOW_PROBE_LIMIT);
                        // The wait restarts at each answer, because others may be on their way.
                        is_slow = false;
                    }
                    ProbeAnswer::Busy(reason) => busy = Some((node, reason)),
                    ProbeAnswer::Silence => {}
                }
            }
            Err(_) => is_slow = true,
        }
        if is_slow && is_enough(held) {
            break;
        }
    }
    for node in left {
        if reading.directory.heard(node, false) {
            let node = reading.directory.name(node);
            tracing::info!(
                node,
                "a node is slow to answer: the read continues without it until it answers"
            );
        }
    }
    // A node that still answers is used for the stripes that follow. The task ends within `limit`.
    tokio::spawn(async move { while asks.next().await.is_some() {} });
    busy
}

enum ProbeAnswer {
    Files(Vec<FoundFile>),
    /// The node is too busy to list its files; it may have some. The text is its message.
    Busy(String),
    Silence,
}

async fn list_node_files(
    reading: &ReadSession,
    stripe: StripeId,
    files: WantedFiles,
    to: &NodeAddress,
    limit: Duration,
) -> Result<Vec<FoundFile>, CallError> {
    let (node, to) = (NodeId::of(&to.name), address(to));
    if files == WantedFiles::Sources {
        match reading.caller.call_within(&to, &ListSources { stripe }, limit).await {
            Ok(sources) => {
                let found = |source: SourceView| {
                    let (file, content) = (source.file, source.content);
                    let counts = source.damaged.is_none();
                    if let Some(damaged) = &source.damaged {
                        reading.add_damaged_grains((stripe, node, file), damaged);
                    }
                    FoundFile { file, content, counts_as_copy: counts }
                };
                return Ok(sources.into_iter().take(MAX_SOURCES).map(found).collect());
            }
            // A node with an older version lists no damaged files, because it moves them aside.
            Err(error) if error.kind() == ErrorKind::Invalid => {}
            Err(error) => return Err(error),
        }
    }
    let views = reading.caller.call_within(&to, &ListFiles { stripe }, limit).await?;
    Ok(views.into_iter().map(FoundFile::from).collect())
}

/// Asks a node to verify a file in which a reader found damage. A node with an older version is not
/// asked: it would move aside the whole file, including its good grains.
pub async fn request_verification(
    caller: &Caller,
    to: &NodeAddress,
    stripe: StripeId,
    file: FileName,
) {
    if caller.call(to, &ListSources { stripe }).await.is_ok() {
        let _ = caller.call(to, &VerifyFile { stripe, file }).await;
    }
}

async fn probe_node(
    reading: &ReadSession,
    stripe: StripeId,
    files: WantedFiles,
    node: NodeId,
    limit: Duration,
) -> ProbeAnswer {
    let Some(to) = reading.directory.address(node) else { return ProbeAnswer::Silence };
    let error = match list_node_files(reading, stripe, files, &to, limit).await {
        Ok(mut files) => {
            reading.directory.heard(node, true);
            reading.clear_unreached(node);
            files.retain(|found| !reading.is_corrupt(stripe, node, found.file));
            return ProbeAnswer::Files(files);
        }
        Err(error) if error.kind() == ErrorKind::Busy => {
            reading.clear_unreached(node);
            return ProbeAnswer::Busy(error.to_string());
        }
        Err(error) => error,
    };
    if reading.directory.heard(node, false) {
        reading.record_incident(format!("{} is left out: {error}", to.name));
    }
    if limit >= LONG_PROBE_LIMIT && error.is_unanswered() {
        reading.record_unreached(node);
    }
    ProbeAnswer::Silence
}
