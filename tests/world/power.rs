//! The power of a machine: it counts everything that changes what lasts, and goes off at a chosen change.
//!
//! While it is off nothing of the machine works: its disk and its maps refuse, also those of a process that has not noticed yet.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rapidraid::store::kv::{Batch, Pair};
use rapidraid::store::{Disk, Kv, KvError, MemoryDisk, MemoryKv};

/// What becomes of the disk of a machine that stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaves {
    /// Nothing that was not synced.
    Synced,
    /// Of the rest, each name and each sector as the seed has it.
    Torn(u64),
    /// Everything: the medium had caught up.
    All,
    /// Everything, and still not synced: it was the process that died.
    Cache,
}

impl Leaves {
    pub fn of(self, disk: &Arc<MemoryDisk>) -> Arc<MemoryDisk> {
        match self {
            Leaves::Synced => Arc::new(disk.crash()),
            Leaves::Torn(seed) => Arc::new(disk.crash_torn(seed)),
            Leaves::All => Arc::new(disk.crash_late()),
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

    /// How many changes there were: writes, syncs, renames, new and removed files and folders, batches of the maps.
    pub fn changes(&self) -> u64 {
        self.state().changes
    }

    /// Before the change after the next `changes`, `cut` is called. It may turn this power off, and others.
    pub fn cut_after(&self, changes: u64, cut: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        state.cut = Some((state.changes + changes, Box::new(cut)));
    }

    /// Forgets a cut that has not come.
    pub fn calm(&self) {
        self.state().cut = None;
    }

    pub fn turn(&self, on: bool) {
        self.state().off = !on;
    }

    pub fn is_on(&self) -> bool {
        !self.state().off
    }

    /// Whether a call happens; `change`: it changes something.
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

/// The machine under a map.
#[derive(Clone)]
pub struct Host {
    pub power: Arc<Power>,
    pub disk: Arc<MemoryDisk>,
    /// Ends the connections of its process.
    pub end: Arc<dyn Fn() + Send + Sync>,
}

/// A map on a machine's disk: a batch lasts whole, or was never made. On a full disk it fails, and a daemon whose map has failed
/// stops: in the same moment nothing of its process works any more.
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
