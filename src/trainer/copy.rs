//! Copies the wanted parts of a loaded step to their destinations on several threads, and compares
//! each extent that is used with its hash, unless an earlier copy did.
//!
//! The work is divided into jobs that any thread may take. A long extent is copied and hashed in
//! parts, because a step often has few large tensors. The hash of a part is that of a BLAKE3
//! subtree; the thread that hashes the last outstanding part of an extent computes the hash of the
//! whole.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::error::StagingError;
use super::load::LoadedStep;
use crate::format::table::ExtentCopy;
use crate::format::tree::{Hash, PartHasher, root_of_parts};

/// Maximum length of a part: the bytes that one job copies or hashes. [`Job::CopyRuns`] has no
/// maximum. Must be a power of two, because a part is a subtree.
const PART_BYTES: usize = 2 << 20;
/// Length of the pieces in which bytes are copied and hashed. A piece stays in a core's cache
/// between the two.
const PIECE_BYTES: usize = 256 << 10;
/// Number of bytes after which the calling thread asks whether to proceed. The question may wait
/// for a lock of the caller, so it is not asked before each job.
const PROCEED_BYTES: usize = 32 << 20;

/// A destination and the bytes to copy into it.
pub struct Target<'a> {
    /// The source ranges, as parts of extents.
    pub copies: Vec<ExtentCopy>,
    /// The destination.
    pub bytes: &'a mut [u8],
}

/// The verification of an extent, whose parts are hashed by any threads.
struct Verification {
    /// The row number of the extent.
    row: u32,
    /// The length of the extent in bytes.
    len_bytes: u64,
    /// The hash of each part, once it is known.
    parts: Vec<OnceLock<Hash>>,
    /// The number of parts that are not hashed yet.
    missing: AtomicUsize,
}

/// A part of an extent: index of its [`Verification`], and index of the part.
#[derive(Clone, Copy)]
struct PartOf {
    verification: usize,
    part: usize,
}

/// Work that one thread does.
enum Job<'a> {
    /// Copy bytes of an extent. If they are a part of a verification, hash the copy.
    Copy { from: &'a [u8], to: &'a mut [u8], hash_as: Option<PartOf> },
    /// Copy bytes of several extents whose ranges are strided, or overlap in the destination. One
    /// thread copies them all, because such a destination cannot be divided among threads.
    CopyRuns { copies: Vec<ExtentCopy>, to: &'a mut [u8] },
    /// Hash a part of an extent that is not hashed by [`Job::Copy`], because no such job copies the
    /// whole extent.
    Hash { from: &'a [u8], part: PartOf },
}

impl Job<'_> {
    fn len_bytes(&self) -> usize {
        match self {
            Self::Copy { to, .. } | Self::CopyRuns { to, .. } => to.len(),
            Self::Hash { from, .. } => from.len(),
        }
    }
}

/// The jobs of a copy, and the verifications that they complete.
struct Work<'a> {
    step: &'a LoadedStep,
    jobs: Vec<Job<'a>>,
    verifications: Vec<Verification>,
    /// The extents with a verification in this copy.
    hashed: BTreeSet<u32>,
    /// The extents of which bytes are copied without being hashed on the way. Those that are not in
    /// `hashed` are hashed by jobs of their own.
    copied_unhashed: BTreeSet<u32>,
}

impl LoadedStep {
    /// Copies all targets on `threads` threads. Verifies each used extent that was not verified
    /// before; until this returns `Ok`, the destinations may hold damaged bytes. In a load by
    /// ranges only the extents of the current window are copied. The calling thread calls `proceed`
    /// often; the work ends with an error when it returns false.
    pub fn copy(
        &self,
        targets: Vec<Target<'_>>,
        threads: usize,
        proceed: &mut dyn FnMut() -> bool,
    ) -> Result<(), StagingError> {
        let mut work = Work::new(self);
        targets.into_iter().try_for_each(|target| work.add_target(target))?;
        work.add_hash_jobs()?;
        work.into_queue().run(threads, proceed)?;
        self.check_held()
    }
}

impl<'a> Work<'a> {
    fn new(step: &'a LoadedStep) -> Self {
        let (hashed, copied_unhashed) = (BTreeSet::new(), BTreeSet::new());
        Self { step, jobs: Vec::new(), verifications: Vec::new(), hashed, copied_unhashed }
    }

