//! Options of `catalogue`, and the help that teaches them.

use clap::Subcommand;

use super::Connect;

/// The commands for the catalogue.
#[derive(Debug, Subcommand)]
pub enum Catalogue {
    /// Make a lost catalogue again from what the nodes hold
    Rebuild(Rebuild),
    /// Move the catalogue to another daemon
    Move(Move),
}

const MOVE: &str = "\
Example:
  rapidraid catalogue move --on 10.0.0.3:7440

The daemon that serves the catalogue now must run: its entries are copied, compared, and it stands down only for a whole copy.
While they are copied (some seconds for each 100,000 entries) nothing is saved, archived or removed; checkpoints are read as ever.
When the daemon that serves it is gone, `rapidraid catalogue rebuild` is the way.";

/// Options of `catalogue move`.
#[derive(Debug, clap::Args)]
#[command(after_help = MOVE)]
pub struct Move {
    /// The daemon that serves the catalogue from now on
    #[arg(long, value_name = "HOST:PORT")]
    pub on: String,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

const REBUILD: &str = "\
Example:
  rapidraid catalogue rebuild --on 10.0.0.3:7440

Do this when the daemon that served the catalogue is gone for good, or its folder is: `rapidraid status` says so. All storage
nodes should run; a few may be missing. The daemon at --on serves the catalogue from then on, and the old one stands down
should it come back. Nothing is deleted on the way. docs/operations.md walks through it.";

/// Options of `catalogue rebuild`.
#[derive(Debug, clap::Args)]
#[command(after_help = REBUILD)]
pub struct Rebuild {
    /// The daemon that serves the catalogue from now on [default: the first of `seeds` that answers]
    #[arg(long, value_name = "HOST:PORT")]
    pub on: Option<String>,
    /// Go on when too few nodes are reached, or when checkpoints cannot be brought back; what is missing is listed
    #[arg(long)]
    pub accept_loss: bool,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}
