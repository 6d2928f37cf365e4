//! The rate at which automatic repairs send. It is a share of the rate that a transfer without a
//! limit was measured to have, so that the rate of the links need not be configured.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::pipeline::rate_limiter::MIN_BYTES_PER_S;

/// Transfers of fewer bytes are not limited: they end soon, and their rate says more about the
/// latency of the links than about their bandwidth.
const MIN_LIMITED_BYTES: u64 = 1 << 20;
/// Longest time that a limit makes a transfer take. The transfer's shard cannot be archived
/// meanwhile, and the memory of its nodes is reserved.
const LONGEST_TRANSFER: Duration = Duration::from_secs(60);
/// Time after which a transfer measures the rate again.
const MEASURE_AGAIN_AFTER: Duration = Duration::from_secs(3600);
/// A transfer that has more than this many times the bytes of the measured one measures the rate
/// again, because latencies and syncs make the rate of shorter transfers too low.
const MEASURE_LONGER: u64 = 2;

/// The rate of a transfer without a limit, as automatic repairs last measured it. All automatic
/// repairs of a catalogue server share it.
#[derive(Debug, Default)]
pub struct RepairRate {
    measured: Mutex<Option<MeasuredRate>>,
}

#[derive(Debug, Clone, Copy)]
struct MeasuredRate {
    bytes: u64,
    took: Duration,
    at: Duration,
}

/// The limit of one transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TransferLimit {
    /// The rate, in bytes a second.
    pub bytes_per_s: u64,
    /// Time that the transfer takes at this rate.
    limited: Duration,
    /// Time by which the limit lengthens the transfer.
    delay: Duration,
}

impl TransferLimit {
    /// Returns the time by which the limit has lengthened a transfer that took this time. A transfer
    /// that failed has taken less than the limit asks for.
    pub(super) fn delay_of(&self, took: Duration) -> Duration {
        let done = took.as_secs_f64() / self.limited.as_secs_f64();
        self.delay.mul_f64(done.min(1.0))
    }
}

impl RepairRate {
    /// Returns the limit for a transfer of `bytes` through one link that is to use `share_percent`
    /// of the link. Returns `None` if the transfer is too short for a limit, if it is too long for
    /// one, or if it is to measure the rate.
    pub(super) fn choose_limit(
        &self,
        share_percent: u8,
        bytes: u64,
        now: Duration,
    ) -> Option<TransferLimit> {
        let measured = (*self.measured.lock().unwrap_or_else(PoisonError::into_inner))?;
        let is_recent = now.saturating_sub(measured.at) < MEASURE_AGAIN_AFTER;
        let is_similar = bytes <= measured.bytes.saturating_mul(MEASURE_LONGER);
        let unlimited = measured.took.mul_f64(bytes as f64 / measured.bytes as f64);
        if share_percent >= 100
            || bytes < MIN_LIMITED_BYTES
            || !is_recent
            || !is_similar
            || unlimited >= LONGEST_TRANSFER
        {
            return None;
        }
        let share = f64::from(share_percent.max(1)) / 100.0;
        let wanted_s = (unlimited.as_secs_f64() / share).min(LONGEST_TRANSFER.as_secs_f64());
        let bytes_per_s = ((bytes as f64 / wanted_s) as u64).max(MIN_BYTES_PER_S);
        let limited = Duration::from_secs_f64(bytes as f64 / bytes_per_s as f64);
        Some(TransferLimit { bytes_per_s, limited, delay: limited.saturating_sub(unlimited) })
    }

    /// Records the rate of a transfer that had no limit.
    pub(super) fn record(&self, bytes: u64, took: Duration, now: Duration) {
        if bytes >= MIN_LIMITED_BYTES && !took.is_zero() {
            *self.measured.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(MeasuredRate { bytes, took, at: now });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const NOW: Duration = Duration::from_secs(10_000);

    /// Returns a rate measured to be 8 MiB/s.
    fn measured() -> RepairRate {
        let rate = RepairRate::default();
        rate.record(16 * MIB, Duration::from_secs(2), NOW);
        rate
    }

    #[test]
    fn a_transfer_gets_its_share_of_the_measured_rate() {
        let limit = measured().choose_limit(25, 16 * MIB, NOW).unwrap();
        assert_eq!(limit.bytes_per_s, 2 * MIB);
        assert_eq!(limit.delay, Duration::from_secs(6));
    }

    #[test]
    fn a_limited_transfer_takes_a_minute_at_most() {
        let limit = measured().choose_limit(1, 16 * MIB, NOW).unwrap();
        assert_eq!(limit.delay.as_secs(), LONGEST_TRANSFER.as_secs() - 2);
        let slow = RepairRate::default();
        slow.record(64 * MIB, Duration::from_secs(50), NOW);
        assert_eq!(slow.choose_limit(25, 128 * MIB, NOW), None, "it takes more without a limit");
    }

    #[test]
    fn no_limit_is_below_the_lowest_rate() {
        let limit = measured().choose_limit(1, MIB, NOW).unwrap();
        assert_eq!(limit.bytes_per_s, 8 * MIB / 100);
        let slow = RepairRate::default();
        slow.record(MIB, Duration::from_secs(30), NOW);
        let limit = slow.choose_limit(1, MIB, NOW).unwrap();
        assert_eq!((limit.bytes_per_s, limit.delay), (MIN_BYTES_PER_S, Duration::ZERO));
    }

    #[test]
    fn a_failed_transfer_was_delayed_in_proportion() {
        let limit = measured().choose_limit(25, 16 * MIB, NOW).unwrap();
        assert_eq!(limit.delay_of(Duration::from_secs(4)), Duration::from_secs(3));
        assert_eq!(limit.delay_of(Duration::from_secs(60)), limit.delay);
    }

    #[test]
    fn without_a_recent_measurement_nothing_is_limited() {
        assert_eq!(RepairRate::default().choose_limit(25, 16 * MIB, NOW), None);
        assert_eq!(measured().choose_limit(100, 16 * MIB, NOW), None);
        assert_eq!(measured().choose_limit(25, MIB - 1, NOW), None);
        assert_eq!(measured().choose_limit(25, 33 * MIB, NOW), None);
        let short = RepairRate::default();
        short.record(MIB - 1, Duration::from_millis(1), NOW);
        assert_eq!(short.choose_limit(25, 16 * MIB, NOW), None);
        assert_eq!(measured().choose_limit(25, 16 * MIB, NOW + MEASURE_AGAIN_AFTER), None);
    }
}
