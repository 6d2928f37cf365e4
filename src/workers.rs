//! The worker threads for blocking work: disk, hashing and field arithmetic stay off the network's
//! threads.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

/// A bounded set of threads for blocking work.
#[derive(Debug, Clone)]
pub struct Workers {
    slots: Option<Arc<Semaphore>>,
}

/// The error for a job that ended by a panic. The panic is a defect in this program, and it is
/// contained in the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a worker's job did not end: this is a defect, please report it with the log")]
pub struct WorkerDied;

impl Workers {
    /// Returns workers that run at most `threads` jobs at once; other jobs wait for a slot.
    pub fn new(threads: usize) -> Self {
        Self { slots: Some(Arc::new(Semaphore::new(threads.max(1)))) }
    }

    /// Returns workers that run each job on the caller's thread: one thread and one order, for
    /// simulated runs.
    pub fn inline() -> Self {
        Self { slots: None }
    }

    /// Returns a second set of `threads` slots for another kind of work. The two sets neither wait
    /// for each other nor take each other's slots. If `self` is inline, the new set is inline too.
    pub fn beside(&self, threads: usize) -> Self {
        if self.slots.is_some() { Self::new(threads) } else { Self::inline() }
    }

    /// Runs `job` and returns its result. A job that has started runs to its end, even if its
    /// caller no longer waits.
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, WorkerDied> {
        let Some(slots) = &self.slots else { return Ok(job()) };
        let slot = slots.clone().acquire_owned().await.map_err(|_| WorkerDied)?;
        let work = tokio::task::spawn_blocking(move || {
            let _slot = slot;
            job()
        });
        work.await.map_err(|_| WorkerDied)
    }

    /// Starts `job` without waiting for it; [`Begun::end`] returns the result. Inline workers run
    /// the job to its end before this function returns.
    pub fn begin<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Begun<T> {
        if self.slots.is_none() {
            return Begun::Ended(job());
        }
        let workers = self.clone();
        Begun::Running(AbortOnDropHandle::new(tokio::spawn(async move { workers.run(job).await })))
    }
}

/// A job that was started. If this is dropped before the job has a slot, the job never runs.
#[derive(Debug)]
pub enum Begun<T> {
    /// The job is queued or runs in another task.
    Running(AbortOnDropHandle<Result<T, WorkerDied>>),
    /// The job has ended with this result.
    Ended(T),
}

impl<T> Begun<T> {
    /// Waits for the end of the job and returns its result.
    pub async fn end(self) -> Result<T, WorkerDied> {
        match self {
            Begun::Running(task) => task.await.map_err(|_| WorkerDied)?,
            Begun::Ended(result) => Ok(result),
        }
    }
}

/// A bounded queue of started jobs. Results are taken in the order in which the jobs were started.
#[derive(Debug)]
pub struct InOrder<T> {
    begun: VecDeque<Begun<T>>,
    most: usize,
}

impl<T> InOrder<T> {
    /// Returns an empty queue for at most `most` jobs whose results are not taken yet.
    pub fn new(most: usize) -> Self {
        Self { begun: VecDeque::with_capacity(most), most }
    }

    /// Starts a job and appends it. If the queue is full, waits for its first job beforehand and
    /// returns that job's result.
    pub async fn push(&mut self, job: impl FnOnce() -> Begun<T>) -> Result<Option<T>, WorkerDied> {
        let first = if self.begun.len() < self.most { None } else { self.next().await? };
        self.begun.push_back(job());
        Ok(first)
    }

    /// Waits for the job that was started first of those that remain, even if later ones have ended.
    /// Returns its result, or `None` if no job remains.
    pub async fn next(&mut self) -> Result<Option<T>, WorkerDied> {
        match self.begun.pop_front() {
            Some(first) => first.end().await.map(Some),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_job_that_panics_is_an_error() {
        let workers = Workers::new(1);
        assert_eq!(workers.run(|| 7).await, Ok(7));
        let died: Result<u8, _> = workers.run(|| panic!("on purpose")).await;
        assert_eq!(died, Err(WorkerDied));
        assert_eq!(workers.run(|| 8).await, Ok(8));
    }

    #[tokio::test]
    async fn a_job_that_was_begun_runs_beside_its_caller() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let begun = Workers::new(1).begin(move || receiver.recv());
        sender.send(7).unwrap();
        assert_eq!(begun.end().await, Ok(Ok(7)));
        let inline = Workers::inline().begin(|| 8);
        assert!(matches!(inline, Begun::Ended(8)));
        let died: Begun<u8> = Workers::new(1).begin(|| panic!("on purpose"));
        assert_eq!(died.end().await, Err(WorkerDied));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn so_many_jobs_run_at_once_and_their_results_come_in_order() {
        let workers = Workers::new(8);
        let (tell, told) = std::sync::mpsc::channel();
        let (mut jobs, mut taken, mut begun) = (InOrder::new(3), Vec::new(), 0);
        // The first job ends when the second one runs at the same time.
        let limit = std::time::Duration::from_secs(20);
        let first = move || (0, told.recv_timeout(limit).is_ok());
        assert_eq!(jobs.push(|| workers.begin(first)).await.unwrap(), None);
        for number in 1..50 {
            let tell = tell.clone();
            let job = move || {
                // The first of these jobs to run frees the first job. The later ones send to a
                // closed channel.
                let _ = tell.send(());
                (number, true)
            };
            taken.extend(jobs.push(|| workers.begin(job)).await.unwrap());
            begun += 1;
            assert!(1 + begun - taken.len() <= 3, "more than three are under way");
        }
        while let Some(result) = jobs.next().await.unwrap() {
            taken.push(result);
        }
        assert_eq!(taken, (0..50).map(|number| (number, true)).collect::<Vec<(u64, bool)>>());
    }
}
