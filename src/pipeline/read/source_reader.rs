//! A file on a node as a source of a stripe. The file is opened and compared with the record or the
//! receipt. Then it is read grain by grain. Each grain is verified before it is used: by the hash
//! tree of this file or of another replica or, without one, by the fingerprints in the stripe's
//! record.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::ReadError;
use super::read_cursor::ReadCursor;
use super::read_session::CountedFile;
use super::source_selection::RemoteFile;
use super::stripe_sources::{SourceFault, StripeSources};
use crate::clock::{Elapsed, deadline};
use crate::format::file::FileName;
use crate::format::tree::GrainTree;
use crate::gf::Fingerprint;
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Exchange, address};
use crate::net::{Address, NetError};
use crate::units::GRAIN_BYTES;
use crate::wire::calls::{ReadFile, ReadFileAnswer, ReadSource};

/// How long a source may send nothing, and how far it may fall behind the pace of the others
/// ([`ReadSession::slow_threshold`](super::ReadSession::slow_threshold)), before it is
/// deprioritized in favour of others that may be enough.
const SLOW_LIMIT: Duration = Duration::from_secs(1);
/// The same limit for a node's answer to the request that opens a file.
const SLOW_OPEN_LIMIT: Duration = Duration::from_secs(2);
/// How long a source may send nothing, when it was deprioritized and is needed all the same, before
/// it is excluded.
const STALL_LIMIT: Duration = Duration::from_secs(5);
/// The same limit for a node's answer to the request that opens a file. A busy node may let a
/// reader wait for memory.
const OPEN_LIMIT: Duration = Duration::from_secs(12);

/// An open file, which is read grain by grain. A block past the shard's end has no file, and is all
/// zero.
pub(super) struct OpenFile {
    holding: RemoteFile,
    /// Whether the node was deprioritized before because it was slow, so that the longer time limits
    /// apply.
    is_patient: bool,
    /// How far the source is behind the pace. `None` if the node was silent or slow before the file
    /// was opened, and is needed all the same.
    behind: Option<Duration>,
    open: Option<(Exchange, GrainVerifier)>,
    _counted: Option<CountedFile>,
}

/// The reference that the grains of a file are verified against.
enum GrainVerifier {
    /// The hash table of the file, or of another replica of the same block, under the root that the
    /// file must have.
    Table(GrainTree),
    /// The fingerprints of the stripe's record, for a file without a hash table.
    Fingerprints,
}

/// The reason why a round of reading ended early.
pub(super) enum RoundEnd {
    /// A source failed and is excluded.
    Source {
        holding: RemoteFile,
        reason: String,
        fault: SourceFault,
    },
    /// Sources are slow. Others come first from now on.
    Slow {
        holdings: Vec<RemoteFile>,
    },
    /// A source's node has no memory for a reader now.
    Busy {
        holding: RemoteFile,
        reason: String,
    },
    Fatal(ReadError),
}

impl<E: Into<ReadError>> From<E> for RoundEnd {
    fn from(error: E) -> Self {
        RoundEnd::Fatal(error.into())
    }
}

/// Runs all `reads` at once. Returns their results in order. A failure ends all of them at once.
/// Slow sources are returned together, when the other reads are done.
pub(super) async fn try_join_reads<T>(
    reads: impl IntoIterator<Item = impl Future<Output = Result<T, RoundEnd>>>,
) -> Result<Vec<T>, RoundEnd> {
    let numbered = reads.into_iter().enumerate().map(|(at, read)| async move { (at, read.await) });
    let mut running: FuturesUnordered<_> = numbered.collect();
    let (mut done, mut slow) = (Vec::with_capacity(running.len()), Vec::new());
    while let Some((at, result)) = running.next().await {
        match result {
            Ok(value) => done.push((at, value)),
            Err(RoundEnd::Slow { holdings }) => slow.extend(holdings),
            Err(stop) => return Err(stop),
        }
    }
    if !slow.is_empty() {
        return Err(RoundEnd::Slow { holdings: slow });
    }
    done.sort_unstable_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, value)| value).collect())
}

