//! The transfer of the catalogue from the daemon that serves it to this one (docs/semantics.md, 8).
//!
//! One comparison makes the transfer safe: the old server ends its catalogue only for a copy with
//! the same checksum as its own database.

use std::sync::Arc;
use std::time::Duration;

use super::catalogue_calls::CatalogueCalls;
use super::error::CatalogueServerError;
use super::majority::MajorityChecks;
use super::membership::Membership;
use super::rebuild::{CatalogueRebuild, unreached_storage_nodes};
use crate::catalogue::database_format::DbWriter;
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::Node as NodeRecord;
use crate::id::{DbId, Epoch};
use crate::net::call::CallError;
use crate::node::context::NodeContext;
use crate::node::remote_errors::remote_error;
use crate::wire::calls::{
    ClaimEpoch, DbChecksum, Hello, HelloAnswer, ListKeys, MoveCatalogueAnswer, PauseWrites,
    TransferCatalogue,
};
use crate::wire::{NodeAddress, RemoteError};

/// How long the old server is asked for the transfer while it does not answer.
const TRANSFER_LIMIT: Duration = Duration::from_secs(30);
/// Wait between two such requests.
const TRANSFER_RETRY_WAIT: Duration = Duration::from_millis(500);

/// A durable copy of another daemon's catalogue database, which is not a catalogue yet.
struct DbCopy {
    writer: DbWriter,
    sum: DbChecksum,
    entries: u64,
}

/// The service that moves the catalogue to this node, and gives it up to another one.
pub(in crate::node) struct CatalogueTransfer {
    context: Arc<NodeContext>,
    membership: Arc<Membership>,
    majority_checks: Arc<MajorityChecks>,
    catalogue_calls: Arc<CatalogueCalls>,
    rebuild: Arc<CatalogueRebuild>,
}

