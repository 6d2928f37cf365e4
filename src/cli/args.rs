//! What can be typed: commands, options, and the help that teaches them.

mod catalogue;
mod staging;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

pub use catalogue::{Catalogue, Move, Rebuild};
pub use staging::Stage;

use super::printer::{Answer, Failure, Look, Printer};
use super::words::{AnyStep, ByteRange, ExactStep, NewNode, Setting, Shape};
use crate::id::PeerName;
use crate::id::{Job, ShardName};
use crate::kind::ErrorKind;
use crate::units::ByteCount;
use crate::wire::calls::PlanChoice;
use crate::wire::order::Codec;

const START: &str = "\
Start here:
  rapidraid demo                      a cluster of 16 nodes on this machine, from save to restore after 5 losses
  rapidraid cluster init --help       a cluster of your own

Exit codes: 0 success, 1 an operation that failed (stderr says why and what to do), 2 wrong usage.
Settings: options over RAPIDRAID_* variables over the configuration file over defaults.";

/// Checkpoint storage for distributed trainers: replicate at once, archive in place by a chain of nodes.
#[derive(Debug, Parser)]
#[command(name = "rapidraid", version, after_help = START, arg_required_else_help = true)]
#[command(propagate_version = true, max_term_width = 110)]
pub struct Args {
    /// Print one JSON document on stdout and nothing else there (progress and errors stay on stderr)
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show everything on this machine: 16 nodes, save, archive, lose 5 nodes, restore
    Demo(Demo),
    /// Make the files of a new cluster
    #[command(subcommand)]
    Cluster(Cluster),
    /// Run a storage node (the daemon)
    Node(Node),
    /// Run the staging daemon of a training host, or ask it
    Stage(Stage),
    /// Store files and folders as one checkpoint; returns when it is committed
    Save(Save),
    /// Turn the replicas of a checkpoint into coded pieces, in place
    Archive(Archive),
    /// Write a checkpoint back to files, from whatever is left of it
    Restore(Restore),
    /// List checkpoints
    Ls(Ls),
    /// Show one checkpoint: its shards, their state and where they are
    Show(Show),
    /// Remove a checkpoint
    Rm(Rm),
    /// Have every copy of a checkpoint checked where it lies, and say how many nodes may still be lost
    Verify(Verify),
    /// Show the nodes: which live, what they hold and use
    Status(Status),
    /// Make a lost catalogue again, or move it
    #[command(subcommand)]
    Catalogue(Catalogue),
    /// List, show, search and certify erasure codes
    #[command(subcommand)]
    Code(Code),
}

/// Where a command finds its cluster.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Connect {
    /// The client's configuration [default: $RAPIDRAID_CONFIG, ./rapidraid.toml, ~/.config/rapidraid/rapidraid.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A setting over the file's, such as seeds=10.0.0.1:7440
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
}

const DEMO: &str = "\
Examples:
  rapidraid demo
  rapidraid demo --input model.safetensors
  rapidraid demo --stay               leaves the nodes running and says what can be tried with them

With --json: schema, n, k, input_bytes, block_bytes, stripes, stored_bytes_replicated, stored_bytes_archived,
save_s, archive_s, restore_s, killed (node names), verified, and hops: one entry a hop in the order of the chain,
with the payload bytes that it received and sent, added up over all stripes, and the node that it ran on in the first.";

/// Options of `demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = DEMO)]
pub struct Demo {
    /// Store this file instead of a made-up model
    #[arg(long, value_name = "FILE", conflicts_with = "size")]
    pub input: Option<PathBuf>,
    /// Size of the made-up model
    #[arg(long, default_value = "256MiB")]
    pub size: ByteCount,
    /// Decides the model's numbers and which nodes die
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Leave the cluster running at the end
    #[arg(long)]
    pub stay: bool,
    /// Work in a new folder under this one [default: the system's folder for temporary files]
    #[arg(long)]
    pub dir: Option<PathBuf>,
}

