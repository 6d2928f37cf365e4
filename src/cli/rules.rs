//! The policy as text for `status`: the rules in force, and the steps that wait.

use serde_json::{Value, json};

use super::table::shown;
use super::transfer::counted;
use crate::wire::policy::{PolicyAnswer, PolicyRule};

/// Returns the policy as JSON.
pub fn json(policy: &PolicyAnswer) -> Value {
    let rule = |rule: &PolicyRule| {
        json!({
            "job": rule.job, "archive_all_but": rule.archive_all_but, "keep_newest": rule.keep_newest,
            "keep_every": rule.keep_every,
        })
    };
    let waiting = policy.waiting.iter().map(|wait| {
        json!({ "job": wait.job, "step": wait.step, "failures": wait.failures, "why": wait.why })
    });
    json!({
        "rules": policy.rules.iter().map(rule).collect::<Vec<_>>(), "to_archive": policy.to_archive,
        "to_retire": policy.to_retire, "removing": policy.removing, "waiting": waiting.collect::<Vec<_>>(),
    })
}

/// Returns the policy as text: a line for each rule, one for the work in progress, and one for each
/// step that waits.
pub fn text(policy: &PolicyAnswer) -> String {
    let mut out = String::new();
    for rule in &policy.rules {
        let whose = rule.job.as_ref().map_or_else(String::new, |job| format!(" for job {job}"));
        out.push_str(&format!("policy{whose}: {}\n", words(rule)));
    }
    // One step may have several saves that are being removed, some of which were never committed.
    let parts = [
        (policy.to_archive, "step", "to archive"),
        (policy.to_retire, "step", "to remove"),
        (policy.removing, "save", "being removed"),
    ];
    let parts: Vec<String> = parts
        .iter()
        .filter(|(number, ..)| *number > 0)
        .map(|(number, noun, what)| format!("{} {what}", counted(*number, noun)))
        .collect();
    if !parts.is_empty() {
        out.push_str(&format!("policy: {}\n", parts.join(", ")));
    }
    for wait in &policy.waiting {
        let times = counted(u64::from(wait.failures), "time");
        let (job, step, why) = (&wait.job, wait.step, shown(&wait.why));
        out.push_str(&format!("waits: {job}/{step}, tried {times}: {why}\n"));
    }
    out
}

fn words(rule: &PolicyRule) -> String {
    let archived = match rule.archive_all_but {
        None => "nothing is archived".to_owned(),
        Some(0) => "every step is archived".to_owned(),
        Some(1) => "all but the newest step are archived".to_owned(),
        Some(newest) => format!("all but the newest {newest} steps are archived"),
    };
    let kept = match (rule.keep_newest, rule.keep_every) {
        (None, _) => "all are kept".to_owned(),
        (Some(newest), None) => format!("the newest {newest} are kept"),
        (Some(newest), Some(every)) => {
            format!("the newest {newest} are kept, and those divisible by {every}")
        }
    };
    format!("{archived}, {kept}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Step;
    use crate::wire::policy::PolicyWait;

    #[test]
    fn rules_and_what_waits_are_said() {
        let rule = |job: Option<&str>, archive_all_but, keep_newest, keep_every| PolicyRule {
            job: job.map(|job| job.parse().unwrap()),
            archive_all_but,
            keep_newest,
            keep_every,
        };
        let why = "node03 is away".to_owned();
        let wait = PolicyWait { job: "gpt".parse().unwrap(), step: Step(12), failures: 3, why };
        let policy = PolicyAnswer {
            rules: vec![
                rule(None, Some(2), None, Some(5)),
                rule(Some("gpt"), Some(1), Some(20), Some(1000)),
                rule(Some("tmp"), None, Some(1), None),
            ],
            to_archive: 1,
            to_retire: 0,
            removing: 3,
            waiting: vec![wait],
        };
        assert_eq!(
            text(&policy),
            "policy: all but the newest 2 steps are archived, all are kept\n\
             policy for job gpt: all but the newest step are archived, the newest 20 are kept, and those divisible by 1000\n\
             policy for job tmp: nothing is archived, the newest 1 are kept\n\
             policy: 1 step to archive, 3 saves being removed\n\
             waits: gpt/12, tried 3 times: node03 is away\n"
        );
        assert_eq!(json(&policy)["waiting"][0]["job"], "gpt");
        assert_eq!(text(&PolicyAnswer::default()), "");
    }
}
