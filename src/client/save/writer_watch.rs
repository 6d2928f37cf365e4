//! The reports of the writers of a joint save, and the writers that no longer report
//! (docs/semantics.md, 3).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::joint_save::JointWork;
use super::save_session::SaveSession;
use crate::client::ClientError;
use crate::clock::Clock;
use crate::format::joint_save::{JointSave, WriterState};
use crate::format::records::ShardRoot;
use crate::wire::calls::CompletedShards;

/// Maximum number of writers that are named as silent.
const SILENT_NAMED: usize = 8;

/// Number of intervals between reports after which a writer that has not reported is silent.
const SILENT_INTERVALS: u32 = 3;

/// The reports of one writer in one attempt at a save, and when it last saw the state of each writer
/// change.
pub(super) struct WriterWatch {
    clock: Arc<dyn Clock>,
    /// The interval between two reports of a writer.
    interval: Duration,
    /// The number of the writer that watches the others.
    own: u32,
    /// The number of reports that this writer has made.
    reports: u32,
    /// The time of its last report, and the progress in it.
    last_report: Option<(Duration, u32)>,
    /// The state of each writer, and when this writer first saw it in that state.
    seen: Vec<(WriterState, Duration)>,
    /// When the states were last noted.
    noted_at: Duration,
    /// The writers whose shards are complete, of which no report is expected any more.
    complete: BTreeSet<u32>,
}

impl WriterWatch {
    pub(super) fn new(clock: Arc<dyn Clock>, interval: Duration, own: u32) -> Self {
        let (noted_at, seen, complete) = (clock.now(), Vec::new(), BTreeSet::new());
        Self { clock, interval, own, reports: 0, last_report: None, seen, noted_at, complete }
    }

    /// Returns the progress to report, and the number of the report. Both are those of the last report
    /// if no new one is due.
    pub(super) fn next_report(&mut self, progress: impl FnOnce() -> u32) -> (u32, u32) {
        let now = self.clock.now();
        match self.last_report {
            Some((at, reported)) if now.saturating_sub(at) < self.interval => {
                (reported, self.reports)
            }
            _ => {
                self.reports = self.reports.wrapping_add(1);
                let (_, reported) = *self.last_report.insert((now, progress()));
                (reported, self.reports)
            }
        }
    }

    /// Notes the states of the writers. The time of every writer starts again if this writer could not
    /// look for more than one and a half intervals: the others may not have been able to report.
    fn note(&mut self, joint: &JointSave) {
        let now = self.clock.now();
        let was_blind = now.saturating_sub(self.noted_at) > self.interval * 3 / 2;
        self.noted_at = now;
        if was_blind || self.seen.len() != joint.writers.len() {
            self.seen = joint.writers.iter().map(|state| (state.clone(), now)).collect();
            return;
        }
        for (state, (known, since)) in joint.writers.iter().zip(&mut self.seen) {
            if known != state {
                (*known, *since) = (state.clone(), now);
            }
        }
    }

    /// Notes that all shards of a writer are complete.
    fn note_complete(&mut self, writer: u32) {
        self.complete.insert(writer);
    }

    /// Returns the other writers from which no report has come for [`SILENT_INTERVALS`], except those
    /// that are known to be complete.
    fn silent(&self) -> Vec<u32> {
        let (now, limit) = (self.clock.now(), self.interval * SILENT_INTERVALS);
        let is_silent = |(writer, (_, since)): &(u32, &(WriterState, Duration))| {
            *writer != self.own
                && !self.complete.contains(writer)
                && now.saturating_sub(*since) >= limit
        };
        (0..).zip(&self.seen).filter(is_silent).map(|(writer, _)| writer).collect()
    }
}

