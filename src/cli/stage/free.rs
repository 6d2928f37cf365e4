//! `stage --free`: frees a job's memory on this host, and says which steps stay and which are lost.
//!
//! The daemon answers with a number of bytes only, so the command compares its status before and
//! after. A step that changes in between may be missing from the output.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::{DAEMON, ask_status, with_session};
use crate::cli::Outcome;
use crate::cli::printer::{CommandFailure, CommandOutput};
use crate::cli::table::{Paint, shown};
use crate::config::ClientConfig;
use crate::id::{Job, Step};
use crate::kind::ErrorKind;
use crate::trainer::StagingError;
use crate::trainer::protocol::{Answer, Request, Status, StepStatus};
use crate::units::ByteCount;

/// The state of a committed step.
const COMMITTED: &str = "committed";
/// The state of a step that not all ranks have staged.
const FILLING: &str = "filling";

/// Runs the command `stage --free`. With `is_forced` also frees steps that are not committed.
pub async fn run(dir: PathBuf, config: &ClientConfig, job: Job, is_forced: bool) -> Outcome {
    let request = Request::Free { job: job.clone(), with_unsaved: is_forced };
    let freed = with_session(dir, config, move |session, wait| {
        let before = ask_status(session, wait)?;
        let bytes = match session.ask(DAEMON, &request, wait)? {
            (Answer::Freed { bytes }, _) => bytes,
            _ => return Err(StagingError::Unexpected { what: DAEMON }),
        };
        Ok((before, bytes, ask_status(session, wait)?))
    });
    let (before, bytes, after) = freed.await?;
    match (steps_of(&before, &job), steps_of(&after, &job)) {
        (None, None) if bytes == 0 => {
            let message = format!(
                "the staging daemon has no steps of job {job}, and no memory of it to give back"
            );
            Err(CommandFailure::new(ErrorKind::NotFound, message)
                .with_hint("`rapidraid stage --status` shows the jobs of this host"))
        }
        (before, after) => {
            let (before, after) = (before.unwrap_or_default(), after.unwrap_or_default());
            Ok(Box::new(Freed::new(bytes, before, after, is_forced)))
        }
    }
}

/// Returns the steps of a job that the daemon knows.
fn steps_of<'a>(status: &'a Status, job: &Job) -> Option<&'a [StepStatus]> {
    let found = status.jobs.iter().find(|found| found.job == *job)?;
    Some(&found.steps)
}

struct Freed {
    bytes: u64,
    kept: Vec<KeptStep>,
    /// The steps that were dropped although they were not committed.
    dropped: BTreeSet<Step>,
}

/// A step whose memory was not freed.
struct KeptStep {
    step: Step,
    state: String,
    reason: &'static str,
}

impl Freed {
    fn new(bytes: u64, before: &[StepStatus], after: &[StepStatus], is_forced: bool) -> Self {
        let kept = after.iter().map(|step| KeptStep {
            step: step.step,
            state: step.state.clone(),
            reason: reason_to_keep(&step.state, is_forced),
        });
        // Two launches may have staged the same step, so its copies are counted. A copy that was
        // committed meanwhile is not lost.
        let count = |steps: &[StepStatus], step: Step, is_committed: bool| {
            let is_it = |found: &&StepStatus| {
                found.step == step && (found.state == COMMITTED) == is_committed
            };
            steps.iter().filter(is_it).count()
        };
        let is_dropped = |step: &Step| {
            count(after, *step, false) < count(before, *step, false)
                && count(after, *step, true) <= count(before, *step, true)
        };
        // A step that was being filled is dropped by its ranks' end, never by this request.
        let unsaved = before.iter().filter(|step| is_forced && step.state != FILLING);
        let dropped = unsaved.map(|step| step.step).filter(is_dropped).collect();
        Self { bytes, kept: kept.collect(), dropped }
    }
}

/// Returns the reason why a step stays, as far as its state tells.
fn reason_to_keep(state: &str, is_forced: bool) -> &'static str {
    match state {
        FILLING => "its ranks have not staged all of it yet",
        COMMITTED => "a process of this host still uses its memory",
        _ if is_forced => "a process of this host still uses its memory",
        _ => "it is not committed yet; --force drops such a step when no process uses its memory",
    }
}

impl CommandOutput for Freed {
    fn json(&self) -> Map<String, Value> {
        let kept = |kept: &KeptStep| json!({ "step": kept.step, "state": kept.state, "reason": kept.reason });
        let kept: Vec<Value> = self.kept.iter().map(kept).collect();
        Map::from_iter([
            ("freed_bytes".to_owned(), json!(self.bytes)),
            ("kept".to_owned(), Value::Array(kept)),
            ("dropped".to_owned(), json!(self.dropped)),
        ])
    }

    fn text(&self, _: Paint) -> String {
        let mut out = format!("{} given back\n", ByteCount(self.bytes));
        for step in &self.dropped {
            out.push_str(&format!(
                "step {step} is dropped: it was not committed when the command began\n"
            ));
        }
        for KeptStep { step, state, reason } in &self.kept {
            out.push_str(&format!("step {step} ({}) stays: {reason}\n", shown(state)));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(states: &[(u64, &str)]) -> Vec<StepStatus> {
        let step = |&(step, state): &(u64, &str)| StepStatus {
            step: Step(step),
            state: state.to_owned(),
            len_bytes: 1,
            staged: 1,
            world: 1,
        };
        states.iter().map(step).collect()
    }

    #[test]
    fn steps_that_stay_or_are_lost_are_named() {
        let before = steps(&[(1, "committed"), (2, "saving"), (3, "waits for h2"), (4, "filling")]);
        let after = steps(&[(1, "committed"), (3, "waits for h2"), (4, "filling")]);
        let forced = Freed::new(7, &before, &after, true);
        assert_eq!(
            forced.text(Paint::PLAIN),
            "7 B given back\n\
             step 2 is dropped: it was not committed when the command began\n\
             step 1 (committed) stays: a process of this host still uses its memory\n\
             step 3 (waits for h2) stays: a process of this host still uses its memory\n\
             step 4 (filling) stays: its ranks have not staged all of it yet\n"
        );
        let told = Value::Object(forced.json());
        assert_eq!((&told["freed_bytes"], &told["dropped"]), (&json!(7), &json!([2])), "{told}");
        assert_eq!(
            (&told["kept"][1]["step"], &told["kept"][1]["state"]),
            (&json!(3), &json!("waits for h2"))
        );
        let mild = Freed::new(0, &before, &before, false);
        assert!(mild.dropped.is_empty());
        assert!(
            mild.text(Paint::PLAIN)
                .contains("step 2 (saving) stays: it is not committed yet; --force")
        );
    }

    #[test]
    fn a_step_that_was_committed_meanwhile_is_not_lost() {
        let dropped = |before: &[(u64, &str)], after: &[(u64, &str)]| {
            Freed::new(0, &steps(before), &steps(after), true).dropped.len()
        };
        assert_eq!(dropped(&[(1, "saving")], &[(1, "committed")]), 0);
        assert_eq!(dropped(&[(1, "committed"), (1, "saving")], &[(1, "committed")]), 1);
        assert_eq!(dropped(&[(1, "committed"), (1, "saving")], &[(1, "saving")]), 0);
        assert_eq!(dropped(&[(1, "filling")], &[]), 0);
    }
}
