//! The parts of plans that a node has admitted, and the streams that they wait for.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::oneshot;

use super::hop_execution::IncomingStream;
use super::part_size::order_disk_bytes;
use crate::budget::Reservation;
use crate::code::Code;
use crate::plan::StreamNo;
use crate::wire::order::Order;

/// A part that is admitted and has not begun to run. It holds the memory that it will use.
pub(super) struct AdmittedPart {
    pub(super) order: Order,
    pub(super) code: Code,
    pub(super) admitted_at: Duration,
    pub(super) waiting: BTreeMap<StreamNo, oneshot::Receiver<IncomingStream>>,
    pub(super) memory: Reservation,
}

/// The admitted parts by their runs, and the streams of admitted and of running parts that have not
/// arrived.
#[derive(Default)]
pub(super) struct PartTable {
    pub(super) admitted: BTreeMap<[u8; 16], AdmittedPart>,
    pub(super) arriving: BTreeMap<([u8; 16], StreamNo), oneshot::Sender<IncomingStream>>,
}

impl PartTable {
    /// Returns the disk space, in bytes, that is promised to admitted parts that have not started.
    /// This space does not count as free.
    pub(super) fn reserved_disk_bytes(&self) -> u64 {
        self.admitted.values().map(|part| order_disk_bytes(&part.order)).sum()
    }

    /// Returns whether the run is admitted or waits for streams. A duplicate of its order must not
    /// replace the hops that wait for them.
    pub(super) fn is_known(&self, run_id: [u8; 16]) -> bool {
        self.admitted.contains_key(&run_id) || self.arriving.keys().any(|(run, _)| *run == run_id)
    }

    /// Removes a part. Its hops get no more streams.
    pub(super) fn remove(&mut self, run_id: [u8; 16]) {
        self.admitted.remove(&run_id);
        self.arriving.retain(|(of, _), _| *of != run_id);
    }

    /// Removes the admitted parts for which `is_over` returns `true`.
    pub(super) fn remove_where(&mut self, is_over: impl Fn(&AdmittedPart) -> bool) {
        let over = self.admitted.iter().filter(|(_, part)| is_over(part));
        let over: Vec<[u8; 16]> = over.map(|(run, _)| *run).collect();
        over.into_iter().for_each(|run_id| self.remove(run_id));
    }
}
