//! The arguments of the command line: commands, options and their help.

mod catalogue;
mod cluster;
mod repair;
mod staging;
mod verify;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

pub use catalogue::{CatalogueCommand, Move, Rebuild, Retention};
pub use cluster::{
    AddClient, AddNode, Cluster, Init, MaintainNode, RemoveNode, RenewKeys, ReplaceNode,
};
pub use repair::Repair;
pub use staging::Stage;
pub use verify::Verify;

use super::printer::{CommandFailure, CommandOutput, Look, Printer};
use super::words::{AnyStep, ByteRange, ExactStep, Setting, Shape};
use crate::id::{Job, Label, ShardName};
use crate::kind::ErrorKind;
use crate::units::ByteCount;
use crate::wire::calls::PlanChoice;
use crate::wire::order::Codec;

const START: &str = "\
Start here:
  rapidraid demo                      a cluster of 16 nodes on this machine, from save to restore after 5 losses
  rapidraid cluster init --help       create a cluster of your own

Exit codes: 0 success, 1 a failed operation (stderr says why and what to do), 2 wrong usage, 129, 130 or 143 a signal ended it.
Settings: options override RAPIDRAID_* variables, which override the configuration file, which overrides the defaults.";

/// Checkpoint storage for distributed trainers: replicate at once, archive in place along a chain
/// of nodes.
#[derive(Debug, Parser)]
#[command(name = "rapidraid", version, after_help = START, arg_required_else_help = true)]
#[command(propagate_version = true, max_term_width = 110)]
pub struct Args {
    /// Print one JSON document on stdout and nothing else there (progress and errors stay on stderr)
    #[arg(long, global = true)]
    pub json: bool,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show everything on this machine: start 16 nodes, save, archive, lose 5 nodes, restore
    Demo(Demo),
    /// Create a cluster, or change its members
    #[command(subcommand)]
    Cluster(Cluster),
    /// Run a storage node (the daemon)
    Node(NodeOptions),
    /// Run the staging daemon of a training host, or query it
    Stage(Stage),
    /// Store files and folders as one checkpoint; return when it is committed
    Save(Save),
    /// Turn the replicas of a checkpoint into coded pieces, in place
    Archive(Archive),
    /// Write a checkpoint back to files, from the replicas and pieces that are left
    Restore(Restore),
    /// List checkpoints
    Ls(Ls),
    /// Show one checkpoint: its shards, their states and their nodes
    Show(Show),
    /// Remove a checkpoint
    Rm(Rm),
    /// Add a label to a checkpoint, or remove one; the newest checkpoint with each label is kept
    Label(LabelOptions),
    /// Make every node check its copies of one or all checkpoints, and say how many more nodes may be lost
    Verify(Verify),
    /// Make again what nodes have lost of checkpoints: pieces, replicas and records
    Repair(Repair),
    /// Show the nodes: which are up, what they hold and use
    Status(StatusOptions),
    /// Rebuild a lost catalogue, or move it to another daemon
    #[command(subcommand)]
    Catalogue(CatalogueCommand),
    /// List, show, search and certify erasure codes
    #[command(subcommand)]
    Code(CodeCommand),
}

/// The options that say where a command finds its cluster.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Connect {
    /// The client's configuration [default: $RAPIDRAID_CONFIG, ./rapidraid.toml, ~/.config/rapidraid/rapidraid.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override a setting of the file, such as seeds=10.0.0.1:7440
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
}

const DEMO: &str = "\
Examples:
  rapidraid demo
  rapidraid demo --input model.safetensors
  rapidraid demo --stay               leaves the nodes running and suggests what to try with them

With --json: schema, n, k, input_bytes, block_bytes, stripes, stored_bytes_replicated, stored_bytes_archived,
save_s, archive_s, restore_s, killed (node names), verified, and hops: one entry for each hop in the order of the chain,
with the payload bytes that it received and sent, summed over all stripes, and the node that it ran on in the first one.";

