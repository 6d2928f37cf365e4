//! The catalogue's engine inside one daemon, over its key-value store.
//!
//! Keys and the revision counter change in one durable batch. Leases live in memory, on this process's monotonic clock: after
//! a start every lease that the records name counts as alive for one full period, so that a restart of the catalogue takes nothing from anybody.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::records::{NODES, parse};
use super::{
    Catalogue, CatalogueError, Entry, MAX_KEY_BYTES, MAX_PAGE, MAX_VALUE_BYTES, SetOutcome,
};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::format::records::{Node, Record};
use crate::id::{Epoch, LeaseId, NodeId};
use crate::kind::Kind;
use crate::store::kv::{Batch, Kv};
use crate::wire::calls::{NodeView, RegisterAnswer};

/// The most leases at once: saves and archivings under way.
const MAX_LEASES: usize = 65_536;
/// The most registered nodes.
const MAX_NODES: usize = 4096;

const REVISION: &[u8] = b"m/revision";
const EPOCH: &[u8] = b"m/epoch";
const DATA: &str = "k/";

/// The engine.
pub struct LocalCatalogue {
    kv: Arc<dyn Kv>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    epoch: Epoch,
    lease: Duration,
    started: Duration,
    revision: Mutex<u64>,
    leases: Mutex<HashMap<LeaseId, Duration>>,
    seen: Mutex<HashMap<NodeId, Duration>>,
}

fn store_error(error: impl std::fmt::Display) -> CatalogueError {
    CatalogueError::Store(error.to_string())
}

fn number(bytes: Option<Vec<u8>>) -> Option<u64> {
    bytes.and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()).map(u64::from_be_bytes)
}

fn entry(bytes: &[u8]) -> Option<Entry> {
    let (revision, value) = bytes.split_first_chunk::<8>()?;
    Some(Entry { value: value.to_vec(), revision: u64::from_be_bytes(*revision) })
}

impl LocalCatalogue {
    /// Opens the catalogue in `kv`, or begins one of epoch 1. `lease` is how long leases live.
    pub fn open(
        kv: Arc<dyn Kv>,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
        lease: Duration,
    ) -> Result<Self, CatalogueError> {
        let epoch = match number(kv.get(EPOCH).map_err(store_error)?) {
            Some(epoch) => epoch,
            None => {
                kv.apply(Batch::new().put(EPOCH, 1u64.to_be_bytes())).map_err(store_error)?;
                1
            }
        };
        let revision = number(kv.get(REVISION).map_err(store_error)?).unwrap_or(0);
        let started = clock.now();
        Ok(Self {
            kv,
            clock,
            entropy,
            epoch: Epoch(epoch),
            lease,
            started,
            revision: Mutex::new(revision),
            leases: Mutex::default(),
            seen: Mutex::default(),
        })
    }

    fn read(&self, key: &str) -> Result<Option<Entry>, CatalogueError> {
        let bytes = self.kv.get(format!("{DATA}{key}").as_bytes()).map_err(store_error)?;
        Ok(bytes.as_deref().and_then(entry))
    }

    fn expired(&self, until: Option<&Duration>) -> bool {
        // Unknown leases are older than our start: they get one full period from there.
        let until = until.copied().unwrap_or(self.started + self.lease);
        self.clock.now() >= until
    }
}