/// What there is to do with a cluster as a whole.
#[derive(Debug, Subcommand)]
pub enum Cluster {
    /// Make certificates and configurations for all nodes and a client
    Init(Init),
    /// Make the folders of further nodes, in the folder that `cluster init` made
    AddNode(AddNode),
    /// Take a node that is gone for good off the list of members
    RemoveNode(RemoveNode),
}

const INIT: &str = "\
Example:
  rapidraid cluster init my-cluster \\
      --node node-1=10.0.0.1:7440,north/r1 --node node-2=10.0.0.2:7440,north/r2 ...

Then copy my-cluster/nodes/NAME to its machine and run there: rapidraid node --config NAME/rapidraid.toml
my-cluster/client goes to whoever saves and restores; my-cluster/ca stays with you. The first node serves the catalogue.
A code (n,k) needs n nodes: 16 for the default (16,11); with fewer, (14,10), (12,8) or (6,4) is used.";

/// Options of `cluster init`.
#[derive(Debug, clap::Args)]
#[command(after_help = INIT)]
pub struct Init {
    /// The folder to make; it must not exist, or be empty
    pub dir: PathBuf,
    /// A node and where the others reach it, and its failure domain if it has one
    #[arg(long = "node", value_name = "NAME=HOST:PORT[,ZONE/RACK]", required = true)]
    pub nodes: Vec<NewNode>,
    /// A setting to write into every node's file, such as memory=512MiB or code.block=16MiB
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
}

const ADD_NODE: &str = "\
Example:
  rapidraid cluster add-node my-cluster --node node-17=10.0.0.17:7440,north/r4

It needs my-cluster/ca and the folder of one node, whose settings the new ones take. Then copy my-cluster/nodes/NAME to its machine
and run there: rapidraid node --config NAME/rapidraid.toml";

/// Options of `cluster add-node`.
#[derive(Debug, clap::Args)]
#[command(after_help = ADD_NODE)]
pub struct AddNode {
    /// The folder that `cluster init` made
    pub dir: PathBuf,
    /// A node and where the others reach it, and its failure domain if it has one
    #[arg(long = "node", value_name = "NAME=HOST:PORT[,ZONE/RACK]", required = true)]
    pub nodes: Vec<NewNode>,
    /// A setting that is to be otherwise than with the others, such as memory=512MiB
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
}

const REMOVE_NODE: &str = "\
Example:
  rapidraid cluster remove-node node-17

Its daemon must be stopped. While a checkpoint may lie on the node it is refused: what is there may be the last copy. A machine or disk
that is lost is replaced under the same name, with an empty data folder; docs/operations.md says how.";

