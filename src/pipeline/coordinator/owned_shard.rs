//! A shard that this coordinator owns. The coordinator takes the shard by compare-and-set under its
//! lease, and changes the shard's state only through this module.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Mutex, OnceCell};

use super::stripe_counts::StripeCounts;
use super::{Coordinator, CoordinatorError};
use crate::catalogue::CatalogueError;
use crate::catalogue::record_access::{
    RecordSetOutcome, compare_and_set_record, read_record, shard_state_key,
};
use crate::code::{CodeId, Layout};
use crate::format::geometry::Geometry;
use crate::format::records::{Leaves, Owner, Run, ShardRoot, ShardState, StripeState};
use crate::id::{Attempt, Generation, LeaseId};
use crate::kind::ErrorKind;
use crate::pipeline::record_fetch;
use crate::stage::{TracePoint, trace_point};
use crate::topology::Directory;

/// Maximum number of compare-and-sets for one change, since answers may be lost.
const TRIES: u32 = 4;

/// A shard that this coordinator owns, from its take to its release.
pub(super) struct OwnedShard {
    /// The shard root.
    pub root: ShardRoot,
    /// The layout of the stripes.
    pub layout: Layout,
    /// The owner's generation, which the orders carry.
    pub generation: Generation,
    lease: LeaseId,
    /// Set when the shard has another owner. No further work starts then.
    is_lost: AtomicBool,
    geometry: Geometry,
    state: Mutex<(ShardState, u64)>,
    leaves: OnceCell<Leaves>,
}

/// Returns an error if the shard has an owner whose lease is alive and is not `lease`.
async fn ensure_not_owned_by_another(
    coordinator: &Coordinator,
    root: &ShardRoot,
    state: &ShardState,
    lease: LeaseId,
) -> Result<(), CoordinatorError> {
    if let Some(owner) = &state.owner
        && owner.lease != lease
        && coordinator.catalogue.is_lease_alive(owner.lease).await?
    {
        let directory = coordinator.fetch_directory().await?;
        let owner = directory.name(owner.node);
        let what = format!("shard {}", root.name);
        return Err(CoordinatorError::Owned { what, owner });
    }
    Ok(())
}

/// Changes all stripes that are replicated, or that are being archived with another code, to
/// `Archiving` under a new attempt.
fn begin_archiving(state: &mut ShardState, attempt: Attempt, code: CodeId, generation: Generation) {
    let begun = StripeState::Archiving { attempt, code, generation };
    for run in &mut state.runs {
        run.state = match run.state {
            StripeState::Replicated => begun,
            StripeState::Archiving { code: old, .. } if old != code => begun,
            other => other,
        };
    }
    state.runs.dedup_by(|next: &mut Run, last: &mut Run| {
        let same = next.state == last.state;
        last.count += if same { next.count } else { 0 };
        same
    });
}

impl OwnedShard {
    /// Takes ownership of the shard. The same compare-and-set marks stripes as `Archiving` with
    /// this code: those that are replicated, and those that are being archived with another code.
    /// Returns the owned shard.
    pub async fn take_ownership_and_mark_archiving(
        coordinator: &Coordinator,
        root: ShardRoot,
        code: CodeId,
        lease: LeaseId,
    ) -> Result<Self, CoordinatorError> {
        let attempt = Attempt(coordinator.entropy.id());
        let mark = |state: &mut ShardState| {
            let generation = state.generation;
            begin_archiving(state, attempt, code, generation);
        };
        Self::take_ownership_and_change(coordinator, root, lease, mark).await
    }

    /// Takes ownership of the shard, and leaves the states of its stripes as they are. Returns the
    /// owned shard.
    pub async fn take_ownership(
        coordinator: &Coordinator,
        root: ShardRoot,
        lease: LeaseId,
    ) -> Result<Self, CoordinatorError> {
        Self::take_ownership_and_change(coordinator, root, lease, |_| ()).await
    }

