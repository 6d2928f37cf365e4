//! Saves and restores beside a repair: a node has lost its pieces of one checkpoint, and while they
//! are made again on it, another checkpoint is saved or restored.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{MOVE_LIMIT, Meter, Stage, number};
use crate::arm::{Arm, Beside, ConcurrentRepair, Work};
use crate::daemons::node_name;
use crate::record::RunRecord;

/// Prints the shards in a node's folder `$1`.
const SHARDS: &str = r#"ls "$1/data/shards""#;
/// Prints the number of pieces of the other shards in a node's folder `$1`.
const COUNT: &str = r#"cd "$1/data/shards" && shift && find "$@" -name 'piece-*' | wc -l"#;
/// Removes the pieces of the other shards from a node's folder `$1`.
const LOSE: &str = r#"cd "$1/data/shards" && shift && find "$@" -name 'piece-*' -delete"#;
/// Maximum time of each wait: for an automatic repair to begin, for a repair by command to succeed,
/// and for a survey that finds nothing missing.
const BEGIN_LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(200);
const ASK_LIMIT: Duration = Duration::from_secs(60);
/// Number of stripes that a repair without a limit makes at once.
const STRIPES_AT_ONCE: &str = "32";

/// The checkpoints: one that is repaired, and one that is restored meanwhile.
pub struct Prepared {
    repaired: String,
    /// The shards of the one that is repaired.
    shards: Vec<String>,
    restored: String,
    /// The folder with the first of the files, which is saved and restored.
    small: String,
    /// The node that loses its pieces next. The first one serves the catalogue and is left out.
    turn: usize,
    /// Whether an automatic repair has measured the rate of the links.
    is_rate_measured: bool,
}

impl Prepared {
    /// Saves and archives both.
    pub fn save(stage: &mut Stage<'_>) -> Result<Self> {
        let repaired = stage.save()?;
        let shards = in_folder(stage, 1, SHARDS, &[])?;
        let shards = shards.split_whitespace().map(str::to_owned).collect();
        let small = format!("{}.small", stage.data);
        let client = stage.at.nodes as usize;
        let copy = r#"mkdir -p "$2" && cp "$1/shard-0000" "$2""#;
        stage.daemons.on(client, "sh", &["-c", copy, "sh", &stage.data, &small])?;
        let restored = stage.next_name();
        stage.unshaped(|stage| {
            stage.daemons.client(&["save", &restored, &small], MOVE_LIMIT)?;
            for step in [&repaired, &restored] {
                stage.daemons.client(&["archive", step], MOVE_LIMIT)?;
            }
            Ok(())
        })?;
        Ok(Self { repaired, shards, restored, small, turn: 0, is_rate_measured: false })
    }
}

/// Runs one save or restore. The time is that of the whole command.
pub fn run(
    stage: &mut Stage<'_>,
    prepared: &mut Prepared,
    (arm, beside): (Arm, Beside),
    round: u32,
) -> Result<RunRecord> {
    until_whole(stage)?;
    if beside.repair == ConcurrentRepair::None {
        return measure(stage, prepared, (arm, beside), round);
    }
    let node = 1 + prepared.turn % (stage.at.nodes as usize - 1);
    prepared.turn += 1;
    stage.daemons.kill(&[node])?;
    let before = count_pieces(stage, prepared, node)?;
    in_folder(stage, node, LOSE, &prepared.shards)?;
    stage.daemons.revive(&[node])?;
    let repaired = prepared.repaired.clone();
    let repair = ["repair", &repaired, "--parallel", STRIPES_AT_ONCE];
    let mut run = match beside.repair {
        ConcurrentRepair::Automatic => {
            until_repairing(stage)?;
            // The first transfer measures the links. A save beside it would make the measured rate,
            // and so the rate of all later repairs, too low.
            if !prepared.is_rate_measured {
                until_piece(stage, prepared, node)?;
                prepared.is_rate_measured = true;
            }
            let run = measure(stage, prepared, (arm, beside), round)?;
            let made = count_pieces(stage, prepared, node)?;
            ensure!(made < before, "the repair ended first: give the experiment more shards");
            run
        }
        _ => {
            let mut measured = None;
            let begun = Instant::now();
            let mut ended_s = 0.0;
            let done = stage.daemons.client_while(&repair, MOVE_LIMIT, || {
                if measured.is_none() && begun.elapsed() > Duration::from_secs(1) {
                    measured = Some(measure(stage, prepared, (arm, beside), round)?);
                    ended_s = begun.elapsed().as_secs_f64();
                }
                Ok(())
            })?;
            let repair_s = number(&done, "seconds")?;
            ensure!(ended_s < repair_s, "the repair ended first: give the experiment more shards");
            let mut run = measured.context("the repair ended at once")?;
            run.notes.insert("repair_s".to_owned(), json!(repair_s));
            run
        }
    };
    run.notes.insert("node".to_owned(), json!(node_name(node)));
    // The rest is made before the next run.
    stage.unshaped(|stage| {
        let limit = MOVE_LIMIT;
        let begun = Instant::now();
        while let Err(error) = stage.daemons.client(&repair, limit) {
            ensure!(begun.elapsed() < BEGIN_LIMIT, "{error:#}");
            stage.daemons.sleep(POLL)?;
        }
        Ok(())
    })?;
    Ok(run)
}

