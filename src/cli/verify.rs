//! `verify` of a step: makes every node check its copies of a checkpoint, and says how many more nodes
//! may be lost.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::args::Verify;
use super::interrupt::unless_interrupted;
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Table, Tint, shown};
use super::transfer::{counted, listed, named, pace, read_through, watch};
use super::words::AnyStep;
use super::{Front, Outcome, connect, verify_all};
use crate::client::{
    AbsentNode, Client, ClientError, Fault, HeldItem, Problem, ProgressFn, VerifyReport,
};
use crate::clock::{Clock, SystemClock};
use crate::id::{Job, Step};
use crate::units::ByteCount;

/// Maximum number of faults that are printed; JSON has more.
const LISTED: usize = 20;

/// Runs the command `verify`.
pub async fn run(front: &mut Front, options: Verify) -> Outcome {
    let Some(AnyStep { job, step }) = &options.step else {
        return verify_all::run(front, &options).await;
    };
    if options.quick {
        return read_through(front, &options.connect, (job, *step)).await;
    }
    let client = connect::client(&options.connect, &front.env).await?;
    let progress = watch(front, format!("verify {}", named(job, *step)));
    let verifying = verify_step(&client, (job, *step), options.mend, progress);
    let verified = until_interrupted(options.mend, verifying).await;
    connect::close(&client).await;
    Ok(Box::new(verified?.map_err(|error| connect::failure(&error))?))
}

/// Awaits a verify. If `mend` is set and a signal comes first, returns a failure that says what
/// becomes of the repairs. Otherwise a signal simply ends the process: nothing was changed.
pub(super) async fn until_interrupted<T>(
    mend: bool,
    verifying: impl Future<Output = T>,
) -> Result<T, CommandFailure> {
    if !mend {
        return Ok(verifying.await);
    }
    let what = "nodes that were told of damaged replicas repair them without the command";
    unless_interrupted(verifying, what, "run the command again to see what is left").await
}

/// Has the nodes check their copies of a committed step (`None`: the latest), and repair damaged
/// replicas if `mend` is set.
pub(super) async fn verify_step(
    client: &Client,
    (job, step): (&Job, Option<Step>),
    mend: bool,
    progress: ProgressFn,
) -> Result<Verified, ClientError> {
    let clock = SystemClock::new();
    let report = match mend {
        false => client.verify(job, step, progress).await?,
        true => client.verify_and_mend(job, step, progress).await?,
    };
    Ok(Verified { report, took: clock.now() })
}

/// The result for one checkpoint.
pub(super) struct Verified {
    pub(super) report: VerifyReport,
    took: Duration,
}

fn fault_json(fault: &Fault) -> Value {
    json!({
        "node": fault.node, "shard": fault.shard, "stripe": fault.stripe, "part": fault.held.to_string(),
        "wrong": fault.wrong.to_string(),
    })
}

/// Returns a summary such as `2 replicas damaged, 1 piece missing`. `count` is the number of all
/// faults; the last part counts those that `faults` does not list.
fn summary(faults: &[Fault], count: u64) -> String {
    let kind = |held: HeldItem| match held {
        HeldItem::Replica(_) => "replica",
        HeldItem::Piece(_) => "piece",
        _ => "record",
    };
    let is_missing = |fault: &Fault| fault.wrong == Problem::Missing;
    let mut parts = Vec::new();
    for (missing, word) in [(false, "damaged"), (true, "missing")] {
        for of in ["replica", "piece", "record"] {
            let these = faults
                .iter()
                .filter(|fault| is_missing(fault) == missing && kind(fault.held) == of)
                .count();
            if these > 0 {
                parts.push(format!("{} {word}", counted(these as u64, of)));
            }
        }
    }
    let more = count.saturating_sub(faults.len() as u64);
    if more > 0 {
        parts.push(format!("{more} more"));
    }
    parts.join(", ")
}

/// Returns one line for each reason, with its nodes.
fn by_reason(away: &[AbsentNode]) -> Vec<String> {
    let mut nodes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for AbsentNode { node, reason } in away {
        nodes.entry(reason).or_default().push(node);
    }
    nodes.iter().map(|(reason, nodes)| format!("{} ({reason})", nodes.join(", "))).collect()
}

impl Verified {
    /// Returns whether something is damaged or missing, or could not be examined on a node that
    /// answers, or whether it is not certain that the checkpoint can be read.
    pub(super) fn is_bad(&self) -> bool {
        let report = &self.report;
        report.fault_count > 0 || report.survives.is_none() || !report.failures.is_empty()
    }

    /// Returns how many more nodes may be lost, as text.
    fn margin(&self, paint: Paint) -> String {
        let report = &self.report;
        let weakest = report
            .weakest
            .as_ref()
            .map(|(shard, stripe)| format!("stripe {stripe} of {}", shown(&shard.to_string())));
        match report.survives {
            None => {
                let text = format!(
                    "it is not certain that the checkpoint can be read from the examined files: {}",
                    weakest.unwrap_or_default()
                );
                paint.tint(Tint::Red, &text)
            }
            Some(0) => {
                let text = format!(
                    "the loss of one more node may lose data: {}",
                    weakest.unwrap_or_default()
                );
                paint.tint(Tint::Yellow, &text)
            }
            Some(1) => "any 1 more node may be lost".into(),
            Some(many) => format!("any {many} more nodes may be lost"),
        }
    }
}

