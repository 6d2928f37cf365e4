//! The roots of a committed step's shards, and the record of its save, with which a restore needs
//! no catalogue (docs/semantics.md, 6). These calls do not probe which nodes answer.

use std::collections::BTreeSet;

use super::{Client, ClientError};
use crate::format::records::ShardRoot;
use crate::format::save_record::{SaveHead, SaveRecord};
use crate::id::{Job, NodeId, Step};

impl Client {
    /// Returns the roots of the shards of a committed step (`None`: the latest).
    pub async fn fetch_shard_roots(
        &self,
        job: &Job,
        step: Option<Step>,
    ) -> Result<Vec<ShardRoot>, ClientError> {
        let found = self.fetch_step(job, step).await?;
        Ok(found.shards.into_iter().map(|(root, _)| root).collect())
    }

    /// Returns the record of the save that is committed as a step (`None`: the latest). It lists the
    /// nodes of the save's rings that are members now, with their present addresses.
    pub async fn fetch_save_record(
        &self,
        job: &Job,
        step: Option<Step>,
    ) -> Result<SaveRecord, ClientError> {
        let found = self.fetch_step(job, step).await?;
        let roots: Vec<ShardRoot> = found.shards.into_iter().map(|(root, _)| root).collect();
        let places = roots.iter().flat_map(|root| &root.ring);
        let named: BTreeSet<NodeId> = places.map(|place| place.node).collect();
        let nodes = self.fetch_known_nodes().await?.into_iter().map(|view| view.node);
        let nodes = nodes.filter(|node| named.contains(&NodeId::of(&node.name))).collect();
        let cluster = self.fetch_cluster_id().await?;
        Ok(SaveRecord::new(SaveHead { cluster, saved: found.step.saved, nodes }, roots)?)
    }
}
