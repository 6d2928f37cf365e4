//! Records as tables for people: a table for each point, with a row for each arm.

use std::fmt::Write as _;

use crate::arm::Arm;
use crate::conditions::Conditions;
use crate::model::{self, Cost};
use crate::numbers::{Spread, spread};
use crate::record::{PointRecord, Record, RunRecord};

/// The summary of one arm at one point.
#[derive(Debug, Clone)]
pub struct Row {
    /// The arm.
    pub arm: Arm,
    /// Seconds.
    pub seconds: Spread,
    /// Block times, if links are shaped.
    pub block_times: Option<Spread>,
    /// The prediction of the model.
    pub model: Option<Cost>,
    /// Ratio to the first arm of the file, round by round.
    pub ratio: Option<Spread>,
    /// Block transfers over the busiest link.
    pub busiest_blocks: f64,
    /// Block transfers in all.
    pub sent_blocks: f64,
    /// Seconds of processor time per GB (10^9 bytes) of checkpoint.
    pub cpu_s_per_gb: f64,
    /// Share of the machine's processors that was busy.
    pub busy: Option<f64>,
    /// Maximum memory of a daemon in one of the runs, in bytes.
    pub peak_bytes: u64,
}

/// Returns the rows of a point, in the order of the file's arms.
pub fn rows(record: &Record, point: &PointRecord) -> Vec<Row> {
    let Some(first) = record.experiment.arms.first() else { return Vec::new() };
    let runs_of = |arm: Arm| point.runs.iter().filter(move |run| run.arm == arm);
    let conditions: Option<Conditions> = serde_json::from_value(point.conditions.clone()).ok();
    let median = |arm: Arm, of: &dyn Fn(&RunRecord) -> f64| {
        spread(runs_of(arm).map(of)).map_or(0.0, |spread| spread.median)
    };
    let mut rows = Vec::new();
    for &arm in &record.experiment.arms {
        let Some(seconds) = spread(runs_of(arm).map(|run| run.seconds)) else { continue };
        let pairs = runs_of(arm).filter_map(|run| {
            let other = runs_of(*first).find(|other| other.round == run.round)?;
            Some(run.seconds / other.seconds)
        });
        let block = point.block_time_s;
        let in_blocks = |s: &dyn Fn(&RunRecord) -> f64| {
            block.and_then(|block| spread(runs_of(arm).map(|run| s(run) / block)))
        };
        let (block_bytes, bytes) = conditions.as_ref().map_or((1.0, 1.0), |at| {
            let checkpoints = at.stream.map_or(1.0, |stream| f64::from(stream.saves));
            (at.block_bytes as f64, at.checkpoint_bytes() as f64 * checkpoints)
        });
        let payload = block_bytes / payload_share(point, conditions.as_ref());
        let busy = spread(runs_of(arm).filter_map(|run| run.busy)).map(|busy| busy.median);
        rows.push(Row {
            arm,
            seconds,
            block_times: in_blocks(&|run| run.seconds),
            model: conditions.as_ref().and_then(|at| model::cost(arm, at)),
            ratio: (arm != *first).then(|| spread(pairs)).flatten(),
            busiest_blocks: median(arm, &|run| run.busiest_bytes as f64) / payload,
            sent_blocks: median(arm, &|run| run.sent_bytes as f64) / payload,
            cpu_s_per_gb: median(arm, &|run| run.cpu_s) / (bytes / 1e9),
            busy,
            peak_bytes: runs_of(arm).map(|run| run.peak_bytes).max().unwrap_or(0),
        });
    }
    rows
}

/// Returns the share of payload in the bytes of a link at the time of the record, or today's share
/// if the links had no rate.
fn payload_share(point: &PointRecord, conditions: Option<&Conditions>) -> f64 {
    let rate = conditions.and_then(|at| Some((at.block_bytes, at.rate_mbit?)));
    let recorded = point.block_time_s.zip(rate).map(|(seconds, (block_bytes, rate_mbit))| {
        block_bytes as f64 * 8.0 / (seconds * f64::from(rate_mbit) * 1e6)
    });
    recorded.unwrap_or_else(model::payload_share)
}