/// Options of `demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = DEMO)]
pub struct Demo {
    /// Store this file instead of a generated model
    #[arg(long, value_name = "FILE", conflicts_with = "size")]
    pub input: Option<PathBuf>,
    /// Size of the generated model
    #[arg(long, default_value = "256MiB")]
    pub size: ByteCount,
    /// Seed of the model's numbers and of the choice of nodes that are killed
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Leave the cluster running at the end
    #[arg(long)]
    pub stay: bool,
    /// Work in a new folder under this one [default: the system's folder for temporary files]
    #[arg(long)]
    pub dir: Option<PathBuf>,
}

const NODE: &str = "\
Example:
  rapidraid node --config nodes/node-1/rapidraid.toml

The node reports in one line on stderr that it is ready. SIGTERM or SIGINT stops it in order, a second signal at once.
SIGHUP is logged and ignored.";

/// Options of `node`.
#[derive(Debug, clap::Args)]
#[command(after_help = NODE)]
pub struct NodeOptions {
    /// The node's configuration
    #[arg(long, value_name = "FILE", env = "RAPIDRAID_CONFIG")]
    pub config: PathBuf,
    /// Override a setting of the file, such as log.level=debug
    #[arg(long, value_name = "SETTING=VALUE")]
    pub set: Vec<Setting>,
    /// Stop when stdin ends, so that no daemon outlives the process that started it
    #[arg(long, hide = true)]
    pub stop_at_eof: bool,
}

const SAVE: &str = "\
Examples:
  rapidraid save gpt/1200 model.safetensors optimizer.bin
  rapidraid save gpt/1300 out/step-1300
  rapidraid save gpt/1300 out/step-1300 --replace
  rapidraid save gpt/1400 out/step-1400 --record gpt-1400.rr    writes the record for a restore without a catalogue

The shard of a file has the file's name. A folder is saved as a tree: out/step-1300/rank0/a.bin becomes the shard rank0/a.bin.
Symbolic links in a folder are refused (name the files themselves); empty folders are not saved.
Ctrl-C or SIGTERM aborts the save, and frees its step at once; a second one ends without that.";

