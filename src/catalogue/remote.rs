//! The catalogue of another daemon, over the wire. Finds it through the seeds, and again when it has moved.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use super::{Catalogue, CatalogueError, Entry, SetOutcome};
use crate::format::records::Node;
use crate::id::{Epoch, LeaseId};
use crate::net::Address;
use crate::net::call::{CallError, Caller};
use crate::wire::calls::{
    CatalogueGet, CatalogueList, CatalogueSet, Hello, LeaseGrant, LeaseRevoke, LeaseTouch,
    NodeView, Nodes, Register, RegisterAnswer, SetAnswer,
};
use crate::wire::{Call, NodeAddress};

/// Attempts to find and ask the catalogue before an operation fails.
const ATTEMPTS: u32 = 4;
/// Wait before the second attempt; doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(200);

/// The catalogue as the other daemons see it.
pub struct RemoteCatalogue {
    caller: Arc<Caller>,
    seeds: Vec<String>,
    home: Mutex<Option<NodeAddress>>,
    epoch: Mutex<Epoch>,
}

impl RemoteCatalogue {
    /// A catalogue that the daemons at `seeds` (HOST:PORT) know of.
    pub fn new(caller: Arc<Caller>, seeds: Vec<String>) -> Self {
        Self { caller, seeds, home: Mutex::default(), epoch: Mutex::default() }
    }

    /// Where the catalogue was last found.
    pub fn home(&self) -> Option<NodeAddress> {
        self.home.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn forget(&self) {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn saw(&self, epoch: Epoch) {
        let mut known = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        *known = epoch.max(*known);
    }

    /// Asks the seeds, all of them, and believes the one with the highest epoch.
    async fn find(&self) -> Result<NodeAddress, CatalogueError> {
        if let Some(home) = self.home() {
            return Ok(home);
        }
        let mut best: Option<(Epoch, NodeAddress)> = None;
        let mut reason = "no seed knows where it is".to_owned();
        for seed in &self.seeds {
            let address = Address { host_port: seed.clone(), node: None };
            match self.caller.call_address(&address, &Hello {}).await {
                Ok(hello) => {
                    if let Some(home) = hello.catalogue
                        && best.as_ref().is_none_or(|(epoch, _)| hello.epoch > *epoch)
                    {
                        best = Some((hello.epoch, home));
                    }
                }
                Err(error) => reason = error.to_string(),
            }
        }
        let Some((epoch, home)) = best else {
            return Err(CatalogueError::Unreachable { seeds: self.seeds.join(", "), reason });
        };
        self.saw(epoch);
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Some(home.clone());
        Ok(home)
    }

    async fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, CatalogueError> {
        let mut wait = FIRST_WAIT;
        let mut last = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                self.caller.clock().sleep(wait).await;
                wait *= 2;
            }
            let home = match self.find().await {
                Ok(home) => home,
                Err(error) => {
                    last = Some(error);
                    continue;
                }
            };
            match self.caller.call(&home, call).await {
                Ok(answer) => return Ok(answer),
                Err(CallError::Failed(failure)) if !failure.kind.is_transient() => {
                    return Err(CatalogueError::Refused {
                        kind: failure.kind,
                        message: failure.message,
                    });
                }
                Err(error) => {
                    self.forget();
                    let reason = error.to_string();
                    last =
                        Some(CatalogueError::Unreachable { seeds: self.seeds.join(", "), reason });
                }
            }
        }
        Err(last.unwrap_or(CatalogueError::Unreachable {
            seeds: self.seeds.join(", "),
            reason: "no attempt was made".into(),
        }))
    }
}

#[async_trait]
impl Catalogue for RemoteCatalogue {
    fn epoch(&self) -> Epoch {
        *self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, CatalogueError> {
        let found = self.ask(&CatalogueGet { key: key.to_owned() }).await?;
        Ok(found.map(|(value, revision)| Entry { value, revision }))
    }

    async fn set(
        &self,
        key: &str,
        expected: Option<u64>,
        value: Option<Vec<u8>>,
    ) -> Result<SetOutcome, CatalogueError> {
        let call = CatalogueSet { key: key.to_owned(), expected, value };
        // A retry inside `ask` may find our own first try done: then the value is ours.
        match self.ask(&call).await? {
            SetAnswer::Set(revision) => Ok(SetOutcome::Set(revision)),
            SetAnswer::Other(Some((value, revision))) if Some(&value) == call.value.as_ref() => {
                Ok(SetOutcome::Set(revision))
            }
            SetAnswer::Other(None) if call.value.is_none() => Ok(SetOutcome::Set(0)),
            SetAnswer::Other(other) => {
                Ok(SetOutcome::Other(other.map(|(value, revision)| Entry { value, revision })))
            }
        }
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Entry)>, CatalogueError> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        let page = self.ask(&CatalogueList { prefix, after, limit }).await?;
        Ok(page
            .into_iter()
            .map(|(key, value, revision)| (key, Entry { value, revision }))
            .collect())
    }

    async fn lease_grant(&self) -> Result<(LeaseId, Duration), CatalogueError> {
        let (lease, ms) = self.ask(&LeaseGrant {}).await?;
        Ok((lease, Duration::from_millis(ms)))
    }

    async fn lease_touch(&self, lease: LeaseId, keep: bool) -> Result<bool, CatalogueError> {
        self.ask(&LeaseTouch { lease, keep }).await
    }

    async fn lease_revoke(&self, lease: LeaseId) -> Result<(), CatalogueError> {
        self.ask(&LeaseRevoke { lease }).await
    }

    async fn register(&self, node: &Node) -> Result<RegisterAnswer, CatalogueError> {
        let answer = self.ask(&Register { node: node.clone() }).await?;
        self.saw(answer.epoch);
        Ok(answer)
    }

    async fn nodes(&self) -> Result<Vec<NodeView>, CatalogueError> {
        self.ask(&Nodes {}).await
    }
}
