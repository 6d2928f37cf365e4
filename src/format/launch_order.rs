//! The record of the launches of a job (docs/semantics.md, 3).

use serde::{Deserialize, Serialize};

use super::envelope::RecordKind;
use super::records::Record;
use crate::id::{LaunchId, Step};

/// Maximum number of launches that the record lists. With this many launches, the record still fits
/// into a value of the catalogue.
pub const MAX_LAUNCHES: usize = 64;

/// The last launches of a job, in the order in which they registered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchOrder {
    /// The last launches, at most [`MAX_LAUNCHES`]. The last one is the newest.
    pub launches: Vec<RegisteredLaunch>,
}

/// A launch that has registered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredLaunch {
    /// The launch.
    pub launch: LaunchId,
    /// The number of the launch in its job, from 1.
    pub number: u64,
    /// When the launch registered, in seconds since 1970. It is shown to users, and no rule uses
    /// it.
    pub registered_at: u64,
    /// The resume point: the earliest step that the launch has resumed from, or `None` if it loaded
    /// nothing.
    pub resumed: Option<Step>,
}

/// The place of a launch among the launches of its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchRank {
    /// The launch registered last.
    Newest,
    /// Another launch has registered since.
    Older,
    /// The launch is not in the record.
    Unknown,
}

impl Record for LaunchOrder {
    const KIND: RecordKind = RecordKind::LaunchOrder;
}

impl LaunchOrder {
    /// Returns the launch that registered last.
    pub fn newest(&self) -> Option<&RegisteredLaunch> {
        self.launches.last()
    }

    /// Returns the place of a launch.
    pub fn rank_of(&self, launch: LaunchId) -> LaunchRank {
        match self.launches.iter().rposition(|entry| entry.launch == launch) {
            None => LaunchRank::Unknown,
            Some(at) if at + 1 == self.launches.len() => LaunchRank::Newest,
            Some(_) => LaunchRank::Older,
        }
    }

    /// Returns whether a launch may save the step. The newest launch may save every step. An older
    /// launch may save a step only if each launch that registered after it has a resume point at
    /// that step or later. A launch that is not in the record is treated as the oldest. While the
    /// record is empty, no launch may save.
    pub fn may_save(&self, launch: LaunchId, step: Step) -> bool {
        let later = match self.launches.iter().rposition(|entry| entry.launch == launch) {
            Some(at) => self.launches.get(at + 1..).unwrap_or_default(),
            None if self.launches.is_empty() => return false,
            None => &self.launches,
        };
        later.iter().all(|entry| entry.resumed.is_some_and(|resumed| step <= resumed))
    }

    /// Returns whether `launch` registered before `other`. A launch that is not in the record is
    /// treated as the oldest.
    pub fn is_before(&self, launch: LaunchId, other: LaunchId) -> bool {
        let place = |of: LaunchId| self.launches.iter().rposition(|entry| entry.launch == of);
        place(launch) < place(other)
    }

    /// Adds a launch as the newest, and forgets the oldest one if there are too many.
    pub fn register(&mut self, launch: LaunchId, registered_at: u64, resumed: Option<Step>) {
        let number = self.newest().map_or(0, |newest| newest.number).saturating_add(1);
        if self.launches.len() >= MAX_LAUNCHES {
            self.launches.remove(0);
        }
        self.launches.push(RegisteredLaunch { launch, number, registered_at, resumed });
    }

    /// Moves the resume point of the newest launch to `resumed` if that is earlier; `None` is
    /// earlier than every step. Returns whether the resume point has changed.
    pub fn lower_resume_point(&mut self, resumed: Option<Step>) -> bool {
        match self.launches.last_mut() {
            Some(newest) if resumed < newest.resumed => {
                newest.resumed = resumed;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(number: u8) -> LaunchId {
        LaunchId([number; 16])
    }

    #[test]
    fn an_older_launch_saves_only_up_to_the_resume_point_of_its_successor() {
        let mut order = LaunchOrder::default();
        assert!(!order.may_save(launch(1), Step(1)));
        order.register(launch(1), 100, None);
        assert!(order.may_save(launch(1), Step(9)));
        order.register(launch(2), 200, Some(Step(5)));
        assert_eq!(order.newest().map(|newest| newest.number), Some(2));
        assert!(order.may_save(launch(2), Step(3)) && order.may_save(launch(2), Step(7)));
        assert!(order.may_save(launch(1), Step(5)) && !order.may_save(launch(1), Step(6)));
        assert_eq!(order.rank_of(launch(1)), LaunchRank::Older);
        assert!(order.is_before(launch(1), launch(2)) && order.is_before(launch(3), launch(1)));
        assert!(!order.is_before(launch(2), launch(1)) && !order.is_before(launch(2), launch(2)));
        assert!(!order.lower_resume_point(Some(Step(6))) && order.lower_resume_point(None));
        assert!(!order.may_save(launch(1), Step(0)));
    }

    #[test]
    fn every_launch_in_between_limits_an_older_one() {
        let mut order = LaunchOrder::default();
        for (number, resumed) in [(1, None), (2, Some(Step(20))), (3, Some(Step(40)))] {
            order.register(launch(number), 100, resumed);
        }
        // Launch 1 may have branched off after step 20, and launch 2 has replaced what came then.
        assert!(order.may_save(launch(1), Step(20)) && !order.may_save(launch(1), Step(30)));
        assert!(order.may_save(launch(2), Step(40)) && !order.may_save(launch(2), Step(41)));
        assert!(!order.may_save(launch(9), Step(0)), "launch 1 began with nothing");
    }

    #[test]
    fn the_record_keeps_the_last_launches() {
        let mut order = LaunchOrder::default();
        for number in 0..200 {
            order.register(launch(number), u64::MAX, Some(Step(u64::MAX)));
        }
        assert_eq!(order.launches.len(), MAX_LAUNCHES);
        assert_eq!(order.newest().map(|newest| newest.number), Some(200));
        assert_eq!(order.rank_of(launch(135)), LaunchRank::Unknown);
        assert_eq!(order.rank_of(launch(136)), LaunchRank::Older);
    }
}
