//! `verify` without a step: has the nodes check their copies of all committed checkpoints.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::args::Verify;
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Tint};
use super::transfer::{counted, pace, watch};
use super::verify::{Verified, until_interrupted, verify_step};
use super::{Front, Outcome, connect};
use crate::client::Client;
use crate::clock::{Clock, SystemClock};
use crate::id::{Job, Step};
use crate::kind::ErrorKind;
use crate::units::ByteCount;

/// Verifies all committed checkpoints, one after the other.
pub async fn run(front: &mut Front, options: &Verify) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let clock = SystemClock::new();
    let verified = until_interrupted(options.mend, verify_all(front, &client, options.mend)).await;
    let took = clock.now();
    connect::close(&client).await;
    let (steps, not_verified) = verified??;
    Ok(Box::new(AllVerified { steps, not_verified, took }))
}

/// Verifies the checkpoints of the cluster. Returns the results, and the number of checkpoints that
/// were left out because the cluster did not answer any more.
async fn verify_all(
    front: &mut Front,
    client: &Client,
    mend: bool,
) -> Result<(Vec<StepResult>, usize), CommandFailure> {
    let steps = client.list_steps(None).await.map_err(|error| connect::failure(&error))?;
    let count = steps.len();
    let mut results = Vec::new();
    for (number, view) in (1..).zip(steps) {
        let (job, step) = (view.job, view.step);
        front.printer.note(&format!("checkpoint {number} of {count}: {job}/{step}"));
        let progress = watch(front, format!("verify {job}/{step}"));
        let verified = verify_step(client, (&job, Some(step)), mend, progress).await;
        if verified.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            // The step was removed since the list was made.
            continue;
        }
        let is_away = verified.as_ref().is_err_and(|error| error.kind().is_transient());
        let result = verified.map_err(|error| connect::failure(&error));
        results.push(StepResult { job, step, result });
        if is_away {
            // A node that does not answer causes no error: the report lists it. So this error
            // concerns the cluster as a whole, and the next checkpoint would fail in the same way.
            return Ok((results, count - number));
        }
    }
    Ok((results, 0))
}

/// The result for one step.
struct StepResult {
    job: Job,
    step: Step,
    result: Result<Verified, CommandFailure>,
}

impl StepResult {
    fn is_bad(&self) -> bool {
        self.result.as_ref().map_or(true, Verified::is_bad)
    }

    /// Returns how many more nodes may be lost. Returns `None` if it is not certain that the step can
    /// be read.
    fn survives(&self) -> Option<usize> {
        self.result.as_ref().ok()?.report.survives
    }

    fn json(&self) -> Value {
        match &self.result {
            Ok(verified) => Value::Object(verified.json()),
            Err(failure) => {
                json!({ "job": self.job, "step": self.step, "error": failure.message })
            }
        }
    }
}

struct AllVerified {
    steps: Vec<StepResult>,
    not_verified: usize,
    took: Duration,
}

impl AllVerified {
    fn count_bad(&self) -> usize {
        self.steps.iter().filter(|step| step.is_bad()).count()
    }

    /// Returns how many more nodes may be lost without the loss of any checkpoint. Returns `None`
    /// if it is not certain that each checkpoint can be read: `None` is less than any number.
    fn survives(&self) -> Option<usize> {
        self.steps.iter().map(StepResult::survives).min().flatten()
    }

    fn file_bytes(&self) -> u64 {
        let verified = self.steps.iter().filter_map(|step| step.result.as_ref().ok());
        verified.map(|verified| verified.report.file_bytes).sum()
    }

    fn summary(&self, paint: Paint) -> String {
        if self.steps.is_empty() && self.not_verified == 0 {
            return "no checkpoint to verify\n".to_owned();
        }
        let (steps, bad) = (counted(self.steps.len() as u64, "checkpoint"), self.count_bad());
        let (word, state) = match bad {
            0 => (paint.tint(Tint::Green, "verified"), "none is damaged".to_owned()),
            bad => (paint.tint(Tint::Red, "examined"), format!("{bad} of them not whole")),
        };
        let losses = match self.survives() {
            None => "not all of them are known to be readable".to_owned(),
            Some(0) => "the loss of one more node may lose data".to_owned(),
            Some(count) => format!("any {} may be lost", counted(count as u64, "more node")),
        };
        let (bytes, pace) = (ByteCount(self.file_bytes()), pace(self.file_bytes(), self.took));
        let mut out = format!("{word} {steps}: {bytes} in files; {pace}; {state}; {losses}\n");
        if self.not_verified > 0 {
            let left = counted(self.not_verified as u64, "checkpoint");
            let word = paint.tint(Tint::Red, "not verified");
            out.push_str(&format!("{word}: {left}, because the cluster does not answer\n"));
        }
        out
    }
}

impl CommandOutput for AllVerified {
    fn json(&self) -> Map<String, Value> {
        let steps: Vec<Value> = self.steps.iter().map(StepResult::json).collect();
        let fields = json!({
            "steps": steps, "bad": self.count_bad(), "not_verified": self.not_verified,
            "survives": self.survives(), "seconds": self.took.as_secs_f64(),
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let mut out = String::new();
        for step in &self.steps {
            match &step.result {
                Ok(verified) => out.push_str(&verified.text(paint)),
                Err(failure) => {
                    let word = paint.tint(Tint::Red, "not verified");
                    out.push_str(&format!(
                        "{word} {}/{}: {}\n",
                        step.job, step.step, failure.message
                    ));
                }
            }
        }
        out + &self.summary(paint)
    }

    fn exit_code(&self) -> u8 {
        u8::from(self.count_bad() > 0 || self.not_verified > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(step: u64) -> StepResult {
        let result = Err(CommandFailure::new(ErrorKind::Unavailable, "no node answers"));
        StepResult { job: "gpt".parse().unwrap(), step: Step(step), result }
    }

    #[test]
    fn what_was_not_verified_is_counted_and_fails_the_command() {
        let took = Duration::ZERO;
        let none = AllVerified { steps: Vec::new(), not_verified: 0, took };
        let text = none.text(Paint::PLAIN);
        assert_eq!((text.as_str(), none.exit_code()), ("no checkpoint to verify\n", 0));
        let some = AllVerified { steps: vec![failed(7)], not_verified: 3, took };
        let text = some.text(Paint::PLAIN);
        assert!(text.starts_with("not verified gpt/7: no node answers\n"), "{text}");
        assert!(text.contains("1 of them not whole; not all of them are known"), "{text}");
        assert!(text.ends_with("3 checkpoints, because the cluster does not answer\n"), "{text}");
        assert_eq!((some.exit_code(), some.survives()), (1, None));
        let json = some.json();
        let counts = ["bad", "not_verified"].map(|field| json[field].as_u64());
        assert_eq!(counts, [Some(1), Some(3)]);
        assert_eq!(json["steps"][0]["error"], "no node answers");
    }
}
