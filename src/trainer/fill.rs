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

/// The segments that the daemon ordered this process to make.
struct OrderedSegments {
    ids: Vec<SegmentId>,
    descriptors: VecDeque<OwnedFd>,
    len_bytes: u64,
}

impl Session {
    /// Makes the segments of a rank: reserves their memory, charged to this process, and maps it.
    /// Without memory for more than one segment, makes one. `hosts` names the hosts of the launch if
    /// it runs on several.
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
        let ordered = OrderedSegments { ids, descriptors, len_bytes: prepare.segment_bytes };
        let mut made = Vec::new();
        self.make_segments(ordered, &mut made, wait)?;
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
            match self.ask_until(WHAT, request, &mut |_| (), wait)? {
                (Answer::Fill { segment, fill }, _) => {
                    let at = segments.iter().position(|own| own.id == segment);
                    let filled = at.map(|at| Ok((at, fill)));
                    return filled.ok_or(StagingError::Unexpected { what: WHAT });
                }
                (Answer::Skipped { what }, _) if or_skip => return Ok(Err(what)),
                (Answer::Prepared { segments: ids }, descriptors) => {
                    let len_bytes = segments.first().map_or(0, |own| own.map.len()) as u64;
                    let ordered = OrderedSegments { ids, descriptors, len_bytes };
                    self.make_segments(ordered, segments, wait)?;
                }
                _ => return Err(StagingError::Unexpected { what: WHAT }),
            }
        }
    }

    /// Makes segments and appends them to `segments`. If there is no memory for one of them and
    /// `segments` is not empty, reports to the daemon the segments that are not made: the process
    /// goes on with those that it has.
    fn make_segments(
        &mut self,
        ordered: OrderedSegments,
        segments: &mut Vec<Arc<Segment>>,
        wait: &mut Wait<'_>,
    ) -> Result<(), StagingError> {
        let OrderedSegments { ids, descriptors, len_bytes } = ordered;
        if ids.len() != descriptors.len() {
            return Err(StagingError::Unexpected { what: "memory for the segments" });
        }
        self.made.retain(|segment| segment.strong_count() > 0);
        let mut left = ids.into_iter().zip(descriptors);
        while let Some((id, descriptor)) = left.next() {
            let made = check_room(len_bytes, cgroup::room_bytes())
                .and_then(|()| Segment::make(id, descriptor, len_bytes, wait));
            match made {
                Ok(segment) => {
                    let segment = Arc::new(segment);
                    self.made.push(Arc::downgrade(&segment));
                    segments.push(segment);
                }
                Err(error @ (StagingError::NoRoom { .. } | StagingError::Io { .. }))
                    if !segments.is_empty() && self.hello.version >= NOT_MADE_SINCE =>
                {
                    let why = error.to_string();
                    for segment in std::iter::once(id).chain(left.map(|(id, _)| id)) {
                        let request = Request::NotMade { segment, why: why.clone() };
                        self.tell("a segment that is not made", &request, wait)?;
                    }
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
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
