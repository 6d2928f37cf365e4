//! The choice of a client's gateway: the daemon that receives its requests. The client keeps a
//! gateway until it fails a call, and then prefers daemons that have not failed.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::connection::{Client, summarize_addresses};
use super::error::ClientError;
use crate::id::PeerName;
use crate::kind::ErrorKind;
use crate::net::Address;
use crate::net::call::CallError;
use crate::wire::NodeAddress;
use crate::wire::calls::Hello;

/// Number of seeds that are asked first. More are asked after [`NEXT_SEEDS`].
const FIRST_SEEDS: usize = 4;
const NEXT_SEEDS: Duration = Duration::from_millis(250);
/// Maximum number of seeds that are asked at once.
const MAX_ASKED: usize = 128;
/// How long a daemon that has failed a call is passed over as a gateway while others answer.
const AVOID_PERIOD: Duration = Duration::from_secs(60);
/// How long the other seeds have to answer before a daemon that has failed a call is used all the
/// same.
const OTHERS_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of daemons that are remembered because they have failed.
const MAX_AVOIDED: usize = 128;
/// Maximum number of gateways that are given up within [`AVOID_PERIOD`] because they answered that
/// something is unavailable. If two say so, the others will say the same.
const MAX_UNAVAILABLE: usize = 2;

/// A failure of a gateway.
struct GatewayFailure {
    at: Duration,
    is_unanswered: bool,
}

/// The gateway in use, and the daemons that have failed as gateways lately.
#[derive(Default)]
pub(super) struct Gateways {
    current: Option<NodeAddress>,
    failed: BTreeMap<PeerName, GatewayFailure>,
}

impl Gateways {
    fn forget_old_failures(&mut self, now: Duration) {
        self.failed.retain(|_, failure| now.saturating_sub(failure.at) < AVOID_PERIOD);
    }

    /// Gives the gateway up, if it is still the current one. Returns whether another one is to be
    /// used.
    fn give_up(&mut self, gateway: &NodeAddress, failure: GatewayFailure) -> bool {
        self.forget_old_failures(failure.at);
        if self.current.as_ref() != Some(gateway) {
            // Another call has given it up already.
            return true;
        }
        let unavailable = self.failed.values().filter(|failure| !failure.is_unanswered).count();
        if !failure.is_unanswered && unavailable >= MAX_UNAVAILABLE {
            return false;
        }
        if self.failed.len() < MAX_AVOIDED || self.failed.contains_key(&gateway.name) {
            self.failed.insert(gateway.name.clone(), failure);
        }
        self.current = None;
        true
    }
}

impl Client {
    pub(super) fn set_gateway(&self, gateway: NodeAddress) {
        self.lock_gateways().current = Some(gateway);
    }

    /// Returns the gateway in use, or finds one.
    ///
    /// # Errors
    /// The daemon's error if all daemons that were asked denied the connection, otherwise
    /// [`ClientError::Unreachable`].
    pub(super) async fn find_gateway(&self) -> Result<NodeAddress, ClientError> {
        let known = self.lock_gateways().current.clone();
        match known {
            Some(known) => Ok(known),
            None => self.search_gateway().await,
        }
    }

    /// Notes that `gateway` has failed a call. Returns whether the client gives the gateway up, so
    /// that the call may be made again at another one.
    ///
    /// A gateway that does not answer is given up. One that answers that something is unavailable
    /// may be the only daemon that does not reach the catalogue, so it is given up, too. The cause
    /// may also be another one, for example that too few nodes are live. Therefore at most
    /// [`MAX_UNAVAILABLE`] gateways are given up for such an answer within [`AVOID_PERIOD`].
    pub(super) fn give_up_gateway(&self, gateway: &NodeAddress, error: &CallError) -> bool {
        let is_unanswered = error.is_unanswered();
        if !is_unanswered && !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
            return false;
        }
        let at = self.caller().clock().now();
        self.lock_gateways().give_up(gateway, GatewayFailure { at, is_unanswered })
    }

    /// Returns whether a gateway was found that has not failed a call lately.
    pub(super) async fn has_fresh_gateway(&self) -> bool {
        let Ok(found) = self.find_gateway().await else { return false };
        !self.is_avoided(&found)
    }

    fn is_avoided(&self, gateway: &NodeAddress) -> bool {
        let now = self.caller().clock().now();
        let mut gateways = self.lock_gateways();
        gateways.forget_old_failures(now);
        gateways.failed.contains_key(&gateway.name)
    }

    async fn ask_seed(&self, seed: String) -> Result<NodeAddress, CallError> {
        let to = Address { host_port: seed.clone(), node: None };
        let hello = self.caller().call_address(&to, &Hello { me: None }).await?;
        self.note_cluster(hello.cluster);
        Ok(NodeAddress { name: hello.node, host_port: seed })
    }

    /// Finds a daemon that answers: asks a few seeds at once, and more and more of them while none
    /// answers. Takes a daemon that has failed a call lately only if no other one answers soon.
    async fn search_gateway(&self) -> Result<NodeAddress, ClientError> {
        let clock = self.caller().clock();
        let mut seeds = self.seeds().iter().cloned();
        let (mut asked, mut wave) = (FuturesUnordered::new(), FIRST_SEEDS);
        let (mut reason, mut denied) = (String::from("no seeds are configured"), None);
        let mut is_silent = false;
        let mut avoided: Option<(Duration, NodeAddress)> = None;
        loop {
            let next_seeds = seeds.by_ref().take(wave.min(MAX_ASKED - asked.len()));
            asked.extend(next_seeds.map(|seed| self.ask_seed(seed)));
            wave = wave.saturating_mul(2);
            let more = seeds.len() > 0;
            let next = clock.sleep(NEXT_SEEDS);
            tokio::pin!(next);
            loop {
                let answer = tokio::select! {
                    biased;
                    Some(answer) = asked.next() => answer,
                    () = &mut next, if more || avoided.is_some() => break,
                    else => break,
                };
                match answer {
                    Ok(gateway) if self.is_avoided(&gateway) => {
                        avoided.get_or_insert((clock.now(), gateway));
                    }
                    Ok(gateway) => {
                        self.set_gateway(gateway.clone());
                        return Ok(gateway);
                    }
                    // The certificate has expired, for example. Starting more daemons does not help
                    // then.
                    Err(error) if error.kind() == ErrorKind::Denied => denied = Some(error),
                    Err(error) => {
                        reason = error.to_string();
                        is_silent = true;
                    }
                }
            }
            let is_end = asked.is_empty() && !more;
            if let Some((since, gateway)) = &avoided
                && (is_end || clock.now().saturating_sub(*since) >= OTHERS_WAIT)
            {
                self.set_gateway(gateway.clone());
                return Ok(gateway.clone());
            }
            if is_end {
                // If other daemons did not answer at all, the failure may be temporary.
                let denied = denied.filter(|_| !is_silent).map(ClientError::from);
                let seeds = summarize_addresses(self.seeds());
                return Err(denied.unwrap_or(ClientError::Unreachable { seeds, reason }));
            }
        }
    }

    fn lock_gateways(&self) -> MutexGuard<'_, Gateways> {
        self.gateways().lock().unwrap_or_else(PoisonError::into_inner)
    }
}
