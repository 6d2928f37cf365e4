//! `repair`: makes again what nodes have lost of checkpoints.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::args::Repair;
use super::interrupt::{Signals, interrupted};
use super::printer::{CommandFailure, CommandOutput};
use super::progress::ProgressLine;
use super::table::{Paint, Tint};
use super::transfer::{counted, listed, named, pace};
use super::{Front, Outcome, connect};
use crate::client::{Client, ClientError, RepairReport};
use crate::clock::{Clock, SystemClock};
use crate::id::{Job, NodeId, PeerName, Step};
use crate::kind::ErrorKind;
use crate::topology::Directory;
use crate::units::ByteCount;
use crate::wire::calls::{RepairEvent, RepairMode, RepairOptions};

/// Maximum number of notes that are printed while the work goes on; JSON has all notes that the
/// daemon sent, at most 1000.
const LISTED: usize = 10;

/// Repairs the checkpoints that the options name, and reports what was made of each.
pub async fn run(front: &mut Front, options: Repair) -> Outcome {
    let mut signals = Signals::new()?;
    let client = connect::client(&options.connect, &front.env).await?;
    let clock = SystemClock::new();
    let repaired = tokio::select! {
        biased;
        repaired = repair_steps(front, &client, &options) => repaired,
        which = signals.next() => {
            let hint = "`rapidraid repair --dry-run` counts what is left; a repair waits until the nodes have finished, and fails after three minutes";
            Err(interrupted(which, "the nodes go on with the checkpoint that was being repaired")
                .with_hint(hint))
        }
    };
    let took = clock.now();
    connect::close(&client).await;
    let (steps, left) = repaired?;
    let (is_dry_run, given_up_node) = (options.dry_run, options.node);
    Ok(Box::new(Repaired { steps, left, took, is_dry_run, given_up_node }))
}

/// The result for one step.
struct StepResult {
    job: Job,
    step: Step,
    took: Duration,
    result: Result<RepairReport, CommandFailure>,
}

/// Repairs the steps that the options name. Returns the results, and the number of checkpoints that were
/// left out because no catalogue answers any more.
async fn repair_steps(
    front: &mut Front,
    client: &Client,
    options: &Repair,
) -> Result<(Vec<StepResult>, usize), CommandFailure> {
    let failure = |error: ClientError| connect::failure(&error);
    let clock = SystemClock::new();
    if let Some(wanted) = &options.step {
        let report = repair_step(front, client, &wanted.job, wanted.step, options).await;
        let report = report.map_err(failure)?;
        let (job, step) = (report.job.clone(), report.step);
        let result = StepResult { job, step, took: clock.now(), result: Ok(report) };
        return Ok((vec![result], 0));
    }
    let steps = client.list_steps(None).await.map_err(failure)?;
    let directory = Directory::new(Vec::new(), client.fetch_ring_changes().await.map_err(failure)?);
    if let Some(name) = &options.node {
        ensure_known(client, name, &directory).await?;
    }
    let mut results = Vec::new();
    let count = steps.len();
    for (number, view) in (1..).zip(steps) {
        let (job, step) = (view.job, view.step);
        let begun_at = clock.now();
        let result = match &options.node {
            Some(name) => has_part_of(client, name, &directory, &job, step).await,
            None => Ok(true),
        };
        let result = match result {
            Ok(false) => continue,
            Ok(true) => {
                front.printer.note(&format!("checkpoint {number} of {count}: {job}/{step}"));
                repair_step(front, client, &job, Some(step), options).await
            }
            Err(error) => Err(error),
        };
        let is_gone = |error: &ClientError| error.kind() == ErrorKind::NotFound;
        if result.as_ref().is_err_and(is_gone) {
            // The step was removed since the list was made.
            continue;
        }
        let is_transient = result.as_ref().is_err_and(|error| error.kind().is_transient());
        let is_last = is_transient && !has_catalogue(client, &job).await;
        let (result, took) = (result.map_err(failure), clock.now() - begun_at);
        results.push(StepResult { job, step, took, result });
        if is_last {
            // Without a catalogue each further checkpoint would fail in the same way.
            return Ok((results, count - number));
        }
    }
    Ok((results, 0))
}

