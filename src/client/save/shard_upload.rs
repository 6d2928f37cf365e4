//! The upload of one shard of a save: its stripes, their records, and the leaves.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::{self, TryStreamExt};

use super::save_decisions::NewShard;
use super::save_session::{STRIPES_AT_ONCE, SaveSession};
use crate::client::ClientError;
use crate::code::Layout;
use crate::format::geometry::Geometry;
use crate::format::records::{
    FIELD_GF8, LAYOUT_STANDARD, Leaves, Record, RingNode, ShardRoot, StripeRecord, stripes_root,
};
use crate::gf::FingerprintKey;
use crate::id::{NodeId, ShardId, StripeId};
use crate::net::call::CallError;
use crate::pipeline::upload::{SaveError, StripeUploader};
use crate::placement::{Spares, place};
use crate::stage::{TracePoint, trace_point};
use crate::wire::calls::{BeginSaveAnswer, PutRecord, RecordName};

/// Number of stripes of one shard that are saved at once. While the slowest blocks of one stripe,
/// and its records, are being sent, the other stripes keep the links of the other nodes busy. A
/// single large shard, as a trainer saves it, may use all slots of the save.
const STRIPES_OF_A_SHARD: usize = STRIPES_AT_ONCE;
/// Number of nodes that get the leaves of a shard at once.
const LEAVES_AT_ONCE: usize = 16;

/// The parameters of a shard that follow from its save.
pub(super) struct ShardParameters {
    /// The shard's number, from 0.
    pub(super) index: u32,
    /// The number of shards of the save.
    pub(super) shard_count: u32,
    /// The shard's ring.
    pub(super) ring: Vec<RingNode>,
    /// The key of the shard's fingerprints.
    pub(super) fingerprint_key: [u8; 32],
}

impl SaveSession {
    /// Uploads all stripes of a shard, their records, and the leaves. Returns the shard's root.
    pub(super) async fn upload_shard(
        &self,
        parameters: ShardParameters,
        shard: &NewShard,
    ) -> Result<ShardRoot, ClientError> {
        let ShardParameters { index, shard_count, ring, fingerprint_key } = parameters;
        let BeginSaveAnswer { save, generation, n, k, block_bytes, .. } = self.begun;
        let len_bytes = shard.source.len_bytes();
        let geometry = Geometry::checked(len_bytes, block_bytes, n, k)?;
        let id = ShardId::new(save, index);
        let upload = StripeUploader {
            caller: self.client.caller().clone(),
            workers: self.client.workers().clone(),
            directory: self.directory.clone(),
            source: shard.source.clone(),
            name: shard.name.to_string(),
            key: Arc::new(FingerprintKey::derive(&fingerprint_key)),
            key_bytes: fingerprint_key,
            generation,
            layout: Layout::new(n.into(), k.into())?,
            block_permits: self.block_permits.clone(),
            failures: self.failures.clone(),
            progress: self.progress.clone(),
        };
        let stripes = (0..geometry.stripes()).map(|index| StripeId { shard: id, index });
        let work =
            stripes.map(|stripe| self.upload_stripe_and_record(&upload, &ring, &geometry, stripe));
        let work: Vec<_> = work.collect();
        let hashes: Vec<[u8; 32]> =
            stream::iter(work).buffered(STRIPES_OF_A_SHARD).try_collect().await?;
        self.ensure_unchanged(shard).await?;
        let root = ShardRoot {
            job: self.job.clone(),
            step: self.step,
            save,
            index,
            shards: shard_count,
            shard: id,
            name: shard.name.clone(),
            len_bytes,
            block_bytes,
            n,
            k,
            layout: LAYOUT_STANDARD,
            field: FIELD_GF8,
            fingerprint_key,
            ring,
            stripes_root: stripes_root(&hashes),
        };
        self.put_leaves(&root, hashes).await?;
        Ok(root)
    }

    /// Returns an error if the shard's source has changed since it was opened.
    async fn ensure_unchanged(&self, shard: &NewShard) -> Result<(), ClientError> {
        let (source, name) = (shard.source.clone(), shard.name.to_string());
        match self.client.workers().run(move || source.is_unchanged()).await? {
            Ok(true) => Ok(()),
            Ok(false) => Err(SaveError::Changed { shard: name }.into()),
            Err(source) => {
                let offset = shard.source.len_bytes();
                Err(SaveError::Source { shard: name, offset, source }.into())
            }
        }
    }

    async fn upload_stripe_and_record(
        &self,
        upload: &StripeUploader,
        ring: &[RingNode],
        geometry: &Geometry,
        stripe: StripeId,
    ) -> Result<[u8; 32], ClientError> {
        // The semaphore is never closed while the save runs.
        let _slot = self.stripes.acquire().await;
        let (n, k) = (geometry.n.into(), geometry.k.into());
        let mut places = place(ring, n, k, stripe.index)?;
        let spares = Spares::new(ring, upload.layout, &places, |_| true);
        let Some(cut) = geometry.stripe(stripe.index) else {
            return Err(ClientError::NoShards);
        };
        trace_point(TracePoint::Send, stripe);
        let fixed = upload.upload_stripe(stripe, cut, &mut places, spares).await?;
        let record = StripeRecord::new(&fixed, places.clone())?;
        upload.put_stripe_record(&fixed, &record, &places).await?;
        Ok(record.leaf())
    }

    /// Puts the leaves on the nodes of the ring. Returns an error if more than k-1 nodes failed to
    /// store them.
    async fn put_leaves(&self, root: &ShardRoot, hashes: Vec<[u8; 32]>) -> Result<(), ClientError> {
        let leaves = Leaves { root: root.clone(), hashes };
        let call = PutRecord {
            shard: root.shard,
            record: RecordName::Leaves,
            generation: self.begun.generation,
            bytes: leaves.to_bytes()?,
        };
        let tolerated = usize::from(root.k) - 1;
        // A silent node would cost a timeout for each shard of the save. It is asked only if its copy
        // is needed.
        let ring = root.ring.iter().map(|member| member.node);
        let (silent, others): (Vec<NodeId>, Vec<NodeId>) =
            ring.partition(|node| self.directory.is_silent(*node));
        let mut failed = self.put_record_on(&others, &call).await;
        if failed.len() + silent.len() > tolerated {
            failed.extend(self.put_record_on(&silent, &call).await);
        }
        match failed.pop() {
            Some(error) if failed.len() >= tolerated => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Puts a record on each of `nodes` whose address is known. Returns the errors.
    async fn put_record_on(&self, nodes: &[NodeId], call: &PutRecord) -> Vec<CallError> {
        let puts = nodes.iter().map(|node| async move {
            let to = self.directory.address(*node)?;
            let put = self.client.caller().call(&to, call).await;
            self.directory.heard(*node, !put.as_ref().is_err_and(CallError::is_unanswered));
            put.err()
        });
        let puts = stream::iter(puts.collect::<Vec<_>>()).buffer_unordered(LEAVES_AT_ONCE);
        puts.filter_map(|failed| async move { failed }).collect().await
    }
}
