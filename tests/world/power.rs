//! The power of a machine. It counts all changes of durable state, and can fail at a chosen change.
//!
//! While the power is off, the machine's disk and databases refuse every call, also from a process
//! that has not noticed the power cut yet.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rapidraid::store::kv::{Batch, Pair};
use rapidraid::store::{Disk, Kv, KvError, MemoryDisk, MemoryKv};

/// The state in which a stopped machine leaves its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaves {
    /// Only synced data remains.
    Synced,
    /// All synced data remains; of the rest, the seed decides on each name and each sector.
    Torn(u64),
    /// Everything remains: the medium had written it all.
    All,
    /// Everything remains, and unsynced data is still unsynced: only the process died.
    Cache,
}

impl Leaves {
    pub fn of(self, disk: &Arc<MemoryDisk>) -> Arc<MemoryDisk> {
        match self {
            Leaves::Synced => Arc::new(disk.crash()),
            Leaves::Torn(seed) => Arc::new(disk.crash_torn(seed)),
            Leaves::All => Arc::new(disk.crash_after_writeback()),
            Leaves::Cache => disk.clone(),
        }
    }
}

type Cut = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub struct Power {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    changes: u64,
    off: bool,
    cut: Option<(u64, Cut)>,
}

impl Power {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of changes so far: writes, syncs, renames, created and removed files and
    /// folders, and database batches.
    pub fn changes(&self) -> u64 {
        self.state().changes
    }

    /// Calls `cut` just before the change that follows the next `changes` changes. `cut` may turn
    /// off this power and that of other machines.
    pub fn cut_after(&self, changes: u64, cut: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        state.cut = Some((state.changes + changes, Box::new(cut)));
    }

    /// Cancels a cut that has not happened.
    pub fn calm(&self) {
        self.state().cut = None;
    }

    pub fn turn(&self, on: bool) {
        self.state().off = !on;
    }

    pub fn is_on(&self) -> bool {
        !self.state().off
    }

    /// Returns whether a call succeeds, and calls a due cut first. `change` says whether the call
    /// changes durable state.
    pub fn passes(&self, change: bool) -> bool {
        let due = {
            let mut state = self.state();
            let now = state.changes;
            if change && !state.off { state.cut.take_if(|(at, _)| *at == now) } else { None }
        };
        if let Some((_, cut)) = due {
            cut();
        }
        let mut state = self.state();
        state.changes += u64::from(change && !state.off);
        !state.off
    }
}

/// The machine that holds a database.
#[derive(Clone)]
pub struct Host {
    pub power: Arc<Power>,
    pub disk: Arc<MemoryDisk>,
    /// Closes the connections of the machine's process.
    pub end: Arc<dyn Fn() + Send + Sync>,
}

/// A database on a machine's disk. A batch is durable as a whole, or was never written. On a full
/// disk a batch fails, and a daemon whose database has failed stops: nothing of its process works
/// from that moment on.
pub struct PoweredKv {
    pub map: Arc<MemoryKv>,
    pub host: Host,
}

impl PoweredKv {
    fn pass(&self, change: bool) -> Result<&MemoryKv, KvError> {
        let Host { power, disk, end } = &self.host;
        let passes = power.passes(change);
        if passes && change && disk.space().is_ok_and(|space| space.free_bytes == 0) {
            power.turn(false);
            end();
        }
        if power.is_on() {
            return Ok(&self.map);
        }
        let source = std::io::Error::other("the power is off, or the disk is full");
        Err(KvError::Io { op: "use", path: "the map".to_owned(), source })
    }
}

impl Kv for PoweredKv {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        self.pass(false)?.get(key)
    }

    fn apply(&self, batch: &Batch) -> Result<(), KvError> {
        self.pass(!batch.is_empty())?.apply(batch)
    }

    fn scan(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<Pair>, KvError> {
        self.pass(false)?.scan(prefix, after, limit)
    }
}