    fn add_target(&mut self, target: Target<'a>) -> Result<(), StagingError> {
        let Target { mut copies, bytes } = target;
        copies.retain(|copy| self.step.is_here(copy.extent));
        copies.sort_by_key(|copy| copy.to_bytes);
        if !are_apart(&copies) {
            self.copied_unhashed.extend(copies.iter().map(|copy| copy.extent));
            self.jobs.push(Job::CopyRuns { copies, to: bytes });
            return Ok(());
        }
        let (mut rest, mut at) = (bytes, 0);
        for copy in copies {
            let (_, behind) = split(rest, copy.to_bytes - at)?;
            let (to, behind) = split(behind, copy.run_bytes)?;
            (rest, at) = (behind, copy.to_bytes + copy.run_bytes);
            self.add_copy(&copy, to)?;
        }
        Ok(())
    }

    /// Adds the jobs that copy one contiguous range of bytes to `to`.
    fn add_copy(&mut self, copy: &ExtentCopy, to: &'a mut [u8]) -> Result<(), StagingError> {
        let (extent, bytes) = self.step.extent(copy.extent)?;
        let from = range(bytes, copy.from_bytes, copy.run_bytes)?;
        let is_whole = copy.run_bytes == extent.len_bytes;
        let verification = if is_whole { self.verification(copy.extent)? } else { None };
        if verification.is_none() {
            self.copied_unhashed.insert(copy.extent);
        }
        for (part, (from, to)) in parts(from).zip(to.chunks_mut(PART_BYTES)).enumerate() {
            let hash_as = verification.map(|verification| PartOf { verification, part });
            self.jobs.push(Job::Copy { from, to, hash_as });
        }
        Ok(())
    }

    /// Returns the index of a new verification of an extent, or `None` if the extent has one or was
    /// verified by an earlier copy. Compares an empty extent at once. Fails if the extent is known
    /// to be damaged.
    fn verification(&mut self, row: u32) -> Result<Option<usize>, StagingError> {
        let (extent, bytes) = self.step.extent(row)?;
        match self.step.verified.get(row as usize).and_then(OnceLock::get) {
            Some(is_good) => return self.step.ensure_intact(row, *is_good).map(|()| None),
            None if !self.hashed.insert(row) => return Ok(None),
            None => {}
        }
        let parts: Vec<_> = parts(bytes).map(|_| OnceLock::new()).collect();
        if parts.is_empty() {
            return self.step.compare(row, &root_of_parts(&[])).map(|()| None);
        }
        let (len_bytes, missing) = (extent.len_bytes, AtomicUsize::new(parts.len()));
        self.verifications.push(Verification { row, len_bytes, parts, missing });
        Ok(Some(self.verifications.len() - 1))
    }

    /// Adds jobs that hash the extents of which bytes are copied without being hashed on the way,
    /// unless another copy of them is hashed.
    fn add_hash_jobs(&mut self) -> Result<(), StagingError> {
        for row in std::mem::take(&mut self.copied_unhashed) {
            let Some(verification) = self.verification(row)? else { continue };
            let (_, bytes) = self.step.extent(row)?;
            for (part, from) in parts(bytes).enumerate() {
                self.jobs.push(Job::Hash { from, part: PartOf { verification, part } });
            }
        }
        Ok(())
    }

    fn into_queue(self) -> Queue<'a> {
        let Self { step, mut jobs, verifications, .. } = self;
        // Threads take the longest jobs first, so that they end at about the same time.
        jobs.sort_by_key(|job| Reverse(job.len_bytes()));
        let (jobs, is_over) = (Mutex::new(jobs.into_iter()), AtomicBool::new(false));
        Queue { step, verifications, jobs, is_over }
    }
}

/// The jobs of a copy, while threads do them.
struct Queue<'a> {
    step: &'a LoadedStep,
    verifications: Vec<Verification>,
    jobs: Mutex<std::vec::IntoIter<Job<'a>>>,
    /// Whether a thread has failed, so that the others end.
    is_over: AtomicBool,
}

