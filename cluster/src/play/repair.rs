//! Repairs: one node has lost one piece, or one replica, and it is made again there.

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{MOVE_LIMIT, Meter, Stage, number};
use crate::arm::{Arm, RepairOf};
use crate::daemons::node_name;
use crate::record::RunRecord;

/// Removes the first file whose name begins with `$2` from the only stripe of a shard below `$1`.
/// Prints its path.
const LOSE: &str = r#"set -- "$1"/data/shards/*/00000000/"$2"*; rm "$1" && echo "$1""#;

/// The checkpoints whose parts are lost and made again: an archived and a replicated one.
pub struct Damaged {
    archived: String,
    replicated: String,
    /// The node that loses its piece or replica next. All nodes take turns, except the first one,
    /// which serves the catalogue.
    turn: usize,
}

impl Damaged {
    /// Saves the two checkpoints, each of one stripe.
    pub fn save(stage: &mut Stage<'_>) -> Result<Self> {
        ensure!(stage.at.shards == 1, "a repair is measured with one shard of one stripe");
        let archived = stage.save()?;
        stage.daemons.client(&["archive", &archived], MOVE_LIMIT)?;
        Ok(Self { archived, replicated: stage.save()?, turn: 0 })
    }
}

/// Runs one repair. The time is that of the whole command: survey, plan or copy, proof and records.
pub fn run(
    stage: &mut Stage<'_>,
    damaged: &mut Damaged,
    (arm, of): (Arm, RepairOf),
    round: u32,
) -> Result<RunRecord> {
    let node = 1 + damaged.turn % (stage.at.nodes as usize - 1);
    damaged.turn += 1;
    let (step, plan, lost) = match of {
        RepairOf::Piece(plan) => (damaged.archived.clone(), plan, "piece-"),
        RepairOf::Replica => (damaged.replicated.clone(), "chain", "block-"),
    };
    stage.daemons.kill(&[node])?;
    let folder = stage.daemons.folder(node).to_string_lossy().into_owned();
    let path = stage.daemons.on(node, "sh", &["-c", LOSE, "sh", &folder, lost])?;
    stage.daemons.revive(&[node])?;
    let meter = Meter::start(&stage.daemons)?;
    let done = stage.daemons.client(&["repair", &step, "--plan", plan], MOVE_LIMIT)?;
    let report = done["steps"].get(0).context("its JSON has no step")?;
    let made = [&report["pieces"], &report["replicas"]].map(|count| count.as_u64().unwrap_or(0));
    ensure!(made.iter().sum::<u64>() == 1, "not one file was made: {report}");
    let seconds = number(&done, "seconds")?;
    let mut run = meter.stop(&stage.daemons, (round, arm), (seconds, seconds))?;
    run.notes.insert("node".to_owned(), json!(node_name(node)));
    stage.daemons.on(node, "test", &["-s", path.trim()])?;
    if round == 0 {
        // Once for each arm, every byte is read and checked.
        stage.daemons.client(&["verify", &step], MOVE_LIMIT)?;
        run.notes.insert("verified".to_owned(), json!(true));
    }
    Ok(run)
}
