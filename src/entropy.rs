//! The only source of randomness is an [`Entropy`], so that one seed replays one run.
#![allow(clippy::disallowed_methods)] // the only place that asks the system

use std::sync::Mutex;

/// A source of random bytes.
pub trait Entropy: Send + Sync + 'static {
    /// Fills `out` with random bytes.
    fn fill(&self, out: &mut [u8]);

    /// Returns 16 random bytes for an identifier.
    fn id(&self) -> [u8; 16] {
        let mut out = [0; 16];
        self.fill(&mut out);
        out
    }

    /// Returns a random number below `bound`, or 0 when `bound` is 0. The bias is below 2^-32 for
    /// bounds below 2^32.
    fn below(&self, bound: u64) -> u64 {
        let mut out = [0; 8];
        self.fill(&mut out);
        u64::from_le_bytes(out).checked_rem(bound).unwrap_or(0)
    }
}

/// The kernel's random generator.
#[derive(Debug, Default, Clone, Copy)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn fill(&self, out: &mut [u8]) {
        let mut filled = 0;
        while filled < out.len() {
            // Without randomness no identifier is unique and no key is secret, so the process
            // cannot continue.
            match rustix::rand::getrandom(&mut out[filled..], rustix::rand::GetRandomFlags::empty())
            {
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => panic!("the kernel gives no random bytes: {error}"),
            }
        }
    }
}

/// A generator that returns the same bytes for the same seed, for tests, simulation and demo data.
#[derive(Debug)]
pub struct SeededEntropy {
    stream: Mutex<blake3::OutputReader>,
}

impl SeededEntropy {
    /// Returns the generator for `seed`.
    pub fn new(seed: u64) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("rapidraid seeded entropy v1");
        hasher.update(&seed.to_le_bytes());
        Self { stream: Mutex::new(hasher.finalize_xof()) }
    }
}

impl Entropy for SeededEntropy {
    fn fill(&self, out: &mut [u8]) {
        self.stream.lock().unwrap_or_else(std::sync::PoisonError::into_inner).fill(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_one_stream() {
        let (a, b, c) = (SeededEntropy::new(7), SeededEntropy::new(7), SeededEntropy::new(8));
        let ids = [a.id(), a.id()];
        assert_eq!(ids, [b.id(), b.id()]);
        assert_ne!(ids[0], ids[1]);
        assert_ne!(ids[0], c.id());
        assert_eq!(a.below(0), 0);
    }
}