/// Options of `save`.
#[derive(Debug, clap::Args)]
#[command(after_help = SAVE)]
pub struct Save {
    /// The job and the step's number
    #[arg(value_name = "JOB/STEP")]
    pub step: ExactStep,
    /// The files and folders to save
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Replace the step if it exists; the old save stays readable until the new one is committed
    #[arg(long)]
    pub replace: bool,
    /// Wait while another client saves the step, instead of failing
    #[arg(long)]
    pub wait: bool,
    /// Also save files that change during the save; their bytes may then be from different moments
    #[arg(long)]
    pub allow_changing: bool,
    /// Write a record with which `restore --record` reads this save without a catalogue; the file
    /// must not exist. If the record cannot be written, the exit code is 1 although the step is
    /// committed, and `show --record` writes it
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

const ARCHIVE: &str = "\
Examples:
  rapidraid archive gpt/1200
  rapidraid archive gpt/latest --trace hops.json    open hops.json in ui.perfetto.dev or chrome://tracing
  rapidraid archive gpt/1200 --plan star --codec reed-solomon-erasure

A node does the work; this command shows its progress, and may be interrupted and run again. Run twice, or by two
people, it shows the progress of the archiving that is under way.
Plans: chain        every node receives one stream and sends one on (RapidRAID)
       star         one node, which has two blocks, computes all parity
       naive-star   the coder fetches every block, even those it has (the paper's baseline)
       striped-star the coder rotates from range to range
       random-star  as naive-star, with a coder drawn at random from the nodes that store parity
The stars use the classical Reed-Solomon code and keep one replica of each block as a piece.";

/// Options of `archive`.
#[derive(Debug, clap::Args)]
#[command(after_help = ARCHIVE)]
pub struct Archive {
    /// The job, and the step's number or `latest`
    #[arg(value_name = "JOB/STEP")]
    pub step: AnyStep,
    /// The plan that turns blocks into pieces
    #[arg(long, value_enum, default_value_t = PlanWord::Chain)]
    pub plan: PlanWord,
    /// The implementation of the arithmetic
    #[arg(long, value_enum, default_value_t = CodecWord::Kernel)]
    pub codec: CodecWord,
    /// Number of stripes archived at the same time; 0 lets the node choose
    #[arg(long, default_value_t = 0)]
    pub parallel: u16,
    /// Write the times of all hops as a Chrome trace; the file must not exist. No file stays if the
    /// archiving fails or is interrupted. If the trace cannot be written, the exit code is 1 although
    /// the step is archived
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// The names of [`PlanChoice`] on the command line.
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

/// The names of [`Codec`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CodecWord {
    /// The fused kernels of this program
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
  rapidraid restore --record gpt-1400.rr --out resumed          asks only the nodes with the data, no catalogue

Every byte is verified before it is written. A file appears under its name only when it is complete; an interrupted restore leaves
no file. Without --force, existing files are refused before anything is written.";

/// Options of `restore`.
#[derive(Debug, clap::Args)]
#[command(after_help = RESTORE)]
pub struct Restore {
    /// The job, and the step's number or `latest`
    #[arg(value_name = "JOB/STEP", required_unless_present = "record", conflicts_with = "record")]
    pub step: Option<AnyStep>,
    /// Restore the save whose record `save --record` wrote; fails if it was removed or replaced
    /// since
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// The folder to write to; it is created if it is missing
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Restore only this shard
    #[arg(long, value_name = "NAME")]
    pub shard: Option<ShardName>,
    /// Restore only these bytes of the shard; B is not included
    #[arg(long, value_name = "A..B", requires = "shard")]
    pub range: Option<ByteRange>,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `ls`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  rapidraid ls\n  rapidraid ls gpt --json\n\nWhile no catalogue answers, the steps are listed by the nodes' commit marks. Then the JSON fields labels, open_saves and\nlaunches are null, and --label fails."
)]
pub struct Ls {
    /// List only the steps of this job
    pub job: Option<Job>,
    /// List only the steps with this label
    #[arg(long, value_name = "LABEL", requires = "job")]
    pub label: Option<Label>,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `show`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  rapidraid show gpt/latest\n  rapidraid show gpt/1200 --tensors --names 'model/layers.0.*'\n  rapidraid show gpt/1200 --record gpt-1200.rr     writes the record for a restore without a catalogue\n\nWith --record and --json: schema, job, step, save, record (the file)."
)]
pub struct Show {
    /// The job, and the step's number or `latest`, the committed step with the greatest number
    #[arg(value_name = "JOB/STEP")]
    pub step: AnyStep,
    /// List the tensors and values that a trainer saved: name, type, shape, regions and bytes
    #[arg(long)]
    pub tensors: bool,
    /// Write the record with which `restore --record` reads this save without a catalogue, as `save
    /// --record` does; the file must not exist
    #[arg(long, value_name = "FILE", conflicts_with = "tensors")]
    pub record: Option<PathBuf>,
    /// List only names that match: `*` stands for any text, `?` for one character
    #[arg(long, value_name = "GLOB", requires = "tensors")]
    pub names: Option<String>,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `rm`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  rapidraid rm gpt/1200\n\nThe step is given by its number: `latest` \
could change before the command runs."
)]
pub struct Rm {
    /// The job and the step's number
    #[arg(value_name = "JOB/STEP")]
    pub step: ExactStep,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// Options of `label`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  rapidraid label gpt/1200 trusted\n  rapidraid label gpt/1200 trusted --remove\n  rapidraid ls gpt --label trusted\n\nNeither the policy nor a trainer's `keep` removes the newest checkpoint with a label; `rm` does."
)]
pub struct LabelOptions {
    /// The job and the step's number
    #[arg(value_name = "JOB/STEP")]
    pub step: ExactStep,
    /// The label: 1 to 64 characters of A-Z a-z 0-9 . _ -
    pub label: Label,
    /// Take the label away
    #[arg(long)]
    pub remove: bool,
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

const STATUS: &str = "\
Examples:
  rapidraid status
  rapidraid status --json

With --json: schema, catalogue (null: no node says), unchanged (why the catalogue accepts no change,
or null), epoch, nodes, policy (null: none is set), retention_paused (null: no node says), repair
(null: no node says), leaving (node, successors), open_saves and launches (as `ls`; null: not known).
Each node: name, address, zone, rack, storage, live (it holds a lease), answers, version; of a node
that answers also replicas, replica_bytes, pieces, piece_bytes, record_bytes, quarantined,
disk_total_bytes, disk_free_bytes, budgets (name, used_bytes, peak_bytes, total_bytes),
peak_memory_bytes, segmentation_offload, notes.
repair: share_percent; survey (null before the first one ends): age_s, steps, unknown, survives (how
many more nodes may be lost, null when a checkpoint cannot be read now), degraded, missing,
missing_bytes, records, worst (job, step and the counts above); running (job, step, done_bytes,
total_bytes, made_bytes, or null); brake (why repair waits for a person, or null); maintenance
(node, seconds_left); waiting (job, step, failures, why).";

/// Options of `status`.
#[derive(Debug, clap::Args)]
#[command(after_help = STATUS)]
pub struct StatusOptions {
    /// The options to connect to the cluster.
    #[command(flatten)]
    pub connect: Connect,
}

/// The commands for erasure codes.
#[derive(Debug, Subcommand)]
pub enum CodeCommand {
    /// List the codes of this program
    List,
    /// Show a code: its chain, its coefficients, and the losses that it does not survive
    #[command(
        after_help = "Examples:\n  rapidraid code show 16,11\n  rapidraid code show 16,11 --paper-order"
    )]
    Show {
        /// Number of pieces and of blocks
        #[arg(value_name = "N,K")]
        shape: Shape,
        /// Visit the nodes in the order of the paper
        #[arg(long)]
        paper_order: bool,
    },
    /// Search for an order and coefficients without a dependent subset
    #[command(after_help = "Example:\n  rapidraid code search 10,7 --seed 3 --json > code.json")]
    Search {
        /// Number of pieces and of blocks
        #[arg(value_name = "N,K")]
        shape: Shape,
        /// Seed of the search; another seed finds another code
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Read a code from the JSON of `show` or `search`, and recount all that it claims
    #[command(
        after_help = "Example:\n  rapidraid code show 16,11 --json > code.json\n  rapidraid code certify code.json"
    )]
    Certify {
        /// The JSON document
        file: PathBuf,
    },
}

