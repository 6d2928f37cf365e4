//! A pool of shared outgoing connections, with at most one live connection for each address.
//! Concurrent callers share one attempt to connect; after the connection closes, the next caller
//! connects again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex as AsyncMutex;

use super::{Address, Connection, NetError, Transport};
use crate::clock::{Clock, deadline};

/// Time limit of one attempt to connect.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of addresses that a pool remembers, which is enough for a cluster of a thousand
/// nodes. Each live connection costs at most the windows of its transport.
pub const MAX_ADDRESSES: usize = 1024;

/// A pool of shared outgoing connections. It is cheap enough to query on every request.
pub struct Pool {
    transport: Arc<dyn Transport>,
    clock: Arc<dyn Clock>,
    slots: Mutex<BTreeMap<Address, Arc<Slot>>>,
}

/// The connection of one address. The holder of the lock `last` connects, or checks the connection.
#[derive(Default)]
struct Slot {
    attempts: AtomicU64,
    last: AsyncMutex<Option<Result<Arc<dyn Connection>, NetError>>>,
}

impl Pool {
    /// Returns an empty pool over `transport`.
    pub fn new(transport: Arc<dyn Transport>, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { transport, clock, slots: Mutex::default() })
    }

    /// Returns the live connection to `to`, and connects if there is none. Callers that waited for
    /// an attempt which failed share its error instead of trying one after the other. Cancel safe.
    pub async fn get(&self, to: &Address) -> Result<Arc<dyn Connection>, NetError> {
        let slot = self.slot(to)?;
        let attempts = slot.attempts.load(Ordering::Relaxed);
        let mut last = slot.last.lock().await;
        match last.as_ref() {
            Some(Ok(connection)) if !connection.is_closed() => return Ok(connection.clone()),
            Some(Err(error)) if slot.attempts.load(Ordering::Relaxed) != attempts => {
                return Err(error.clone());
            }
            _ => {}
        }
        let dialled = deadline(&*self.clock, CONNECT_LIMIT, self.transport.connect(to)).await;
        let result = dialled.unwrap_or_else(|elapsed| {
            Err(NetError::ConnectTimeout { to: to.to_string(), limit: elapsed.limit })
        });
        slot.attempts.fetch_add(1, Ordering::Relaxed);
        *last = Some(result.clone());
        result
    }

    fn slot(&self, to: &Address) -> Result<Arc<Slot>, NetError> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.get(to) {
            return Ok(slot.clone());
        }
        if slots.len() >= MAX_ADDRESSES {
            slots.retain(|_, slot| slot.in_use());
        }
        if slots.len() >= MAX_ADDRESSES {
            return Err(NetError::PoolFull { limit: MAX_ADDRESSES });
        }
        Ok(slots.entry(to.clone()).or_default().clone())
    }
}

impl Slot {
    /// Returns whether a caller waits for this slot or holds its live connection. A stream keeps
    /// its connection alive even after the pool forgets the connection.
    fn in_use(self: &Arc<Self>) -> bool {
        if Arc::strong_count(self) > 1 {
            return true;
        }
        match self.last.try_lock() {
            Ok(last) => match last.as_ref() {
                Some(Ok(live)) => !live.is_closed() && Arc::strong_count(live) > 1,
                _ => false,
            },
            Err(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::net::memory::{MemoryNetwork, MemoryTransport};
    use crate::net::{Peer, Role};

    fn join(network: &Arc<MemoryNetwork>, role: Role, name: &str) -> MemoryTransport {
        network.join(Peer { role, name: name.parse().unwrap() }, name)
    }

    fn pool(network: &Arc<MemoryNetwork>) -> Arc<Pool> {
        Pool::new(Arc::new(join(network, Role::Client, "client")), SystemClock::new())
    }

    fn to(host_port: &str) -> Address {
        Address { host_port: host_port.into(), node: None }
    }

    #[tokio::test]
    async fn callers_share_one_connection_until_it_closes() {
        let network = MemoryNetwork::new();
        let node = join(&network, Role::Node, "a");
        let pool = pool(&network);
        let target = to("a");
        let (first, second) = tokio::join!(pool.get(&target), pool.get(&target));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        let accepted = node.accept().await.unwrap();
        accepted.close(0, "restart");
        first.closed().await;
        let third = pool.get(&target).await.unwrap();
        assert!(!Arc::ptr_eq(&first, &third) && !third.is_closed());
    }

    /// A transport that never answers, and counts the attempts.
    #[derive(Default)]
    struct Silent(AtomicU64);

    #[async_trait::async_trait]
    impl Transport for Silent {
        async fn connect(&self, _: &Address) -> Result<Arc<dyn Connection>, NetError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::future::pending().await
        }

        async fn accept(&self) -> Option<Arc<dyn Connection>> {
            None
        }

        async fn close(&self) {}
    }

    /// A clock whose sleeps all end when the test says so.
    #[derive(Default)]
    struct Signal(tokio::sync::Notify);

    #[async_trait::async_trait]
    impl Clock for Signal {
        fn now(&self) -> Duration {
            Duration::ZERO
        }

        async fn sleep(&self, _: Duration) {
            self.0.notified().await;
        }

        fn wall_seconds(&self) -> u64 {
            0
        }
    }

    #[tokio::test]
    async fn waiters_share_one_failed_attempt() {
        let (silent, clock) = (Arc::new(Silent::default()), Arc::new(Signal::default()));
        let pool = Pool::new(silent.clone(), clock.clone());
        let target = to("nowhere");
        let pass = async { clock.0.notify_waiters() };
        let (a, b, ()) = tokio::join!(pool.get(&target), pool.get(&target), pass);
        for result in [a, b] {
            assert!(matches!(result, Err(NetError::ConnectTimeout { limit: CONNECT_LIMIT, .. })));
        }
        assert_eq!(silent.0.load(Ordering::Relaxed), 1);
        let pass = async { clock.0.notify_waiters() };
        assert!(tokio::join!(pool.get(&target), pass).0.is_err());
        assert_eq!(silent.0.load(Ordering::Relaxed), 2, "a later caller dials again");
    }

    #[tokio::test]
    async fn addresses_nobody_uses_make_room() {
        let network = MemoryNetwork::new();
        let _node = join(&network, Role::Node, "a");
        let pool = pool(&network);
        let held = pool.get(&to("a")).await.unwrap();
        for index in 0..2 * MAX_ADDRESSES {
            assert!(pool.get(&to(&format!("none-{index}"))).await.is_err());
        }
        assert!(pool.slots.lock().unwrap().len() <= MAX_ADDRESSES);
        assert!(Arc::ptr_eq(&held, &pool.get(&to("a")).await.unwrap()));
    }
}
