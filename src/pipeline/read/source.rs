//! A file on a node as a source of a stripe: opened against what the record or receipt says it is, then read grain by grain, each
//! verified by the file's own tree before anybody uses it.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::try_join_all;

use super::way::Holding;
use super::{ReadError, StripeReader};
use crate::clock::deadline;
use crate::format::file::FileName;
use crate::format::tree::GrainTree;
use crate::kind::Kind;
use crate::net::call::{CallError, Exchange, address};
use crate::units::GRAIN_BYTES;
use crate::wire::calls::{Read, ReadAnswer};

/// A source that gives nothing for so long is left out.
const STALL_LIMIT: Duration = Duration::from_secs(5);
/// The same for the answer to an open: a busy node may let a reader wait for memory.
const OPEN_LIMIT: Duration = Duration::from_secs(12);

/// One open file, read grain by grain. A block past the shard's end has none, and is all zero.
pub(super) struct OpenFile {
    holding: Holding,
    open: Option<(Exchange, GrainTree)>,
}

/// Why a round of reading ended: a source is out, or it is over for good.
pub(super) enum Stop {
    /// A source does not answer, or not in time; or, `rotten`, gave bytes that are not what they should be.
    Source {
        holding: Holding,
        reason: String,
        rotten: bool,
    },
    /// A source's node has no memory for a reader now.
    Busy {
        holding: Holding,
        reason: String,
    },
    Fatal(ReadError),
}

impl<E: Into<ReadError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Stop::Fatal(error.into())
    }
}

impl StripeReader {
    /// Data bytes of a source's file.
    pub(super) fn file_len(&self, source: Holding) -> u64 {
        match source.file {
            FileName::Replica { block } => self.info.fixed.cut.block_len(block),
            FileName::Piece { .. } => self.info.fixed.cut.block_bytes,
        }
    }

    pub(super) async fn open(
        &self,
        holding: Holding,
        grains: Range<u64>,
        len: u64,
    ) -> Result<OpenFile, Stop> {
        if len == 0 {
            return Ok(OpenFile { holding, open: None });
        }
        let stop = |reason: String, rotten| Stop::Source { holding, reason, rotten };
        let to = self.reading.directory.address(holding.node);
        let to = address(&to.ok_or_else(|| stop("it is not registered".into(), false))?);
        let from = (grains.start * GRAIN_BYTES).min(len);
        let end = (grains.end * GRAIN_BYTES).min(len);
        let call = Read {
            stripe: self.info.fixed.stripe,
            file: holding.file,
            from,
            len_bytes: end - from,
            hashes: true,
        };
        let clock = &**self.reading.caller.clock();
        let work = async {
            let mut exchange = self.reading.caller.open(&to, &call).await?;
            exchange.finish().await?;
            let answer: ReadAnswer = exchange.answer().await?;
            Ok::<_, CallError>((exchange, answer))
        };
        let (exchange, answer) = match deadline(clock, OPEN_LIMIT, work).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) if error.kind() == Kind::Busy => {
                return Err(Stop::Busy { holding, reason: error.to_string() });
            }
            Ok(Err(error)) => return Err(stop(error.to_string(), error.kind() == Kind::Corrupt)),
            Err(late) => return Err(stop(late.to_string(), false)),
        };
        let tree = GrainTree::from_hashes(answer.len_bytes, answer.hashes)
            .map_err(|error| stop(error.to_string(), true))?;
        if answer.len_bytes != len || tree.root() != holding.root {
            return Err(stop("its hashes are not those of the record".into(), true));
        }
        Ok(OpenFile { holding, open: Some((exchange, tree)) })
    }

    /// The next grain of a file, verified by its hash; empty past its end.
    pub(super) async fn grain(
        &self,
        file: &mut OpenFile,
        grain: u64,
        len: u64,
    ) -> Result<Bytes, Stop> {
        let holding = file.holding;
        let stop = |reason: String, rotten| Stop::Source { holding, reason, rotten };
        let want = len.saturating_sub(grain * GRAIN_BYTES).min(GRAIN_BYTES) as usize;
        let Some((exchange, tree)) = file.open.as_mut().filter(|_| want > 0) else {
            return Ok(Bytes::new());
        };
        let clock = &**self.reading.caller.clock();
        let read = deadline(clock, STALL_LIMIT, exchange.recv.read_exact(want)).await;
        let read = read.map_err(|late| stop(late.to_string(), false))?;
        let bytes = read.map_err(|error| stop(error.to_string(), false))?;
        if tree.verify_grain(grain, &bytes) {
            Ok(bytes)
        } else {
            Err(stop(format!("grain {grain} is corrupt"), true))
        }
    }

    /// One grain of each source, padded; `None` is one that is all zero.
    pub(super) async fn grains(
        &self,
        files: &mut [Option<OpenFile>],
        grain: u64,
    ) -> Result<Vec<Bytes>, Stop> {
        let padded = self.info.fixed.cut.grain_len(grain) as usize;
        let reads = files.iter_mut().map(|file| async move {
            let Some(file) = file else { return Ok(vec![0; padded].into()) };
            let len = self.file_len(file.holding);
            let bytes = self.grain(file, grain, len).await?;
            if bytes.len() == padded {
                return Ok(bytes);
            }
            let mut whole = bytes.to_vec();
            whole.resize(padded, 0);
            Ok::<Bytes, Stop>(whole.into())
        });
        try_join_all(reads).await
    }
}
