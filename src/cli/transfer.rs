//! `archive`, `restore` and `verify --quick`: the commands that move much data, with their progress
//! and reports.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::args::{Archive, CodecWord, Connect, PlanWord, Restore};
use super::interrupt::{Signals, interrupted};
use super::printer::{CommandFailure, CommandOutput};
use super::progress::ProgressLine;
use super::table::{Paint, Tint, shown};
use super::trace::Trace;
use super::words::AnyStep;
use super::{Front, Outcome, connect, files};
use crate::client::{
    ArchiveReport, ClientError, Progress as Done, ProgressFn, RestoreReport, RestoreRequest,
};
use crate::clock::{Clock, SystemClock};
use crate::format::save_record::{MAX_SAVE_RECORD_BYTES, SaveRecord};
use crate::id::{Job, Step};
use crate::kind::ErrorKind;
use crate::store::RealDisk;
use crate::units::ByteCount;
use crate::wire::calls::{ArchiveEvent, ArchiveOptions, StripeReport};
use crate::wire::order::HopWork;

/// Maximum number of notes and incidents that are printed; JSON has them all.
const LISTED: usize = 10;

/// Returns a callback that shows progress. The client library may call it from any task.
pub fn watch(front: &Front, what: String) -> ProgressFn {
    let bar = ProgressLine::new(front.printer.look().watched, what, None);
    Arc::new(move |done: Done| {
        bar.set_total(done.total_bytes);
        bar.set(done.done_bytes, "");
    })
}

/// Returns a count with its noun, such as `1 shard` or `2 shards`.
pub fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Returns the duration of a transfer as text, with its rate.
pub fn pace(bytes: u64, took: Duration) -> String {
    let seconds = took.as_secs_f64();
    if bytes == 0 || seconds < 0.001 {
        return format!("{seconds:.2} s");
    }
    // The rate is for people, so the fraction of a byte does not matter.
    format!("{seconds:.2} s, {}/s", ByteCount((bytes as f64 / seconds) as u64))
}

/// Returns `JOB/STEP`, with `latest` if no step is given.
pub fn named(job: &Job, step: Option<Step>) -> String {
    step.map_or_else(|| format!("{job}/latest"), |step| format!("{job}/{step}"))
}

/// Runs the command `archive`: has a step archived, and shows the progress until the end.
pub async fn archive(front: &mut Front, options: Archive) -> Outcome {
    if options.plan == PlanWord::Chain && options.codec == CodecWord::ReedSolomonErasure {
        let message = "the codec reed-solomon-erasure cannot run a chain";
        return Err(CommandFailure::new(ErrorKind::Invalid, message)
            .with_hint("add --plan star, or omit --codec"));
    }
    let client = connect::client(&options.connect, &front.env).await?;
    // Before this point a signal ends the process at once, because there is nothing to undo.
    let mut signals = Signals::new()?;
    let mut trace = options.trace.as_deref().map(files::create_new).transpose()?.map(Trace::new);
    let (job, step) = (&options.step.job, options.step.step);
    let bar = ProgressLine::new(
        front.printer.look().watched,
        format!("archive {}", named(job, step)),
        None,
    );
    let clock = SystemClock::new();
    let (mut has_begun, mut notes) = (false, 0);
    let printer = &mut front.printer;
    let mut on_event = |event: &ArchiveEvent| {
        has_begun = true;
        match event {
            ArchiveEvent::Progress { done_bytes, total_bytes } => {
                bar.set_total(*total_bytes);
                bar.set(*done_bytes, "");
            }
            ArchiveEvent::Stripe(report) => {
                trace.iter_mut().for_each(|trace| trace.add(report, clock.now()));
            }
            ArchiveEvent::Note(note) if notes < LISTED => {
                notes += 1;
                bar.suspend(|| printer.note(&format!("note: {note}")));
            }
            _ => {}
        }
    };
    let how = ArchiveOptions {
        plan: options.plan.into(),
        codec: options.codec.into(),
        parallel: options.parallel,
    };
    let archived = tokio::select! {
        biased;
        archived = client.archive(job, step, how, &mut on_event) => Ok(archived),
        which = signals.next() => Err(which),
    };
    drop(bar);
    let took = clock.now();
    connect::close(&client).await;
    if !matches!(archived, Ok(Ok(_))) {
        // The trace would be incomplete, and in the way when the command is run again.
        options.trace.iter().for_each(|path| files::remove_file(path));
    }
    let archived = archived.map_err(|which| {
        let name = named(job, step);
        let consequence = match has_begun {
            true => format!("the nodes continue to archive {name}"),
            false => format!("the nodes may have begun to archive {name}; if so, they continue"),
        };
        interrupted(which, &consequence).with_hint(format!(
            "`rapidraid archive {name}` shows the progress again, `rapidraid show {name}` the state"
        ))
    })?;
    let report = archived.map_err(|error| connect::failure(&error))?;
    let mut is_trace_missing = false;
    if let (Some(trace), Some(path)) = (trace, &options.trace)
        && let Err(failure) = finish_trace(trace, path)
    {
        // The step is archived all the same, so its report is printed.
        front.printer.warn(
            &format!("no trace: {}", failure.message),
            "the step is archived; a trace can only be written while a step is archived",
        );
        is_trace_missing = true;
    }
    Ok(Box::new(Archived { report, took, is_trace_missing }))
}

