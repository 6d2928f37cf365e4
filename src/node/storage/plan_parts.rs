//! The calls that reserve, run and release this node's part of a plan.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::damage_mending::Mending;
use super::error::StorageError;
use super::fencing::Fencing;
use super::record_names::receipt_name;
use crate::format::file::{FileKey, FileName};
use crate::format::records::{PieceForm, Receipt, ReceiptPiece, Record};
use crate::node::context::NodeContext;
use crate::pipeline::executor::{
    Executor, HopError, IncomingStream, PartInputs, RunError, local_file,
};
use crate::store::{RecordScope, StoreError};
use crate::wire::calls::{ReleasePart, ReservePart, RunPart, VerifyFile};
use crate::wire::order::RunReport;
use crate::wire::{RemoteError, StreamHeader};

/// The service that admits, runs and releases this node's parts of plans.
pub(in crate::node) struct PlanParts {
    context: Arc<NodeContext>,
    fencing: Arc<Fencing>,
    executor: Arc<Executor>,
    mending: Arc<Mending>,
}

impl PlanParts {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        fencing: Arc<Fencing>,
        executor: Arc<Executor>,
        mending: Arc<Mending>,
    ) -> Self {
        Self { context, fencing, executor, mending }
    }

    /// Passes a stream to the part that waits for it.
    pub(in crate::node) fn accept_stream(&self, header: &StreamHeader, stream: IncomingStream) {
        self.executor.accept_stream(header, stream);
    }

    /// Reserves the memory and disk space of this node's part of a plan.
    pub(in crate::node) async fn reserve_part(&self, call: ReservePart) -> Result<(), RemoteError> {
        let order = call.order;
        self.fencing
            .check_and_raise_fence(order.stripe.shard, order.generation, order.coordinator)
            .await?;
        Ok(self.executor.reserve_part(order).await?)
    }

    /// Runs a reserved part of a plan. Returns its report. The work runs in a task of its own: the
    /// coordinator cancels the call on the first failure of any node, and this node still has to
    /// check what it wrote and what it found corrupt.
    pub(in crate::node) async fn run_part(
        self: &Arc<Self>,
        call: RunPart,
    ) -> Result<RunReport, RemoteError> {
        let given_up = self.context.tasks.stop_token();
        let _when_dropped = given_up.clone().drop_guard();
        let service = self.clone();
        let work = self
            .context
            .tasks
            .spawn(async move { service.run_part_and_handle_failure(call.run, &given_up).await });
        work.await.map_err(|_| StorageError::TaskLost { work: "part of a plan" })?
    }

    /// Runs a part of a plan, and purges the save if it was removed meanwhile. After a failure,
    /// quarantines a piece of the same attempt that has other content, and verifies the files that
    /// may be damaged.
    async fn run_part_and_handle_failure(
        &self,
        run: [u8; 16],
        cancelled: &CancellationToken,
    ) -> Result<RunReport, RemoteError> {
        let Some(PartInputs { stripe, attempt, files }) = self.executor.part_input_files(run)
        else {
            return Err(RunError::Unknown.into());
        };
        let result = self.executor.run_reserved(run, cancelled).await;
        self.fencing.purge_and_refuse_if_removed(stripe.shard.save()).await?;
        if let Err(error) = &result {
            tracing::warn!(node = %self.context.settings.name, %error, "a part of a plan failed");
            if let RunError::Store(StoreError::Conflict { key })
            | RunError::Hop { source: HopError::Store(StoreError::Conflict { key }), .. } = error
            {
                self.quarantine_unproven_piece(*key).await?;
            }
            let rotten = match error {
                RunError::Hop { source: HopError::Corrupt { input, .. }, .. } => {
                    local_file(*input, attempt).into_iter().collect()
                }
                RunError::Store(_) | RunError::Hop { source: HopError::Store(_), .. } => files,
                _ => Vec::new(),
            };
            for file in rotten {
                // Note the damage, so that the coordinator has a replica recreated, or takes
                // another piece.
                let _ =
                    self.mending.check_file_and_handle_damage(VerifyFile { stripe, file }).await;
            }
        }
        Ok(result?)
    }

    /// Moves the stored piece `key` to quarantine, unless the receipt on this node says that this
    /// piece was proven. The failed run made other content for a piece of that name and could not
    /// store it, and the next run needs the name.
    async fn quarantine_unproven_piece(&self, key: FileKey) -> Result<(), RemoteError> {
        let FileName::Piece { piece, attempt } = key.name else { return Ok(()) };
        self.context
            .run_on_store(move |store| {
                let judged = store.open_undamaged_file(key)?;
                let receipt = store
                    .get_record_file(RecordScope::Stripe(key.stripe), &receipt_name(attempt))?;
                let receipt = receipt.and_then(|bytes| Receipt::parse(&bytes).ok());
                let is_proven = receipt.is_some_and(|receipt| {
                    let root = judged.index_entry().root;
                    let is_this = |proven: &ReceiptPiece| {
                        let place = (proven.node, proven.piece, proven.form);
                        place == (store.node(), piece, PieceForm::File) && proven.root == root
                    };
                    receipt.pieces.iter().any(is_this)
                });
                if !is_proven {
                    let why = "another piece of the same attempt, not the proven one";
                    store.quarantine_file_if_unchanged(key, Some(&judged), why)?;
                }
                Ok::<_, StoreError>(())
            })
            .await
    }

    /// Releases the reservation of a part of a plan.
    pub(in crate::node) async fn release_part(&self, call: ReleasePart) -> Result<(), RemoteError> {
        self.executor.release_part(call.run);
        Ok(())
    }
}
