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

const ADD_CLIENT: &str = "\
Example:
  rapidraid cluster add-client my-cluster team-b

The command needs my-cluster/ca and my-cluster/client, whose settings the new client gets. It writes my-cluster/clients/team-b.
Every client may read and remove the checkpoints of all jobs.";

/// Options of `cluster add-client`.
#[derive(Debug, clap::Args)]
#[command(after_help = ADD_CLIENT)]
pub struct AddClient {
    /// The folder that `cluster init` made
    pub dir: PathBuf,
    /// The name of the client in its certificate
    pub name: PeerName,
}

const RENEW_KEYS: &str = "\
Example:
  rapidraid cluster renew-keys my-cluster renewed

Use it when a key has leaked, or when the key in my-cluster/ca is lost. The folder `renewed` gets the same members, with the same
configurations and cluster id. Copy the new keys and certificates over the old ones and restart all daemons: a process trusts exactly
one authority. Data folders stay as they are.";

/// Options of `cluster renew-keys`.
#[derive(Debug, clap::Args)]
#[command(after_help = RENEW_KEYS)]
pub struct RenewKeys {
    /// The folder that `cluster init` made
    pub dir: PathBuf,
    /// The folder to create; it must not exist, or must be empty
    pub new: PathBuf,
}

const REMOVE_NODE: &str = "\
Example:
  rapidraid cluster remove-node node-17

The node's daemon must be stopped, and the other nodes must be up. The command refuses while a checkpoint would be incomplete
without the node. `rapidraid repair --node node-17` makes the missing parts on other nodes. If there is no spare node, start a new
machine and run `rapidraid cluster replace-node` first.";

const REPLACE_NODE: &str = "\
Example:
  rapidraid cluster replace-node node-17 --by node-25

From then on readers and repairs also ask node-25, and new saves do not use node-17. Stop node-17, and run
`rapidraid repair --node node-17`: it makes the parts of node-17 on node-25 and other spare nodes. Then
`rapidraid cluster remove-node node-17` completes the replacement. To keep node-17 instead, start its daemon after its lease has
ended.";

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

/// Options of `cluster replace-node`.
#[derive(Debug, clap::Args)]
#[command(after_help = REPLACE_NODE)]
pub struct ReplaceNode {
    /// The name of the node that is to leave
    pub name: PeerName,
    /// The name of the storage node that takes its place
    #[arg(long, value_name = "NODE")]
    pub by: PeerName,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

const MAINTENANCE: &str = "\
Example:
  rapidraid cluster maintenance node-17 --for 1h

Until then automatic repair ignores the absence of the node: nothing of it is made on other nodes. Its parts still count as missing
while it is away, and `rapidraid status` says how many further nodes may be lost. `--for 0` ends the maintenance.";

/// Options of `cluster maintenance`.
#[derive(Debug, clap::Args)]
#[command(after_help = MAINTENANCE)]
pub struct MaintainNode {
    /// The node's name
    pub name: PeerName,
    /// How long from now, such as 90s, 20m, 1h or 2d; at most 7d
    #[arg(long = "for", value_name = "TIME", value_parser = parse_seconds)]
    pub seconds: u64,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// Parses a time such as 90s, 20m, 1h or 2d. Returns it in seconds.
fn parse_seconds(text: &str) -> Result<u64, String> {
    let wrong = || format!("invalid time {text:?}: use for example 90s, 20m, 1h or 2d");
    let (number, unit) = match text.strip_suffix(['s', 'm', 'h', 'd']) {
        Some(number) => (number, text.chars().next_back()),
        None => (text, None),
    };
    let seconds = match unit {
        Some('m') => 60,
        Some('h') => 3600,
        Some('d') => 24 * 3600,
        _ => 1,
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    if unit.is_none() && number != 0 {
        return Err(wrong());
    }
    number.checked_mul(seconds).ok_or_else(wrong)
}

/// The commands for a cluster as a whole.
#[derive(Debug, Subcommand)]
pub enum Cluster {
    /// Create certificates and configurations for all nodes and a client
    Init(Init),
    /// Create the folders of further nodes, in the folder that `cluster init` made
    AddNode(AddNode),
    /// Create the folder of a further client, in the folder that `cluster init` made
    AddClient(AddClient),
    /// Create a new authority and new keys for all members, in a new folder
    RenewKeys(RenewKeys),
    /// Let another storage node take the place of a node that is lost or is leaving
    ReplaceNode(ReplaceNode),
    /// Remove a node that is lost permanently from the list of members
    RemoveNode(RemoveNode),
    /// Make automatic repair ignore the absence of a node for some time
    Maintenance(MaintainNode),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let all = ["90s", "20m", "1h", "2d", "0", "0s"].map(|text| parse_seconds(text).unwrap());
        assert_eq!(all, [90, 1200, 3600, 172_800, 0, 0]);
        for wrong in ["", "h", "10", "1.5h", "-1h", "1w", "20000000000000000d"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