/// Completes a trace in the file that was created at `path`. Removes the file if that fails.
fn finish_trace(trace: Trace, path: &Path) -> Result<(), CommandFailure> {
    let written = trace.finish().map_err(|error| files::io_failure("write", path, &error));
    written.inspect_err(|_| files::remove_file(path))
}

/// The checkpoint that a restore reads.
enum RestoreSource {
    /// The save that the record names.
    Record(SaveRecord),
    /// A step, which the catalogue finds.
    Catalogue(AnyStep),
}

impl RestoreSource {
    /// Returns the step as `JOB/STEP`.
    fn name(&self) -> String {
        match self {
            RestoreSource::Record(record) => named(record.job(), Some(record.step())),
            RestoreSource::Catalogue(AnyStep { job, step }) => named(job, *step),
        }
    }
}

/// Runs the command `restore`.
pub async fn restore(front: &mut Front, options: Restore) -> Outcome {
    let record = options.record.as_deref().map(read_record).transpose()?;
    let nodes = record.iter().flat_map(SaveRecord::nodes).map(|node| node.address.clone());
    let client = connect::client_beside(&options.connect, &front.env, nodes.collect()).await?;
    // Before this point a signal ends the process at once, because there is nothing to undo.
    let mut signals = Signals::new()?;
    let is_new = !options.out.exists();
    let out =
        RealDisk::open(&options.out).map_err(|error| CommandFailure::of(error.kind(), &error))?;
    let request = RestoreRequest {
        out: Arc::new(out),
        force: options.force,
        shard: options.shard,
        range: options.range.map(|range| range.0),
    };
    let source = match (record, options.step) {
        (Some(record), _) => RestoreSource::Record(record),
        (None, Some(step)) => RestoreSource::Catalogue(step),
        (None, None) => {
            let message = "neither a step nor a record was named";
            return Err(CommandFailure::new(ErrorKind::Invalid, message)
                .with_hint("name JOB/STEP or --record"));
        }
    };
    let (clock, name) = (SystemClock::new(), source.name());
    let progress = watch(front, format!("restore {name}"));
    let restoring = async {
        match &source {
            RestoreSource::Record(record) => {
                client.restore_by_record(record, request, progress).await
            }
            RestoreSource::Catalogue(AnyStep { job, step }) => {
                client.restore(job, *step, request, progress).await
            }
        }
    };
    // Dropping the restore removes its temporary files.
    let restored = tokio::select! {
        biased;
        restored = restoring => Ok(restored),
        which = signals.next() => Err(which),
    };
    let took = clock.now();
    connect::close(&client).await;
    if is_new && !matches!(restored, Ok(Ok(_))) {
        files::remove_empty_folder(&options.out);
    }
    let restored =
        restored.map_err(|which| interrupted(which, &format!("nothing of {name} was written")))?;
    let report = restored.map_err(|error| {
        let failure = connect::failure(&error);
        match error {
            ClientError::FileExists { .. } => failure.with_hint(
                "nothing was written: name another folder, or replace the existing files with --force",
            ),
            _ => failure,
        }
    })?;
    let out = Some(options.out.display().to_string());
    Ok(Box::new(Read { verb: "restored", report, took, out }))
}

fn read_record(path: &Path) -> Result<SaveRecord, CommandFailure> {
    let bytes = files::read_bytes(path, MAX_SAVE_RECORD_BYTES)?;
    SaveRecord::parse(&bytes).map_err(|error| {
        let failure = CommandFailure::of(error.kind(), &error);
        CommandFailure { message: format!("{}: {}", path.display(), failure.message), ..failure }
    })
}

/// Runs the command `verify --quick`. Its exit code says whether the checkpoint can be read. The
/// incidents are texts, from which damage cannot be told apart from nodes that did not answer.
pub async fn read_through(
    front: &mut Front,
    options: &Connect,
    (job, step): (&Job, Option<Step>),
) -> Outcome {
    let client = connect::client(options, &front.env).await?;
    let progress = watch(front, format!("verify {}", named(job, step)));
    let clock = SystemClock::new();
    let verified = client.read_without_output(job, step, progress).await;
    let took = clock.now();
    connect::close(&client).await;
    let report = verified.map_err(|error| connect::failure(&error))?;
    Ok(Box::new(Read { verb: "verified one copy of", report, took, out: None }))
}

struct Archived {
    report: ArchiveReport,
    took: Duration,
    /// Whether a trace was wanted and could not be written.
    is_trace_missing: bool,
}

