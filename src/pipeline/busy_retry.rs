//! Waiting for nodes that are busy with others: again and again, with growing pauses that differ from one who waits to the next, up
//! to a bound. A node that is busy has what is wanted of it; so this is no failure until the bound is reached.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::entropy::Entropy;

/// How long one goes on asking nodes that say that they are busy.
pub const BUSY_LIMIT: Duration = Duration::from_secs(600);
/// Wait before the second try; doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Between two tries, at most.
const MAX_WAIT: Duration = Duration::from_secs(4);

/// The patience of one who holds nothing while it waits.
pub struct BusyRetry {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    began: Duration,
    wait: Duration,
}

impl BusyRetry {
    /// Full patience, from now on.
    pub fn new(clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        let began = clock.now();
        Self { clock, entropy, began, wait: FIRST_WAIT }
    }

    /// Waits before the next try. `false`, at once: it has gone on for [`BUSY_LIMIT`].
    pub async fn wait(&mut self) -> bool {
        if self.clock.now() - self.began > BUSY_LIMIT {
            return false;
        }
        // Half to whole: those who gave way to one another do not meet again at once.
        let mut random = [0; 1];
        self.entropy.fill(&mut random);
        self.clock.sleep(self.wait * (256 + u32::from(random[0])) / 512).await;
        self.wait = (self.wait * 2).min(MAX_WAIT);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::entropy::SeededEntropy;

    #[tokio::test(start_paused = true)]
    async fn it_waits_longer_each_time_differently_and_not_for_ever() {
        let waits = async |seed| {
            let clock = SystemClock::new();
            let mut patience = BusyRetry::new(clock.clone(), Arc::new(SeededEntropy::new(seed)));
            let mut waits = Vec::new();
            let mut last = clock.now();
            while patience.wait().await {
                waits.push(clock.now() - last);
                last = clock.now();
            }
            waits
        };
        let (one, two) = (waits(1).await, waits(2).await);
        assert_ne!(one, two);
        let total: Duration = one.iter().sum();
        assert!(total > BUSY_LIMIT && total < BUSY_LIMIT + 2 * MAX_WAIT, "{total:?}");
        assert!(
            one[0] <= FIRST_WAIT
                && one[9] > FIRST_WAIT
                && one.iter().all(|wait| *wait <= MAX_WAIT + Duration::from_millis(2))
        );
    }
}
