//! The writers of a joint save of which no progress is seen (docs/semantics.md, 3).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::joint_save::JointWork;
use super::save_session::SaveSession;
use crate::client::ClientError;
use crate::clock::Clock;
use crate::format::joint_save::{JointSave, WriterState};
use crate::wire::calls::CompletedShards;

/// Maximum number of writers that are named as silent.
const SILENT_NAMED: usize = 8;

/// When the state of each writer last changed, as one writer of the save has seen it.
pub(super) struct WriterWatch {
    clock: Arc<dyn Clock>,
    /// The time without a change after which a writer counts as silent.
    limit: Duration,
    /// The number of the writer that watches the others.
    own: u32,
    seen: Vec<(WriterState, Duration)>,
    /// The writers whose shards are complete, of which no more progress is expected.
    complete: BTreeSet<u32>,
}

impl WriterWatch {
    pub(super) fn new(clock: Arc<dyn Clock>, limit: Duration, own: u32) -> Self {
        Self { clock, limit, own, seen: Vec::new(), complete: BTreeSet::new() }
    }

    /// Notes the states of the writers.
    pub(super) fn note(&mut self, joint: &JointSave) {
        let now = self.clock.now();
        for (writer, state) in joint.writers.iter().enumerate() {
            match self.seen.get_mut(writer) {
                Some((known, _)) if known == state => {}
                Some(changed) => *changed = (state.clone(), now),
                None => self.seen.push((state.clone(), now)),
            }
        }
    }

    /// Notes that all shards of a writer are complete.
    pub(super) fn note_complete(&mut self, writer: u32) {
        self.complete.insert(writer);
    }

    /// Returns the first `count` other writers whose state has not changed for the limit, and whose
    /// shards are not known to be complete.
    pub(super) fn silent(&self, count: usize) -> Vec<u32> {
        let now = self.clock.now();
        let is_silent = |writer: &u32, since: Duration| {
            *writer != self.own
                && !self.complete.contains(writer)
                && now.saturating_sub(since) >= self.limit
        };
        let numbered = (0..).zip(&self.seen);
        let silent = numbered.filter(|(writer, (_, since))| is_silent(writer, *since));
        silent.map(|(writer, _)| writer).take(count).collect()
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
        for writer in watch.silent(SILENT_NAMED) {
            match self.has_completed_its_shards(work, joint, writer).await {
                Ok(true) => watch.note_complete(writer),
                Ok(false) => {}
                Err(error) => {
                    tracing::debug!(%error, "it is not known which writers have completed their shards");
                    return;
                }
            }
        }
        work.decisions.note_silent(&watch.silent(SILENT_NAMED));
    }

    /// Returns whether the last shard of a writer is complete. A writer completes its shards in order.
    async fn has_completed_its_shards(
        &self,
        work: &JointWork<'_>,
        joint: &JointSave,
        writer: u32,
    ) -> Result<bool, ClientError> {
        let (first, end) =
            (joint.first_shard(writer as usize), joint.first_shard(writer as usize + 1));
        let (Some(first), Some(end)) = (first, end) else { return Ok(false) };
        if first == end {
            return Ok(true);
        }
        Ok(match self.list_completed_shards(work, end - 1).await? {
            CompletedShards::Open { roots } => {
                roots.first().is_some_and(|root| root.index == end - 1)
            }
            CompletedShards::Committed | CompletedShards::Over => true,
        })
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

    #[tokio::test(start_paused = true)]
    async fn a_writer_without_progress_for_the_limit_is_silent_until_it_goes_on() {
        let mut watch = WriterWatch::new(SystemClock::new(), LIMIT, 0);
        watch.note(&joint(&[0, 0, 0]));
        tokio::time::advance(LIMIT / 2).await;
        watch.note(&joint(&[0, 5, 0]));
        assert_eq!(watch.silent(8), Vec::<u32>::new());
        tokio::time::advance(LIMIT / 2).await;
        watch.note(&joint(&[0, 5, 0]));
        assert_eq!(watch.silent(8), [2], "the watching writer is not one of them");
        tokio::time::advance(LIMIT / 2).await;
        assert_eq!((watch.silent(8), watch.silent(1)), (vec![1, 2], vec![1]));
        watch.note(&joint(&[0, 5, 1]));
        watch.note_complete(1);
        assert_eq!(watch.silent(8), Vec::<u32>::new());
    }
}