/// Returns whether a catalogue answers.
async fn has_catalogue(client: &Client, job: &Job) -> bool {
    client.list_open_saves(Some(job)).await.is_ok()
}

/// Returns an error unless the cluster has a node of this name.
async fn ensure_known(
    client: &Client,
    name: &PeerName,
    directory: &Directory,
) -> Result<(), CommandFailure> {
    let members = client.fetch_members().await.map_err(|error| connect::failure(&error))?;
    let is_member = members.iter().any(|node| node.name == *name);
    match is_member || directory.leave_state_of(NodeId::of(name)).is_some() {
        true => Ok(()),
        false => {
            let message = format!("the cluster has no node {name}");
            Err(CommandFailure::new(ErrorKind::NotFound, message)
                .with_hint("`rapidraid status` lists the nodes"))
        }
    }
}

/// Returns whether the ring of a shard of the step names the node, or has it as a successor.
async fn has_part_of(
    client: &Client,
    name: &PeerName,
    directory: &Directory,
    job: &Job,
    step: Step,
) -> Result<bool, ClientError> {
    let roots = match client.fetch_shard_roots(job, Some(step)).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        roots => roots?,
    };
    let node = NodeId::of(name);
    Ok(roots.iter().any(|root| directory.is_named_by(root, node)))
}

async fn repair_step(
    front: &mut Front,
    client: &Client,
    job: &Job,
    step: Option<Step>,
    options: &Repair,
) -> Result<RepairReport, ClientError> {
    let label = format!("repair {}", named(job, step));
    let bar = ProgressLine::new(front.printer.look().watched, label, None);
    let (printer, mut notes) = (&mut front.printer, 0);
    let mut on_event = |event: &RepairEvent| match event {
        RepairEvent::Progress { done_bytes, total_bytes, made_bytes } => {
            bar.set_total(*total_bytes);
            bar.set(*done_bytes, &format!("{} made", ByteCount(*made_bytes)));
        }
        RepairEvent::Note(note) if notes < LISTED => {
            notes += 1;
            bar.suspend(|| printer.note(&format!("note: {note}")));
        }
        _ => {}
    };
    let how = RepairOptions {
        mode: if options.dry_run { RepairMode::DryRun } else { RepairMode::Repair },
        plan: options.plan.into(),
        parallel: options.parallel,
    };
    let given_up: Vec<NodeId> = options.node.iter().map(NodeId::of).collect();
    client.repair(job, step, how, &given_up, &mut on_event).await
}

struct Repaired {
    steps: Vec<StepResult>,
    /// Number of checkpoints that were left out because no catalogue answers.
    left: usize,
    took: Duration,
    is_dry_run: bool,
    /// The node whose parts were to be made on other nodes.
    given_up_node: Option<PeerName>,
}

