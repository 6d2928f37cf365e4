//! Options of `catalogue`, and their help.

use clap::Subcommand;

use super::Connect;

/// The commands for the catalogue.
#[derive(Debug, Subcommand)]
pub enum CatalogueCommand {
    /// Rebuild a lost catalogue from the records on the nodes
    Rebuild(Rebuild),
    /// Move the catalogue to another daemon
    Move(Move),
    /// Pause or resume the removal of old checkpoints
    Retention(Retention),
}

const MOVE: &str = "\
Example:
  rapidraid catalogue move --on 10.0.0.3:7440

The current catalogue server must run: its entries are copied and compared, and it steps down only for a complete copy. During
the copy (some seconds for each 100,000 entries) nothing is saved, archived or removed; reads of checkpoints continue.
If the current server is lost, use `rapidraid catalogue rebuild` instead.";

/// Options of `catalogue move`.
#[derive(Debug, clap::Args)]
#[command(after_help = MOVE)]
pub struct Move {
    /// The daemon that becomes the catalogue server
    #[arg(long, value_name = "HOST:PORT")]
    pub on: String,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

const REBUILD: &str = "\
Example:
  rapidraid catalogue rebuild --on 10.0.0.3:7440

Use this when the catalogue server or its catalogue folder is lost permanently; `rapidraid status` says so. All storage nodes
should run; a few may be missing. The daemon at --on becomes the catalogue server, and the old one steps down if it comes
back. No committed checkpoint is deleted; what is left of saves that were never committed, or were removed, is purged.
Labels are lost, so retention is paused until `rapidraid catalogue retention --resume`.
docs/operations.md explains each step.";

const RETENTION: &str = "\
Examples:
  rapidraid catalogue retention            whether it is paused
  rapidraid catalogue retention --pause    nothing is removed by rules until it is resumed

While retention is paused, neither `policy.keep_newest` nor a trainer's `keep` removes checkpoints, so disks may fill up.
A removal that has begun is completed, and `rapidraid rm` works as always. A rebuilt catalogue begins paused, because the labels that protect checkpoints
are lost: set them again with `rapidraid label`, then resume.

With --json: schema, paused.";

/// Options of `catalogue retention`.
#[derive(Debug, clap::Args)]
#[command(after_help = RETENTION)]
pub struct Retention {
    /// Pause it
    #[arg(long, conflicts_with = "resume")]
    pub pause: bool,
    /// Resume it
    #[arg(long)]
    pub resume: bool,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `catalogue rebuild`.
#[derive(Debug, clap::Args)]
#[command(after_help = REBUILD)]
pub struct Rebuild {
    /// The daemon that becomes the catalogue server [default: the first of `seeds` that answers]
    #[arg(long, value_name = "HOST:PORT")]
    pub on: Option<String>,
    /// Proceed when too few nodes are reached, or when checkpoints cannot be rebuilt; the answer
    /// lists what is missing
    #[arg(long)]
    pub accept_loss: bool,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}
