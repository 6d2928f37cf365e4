//! The writers of a joint save of which no progress is seen (docs/semantics.md, 3).

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

/// When the state of each writer last changed, as one writer has seen it in one attempt at a save.
pub(super) struct WriterWatch {
    clock: Arc<dyn Clock>,
    /// The time without a change after which a writer counts as silent.
    limit: Duration,
    /// The number of the writer that watches the others.
    own: u32,
    seen: Vec<(WriterState, Duration)>,
    /// When the states were last noted.
    noted_at: Duration,
    /// The writers whose shards are complete, of which no more progress is expected.
    complete: BTreeSet<u32>,
}

impl WriterWatch {
    pub(super) fn new(clock: Arc<dyn Clock>, limit: Duration, own: u32) -> Self {
        let noted_at = clock.now();
        Self { clock, limit, own, seen: Vec::new(), noted_at, complete: BTreeSet::new() }
    }

    /// Notes the states of the writers. The time of all writers counts anew if the states were not
    /// seen for long, and when all have announced: no writer sends before that.
    pub(super) fn note(&mut self, joint: &JointSave) {
        let now = self.clock.now();
        let was_blind = now.saturating_sub(self.noted_at) > self.limit / 2;
        let have_all_announced = self.awaits_announcements() && joint.unknown_writers().is_empty();
        self.noted_at = now;
        if was_blind || have_all_announced || self.seen.len() != joint.writers.len() {
            self.seen = joint.writers.iter().map(|state| (state.clone(), now)).collect();
            return;
        }
        for (state, (known, since)) in joint.writers.iter().zip(&mut self.seen) {
            if known != state {
                (*known, *since) = (state.clone(), now);
            }
        }
    }

    fn awaits_announcements(&self) -> bool {
        self.seen.iter().any(|(state, _)| *state == WriterState::Unknown)
    }

    /// Notes that all shards of a writer are complete.
    fn note_complete(&mut self, writer: u32) {
        self.complete.insert(writer);
    }

    /// Returns the other writers from which a change is due, as none has come for the limit: those
    /// that have not announced or, when all have, those that are not known to be complete.
    fn silent(&self) -> Vec<u32> {
        let (now, awaits) = (self.clock.now(), self.awaits_announcements());
        let is_silent = |(writer, (state, since)): &(u32, &(WriterState, Duration))| {
            *writer != self.own
                && !self.complete.contains(writer)
                && (!awaits || *state == WriterState::Unknown)
                && now.saturating_sub(*since) >= self.limit
        };
        (0..).zip(&self.seen).filter(is_silent).map(|(writer, _)| writer).collect()
    }
}

impl SaveSession {
    /// Notes the writers of which no progress was seen for a lease period, and whose shards are not
    /// complete. Notes nothing while the catalogue does not say which shards are complete.
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
    /// `page` has complete shards that were listed before, and is replaced if it does not go so far.
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

    const LIMIT: Duration = Duration::from_secs(7);

    fn joint(sent_mib: &[u32]) -> JointSave {
        let state = |sent_mib: &u32| WriterState::Announced { shards: 1, sent_mib: *sent_mib };
        JointSave {
            save: SaveId([1; 12]),
            launch: LaunchId([2; 16]),
            lease: LeaseId([3; 16]),
            seed: [0; 32],
            n: 4,
            k: 2,
            block_bytes: 1 << 20,
            ring: Vec::new(),
            writers: sent_mib.iter().map(state).collect(),
        }
    }

    fn watch() -> WriterWatch {
        WriterWatch::new(SystemClock::new(), LIMIT, 0)
    }

    async fn pass(watch: &mut WriterWatch, joint: &JointSave) {
        for _ in 0..2 {
            tokio::time::advance(LIMIT / 4).await;
            watch.note(joint);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_writer_without_progress_for_the_limit_is_silent_until_it_goes_on() {
        let mut watch = watch();
        watch.note(&joint(&[0, 0, 0]));
        pass(&mut watch, &joint(&[0, 5, 0])).await;
        assert_eq!(watch.silent(), [0; 0]);
        pass(&mut watch, &joint(&[0, 5, 0])).await;
        assert_eq!(watch.silent(), [2], "the watching writer is not one of them");
        pass(&mut watch, &joint(&[0, 5, 0])).await;
        assert_eq!(watch.silent(), [1, 2]);
        watch.note(&joint(&[0, 5, 1]));
        watch.note_complete(1);
        assert_eq!(watch.silent(), [0; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn writers_that_wait_for_an_announcement_are_not_silent() {
        let mut watch = watch();
        let mut waits = joint(&[0, 0, 0]);
        waits.writers[2] = WriterState::Unknown;
        watch.note(&waits);
        pass(&mut watch, &waits).await;
        pass(&mut watch, &waits).await;
        assert_eq!(watch.silent(), [2]);
        watch.note(&joint(&[0, 0, 0]));
        assert_eq!(watch.silent(), [0; 0], "their time begins now");
        pass(&mut watch, &joint(&[0, 0, 0])).await;
        pass(&mut watch, &joint(&[0, 0, 0])).await;
        assert_eq!(watch.silent(), [1, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_time_without_a_look_the_time_of_all_begins_anew() {
        let mut watch = watch();
        watch.note(&joint(&[0, 0]));
        tokio::time::advance(2 * LIMIT).await;
        watch.note(&joint(&[0, 0]));
        assert_eq!(watch.silent(), [0; 0]);
    }
}
