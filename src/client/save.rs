//! Saving a checkpoint: begin, all stripes of all shards, leaves, seal, commit (docs/semantics.md, 3).

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, TryStreamExt};

use super::{Client, ClientError, LONG_LIMIT, Progress, ProgressFn};
use crate::code::Layout;
use crate::format::geometry::Geometry;
use crate::format::records::{
    FIELD_GF8, LAYOUT_STANDARD, Leaves, Record, RingNode, Saved, ShardRoot, StripeRecord,
    stripes_root,
};
use crate::gf::FingerprintKey;
use crate::id::{Generation, Job, SaveId, ShardId, ShardName, Step, StripeId};
use crate::kind::Kind;
use crate::pipeline::save::{Failures, SaveError, Source, Upload};
use crate::placement::{Spares, place, ring};
use crate::stage::{Stage, about_to};
use crate::topology::Directory;
use crate::wire::calls::{
    Abort, Begin, BeginAnswer, Commit, Keep, NodeView, PutRecord, RecordName, Seal,
};

/// Shards under way at once.
const SHARDS_AT_ONCE: usize = 4;
/// How often a save begins anew when its nodes fail under it.
const RESTARTS: u32 = 2;

/// One shard to save.
pub struct NewShard {
    /// Its name.
    pub name: ShardName,
    /// Its bytes.
    pub source: Arc<dyn Source>,
}

/// How to save.
#[derive(Debug, Clone, Copy, Default)]
pub struct SaveOptions {
    /// Replace the step if it is committed. The old one stays until the new one is.
    pub replace: bool,
}

/// What was saved.
#[derive(Debug, Clone)]
pub struct SaveReport {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// The save.
    pub save: SaveId,
    /// How many shards.
    pub shards: u32,
    /// Their bytes.
    pub len_bytes: u64,
    /// Pieces of the code that it will be archived by.
    pub n: u8,
    /// Blocks of that code.
    pub k: u8,
    /// Its generation.
    pub generation: Generation,
}

/// Keeps a save's lease until it is dropped, also with the save's own future: a save that nobody waits for ends.
struct KeptLease(tokio::task::JoinHandle<()>);

impl Drop for KeptLease {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One save between begin and commit.
struct Saving {
    client: Client,
    job: Job,
    step: Step,
    begun: BeginAnswer,
    directory: Directory,
    failures: Arc<Failures>,
    progress: Arc<dyn Fn(u64) + Send + Sync>,
}

impl Client {
    /// Saves a checkpoint. Returns when it is committed and visible.
    pub async fn save(
        &self,
        job: &Job,
        step: Step,
        shards: Vec<NewShard>,
        options: SaveOptions,
        progress: ProgressFn,
    ) -> Result<SaveReport, ClientError> {
        let mut names = HashSet::new();
        if let Some(twice) = shards.iter().find(|shard| !names.insert(&shard.name)) {
            return Err(ClientError::DuplicateName { name: twice.name.clone() });
        }
        if shards.is_empty() {
            return Err(ClientError::NoShards);
        }
        let mut restarts = 0;
        let mut avoid = Vec::new();
        loop {
            let mut save = SaveId([0; 12]);
            self.inner.entropy.fill(&mut save.0);
            let (job, replace) = (job.clone(), options.replace);
            let begin = Begin { job: job.clone(), step, replace, save, avoid: avoid.clone() };
            let begun = self.ask(&begin).await?;
            let lease = Duration::from_millis(begun.lease_ms);
            let failures = Arc::new(Failures::default());
            match self.try_save(&job, step, &shards, begun, failures.clone(), &progress).await {
                Err(ClientError::Save(error @ SaveError::NoHolders { .. }))
                    if restarts < RESTARTS =>
                {
                    // Nodes failed and there was no spare: the next begin counts who is live, and may take a smaller code. A node
                    // that is gone counts as live for one lease more; one whose disk is full is not counted.
                    restarts += 1;
                    avoid.extend(failures.refused());
                    tracing::warn!(%error, restarts, "the save begins anew");
                    self.caller().clock().sleep(lease).await;
                }
                result => return result,
            }
        }
    }

    async fn try_save(
        &self,
        job: &Job,
        step: Step,
        shards: &[NewShard],
        begun: BeginAnswer,
        failures: Arc<Failures>,
        progress: &ProgressFn,
    ) -> Result<SaveReport, ClientError> {
        let total_bytes = shards.iter().map(|shard| shard.source.len_bytes()).sum();
        let done = AtomicU64::new(0);
        let progress = progress.clone();
        let count = move |bytes| {
            let done_bytes = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            progress(Progress { done_bytes, total_bytes });
        };
        let live = begun.nodes.iter().map(|node| NodeView { node: node.clone(), live: true });
        let saving = Saving {
            client: self.clone(),
            job: job.clone(),
            step,
            directory: Directory::new(live.collect()),
            begun,
            failures,
            progress: Arc::new(count),
        };
        let lease = self.keep_lease(&saving.begun);
        let result = saving.run(shards).await;
        drop(lease);
        if let Err(error) = &result {
            let abort = Abort { job: job.clone(), step, save: saving.begun.save };
            // What cannot be aborted now is collected when its lease is over.
            if !matches!(error.kind(), Kind::Fenced) {
                let _ = self.ask(&abort).await;
            }
        }
        let saved = result?;
        Ok(SaveReport {
            job: job.clone(),
            step,
            save: saved.save,
            shards: saved.shards,
            len_bytes: saved.len_bytes,
            n: saving.begun.n,
            k: saving.begun.k,
            generation: saved.generation,
        })
    }

