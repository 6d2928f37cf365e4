//! The safety of the checkpoints as text for `status`: how many nodes may be lost, and what is
//! being repaired automatically.

use std::time::Duration;

use serde_json::{Value, json};

use super::table::{Paint, Tint, shown};
use super::transfer::counted;
use crate::units::ByteCount;
use crate::wire::calls::{DegradedStep, RepairStatus, SurveyResult};

/// Maximum number of degraded checkpoints that the text names.
const NAMED: usize = 5;

/// Returns the state of repairs as JSON.
pub fn json(status: &RepairStatus) -> Value {
    let degraded = |step: &DegradedStep| {
        json!({
            "job": step.job, "step": step.step, "survives": step.survives, "missing": step.missing,
            "missing_bytes": step.missing_bytes, "records": step.records,
        })
    };
    let survey = status.survey.as_ref().map(|survey| {
        json!({
            "age_s": Duration::from_millis(survey.age_ms).as_secs_f64(), "steps": survey.steps,
            "unknown": survey.unknown, "survives": survey.survives, "degraded": survey.degraded,
            "missing": survey.missing, "missing_bytes": survey.missing_bytes,
            "records": survey.records, "worst": survey.worst.iter().map(degraded).collect::<Vec<_>>(),
        })
    });
    let running = status.running.as_ref().map(|repair| {
        json!({
            "job": repair.job, "step": repair.step, "done_bytes": repair.done_bytes,
            "total_bytes": repair.total_bytes, "made_bytes": repair.made_bytes,
        })
    });
    let waiting = status.waiting.iter().map(|wait| {
        json!({ "job": wait.job, "step": wait.step, "failures": wait.failures, "why": wait.why })
    });
    let maintenance = status.maintenance.iter();
    let maintenance: Vec<_> =
        maintenance.map(|(node, left)| json!({ "node": node, "seconds_left": left })).collect();
    json!({
        "share_percent": status.share_percent, "survey": survey, "running": running,
        "brake": status.brake, "maintenance": maintenance, "waiting": waiting.collect::<Vec<_>>(),
    })
}

/// Returns the lines that begin `status`: how many nodes may be lost, which checkpoints are
/// degraded, and what is repaired.
pub fn text(status: &RepairStatus, paint: Paint) -> String {
    let Some(survey) = &status.survey else {
        return "safety: not known yet; the first survey of all checkpoints has not ended\n".into();
    };
    let mut out = format!("safety: {}\n", safety(survey, paint));
    if survey.unknown > 0 {
        let steps = counted(survey.unknown, "checkpoint");
        out.push_str(&format!(
            "{steps} could not be surveyed: a node did not answer or runs an older program, the checkpoint was changing, or a record of it is damaged\n"
        ));
    }
    if survey.degraded > 0 {
        let missing = missing(survey.missing, survey.missing_bytes, survey.records);
        let steps = counted(survey.degraded, "checkpoint");
        out.push_str(&format!("degraded: {steps}, {missing}\n"));
        let named = survey.worst.len().min(NAMED);
        for step in survey.worst.iter().take(named) {
            let parts = self::missing(step.missing, step.missing_bytes, step.records);
            let losses = losses(step.survives);
            out.push_str(&format!("  {}/{}: {losses}; {parts}\n", step.job, step.step));
        }
        let more = survey.degraded.saturating_sub(named as u64);
        if more > 0 {
            out.push_str(&format!("  and {more} more\n"));
        }
    }
    if let Some(repair) = &status.running {
        let percent = (100 * u128::from(repair.done_bytes))
            .checked_div(repair.total_bytes.into())
            .unwrap_or(100);
        let made = ByteCount(repair.made_bytes);
        let (job, step) = (&repair.job, repair.step);
        out.push_str(&format!("repair: {job}/{step}, {percent} % examined, {made} made\n"));
    }
    if let Some(why) = &status.brake {
        let text = format!("brake: lost parts are not made on other nodes: {}", shown(why));
        out.push_str(&format!("{}\n", paint.tint(Tint::Yellow, &text)));
    }
    for (node, left) in &status.maintenance {
        let minutes = left.div_ceil(60);
        out.push_str(&format!("maintenance: {node}, for another {minutes} min\n"));
    }
    if survey.degraded > 0 && status.share_percent == 0 {
        out.push_str("repair: turned off (repair.share = 0); `rapidraid repair` repairs now\n");
    }
    for wait in &status.waiting {
        let times = counted(wait.failures.into(), "time");
        let (job, step, why) = (&wait.job, wait.step, shown(&wait.why));
        out.push_str(&format!("not repaired: {job}/{step}, tried {times}: {why}\n"));
    }
    out
}

