//! Runs an archiving: save, archive by a plan, remove. The time of the archiving is compared.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{MOVE_LIMIT, Meter, Stage, number};
use crate::arm::Arm;
use crate::record::{RunRecord, TRACE};

/// The phases of a stripe, as the program reports them.
const PHASES: [&str; 4] = ["reserve_us", "run_us", "commit_us", "drop_us"];

/// Runs one archiving.
pub fn run(
    stage: &mut Stage<'_>,
    arm: Arm,
    plan: &str,
    round: u32,
    is_traced: bool,
) -> Result<RunRecord> {
    let step = stage.save()?;
    let parallel = stage.at.shards.to_string();
    let meter = Meter::start(&stage.daemons)?;
    let mut archive = vec!["archive", &step, "--plan", plan, "--parallel", &parallel];
    let trace = format!("{}.trace", stage.data);
    if is_traced {
        archive.extend(["--trace", &trace]);
    }
    let begun = Instant::now();
    let done = stage.daemons.client(&archive, MOVE_LIMIT)?;
    // A peer's command is timed from outside; beside a peer, ours is too.
    let command_s = match stage.is_whole {
        true => begun.elapsed().as_secs_f64(),
        false => number(&done, "seconds")?,
    };
    let stripes = done["reports"].as_array().context("its JSON has no reports")?;
    ensure!(
        stripes.len() == stage.at.shards as usize && done["undropped"].as_u64() == Some(0),
        "{} of {} stripes were archived, {} keep replicas: {}",
        stripes.len(),
        stage.at.shards,
        done["undropped"],
        done["notes"],
    );
    let mut phases_s = Vec::new();
    for phase in PHASES {
        let us: Result<f64> = stripes.iter().map(|stripe| number(stripe, phase)).sum();
        phases_s.push(us? / 1e6);
    }
    // A single stripe is timed to its last proven piece. For several stripes, only the whole
    // command has one beginning and one end.
    let is_one = stripes.len() == 1 && !stage.is_whole;
    let seconds = if is_one { phases_s[1] } else { command_s };
    let mut run = meter.stop(&stage.daemons, (round, arm), (seconds, command_s))?;
    run.phases_s = phases_s;
    run.notes = waits(stripes);
    if is_traced {
        let client = stage.at.nodes as usize;
        let text = stage.daemons.on(client, "cat", &[&trace])?;
        stage.daemons.on(client, "rm", &[&trace])?;
        let hops = serde_json::from_str(&text).context("the trace is no JSON")?;
        run.notes.insert(TRACE.to_owned(), hops);
    }
    if round == 0 {
        // Once for each arm, every byte of every piece is read and checked.
        stage.daemons.client(&["verify", &step], MOVE_LIMIT)?;
        run.notes.insert("verified".to_owned(), json!(true));
    }
    stage.remove(&step)?;
    Ok(run)
}

/// Returns how the hops spent their time, in seconds, summed over all hops. For a single stripe the
/// result also has the time from the end of its last hop to the end of the run: the end of the
/// proof, and the answers.
fn waits(stripes: &[Value]) -> BTreeMap<String, Value> {
    let names = [
        ("waited_upstream_us", "hops_waited_upstream_s"),
        ("queued_us", "hops_queued_s"),
        ("computed_us", "hops_computed_s"),
        ("disk_us", "hops_disk_s"),
        ("waited_downstream_us", "hops_waited_downstream_s"),
    ];
    let hops = || stripes.iter().filter_map(|stripe| stripe["hops"].as_array()).flatten();
    let sum = |name: &str| hops().filter_map(|hop| hop[name].as_f64()).sum::<f64>() / 1e6;
    let mut notes: BTreeMap<String, Value> =
        names.into_iter().map(|(from, to)| (to.to_owned(), json!(sum(from)))).collect();
    if let [stripe] = stripes {
        let last_us = hops().filter_map(|hop| hop["end_us"].as_f64()).fold(0.0, f64::max);
        let run_us = stripe["run_us"].as_f64().unwrap_or(last_us);
        notes.insert("after_last_hop_s".to_owned(), json!((run_us - last_us).max(0.0) / 1e6));
    }
    notes
}