    /// Takes ownership by a compare-and-set that also makes `change`. The state that `change` receives
    /// has the new generation already.
    ///
    /// # Errors
    /// [`CoordinatorError::Owned`] if the shard has another owner whose lease is alive;
    /// [`CoordinatorError::Fenced`] if the shard is being removed or was removed.
    async fn take_ownership_and_change(
        coordinator: &Coordinator,
        root: ShardRoot,
        lease: LeaseId,
        change: impl Fn(&mut ShardState),
    ) -> Result<Self, CoordinatorError> {
        let catalogue = &*coordinator.catalogue;
        let fenced = || CoordinatorError::Fenced { shard: root.name.to_string() };
        let geometry =
            root.geometry().map_err(|error| CoordinatorError::Format(error.to_string()))?;
        let no_code = |_| CoordinatorError::NoCode { n: root.n, k: root.k };
        let layout = Layout::new(root.n.into(), root.k.into()).map_err(no_code)?;
        let key = shard_state_key(root.shard);
        let mut current = read_record::<ShardState>(catalogue, &key).await?;
        let (generation, state) = loop {
            // The state is created together with the root. So an absent state means that the shard
            // was removed.
            let (mut state, revision) = current.ok_or_else(fenced)?;
            if state.deleting || state.states().count() as u64 != u64::from(geometry.stripes()) {
                return Err(fenced());
            }
            ensure_not_owned_by_another(coordinator, &root, &state, lease).await?;
            let generation = coordinator.generation_after(state.generation);
            state.generation = generation;
            state.owner = Some(Owner { node: coordinator.me, lease });
            change(&mut state);
            trace_point(TracePoint::Take, root.shard);
            match compare_and_set_record(catalogue, &key, Some(revision), &state).await? {
                RecordSetOutcome::Set(revision) => {
                    break (generation, Mutex::new((state, revision)));
                }
                RecordSetOutcome::Conflict(other) => current = other,
            }
        };
        let (is_lost, leaves) = (AtomicBool::new(false), OnceCell::new());
        Ok(Self { root, layout, generation, lease, is_lost, geometry, state, leaves })
    }

    /// Returns the stripes that are not archived, or whose replicas are not known to be dropped.
    pub async fn unfinished_stripes(&self) -> Vec<u32> {
        let state = self.state.lock().await;
        let finished =
            |state: &StripeState| matches!(state, StripeState::Archived { dropped: true, .. });
        (0u32..)
            .zip(state.0.states())
            .filter(|(_, state)| !finished(state))
            .map(|(i, _)| i)
            .collect()
    }

    /// Returns the counts of the shard's stripes by state.
    pub async fn count_stripes(&self) -> StripeCounts {
        let mut counts = StripeCounts::default();
        counts.add_shard(&self.geometry, self.state.lock().await.0.states());
        counts
    }

    /// Returns the state of one stripe.
    pub async fn stripe_state(&self, index: u32) -> Option<StripeState> {
        self.state.lock().await.0.stripe(index)
    }

    /// Returns the number of bytes of a stripe without its padding.
    pub fn stripe_bytes(&self, index: u32) -> u64 {
        self.geometry.stripe(index).map_or(0, |cut| cut.len_bytes)
    }

    /// Returns the shard's leaves. They are fetched once.
    pub async fn fetch_leaves(
        &self,
        coordinator: &Coordinator,
        directory: &Directory,
    ) -> Result<&Leaves, CoordinatorError> {
        let fetch = record_fetch::fetch_leaves(&coordinator.caller, directory, &self.root);
        Ok(self.leaves.get_or_try_init(|| fetch).await?)
    }