/// Returns the tables as Markdown, which is also readable on a terminal.
pub fn tables(record: &Record) -> String {
    let mut out = String::new();
    for point in &record.points {
        let _ = writeln!(out, "### {}\n", point.label);
        out.push_str(&table(record, point));
        let untouched = point.runs.iter().filter(|run| run.ended_unstopped()).count();
        if untouched > 0 {
            let arm = Arm::RestoreStopped.word();
            let _ = writeln!(out, "\n{untouched} runs of {arm} ended before a node was stopped.");
        }
        out.push('\n');
    }
    out
}

fn table(record: &Record, point: &PointRecord) -> String {
    let rows = rows(record, point);
    let first = record.experiment.arms.first().map_or("", |arm| arm.word());
    let mut lines = vec![[
        "arm".to_owned(),
        "runs".to_owned(),
        "seconds".to_owned(),
        "block times".to_owned(),
        "model".to_owned(),
        format!("times {first}"),
        "busiest link".to_owned(),
        "sent".to_owned(),
        "CPU s/GB".to_owned(),
        "busy".to_owned(),
        "peak MiB".to_owned(),
    ]];
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for row in &rows {
        lines.push([
            row.arm.word().to_owned(),
            row.seconds.count.to_string(),
            between(&row.seconds, 3),
            or_dash(row.block_times.as_ref().map(|times| between(times, 2))),
            or_dash(row.model.map(|model| format!("{:.2}", model.block_times))),
            or_dash(row.ratio.as_ref().map(|ratio| between(ratio, 2))),
            or_dash((row.busiest_blocks > 0.0).then(|| format!("{:.2}", row.busiest_blocks))),
            or_dash((row.sent_blocks > 0.0).then(|| format!("{:.2}", row.sent_blocks))),
            format!("{:.2}", row.cpu_s_per_gb),
            or_dash(row.busy.map(|busy| format!("{:.0} %", busy * 100.0))),
            format!("{:.0}", row.peak_bytes as f64 / f64::from(1 << 20)),
        ]);
    }
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    let mut out = String::new();
    for (at, line) in lines.iter().enumerate() {
        for (column, text) in line.iter().enumerate() {
            let _ = match column {
                0 => write!(out, "| {text:<width$} ", width = widths[column]),
                _ => write!(out, "| {text:>width$} ", width = widths[column]),
            };
        }
        out.push_str("|\n");
        if at == 0 {
            for (column, width) in widths.iter().enumerate() {
                let right = if column == 0 { "-" } else { ":" };
                let _ = write!(out, "|{}{right}", "-".repeat(width + 1));
            }
            out.push_str("|\n");
        }
    }
    out
}

/// Returns median and quartiles as text.
fn between(spread: &Spread, digits: usize) -> String {
    format!("{:.digits$} ({:.digits$} to {:.digits$})", spread.median, spread.low, spread.high)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Builds a record whose blocks took twice as long as their bytes: half of what a link carried
    /// was payload.
    #[test]
    fn a_record_is_shown_by_its_own_block_time() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let experiment =
            crate::experiment::Experiment::read(&folder.join("experiments/one-shard.toml"), false);
        let at = experiment.unwrap().conditions(false).unwrap().remove(0);
        let rate = f64::from(at.rate_mbit.unwrap());
        let mut point = PointRecord {
            label: String::new(),
            conditions: serde_json::Value::Null,
            block_time_s: Some(2.0 * at.block_bytes as f64 * 8.0 / (rate * 1e6)),
            runs: Vec::new(),
        };
        assert!((payload_share(&point, Some(&at)) - 0.5).abs() < 1e-9);
        point.block_time_s = Some(model::block_time_s(at.block_bytes, at.rate_mbit.unwrap()));
        assert!((payload_share(&point, Some(&at)) - model::payload_share()).abs() < 1e-9);
        point.block_time_s = None;
        assert_eq!(payload_share(&point, Some(&at)), model::payload_share());
    }
}