impl Queue<'_> {
    /// Does all jobs on `threads` threads, of which the calling thread is one.
    fn run(&self, threads: usize, proceed: &mut dyn FnMut() -> bool) -> Result<(), StagingError> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).len();
        let mut bytes = PROCEED_BYTES;
        let mut ask = |job: &Job<'_>| {
            bytes = bytes.saturating_add(job.len_bytes());
            if bytes < PROCEED_BYTES {
                return true;
            }
            bytes = 0;
            proceed()
        };
        std::thread::scope(|scope| {
            // If a thread cannot be started, the others do its work.
            let start = |_| {
                let thread = std::thread::Builder::new();
                thread.spawn_scoped(scope, || self.do_jobs(&mut |_| true)).ok()
            };
            let others: Vec<_> = (1..threads.min(jobs)).map_while(start).collect();
            let mut result = self.do_jobs(&mut ask);
            for other in others {
                let ended = other.join();
                result =
                    result.and(ended.unwrap_or(Err(StagingError::Unexpected { what: "a load" })));
            }
            result
        })
    }

    /// Does jobs until none is left, a thread fails, or `may_proceed` returns false.
    fn do_jobs(&self, may_proceed: &mut dyn FnMut(&Job<'_>) -> bool) -> Result<(), StagingError> {
        let next = || self.jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some(job) = next() {
            if self.is_over.load(Ordering::Relaxed) {
                return Ok(());
            }
            let done = match may_proceed(&job) {
                true => self.do_job(job),
                false => Err(StagingError::Interrupted { what: "a load" }),
            };
            done.inspect_err(|_| self.is_over.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    }

    fn hasher(&self, of: PartOf) -> PartHasher {
        let len_bytes = self.verifications[of.verification].len_bytes;
        PartHasher::new(len_bytes, PART_BYTES as u64, of.part as u64)
    }

    /// Adds the hash of a part. If no other part is missing, verifies the extent.
    fn add_hash(&self, of: PartOf, hash: Hash) -> Result<(), StagingError> {
        let Verification { row, parts, missing, .. } = &self.verifications[of.verification];
        // Each part has one job, so its hash is set once.
        let _ = parts[of.part].set(hash);
        // The release of each thread makes its hash visible to the thread that counts down to zero.
        if missing.fetch_sub(1, Ordering::AcqRel) > 1 {
            return Ok(());
        }
        let hashes: Vec<Hash> = parts.iter().filter_map(OnceLock::get).copied().collect();
        self.step.compare(*row, &root_of_parts(&hashes))
    }

    fn do_job(&self, job: Job<'_>) -> Result<(), StagingError> {
        match job {
            Job::Copy { from, to, hash_as: None } => to.copy_from_slice(from),
            Job::Copy { from, to, hash_as: Some(part) } => {
                let mut hasher = self.hasher(part);
                for (from, to) in from.chunks(PIECE_BYTES).zip(to.chunks_mut(PIECE_BYTES)) {
                    to.copy_from_slice(from);
                    hasher.update(to);
                }
                self.add_hash(part, hasher.finish())?;
            }
            Job::CopyRuns { copies, to } => {
                for copy in copies {
                    let (_, from) = self.step.extent(copy.extent)?;
                    for (from_at, to_at, len) in copy.runs() {
                        let to = range_mut(to, to_at, len)?;
                        to.copy_from_slice(range(from, from_at, len)?);
                    }
                }
            }
            Job::Hash { from, part } => {
                let mut hasher = self.hasher(part);
                hasher.update(from);
                self.add_hash(part, hasher.finish())?;
            }
        }
        Ok(())
    }
}

/// Returns the parts of an extent.
fn parts(bytes: &[u8]) -> std::slice::Chunks<'_, u8> {
    bytes.chunks(PART_BYTES)
}

/// Returns whether each element of `copies` is one contiguous range, and their destinations do not
/// overlap. `copies` must be sorted by destination.
fn are_apart(copies: &[ExtentCopy]) -> bool {
    let is_run = copies.iter().all(|copy| copy.dims.is_empty());
    let ends = copies.iter().map(|copy| copy.to_bytes.saturating_add(copy.run_bytes));
    is_run && ends.zip(copies.iter().skip(1)).all(|(end, next)| end <= next.to_bytes)
}

fn outside() -> StagingError {
    StagingError::Unexpected { what: "a range of bytes" }
}

/// Returns the first `len` bytes and the rest. Fails if there are fewer.
fn split(bytes: &mut [u8], len: u64) -> Result<(&mut [u8], &mut [u8]), StagingError> {
    let len = usize::try_from(len).map_err(|_| outside())?;
    bytes.split_at_mut_checked(len).ok_or_else(outside)
}

/// Returns the bytes `at..at + len`. Fails if they are not all inside `bytes`.
fn range(bytes: &[u8], at: u64, len: u64) -> Result<&[u8], StagingError> {
    let (at, len) = (usize::try_from(at).ok(), usize::try_from(len).ok());
    let rest = at.and_then(|at| bytes.get(at..));
    rest.and_then(|rest| rest.get(..len?)).ok_or_else(outside)
}

/// Returns the bytes `at..at + len`. Fails if they are not all inside `bytes`.
fn range_mut(bytes: &mut [u8], at: u64, len: u64) -> Result<&mut [u8], StagingError> {
    let (_, rest) = split(bytes, at)?;
    let (range, _) = split(rest, len)?;
    Ok(range)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;
    use crate::entropy::{Entropy, SeededEntropy};
    use crate::format::table::{
        CopyDim, ElementType, Extent, Form, Key, Name, NameKind, Path, Space, TableBuilder,
    };

    /// Lengths of the extents of a step: 0, 1, 2, 3 and 6 parts, with ends beside that of a part.
    const LENGTHS: [usize; 6] =
        [0, 100, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES - 1, 5 * PART_BYTES + 77];

    /// A step with an extent of each length, and the bytes of its only shard.
    struct Fixture {
        bytes: Vec<u8>,
        extents: Vec<Extent>,
    }

    impl Fixture {
        fn new() -> Self {
            let mut bytes = vec![0; LENGTHS.iter().map(|len| len.next_multiple_of(64)).sum()];
            SeededEntropy::new(1).fill(&mut bytes);
            let mut offset = 0;
            let extents = LENGTHS.iter().map(|len| {
                let (from, len_bytes) = (offset, *len as u64);
                offset += len.next_multiple_of(64);
                let hash = Some(*blake3::hash(&bytes[from..from + len]).as_bytes());
                Extent { source: 0, shard: 0, offset_bytes: from as u64, len_bytes, hash }
            });
            let extents = extents.collect();
            Self { bytes, extents }
        }

        /// Opens the step with the bytes as they are now.
        fn open(&self) -> LoadedStep {
            let file = rustix::fs::memfd_create("step", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            let mut file = File::from(file);
            file.write_all(&self.bytes).unwrap();
            let mut builder = TableBuilder::new();
            for (at, extent) in self.extents.iter().enumerate() {
                let row = builder.add_extent(*extent);
                let name = builder.add_name(Name {
                    space: Space::Shared,
                    path: Path::new(&[Key::Text(format!("{at}"))]).unwrap(),
                    kind: NameKind::Tensor,
                    element: ElementType { name: "uint8".into(), bits: 8, big_endian: false },
                    shape: vec![extent.len_bytes],
                    flags: 0,
                });
                builder.add_region(name, Form::Whole, row);
            }
            LoadedStep::of_file(builder.build().unwrap(), &file)
        }

        fn of(&self, row: usize) -> &[u8] {
            let from = self.extents[row].offset_bytes as usize;
            &self.bytes[from..from + LENGTHS[row]]
        }
    }

    fn run_of(row: usize, from_bytes: usize, to_bytes: usize, run_bytes: usize) -> ExtentCopy {
        ExtentCopy {
            extent: row as u32,
            from_bytes: from_bytes as u64,
            to_bytes: to_bytes as u64,
            run_bytes: run_bytes as u64,
            dims: Vec::new(),
        }
    }

    /// Destinations, each with its copies and the bytes that they are expected to give.
    fn destinations(fixture: &Fixture) -> Vec<(Vec<ExtentCopy>, Vec<u8>)> {
        let whole = |row: usize| (vec![run_of(row, 0, 0, LENGTHS[row])], fixture.of(row).to_vec());
        let (third, fifth) = (fixture.of(3), fixture.of(5));
        let half = LENGTHS[5] / 2;
        let every_second_row = ExtentCopy {
            dims: vec![CopyDim { count: 100, from_stride: 2000, to_stride: 1000 }],
            ..run_of(4, 500, 0, 1000)
        };
        let rows = (0..100).flat_map(|at| &fixture.of(4)[500 + at * 2000..1500 + at * 2000]);
        vec![
            whole(0),
            whole(1),
            whole(2),
            whole(5),
            whole(5),
            // Two extents, listed in the reverse order of their destinations.
            (
                vec![run_of(1, 0, third.len(), 100), run_of(3, 0, 0, third.len())],
                [third, fixture.of(1)].concat(),
            ),
            (vec![run_of(5, 7, 0, half)], fifth[7..7 + half].to_vec()),
            (vec![every_second_row], rows.copied().collect()),
        ]
    }

    fn copy(
        step: &LoadedStep,
        wanted: &[(Vec<ExtentCopy>, Vec<u8>)],
        threads: usize,
    ) -> Result<Vec<Vec<u8>>, StagingError> {
        let mut found: Vec<Vec<u8>> =
            wanted.iter().map(|(_, expected)| vec![0; expected.len()]).collect();
        let targets = wanted.iter().zip(&mut found);
        let targets = targets.map(|((copies, _), bytes)| Target { copies: copies.clone(), bytes });
        step.copy(targets.collect(), threads, &mut || true)?;
        Ok(found)
    }

    #[test]
    fn every_kind_of_copy_is_verified_on_any_number_of_threads() {
        let fixture = Fixture::new();
        let all = destinations(&fixture);
        for threads in [1, 2, 7] {
            let step = fixture.open();
            let found = copy(&step, &all, threads).unwrap();
            for (at, (found, (_, expected))) in found.iter().zip(&all).enumerate() {
                assert!(found == expected, "destination {at} with {threads} threads");
            }
            assert!(step.verified.iter().all(|known| known.get() == Some(&true)));
            // A second copy of a verified step gives the same bytes.
            assert!(copy(&step, &all, threads).unwrap() == found);
        }
    }

    #[test]
    fn a_flipped_bit_anywhere_in_a_used_extent_is_found() {
        let fixture = Fixture::new();
        for (row, extent) in fixture.extents.iter().enumerate().skip(1) {
            let using: Vec<_> = destinations(&fixture)
                .into_iter()
                .filter(|(copies, _)| copies.iter().any(|copy| copy.extent as usize == row))
                .collect();
            let places = [0, LENGTHS[row] / 2, LENGTHS[row] - 1];
            for place in places {
                let mut damaged = Fixture { bytes: fixture.bytes.clone(), ..Fixture::new() };
                damaged.bytes[extent.offset_bytes as usize + place] ^= 1;
                // Each use alone, and all together.
                for wanted in using.chunks(1).chain([&using[..]]) {
                    let step = damaged.open();
                    let failed = copy(&step, wanted, 3).unwrap_err();
                    let StagingError::Corrupt { name } = &failed else { panic!("{failed}") };
                    assert!(name.contains(&format!("{row}")), "{name}");
                    assert_eq!(step.verified[row].get(), Some(&false));
                    // The damage is remembered.
                    assert!(copy(&step, wanted, 1).is_err());
                }
            }
        }
    }

    #[test]
    fn a_copy_that_does_not_fit_is_refused() {
        let fixture = Fixture::new();
        let step = fixture.open();
        let refused = |copies: Vec<ExtentCopy>, len: usize| {
            copy(&step, &[(copies, vec![0; len])], 1).is_err()
        };
        assert!(refused(vec![run_of(1, 0, 0, 100)], 99));
        assert!(refused(vec![run_of(1, 1, 0, 100)], 100));
        assert!(refused(vec![run_of(1, 0, usize::MAX, 100)], 100));
        assert!(refused(vec![run_of(99, 0, 0, 1)], 1));
        let strided = |count, from_stride, to_stride| ExtentCopy {
            dims: vec![CopyDim { count, from_stride, to_stride }],
            ..run_of(1, 0, 0, 10)
        };
        assert!(refused(vec![strided(3, 10, 50)], 100));
        assert!(refused(vec![strided(3, 50, 10)], 30));
        // A search gives no overlapping copies. They are done in the order of their destinations.
        let overlapping = vec![run_of(1, 0, 0, 60), run_of(1, 0, 40, 60)];
        let found = copy(&step, &[(overlapping, vec![0; 100])], 1).unwrap();
        assert!(found[0] == [&fixture.of(1)[..40], &fixture.of(1)[..60]].concat());
    }

    #[test]
    fn a_copy_ends_when_its_caller_says_so() {
        let fixture = Fixture::new();
        let (step, mut out) = (fixture.open(), vec![0; LENGTHS[5]]);
        let copies = vec![run_of(5, 0, 0, LENGTHS[5])];
        let targets = vec![Target { copies, bytes: &mut out }];
        let ended = step.copy(targets, 2, &mut || false);
        assert!(matches!(ended, Err(StagingError::Interrupted { .. })), "{ended:?}");
    }
}