#[async_trait]
impl Catalogue for LocalCatalogue {
    fn epoch(&self) -> Epoch {
        self.epoch
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError> {
        self.read(key)
    }

    async fn set(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError> {
        if key.len() > MAX_KEY_BYTES {
            let what = key.chars().take(64).collect();
            return Err(CatalogueError::TooLong { what, bytes: key.len(), limit: MAX_KEY_BYTES });
        }
        if let Some(value) = value.as_ref().filter(|value| value.len() > MAX_VALUE_BYTES) {
            let what = format!("value of {key}");
            return Err(CatalogueError::TooLong { what, bytes: value.len(), limit: MAX_VALUE_BYTES });
        }
        let mut revision = self.revision.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.read(key)?;
        if now.as_ref().map(|entry| entry.revision) != expected {
            return Ok(SetOutcome::Other(now));
        }
        let next = *revision + 1;
        let full_key = format!("{DATA}{key}");
        let counter = next.to_be_bytes();
        let mut batch = Batch::new();
        batch.put(REVISION, counter);
        match value {
            Some(value) => batch.put(full_key, [&counter[..], &value].concat()),
            None => batch.delete(full_key),
        };
        self.kv.apply(&batch).map_err(store_error)?;
        *revision = next;
        Ok(SetOutcome::Set(next))
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Entry)>, CatalogueError> {
        let after = after.map(|key| format!("{DATA}{key}"));
        let page = self
            .kv
            .scan(
                format!("{DATA}{prefix}").as_bytes(),
                after.as_deref().map(str::as_bytes),
                limit.min(MAX_PAGE) as usize,
            )
            .map_err(store_error)?;
        let named = page.into_iter().filter_map(|(key, value)| {
            let key = String::from_utf8(key).ok()?;
            Some((key.strip_prefix(DATA)?.to_owned(), entry(&value)?))
        });
        Ok(named.collect())
    }

    async fn lease_grant(&self) -> Result<(LeaseId, Duration), CatalogueError> {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        leases.retain(|_, until| *until > now);
        if leases.len() >= MAX_LEASES {
            let message = format!("{MAX_LEASES} saves and archivings are under way: try later");
            return Err(CatalogueError::Refused { kind: Kind::Busy, message });
        }
        let lease = LeaseId(self.entropy.id());
        leases.insert(lease, now + self.lease);
        Ok((lease, self.lease))
    }

    async fn lease_touch(&self, lease: LeaseId, keep: bool) -> Result<bool, CatalogueError> {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        if self.expired(leases.get(&lease)) {
            return Ok(false);
        }
        if keep {
            leases.insert(lease, self.clock.now() + self.lease);
        }
        Ok(true)
    }

    async fn lease_revoke(&self, lease: LeaseId) -> Result<(), CatalogueError> {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.insert(lease, Duration::ZERO);
        Ok(())
    }

    async fn register(&self, node: &Node) -> Result<RegisterAnswer, CatalogueError> {
        let key = format!("{NODES}{}", node.name);
        let id = NodeId::of(&node.name);
        loop {
            let current = self.read(&key)?;
            let known = current.as_ref().map(|entry| parse::<Node>(&key, &entry.value)).transpose()?;
            if known.as_ref() == Some(node) {
                break;
            }
            if known.is_none() {
                let others = self.nodes().await?;
                if others.len() >= MAX_NODES || others.iter().any(|view| NodeId::of(&view.node.name) == id) {
                    let message = format!("node {} cannot be added: rename it, or remove others", node.name);
                    return Err(CatalogueError::Refused { kind: Kind::Exists, message });
                }
            }
            let value = node.to_bytes().map_err(store_error)?;
            let expected = current.map(|entry| entry.revision);
            if let SetOutcome::Set(_) = self.set(&key, expected, Some(value)).await? {
                break;
            }
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert(id, self.clock.now() + self.lease);
        Ok(RegisterAnswer { epoch: self.epoch, lease_ms: self.lease.as_millis() as u64 })
    }

    async fn nodes(&self) -> Result<Vec<NodeView>, CatalogueError> {
        let mut views = Vec::new();
        let mut after: Option<String> = None;
        loop {
            let page = self.list(NODES, after.as_deref(), MAX_PAGE).await?;
            let Some((last, _)) = page.last() else { break };
            after = Some(last.clone());
            let now = self.clock.now();
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            for (key, entry) in &page {
                let node: Node = parse(key, &entry.value)?;
                let live = seen.get(&NodeId::of(&node.name)).is_some_and(|until| now < *until);
                views.push(NodeView { node, live });
            }
        }
        Ok(views)
    }
}
