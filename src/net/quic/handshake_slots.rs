//! The slots of incoming handshakes. While more than half of them are taken, each source has a small
//! share, so that a host without a certificate that leaves its handshakes unfinished cannot keep the
//! members out.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of incoming handshakes and of verified connections that are not accepted yet,
/// together.
pub(super) const MAX_HANDSHAKES: usize = 128;
/// Maximum number of these for one source while [`MAX_HANDSHAKES`] are more than half taken.
const SHARE_OF_SOURCE: usize = 8;

/// The slots of an endpoint.
#[derive(Default)]
pub(super) struct HandshakeSlots {
    /// The number of slots that each source has taken. Sources without a slot are not in the map.
    taken: Mutex<HashMap<IpAddr, usize>>,
}

/// A slot, which is free again when this is dropped.
pub(super) struct HandshakeSlot {
    slots: Arc<HandshakeSlots>,
    source: IpAddr,
}

impl HandshakeSlots {
    /// Takes a slot. Returns `None` if all are taken, or if more than half are taken and this source
    /// has its share. This machine has no share: many members may run on it in a test.
    pub(super) fn try_take(self: &Arc<Self>, from: IpAddr) -> Option<HandshakeSlot> {
        let source = source_of(from);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = taken.values().sum();
        let own = taken.get(&source).copied().unwrap_or_default();
        let is_over_share =
            total > MAX_HANDSHAKES / 2 && own >= SHARE_OF_SOURCE && !source.is_loopback();
        if total >= MAX_HANDSHAKES || is_over_share {
            return None;
        }
        taken.insert(source, own + 1);
        Some(HandshakeSlot { slots: self.clone(), source })
    }

    /// Returns whether more than half of the slots are taken.
    pub(super) fn is_pressed(&self) -> bool {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.values().sum::<usize>() > MAX_HANDSHAKES / 2
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.source) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.source);
            }
        }
    }
}

/// Returns the source that an address belongs to: an IPv4 address, or the /64 network of an IPv6
/// address, because one host can have all addresses of such a network.
fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_source_cannot_take_the_slots_of_all_others() {
        let slots = Arc::new(HandshakeSlots::default());
        let silent = address("10.0.0.1");
        let held: Vec<_> = (0..500).filter_map(|_| slots.try_take(silent)).collect();
        assert_eq!(held.len(), MAX_HANDSHAKES / 2 + 1);
        assert!(slots.is_pressed());
        let other = |last: usize| address(&format!("10.0.1.{}", last / SHARE_OF_SOURCE));
        let others: Vec<_> = (0..500).filter_map(|last| slots.try_take(other(last))).collect();
        assert_eq!(held.len() + others.len(), MAX_HANDSHAKES);
        assert!(slots.try_take(address("10.0.2.1")).is_none(), "all slots are taken");
        drop(held);
        assert!(!slots.is_pressed() && slots.try_take(silent).is_some());
        drop(others);
        assert!(slots.taken.lock().unwrap().is_empty());
        let here: Vec<_> = (0..500).filter_map(|_| slots.try_take(address("127.0.0.1"))).collect();
        assert_eq!(here.len(), MAX_HANDSHAKES);
    }

    #[test]
    fn the_addresses_of_one_network_are_one_source() {
        assert_eq!(source_of(address("2001:db8::1")), source_of(address("2001:db8::ffff:1")));
        assert_ne!(source_of(address("2001:db8::1")), source_of(address("2001:db8:0:1::1")));
        assert_eq!(source_of(address("::ffff:10.0.0.1")), address("10.0.0.1"));
        assert_ne!(source_of(address("10.0.0.1")), source_of(address("10.0.0.2")));
    }
}
