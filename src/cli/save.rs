//! `save`: maps paths to shards and saves them.
//!
//! Guarantees: the names of shards are unique, and the same for the same paths; only regular files
//! are read; every refusal of a path happens before the first byte is sent.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::args::Save;
use super::interrupt::{CommittedBefore, InterruptedSave, InterruptibleSave, Signals};
use super::printer::{CommandFailure, CommandOutput, Printer};
use super::table::{Paint, Tint};
use super::{Front, Outcome, connect, files, save_record, transfer};
use crate::client::{
    Client, ClientError, FileSource, NewShard, ProgressFn, SaveOptions, SaveReport,
};
use crate::clock::{Clock, SystemClock};
use crate::format::geometry::MAX_SHARDS;
use crate::id::{IdError, ShardName};
use crate::kind::ErrorKind;
use crate::pipeline::upload::SaveError;
use crate::units::ByteCount;

/// Maximum number of files in a save.
const MAX_FILES: usize = MAX_SHARDS as usize;
/// Interval between attempts to save a step that another client saves. [`MAX_WAIT`] limits the
/// total time.
const WAIT: Duration = Duration::from_secs(1);
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// Maximum depth of folders. A deeper tree is a mistake.
const MAX_DEPTH: usize = 64;

/// Runs the command `save`.
pub async fn run(front: &mut Front, options: Save) -> Outcome {
    let found = shards_of(&options.paths)?;
    let mut sources = Vec::with_capacity(found.len());
    for (_, path) in &found {
        let source =
            FileSource::open(path).map_err(|error| files::io_failure("read", path, &error))?;
        sources.push(Arc::new(match options.allow_changing {
            true => source.allow_changing(),
            false => source,
        }));
    }
    let shards = || {
        let named = found.iter().zip(&sources);
        let shard = |((name, _), source): (&(ShardName, PathBuf), &Arc<FileSource>)| NewShard {
            name: name.clone(),
            source: source.clone(),
        };
        named.map(shard).collect::<Vec<_>>()
    };
    let client = connect::client(&options.connect, &front.env).await?;
    // Before this point a signal ends the process at once, because there is nothing to undo.
    let mut signals = Signals::new()?;
    let record_file = options.record.as_deref().map(files::create_new).transpose()?;
    let progress = transfer::watch(front, format!("save {}", options.step));
    let decisions = InterruptibleSave::new(shards());
    let (saved, took) = {
        let saving = save_or_wait(&mut front.printer, &client, &options, &decisions, progress);
        let mut saving = std::pin::pin!(saving);
        let done = tokio::select! {
            biased;
            done = &mut saving => InterruptedSave::Ended(done),
            which = signals.next() => {
                decisions.end(&client, &options.step, saving, (which, &mut signals)).await
            }
        };
        match done {
            InterruptedSave::Ended(Ok((report, took))) => (Ok(report), took),
            InterruptedSave::Ended(Err(error)) => (Err(error), Duration::ZERO),
            InterruptedSave::Committed(save) => {
                connect::close(&client).await;
                let step = options.step.clone();
                if let Some(path) = &options.record {
                    files::remove_file(path);
                    let why = "a signal ended the command before it was written";
                    return Err(save_record::not_written(&step, why));
                }
                return Ok(Box::new(CommittedBefore { step, save }));
            }
            InterruptedSave::Failed(failure) => {
                connect::close(&client).await;
                options.record.iter().for_each(|path| files::remove_file(path));
                return Err(failure);
            }
        }
    };
    connect::close(&client).await;
    if let (Err(_), Some(path)) = (&saved, &options.record) {
        files::remove_file(path);
    }
    let report = saved.map_err(|error| explain(&error, &options))?;
    for ((name, _), source) in found.iter().zip(&sources) {
        if options.allow_changing && source.has_changed().unwrap_or(true) {
            front.printer.warn(
                &format!("{name} changed while it was saved"),
                "some of its bytes may be older than others",
            );
        }
    }
    let mut record = None;
    if let (Some(file), Some(path)) = (record_file, &options.record) {
        save_record::write(file, path, &report.record)
            .map_err(|failure| save_record::not_written(&options.step, &failure.message))?;
        record = Some(path.display().to_string());
    }
    Ok(Box::new(Saved { report, took, record }))
}

