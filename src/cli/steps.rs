//! `ls`, `show` and `rm`: list, show and remove checkpoints.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::args::{Ls, Rm, Show};
use super::holdings::{States, holdings};
use super::interrupt::unless_interrupted;
use super::jobs::JobsUnderWay;
use super::picture::{self, Style};
use super::printer::{CommandFailure, CommandOutput, step_json};
use super::table::{Paint, Table, Tint, shown};
use super::transfer::counted;
use super::words::ExactStep;
use super::{Front, Outcome, connect, save_record, tensors};
use crate::client::{Client, ClientError, ShowReport, StripeFiles};
use crate::format::records::{ShardRoot, ShardState};
use crate::id::{Job, Label, NodeId, PeerName, Step, StripeId};
use crate::kind::ErrorKind;
use crate::units::{ByteCount, date};
use crate::wire::calls::{RemoveAnswer, StepView};

/// Maximum number of shards that `show` lists; JSON has them all.
const LISTED: usize = 50;
/// The reason why a list from commit marks is incomplete.
const NO_CATALOGUE: &str = "the catalogue does not answer";
/// The line below a list of steps that was found without a catalogue.
const LIST_BY_MARKS: &str = "the catalogue does not answer: this list is from the nodes' commit marks, and labels, launches and saves that are not committed are not known; `rapidraid status` shows which nodes are down\n";
/// The line below the output of `show` that was found without a catalogue.
const BY_MARKS: &str = "the catalogue does not answer: this is from the nodes' commit marks and receipts; `rapidraid status` shows which nodes are down\n";

/// Runs the command `ls`.
pub async fn list(front: &mut Front, options: Ls) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let found = list_all(&client, options.job.as_ref()).await;
    connect::close(&client).await;
    let mut steps = found?;
    if let Some(label) = &options.label {
        let labels = steps.labels.as_ref().map_err(|why| labels_not_known(label, why))?;
        let has_label = |view: &StepView| {
            labels.get(&(view.job.clone(), view.step)).is_some_and(|all| all.contains(label))
        };
        steps.committed.retain(has_label);
    }
    Ok(Box::new(steps))
}

/// Returns the failure of a list by label while labels are not known. An empty list would say that no
/// step has the label.
fn labels_not_known(label: &Label, why: &str) -> CommandFailure {
    let message = format!("it is not known which steps have the label {label}: {why}");
    CommandFailure::new(ErrorKind::Unavailable, message).with_hint(
        "`rapidraid status` shows which nodes are down; without --label all steps are listed",
    )
}

/// Returns the committed steps of a job (`None`: of all jobs) and, while a catalogue answers, their
/// labels, the saves that are not committed, and the newest launches.
async fn list_all(client: &Client, job: Option<&Job>) -> Result<Steps, CommandFailure> {
    let committed = client.list_steps(job).await.map_err(|error| connect::failure(&error))?;
    // Commit marks say nothing of labels, launches, and saves that are not committed.
    if committed.iter().any(|view| view.by_marks) {
        let labels = Err(NO_CATALOGUE.to_owned());
        let under_way = JobsUnderWay::unknown(NO_CATALOGUE);
        return Ok(Steps { committed, labels, under_way });
    }
    let labels = list_labels(client, job, &committed).await.map_err(|error| error.to_string());
    let under_way = JobsUnderWay::list_for_steps(client, job, &committed).await;
    Ok(Steps { committed, labels, under_way })
}

/// The labels of steps.
type Labels = BTreeMap<(Job, Step), Vec<Label>>;

/// Returns the labels of the steps of one job, or of the jobs of `steps`.
async fn list_labels(
    client: &Client,
    job: Option<&Job>,
    steps: &[StepView],
) -> Result<Labels, ClientError> {
    let jobs: BTreeSet<&Job> = match job {
        Some(job) => BTreeSet::from([job]),
        None => steps.iter().map(|view| &view.job).collect(),
    };
    let mut labels = BTreeMap::new();
    for job in jobs {
        let of_job = client.list_labels(job).await?;
        labels.extend(of_job.into_iter().map(|(step, of_step)| ((job.clone(), step), of_step)));
    }
    Ok(labels)
}

