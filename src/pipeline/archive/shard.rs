//! A shard that this coordinator owns: taken by compare-and-set under its lease, changed only through here.

use std::sync::Arc;

use tokio::sync::{Mutex, OnceCell};

use super::{ArchiveError, Coordinator};
use crate::catalogue::records::{Written, read, state_key, write};
use crate::code::{Code, RsCode, table};
use crate::format::geometry::Geometry;
use crate::format::records::{Leaves, Owner, Run, ShardRoot, ShardState, StripeState};
use crate::id::{Attempt, Generation, LeaseId};
use crate::pipeline::records;
use crate::topology::Directory;
use crate::wire::calls::{ArchiveOptions, PlanChoice};

/// A shard between take and release.
pub(super) struct OwnedShard {
    /// Its root.
    pub root: ShardRoot,
    /// The code that its stripes are archived into.
    pub code: Code,
    /// The owner's generation: what orders carry.
    pub generation: Generation,
    geometry: Geometry,
    state: Mutex<(ShardState, u64)>,
    leaves: OnceCell<Leaves>,
}

fn code_for(root: &ShardRoot, plan: PlanChoice) -> Result<Code, ArchiveError> {
    let (n, k) = (usize::from(root.n), usize::from(root.k));
    let code = match plan {
        PlanChoice::Chain => table::find(n, k).cloned().map(Code::Chain),
        PlanChoice::BestStar | PlanChoice::NaiveStar | PlanChoice::StripedStar => {
            RsCode::new(n, k).ok().map(Code::Rs)
        }
    };
    code.ok_or(ArchiveError::NoCode { n: root.n, k: root.k })
}

impl OwnedShard {
    /// Takes the shard; its replicated stripes become `Archiving` in the same compare-and-set.
    pub async fn take(
        coordinator: &Coordinator,
        root: ShardRoot,
        options: ArchiveOptions,
        lease: LeaseId,
    ) -> Result<Self, ArchiveError> {
        let catalogue = &*coordinator.catalogue;
        let fenced = || ArchiveError::Fenced { shard: root.name.to_string() };
        let geometry = root.geometry().map_err(|error| ArchiveError::Format(error.to_string()))?;
        let code = code_for(&root, options.plan)?;
        let key = state_key(root.shard);
        let fresh = Attempt(coordinator.entropy.id());
        let mut current = read::<ShardState>(catalogue, &key).await?;
        loop {
            // An absent state means that the shard is gone: it is made together with the root.
            let (mut state, revision) = current.ok_or_else(fenced)?;
            if state.deleting || state.states().count() as u64 != u64::from(geometry.stripes()) {
                return Err(fenced());
            }
            if let Some(owner) = &state.owner
                && owner.lease != lease
                && catalogue.lease_touch(owner.lease, false).await?
            {
                let directory = coordinator.directory().await?;
                let owner = directory.name(owner.node);
                let what = format!("shard {}", root.name);
                return Err(ArchiveError::Owned { what, owner });
            }
            let generation = coordinator.next_generation(state.generation);
            state.generation = generation;
            state.owner = Some(Owner { node: coordinator.me, lease });
            let begun = StripeState::Archiving { attempt: fresh, code: code.id(), generation };
            for run in &mut state.runs {
                run.state = match run.state {
                    StripeState::Replicated => begun,
                    StripeState::Archiving { code: old, .. } if old != code.id() => begun,
                    other => other,
                };
            }
            state.runs.dedup_by(|next: &mut Run, last: &mut Run| {
                let same = next.state == last.state;
                last.count += if same { next.count } else { 0 };
                same
            });
            match write(catalogue, &key, Some(revision), &state).await? {
                Written::Set(revision) => {
                    let (state, leaves) = (Mutex::new((state, revision)), OnceCell::new());
                    return Ok(Self { root, code, generation, geometry, state, leaves });
                }
                Written::Other(other) => current = other,
            }
        }
    }

    /// Stripes that are not archived, or whose replicas are not known to be gone.
    pub async fn unfinished(&self) -> Vec<u32> {
        let state = self.state.lock().await;
        let finished =
            |state: &StripeState| matches!(state, StripeState::Archived { dropped: true, .. });
        (0u32..)
            .zip(state.0.states())
            .filter(|(_, state)| !finished(state))
            .map(|(i, _)| i)
            .collect()
    }

    /// All states.
    pub async fn states(&self) -> Vec<StripeState> {
        self.state.lock().await.0.states().collect()
    }

    /// The state of one stripe.
    pub async fn stripe(&self, index: u32) -> Option<StripeState> {
        self.state.lock().await.0.stripe(index)
    }

    /// Real bytes of a stripe.
    pub fn stripe_bytes(&self, index: u32) -> u64 {
        self.geometry.stripe(index).map_or(0, |cut| cut.len_bytes)
    }

    /// The shard's leaves, fetched once.
    pub async fn leaves(
        &self,
        coordinator: &Coordinator,
        directory: &Directory,
    ) -> Result<&Leaves, ArchiveError> {
        let fetch = records::leaves(&coordinator.caller, directory, &self.root);
        Ok(self.leaves.get_or_try_init(|| fetch).await?)
    }

    /// Sets one stripe's state by compare-and-set. Only the owner changes the record: anything else in the key fences us.
    pub async fn set(
        &self,
        coordinator: &Coordinator,
        index: u32,
        stripe: StripeState,
    ) -> Result<(), ArchiveError> {
        let mut state = self.state.lock().await;
        let mut next = state.0.clone();
        if !next.set(index, stripe) {
            let what = format!(
                "stripe {index}: the shard's state would have too many runs; run archive again"
            );
            return Err(ArchiveError::Format(what));
        }
        self.write(coordinator, &mut state, next).await
    }

    async fn write(
        &self,
        coordinator: &Coordinator,
        state: &mut (ShardState, u64),
        next: ShardState,
    ) -> Result<(), ArchiveError> {
        let key = state_key(self.root.shard);
        match write(&*coordinator.catalogue, &key, Some(state.1), &next).await? {
            Written::Set(revision) => {
                *state = (next, revision);
                Ok(())
            }
            Written::Other(_) => Err(ArchiveError::Fenced { shard: self.root.name.to_string() }),
        }
    }

    /// Gives the shard back. Losing it meanwhile is no error: then it is somebody else's.
    pub async fn release(self: &Arc<Self>, coordinator: &Coordinator) -> Result<(), ArchiveError> {
        let mut state = self.state.lock().await;
        let mut next = state.0.clone();
        next.owner = None;
        match self.write(coordinator, &mut state, next).await {
            Err(ArchiveError::Fenced { .. }) => Ok(()),
            result => result,
        }
    }
}
