//! The catalogue of another daemon, over the wire. Finds it through the seeds, and again when it has moved.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream;

use super::{Catalogue, CatalogueError, Entry, SetOutcome};
use crate::format::records::Node;
use crate::id::{Epoch, LeaseId, MapId, PeerName};
use crate::net::Address;
use crate::net::call::{CallError, Caller, address};
use crate::wire::calls::{
    CatalogueGet, CatalogueList, CatalogueSet, Hello, HelloAnswer, LeaseGrant, LeaseRevoke,
    LeaseTouch, NodeView, Nodes, Register, RegisterAnswer, SetAnswer,
};
use crate::wire::{Call, NodeAddress};

/// Attempts to find and ask the catalogue before an operation fails.
const ATTEMPTS: u32 = 4;
/// Wait before the second attempt; doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(200);

/// A node that does not say within this where the catalogue is has no say.
const HELLO_LIMIT: Duration = Duration::from_secs(3);
/// Nodes asked at once.
const ASK_AT_ONCE: usize = 16;
/// The most nodes that are kept to be asked when no seed knows.
const MAX_KNOWN: usize = 64;

/// The catalogue as the other daemons see it.
pub struct RemoteCatalogue {
    caller: Arc<Caller>,
    me: Node,
    seeds: Vec<String>,
    home: Mutex<Option<(Epoch, NodeAddress)>>,
    /// Nodes to ask when no seed knows.
    known: Mutex<BTreeMap<PeerName, NodeAddress>>,
    epoch: Mutex<Epoch>,
    /// The catalogue that this node belongs to: others, and older ones, are not believed.
    expected: Mutex<Option<(Epoch, MapId)>>,
}

impl RemoteCatalogue {
    /// A catalogue that the daemons at `seeds` (HOST:PORT) know of; `me` asks.
    pub fn new(caller: Arc<Caller>, me: Node, seeds: Vec<String>) -> Self {
        let (home, known, epoch, expected) = Default::default();
        Self { caller, me, seeds, home, known, epoch, expected }
    }

    /// Where the catalogue was last found, unless that was before `epoch`.
    pub fn home(&self, epoch: Epoch) -> Option<NodeAddress> {
        let home = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        home.as_ref().filter(|(found, _)| *found >= epoch).map(|(_, home)| home.clone())
    }

    /// Other nodes to ask when no seed knows where it is.
    pub fn know(&self, nodes: impl IntoIterator<Item = NodeAddress>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for node in nodes {
            if known.len() < MAX_KNOWN || known.contains_key(&node.name) {
                known.insert(node.name.clone(), node);
            }
        }
    }

    /// From here on only the catalogue `map` of `epoch`, or one of a later epoch, is believed.
    pub fn expect(&self, epoch: Epoch, map: MapId) {
        *self.expected.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, map));
    }

    fn is_believed(&self, hello: &HelloAnswer) -> bool {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        expected.is_none_or(|(epoch, map)| {
            let is_same = hello.epoch == epoch && hello.map.is_none_or(|found| found == map);
            hello.epoch > epoch || is_same
        })
    }

    /// Takes `home` for the catalogue of `epoch`, without asking.
    pub fn believe(&self, epoch: Epoch, home: NodeAddress) {
        self.saw(epoch);
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, home));
    }

    fn forget(&self) {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn saw(&self, epoch: Epoch) {
        let mut known = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        *known = epoch.max(*known);
    }

    /// Asks the seeds, all of them, and believes the one with the highest epoch; then, if none knows, the other nodes.
    async fn find(&self) -> Result<NodeAddress, CatalogueError> {
        if let Some(home) = self.home(Epoch::default()) {
            return Ok(home);
        }
        let seeds = self.seeds.iter().map(|seed| Address { host_port: seed.clone(), node: None });
        let mut found = self.ask_where(seeds.collect()).await;
        if found.is_err() {
            let known: Vec<Address> = {
                let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                known.values().map(address).collect()
            };
            found = self.ask_where(known).await.or(found);
        }
        let (epoch, home) = found.map_err(|reason| CatalogueError::Unreachable {
            seeds: self.seeds.join(", "),
            reason,
        })?;
        self.believe(epoch, home.clone());
        Ok(home)
    }

    /// Where those at `addresses` say that it is; the highest epoch counts.
    async fn ask_where(&self, addresses: Vec<Address>) -> Result<(Epoch, NodeAddress), String> {
        let hello = Hello { me: Some(self.me.clone()) };
        let asks: Vec<_> =
            addresses.iter().map(|to| self.caller.call_within(to, &hello, HELLO_LIMIT)).collect();
        let mut answers = stream::iter(asks).buffer_unordered(ASK_AT_ONCE);
        let mut best: Option<(Epoch, NodeAddress)> = None;
        let mut reason = "no seed knows where it is".to_owned();
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(hello) => {
                    if self.is_believed(&hello)
                        && let Some(home) = hello.catalogue
                        && best.as_ref().is_none_or(|(epoch, _)| hello.epoch > *epoch)
                    {
                        best = Some((hello.epoch, home));
                    }
                }
                Err(error) => reason = error.to_string(),
            }
        }
        best.ok_or(reason)
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