fn measure(
    stage: &Stage<'_>,
    prepared: &Prepared,
    (arm, beside): (Arm, Beside),
    round: u32,
) -> Result<RunRecord> {
    let meter = Meter::start(&stage.daemons)?;
    let out = format!("{}.out", stage.data);
    let step = format!("{}/{round}", arm.word());
    let command = match beside.work {
        Work::Save => ["save", &step, &prepared.small].to_vec(),
        Work::Restore => ["restore", &prepared.restored, "--out", &out].to_vec(),
    };
    let done = stage.daemons.client(&command, MOVE_LIMIT)?;
    let seconds = number(&done, "seconds")?;
    let run = meter.stop(&stage.daemons, (round, arm), (seconds, seconds))?;
    match beside.work {
        Work::Save => stage.remove(&step)?,
        Work::Restore => {
            let client = stage.at.nodes as usize;
            stage.daemons.on(client, "diff", &["-rq", &prepared.small, &out])?;
            stage.daemons.on(client, "rm", &["-rf", &out])?;
        }
    }
    Ok(run)
}

/// Runs a script with a node's folder and these words as arguments. Returns its output.
fn in_folder(stage: &Stage<'_>, node: usize, script: &str, words: &[String]) -> Result<String> {
    let folder = stage.daemons.folder(node).to_string_lossy().into_owned();
    let mut arguments = vec!["-c", script, "sh", &folder];
    arguments.extend(words.iter().map(String::as_str));
    stage.daemons.on(node, "sh", &arguments)
}

fn count_pieces(stage: &Stage<'_>, prepared: &Prepared, node: usize) -> Result<u64> {
    let count = in_folder(stage, node, COUNT, &prepared.shards)?;
    count.trim().parse().with_context(|| format!("{count:?} is no number of pieces"))
}

/// Waits until a new survey finds nothing missing, and nothing is repaired.
fn until_whole(stage: &Stage<'_>) -> Result<()> {
    let begun = Instant::now();
    loop {
        let status = stage.daemons.client(&["status"], ASK_LIMIT)?;
        let (repair, survey) = (&status["repair"], &status["repair"]["survey"]);
        let is_new =
            survey["age_s"].as_f64().is_some_and(|age| age < begun.elapsed().as_secs_f64());
        if is_new && survey["degraded"] == 0 && repair["running"].is_null() {
            return Ok(());
        }
        ensure!(begun.elapsed() < BEGIN_LIMIT, "still degraded: {repair}");
        stage.daemons.sleep(POLL)?;
    }
}

/// Waits until the repair has made a piece on the node.
fn until_piece(stage: &Stage<'_>, prepared: &Prepared, node: usize) -> Result<()> {
    let begun = Instant::now();
    while count_pieces(stage, prepared, node)? == 0 {
        ensure!(begun.elapsed() < BEGIN_LIMIT, "the automatic repair makes no piece");
        stage.daemons.sleep(POLL)?;
    }
    Ok(())
}

fn until_repairing(stage: &Stage<'_>) -> Result<()> {
    let begun = Instant::now();
    let is_repairing = || -> Result<bool> {
        let status = stage.daemons.client(&["status"], ASK_LIMIT)?;
        Ok(!status["repair"]["running"].is_null())
    };
    while !is_repairing()? {
        ensure!(begun.elapsed() < BEGIN_LIMIT, "no automatic repair begins");
        stage.daemons.sleep(POLL)?;
    }
    Ok(())
}
