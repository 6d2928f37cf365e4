//! Reads of files: a client or node names a file of a stripe and a range, and the bytes follow.

use std::sync::Arc;

use super::error::StorageError;
use super::put_block::STALL_LIMIT;
use crate::budget::Reservation;
use crate::clock::deadline;
use crate::format::file::FileKey;
use crate::kind::ErrorKind;
use crate::node::budgets::{Budgets, reserve_memory};
use crate::node::context::NodeContext;
use crate::node::incoming_call::{IncomingCall, Request};
use crate::store::{FileInfo, Store, StoreError, UnverifiedFile};
use crate::units::MAX_BLOCK_BYTES;
use crate::wire::calls::{FileView, ListFiles, ReadFile, ReadFileAnswer, ReadSource};
use crate::wire::{BULK_CHUNK_BYTES, RemoteError};

/// Working memory of one read, in bytes.
const READ_MEMORY_BYTES: u64 = 4 * BULK_CHUNK_BYTES as u64;

/// A range of a file that is sent to a reader: from byte `from` up to, but not including, byte
/// `end`.
struct OpenFileRange {
    file: Arc<UnverifiedFile>,
    from: u64,
    end: u64,
    memory: Reservation,
}

/// The service that sends ranges of this node's files.
pub(in crate::node) struct FileReads {
    context: Arc<NodeContext>,
    budgets: Arc<Budgets>,
}

impl FileReads {
    /// Creates the service.
    pub(in crate::node) fn new(context: Arc<NodeContext>, budgets: Arc<Budgets>) -> Self {
        Self { context, budgets }
    }

    /// Sends a range of a file that is not known to be damaged.
    pub(in crate::node) async fn read_file(
        self: &Arc<Self>,
        request: Request,
        served: IncomingCall,
    ) {
        let prepared = match request.parse::<ReadFile>() {
            Ok(call) => self.open_file_range(call).await,
            Err(error) => Err(error.into()),
        };
        self.send_unverified_range(prepared, served).await;
    }

    /// Sends a range of a file that may be damaged.
    pub(in crate::node) async fn read_source(
        self: &Arc<Self>,
        request: Request,
        served: IncomingCall,
    ) {
        let prepared = match request.parse::<ReadSource>() {
            Ok(call) => self.open_source_range(call).await,
            Err(error) => Err(error.into()),
        };
        self.send_unverified_range(prepared, served).await;
    }

    /// Sends the answer and then the bytes of a prepared read.
    async fn send_unverified_range(
        self: &Arc<Self>,
        prepared: Result<(OpenFileRange, ReadFileAnswer), RemoteError>,
        mut served: IncomingCall,
    ) {
        let (OpenFileRange { file, mut from, end, memory: _memory }, answer) = match prepared {
            Ok(prepared) => prepared,
            Err(refusal) => return served.refuse(refusal).await,
        };
        if !served.answer(Ok(answer)).await {
            return;
        }
        while from < end {
            let len = (end - from).min(BULK_CHUNK_BYTES as u64);
            let source = file.clone();
            let read = move |_: &Store| {
                let mut chunk = vec![0; len as usize];
                source.read_or_zero(from, &mut chunk);
                Ok::<_, StoreError>(chunk)
            };
            let Ok(chunk) = self.context.run_on_store(read).await else {
                return served.send.reset(ErrorKind::Io.wire_code());
            };
            match deadline(&*self.context.clock, STALL_LIMIT, served.send.write(chunk.into())).await
            {
                Ok(Ok(())) => from += len,
                _ => return served.send.reset(ErrorKind::Timeout.wire_code()),
            }
        }
        let _ = served.send.finish().await;
    }

    /// Opens a file that is not known to be damaged, and reserves memory. Returns the open read and
    /// its answer.
    async fn open_file_range(
        &self,
        call: ReadFile,
    ) -> Result<(OpenFileRange, ReadFileAnswer), RemoteError> {
        let key = FileKey { stripe: call.stripe, name: call.file };
        let memory =
            reserve_memory(&self.context, &self.budgets.restore, READ_MEMORY_BYTES).await?;
        let file = self.context.run_on_store(move |store| store.open_undamaged_file(key)).await?;
        let len_bytes = file.index_entry().len_bytes;
        let end = call.from.checked_add(call.len_bytes).filter(|end| *end <= len_bytes);
        let Some(end) = end else {
            let (asked_bytes, from) = (call.len_bytes, call.from);
            return Err(StorageError::RangePastEnd { key, len_bytes, asked_bytes, from }.into());
        };
        let hashes = if call.hashes { file.tree().hashes().to_vec() } else { Vec::new() };
        let file = Arc::new(file.into_source());
        let sending = OpenFileRange { file, from: call.from, end, memory };
        Ok((sending, ReadFileAnswer { len_bytes, hashes }))
    }

    /// Opens a file that may be damaged, and reserves memory. Returns the open read and its answer.
    async fn open_source_range(
        &self,
        call: ReadSource,
    ) -> Result<(OpenFileRange, ReadFileAnswer), RemoteError> {
        let key = FileKey { stripe: call.stripe, name: call.file };
        let end = call.from.checked_add(call.len_bytes).filter(|end| *end <= MAX_BLOCK_BYTES);
        let (asked_bytes, from) = (call.len_bytes, call.from);
        let end = end.ok_or(StorageError::RangeOverBlock { asked_bytes, from })?;
        let memory =
            reserve_memory(&self.context, &self.budgets.restore, READ_MEMORY_BYTES).await?;
        let file = self.context.run_on_store(move |store| store.open_grain_source(key)).await?;
        let answer = match file.tail() {
            Some((header, tree)) => {
                let hashes = if call.hashes { tree.hashes().to_vec() } else { Vec::new() };
                ReadFileAnswer { len_bytes: header.len_bytes, hashes }
            }
            None => ReadFileAnswer { len_bytes: 0, hashes: Vec::new() },
        };
        Ok((OpenFileRange { file: Arc::new(file), from, end, memory }, answer))
    }

    /// Returns the files of a stripe that are not known to be damaged.
    pub(in crate::node) async fn list_files(
        &self,
        call: ListFiles,
    ) -> Result<Vec<FileView>, RemoteError> {
        let files =
            self.context.run_on_store(move |store| store.list_undamaged_files(call.stripe)).await?;
        let view = |info: &FileInfo| FileView {
            file: info.content.name(),
            len_bytes: info.len_bytes,
            root: info.root,
        };
        Ok(files.iter().map(view).collect())
    }
}
