//! The streams that one side of a connection in memory opens.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Semaphore, mpsc};

use super::pipe::Pipe;

/// A stream as the accepting side receives it: the pipe that it reads, and the pipe that it writes
/// if the stream is bidirectional.
pub(super) struct Opened {
    pub(super) read: Arc<Pipe>,
    pub(super) write: Option<Arc<Pipe>>,
}

/// The streams of one kind that one side opens.
pub(super) struct Outgoing {
    pub(super) permits: Arc<Semaphore>,
    inbox: mpsc::Sender<Opened>,
    /// The streams that are opened but not yet visible to the other side.
    hidden: Mutex<Hidden>,
}

#[derive(Default)]
struct Hidden {
    /// The number of streams ever opened, which is also the number of the newest.
    opened: u64,
    /// The numbers and streams, in the order of opening.
    streams: VecDeque<(u64, Opened)>,
}

impl Outgoing {
    pub(super) fn new(max_streams: usize) -> (Arc<Self>, mpsc::Receiver<Opened>) {
        let (inbox, receiver) = mpsc::channel(max_streams);
        let permits = Arc::new(Semaphore::new(max_streams));
        (Arc::new(Self { permits, inbox, hidden: Mutex::default() }), receiver)
    }

    /// Adds a stream that is not visible to the other side yet. Returns its number.
    pub(super) fn hide(&self, opened: Opened) -> u64 {
        let mut hidden = self.hidden.lock().unwrap_or_else(PoisonError::into_inner);
        hidden.opened += 1;
        let number = hidden.opened;
        hidden.streams.push_back((number, opened));
        number
    }

    /// Makes all streams up to `number` visible to the other side (RFC 9000, 3.2: a stream opens
    /// all streams before it).
    pub(super) fn show(&self, number: u64) {
        let mut hidden = self.hidden.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((_, opened)) = hidden.streams.pop_front_if(|(first, _)| *first <= number) {
            // Each stream has a permit, so the inbox has room. The send fails only if the other
            // side is gone.
            let _ = self.inbox.try_send(opened);
        }
    }
}
