//! Options of `stage`, and their help.

use super::Connect;
use crate::id::Job;

const STAGE: &str = "\
Examples:
  rapidraid stage                       serves the trainers of this host until SIGTERM; the Python package starts it when none runs
  rapidraid stage --status              jobs, segments and what is in progress
  rapidraid stage --free gpt            frees the memory of job gpt that no process uses

The daemon takes the state that trainers put into shared memory, saves it to the cluster, and keeps it for a restart on this
host. After SIGTERM it saves what is staged before it ends (at most for staging.stop_s). SIGHUP is
logged and ignored. docs/staging.md has the details.

With --json: schema, and for --status pid, instance, memory_bytes, used_bytes, jobs (job, launch, members, segment_bytes,
steps); for --free freed_bytes, kept (step, state, reason: the steps that stay) and dropped (the steps that were not
committed and are lost); for --detach ready; for a daemon that has ended stopped.";

/// Options of `stage`.
#[derive(Debug, clap::Args)]
#[command(after_help = STAGE)]
pub struct Stage {
    /// Show what the running daemon holds and does
    #[arg(long, conflicts_with = "free")]
    pub status: bool,
    /// Free the memory of a job that no process uses
    #[arg(long, value_name = "JOB")]
    pub free: Option<Job>,
    /// With --free: also free steps that are not committed; they are lost
    #[arg(long, requires = "free")]
    pub force: bool,
    /// Start a daemon that outlives this command, unless one runs already; return when it is ready
    #[arg(long, conflicts_with_all = ["status", "free"])]
    pub detach: bool,
    /// Be the daemon that `--detach` starts, which ends when it has nothing to do
    #[arg(long, hide = true)]
    pub detached: bool,
    /// Stop when stdin ends, so that no daemon outlives the process that started it
    #[arg(long, hide = true)]
    pub stop_at_eof: bool,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}