/// Runs the command `show`.
pub async fn show(front: &mut Front, options: Show) -> Outcome {
    if options.tensors {
        return tensors::show(front, options).await;
    }
    if let Some(path) = &options.record {
        return save_record::show(front, &options, path).await;
    }
    let client = connect::client(&options.connect, &front.env).await?;
    let report = client.show_step(&options.step.job, options.step.step).await;
    let mut files = StripeFiles::new();
    if let Ok(report) = &report
        && let Some((root, _)) = shard_of_picture(report)
    {
        let stripe = StripeId { shard: root.shard, index: 0 };
        files = client.list_stripe_files(stripe, &report.nodes).await;
    }
    connect::close(&client).await;
    let style = Style::of_env(&front.env, front.printer.paint());
    let report = report.map_err(|error| connect::failure(&error))?;
    Ok(Box::new(Shown { report, files, style }))
}

/// Runs the command `rm`.
pub async fn remove(front: &mut Front, options: Rm) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let step = &options.step;
    let what = format!("the nodes may have begun to remove {step}; if so, they continue");
    let hint =
        format!("`rapidraid show {step}` shows whether it is there; if so, run the command again");
    let answer = unless_interrupted(client.remove_step(&step.job, step.step), &what, &hint).await;
    connect::close(&client).await;
    let answer = answer?.map_err(|error| match error.kind() {
        ErrorKind::Fenced => connect::failure(&error).with_hint(format!(
            "`rapidraid show {}` shows the save that is there now",
            options.step
        )),
        _ => connect::failure(&error),
    })?;
    Ok(Box::new(Removed { step: options.step, answer }))
}

struct Steps {
    committed: Vec<StepView>,
    /// The labels of the steps, or the reason why they are not known.
    labels: Result<Labels, String>,
    under_way: JobsUnderWay,
}

impl Steps {
    /// Returns the labels of a step, or `None` if they are not known.
    fn labels_of(&self, view: &StepView) -> Option<&[Label]> {
        let labels = self.labels.as_ref().ok()?;
        Some(labels.get(&(view.job.clone(), view.step)).map_or(&[], Vec::as_slice))
    }

    /// Returns the lines below the table: what is in progress, and what is not known.
    fn lines_below(&self) -> String {
        if self.committed.iter().any(|view| view.by_marks) {
            return LIST_BY_MARKS.to_owned();
        }
        let labels = match &self.labels {
            Ok(_) => String::new(),
            Err(reason) => format!("labels are not listed: {reason}\n"),
        };
        labels + &self.under_way.open_text() + &self.under_way.launches_text()
    }
}

impl CommandOutput for Steps {
    fn json(&self) -> Map<String, Value> {
        let step = |view: &StepView| {
            let mut step = step_json(view);
            step.insert("labels".to_owned(), json!(self.labels_of(view)));
            Value::Object(step)
        };
        let steps = self.committed.iter().map(step).collect();
        let mut fields = Map::from_iter(self.under_way.json());
        fields.insert("steps".to_owned(), Value::Array(steps));
        fields
    }

    fn text(&self, paint: Paint) -> String {
        if self.committed.is_empty() {
            return "no checkpoints\n".to_owned() + &self.lines_below();
        }
        let has_labels = self
            .committed
            .iter()
            .any(|view| self.labels_of(view).is_some_and(|all| !all.is_empty()));
        let mut heads = vec!["JOB/STEP", ">SHARDS", ">SIZE", "SAVED (UTC)"];
        heads.extend(has_labels.then_some("LABELS"));
        let mut table = Table::new(&heads);
        for view in &self.committed {
            let mut row = vec![
                format!("{}/{}", view.job, view.step),
                view.saved.shards.to_string(),
                ByteCount(view.saved.len_bytes).to_string(),
                date(view.saved.saved_at),
            ];
            let labels = self.labels_of(view).unwrap_or_default();
            let labels: Vec<&str> = labels.iter().map(Label::as_str).collect();
            row.extend(has_labels.then(|| labels.join(", ")));
            table.row(row);
        }
        table.render(paint) + &self.lines_below()
    }
}

struct Shown {
    report: ShowReport,
    /// The files of the stripe in the picture.
    files: StripeFiles,
    style: Style,
}

/// Returns the shard of which the picture shows the first stripe: the first one that has stripes.
fn shard_of_picture(report: &ShowReport) -> Option<&(ShardRoot, ShardState)> {
    report.shards.iter().find(|(_, state)| !state.runs.is_empty())
}