impl CommandOutput for Repaired {
    fn json(&self) -> Map<String, Value> {
        let steps: Vec<Value> = self.steps.iter().map(step_json).collect();
        let fields = json!({
            "dry_run": self.is_dry_run, "steps": steps, "not_examined": self.left, "seconds": self.took.as_secs_f64(),
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let mut out = String::new();
        for step in &self.steps {
            let report = match &step.result {
                Ok(report) => report,
                Err(failure) => {
                    let word = paint.tint(Tint::Red, "not repaired");
                    let (job, number) = (&step.job, step.step);
                    out.push_str(&format!("{word} {job}/{number}: {}\n", failure.message));
                    continue;
                }
            };
            out.push_str(&self.line(step, report, paint));
            out.push_str(&listed("not made", &report.notes, paint));
            let away = report.summary.away.iter().map(|(node, parts)| {
                let next = match self.given_up_node.as_ref() {
                    // The notes say why.
                    _ if !report.notes.is_empty() => format!("start it, or add a node, and name it by `rapidraid cluster replace-node {node} --by NEW`"),
                    Some(name) if name == node => format!("no other node can take them; add one, and name it by `rapidraid cluster replace-node {node} --by NEW`"),
                    _ => format!("start it, or run `rapidraid repair --node {node}`"),
                };
                format!("{node} does not answer: {} of it; {next}", counted(*parts, "part"))
            });
            out.push_str(&listed("away", &away.collect::<Vec<_>>(), paint));
        }
        if self.left > 0 {
            let word = paint.tint(Tint::Red, "not examined");
            let left = counted(self.left as u64, "checkpoint");
            let why = "the catalogue cannot be reached; run the command again when it answers";
            out.push_str(&format!("{word}: {left}: {why}\n"));
        }
        if self.steps.is_empty() {
            out.push_str("no checkpoint to repair\n");
        }
        out
    }

    fn exit_code(&self) -> u8 {
        u8::from(self.left > 0 || !self.steps.iter().all(|step| self.is_whole(step)))
    }
}

impl Repaired {
    /// Returns whether nothing of the step is missing any more, as far as the repair knows.
    fn is_whole(&self, step: &StepResult) -> bool {
        let Ok(RepairReport { summary, notes, .. }) = &step.result else { return false };
        let counted = summary.pieces + summary.replicas + summary.records;
        let is_left = summary.unrepaired > 0 || !summary.away.is_empty() || !notes.is_empty();
        !is_left && (counted == 0 || !self.is_dry_run)
    }

    /// Returns the line about one step.
    fn line(&self, result: &StepResult, report: &RepairReport, paint: Paint) -> String {
        let RepairReport { job, step, summary, .. } = report;
        let parts =
            [(summary.pieces, "piece"), (summary.replicas, "replica"), (summary.records, "record")];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| counted(*count, what))
            .collect();
        let (is_whole, parts) = (self.is_whole(result), parts.join(", "));
        let examined = format!("{} examined", counted(summary.stripes, "stripe"));
        if self.is_dry_run && !parts.is_empty() {
            let (word, bytes) =
                (paint.tint(Tint::Yellow, "missing"), ByteCount(summary.made_bytes));
            return format!("{word} of {job}/{step}: {parts} ({bytes}); {examined}\n");
        }
        let made = match parts.is_empty() {
            true => "nothing made".to_owned(),
            false => format!("{parts} made; {}", pace(summary.made_bytes, result.took)),
        };
        match (is_whole, parts.is_empty()) {
            (true, true) => {
                let word = paint.tint(Tint::Green, "nothing to make");
                format!("{word} of {job}/{step}: {examined}\n")
            }
            (true, false) => {
                let word = paint.tint(Tint::Green, "repaired");
                format!("{word} {job}/{step}: {made}; {examined}\n")
            }
            (false, _) => {
                let word = paint.tint(Tint::Yellow, "incomplete");
                format!("{word} {job}/{step}: {made}; {examined}\n")
            }
        }
    }
}

fn step_json(step: &StepResult) -> Value {
    let StepResult { job, step, result, took } = step;
    match result {
        Ok(RepairReport { summary, notes, .. }) => {
            let away: Map<String, Value> =
                summary.away.iter().map(|(node, parts)| (node.to_string(), json!(parts))).collect();
            json!({
                "job": job, "step": step, "stripes": summary.stripes, "pieces": summary.pieces,
                "replicas": summary.replicas, "bytes": summary.made_bytes, "records": summary.records,
                "unrepaired": summary.unrepaired, "away": away, "notes": notes,
                "seconds": took.as_secs_f64(), "error": null,
            })
        }
        Err(failure) => json!({ "job": job, "step": step, "error": failure.message }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_that_were_left_out_are_counted() {
        let (took, given_up_node) = (Duration::ZERO, None);
        let left = Repaired { steps: Vec::new(), left: 7, took, is_dry_run: true, given_up_node };
        assert!(left.text(Paint::PLAIN).starts_with("not examined: 7 checkpoints: the catalogue"));
        assert_eq!((left.exit_code(), left.json()["not_examined"].as_u64()), (1, Some(7)));
        let whole = Repaired { left: 0, ..left };
        assert_eq!(
            (whole.exit_code(), whole.text(Paint::PLAIN).contains("not examined")),
            (0, false)
        );
    }
}