impl CommandOutput for Verified {
    fn json(&self) -> Map<String, Value> {
        let report = &self.report;
        let away: Vec<Value> = report
            .away
            .iter()
            .map(|away| json!({ "node": away.node, "reason": away.reason }))
            .collect();
        let failures: Vec<Value> = report
            .failures
            .iter()
            .map(|failure| json!({ "node": failure.node, "reason": failure.reason }))
            .collect();
        let all = |faults: &[Fault]| faults.iter().map(fault_json).collect::<Vec<Value>>();
        let weakest = report.weakest.as_ref();
        let weakest = weakest.map(|(shard, stripe)| json!({ "shard": shard, "stripe": stripe }));
        let fields = json!({
            "job": report.job, "step": report.step, "shards": report.shards, "stripes": report.stripes,
            "files": report.files, "bytes": report.file_bytes, "records": report.records,
            "seconds": self.took.as_secs_f64(), "nodes": report.nodes, "away": away,
            "faults": all(&report.faults), "fault_count": report.fault_count, "mended": all(&report.mended),
            "lacking": all(&report.lacking), "failures": failures, "survives": report.survives, "weakest": weakest, "incidents": report.incidents,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let report = &self.report;
        let (verb, state) = match self.is_bad() {
            false if report.away.is_empty() => {
                (paint.tint(Tint::Green, "verified"), "all is whole".to_owned())
            }
            false => (paint.tint(Tint::Green, "verified"), "what was examined is whole".to_owned()),
            true => {
                let faults = summary(&report.faults, report.fault_count);
                let faults = if faults.is_empty() { "nothing damaged".into() } else { faults };
                (paint.tint(Tint::Red, "examined"), faults)
            }
        };
        let mut out = format!(
            "{verb} {}/{}: {} in {} and {} on {}; {}; {state}; {}\n",
            report.job,
            report.step,
            ByteCount(report.file_bytes),
            counted(report.files, "file"),
            counted(report.records, "record"),
            counted(report.nodes.len() as u64, "node"),
            pace(report.file_bytes, self.took),
            self.margin(paint),
        );
        if !report.faults.is_empty() {
            let mut table = Table::new(&["NODE", "SHARD", ">STRIPE", "PART", "STATE"]);
            for fault in report.faults.iter().take(LISTED) {
                table.row([
                    fault.node.clone(),
                    fault.shard.to_string(),
                    fault.stripe.map_or("-".into(), |stripe| stripe.to_string()),
                    fault.held.to_string(),
                    fault.wrong.to_string(),
                ]);
            }
            out.push_str(&format!("\n{}", table.render(paint)));
            if report.faults.len() > LISTED {
                let more = report.fault_count - LISTED as u64;
                out.push_str(&format!("and {more} more (--json has more)\n"));
            }
            out.push('\n');
        }
        out.push_str(&listed("not examined", &by_reason(&report.away), paint));
        out.push_str(&listed("could not be examined", &by_reason(&report.failures), paint));
        let lacking = report.lacking.iter().map(|fault| {
            format!(
                "{} has no {} of {}; enough other nodes have one",
                fault.node, fault.held, fault.shard
            )
        });
        out.push_str(&listed("not held", &lacking.collect::<Vec<_>>(), paint));
        let mended = report.mended.iter().map(|fault| {
            let stripe = fault.stripe.unwrap_or_default();
            format!("{} of stripe {stripe} of {} on {}", fault.held, fault.shard, fault.node)
        });
        out.push_str(&listed("mended", &mended.collect::<Vec<_>>(), paint));
        out.push_str(&listed("incident", &report.incidents, paint));
        out.push_str(&self.advice(paint));
        out
    }

    fn exit_code(&self) -> u8 {
        u8::from(self.is_bad())
    }
}

impl Verified {
    fn advice(&self, paint: Paint) -> String {
        let report = &self.report;
        let has = |is: fn(&Fault) -> bool| report.faults.iter().any(is);
        let is_replica = |fault: &Fault| {
            matches!(
                (fault.held, fault.wrong),
                (HeldItem::Replica(_), Problem::Grains(_) | Problem::Damaged)
            )
        };
        let mut lines = Vec::new();
        if has(is_replica) {
            let what = format!("rapidraid verify --mend {}/{}", report.job, report.step);
            lines.push(format!(
                "`{what}` repairs damaged replicas of stripes that are not archived"
            ));
        }
        if report.faults.iter().any(|fault| !is_replica(fault)) {
            let what = format!("rapidraid repair {}/{}", report.job, report.step);
            lines.push(format!("`{what}` makes pieces, missing replicas and records again"));
        }
        lines.iter().map(|line| format!("{} {line}\n", paint.tint(Tint::Cyan, "hint:"))).collect()
    }
}
