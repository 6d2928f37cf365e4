//! The pause of retention: while it lasts, neither the policy nor a trainer's `keep` removes steps
//! (docs/semantics.md, 9). A rebuilt catalogue begins with it, because the labels that protect steps
//! are lost.

use super::committed_steps::CommittedSteps;
use crate::catalogue::record_access::RETENTION_PAUSED;
use crate::catalogue::{Catalogue, CatalogueError, SetOutcome};
use crate::wire::RemoteError;
use crate::wire::calls::SetRetention;
use crate::wire::policy::RetentionChange;

/// Returns whether retention is paused.
pub(in crate::node) async fn is_retention_paused(
    catalogue: &dyn Catalogue,
) -> Result<bool, CatalogueError> {
    Ok(catalogue.get(RETENTION_PAUSED).await?.is_some())
}

impl CommittedSteps {
    /// Pauses or resumes retention, or leaves it as it is. Returns whether it is paused afterwards.
    /// Repeating it is safe.
    pub(in crate::node) async fn set_retention(
        &self,
        call: SetRetention,
    ) -> Result<bool, RemoteError> {
        let catalogue = self.catalogue();
        loop {
            let found = catalogue.get(RETENTION_PAUSED).await?;
            let is_paused = found.is_some();
            let value = match call.change {
                RetentionChange::None => return Ok(is_paused),
                RetentionChange::Pause => Some(Vec::new()),
                RetentionChange::Resume => None,
            };
            let will_pause = value.is_some();
            if will_pause == is_paused {
                return Ok(is_paused);
            }
            let revision = found.map(|entry| entry.revision);
            let set = catalogue.compare_and_set(RETENTION_PAUSED, revision, value).await?;
            if let SetOutcome::Set(_) = set {
                tracing::info!(is_paused = will_pause, "retention was paused or resumed");
                return Ok(will_pause);
            }
        }
    }
}