/// An output that never exists, for a printer that prints failures only.
struct Never;

impl CommandOutput for Never {
    fn json(&self) -> serde_json::Map<String, serde_json::Value> {
        serde_json::Map::new()
    }
    fn text(&self, _: super::table::Paint) -> String {
        String::new()
    }
}

/// Parses the arguments. If there is nothing to run (help, version, wrong usage), prints the text
/// or error and returns the exit code as `Err`.
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
        // A failure to print the help has no consequence, so it is ignored.
        let _ = error.print();
        return Err(if helps { 0 } else { 2 });
    }
    let text = error.render().to_string();
    // The lines up to the first empty one are the error, such as the list of the arguments that are
    // missing; the usage follows.
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    let message = lines.collect::<Vec<_>>().join(" ");
    let message = message.trim_start_matches("error: ");
    let failure = CommandFailure::new(ErrorKind::Invalid, message);
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
            "rapidraid verify",
            "rapidraid show a/latest --record r",
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
            "rapidraid show a/1 --record r --tensors",
            "rapidraid restore a/1",
            "rapidraid restore a/1 --out d --range 0..5",
            "rapidraid restore a/1 --out d --shard ../x",
            "rapidraid archive a/1 --plan tree",
            "rapidraid code show 16",
            "rapidraid verify --quick",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
