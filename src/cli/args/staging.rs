//! Options of `stage`, and the help that teaches them.

use super::Connect;
use crate::id::Job;

const STAGE: &str = "\
Examples:
  rapidraid stage                       serves the trainers of this host until SIGTERM; the Python package starts it when none runs
  rapidraid stage --status              jobs, segments and what is under way
  rapidraid stage --free gpt            gives back what job gpt holds in memory and no process uses

It takes the state that trainers put into shared memory, saves it to the cluster, and keeps it for a restart on this host.
After SIGTERM it saves what is staged before it ends (staging.stop_s is the limit). docs/staging.md has the whole story.";

/// Options of `stage`.
#[derive(Debug, clap::Args)]
#[command(after_help = STAGE)]
pub struct Stage {
    /// Show what the running daemon holds and does
    #[arg(long, conflicts_with = "free")]
    pub status: bool,
    /// Give back the memory of a job that no process uses
    #[arg(long, value_name = "JOB")]
    pub free: Option<Job>,
    /// With --free: also steps that are not committed; they are lost
    #[arg(long, requires = "free")]
    pub force: bool,
    /// Start a daemon that outlives this command, unless one runs, and return when it is ready
    #[arg(long, conflicts_with_all = ["status", "free"])]
    pub detach: bool,
    /// Be the daemon that `--detach` starts: it ends when it has nothing to do
    #[arg(long, hide = true)]
    pub detached: bool,
    /// Stop when stdin ends, so that no daemon outlives whoever started it
    #[arg(long, hide = true)]
    pub stop_at_eof: bool,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}
