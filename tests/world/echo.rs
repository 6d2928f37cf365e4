//! Duplicated requests between nodes. A request arrives again, immediately or after newer ones, as
//! when a paused daemon resumes and sends an outdated order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::net::memory::{MemoryNetwork, Message};
use tokio::task::JoinSet;

/// Maximum number of kept requests per kind: the first ones and the latest ones.
const KEPT: usize = 32;
/// Time after which a repeated request without an answer is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// The recorded requests, by call number.
#[derive(Clone, Default)]
pub struct Echo {
    kept: Arc<Mutex<BTreeMap<u8, VecDeque<Message>>>>,
}

impl Echo {
    /// Starts to record the requests that nodes send each other on connections opened from now on.
    /// Returns the recorder.
    pub fn of(network: &MemoryNetwork) -> Self {
        let echo = Self::default();
        let kept = echo.kept.clone();
        network.set_tap(move |message| {
            // A frame starts with four bytes of length, followed by the call number.
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

    /// Draws a recorded request. All kinds of requests are equally likely.
    fn pick(&self, coin: &SeededEntropy) -> Option<Message> {
        let kept = self.kept.lock().unwrap();
        let kinds = kept.values().nth(coin.below(kept.len().max(1) as u64) as usize)?;
        kinds.get(coin.below(kinds.len() as u64) as usize).cloned()
    }

    /// Sends a drawn request again after each pause of up to `max_pause_ms` milliseconds, until
    /// this future is dropped. Dropping it also cancels the requests in flight.
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

    /// Sends all recorded requests again, in an order drawn from `coin`.
    pub async fn all(&self, network: &Arc<MemoryNetwork>, coin: &SeededEntropy) {
        let mut all: Vec<_> = self.kept.lock().unwrap().values().flatten().cloned().collect();
        while !all.is_empty() {
            let message = all.swap_remove(coin.below(all.len() as u64) as usize);
            again(network.clone(), message).await;
        }
    }
}

/// Sends a request again and ignores the result: tests check the state that it leaves.
async fn again(network: Arc<MemoryNetwork>, message: Message) {
    let _ = tokio::time::timeout(PATIENCE, network.deliver_again(&message)).await;
}
