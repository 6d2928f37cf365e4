//! A bounded pool of bytes. The holder of a [`Reservation`] may use that many bytes; dropping the
//! reservation returns them to the pool.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Size of a permit in bytes. Permits stand for several bytes each because a semaphore counts in
/// `u32`.
const UNIT_BYTES: u64 = 4096;

/// A named pool of bytes with a fixed size. Waiters are served in the order of arrival.
#[derive(Debug)]
pub struct Budget {
    name: &'static str,
    total_bytes: u64,
    permits: Arc<Semaphore>,
    used: Mutex<u64>,
    peak_bytes: AtomicU64,
}

/// Bytes that are reserved from a [`Budget`] until this value is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
    _permit: OwnedSemaphorePermit,
}

/// The error for a reservation that is larger than the pool, or larger than the part that is free
/// now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{asked_bytes} bytes asked of the {budget} budget of {total_bytes} bytes: raise the memory limit or do less at once"
)]
pub struct BudgetError {
    /// The name of the pool.
    pub budget: &'static str,
    /// The number of bytes that were requested.
    pub asked_bytes: u64,
    /// The size of the pool in bytes.
    pub total_bytes: u64,
}

impl Budget {
    /// Returns a pool of `total_bytes` (rounded down to a multiple of 4 KiB).
    pub fn new(name: &'static str, total_bytes: u64) -> Arc<Self> {
        let units = (total_bytes / UNIT_BYTES).min(Semaphore::MAX_PERMITS as u64);
        Arc::new(Self {
            name,
            total_bytes: units * UNIT_BYTES,
            permits: Arc::new(Semaphore::new(units as usize)),
            used: Mutex::new(0),
            peak_bytes: AtomicU64::new(0),
        })
    }

    fn units(&self, bytes: u64) -> Result<u32, BudgetError> {
        let units = bytes.div_ceil(UNIT_BYTES);
        match u32::try_from(units) {
            Ok(count) if units * UNIT_BYTES <= self.total_bytes => Ok(count),
            _ => Err(self.refusal(bytes)),
        }
    }

    fn refusal(&self, asked_bytes: u64) -> BudgetError {
        BudgetError { budget: self.name, asked_bytes, total_bytes: self.total_bytes }
    }

    fn granted(self: &Arc<Self>, bytes: u64, permit: OwnedSemaphorePermit) -> Reservation {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used += bytes;
        self.peak_bytes.fetch_max(*used, Ordering::Relaxed);
        drop(used);
        Reservation { budget: self.clone(), bytes, _permit: permit }
    }

    /// Waits until `bytes` are free and reserves them. The caller sets the deadline. Returns an
    /// error at once if the pool is smaller than `bytes`.
    pub async fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, BudgetError> {
        let units = self.units(bytes)?;
        let permit = self.permits.clone().acquire_many_owned(units).await;
        Ok(self.granted(bytes, permit.map_err(|_| self.refusal(bytes))?))
    }

    /// Reserves `bytes` if they are free now and no earlier caller is waiting; returns an error
    /// otherwise.
    pub fn try_reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, BudgetError> {
        let units = self.units(bytes)?;
        let permit = self.permits.clone().try_acquire_many_owned(units);
        Ok(self.granted(bytes, permit.map_err(|_| self.refusal(bytes))?))
    }

    /// Returns the size of the pool in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Returns the number of bytes that are reserved now. The number is zero when nothing runs.
    pub fn used_bytes(&self) -> u64 {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the largest number of bytes that was ever reserved at the same time.
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }
}

impl Reservation {
    /// Returns the number of reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *self.budget.used.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_come_back_when_the_reservation_is_dropped() {
        let budget = Budget::new("test", 64 * 1024);
        let first = budget.reserve(40 * 1024).await.unwrap();
        assert!(budget.try_reserve(40 * 1024).is_err());
        drop(first);
        let second = budget.try_reserve(64 * 1024).unwrap();
        assert_eq!(budget.used_bytes(), 64 * 1024);
        drop(second);
        assert_eq!((budget.used_bytes(), budget.peak_bytes()), (0, 64 * 1024));
    }

    #[tokio::test]
    async fn more_than_the_pool_is_refused_at_once() {
        let budget = Budget::new("test", 64 * 1024);
        assert!(budget.reserve(65 * 1024).await.is_err());
        assert!(budget.reserve(u64::MAX).await.is_err());
    }
}
