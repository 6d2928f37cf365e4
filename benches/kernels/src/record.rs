//! The record of a run: all medians with their quartiles, and the machine, the compiler and the
//! command.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::bars::Verdict;
use crate::harness::{Outcome, Role, quartiles};
use crate::lanes::Place;

/// The record of one run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Record {
    pub date: String,
    pub command: String,
    pub compiler: String,
    pub machine: Machine,
    /// The libraries that were compared with, and the instructions that they chose.
    pub peers: Vec<String>,
    pub skipped: Vec<String>,
    pub groups: Vec<GroupRecord>,
    pub bars: Vec<Verdict>,
}

/// The machine of a run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Machine {
    pub processor: String,
    pub features: Vec<String>,
    pub cores: usize,
    pub caches: Vec<String>,
    pub memory_mib: u64,
    pub kernel: String,
    /// The processor to which the run was pinned, if any.
    pub pinned_to: Option<usize>,
    pub huge_pages_mib: u64,
}

/// The results of one group.
#[derive(Debug, Serialize, Deserialize)]
pub struct GroupRecord {
    pub question: String,
    pub place: Place,
    pub buffer_bytes: usize,
    /// Bytes that count as work when the work is done once.
    pub work_bytes: usize,
    pub contestants: Vec<Row>,
}

/// The results of one contestant.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    pub name: String,
    pub role: Role,
    pub rounds: usize,
    /// Repetitions of the work in one sample.
    pub repetitions: u64,
    /// Throughput in 10^9 bytes of work per second of CPU time: lower quartile, median, upper
    /// quartile.
    pub gigabytes_per_second: [f64; 3],
}

impl GroupRecord {
    pub fn new(outcome: &Outcome) -> Self {
        let rows = outcome.contestants.iter().map(|measured| {
            let rate = |seconds: &f64| outcome.work_bytes as f64 / seconds / 1e9;
            let rates: Vec<f64> = measured.seconds.iter().map(rate).collect();
            Row {
                name: measured.name.clone(),
                role: measured.role,
                rounds: rates.len(),
                repetitions: measured.repetitions,
                gigabytes_per_second: quartiles(&rates).map(rounded),
            }
        });
        Self {
            question: outcome.question.to_owned(),
            place: outcome.place,
            buffer_bytes: outcome.buffer_bytes,
            work_bytes: outcome.work_bytes,
            contestants: rows.collect(),
        }
    }
}

impl Record {
    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| format!("{} is no record", path.display()))
    }
}

/// Returns the value rounded to four digits. More digits would be noise in every difference between
/// two records.
pub fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

impl Machine {
    /// Returns the description that the system gives of itself. A fact that the system does not
    /// give is empty.
    pub fn this(pinned_to: Option<usize>, huge_pages_mib: u64) -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let of = |key: &str| field(&cpu, key).unwrap_or_default();
        let flags = of("flags");
        let known = ["avx2", "gfni", "avx512f", "avx512bw", "avx512vbmi", "vpclmulqdq"];
        let is_there = |name: &&str| flags.split(' ').any(|flag| flag == *name);
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let system = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        Self {
            processor: of("model name"),
            features: known
                .iter()
                .filter(|name| is_there(name))
                .map(|&name| name.to_owned())
                .collect(),
            // All processors count, not only those of this thread, which is pinned to one.
            cores: cpu.lines().filter(|line| line.starts_with("processor")).count(),
            caches: caches(),
            memory_mib: kib(&memory, "MemTotal") / 1024,
            kernel: format!("{} {}", text(system.sysname()), text(system.release())),
            pinned_to,
            huge_pages_mib,
        }
    }
}

/// Returns the memory of this process that is on huge pages now, in MiB.
pub fn huge_pages_mib() -> u64 {
    kib(&fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default(), "AnonHugePages") / 1024
}

/// Returns the value after `key` and a colon.
fn field(text: &str, key: &str) -> Option<String> {
    let value =
        text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
    value.map(|value| value.trim().to_owned())
}

fn kib(text: &str, key: &str) -> u64 {
    let value = field(text, key).unwrap_or_default();
    value.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Returns the caches of the first processor, such as `L2 Unified 2048K`.
fn caches() -> Vec<String> {
    let read = |index: usize, name: &str| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}");
        fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    };
    let cache = |index| {
        Some(format!(
            "L{} {} {}",
            read(index, "level")?,
            read(index, "type")?,
            read(index, "size")?
        ))
    };
    (0..8).map_while(cache).collect()
}

/// Returns today's date in UTC, such as `2026-11-22`.
pub fn today() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let days = since.map_or(0, |since| since.as_secs() / 86_400);
    date(days)
}

/// Returns the date that is `days` days after 1 January 1970. Years begin in March here, so that a
/// leap day is the last day of a year.
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{}-{month:02}-{day:02}", era * 400 + year + next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        for (days, expected) in [(0, "1970-01-01"), (11_016, "2000-02-29"), (20_779, "2026-11-22")]
        {
            assert_eq!(date(days), expected);
        }
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal:       24 kB\nMemTotalX: 7 kB\nmodel name\t: A B\n";
        assert_eq!((kib(text, "MemTotal"), kib(text, "Mem")), (24, 0));
        assert_eq!(field(text, "model name").as_deref(), Some("A B"));
        assert_eq!(rounded(41.236_71), 41.24);
    }
}
