//! Options of `verify`, and their help.

use super::Connect;
use crate::cli::words::AnyStep;

const VERIFY: &str = "\
Examples:
  rapidraid verify gpt/1200
  rapidraid verify                       all committed checkpoints, one after the other
  rapidraid verify gpt/latest --mend     repairs damaged replicas, too
  rapidraid verify gpt/1200 --quick      reads one copy of everything, as a restore does

Every node reads its replicas, pieces and records of the checkpoint from its disk; no data crosses
the network. Each node notes the damage it finds, and `status` shows it; verify itself moves and
changes no file. Nodes repair replicas that they know to be damaged within the hour, with --mend at
once. The exit code is 1 when something is damaged or missing on a node that answers, when such a
node could not examine a stripe (failures), or when it is not certain that the checkpoint can be
read; with --quick only when the checkpoint cannot be read. The step may be `latest`, the committed step with the greatest number.

With --json: schema, job, step, shards, stripes, files, bytes, records, seconds, nodes, away (node,
reason), failures (as away), faults (node, shard, stripe, part, wrong), fault_count, lacking and
mended (as faults), survives (how many more nodes may be lost, null when it is not certain that the
checkpoint can be read now), weakest (shard, stripe), incidents.
Without a step: schema, seconds, steps (for each of them these fields, or job, step and error), bad (how
many are damaged, incomplete or failed), not_verified (how many were left out after a failure of the
cluster), survives (the least of all).
With --quick the fields of `restore`. The exit code is 0 if every byte could be read from some copy, even if other copies
are damaged. incidents lists damage in the copies that were read; the other copies are not checked.";

/// Options of `verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = VERIFY)]
pub struct Verify {
    /// The job, and the step's number or `latest`; without it, all committed checkpoints
    #[arg(value_name = "JOB/STEP")]
    pub step: Option<AnyStep>,
    /// Repair damaged replicas from good grains; `repair` makes damaged pieces again
    #[arg(long, conflicts_with = "quick")]
    pub mend: bool,
    /// Read one copy of everything through this client instead; nodes learn which of their copies
    /// are damaged, and repair replicas
    #[arg(long, requires = "step")]
    pub quick: bool,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}
