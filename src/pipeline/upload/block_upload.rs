//! The upload of one block: the client sends it to its first holder, which forwards it to the
//! second. The client hashes and fingerprints the bytes that it reads from its source, and both
//! holders must agree (docs/semantics.md, 3.2).

use std::io;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::{Elapsed, deadline};
use crate::format::geometry::StripeCut;
use crate::format::records::BlockInfo;
use crate::format::tree::{GrainTree, grain_hash};
use crate::gf::Fingerprint;
use crate::id::{NodeId, StripeId};
use crate::kind::ErrorKind;
use crate::net::call::{CallError, Exchange, address};
use crate::units::GRAIN_BYTES;
use crate::wire::calls::{BlockAdmitted, BlockTrailer, PutBlock, PutBlockAnswer};
use crate::wire::{NodeAddress, RemoteError, message_to_bytes};
use serde::de::DeserializeOwned;

use super::error::{BlockError, NodeFailure, SaveError};
use super::stripe_uploader::StripeUploader;

/// Number of bytes that are read from the source, and sent, at a time.
const CHUNK_BYTES: u64 = 4 * GRAIN_BYTES;
/// How long a holder may accept no bytes, or give no answer before it has all bytes, until it counts
/// as failed.
const STALL_LIMIT: Duration = Duration::from_secs(20);
/// How long two holders may take to make a block durable after its last byte. It is longer than the
/// first holder waits for the second one.
const SYNC_LIMIT: Duration = Duration::from_secs(75);

struct HashedChunk {
    bytes: Bytes,
    hashes: Vec<[u8; 32]>,
    fingerprints: Vec<Fingerprint>,
}

impl StripeUploader {
    /// Sends one block to its two holders and waits until it is durable on both. Returns the
    /// block's length, root and fingerprints.
    pub(super) async fn upload_block(
        &self,
        stripe: StripeId,
        cut: &StripeCut,
        block: u8,
        holders: (NodeId, NodeId),
    ) -> Result<BlockInfo, BlockError> {
        let len_bytes = cut.block_len(block);
        if len_bytes == 0 {
            let root = *blake3::hash(&[]).as_bytes();
            return Ok(BlockInfo { len_bytes, root, fingerprints: Vec::new() });
        }
        let unknown = |node: NodeId| SaveError::NoHolders {
            stripe,
            failed: node.to_string(),
            reason: "it is not registered".into(),
        };
        let first = self.directory.address(holders.0).ok_or_else(|| unknown(holders.0))?;
        let second = self.directory.address(holders.1).ok_or_else(|| unknown(holders.1))?;
        let call = PutBlock {
            stripe,
            block,
            len_bytes,
            generation: self.generation,
            fingerprint_key: self.key_bytes,
            forward: Some(second),
        };
        let mut exchange = self.open_upload_and_await_admission(&first, &call, holders).await?;
        let start = cut.offset_bytes + cut.block_offset(block);
        let (info, refused) = self.send_block(&mut exchange, start, len_bytes).await?;
        // If sending failed, the answer names the reason, if there is an answer.
        let limit = if refused.is_none() { SYNC_LIMIT } else { STALL_LIMIT };
        let answer = self.await_answer::<PutBlockAnswer>(&mut exchange, &first, limit).await;
        let answer = match (answer, refused) {
            (Err(error), Some(refused)) if error.is_unanswered() => Err(refused),
            (answer, _) => answer,
        };
        match answer.map_err(|error| classify_holder_failure(holders.0, error))?.forwarded {
            Some(Ok(())) => Ok(info),
            Some(Err(message)) => {
                // The first holder does not say whether the second one refused or is gone.
                let error = CallError::Failed(RemoteError { kind: ErrorKind::Timeout, message });
                Err(BlockError::Holder(NodeFailure { node: holders.1, error }))
            }
            None => {
                let message = format!("{} did not forward the block", first.name);
                let error = CallError::Failed(RemoteError { kind: ErrorKind::Internal, message });
                Err(BlockError::Holder(NodeFailure { node: holders.0, error }))
            }
        }
    }

    /// Opens the exchange that uploads a block, and waits until both holders have admitted the
    /// block. Returns the exchange.
    async fn open_upload_and_await_admission(
        &self,
        first: &NodeAddress,
        call: &PutBlock,
        holders: (NodeId, NodeId),
    ) -> Result<Exchange, BlockError> {
        let clock = &**self.caller.clock();
        let to = address(first);
        let opened = deadline(clock, STALL_LIMIT, self.caller.open(&to, call)).await;
        let opened = opened.map_err(|source| late_error(first, source)).and_then(|opened| opened);
        let mut exchange = opened.map_err(|error| classify_holder_failure(holders.0, error))?;
        let admitted = self.await_answer::<BlockAdmitted>(&mut exchange, first, STALL_LIMIT).await;
        let admitted = admitted.map_err(|error| classify_holder_failure(holders.0, error))?;
        if let Some((code, message)) = admitted.second_refused {
            let refusal = RemoteError { kind: ErrorKind::from_wire_code(code), message };
            return Err(classify_holder_failure(holders.1, refusal.into()));
        }
        Ok(exchange)
    }

