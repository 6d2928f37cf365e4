//! Options of `cluster`, and their help.

use std::path::PathBuf;

use clap::Subcommand;

use super::Connect;
use crate::cli::words::{NewNode, Setting};
use crate::id::PeerName;

const INIT: &str = "\
Example:
  rapidraid cluster init my-cluster \\
      --node node-1=10.0.0.1:7440,north/r1 --node node-2=10.0.0.2:7440,north/r2 ...

Then copy my-cluster/nodes/NAME to its machine and run there: rapidraid node --config NAME/rapidraid.toml
my-cluster/client is for those who save and restore; keep my-cluster/ca to yourself. The first node serves the catalogue.
A code (n,k) needs n nodes: 16 for the default (16,11); with fewer, (14,10), (12,8) or (6,4) is used.";

/// Options of `cluster init`.
#[derive(Debug, clap::Args)]
#[command(after_help = INIT)]
pub struct Init {
    /// The folder to create; it must not exist, or must be empty
    pub dir: PathBuf,
    /// A node: its name, the address under which others reach it, and optionally its failure domain
    #[arg(long = "node", value_name = "NAME=HOST:PORT[,ZONE/RACK]", required = true)]
    pub nodes: Vec<NewNode>,
    /// A setting to write into every node's file, such as memory=512MiB or code.block=16MiB
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
}

const ADD_NODE: &str = "\
Example:
  rapidraid cluster add-node my-cluster --node node-17=10.0.0.17:7440,north/r4

The command needs my-cluster/ca and the folder of one node, whose settings the new nodes get. Then copy
my-cluster/nodes/NAME to its machine and run there: rapidraid node --config NAME/rapidraid.toml";

/// Options of `cluster add-node`.
#[derive(Debug, clap::Args)]
#[command(after_help = ADD_NODE)]
pub struct AddNode {
    /// The folder that `cluster init` made
    pub dir: PathBuf,
    /// A node: its name, the address under which others reach it, and optionally its failure domain
    #[arg(long = "node", value_name = "NAME=HOST:PORT[,ZONE/RACK]", required = true)]
    pub nodes: Vec<NewNode>,
    /// A setting in which the new nodes differ from the others, such as memory=512MiB
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
}

const REMOVE_NODE: &str = "\
Example:
  rapidraid cluster remove-node node-17

The node's daemon must be stopped. The command refuses while a checkpoint may have files on the node, because they may be the
last copies. To replace a lost machine or disk, use the same name with an empty data folder; docs/operations.md says how.";

/// Options of `cluster remove-node`.
#[derive(Debug, clap::Args)]
#[command(after_help = REMOVE_NODE)]
pub struct RemoveNode {
    /// The node's name
    pub name: PeerName,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// The commands for a cluster as a whole.
#[derive(Debug, Subcommand)]
pub enum Cluster {
    /// Create certificates and configurations for all nodes and a client
    Init(Init),
    /// Create the folders of further nodes, in the folder that `cluster init` made
    AddNode(AddNode),
    /// Remove a node that is lost permanently from the list of members
    RemoveNode(RemoveNode),
}
