//! Measures contestants against each other. Each round runs every contestant once, in an order that
//! rotates, so that other load on the machine affects all alike. Time is the thread's own CPU time.
//!
//! All contestants of a group work on the same buffers in the same rounds. Compare them by ratios
//! round by round ([`Measured::ratios`]) and take their median; absolute figures are less reliable.

use std::hint::black_box;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use crate::check::Check;
use crate::lanes::{Lanes, Place};

/// Minimum duration of a sample: thousands of times the cost of reading the clock.
const SAMPLE: Duration = Duration::from_millis(2);

/// The role of a contestant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// This library.
    Ours,
    /// A loop that only moves the bytes.
    Floor,
    /// Code of another project for the same work.
    Peer,
}

/// A function that does the contestant's work a given number of times.
pub type Run<'a> = Box<dyn FnMut(&mut Lanes<'_>, u64) -> Result<()> + 'a>;

/// A contestant: one way to do a group's work.
pub struct Contestant<'a> {
    /// The name, unique within its group.
    pub name: String,
    pub role: Role,
    pub check: Check<'a>,
    pub run: Run<'a>,
}

/// A question at one place, with the contestants that do the same work on the same buffers.
pub struct Group<'a> {
    pub question: &'static str,
    pub place: Place,
    /// Number of buffers whose bytes count as work: one for a hop, the sources for a codec.
    pub counted_buffers: usize,
    pub contestants: Vec<Contestant<'a>>,
}

/// The samples of one contestant.
#[derive(Debug, Clone)]
pub struct Measured {
    pub name: String,
    pub role: Role,
    /// Repetitions of the work in one sample.
    pub repetitions: u64,
    /// Seconds of CPU time for the work done once, for each round.
    pub seconds: Vec<f64>,
}

impl Measured {
    /// Returns, for each round, how many times as fast as `other` this contestant was.
    pub fn ratios(&self, other: &Measured) -> Vec<f64> {
        self.seconds.iter().zip(&other.seconds).map(|(own, other)| other / own).collect()
    }
}

/// The samples of one group.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub question: &'static str,
    pub place: Place,
    pub buffer_bytes: usize,
    /// Bytes that count as work when the work is done once.
    pub work_bytes: usize,
    pub contestants: Vec<Measured>,
}

/// Checks the output of each contestant, then measures them all in `rounds` rounds. Returns the
/// error of a check that fails.
pub fn measure(mut group: Group<'_>, lanes: &mut Lanes<'_>, rounds: usize) -> Result<Outcome> {
    let mut contestants = Vec::new();
    for contestant in &mut group.contestants {
        let name = &contestant.name;
        let context = || format!("{}, {}: {name}", group.question, group.place.name());
        contestant.check.run(&mut contestant.run, lanes).with_context(context)?;
        contestants.push(Measured {
            name: name.clone(),
            role: contestant.role,
            repetitions: repetitions(&mut contestant.run, lanes).with_context(context)?,
            seconds: Vec::new(),
        });
    }
    let count = contestants.len();
    for round in 0..rounds {
        for turn in 0..count {
            let at = (round + turn) % count;
            let (run, measured) = (&mut group.contestants[at].run, &mut contestants[at]);
            if group.place == Place::Cache {
                // The previous contestant may have left other streams in the nearest cache.
                run(lanes, 1)?;
            }
            let seconds = timed(run, lanes, measured.repetitions)?.as_secs_f64();
            measured.seconds.push(seconds / measured.repetitions as f64);
        }
    }
    let buffer_bytes = lanes.bytes();
    let work_bytes = group.counted_buffers * buffer_bytes;
    Ok(Outcome {
        question: group.question,
        place: group.place,
        buffer_bytes,
        work_bytes,
        contestants,
    })
}

/// Returns how often a contestant must repeat its work for a sample of [`SAMPLE`].
fn repetitions(run: &mut Run<'_>, lanes: &mut Lanes<'_>) -> Result<u64> {
    let mut count = 1;
    loop {
        let taken = timed(run, lanes, count)?;
        if taken >= SAMPLE {
            return Ok(count);
        }
        let missing = SAMPLE.as_secs_f64() / taken.as_secs_f64().max(1e-7);
        count = (count as f64 * (1.1 * missing).clamp(1.5, 100.0)).ceil() as u64;
    }
}

fn timed(run: &mut Run<'_>, lanes: &mut Lanes<'_>, repetitions: u64) -> Result<Duration> {
    let begun = cpu_time();
    run(black_box(lanes), repetitions)?;
    Ok(cpu_time().saturating_sub(begun))
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Pins this thread to the last processor that it may use; the first one often handles the
/// interrupts. Returns the number of that processor.
pub fn pin() -> Result<usize> {
    let allowed = sched_getaffinity(None).context("cannot read the processors allowed")?;
    let last = (0..CpuSet::MAX_CPU).rfind(|&cpu| allowed.is_set(cpu));
    let last = last.context("no processor is allowed")?;
    let mut one = CpuSet::new();
    one.set(last);
    sched_setaffinity(None, &one).with_context(|| format!("cannot stay on processor {last}"))?;
    Ok(last)
}

/// Returns the lower quartile, the median and the upper quartile of `samples`, or zeros if there
/// are none.
pub fn quartiles(samples: &[f64]) -> [f64; 3] {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return [0.0; 3] };
    [0.25, 0.5, 0.75].map(|part| {
        let place = part * last as f64;
        let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
        below + (above - below) * place.fract()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_samples() {
        assert_eq!(quartiles(&[4.0, 1.0, 3.0, 2.0, 5.0]), [2.0, 3.0, 4.0]);
        assert_eq!(quartiles(&[1.0, 2.0]), [1.25, 1.5, 1.75]);
        assert_eq!(quartiles(&[]), [0.0; 3]);
    }

    #[test]
    fn twice_the_time_is_half_as_fast() {
        let with = |seconds: &[f64]| Measured {
            name: String::new(),
            role: Role::Ours,
            repetitions: 1,
            seconds: seconds.to_vec(),
        };
        assert_eq!(with(&[2.0, 1.0]).ratios(&with(&[1.0, 4.0])), [0.5, 4.0]);
    }
}