/// Returns the failure of a save with the hint for its cause.
fn explain(error: &ClientError, options: &Save) -> CommandFailure {
    let failure = connect::failure(error);
    match error {
        ClientError::Save(SaveError::Changed { .. }) => failure.with_hint(match options.allow_changing {
            false => "save it when no process writes to it, or save it as it is with --allow-changing",
            true => "it became shorter, or changed before a part was sent again: save a copy of it",
        }),
        _ if failure.kind == ErrorKind::Exists => {
            failure.with_hint(format!("`rapidraid show {}` shows what is there", options.step))
        }
        _ => failure,
    }
}

/// Saves the step. If another client saves it and the options say so, waits for that client first.
/// Returns the report, and the time that the save itself took.
async fn save_or_wait(
    printer: &mut Printer,
    client: &Client,
    options: &Save,
    decisions: &Arc<InterruptibleSave>,
    progress: ProgressFn,
) -> Result<(SaveReport, Duration), ClientError> {
    let (job, step) = (&options.step.job, options.step.step);
    let how = SaveOptions { replace: options.replace };
    let save = || {
        let (decisions, progress) = (decisions.clone(), progress.clone());
        client.save_with_decisions(job, step, how, decisions, progress)
    };
    let clock = SystemClock::new();
    let mut began = clock.now();
    let mut saved = save().await;
    if options.wait && is_being_saved(client, options, &saved).await {
        printer.note(&format!("{} is being saved by another client: waiting for it", options.step));
        while clock.now() < MAX_WAIT && is_being_saved(client, options, &saved).await {
            clock.sleep(WAIT).await;
            began = clock.now();
            saved = save().await;
        }
    }
    Ok((saved?, clock.now() - began))
}

/// Returns whether a save was refused because another save of the step is in progress.
async fn is_being_saved(
    client: &Client,
    options: &Save,
    saved: &Result<SaveReport, ClientError>,
) -> bool {
    let is_refused = saved.as_ref().is_err_and(|error| error.kind() == ErrorKind::Exists);
    let (job, step) = (&options.step.job, options.step.step);
    // Without `--replace`, a save of a committed step is refused as well, and waiting would not
    // help.
    is_refused
        && (options.replace
            || client
                .show_step(job, Some(step))
                .await
                .is_err_and(|e| e.kind() == ErrorKind::NotFound))
}

/// Returns the shards of the paths, sorted by name. Returns `Invalid` if a path cannot be saved or
/// two files would become the same shard.
pub fn shards_of(paths: &[PathBuf]) -> Result<Vec<(ShardName, PathBuf)>, CommandFailure> {
    let mut found = BTreeMap::new();
    for path in paths {
        let kind = files::kind_of(path)?;
        if kind.is_dir() {
            folder(path, "", 0, &mut found)?;
        } else if kind.is_file() {
            let name = path.file_name().unwrap_or(path.as_os_str());
            add(name.to_str(), "", path, &mut found)?;
        } else {
            return Err(unusable(path, "is neither a file nor a folder"));
        }
    }
    if found.is_empty() {
        let message = "the named paths contain no file";
        return Err(CommandFailure::new(ErrorKind::Invalid, message)
            .with_hint("name a file, or a folder with files"));
    }
    Ok(found.into_iter().collect())
}

type Found = BTreeMap<ShardName, PathBuf>;

fn folder(
    path: &Path,
    prefix: &str,
    depth: usize,
    found: &mut Found,
) -> Result<(), CommandFailure> {
    if depth > MAX_DEPTH {
        return Err(unusable(path, "is nested too deep"));
    }
    for (entry, kind) in files::entries(path)? {
        let name = entry.file_name().and_then(|name| name.to_str());
        if kind.is_file() {
            add(name, prefix, &entry, found)?;
        } else if kind.is_dir() {
            let name = name.ok_or_else(|| unusable(&entry, "has a name that is not UTF-8"))?;
            folder(&entry, &format!("{prefix}{name}/"), depth + 1, found)?;
        } else if kind.is_symlink() {
            return Err(unusable(&entry, "is a symbolic link").with_hint(
                "name the file that it leads to on the command line, or remove the link",
            ));
        } else {
            return Err(unusable(&entry, "is neither a file nor a folder"));
        }
    }
    Ok(())
}