impl CatalogueTransfer {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        membership: Arc<Membership>,
        majority_checks: Arc<MajorityChecks>,
        catalogue_calls: Arc<CatalogueCalls>,
        rebuild: Arc<CatalogueRebuild>,
    ) -> Self {
        Self { context, membership, majority_checks, catalogue_calls, rebuild }
    }

    /// Pauses changes of the catalogue for a while. Runs on the old server. Returns the checksum of
    /// the database.
    pub(in crate::node) async fn pause_writes(&self) -> Result<DbChecksum, RemoteError> {
        Ok(self.catalogue_calls.require_local_catalogue()?.pause_writes().await?)
    }

    /// Ends the catalogue on this daemon in favour of a complete copy of it. Runs on the old
    /// server, in a task of its own, because the caller may disconnect in the middle. A repeated
    /// call for the same copy has the same answer.
    pub(in crate::node) async fn cede_catalogue_to_copy(
        self: &Arc<Self>,
        call: TransferCatalogue,
    ) -> Result<(), RemoteError> {
        let service = self.clone();
        let work =
            self.context.tasks.spawn(async move { service.end_catalogue_for_transfer(call).await });
        work.await.map_err(|_| CatalogueServerError::StoppingDuringTransfer)?
    }

    async fn end_catalogue_for_transfer(&self, call: TransferCatalogue) -> Result<(), RemoteError> {
        let TransferCatalogue { copied, epoch, map, home } = call;
        let local = match self.context.local_catalogue() {
            Some(local) if epoch > local.epoch() && epoch.is_near(local.epoch()) => local,
            None if self.context.store.highest_seen_epoch() == epoch
                && self.context.store.db_id_of_highest_epoch() == Some(map) =>
            {
                return Ok(());
            }
            _ => return Err(CatalogueServerError::OlderCatalogueNotServed { epoch }.into()),
        };
        if local.is_read_only() {
            return Err(CatalogueServerError::CatalogueReadOnly.into());
        }
        local.stop_writes_for_transfer(copied).await?;
        let claimed = self.rebuild.claim_epoch(ClaimEpoch { epoch, map, home }).await;
        local.end_transfer(claimed.is_err());
        if claimed.is_ok() {
            tracing::warn!(%epoch, "the catalogue was transferred from this daemon to another one");
        }
        claimed
    }

    /// Moves the catalogue to this daemon, in a task of its own: an operator who disconnects must
    /// not leave the cluster between two catalogues. Returns the new epoch, both servers and the
    /// number of entries.
    pub(in crate::node) async fn move_catalogue_here(
        self: &Arc<Self>,
    ) -> Result<MoveCatalogueAnswer, RemoteError> {
        let service = self.clone();
        let work = self.context.tasks.spawn(async move {
            let Some(_alone) = service.rebuild.try_lock_changes() else {
                return Err(CatalogueServerError::ChangeUnderWay.into());
            };
            service.pull_catalogue_here().await
        });
        work.await.map_err(|_| CatalogueServerError::StoppingDuringMove)?
    }

    async fn pull_catalogue_here(&self) -> Result<MoveCatalogueAnswer, RemoteError> {
        if self.context.local_catalogue().is_some() {
            return Err(CatalogueServerError::CatalogueServedHere.into());
        }
        // The node that answers is the catalogue server, and its address is known afterwards.
        self.context.catalogue().list_nodes().await?;
        let Some(old) = self.context.catalogue_server_address() else {
            return Err(CatalogueServerError::CatalogueJustMoved.into());
        };
        let epoch = self.check_and_choose_epoch(&old).await?;
        let copied = self.pause_and_copy_db_from(&old).await?;
        let (map, home) = (DbId(self.context.entropy.id()), self.context.own_address());
        let order = TransferCatalogue { copied: copied.sum, epoch, map, home: home.clone() };
        self.end_catalogue_on_old_server(&old, &order).await?;
        let entries = copied.entries;
        let local = self.claim_and_serve_copy(copied.writer, ClaimEpoch { epoch, map, home }).await;
        let local = local.map_err(|error| {
            let text = format!(
                "{} has transferred the catalogue, but it could not be started here ({error}): run `rapidraid catalogue rebuild`, here or elsewhere",
                old.name
            );
            remote_error(error.kind, text)
        })?;
        tracing::warn!(%epoch, from = %old.name, "the catalogue was moved here, as requested");
        // The catalogue accepts no changes until more than half of the nodes have heard of it.
        // Telling them here saves the wait for the next round.
        if self.majority_checks.claim_majority_or_step_down(&local).await {
            local.set_read_only(false);
        }
        Ok(MoveCatalogueAnswer {
            epoch,
            home: self.context.settings.name.clone(),
            from: old.name,
            entries,
        })
    }

    /// Claims the epoch for the copy and serves it, read-only at first. From here on the copy is
    /// the catalogue. Returns that catalogue.
    async fn claim_and_serve_copy(
        &self,
        copy: DbWriter,
        claim: ClaimEpoch,
    ) -> Result<Arc<LocalCatalogue>, RemoteError> {
        let (epoch, map) = (claim.epoch, claim.map);
        self.rebuild.claim_epoch(claim).await?;
        let kv = self.context.workers.run(move || copy.finish(epoch, map)).await??;
        let local = self.rebuild.open_local_catalogue(kv, epoch).await?;
        local.set_read_only(true);
        self.context.catalogue_server.start_serving(local.clone());
        Ok(local)
    }

    /// Returns the epoch after that of the catalogue at `old_server`, which must be the latest of
    /// which any node has heard.
    ///
    /// # Errors
    /// Fails with kind `Busy` if this node has not noted that catalogue yet, with kind `Fenced` if
    /// a node has heard of a later catalogue or of another one of the same epoch, and with kind
    /// `Unavailable` if half or fewer of the storage nodes answer: without more than half, this
    /// daemon could change nothing afterwards.
    async fn check_and_choose_epoch(&self, old_server: &NodeAddress) -> Result<Epoch, RemoteError> {
        let (members, heard) = self.membership.discover_members().await?;
        let hello = self.context.caller.call(old_server, &Hello { me: None }).await?;
        if hello.map.is_none()
            || (hello.epoch, hello.map)
                != (
                    self.context.store.highest_seen_epoch(),
                    self.context.store.db_id_of_highest_epoch(),
                )
        {
            let server = old_server.name.clone();
            return Err(CatalogueServerError::CatalogueNotNoted { server }.into());
        }
        let is_later = |other: &HelloAnswer| {
            let is_other = other.map.is_some() && other.map != hello.map;
            other.epoch > hello.epoch || other.epoch == hello.epoch && is_other
        };
        if let Some((node, other)) = heard.iter().find(|(_, other)| is_later(other)) {
            let other_known = CatalogueServerError::OtherCatalogueKnown {
                node: node.name.clone(),
                epoch: other.epoch,
                server: old_server.name.clone(),
            };
            return Err(other_known.into());
        }
        let reached: Vec<NodeRecord> = heard.into_iter().map(|(node, _)| node).collect();
        let all = members.iter().filter(|node| node.storage).count();
        let missing: Vec<&str> =
            unreached_storage_nodes(&members, &reached).map(|node| node.name.as_str()).collect();
        if missing.len() * 2 >= all {
            let (reached, nodes) = (all - missing.len(), missing.join(", "));
            return Err(CatalogueServerError::MajorityNotReached { reached, all, nodes }.into());
        }
        Ok(hello.epoch.next())
    }

    /// Copies all entries of the catalogue at `old_server`, whose writes are paused meanwhile.
    /// Returns the copy with its checksum.
    async fn pause_and_copy_db_from(
        &self,
        old_server: &NodeAddress,
    ) -> Result<DbCopy, RemoteError> {
        let held = self.context.caller.call(old_server, &PauseWrites {}).await?;
        let fresh = self.rebuild.set_aside_and_create_db().await?;
        let mut map = DbWriter::for_copy(fresh, held.revision);
        let (mut entries, mut after) = (0, None);
        loop {
            let page = ListKeys { prefix: String::new(), after: after.take(), limit: MAX_PAGE };
            let page = self.context.caller.call(old_server, &page).await?;
            self.context.caller.call(old_server, &PauseWrites {}).await?;
            let Some((last, ..)) = page.last() else { break };
            after = Some(last.clone());
            entries += page.len() as u64;
            map = self
                .context
                .workers
                .run(move || {
                    for (key, value, revision) in &page {
                        map.put_entry_at_revision(key, value, *revision)?;
                    }
                    Ok::<_, RemoteError>(map)
                })
                .await??;
        }
        let (map, sum) = self
            .context
            .workers
            .run(move || {
                let sum = map.flush_and_checksum()?;
                Ok::<_, RemoteError>((map, sum))
            })
            .await??;
        Ok(DbCopy { writer: map, sum, entries })
    }

    /// Orders the old server to end its catalogue. Repeats the order if the answer is lost: the
    /// answer is the same.
    ///
    /// # Errors
    /// Fails with kind `Unavailable` if the old server did not answer in time, so that the outcome
    /// is unknown, and with the old server's error if it refused.
    async fn end_catalogue_on_old_server(
        &self,
        old_server: &NodeAddress,
        order: &TransferCatalogue,
    ) -> Result<(), RemoteError> {
        let until = self.context.clock.now() + TRANSFER_LIMIT;
        loop {
            match self.context.caller.call(old_server, order).await {
                Ok(()) => return Ok(()),
                Err(error) if !error.kind().is_transient() => return Err(error.into()),
                Err(error) if self.context.clock.now() >= until => {
                    return Err(unknown_transfer_error(old_server, &error));
                }
                Err(error) => {
                    tracing::info!(%error, "the old catalogue server has not confirmed the transfer; retrying")
                }
            }
            self.context.clock.sleep(TRANSFER_RETRY_WAIT).await;
        }
    }
}

/// Returns the error for an old server that did not say whether it has ended its catalogue.
fn unknown_transfer_error(old_server: &NodeAddress, error: &CallError) -> RemoteError {
    let (server, reason) = (old_server.name.clone(), error.to_string());
    CatalogueServerError::TransferOutcomeUnknown { server, reason }.into()
}
