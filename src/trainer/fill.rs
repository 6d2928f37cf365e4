//! The trainer's side of saves: the segments that this process fills, and the requests for them.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use super::StagingError;
use super::cgroup;
use super::mapping::{self, Writable};
use super::protocol::{Answer, HOSTS_SINCE, Hosts, NOT_MADE_SINCE, Prepare, Request};
use super::session::{Session, Wait};
use crate::id::{FillId, SegmentId, Step};

/// A segment that this process fills.
pub struct Segment {
    /// The id of the segment.
    pub id: SegmentId,
    /// The mapped memory of the segment.
    pub map: Writable,
    /// The segment's file, which arrived locked. The lock shows the daemon that a process holds the
    /// segment.
    lock: Mutex<Option<File>>,
}

/// A segment that the daemon has ordered this process to make.
pub(super) struct OrderedSegment {
    id: SegmentId,
    descriptor: OwnedFd,
    len_bytes: u64,
}

impl Session {
    /// Makes the first segment of a rank: reserves its memory, charged to this process, and maps it.
    /// Call [`make_ordered_segments`](Self::make_ordered_segments) for the others when all ranks of
    /// this host have their first one: otherwise a rank could take the memory for another's first
    /// segment. `hosts` names the hosts of the launch if it runs on several.
    pub fn prepare(
        &mut self,
        prepare: &Prepare,
        hosts: Option<&Hosts>,
        wait: &mut Wait<'_>,
    ) -> Result<Vec<Arc<Segment>>, StagingError> {
        const WHAT: &str = "memory for the segments";
        if hosts.is_some() && self.hello.version < HOSTS_SINCE {
            let reason = "it knows no launches of several hosts: upgrade it".into();
            return Err(StagingError::Refused { dir: self.dir.clone(), reason });
        }
        let request = |limit_ms| {
            let prepare = Prepare { limit_ms, ..prepare.clone() };
            match hosts {
                Some(hosts) => Request::PrepareOnHost(prepare, hosts.clone()),
                None => Request::Prepare(prepare),
            }
        };
        let (answer, descriptors) = self.ask_until(WHAT, request, &mut |_| (), wait)?;
        let Answer::Prepared { segments: ids } = answer else {
            return Err(StagingError::Unexpected { what: WHAT });
        };
        self.place = Some(prepare.place.clone());
        self.ordered.clear();
        self.order_segments(ids, descriptors, prepare.segment_bytes)?;
        if self.hello.version < NOT_MADE_SINCE {
            // The daemon cannot be told that there is memory for one only.
            let all_bytes = prepare.segment_bytes.saturating_mul(self.ordered.len() as u64);
            check_room(all_bytes, cgroup::room_bytes())?;
        }
        let mut made = Vec::new();
        self.make_next_segment(&mut made, wait)?;
        Ok(made)
    }

    /// Asks into which of `segments` the step is to be written, and waits until one is free. The
    /// daemon may order another segment to be made first; it is appended to `segments`. Returns the
    /// index of the segment and the id of the filling, or, only with `or_skip`, the reason why all
    /// ranks skip the step.
    pub fn fill(
        &mut self,
        step: Step,
        or_skip: bool,
        segments: &mut Vec<Arc<Segment>>,
        wait: &mut Wait<'_>,
    ) -> Result<Result<(usize, FillId), String>, StagingError> {
        const WHAT: &str = "a segment to fill";
        let request = |limit_ms| Request::Fill { step, or_skip, limit_ms };
        loop {
            self.make_ordered_segments(segments, wait)?;
            match self.ask_until(WHAT, request, &mut |_| (), wait)? {
                (Answer::Fill { segment, fill }, _) => {
                    let at = segments.iter().position(|own| own.id == segment);
                    let filled = at.map(|at| Ok((at, fill)));
                    return filled.ok_or(StagingError::Unexpected { what: WHAT });
                }
                (Answer::Skipped { what }, _) if or_skip => return Ok(Err(what)),
                (Answer::Prepared { segments: ids }, descriptors) => {
                    let len_bytes = segments.first().map_or(0, |own| own.map.len()) as u64;
                    self.order_segments(ids, descriptors, len_bytes)?;
                }
                _ => return Err(StagingError::Unexpected { what: WHAT }),
            }
        }
    }