    /// Returns an error if the shard is known to have another owner.
    pub fn ensure_owned(&self) -> Result<(), CoordinatorError> {
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(CoordinatorError::Fenced { shard: self.root.name.to_string() }),
            false => Ok(()),
        }
    }

    /// Reads the shard's state and returns an error if this coordinator does not own the shard any
    /// more.
    pub async fn confirm_ownership(
        &self,
        coordinator: &Coordinator,
    ) -> Result<(), CoordinatorError> {
        let key = shard_state_key(self.root.shard);
        let found = read_record::<ShardState>(&*coordinator.catalogue, &key).await?;
        if !found.is_some_and(|(state, _)| self.is_owned_by_us(&state)) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
        self.ensure_owned()
    }

    /// Sets the state of one stripe by compare-and-set.
    pub async fn set_stripe_state(
        &self,
        coordinator: &Coordinator,
        index: u32,
        stripe: StripeState,
    ) -> Result<(), CoordinatorError> {
        let change = |next: &mut ShardState| match next.set(index, stripe) {
            true => Ok(()),
            false => Err(CoordinatorError::Format(format!(
                "stripe {index}: the shard's state would have too many spans of stripes: archive the step again"
            ))),
        };
        self.compare_and_set_state(coordinator, change).await
    }

    /// Changes the shard's state by compare-and-set. Only the owner changes it. So a state found
    /// there with another owner means that this owner is fenced, and a state found there with this
    /// owner was written by an earlier try whose answer was lost. After a try without an answer,
    /// the state is read before the next try.
    async fn compare_and_set_state(
        &self,
        coordinator: &Coordinator,
        change: impl Fn(&mut ShardState) -> Result<(), CoordinatorError>,
    ) -> Result<(), CoordinatorError> {
        let (catalogue, key) = (&*coordinator.catalogue, shard_state_key(self.root.shard));
        let mut state = self.state.lock().await;
        for _ in 0..TRIES {
            self.ensure_owned()?;
            let mut next = state.0.clone();
            change(&mut next)?;
            let found = match compare_and_set_record(catalogue, &key, Some(state.1), &next).await {
                Ok(RecordSetOutcome::Set(revision)) => {
                    *state = (next, revision);
                    return Ok(());
                }
                Ok(RecordSetOutcome::Conflict(found)) => found,
                Err(error) if error.kind().is_transient() => read_record(catalogue, &key).await?,
                Err(error) => return Err(error.into()),
            };
            match found {
                Some((found, revision)) if found == next => {
                    *state = (found, revision);
                    return Ok(());
                }
                Some((found, revision)) if self.is_owned_by_us(&found) => {
                    *state = (found, revision)
                }
                _ => self.is_lost.store(true, Ordering::Relaxed),
            }
        }
        self.ensure_owned()?;
        let message = format!("the record {key} changes again and again: try again later");
        Err(CatalogueError::Refused { kind: ErrorKind::Unavailable, message }.into())
    }

    fn is_owned_by_us(&self, state: &ShardState) -> bool {
        let owner = state.owner.as_ref().map(|owner| owner.lease);
        !state.deleting && state.generation == self.generation && owner == Some(self.lease)
    }

    /// Releases the shard. If another owner has taken the shard in the meantime, this is no error.
    pub async fn release_ownership(
        &self,
        coordinator: &Coordinator,
    ) -> Result<(), CoordinatorError> {
        let change = |next: &mut ShardState| {
            next.owner = None;
            Ok(())
        };
        match self.compare_and_set_state(coordinator, change).await {
            Err(CoordinatorError::Fenced { .. }) => Ok(()),
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use async_trait::async_trait;

    use super::*;
    use crate::catalogue::local::LocalCatalogue;
    use crate::catalogue::{Catalogue, Entry, Guard, GuardedOutcome, SetOutcome};
    use crate::clock::SystemClock;
    use crate::entropy::SeededEntropy;
    use crate::format::records::{FIELD_GF8, LAYOUT_STANDARD, Node, RingNode};
    use crate::id::{ClusterId, Epoch, NodeId, SaveId, ShardId, Step};
    use crate::net::call::Caller;
    use crate::net::memory::MemoryNetwork;
    use crate::net::pool::Pool;
    use crate::net::{Peer, Role};
    use crate::store::MemoryKv;
    use crate::wire::calls::{NodeView, RegisterAnswer};
    use crate::workers::Workers;

    /// A catalogue that loses the request or the answer of its next compare-and-set.
    struct Lossy {
        inner: LocalCatalogue,
        before: AtomicBool,
        after: AtomicBool,
    }

    fn lost() -> CatalogueError {
        CatalogueError::Unreachable { seeds: String::new(), reason: "lost".into() }
    }

    #[async_trait]
    impl Catalogue for Lossy {
        fn epoch(&self) -> Epoch {
            self.inner.epoch()
        }
        async fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError> {
            self.inner.get(key).await
        }
        async fn compare_and_set(
            &self,
            key: &str,
            expected: Option<u64>,
            value: Option<Vec<u8>>,
        ) -> Result<SetOutcome, CatalogueError> {
            if self.before.swap(false, Ordering::Relaxed) {
                return Err(lost());
            }
            let outcome = self.inner.compare_and_set(key, expected, value).await;
            if self.after.swap(false, Ordering::Relaxed) { Err(lost()) } else { outcome }
        }
        async fn compare_and_set_guarded(
            &self,
            key: &str,
            expected: Option<u64>,
            value: Vec<u8>,
            guard: &Guard,
        ) -> Result<GuardedOutcome, CatalogueError> {
            self.inner.compare_and_set_guarded(key, expected, value, guard).await
        }
        async fn list_entries(
            &self,
            prefix: &str,
            after: Option<&str>,
            limit: u32,
        ) -> Result<Vec<(String, Entry)>, CatalogueError> {
            self.inner.list_entries(prefix, after, limit).await
        }
        async fn grant_lease(&self) -> Result<(LeaseId, Duration), CatalogueError> {
            self.inner.grant_lease().await
        }
        async fn renew_lease(&self, lease: LeaseId) -> Result<bool, CatalogueError> {
            self.inner.renew_lease(lease).await
        }
        async fn is_lease_alive(&self, lease: LeaseId) -> Result<bool, CatalogueError> {
            self.inner.is_lease_alive(lease).await
        }
        async fn revoke_lease(&self, lease: LeaseId) -> Result<(), CatalogueError> {
            self.inner.revoke_lease(lease).await
        }
        async fn register_node(&self, node: &Node) -> Result<RegisterAnswer, CatalogueError> {
            self.inner.register_node(node).await
        }
        async fn list_nodes(&self) -> Result<Vec<NodeView>, CatalogueError> {
            self.inner.list_nodes().await
        }
    }

    fn root() -> ShardRoot {
        let save = SaveId([1; 12]);
        let member = |node| RingNode { node: NodeId(node), domain: 0 };
        ShardRoot {
            job: "job".parse().unwrap(),
            step: Step(1),
            save,
            index: 0,
            shards: 1,
            shard: ShardId::new(save, 0),
            name: "weights".parse().unwrap(),
            len_bytes: 3 << 18,
            block_bytes: 64 << 10,
            n: 6,
            k: 4,
            layout: LAYOUT_STANDARD,
            field: FIELD_GF8,
            fingerprint_key: [2; 32],
            ring: (0..6).map(member).collect(),
            stripes_root: [3; 32],
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_answer_does_not_cost_the_shard_and_a_new_owner_does() {
        let (clock, entropy) = (SystemClock::new(), Arc::new(SeededEntropy::new(1)));
        let kv = Arc::new(MemoryKv::new());
        let lease = Duration::from_secs(10);
        let (workers, epoch) = (Workers::inline(), Epoch::default());
        let inner =
            LocalCatalogue::open(kv, clock.clone(), entropy.clone(), &workers, lease, epoch);
        let (before, after) = Default::default();
        let catalogue = Arc::new(Lossy { inner: inner.unwrap(), before, after });
        let peer = Peer { role: Role::Node, name: "node-1".parse().unwrap() };
        let pool = Pool::new(Arc::new(MemoryNetwork::new().join(peer, "node-1")), clock.clone());
        let caller = Caller::new(pool, clock.clone(), lease);
        let coordinator = Coordinator {
            cluster: ClusterId([4; 16]),
            me: NodeId(1),
            catalogue: catalogue.clone(),
            caller,
            clock,
            entropy,
        };
        let (root, key) = (root(), shard_state_key(root().shard));
        let fresh = ShardState::fresh(Generation::default(), 3);
        compare_and_set_record(&*catalogue, &key, None, &fresh).await.unwrap();
        let code = crate::code::table::find(6, 4).unwrap().id();
        let (lease, _) = catalogue.grant_lease().await.unwrap();
        let shard =
            OwnedShard::take_ownership_and_mark_archiving(&coordinator, root.clone(), code, lease)
                .await
                .unwrap();
        let state = async || read_record::<ShardState>(&*catalogue, &key).await.unwrap().unwrap().0;
        for (index, flag) in (0..).zip([&catalogue.before, &catalogue.after]) {
            flag.store(true, Ordering::Relaxed);
            shard.set_stripe_state(&coordinator, index, StripeState::Replicated).await.unwrap();
            assert!(!flag.load(Ordering::Relaxed));
            assert_eq!(state().await.stripe(index), Some(StripeState::Replicated));
        }

        tokio::time::advance(Duration::from_secs(11)).await;
        let (lease, _) = catalogue.grant_lease().await.unwrap();
        let taken = OwnedShard::take_ownership_and_mark_archiving(&coordinator, root, code, lease)
            .await
            .unwrap();
        let now = state().await;
        catalogue.before.store(true, Ordering::Relaxed);
        let fenced =
            shard.set_stripe_state(&coordinator, 2, StripeState::Replicated).await.unwrap_err();
        assert!(matches!(fenced, CoordinatorError::Fenced { .. }), "{fenced}");
        assert!(shard.ensure_owned().is_err() && taken.ensure_owned().is_ok());
        assert_eq!(state().await, now);
        let shards = [shard, taken].map(Arc::new);
        for shard in &shards {
            shard.release_ownership(&coordinator).await.unwrap();
        }
        assert_eq!(state().await.owner, None);
    }
}