impl StripeSources {
    /// Opens a source for the grains that are left to read.
    ///
    /// # Errors
    /// [`RoundEnd::Source`] if the node does not deliver the file, or delivers another one;
    /// [`RoundEnd::Busy`] if the node is busy; [`RoundEnd::Slow`] if it does not answer in time and
    /// was not slow before.
    pub(super) async fn open_source(
        &self,
        holding: RemoteFile,
        progress: &ReadCursor,
    ) -> Result<OpenFile, RoundEnd> {
        let (len, grains) = (self.file_len(holding), &progress.left);
        let is_patient = progress.deprioritized.contains(&holding.node);
        let behind = (!self.reading.directory.is_silent(holding.node)).then_some(Duration::ZERO);
        if len == 0 {
            return Ok(OpenFile { holding, is_patient, behind, open: None, _counted: None });
        }
        // Counted before the first wait, so that a reader that chooses its source next takes this one
        // into account.
        let counted = Some(self.reading.count_file(holding.node));
        let stop = |reason: String, fault| RoundEnd::Source { holding, reason, fault };
        let to = self.reading.directory.address(holding.node);
        let to =
            address(&to.ok_or_else(|| stop("it is not registered".into(), SourceFault::Missing))?);
        let from = (grains.start * GRAIN_BYTES).min(len);
        let end = (grains.end * GRAIN_BYTES).min(len);
        let span = (from, end - from);
        let limit = if is_patient { OPEN_LIMIT } else { SLOW_OPEN_LIMIT };
        let opened = self.request_file_range(&to, &holding, span, limit).await;
        let opened = match opened {
            // The node has found damage since the probe, or finds it now.
            Ok(Err(error)) if error.kind() == ErrorKind::Corrupt && holding.counts_as_copy => {
                self.report_damaged_file_once(&holding, &error.to_string());
                let damaged = RemoteFile { counts_as_copy: false, ..holding };
                self.request_file_range(&to, &damaged, span, limit).await
            }
            opened => opened,
        };
        let (exchange, answer) = match opened {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) if error.kind() == ErrorKind::Busy => {
                return Err(RoundEnd::Busy { holding, reason: error.to_string() });
            }
            Ok(Err(error)) => {
                let fault = match error.kind() {
                    ErrorKind::Corrupt => SourceFault::Corrupt,
                    _ if error.is_unanswered() => SourceFault::Unresponsive,
                    _ => SourceFault::Missing,
                };
                return Err(stop(error.to_string(), fault));
            }
            Err(late) if is_patient => {
                return Err(stop(late.to_string(), SourceFault::Unresponsive));
            }
            Err(_) => return Err(RoundEnd::Slow { holdings: vec![holding] }),
        };
        let proof = match self.parse_hash_table(holding, len, answer) {
            // A file whose root no record has is verified by the fingerprints of its stripe.
            Ok(Some(table)) if holding.root.is_some() => GrainVerifier::Table(table),
            Ok(_) => self.fetch_fallback_verifier(holding, len, progress).await,
            Err(reason) => return Err(stop(reason, SourceFault::Corrupt)),
        };
        Ok(OpenFile {
            holding,
            is_patient,
            behind,
            open: Some((exchange, proof)),
            _counted: counted,
        })
    }

    /// Asks the file's node for a part of the file. Returns the exchange, on which the bytes follow,
    /// and the node's answer.
    async fn request_file_range(
        &self,
        to: &Address,
        wanted: &RemoteFile,
        (from, len_bytes): (u64, u64),
        limit: Duration,
    ) -> Result<Result<(Exchange, ReadFileAnswer), CallError>, Elapsed> {
        let (stripe, file, hashes) = (self.info.fixed.stripe, wanted.file, true);
        let clock = &**self.reading.caller.clock();
        let work = async {
            let caller = &self.reading.caller;
            let mut exchange = match wanted.counts_as_copy {
                true => {
                    caller.open(to, &ReadFile { stripe, file, from, len_bytes, hashes }).await?
                }
                false => {
                    caller.open(to, &ReadSource { stripe, file, from, len_bytes, hashes }).await?
                }
            };
            exchange.finish().await?;
            let answer: ReadFileAnswer = exchange.answer().await?;
            Ok::<_, CallError>((exchange, answer))
        };
        deadline(clock, limit, work).await
    }

    /// Returns the hash table of an answer, or `None` if the file has none. Returns an error if the
    /// table belongs to another file than the one that is wanted.
    fn parse_hash_table(
        &self,
        holding: RemoteFile,
        expected_len: u64,
        answer: ReadFileAnswer,
    ) -> Result<Option<GrainTree>, String> {
        if answer.hashes.is_empty() && answer.len_bytes == 0 {
            return Ok(None);
        }
        let tree = GrainTree::from_hashes(answer.len_bytes, answer.hashes);
        let tree = tree.map_err(|error| error.to_string())?;
        if answer.len_bytes != expected_len || holding.root.is_some_and(|root| root != tree.root())
        {
            return Err("its hashes are not those of the record".into());
        }
        Ok(Some(tree))
    }

    /// Returns the hash table of another replica of the same block, or the record's fingerprints if
    /// there is none.
    async fn fetch_fallback_verifier(
        &self,
        holding: RemoteFile,
        len: u64,
        progress: &ReadCursor,
    ) -> GrainVerifier {
        let FileName::Replica { block } = holding.file else { return GrainVerifier::Fingerprints };
        for other in self.found.replicas.get(&block).into_iter().flatten() {
            if other.node == holding.node || progress.deprioritized.contains(&other.node) {
                continue;
            }
            let Some(to) = self.reading.directory.address(other.node) else { continue };
            let (to, nothing) = (address(&to), (0, 0));
            let asked = self.request_file_range(&to, other, nothing, SLOW_OPEN_LIMIT).await;
            if let Ok(Ok((_, answer))) = asked
                && let Ok(Some(table)) = self.parse_hash_table(*other, len, answer)
            {
                return GrainVerifier::Table(table);
            }
        }
        GrainVerifier::Fingerprints
    }

    /// Returns whether a grain of a file without a hash table has the fingerprint that follows from
    /// the record.
    fn has_saved_fingerprint(&self, file: FileName, grain: u64, bytes: &[u8]) -> bool {
        let fixed = &self.info.fixed;
        let expected = match (file, &self.found.coded) {
            (FileName::Replica { block }, _) => Some(fixed.fingerprint(block.into(), grain)),
            (FileName::Piece { piece, .. }, Some(coded)) => {
                let row = coded.code.generator().row(piece.into());
                let blocks: Vec<_> = (0..row.len()).map(|j| fixed.fingerprint(j, grain)).collect();
                Fingerprint::combine(row, &blocks).ok()
            }
            (FileName::Piece { .. }, None) => None,
        };
        expected.is_some() && self.key.fingerprint(bytes).ok() == expected
    }

    /// Reads and verifies the next grain of a file. Returns an empty grain past the end of the
    /// file, and `None` if the grain is damaged.
    pub(super) async fn read_verified_grain(
        &self,
        file: &mut OpenFile,
        grain: u64,
    ) -> Result<Option<Bytes>, RoundEnd> {
        let OpenFile { holding, is_patient, .. } = *file;
        let stop = |reason: String, fault| RoundEnd::Source { holding, reason, fault };
        let left = self.file_len(holding).saturating_sub(grain * GRAIN_BYTES);
        let want = left.min(GRAIN_BYTES) as usize;
        let Some((exchange, proof)) = file.open.as_mut().filter(|_| want > 0) else {
            return Ok(Some(Bytes::new()));
        };
        let clock = &**self.reading.caller.clock();
        let began = clock.now();
        let pace = self.reading.slow_threshold();
        let limit = match file.behind {
            _ if is_patient => STALL_LIMIT,
            Some(behind) => SLOW_LIMIT + pace - behind,
            None => SLOW_LIMIT,
        };
        let read = deadline(clock, limit, exchange.recv.read_exact(want)).await;
        let took = clock.now() - began;
        self.reading.record_grain_wait(took);
        if let Some(behind) = &mut file.behind {
            // Count only the time for which the source is waited for. A slow reader does not make
            // its source slow.
            *behind = (*behind + took).saturating_sub(pace).min(SLOW_LIMIT);
        }
        let read = read.map_err(|late| match is_patient {
            true => stop(late.to_string(), SourceFault::Unresponsive),
            false => RoundEnd::Slow { holdings: vec![holding] },
        })?;
        let bytes = read.map_err(|error| match error {
            // The node's disk failed, and not the node.
            NetError::Reset { .. } if error.kind() == ErrorKind::Io => {
                stop("it cannot be read there".into(), SourceFault::Missing)
            }
            error => stop(error.to_string(), SourceFault::Unresponsive),
        })?;
        let is_good = match proof {
            GrainVerifier::Table(tree) => tree.verify_grain(grain, &bytes),
            GrainVerifier::Fingerprints => self.has_saved_fingerprint(holding.file, grain, &bytes),
        };
        if !is_good {
            self.exclude_and_report_damaged_grain(&holding, grain);
        }
        Ok(is_good.then_some(bytes))
    }

    /// Reads one grain of each source, padded to the length of the stripe's grain. Returns `None`
    /// if one of the grains is damaged. The streams continue after this grain.
    pub(super) async fn read_grain_from_all(
        &self,
        files: &mut [OpenFile],
        grain: u64,
    ) -> Result<Option<Vec<Bytes>>, RoundEnd> {
        let padded = self.info.fixed.cut.grain_len(grain) as usize;
        let reads = files.iter_mut().map(|file| async move {
            let Some(bytes) = self.read_verified_grain(file, grain).await? else { return Ok(None) };
            if bytes.len() == padded {
                return Ok(Some(bytes));
            }
            let mut whole = bytes.to_vec();
            whole.resize(padded, 0);
            Ok::<Option<Bytes>, RoundEnd>(Some(whole.into()))
        });
        Ok(try_join_reads(reads).await?.into_iter().collect())
    }
}