impl SaveSession {
    /// Tells the decisions which writers are silent and have not completed their shards. Tells nothing
    /// while the catalogue does not say which shards are complete.
    pub(super) async fn note_silent_writers(
        &self,
        work: &JointWork<'_>,
        joint: &JointSave,
        watch: &mut WriterWatch,
    ) {
        watch.note(joint);
        let mut silent = Vec::new();
        let mut page: Vec<ShardRoot> = Vec::new();
        for writer in watch.silent() {
            if silent.len() == SILENT_NAMED {
                break;
            }
            match self.is_complete(work, joint, writer, &mut page).await {
                Ok(true) => watch.note_complete(writer),
                Ok(false) => silent.push(writer),
                Err(error) => {
                    tracing::debug!(%error, "it is not known which writers have completed their shards");
                    return;
                }
            }
        }
        work.decisions.note_silent(&silent);
    }

    /// Returns whether the last shard of a writer is complete: a writer completes its shards in order.
    /// `page` has complete shards from an earlier call. If it ends before the writer's last shard, this
    /// lists them again from there, and replaces it.
    async fn is_complete(
        &self,
        work: &JointWork<'_>,
        joint: &JointSave,
        writer: u32,
        page: &mut Vec<ShardRoot>,
    ) -> Result<bool, ClientError> {
        let bounds = joint.first_shard(writer as usize).zip(joint.first_shard(writer as usize + 1));
        let Some((first, end)) = bounds else { return Ok(false) };
        if first == end {
            return Ok(true);
        }
        let last = end - 1;
        if page.last().is_none_or(|listed| listed.index < last) {
            match self.list_completed_shards(work, last).await? {
                CompletedShards::Open { roots } => *page = roots,
                CompletedShards::Committed | CompletedShards::Over => return Ok(true),
            }
        }
        Ok(page.iter().any(|root| root.index == last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::id::{LaunchId, LeaseId, SaveId};

    const INTERVAL: Duration = Duration::from_secs(2);

    /// Returns a save whose writers have made these numbers of reports.
    fn joint(reports: &[u32]) -> JointSave {
        let state =
            |reports: &u32| WriterState::Reporting { shards: 1, progress: 0, reports: *reports };
        JointSave {
            save: SaveId([1; 12]),
            launch: LaunchId([2; 16]),
            lease: LeaseId([3; 16]),
            seed: [0; 32],
            n: 4,
            k: 2,
            block_bytes: 1 << 20,
            ring: Vec::new(),
            writers: reports.iter().map(state).collect(),
        }
    }

    /// Lets one interval pass, and notes the numbers of reports.
    async fn pass(watch: &mut WriterWatch, reports: &[u32]) {
        tokio::time::advance(INTERVAL).await;
        watch.note(&joint(reports));
    }

    #[tokio::test(start_paused = true)]
    async fn a_writer_that_does_not_report_is_silent_until_it_does() {
        let mut watch = WriterWatch::new(SystemClock::new(), INTERVAL, 0);
        watch.note(&joint(&[1, 1, 1]));
        for reports in 2..4 {
            pass(&mut watch, &[1, reports, 1]).await;
            assert_eq!(watch.silent(), [0; 0]);
        }
        pass(&mut watch, &[1, 3, 1]).await;
        assert_eq!(watch.silent(), [2], "the watching writer is not one of them");
        for _ in 0..2 {
            pass(&mut watch, &[1, 3, 1]).await;
        }
        assert_eq!(watch.silent(), [1, 2]);
        pass(&mut watch, &[1, 3, 2]).await;
        watch.note_complete(1);
        assert_eq!(watch.silent(), [0; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_time_without_a_look_the_time_of_all_starts_again() {
        let mut watch = WriterWatch::new(SystemClock::new(), INTERVAL, 0);
        watch.note(&joint(&[1, 1]));
        tokio::time::advance(10 * INTERVAL).await;
        watch.note(&joint(&[1, 1]));
        assert_eq!(watch.silent(), [0; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_is_made_once_an_interval() {
        let mut watch = WriterWatch::new(SystemClock::new(), INTERVAL, 0);
        assert_eq!(watch.next_report(|| 5), (5, 1));
        tokio::time::advance(INTERVAL / 2).await;
        assert_eq!(watch.next_report(|| 6), (5, 1), "none is due");
        tokio::time::advance(INTERVAL / 2).await;
        assert_eq!(watch.next_report(|| 7), (7, 2));
    }
}
