//! The users of a segment's bytes: each upload and each reader owns a [`Hold`]. While there is one,
//! the segment is neither filled again nor unlinked.

use std::sync::Arc;

use tokio::sync::watch;

/// A notifier that wakes all tasks that wait for a change of the daemon's state.
#[derive(Debug, Clone)]
pub struct Bell(Arc<watch::Sender<u64>>);

impl Bell {
    /// Creates a bell that has not been rung.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// Wakes all listeners.
    pub fn ring(&self) {
        self.0.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Returns a receiver that is notified of every ring from now on.
    pub fn listen(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}

impl Default for Bell {
    fn default() -> Self {
        Self::new()
    }
}

/// Counts the holds on one segment.
#[derive(Debug, Clone)]
pub struct Holds {
    token: Arc<()>,
    bell: Bell,
}

/// A claim on the bytes of a segment. Dropping it rings the bell.
#[derive(Debug)]
pub struct Hold {
    token: Option<Arc<()>>,
    bell: Bell,
}

impl Holds {
    /// Creates a counter without holds.
    pub fn new(bell: &Bell) -> Self {
        Self { token: Arc::new(()), bell: bell.clone() }
    }

    /// Adds a hold. Returns it.
    pub fn hold(&self) -> Hold {
        Hold { token: Some(self.token.clone()), bell: self.bell.clone() }
    }

    /// Returns whether there is any hold.
    pub fn is_held(&self) -> bool {
        Arc::strong_count(&self.token) > 1
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Release the hold before ringing, so that every woken task sees it released.
        self.token = None;
        self.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_drop_frees_and_each_rings() {
        let bell = Bell::new();
        let (holds, mut heard) = (Holds::new(&bell), bell.listen());
        let (one, two) = (holds.hold(), holds.hold());
        assert!(holds.is_held());
        drop(one);
        assert!(holds.is_held() && heard.has_changed().unwrap());
        heard.mark_unchanged();
        drop(two);
        assert!(!holds.is_held() && heard.has_changed().unwrap());
    }
}