    /// Makes the segments that the daemon has ordered and that are not made yet, and appends them to
    /// `segments`. If there is no memory for one of them and `segments` is not empty, the process
    /// goes on with those that it has.
    ///
    /// # Errors
    /// Fails without memory for a segment if `segments` is empty, or if the daemon is older than
    /// version 4 of the protocol.
    pub fn make_ordered_segments(
        &mut self,
        segments: &mut Vec<Arc<Segment>>,
        wait: &mut Wait<'_>,
    ) -> Result<(), StagingError> {
        while !self.ordered.is_empty() {
            self.make_next_segment(segments, wait)?;
        }
        Ok(())
    }

    fn order_segments(
        &mut self,
        ids: Vec<SegmentId>,
        descriptors: VecDeque<OwnedFd>,
        len_bytes: u64,
    ) -> Result<(), StagingError> {
        if ids.len() != descriptors.len() {
            return Err(StagingError::Unexpected { what: "memory for the segments" });
        }
        let ordered = ids.into_iter().zip(descriptors);
        let ordered = ordered.map(|(id, descriptor)| OrderedSegment { id, descriptor, len_bytes });
        self.ordered.extend(ordered);
        Ok(())
    }

    /// Makes the next ordered segment, if there is one, and appends it to `segments`. Without memory
    /// for it, reports to the daemon that neither this one nor the others are made.
    fn make_next_segment(
        &mut self,
        segments: &mut Vec<Arc<Segment>>,
        wait: &mut Wait<'_>,
    ) -> Result<(), StagingError> {
        let Some(OrderedSegment { id, descriptor, len_bytes }) = self.ordered.pop_front() else {
            return Ok(());
        };
        let made = check_room(len_bytes, cgroup::room_bytes())
            .and_then(|()| Segment::make(id, descriptor, len_bytes, wait));
        let error = match made {
            Ok(segment) => {
                let segment = Arc::new(segment);
                self.made.retain(|segment| segment.strong_count() > 0);
                self.made.push(Arc::downgrade(&segment));
                segments.push(segment);
                return Ok(());
            }
            Err(error) => error,
        };
        let left = std::mem::take(&mut self.ordered);
        let is_out_of_memory =
            matches!(error, StagingError::NoRoom { .. } | StagingError::Io { .. });
        if !is_out_of_memory || self.hello.version < NOT_MADE_SINCE {
            return Err(error);
        }
        let why = error.to_string();
        for segment in std::iter::once(id).chain(left.into_iter().map(|ordered| ordered.id)) {
            let request = Request::NotMade { segment, why: why.clone() };
            let told = self.tell("a segment that is not made", &request, wait);
            if !segments.is_empty() {
                told?;
            }
        }
        if segments.is_empty() { Err(error) } else { Ok(()) }
    }
}

impl Segment {
    fn make(
        id: SegmentId,
        descriptor: OwnedFd,
        len_bytes: u64,
        wait: &mut Wait<'_>,
    ) -> Result<Self, StagingError> {
        let failed = |source| StagingError::Io {
            what: format!("reserving {len_bytes} bytes of shared memory for a segment"),
            source,
        };
        let file = File::from(descriptor);
        let mut interrupted = None;
        let mut proceed = || match wait.check("prepare", "") {
            Ok(()) => Ok(()),
            Err(error) => {
                interrupted = Some(error);
                Err(io::ErrorKind::Interrupted.into())
            }
        };
        let map = mapping::reserve(&file, len_bytes, &mut proceed)
            .and_then(|()| Writable::map(&file, len_bytes, &mut proceed));
        match (map, interrupted) {
            (Ok(map), _) => Ok(Self { id, map, lock: Mutex::new(Some(file)) }),
            (Err(_), Some(error)) => Err(error),
            (Err(source), None) => Err(failed(source)),
        }
    }

    /// Releases this process's copy of the lock. In a forked child whose parent held the mutex at the
    /// time of the fork, the lock stays until the child ends.
    pub(super) fn unlock(&self) {
        if let Ok(mut lock) = self.lock.try_lock() {
            *lock = None;
        }
    }
}

/// Fails if the control groups of this process have no room for `wanted_bytes`. The kernel would
/// kill the process if it took them anyway.
fn check_room(wanted_bytes: u64, room_bytes: Option<u64>) -> Result<(), StagingError> {
    match room_bytes {
        Some(room_bytes) if wanted_bytes > room_bytes => {
            Err(StagingError::NoRoom { wanted_bytes, room_bytes })
        }
        _ => Ok(()),
    }
}
