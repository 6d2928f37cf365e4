//! The command line: its commands, options, help and output. The only layer that prints.
//!
//! Commands return a [`CommandOutput`] or a [`CommandFailure`]. Only the [`printer`] writes results,
//! notes and failures, so that `--json`, colours, hints and exit codes are decided in one place.

mod add_client;
mod add_node;
pub mod args;
mod catalogue;
mod codes;
mod connect;
mod demo;
pub mod files;
mod holdings;
mod init;
mod interrupt;
mod jobs;
mod known_nodes;
mod labels;
mod log;
mod maintenance;
mod node;
pub mod picture;
pub mod printer;
pub mod progress;
mod remove_node;
mod renew_keys;
mod repair;
mod replace_node;
mod retention;
mod rules;
mod safety;
pub mod sample;
mod save;
mod save_record;
mod stage;
mod status;
mod steps;
pub mod table;
mod tensors;
mod trace;
mod transfer;
mod verify;
mod verify_all;
pub mod words;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::num::NonZero;
use std::process::ExitCode;

use args::{Args, CatalogueCommand, Cluster, Command};
use printer::{CommandFailure, CommandOutput, Look, Printer};

use crate::gf::kernel::{ENV, Kernel};
use crate::kind::ErrorKind;

/// The context of every command: its output and its environment.
pub struct Front {
    /// The output of the process.
    pub printer: Printer,
    /// The environment variables of the process.
    pub env: BTreeMap<String, String>,
}

/// The outcome of a command.
pub type Outcome = Result<Box<dyn CommandOutput + Send>, CommandFailure>;

/// Builds the async runtime of the process. Its threads only carry packets and messages; the
/// daemon's heavy work has threads of its own. On a machine with one or two processors, one thread
/// is enough: with two, packets would wake a thread that finds nothing left to do.
///
/// Returns the error of the system if the threads cannot be started.
pub fn runtime() -> io::Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(2, NonZero::get);
    let threads = if cores <= 2 { 1 } else { cores.min(8) };
    tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}

/// Runs the command of the process, given its arguments and what [`files::environment`] returns,
/// and prints its outcome. Returns the exit code of the process.
pub fn run(
    arguments: impl Iterator<Item = OsString>,
    environment: Result<BTreeMap<String, String>, CommandFailure>,
) -> ExitCode {
    // Whether the arguments ask for help or for JSON does not depend on the environment.
    let env = environment.as_ref().cloned().unwrap_or_default();
    let args = match args::parse(arguments, &env) {
        Ok(args) => args,
        Err(code) => return ExitCode::from(code),
    };
    if let Err(failure) = environment {
        let printer = Printer::of_process(Look::of_process(args.json, &env));
        return ExitCode::from(printer.finish::<dyn CommandOutput>(Err(&failure)));
    }
    block_on_command(args, env)
}

/// Runs the command on a runtime of its own.
///
/// The compiler generates the code of an `async fn` in the crate that polls its future. It is polled
/// here and not in the program's crate, so that the code is generated once, with the library.
fn block_on_command(args: Args, env: BTreeMap<String, String>) -> ExitCode {
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(print_outcome(args, env));
    // The outcome is already printed: a thread that still blocks on a disk must not keep the
    // process alive.
    runtime.shutdown_background();
    ExitCode::from(code)
}

/// Runs the command and prints its outcome. Returns the exit code of the process.
async fn print_outcome(args: Args, env: BTreeMap<String, String>) -> u8 {
    let printer = Printer::of_process(Look::of_process(args.json, &env));
    let mut front = Front { printer, env };
    let outcome = match Kernel::from_env() {
        Ok(_) => command(&mut front, args.command).await,
        Err(error) => Err(CommandFailure::new(ErrorKind::Invalid, format!("{ENV}: {error}"))),
    };
    front.printer.finish(outcome.as_deref())
}

async fn command(front: &mut Front, command: Command) -> Outcome {
    if !matches!(command, Command::Node(_) | Command::Stage(_)) {
        log::of_command(front);
    }
    match command {
        Command::Demo(options) => demo::run(front, options).await,
        Command::Cluster(Cluster::Init(options)) => init::run(&options),
        Command::Cluster(Cluster::ReplaceNode(options)) => replace_node::run(front, options).await,
        Command::Cluster(Cluster::Maintenance(options)) => maintenance::run(front, options).await,
        Command::Cluster(Cluster::RemoveNode(options)) => remove_node::run(front, options).await,
        Command::Cluster(Cluster::AddNode(options)) => add_node::run(&options),
        Command::Cluster(Cluster::AddClient(options)) => add_client::run(&options),
        Command::Cluster(Cluster::RenewKeys(options)) => renew_keys::run(&options),
        Command::Node(options) => node::run(front, options).await,
        Command::Stage(options) => stage::run(front, options).await,
        Command::Save(options) => save::run(front, options).await,
        Command::Archive(options) => transfer::archive(front, options).await,
        Command::Restore(options) => transfer::restore(front, options).await,
        Command::Verify(options) => verify::run(front, options).await,
        Command::Repair(options) => repair::run(front, options).await,
        Command::Ls(options) => steps::list(front, options).await,
        Command::Show(options) => steps::show(front, options).await,
        Command::Rm(options) => steps::remove(front, options).await,
        Command::Label(options) => labels::label(front, options).await,
        Command::Status(options) => status::run(front, options).await,
        Command::Catalogue(CatalogueCommand::Rebuild(options)) => {
            catalogue::rebuild(front, options).await
        }
        Command::Catalogue(CatalogueCommand::Retention(options)) => {
            retention::run(front, options).await
        }
        Command::Catalogue(CatalogueCommand::Move(options)) => {
            catalogue::move_to(front, options).await
        }
        Command::Code(code) => codes::run(front, code),
    }
}

/// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct FrontPage;
