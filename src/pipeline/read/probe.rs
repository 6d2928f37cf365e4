//! Before a stripe is read: what the nodes say that they hold of it. Nobody waits long for one of them when the others are enough.

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

/// While nodes say what they have, one that keeps the others waiting for so long is left out where these are enough.
const SLOW_PROBE_LIMIT: Duration = Duration::from_millis(500);
/// The same where the others answered at once: a node that is farther away, or busy, has time for a handshake and an answer.
const QUICK_PROBE_LIMIT: Duration = Duration::from_millis(200);
/// In between: so many times what the latest answer took.
const SLOW_FACTOR: u32 = 4;
/// A node that does not say within this what it has is left out at first.
pub(super) const PROBE_LIMIT: Duration = Duration::from_secs(2);
/// The same when too little was found without it.
pub(super) const LONG_PROBE_LIMIT: Duration = Duration::from_secs(6);
/// Files of a stripe on one node that are considered as sources.
const MAX_SOURCES: usize = 64;
/// What nodes say that they hold of a stripe, without files that are not what they should be.
pub(super) type HeldFiles = BTreeMap<NodeId, Vec<FoundFile>>;

/// A file that a node holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FoundFile {
    /// Which.
    pub file: FileName,
    /// Its data bytes and their BLAKE3; `None` when the file does not tell.
    pub content: Option<(u64, [u8; 32])>,
    /// Whether the node knows no damage of it.
    pub counts: bool,
}

impl From<FileView> for FoundFile {
    fn from(view: FileView) -> Self {
        Self { file: view.file, content: Some((view.len_bytes, view.root)), counts: true }
    }
}

/// What nodes are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WantedFiles {
    /// Files that count, from the index.
    Counting,
    /// All that grains can be read from, as they lie in the folder.
    Sources,
}

/// Asks `nodes` what they hold, at most `limit`, and adds it to `held`. Those that are slow are waited for only until `is_enough` of
/// what the others hold; then they count as silent until their answer comes after all. Gives one that is too busy to say, and
/// what it said instead.
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
        nodes.iter().copied().filter(|node| reading.is_in_backoff(*node)).collect();
    let asks = left.iter().map(|&node| {
        let reading = reading.clone();
        async move { (node, ask(&reading, stripe, files, node, limit).await) }
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
                    ProbeAnswer::WantedFiles(files) => {
                        held.insert(node, files);
                        let took = clock.now().saturating_sub(asked) * SLOW_FACTOR;
                        patience = took.clamp(QUICK_PROBE_LIMIT, SLOW_PROBE_LIMIT);
                        // The pause counts from the latest answer: others may be on their way.
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
            tracing::info!(node, "slow: it is left out at first");
        }
    }
    // Whoever answers yet takes part in the stripes that come. Ends within `limit`.
    tokio::spawn(async move { while asks.next().await.is_some() {} });
    busy
}

enum ProbeAnswer {
    WantedFiles(Vec<FoundFile>),
    /// It has what it has, and no time now: what it said.
    Busy(String),
    Silence,
}

async fn list(
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
                        reading.add_damaged((stripe, node, file), damaged);
                    }
                    FoundFile { file, content, counts }
                };
                return Ok(sources.into_iter().take(MAX_SOURCES).map(found).collect());
            }
            // An older program has no damaged files: it moves them aside.
            Err(error) if error.kind() == ErrorKind::Invalid => {}
            Err(error) => return Err(error),
        }
    }
    let views = reading.caller.call_within(&to, &ListFiles { stripe }, limit).await?;
    Ok(views.into_iter().map(FoundFile::from).collect())
}

/// Has a node look at a file that was found damaged. One of an older program is not told: it would move aside all of the file, and with
/// it grains that are good.
pub async fn report_damage(caller: &Caller, to: &NodeAddress, stripe: StripeId, file: FileName) {
    if caller.call(to, &ListSources { stripe }).await.is_ok() {
        let _ = caller.call(to, &VerifyFile { stripe, file }).await;
    }
}

async fn ask(
    reading: &ReadSession,
    stripe: StripeId,
    files: WantedFiles,
    node: NodeId,
    limit: Duration,
) -> ProbeAnswer {
    let Some(to) = reading.directory.address(node) else { return ProbeAnswer::Silence };
    let error = match list(reading, stripe, files, &to, limit).await {
        Ok(mut files) => {
            reading.directory.heard(node, true);
            reading.record_answer(node);
            files.retain(|found| !reading.is_corrupt(stripe, node, found.file));
            return ProbeAnswer::WantedFiles(files);
        }
        Err(error) if error.kind() == ErrorKind::Busy => {
            reading.record_answer(node);
            return ProbeAnswer::Busy(error.to_string());
        }
        Err(error) => error,
    };
    if reading.directory.heard(node, false) {
        reading.note(format!("{} is left out: {error}", to.name));
    }
    if limit >= LONG_PROBE_LIMIT && error.kind() == ErrorKind::Timeout {
        reading.record_timeout(node);
    }
    ProbeAnswer::Silence
}
