//! Repairs: one node has lost one piece, or one replica, and it is made again there; or a node is
//! lost for good, and its pieces are made on others.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{MOVE_LIMIT, Meter, Stage, number};
use crate::arm::{Arm, RepairOf};
use crate::daemons::node_name;
use crate::record::RunRecord;

/// The time after which a killed node has no lease.
const LEASE_IS_OVER: Duration = Duration::from_secs(12);

/// Removes the first file whose name begins with `$2` from the only stripe of a shard below `$1`.
/// Prints its path.
const LOSE: &str = r#"set -- "$1"/data/shards/*/00000000/"$2"*; rm "$1" && echo "$1""#;

/// The checkpoints whose parts are lost and made again: an archived and a replicated one.
pub struct Damaged {
    archived: String,
    /// The replicated one, which is there if it has one stripe.
    replicated: Option<String>,
    /// The node that loses its piece or replica next, or all that it has. All nodes take turns,
    /// except the first one, which serves the catalogue.
    turn: usize,
}

impl Damaged {
    /// Saves the two checkpoints.
    pub fn save(stage: &mut Stage<'_>) -> Result<Self> {
        let archived = stage.save()?;
        stage.unshaped(|stage| {
            let limit = MOVE_LIMIT;
            stage.daemons.client(&["archive", &archived], limit).map(drop)
        })?;
        let replicated = if stage.at.shards == 1 { Some(stage.save()?) } else { None };
        Ok(Self { archived, replicated, turn: 0 })
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
        RepairOf::Replica => {
            let step = damaged.replicated.clone();
            (step.context("it needs a checkpoint of one stripe")?, "chain", "block-")
        }
        RepairOf::Node => return lose_node(stage, &damaged.archived, (arm, node), round),
    };
    stage.daemons.kill(&[node])?;
    let folder = stage.daemons.folder(node).to_string_lossy().into_owned();
    let path = stage.daemons.on(node, "sh", &["-c", LOSE, "sh", &folder, lost])?;
    stage.daemons.revive(&[node])?;
    std::thread::sleep(RESTART_IS_KNOWN);
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

/// Time after which the other daemons know that a daemon has restarted: their keep-alive packets are
/// answered by a reset. Before that, a stream over a connection to the earlier process fails, and the
/// repair tries again.
const RESTART_IS_KNOWN: Duration = Duration::from_secs(2);

/// Number of stripes that are repaired at once when a node is lost.
const STRIPES_AT_ONCE: &str = "32";

/// Kills a node for good, and has its pieces made on the others. The time is that of the whole
/// command. The node stays away, so that the next round has one node less.
fn lose_node(
    stage: &mut Stage<'_>,
    step: &str,
    (arm, node): (Arm, usize),
    round: u32,
) -> Result<RunRecord> {
    stage.daemons.kill(&[node])?;
    std::thread::sleep(LEASE_IS_OVER);
    let meter = Meter::start(&stage.daemons)?;
    let name = node_name(node);
    let repair = ["repair", "--node", &name, "--parallel", STRIPES_AT_ONCE];
    let done = stage.daemons.client(&repair, MOVE_LIMIT)?;
    let report = done["steps"].get(0).context("its JSON has no step")?;
    let pieces = report["pieces"].as_u64().unwrap_or(0);
    ensure!(pieces > 0, "no piece was made: {report}");
    let seconds = number(&done, "seconds")?;
    let mut run = meter.stop(&stage.daemons, (round, arm), (seconds, seconds))?;
    run.notes.insert("node".to_owned(), json!(name));
    run.notes.insert("pieces".to_owned(), json!(pieces));
    if round == 0 {
        stage.daemons.client(&["verify", step], MOVE_LIMIT)?;
        run.notes.insert("verified".to_owned(), json!(true));
    }
    Ok(run)
}