fn add(
    name: Option<&str>,
    prefix: &str,
    path: &Path,
    found: &mut Found,
) -> Result<(), CommandFailure> {
    let name = name.ok_or_else(|| unusable(path, "has a name that is not UTF-8"))?;
    let name: ShardName = format!("{prefix}{name}").parse().map_err(|error: IdError| {
        CommandFailure::of(ErrorKind::Invalid, &error).with_hint("rename the file or folder")
    })?;
    if found.len() >= MAX_FILES {
        return Err(unusable(
            path,
            &format!("is one file too many: a save has at most {MAX_FILES}"),
        ));
    }
    if let Some(other) = found.insert(name.clone(), path.to_owned()) {
        let message =
            format!("{} and {} would both be the shard {name}", other.display(), path.display());
        return Err(CommandFailure::new(ErrorKind::Invalid, message)
            .with_hint("put them into one folder with different names and name the folder"));
    }
    Ok(())
}

fn unusable(path: &Path, why: &str) -> CommandFailure {
    CommandFailure::new(ErrorKind::Invalid, format!("{} {why}", path.display()))
        .with_hint("a checkpoint is made of regular files")
}

struct Saved {
    report: SaveReport,
    took: Duration,
    /// The path to which the record was written.
    record: Option<String>,
}

impl CommandOutput for Saved {
    fn json(&self) -> Map<String, Value> {
        let report = &self.report;
        let fields = json!({
            "job": report.job, "step": report.step, "save": report.save.to_string(), "shards": report.shards,
            "bytes": report.len_bytes, "n": report.n, "k": report.k,
            "generation": report.generation.to_string(), "seconds": self.took.as_secs_f64(),
            "record": self.record,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let report = &self.report;
        format!(
            "{} {}/{}: {} in {}, two replicas of each block, for code ({},{}); {}\n",
            paint.tint(Tint::Green, "saved"),
            report.job,
            report.step,
            ByteCount(report.len_bytes),
            transfer::counted(u64::from(report.shards), "shard"),
            report.n,
            report.k,
            transfer::pace(report.len_bytes, self.took),
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods)] // the test writes the files that are saved

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::cli::args::{Args, Command};
    use crate::id::{SaveId, ShardId, StripeId};

    #[test]
    fn a_folder_keeps_its_tree_and_a_file_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("step/rank0")).unwrap();
        fs::create_dir_all(at("step/empty")).unwrap();
        for file in ["step/rank0/a.bin", "step/index.json", "step/empty.bin", "other"] {
            fs::write(at(file), "").unwrap();
        }
        symlink(at("other"), at("link")).unwrap();
        let found = shards_of(&[at("step"), at("link")]).unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["empty.bin", "index.json", "link", "rank0/a.bin"]);
    }

    #[test]
    fn what_cannot_be_restored_is_refused_before_anything_is_sent() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("d/e")).unwrap();
        let refused = |paths: &[PathBuf], kind: ErrorKind, part: &str| {
            let failure = shards_of(paths).unwrap_err();
            assert!(failure.kind == kind && failure.message.contains(part), "{failure:?}");
        };
        refused(&[at("no")], ErrorKind::NotFound, "no");
        refused(&[at("d")], ErrorKind::Invalid, "no file");
        fs::write(at("x"), "").unwrap();
        fs::write(at("d/x"), "").unwrap();
        refused(&[at("x"), at("d")], ErrorKind::Invalid, "both be the shard x");
        refused(&[at("x"), at("x")], ErrorKind::Invalid, "both be the shard x");
        symlink(at("x"), at("d/e/link")).unwrap();
        refused(&[at("d")], ErrorKind::Invalid, "d/e/link is a symbolic link");
        use std::os::unix::ffi::OsStrExt;
        let strange = folder.path().join(std::ffi::OsStr::from_bytes(b"\xff"));
        fs::write(&strange, "").unwrap();
        refused(&[strange], ErrorKind::Invalid, "UTF-8");
    }

    #[test]
    fn hints_of_a_refused_save_fit_its_cause() {
        let line = "rapidraid save a/1 x";
        let args = <Args as clap::Parser>::try_parse_from(line.split(' ')).unwrap();
        let Command::Save(options) = args.command else { panic!("{args:?}") };
        let told = |error: SaveError| explain(&ClientError::Save(error), &options);
        let changed = told(SaveError::Changed { shard: "x".into() });
        assert_eq!((changed.exit_code(), changed.hint.contains("--allow-changing")), (1, true));
        let stripe = StripeId { shard: ShardId::new(SaveId([1; 12]), 0), index: 0 };
        let (failed, reason) = ("n1".into(), "over its high-water mark of 85 %".into());
        let full = told(SaveError::NoHolders { stripe, failed, reason });
        assert!(full.hint.contains("how full their disks are"), "{full:?}");
    }
}
