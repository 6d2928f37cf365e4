//! Saves that a rebuilt catalogue knows only as to be removed (docs/semantics.md, 8).

use super::Node;
use crate::catalogue::records::{ORPHANS, parse};
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::{RemoveReason, Removing};
use crate::wire::Failure;

impl Node {
    /// Goes on with them, as far as that goes now. One stays on the list until every node has removed it.
    pub(super) async fn collect_orphans(&self, catalogue: &dyn Catalogue) -> Result<(), Failure> {
        let nodes = catalogue.nodes().await?.into_iter().map(|view| view.node);
        let storage: Vec<_> = nodes.filter(|node| node.storage).collect();
        let mut after: Option<String> = None;
        loop {
            let page = catalogue.list(ORPHANS, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = Some(last.clone());
            for (key, entry) in &page {
                let removing: Removing = parse(key, &entry.value)?;
                // That nobody has a mark is evidence only when everybody has said so.
                if removing.reason == RemoveReason::Aborted
                    && self.is_marked(&storage, removing.save).await != Some(false)
                {
                    tracing::info!(save = %removing.save, "a save without a known mark is kept until all nodes have been asked");
                    continue;
                }
                match self.removal_of_orphan(&removing).await {
                    Ok(true) => {
                        catalogue.set(key, Some(entry.revision), None).await?;
                    }
                    Ok(false) => {}
                    Err(error) => {
                        tracing::info!(save = %removing.save, %error, "a removal goes on later")
                    }
                }
            }
        }
    }
}
