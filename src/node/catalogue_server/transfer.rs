//! The catalogue moves from the daemon that serves it to this one (docs/semantics.md, 8).
//!
//! What makes it safe is one comparison: the old home ends its catalogue only for a copy that comes to what it has itself.

use std::sync::Arc;
use std::time::Duration;

use super::rebuild::without;
use crate::catalogue::local::LocalCatalogue;
use crate::catalogue::map::MapWriter;
use crate::catalogue::{Catalogue, MAX_PAGE};
use crate::format::records::Node as NodeRecord;
use crate::id::{Epoch, MapId};
use crate::kind::Kind;
use crate::net::call::CallError;
use crate::node::Node;
use crate::node::rpc::failure::failure;
use crate::wire::calls::{
    CatalogueList, Claim, HandOver, Hello, HelloAnswer, HoldStill, MapSum, MoveAnswer,
};
use crate::wire::{Failure, NodeAddress};

/// How long the old home is asked to hand over while it does not answer.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(30);
/// Between two such requests.
const HAND_OVER_WAIT: Duration = Duration::from_millis(500);

/// A copy of another daemon's map, durable, and no catalogue yet.
struct Copied {
    map: MapWriter,
    sum: MapSum,
    entries: u64,
}

impl Node {
    /// The home's part: changes nothing for a while.
    pub(in crate::node) async fn hold_still(&self) -> Result<MapSum, Failure> {
        Ok(self.hosted()?.hold_still().await?)
    }

    /// The home's part: its catalogue ends, for a whole copy of it. Again, for the same copy: the same answer. Runs in a task of its own:
    /// whoever asks may go away in the middle.
    pub(in crate::node) async fn hand_over(
        self: &Arc<Self>,
        call: HandOver,
    ) -> Result<(), Failure> {
        let node = self.clone();
        let work = self.tasks.spawn(async move { node.hand_over_now(call).await });
        let died = |_| failure(Kind::Unavailable, "the daemon is stopping: ask it again");
        work.await.map_err(died)?
    }

    async fn hand_over_now(&self, call: HandOver) -> Result<(), Failure> {
        let HandOver { copied, epoch, map, home } = call;
        let local = match self.hosted_catalogue() {
            Some(local) if epoch > local.epoch() && epoch.is_near(local.epoch()) => local,
            None if self.store.epoch() == epoch && self.store.map() == Some(map) => return Ok(()),
            _ => {
                let text = format!("the catalogue of an epoch before {epoch} is not served here");
                return Err(failure(Kind::Fenced, text));
            }
        };
        if local.is_read_only() {
            let text = "the catalogue here hears too few nodes to know that it is the latest";
            return Err(failure(Kind::Unavailable, text));
        }
        local.hand_over(copied).await?;
        let claimed = self.claim(Claim { epoch, map, home }).await;
        local.handed_over(claimed.is_err());
        if claimed.is_ok() {
            tracing::warn!(%epoch, "the catalogue was handed over");
        }
        claimed
    }

    /// Runs in a task of its own: an operator who goes away does not leave the cluster between two catalogues.
    pub(in crate::node) async fn move_here(self: &Arc<Self>) -> Result<MoveAnswer, Failure> {
        let node = self.clone();
        let work = self.tasks.spawn(async move {
            let Ok(_alone) = node.rebuilding.try_lock() else {
                let text = "a move or rebuild is under way here: wait for it";
                return Err(failure(Kind::Exists, text));
            };
            node.move_now().await
        });
        work.await.map_err(|_| {
            failure(
                Kind::Unavailable,
                "the daemon is stopping: `rapidraid status` says where the catalogue is",
            )
        })?
    }

    async fn move_now(&self) -> Result<MoveAnswer, Failure> {
        if self.hosted_catalogue().is_some() {
            return Err(failure(Kind::Exists, "the catalogue is served here already"));
        }
        // Whoever answers is the home.
        self.catalogue().nodes().await?;
        let Some(old) = self.catalogue_home() else {
            return Err(failure(Kind::Unavailable, "the catalogue has just moved: try again"));
        };
        let epoch = self.next_epoch(&old).await?;
        let copied = self.copy_from(&old).await?;
        let (map, home) = (MapId(self.entropy.id()), self.address());
        let order = HandOver { copied: copied.sum, epoch, map, home: home.clone() };
        self.take_from(&old, &order).await?;
        let entries = copied.entries;
        let local = self.begin_copy(copied.map, Claim { epoch, map, home }).await;
        let local = local.map_err(|error| {
            let text = format!(
                "{} has handed the catalogue over, and here it could not be begun ({error}): `rapidraid catalogue rebuild`, here or elsewhere",
                old.name
            );
            failure(error.kind, text)
        })?;
        tracing::warn!(%epoch, from = %old.name, "the catalogue is served here");
        // It changes nothing before more than half of the nodes have heard of it; the others need not wait until they are asked.
        if self.hears_enough(&local).await {
            local.set_read_only(false);
        }
        Ok(MoveAnswer { epoch, home: self.settings.name.clone(), from: old.name, entries })
    }

