//! Requests between nodes that come again, twice or after newer ones: what a daemon does that was paused with an order in its hand.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::net::memory::{MemoryNetwork, Message};
use tokio::task::JoinSet;

/// Requests of one kind that are kept, the first of all and the last.
const KEPT: usize = 32;
/// A request is given up that has no answer after this.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests that were sent, by the number of their call.
#[derive(Clone, Default)]
pub struct Echo {
    kept: Arc<Mutex<BTreeMap<u8, VecDeque<Message>>>>,
}

impl Echo {
    /// Keeps what nodes send each other, on connections that are made from now on.
    pub fn of(network: &MemoryNetwork) -> Self {
        let echo = Self::default();
        let kept = echo.kept.clone();
        network.set_tap(move |message| {
            // A frame: four bytes of length, then the number of the call.
            let Some(call) = message.chunks.iter().flatten().nth(4) else { return };
            let mut kept = kept.lock().unwrap();
            let kept = kept.entry(*call).or_default();
            if kept.len() == KEPT {
                kept.remove(KEPT / 2);
            }
            kept.push_back(message);
        });
        echo
    }

    /// One of each kind is as likely as one of any other.
    fn pick(&self, coin: &SeededEntropy) -> Option<Message> {
        let kept = self.kept.lock().unwrap();
        let kinds = kept.values().nth(coin.below(kept.len().max(1) as u64) as usize)?;
        kinds.get(coin.below(kinds.len() as u64) as usize).cloned()
    }

    /// Sends one again after each pause of up to `max_pause_ms`, until it is dropped, and what is under way then with it.
    pub async fn run(self, network: Arc<MemoryNetwork>, coin: SeededEntropy, max_pause_ms: u64) {
        let mut under_way = JoinSet::new();
        loop {
            tokio::time::sleep(Duration::from_millis(1 + coin.below(max_pause_ms))).await;
            if let Some(message) = self.pick(&coin) {
                under_way.spawn(again(network.clone(), message));
            }
            while under_way.try_join_next().is_some() {}
        }
    }

    /// Sends all again that are kept, in an order that `coin` draws.
    pub async fn all(&self, network: &Arc<MemoryNetwork>, coin: &SeededEntropy) {
        let mut all: Vec<_> = self.kept.lock().unwrap().values().flatten().cloned().collect();
        while !all.is_empty() {
            let message = all.swap_remove(coin.below(all.len() as u64) as usize);
            again(network.clone(), message).await;
        }
    }
}

/// Whatever becomes of it is judged by what is there afterwards.
async fn again(network: Arc<MemoryNetwork>, message: Message) {
    let _ = tokio::time::timeout(PATIENCE, network.deliver_again(&message)).await;
}