/// Returns a stripe's report as JSON.
fn stripe_json(report: &StripeReport) -> Value {
    let hops: Vec<Value> = report
        .hops
        .iter()
        .map(|hop| {
            let HopWork { in_bytes, out_bytes, span_us, times, .. } = &hop.work;
            json!({
                "node": hop.node, "pieces": hop.pieces, "in_bytes": in_bytes, "out_bytes": out_bytes,
                "start_us": span_us.0, "end_us": span_us.1, "waited_upstream_us": times.upstream_us,
                "queued_us": times.queued_us, "computed_us": times.computed_us, "disk_us": times.disk_us,
                "waited_downstream_us": times.downstream_us,
            })
        })
        .collect();
    let [reserve, run, commit, drop] = report.phases_us;
    json!({
        "stripe": report.stripe.to_string(), "code": report.code.to_string(), "block_bytes": report.block_bytes,
        "hops": hops, "reserve_us": reserve, "run_us": run, "commit_us": commit, "drop_us": drop,
    })
}

impl CommandOutput for Archived {
    fn json(&self) -> Map<String, Value> {
        let report = &self.report;
        let reports: Vec<Value> = report.reports.iter().map(stripe_json).collect();
        let fields = json!({
            "job": report.job, "step": report.step, "stripes": report.stripes, "undropped": report.undropped,
            "seconds": self.took.as_secs_f64(), "reports": reports, "notes": report.notes,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let report = &self.report;
        let stripes = counted(report.stripes, "stripe");
        if report.total_bytes == 0 && report.undropped == 0 {
            let (job, step) = (&report.job, report.step);
            return format!("{job}/{step}: nothing to do, {stripes} archived already\n");
        }
        let dropped = match report.undropped {
            0 => "every piece was read back and proven, and the replicas are dropped".to_owned(),
            some => format!(
                "every piece was read back and proven; {some} of {stripes} keep replicas until their nodes answer again"
            ),
        };
        format!(
            "{} {}/{}: {stripes} in {:.2} s; {dropped}\n",
            paint.tint(Tint::Green, "archived"),
            report.job,
            report.step,
            self.took.as_secs_f64(),
        )
    }

    fn exit_code(&self) -> u8 {
        u8::from(self.is_trace_missing)
    }
}

struct Read {
    verb: &'static str,
    report: RestoreReport,
    took: Duration,
    out: Option<String>,
}

impl CommandOutput for Read {
    fn json(&self) -> Map<String, Value> {
        let report = &self.report;
        let fields = json!({
            "job": report.job, "step": report.step, "shards": report.shards, "bytes": report.len_bytes,
            "replica_stripes": report.replica_stripes, "decoded_stripes": report.decoded_stripes,
            "seconds": self.took.as_secs_f64(), "incidents": report.incidents, "out": self.out,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let report = &self.report;
        let to = self.out.as_ref().map(|out| format!(" to {}", shown(out))).unwrap_or_default();
        let done = format!(
            "{} {}/{}: {} in {}{to}; {} from replicas, {} from pieces; {}\n",
            paint.tint(Tint::Green, self.verb),
            report.job,
            report.step,
            ByteCount(report.len_bytes),
            counted(u64::from(report.shards), "shard"),
            counted(report.replica_stripes, "stripe"),
            report.decoded_stripes,
            pace(report.len_bytes, self.took),
        );
        done + &listed("incident", &report.incidents, paint)
    }
}

/// Returns at most [`LISTED`] lines, followed by the number of further ones.
pub fn listed(title: &str, lines: &[String], paint: Paint) -> String {
    let mut out = String::new();
    for line in lines.iter().take(LISTED) {
        out.push_str(&format!(
            "  {} {}\n",
            paint.tint(Tint::Yellow, &format!("{title}:")),
            shown(line)
        ));
    }
    if lines.len() > LISTED {
        out.push_str(&format!("  and {} more (--json has all)\n", lines.len() - LISTED));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_rates_read_well() {
        assert_eq!(
            (counted(1, "shard"), counted(0, "shard")),
            ("1 shard".into(), "0 shards".into())
        );
        assert_eq!(pace(200 << 20, Duration::from_secs(2)), "2.00 s, 100.0 MiB/s");
        assert_eq!(pace(0, Duration::from_secs(2)), "2.00 s");
        assert_eq!(pace(1, Duration::ZERO), "0.00 s");
    }

    #[test]
    fn incidents_are_told_but_not_without_end() {
        let lines: Vec<String> = (0..13).map(|n| format!("node-{n}\u{1b} is gone")).collect();
        let text = listed("met on the way", &lines, Paint::PLAIN);
        assert_eq!(text.lines().count(), LISTED + 1);
        assert!(
            text.contains("node-0\\u{1b} is gone")
                && text.ends_with("and 3 more (--json has all)\n")
        );
        assert_eq!(listed("x", &[], Paint::PLAIN), "");
    }
}