    /// From here on the copy is the catalogue.
    async fn begin_copy(
        &self,
        copy: MapWriter,
        claim: Claim,
    ) -> Result<Arc<LocalCatalogue>, Failure> {
        let (epoch, map) = (claim.epoch, claim.map);
        self.claim(claim).await?;
        let kv = self.workers.run(move || copy.finish(epoch, map)).await??;
        let local = self.open_map(kv, epoch).await?;
        local.set_read_only(true);
        self.hosting.serve(local.clone());
        Ok(local)
    }

    /// The epoch after that of the catalogue at `old`, which must be the latest that is heard of. More than half of the storage nodes must
    /// answer: without them this daemon could change nothing afterwards.
    async fn next_epoch(&self, old: &NodeAddress) -> Result<Epoch, Failure> {
        let (members, heard) = self.gather_members().await?;
        let hello = self.caller.call(old, &Hello { me: None }).await?;
        if hello.map.is_none() || (hello.epoch, hello.map) != (self.store.epoch(), self.store.map())
        {
            let text = format!(
                "this daemon has not heard yet of the catalogue that {} serves: try again in some seconds",
                old.name
            );
            return Err(failure(Kind::Busy, text));
        }
        let is_later = |other: &HelloAnswer| {
            let is_other = other.map.is_some() && other.map != hello.map;
            other.epoch > hello.epoch || other.epoch == hello.epoch && is_other
        };
        if let Some((node, other)) = heard.iter().find(|(_, other)| is_later(other)) {
            let text = format!(
                "node {} has heard of a catalogue of epoch {}, other than the one that {} serves: `rapidraid status`",
                node.name, other.epoch, old.name
            );
            return Err(failure(Kind::Fenced, text));
        }
        let reached: Vec<NodeRecord> = heard.into_iter().map(|(node, _)| node).collect();
        let all = members.iter().filter(|node| node.storage).count();
        let missing: Vec<&str> =
            without(&members, &reached).map(|node| node.name.as_str()).collect();
        if missing.len() * 2 >= all {
            let text = format!(
                "{} of {all} storage nodes are reached from here, more than half must be: start {}",
                all - missing.len(),
                missing.join(", ")
            );
            return Err(failure(Kind::Unavailable, text));
        }
        Ok(hello.epoch.next())
    }

    /// Copies all entries of the catalogue at `old`, which holds still meanwhile.
    async fn copy_from(&self, old: &NodeAddress) -> Result<Copied, Failure> {
        let held = self.caller.call(old, &HoldStill {}).await?;
        let fresh = self.fresh_map().await?;
        let mut map = MapWriter::copy(fresh, held.revision);
        let (mut entries, mut after) = (0, None);
        loop {
            let page =
                CatalogueList { prefix: String::new(), after: after.take(), limit: MAX_PAGE };
            let page = self.caller.call(old, &page).await?;
            self.caller.call(old, &HoldStill {}).await?;
            let Some((last, ..)) = page.last() else { break };
            after = Some(last.clone());
            entries += page.len() as u64;
            map = self
                .workers
                .run(move || {
                    for (key, value, revision) in &page {
                        map.put_at(key, value, *revision)?;
                    }
                    Ok::<_, Failure>(map)
                })
                .await??;
        }
        let (map, sum) = self
            .workers
            .run(move || {
                let sum = map.sum()?;
                Ok::<_, Failure>((map, sum))
            })
            .await??;
        Ok(Copied { map, sum, entries })
    }

    /// Has the old home end its catalogue. An answer that is lost is asked for again: it is the same.
    async fn take_from(&self, old: &NodeAddress, order: &HandOver) -> Result<(), Failure> {
        let until = self.clock.now() + HAND_OVER_LIMIT;
        loop {
            match self.caller.call(old, order).await {
                Ok(()) => return Ok(()),
                Err(error) if !error.kind().is_transient() => return Err(error.into()),
                Err(error) if self.clock.now() >= until => return Err(unsure(old, &error)),
                Err(error) => tracing::info!(%error, "the old home has not answered"),
            }
            self.clock.sleep(HAND_OVER_WAIT).await;
        }
    }
}

fn unsure(old: &NodeAddress, error: &CallError) -> Failure {
    let text = format!(
        "{} did not say whether it has handed the catalogue over ({error}): start it, and look at `rapidraid status`; if no daemon serves the catalogue then, `rapidraid catalogue rebuild`",
        old.name
    );
    failure(Kind::Unavailable, text)
}