/// Options of `cluster remove-node`.
#[derive(Debug, clap::Args)]
#[command(after_help = REMOVE_NODE)]
pub struct RemoveNode {
    /// The node's name
    pub name: PeerName,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

const NODE: &str = "\
Example:
  rapidraid node --config nodes/node-1/rapidraid.toml

When it is ready it says so in one line on stderr. SIGTERM and SIGINT end it in order, a second one at once.";

/// Options of `node`.
#[derive(Debug, clap::Args)]
#[command(after_help = NODE)]
pub struct Node {
    /// The node's configuration
    #[arg(long, value_name = "FILE", env = "RAPIDRAID_CONFIG")]
    pub config: PathBuf,
    /// A setting over the file's, such as log.level=debug
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
    /// Stop when stdin ends, so that no daemon outlives whoever started it
    #[arg(long, hide = true)]
    pub stop_at_eof: bool,
}

const SAVE: &str = "\
Examples:
  rapidraid save gpt/1200 model.safetensors optimizer.bin
  rapidraid save gpt/1300 out/step-1300
  rapidraid save gpt/1300 out/step-1300 --replace
  rapidraid save gpt/1400 out/step-1400 --record gpt-1400.rr    what reads it back when no catalogue answers

A file becomes a shard of its file name, a folder becomes its tree: out/step-1300/rank0/a.bin is the shard rank0/a.bin.
A folder's symbolic links are refused (name the files themselves), empty folders are not kept.";

/// Options of `save`.
#[derive(Debug, clap::Args)]
#[command(after_help = SAVE)]
pub struct Save {
    /// The job and the step's number
    #[arg(value_name = "JOB/STEP")]
    pub step: ExactStep,
    /// Files and folders
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Replace the step if it exists; the old one stays readable until the new one is committed
    #[arg(long)]
    pub replace: bool,
    /// Wait while another client saves the step; without it that is an error
    #[arg(long)]
    pub wait: bool,
    /// Save files that change meanwhile, too: some of their bytes may be older than others
    #[arg(long)]
    pub allow_changing: bool,
    /// Write what `restore --record` needs to read this save without a catalogue; the file must not exist
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

const ARCHIVE: &str = "\
Examples:
  rapidraid archive gpt/1200
  rapidraid archive gpt/latest --trace hops.json    open hops.json in ui.perfetto.dev or chrome://tracing
  rapidraid archive gpt/1200 --plan star --codec reed-solomon-erasure

A node does the work; this command watches, and may be interrupted and run again.
Plans: chain        every node receives one stream and sends one on (RapidRAID)
       star         a node with two blocks codes for all
       naive-star   the coder fetches every block whatever it has (the paper's baseline)
       striped-star the coder changes from range to range
       random-star  as naive-star, the coder drawn from those that keep parities
The stars make the classical Reed-Solomon code and leave one replica of each block in place.";

/// Options of `archive`.
#[derive(Debug, clap::Args)]
#[command(after_help = ARCHIVE)]
pub struct Archive {
    /// The job, and the step's number or `latest`
    #[arg(value_name = "JOB/STEP")]
    pub step: AnyStep,
    /// How blocks become pieces
    #[arg(long, value_enum, default_value_t = PlanWord::Chain)]
    pub plan: PlanWord,
    /// What multiplies
    #[arg(long, value_enum, default_value_t = CodecWord::Kernel)]
    pub codec: CodecWord,
    /// Stripes at once; 0 leaves it to the node
    #[arg(long, default_value_t = 0)]
    pub parallel: u16,
    /// Write the times of all hops as a Chrome trace; the file must not exist
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

/// [`PlanChoice`] as it is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[expect(missing_docs, reason = "the help of `archive` has them")]
pub enum PlanWord {
    Chain,
    Star,
    NaiveStar,
    StripedStar,
    RandomStar,
}

impl From<PlanWord> for PlanChoice {
    fn from(word: PlanWord) -> Self {
        match word {
            PlanWord::Chain => PlanChoice::Chain,
            PlanWord::Star => PlanChoice::BestStar,
            PlanWord::NaiveStar => PlanChoice::NaiveStar,
            PlanWord::StripedStar => PlanChoice::StripedStar,
            PlanWord::RandomStar => PlanChoice::RandomStar,
        }
    }
}

/// [`Codec`] as it is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CodecWord {
    /// Fused kernels of this program
    Kernel,
    /// The crate of that name, for stars only
    ReedSolomonErasure,
}

impl From<CodecWord> for Codec {
    fn from(word: CodecWord) -> Self {
        match word {
            CodecWord::Kernel => Codec::Kernel,
            CodecWord::ReedSolomonErasure => Codec::ReedSolomonErasure,
        }
    }
}

const RESTORE: &str = "\
Examples:
  rapidraid restore gpt/latest --out resumed
  rapidraid restore gpt/1200 --out resumed --force
  rapidraid restore gpt/1200 --out part --shard rank0/a.bin --range 1MiB..2MiB
  rapidraid restore --record gpt-1400.rr --out resumed          no catalogue is asked, only nodes with the data

Every byte is checked before it is written. Files appear under their names when they are whole; files that are there
already are refused without --force, before anything is written.";

/// Options of `restore`.
#[derive(Debug, clap::Args)]
#[command(after_help = RESTORE)]
pub struct Restore {
    /// The job, and the step's number or `latest`
    #[arg(value_name = "JOB/STEP", required_unless_present = "record", conflicts_with = "record")]
    pub step: Option<AnyStep>,
    /// Restore the save whose record `save --record` wrote; not if it was removed or replaced since
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// The folder to write to; it is made when it is missing
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Only this shard
    #[arg(long, value_name = "NAME")]
    pub shard: Option<ShardName>,
    /// Only these bytes of the shard; B is not included
    #[arg(long, value_name = "A..B", requires = "shard")]
    pub range: Option<ByteRange>,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `ls`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  rapidraid ls\n  rapidraid ls gpt --json")]
pub struct Ls {
    /// Only the steps of this job
    pub job: Option<Job>,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

const VERIFY: &str = "\
Examples:
  rapidraid verify gpt/1200
  rapidraid verify gpt/latest --mend     damaged replicas are made good again
  rapidraid verify gpt/1200 --quick      reads one copy of everything, as a restore does

Every node reads its replicas, pieces and records of the checkpoint from its disk; no data crosses
the network. Damage is noted there, and `status` shows it; verify itself moves and changes no file.
Nodes mend replicas that they know to be damaged within the hour, with --mend at once. The exit
code is 1 when something is damaged or missing on a node that answers, when such a node could not
examine a stripe (failures), or when it is not certain that the checkpoint can be read. The step
may be `latest`, the greatest that is committed.

With --json: schema, job, step, shards, stripes, files, bytes, records, seconds, nodes, away (node,
reason), failures (as away), faults (node, shard, stripe, part, wrong), fault_count, lacking and
mended (as faults), survives (how many more nodes may be lost, null when it is not certain that the
checkpoint can be read now), weakest (shard, stripe), incidents.
With --quick the fields of `restore`.";

/// Options of `verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = VERIFY)]
pub struct Verify {
    /// The job, and the step's number or `latest`
    #[arg(value_name = "JOB/STEP")]
    pub step: AnyStep,
    /// Have damaged replicas mended from good grains; damaged pieces are not made again yet
    #[arg(long, conflicts_with = "quick")]
    pub mend: bool,
    /// Read one copy of everything through this client instead; nodes whose copies turn out to be damaged are told, and mend replicas
    #[arg(long)]
    pub quick: bool,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `show`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  rapidraid show gpt/latest\n  rapidraid show gpt/1200 --tensors --names 'model/layers.0.*'"
)]
pub struct Show {
    /// The job, and the step's number or `latest`, the greatest that is committed
    #[arg(value_name = "JOB/STEP")]
    pub step: AnyStep,
    /// List the tensors and values that a trainer saved: name, type, shape, regions and bytes
    #[arg(long)]
    pub tensors: bool,
    /// List only names that fit: `*` stands for any text, `?` for one character
    #[arg(long, value_name = "GLOB", requires = "tensors")]
    pub names: Option<String>,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `rm`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  rapidraid rm gpt/1200\n\nThe step is given by its number: `latest` \
changes while one types."
)]
pub struct Rm {
    /// The job and the step's number
    #[arg(value_name = "JOB/STEP")]
    pub step: ExactStep,
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `status`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  rapidraid status\n  rapidraid status --json")]
pub struct Status {
    /// Where the cluster is.
    #[command(flatten)]
    pub connect: Connect,
}

/// What there is to do with codes.
#[derive(Debug, Subcommand)]
pub enum Code {
    /// List the codes that this program has
    List,
    /// Show a code: its chain, its coefficients, and how many losses it does not survive
    #[command(
        after_help = "Examples:\n  rapidraid code show 16,11\n  rapidraid code show 16,11 --paper-order"
    )]
    Show {
        /// Pieces and blocks
        #[arg(value_name = "N,K")]
        shape: Shape,
        /// The chain visits the nodes in the order of the paper
        #[arg(long)]
        paper_order: bool,
    },
    /// Search for an order and coefficients without a dependent subset
    #[command(after_help = "Example:\n  rapidraid code search 10,7 --seed 3 --json > code.json")]
    Search {
        /// Pieces and blocks
        #[arg(value_name = "N,K")]
        shape: Shape,
        /// Another seed finds another code
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Read a code from the JSON of `show` or `search`, and count again all that it claims
    #[command(
        after_help = "Example:\n  rapidraid code show 16,11 --json > code.json\n  rapidraid code certify code.json"
    )]
    Certify {
        /// The JSON document
        file: PathBuf,
    },
}

/// Nothing: only failures pass here.
struct Never;

impl Answer for Never {
    fn json(&self) -> serde_json::Map<String, serde_json::Value> {
        serde_json::Map::new()
    }
    fn text(&self, _: super::table::Paint) -> String {
        String::new()
    }
}

/// Reads the arguments. When there is nothing to run (help, version, wrong usage) everything is printed and the exit
/// code comes back.
pub fn parse(
    args: impl Iterator<Item = OsString>,
    env: &BTreeMap<String, String>,
) -> Result<Args, u8> {
    let args: Vec<OsString> = args.collect();
    let error = match Args::try_parse_from(&args) {
        Ok(args) => return Ok(args),
        Err(error) => error,
    };
    let helps = matches!(
        error.kind(),
        clap::error::ErrorKind::DisplayHelp | clap::error::ErrorKind::DisplayVersion
    );
    if helps || !args.iter().any(|arg| arg == "--json") {
        // Whoever does not read the help misses nothing.
        let _ = error.print();
        return Err(if helps { 0 } else { 2 });
    }
    let text = error.render().to_string();
    let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
    let failure = Failure::new(ErrorKind::Invalid, message);
    Err(Printer::of_process(Look::of_process(true, env)).finish::<Never>(Err(&failure)))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_commands_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_command_teaches_by_example() {
        fn check(command: &clap::Command, path: &str) {
            assert!(command.get_about().is_some(), "{path} says nothing about itself");
            let subcommands: Vec<_> = command.get_subcommands().collect();
            let named = ["show", "verify", "list"].contains(&command.get_name());
            if subcommands.is_empty() && !named {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Example"), "{path} has no example");
            }
            for sub in subcommands {
                check(sub, &format!("{path} {}", sub.get_name()));
            }
        }
        check(&Args::command(), "rapidraid");
    }

    #[test]
    fn what_is_typed_is_what_is_meant() {
        let parse = |line: &str| Args::try_parse_from(line.split(' '));
        for good in [
            "rapidraid demo",
            "rapidraid demo --size 64MiB --seed 2 --json",
            "rapidraid cluster init d --node a=h:1 --node b=h:2,z/r",
            "rapidraid save a/1 x y --replace --config c",
            "rapidraid archive a/latest --plan striped-star --parallel 2",
            "rapidraid restore a/latest --out d --shard x/y --range 0..5",
            "rapidraid ls",
            "rapidraid --json show a/1",
            "rapidraid code search 10,7",
        ] {
            assert!(parse(good).is_ok(), "{good}: {:?}", parse(good).err());
        }
        for bad in [
            "rapidraid",
            "rapidraid demo --size x",
            "rapidraid demo --input a --size 1MiB",
            "rapidraid cluster init d",
            "rapidraid cluster init d --node a",
            "rapidraid save a/latest x",
            "rapidraid save a/1",
            "rapidraid save ../1 x",
            "rapidraid rm a/latest",
            "rapidraid restore a/1",
            "rapidraid restore a/1 --out d --range 0..5",
            "rapidraid restore a/1 --out d --shard ../x",
            "rapidraid archive a/1 --plan tree",
            "rapidraid code show 16",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