impl CommandOutput for Shown {
    fn json(&self) -> Map<String, Value> {
        let report = &self.report;
        let names: BTreeMap<NodeId, &PeerName> = report
            .nodes
            .iter()
            .map(|view| (NodeId::of(&view.node.name), &view.node.name))
            .collect();
        let shard = |(root, state): &(ShardRoot, ShardState)| {
            let states = States::of(state);
            let ring: Vec<String> = root
                .ring
                .iter()
                .map(|place| {
                    names
                        .get(&place.node)
                        .map_or_else(|| place.node.to_string(), ToString::to_string)
                })
                .collect();
            json!({
                "name": root.name, "shard": root.shard.to_string(), "bytes": root.len_bytes, "block_bytes": root.block_bytes,
                "n": root.n, "k": root.k, "generation": state.generation.to_string(), "ring": ring,
                "stripes": states.replicated + states.archiving + states.archived, "replicated": states.replicated,
                "archiving": states.archiving, "archived": states.archived, "undropped": states.undropped,
            })
        };
        let mut fields = step_json(&report.step);
        // The list of shards replaces the number of shards.
        fields.insert("shards".to_owned(), report.shards.iter().map(shard).collect());
        fields.insert("unchanged".to_owned(), json!(report.read_only_reason));
        fields
    }

    fn text(&self, paint: Paint) -> String {
        let report = &self.report;
        let view = &report.step;
        let title = format!("{}/{}", view.job, view.step);
        let mut out = format!(
            "{}  {} in {}, saved {} UTC, save {}, generation {}\n\n",
            paint.tint(Tint::Bold, &title),
            ByteCount(view.saved.len_bytes),
            counted(u64::from(view.saved.shards), "shard"),
            date(view.saved.saved_at),
            view.saved.save,
            view.saved.generation,
        );
        let mut table = Table::new(&["SHARD", ">SIZE", "CODE", ">BLOCK", "STRIPES"]);
        for (root, state) in report.shards.iter().take(LISTED) {
            table.row([
                root.name.to_string(),
                ByteCount(root.len_bytes).to_string(),
                format!("({},{})", root.n, root.k),
                first_block(root),
                States::of(state).words(),
            ]);
        }
        out.push_str(&table.render(paint));
        if report.shards.len() > LISTED {
            out.push_str(&format!("and {} more (--json has all)\n", report.shards.len() - LISTED));
        }
        if let Some((root, state)) = shard_of_picture(report) {
            out.push_str(&format!("\nStripe 0 of {}\n\n", shown(root.name.as_str())));
            let held = holdings(root, state, 0, &report.nodes, &self.files);
            out.push_str(&picture::map(&held, self.style));
        }
        if view.by_marks {
            out.push_str(BY_MARKS);
        }
        if let Some(why) = &report.read_only_reason {
            let answering = report.nodes.iter().filter(|view| view.live).count();
            let nodes = counted(report.nodes.len() as u64, "node");
            out.push_str(&format!("{answering} of {nodes} answer; {}\n", shown(why)));
        }
        out
    }
}

/// Returns the block length of the first stripe as text. In a shard shorter than a full stripe it is
/// less than the configured length.
fn first_block(root: &ShardRoot) -> String {
    let stripe = root.geometry().ok().and_then(|geometry| geometry.stripe(0));
    stripe.map_or_else(|| "-".to_owned(), |cut| ByteCount(cut.block_bytes).to_string())
}

struct Removed {
    step: ExactStep,
    answer: RemoveAnswer,
}

impl CommandOutput for Removed {
    fn json(&self) -> Map<String, Value> {
        let fields = json!({
            "job": self.step.job, "step": self.step.step, "confirmed": self.answer.confirmed, "waiting": self.answer.waiting,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let nodes = counted(u64::from(self.answer.confirmed), "node");
        let mut out = format!(
            "{} {}: {nodes} removed its files\n",
            paint.tint(Tint::Green, "removed"),
            self.step
        );
        if !self.answer.waiting.is_empty() {
            let names: Vec<&str> = self.answer.waiting.iter().map(PeerName::as_str).collect();
            out.push_str(&format!(
                "  not removed yet on {}: the cluster retries with increasing delay; `rapidraid status` shows the state of these nodes\n",
                names.join(", ")
            ));
        }
        out
    }
}
