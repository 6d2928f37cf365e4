//! A stream of checkpoints: one is saved every few seconds, and archived while the next ones are
//! saved. The time at risk is compared: from the end of a checkpoint's save until its archiving has
//! ended and its replicas are dropped.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::{MOVE_LIMIT, Meter, Stage};
use crate::arm::Arm;
use crate::conditions::Stream;
use crate::numbers::spread;
use crate::record::RunRecord;

/// Runs one stream to the end of its last archiving. The time is the median over its checkpoints.
pub fn run(
    stage: &mut Stage<'_>,
    arm: Arm,
    plan: &str,
    stream: Stream,
    round: u32,
) -> Result<RunRecord> {
    let parallel = stage.at.shards.to_string();
    let meter = Meter::start(&stage.daemons)?;
    let begun = Instant::now();
    let names: Vec<String> = (0..stream.saves).map(|_| stage.next_name()).collect();
    let stage = &*stage;
    let archive = |name: &str, committed: Instant| -> Result<f64> {
        let words = ["archive", name, "--plan", plan, "--parallel", &parallel];
        let done = stage.daemons.client(&words, MOVE_LIMIT)?;
        ensure!(done["undropped"].as_u64() == Some(0), "{name} keeps replicas: {}", done["notes"]);
        Ok(committed.elapsed().as_secs_f64())
    };
    let (archive, mut late_s) = (&archive, 0.0f64);
    let at_risk: Result<Vec<f64>> = thread::scope(|scope| {
        let mut archivings = Vec::new();
        for (at, name) in names.iter().enumerate() {
            let due = begun + Duration::from_secs(u64::from(stream.every_s)) * at as u32;
            late_s = late_s.max(Instant::now().saturating_duration_since(due).as_secs_f64());
            stage.daemons.sleep(due.saturating_duration_since(Instant::now()))?;
            stage.save_as(name)?;
            let committed = Instant::now();
            archivings.push(scope.spawn(move || archive(name, committed)));
        }
        let ended = archivings.into_iter().map(|thread| thread.join());
        ended.map(|ended| ended.unwrap_or_else(|_| bail!("a thread panicked"))).collect()
    });
    let at_risk = at_risk?;
    let command_s = begun.elapsed().as_secs_f64();
    let median = spread(at_risk.iter().copied()).context("no checkpoint was saved")?.median;
    let mut run = meter.stop(&stage.daemons, (round, arm), (median, command_s))?;
    run.notes.insert("at_risk_s".to_owned(), json!(at_risk));
    // Saves that begin late show that the cluster does not keep up.
    run.notes.insert("latest_save_s".to_owned(), json!(late_s));
    for name in &names {
        stage.remove(name)?;
    }
    Ok(run)
}