    fn keep_lease(&self, begun: &BeginAnswer) -> KeptLease {
        let (client, lease) = (self.clone(), begun.lease);
        let period = Duration::from_millis(begun.lease_ms / 3);
        KeptLease(tokio::spawn(async move {
            loop {
                client.caller().clock().sleep(period).await;
                // A gateway that does not answer must leave time to ask another one.
                if let Err(error) = client.ask_within(&Keep { lease }, period).await
                    && error.kind() == Kind::Fenced
                {
                    return;
                }
            }
        }))
    }
}

impl Saving {
    async fn run(&self, shards: &[NewShard]) -> Result<Saved, ClientError> {
        let count = u32::try_from(shards.len()).unwrap_or(u32::MAX);
        let work = (0u32..).zip(shards).map(|(index, shard)| self.shard(index, count, shard));
        // Collected, so that the future of a save can be sent to another thread.
        let work: Vec<_> = work.collect();
        let done: Vec<()> =
            stream::iter(work).buffer_unordered(SHARDS_AT_ONCE).try_collect().await?;
        debug_assert_eq!(done.len(), shards.len());
        let (job, step, save) = (self.job.clone(), self.step, self.begun.save);
        self.client.ask_within(&Commit { job, step, save, shards: count }, LONG_LIMIT).await
    }

    async fn shard(&self, index: u32, shards: u32, shard: &NewShard) -> Result<(), ClientError> {
        let BeginAnswer { save, generation, n, k, block_bytes, .. } = self.begun;
        let len_bytes = shard.source.len_bytes();
        let geometry = Geometry::checked(len_bytes, block_bytes, n, k)?;
        let id = ShardId::new(save, index);
        let mut fingerprint_key = [0; 32];
        self.client.inner.entropy.fill(&mut fingerprint_key);
        let ring = ring(&self.begun.nodes, index.into());
        let upload = Upload {
            caller: self.client.caller().clone(),
            workers: self.client.inner.workers.clone(),
            directory: self.directory.clone(),
            source: shard.source.clone(),
            name: shard.name.to_string(),
            key: Arc::new(FingerprintKey::derive(&fingerprint_key)),
            key_bytes: fingerprint_key,
            generation,
            layout: Layout::new(n.into(), k.into())?,
            failures: self.failures.clone(),
            progress: self.progress.clone(),
        };
        let mut hashes = Vec::with_capacity(geometry.stripes() as usize);
        for stripe in 0..geometry.stripes() {
            hashes.push(
                self.stripe(&upload, &ring, &geometry, StripeId { shard: id, index: stripe })
                    .await?,
            );
        }
        let root = ShardRoot {
            job: self.job.clone(),
            step: self.step,
            save,
            index,
            shards,
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
        self.leaves(&root, hashes).await?;
        self.client.ask(&Seal { root }).await
    }

    async fn stripe(
        &self,
        upload: &Upload,
        ring: &[RingNode],
        geometry: &Geometry,
        stripe: StripeId,
    ) -> Result<[u8; 32], ClientError> {
        let (n, k) = (geometry.n.into(), geometry.k.into());
        let mut places = place(ring, n, k, stripe.index)?;
        let spares = Spares::new(ring, upload.layout, &places, |_| true);
        let Some(cut) = geometry.stripe(stripe.index) else {
            return Err(ClientError::NoShards);
        };
        about_to(Stage::Send, stripe);
        let fixed = upload.stripe(stripe, cut, &mut places, spares).await?;
        let record = StripeRecord::new(&fixed, places.clone())?;
        upload.record(&fixed, &record, &places).await?;
        Ok(record.leaf())
    }

    /// The leaves go to the whole ring; all but k-1 nodes at most must have them.
    async fn leaves(&self, root: &ShardRoot, hashes: Vec<[u8; 32]>) -> Result<(), ClientError> {
        let leaves = Leaves { root: root.clone(), hashes };
        let call = PutRecord {
            shard: root.shard,
            record: RecordName::Leaves,
            generation: self.begun.generation,
            bytes: leaves.to_bytes()?,
        };
        let puts = root.ring.iter().map(|member| {
            let call = &call;
            async move {
                let to = self.directory.address(member.node)?;
                Some(self.client.caller().call(&to, call).await)
            }
        });
        let mut puts = stream::iter(puts.collect::<Vec<_>>()).buffer_unordered(16);
        let (mut missed, mut last) = (0, None);
        while let Some(put) = puts.next().await {
            if let Some(Err(error)) = put {
                missed += 1;
                last = Some(error);
            }
        }
        match last {
            Some(error) if missed > usize::from(root.k) - 1 => Err(error.into()),
            _ => Ok(()),
        }
    }
}
