//! Options of `repair`, and their help.

use clap::ValueEnum;

use super::Connect;
use crate::cli::words::AnyStep;
use crate::id::PeerName;
use crate::wire::calls::RepairPlan;

const REPAIR: &str = "\
Examples:
  rapidraid repair gpt/1200
  rapidraid repair --node node-3          the checkpoints of which this node has a part, after its disk was replaced
  rapidraid repair --dry-run              count what is missing of all checkpoints

A node does the work; this command shows its progress. After an interrupt the node finishes the checkpoint. A piece is
made on the node that had it. Pieces of nodes that do not answer are named, and their replicas are copied to others. If
the node of --node does not answer, it is given up, and its pieces are made on others.
`rapidraid verify` finds damage that nobody has noticed yet: run it first.
The catalogue server repairs automatically, at a quarter of the links' rate; see `rapidraid status`.
Plans: chain  the survivors add their pieces to one stream, in about the time of one block
       star   the node of the missing piece receives all of them (for comparison)
The exit code is 1 while anything is known to be missing.
With --json: schema, dry_run, seconds, not_examined (checkpoints that were left out because the catalogue could not be
reached), steps: for each step job, step and error; unless it is an error also stripes,
pieces, replicas, bytes, records, unrepaired, away (nodes that do not answer, with the number of their parts), notes,
seconds.";

/// Options of `repair`.
#[derive(Debug, clap::Args)]
#[command(after_help = REPAIR)]
pub struct Repair {
    /// The job, and the step's number or `latest`; without it, all checkpoints
    #[arg(value_name = "JOB/STEP", conflicts_with = "node")]
    pub step: Option<AnyStep>,
    /// Repair only the checkpoints of which this node has, or should have, a part
    #[arg(long, value_name = "NAME")]
    pub node: Option<PeerName>,
    /// Change nothing; count what is missing
    #[arg(long)]
    pub dry_run: bool,
    /// The plan that makes pieces
    #[arg(long, value_enum, default_value_t = RepairPlanWord::Chain)]
    pub plan: RepairPlanWord,
    /// Number of stripes repaired at the same time; 0 lets the node choose
    #[arg(long, default_value_t = 0)]
    pub parallel: u16,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// The names of [`RepairPlan`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RepairPlanWord {
    /// The sources add their pieces to one stream
    Chain,
    /// The node of the missing piece receives all sources
    Star,
}

impl From<RepairPlanWord> for RepairPlan {
    fn from(word: RepairPlanWord) -> Self {
        match word {
            RepairPlanWord::Chain => RepairPlan::Chain,
            RepairPlanWord::Star => RepairPlan::Star,
        }
    }
}
