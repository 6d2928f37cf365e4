//! Retries against busy nodes, with randomized pauses that grow from try to try, up to a time
//! limit.
//!
//! A busy node has the data or the resource that its caller wants. So an answer "busy" is no
//! failure until the time limit is reached.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::entropy::Entropy;

/// How long a caller retries while nodes report that they are busy.
pub const BUSY_LIMIT: Duration = Duration::from_secs(600);
/// Longest wait before the second try. It doubles for each further try, up to [`MAX_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Longest wait between two tries.
const MAX_WAIT: Duration = Duration::from_secs(4);

/// The retry state of a caller that holds no resources while it waits for busy nodes.
pub struct BusyRetry {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    began: Duration,
    wait: Duration,
}

impl BusyRetry {
    /// Returns a fresh retry state. Its time limit of [`BUSY_LIMIT`] starts now.
    pub fn new(clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        let began = clock.now();
        Self { clock, entropy, began, wait: FIRST_WAIT }
    }

    /// Waits before the next try and returns `true`. Returns `false` at once if the time limit of
    /// [`BUSY_LIMIT`] has passed.
    pub async fn wait_unless_expired(&mut self) -> bool {
        if self.clock.now() - self.began > BUSY_LIMIT {
            return false;
        }
        // Wait between half and all of the time, so that callers that collided do not collide
        // again.
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
            while patience.wait_unless_expired().await {
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