fn safety(survey: &SurveyResult, paint: Paint) -> String {
    let steps = counted(survey.steps, "checkpoint");
    let age = Duration::from_millis(survey.age_ms).as_secs();
    if survey.steps == 0 {
        return format!("no checkpoint was committed at the last survey, {age} s ago");
    }
    if survey.steps == survey.unknown {
        return format!("not known; {steps}, surveyed {age} s ago");
    }
    let tint = match survey.survives {
        None | Some(0) => Tint::Red,
        _ if survey.degraded > 0 || survey.unknown > 0 => Tint::Yellow,
        _ => Tint::Green,
    };
    let losses = match survey.survives {
        None => "a checkpoint cannot be read from the nodes that answer".to_owned(),
        some => losses(some),
    };
    format!("{}; {steps}, surveyed {age} s ago", paint.tint(tint, &losses))
}

/// Returns how many nodes may be lost, as text.
fn losses(survives: Option<u32>) -> String {
    match survives {
        None => "cannot be read from the nodes that answer".to_owned(),
        Some(0) => "the loss of one more node may lose data".to_owned(),
        Some(1) => "any 1 more node may be lost".to_owned(),
        Some(many) => format!("any {many} more nodes may be lost"),
    }
}

fn missing(parts: u64, bytes: u64, records: u64) -> String {
    let records = counted(records, "record");
    let parts = match parts {
        0 => return format!("{records} missing"),
        1 => format!("1 piece or replica missing ({})", ByteCount(bytes)),
        many => format!("{many} pieces or replicas missing ({})", ByteCount(bytes)),
    };
    if records.starts_with("0 ") { parts } else { format!("{parts}, {records} missing") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Step;
    use crate::wire::calls::RunningRepair;
    use crate::wire::policy::PolicyWait;

    const PLAIN: Paint = Paint { colour: false };

    #[test]
    fn what_may_be_lost_is_the_first_line() {
        let survey = SurveyResult {
            age_ms: 12_999,
            steps: 24,
            survives: Some(2),
            ..SurveyResult::default()
        };
        let whole = RepairStatus { survey: Some(survey.clone()), ..RepairStatus::default() };
        assert_eq!(
            text(&whole, PLAIN),
            "safety: any 2 more nodes may be lost; 24 checkpoints, surveyed 12 s ago\n"
        );
        let step = |number, survives, records| DegradedStep {
            job: "gpt".parse().unwrap(),
            step: Step(number),
            survives,
            missing: 5,
            missing_bytes: 5 << 26,
            records,
        };
        let survey = SurveyResult {
            survives: Some(0),
            degraded: 7,
            missing: 14,
            missing_bytes: 14 << 26,
            worst: vec![step(1200, Some(0), 0), step(1300, Some(1), 3)],
            ..survey
        };
        let running = RunningRepair {
            job: "gpt".parse().unwrap(),
            step: Step(1200),
            done_bytes: 1 << 28,
            total_bytes: 1 << 30,
            made_bytes: 1 << 26,
        };
        let wait = PolicyWait {
            job: "gpt".parse().unwrap(),
            step: Step(1300),
            failures: 2,
            why: "node3 is full".into(),
        };
        let degraded = RepairStatus {
            survey: Some(survey),
            running: Some(running),
            brake: Some("3 of 16 storage nodes went away at about the same time".into()),
            waiting: vec![wait],
            ..whole
        };
        assert_eq!(
            text(&degraded, PLAIN),
            "safety: the loss of one more node may lose data; 24 checkpoints, surveyed 12 s ago\n\
             degraded: 7 checkpoints, 14 pieces or replicas missing (896.0 MiB)\n  \
             gpt/1200: the loss of one more node may lose data; 5 pieces or replicas missing (320.0 MiB)\n  \
             gpt/1300: any 1 more node may be lost; 5 pieces or replicas missing (320.0 MiB), 3 records missing\n  \
             and 5 more\n\
             repair: gpt/1200, 25 % examined, 64.0 MiB made\n\
             brake: lost parts are not made on other nodes: 3 of 16 storage nodes went away at about the same time\n\
             repair: turned off (repair.share = 0); `rapidraid repair` repairs now\n\
             not repaired: gpt/1300, tried 2 times: node3 is full\n"
        );
        assert_eq!(json(&degraded)["survey"]["worst"][1]["records"], 3);
    }
}