    /// Waits for the first holder's next answer, for at most `limit`.
    async fn await_answer<A: DeserializeOwned>(
        &self,
        exchange: &mut Exchange,
        first: &NodeAddress,
        limit: Duration,
    ) -> Result<A, CallError> {
        let answer = deadline(&**self.caller.clock(), limit, exchange.answer::<A>()).await;
        answer.map_err(|source| late_error(first, source)).and_then(|answer| answer)
    }

    /// Reads, hashes and sends a block and its trailer. Returns the block's length, root and
    /// fingerprints, and the error if sending failed.
    async fn send_block(
        &self,
        exchange: &mut Exchange,
        block_start: u64,
        len_bytes: u64,
    ) -> Result<(BlockInfo, Option<CallError>), BlockError> {
        let clock = self.caller.clock().clone();
        let mut hashes = Vec::new();
        let mut fingerprints = Vec::new();
        let mut refused = None;
        let mut offset = 0;
        let mut ready = None;
        while offset < len_bytes || ready.is_some() {
            let read = async {
                if offset == len_bytes {
                    return Ok(None);
                }
                let len = CHUNK_BYTES.min(len_bytes - offset);
                self.read_hashed_chunk(block_start, offset, len, len_bytes).await.map(Some)
            };
            let write = async {
                if let (Some(chunk), None) = (ready.take(), &refused) {
                    let written = deadline(&*clock, STALL_LIMIT, exchange.write(chunk)).await;
                    refused = written.map_or_else(late_holder_error, Result::err);
                }
            };
            let (chunk, ()) = tokio::join!(read, write);
            if let Some(chunk) = chunk? {
                offset += chunk.bytes.len() as u64;
                hashes.extend(chunk.hashes);
                fingerprints.extend(chunk.fingerprints);
                ready = Some(chunk.bytes);
            }
        }
        let root = GrainTree::from_hashes(len_bytes, hashes)?.root();
        let info = BlockInfo { len_bytes, root, fingerprints };
        let trailer = BlockTrailer { root, fingerprints: info.fingerprints.clone() };
        if refused.is_none() {
            let frame = message_to_bytes(&trailer, "a block's trailer").map_err(|source| {
                SaveError::Refused(CallError::Wire { call: "PutBlock", to: String::new(), source })
            })?;
            let written = deadline(&*clock, STALL_LIMIT, exchange.write_frame(frame)).await;
            refused = written.map_or_else(late_holder_error, Result::err);
        }
        if refused.is_none() {
            refused = exchange.finish().await.err();
        }
        Ok((info, refused))
    }

    async fn read_hashed_chunk(
        &self,
        block_start: u64,
        offset_in_block: u64,
        len: u64,
        block_len_bytes: u64,
    ) -> Result<HashedChunk, SaveError> {
        let (source, key, name) = (self.source.clone(), self.key.clone(), self.name.clone());
        let job = move || {
            let bytes = match source.bytes_in_memory(block_start + offset_in_block, len as usize) {
                Some(bytes) => bytes,
                None => {
                    let mut bytes = vec![0; len as usize];
                    let read = source.read_at(block_start + offset_in_block, &mut bytes);
                    read.map_err(|source| match source.kind() {
                        // The file has become shorter.
                        io::ErrorKind::UnexpectedEof => SaveError::Changed { shard: name },
                        _ => {
                            let offset = block_start + offset_in_block;
                            SaveError::Source { shard: name, offset, source }
                        }
                    })?;
                    Bytes::from(bytes)
                }
            };
            let first = offset_in_block / GRAIN_BYTES;
            let mut chunk =
                HashedChunk { bytes: Bytes::new(), hashes: Vec::new(), fingerprints: Vec::new() };
            for (grain, index) in bytes.chunks(GRAIN_BYTES as usize).zip(first..) {
                chunk.hashes.extend(grain_hash(block_len_bytes, index, grain));
                chunk.fingerprints.push(key.fingerprint(grain)?);
            }
            chunk.bytes = bytes;
            Ok(chunk)
        };
        self.workers.run(job).await?
    }
}

/// Returns the error for a holder that gave no answer in time.
fn late_error(first: &NodeAddress, source: Elapsed) -> CallError {
    CallError::Late { call: "PutBlock", to: address(first).to_string(), source }
}

/// Returns the error for the first holder of a block when it takes no more bytes.
fn late_holder_error(source: Elapsed) -> Option<CallError> {
    let (call, to) = ("PutBlock", "the block's holder".to_owned());
    Some(CallError::Late { call, to, source })
}

/// Returns the error for the failure of a holder. Every other holder would refuse in the same way
/// if the request itself is wrong. Silence, damage or shortage may affect this holder only.
fn classify_holder_failure(node: NodeId, error: CallError) -> BlockError {
    let is_fatal =
        matches!(error.kind(), ErrorKind::Fenced | ErrorKind::Denied | ErrorKind::Invalid);
    if is_fatal && !error.is_unanswered() {
        BlockError::Fatal(SaveError::Refused(error))
    } else {
        BlockError::Holder(NodeFailure { node, error })
    }
}
