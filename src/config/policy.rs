//! The policy for committed steps: which stay replicated, which are archived and which are retired.
//!
//! [`Rule::fate`] decides by a step's number and by its place among the job's committed steps, and
//! by nothing else. docs/semantics.md, section 9, describes which daemon applies the policy, and
//! how.

use std::collections::BTreeMap;

use super::error::ConfigError;
use super::layers::{Layers, Value};
use crate::id::{Job, Step};

/// Maximum number of rules for single jobs in one configuration.
pub const MAX_JOBS: usize = 256;

/// The section with the rules for single jobs.
const JOBS: &str = "policy.job";

/// The rule for the committed steps of one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Number of newest steps that stay replicated; older ones are archived. `None`: no step is
    /// archived.
    pub archive_all_but: Option<u32>,
    /// Number of newest steps that are kept. `None`: all steps are kept.
    pub keep_newest: Option<u32>,
    /// Steps whose number is divisible by this are kept forever. `None`: no step is kept for its
    /// number.
    pub keep_every: Option<u64>,
}

/// The action that a rule prescribes for a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The step stays as it is.
    Stays,
    /// The step is archived.
    Archived,
    /// The step is retired, i.e. removed.
    Retired,
}

impl Rule {
    /// The rule by which no step is archived or retired.
    pub const NOTHING: Rule = Rule { archive_all_but: None, keep_newest: None, keep_every: None };

    /// Returns the action for `step` when `newer` newer steps of its job are committed. The newest
    /// step is never retired.
    pub fn fate(&self, step: Step, newer: u64) -> Fate {
        let is_kept = self.keep_every.is_some_and(|every| step.0.checked_rem(every) == Some(0));
        if newer > 0 && is_beyond(self.keep_newest, newer) && !is_kept {
            Fate::Retired
        } else if is_beyond(self.archive_all_but, newer) {
            Fate::Archived
        } else {
            Fate::Stays
        }
    }

    /// Returns whether the rule may prescribe an action for a step with `newer` newer steps. If
    /// this returns `false`, the rule prescribes no action for the newer steps either.
    pub fn touches(&self, newer: u64) -> bool {
        is_beyond(self.keep_newest, newer) || is_beyond(self.archive_all_but, newer)
    }
}

fn is_beyond(newest: Option<u32>, newer: u64) -> bool {
    newest.is_some_and(|newest| newer >= u64::from(newest))
}

impl Default for Rule {
    fn default() -> Self {
        Self { archive_all_but: Some(2), ..Self::NOTHING }
    }
}

/// The policy of a cluster: which committed steps are archived, and which are retired.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// The rule for all jobs without a rule of their own.
    pub rule: Rule,
    /// The rules for single jobs.
    pub jobs: BTreeMap<Job, Rule>,
}

impl Policy {
    /// Returns the rule for a job.
    pub fn of(&self, job: &Job) -> Rule {
        self.jobs.get(job).copied().unwrap_or(self.rule)
    }

    /// Reads the policy. A job's rule inherits each setting that it does not have from the rule for
    /// all jobs.
    pub(super) fn read(layers: &Layers<'_>) -> Result<Self, ConfigError> {
        let rule = read_rule(layers, None, Rule::default())?;
        let mut jobs = BTreeMap::new();
        for (at, name) in layers.tables(JOBS).enumerate() {
            let wrong = |expected| layers.wrong_table(JOBS, name, expected);
            if at >= MAX_JOBS {
                return Err(wrong("rules for at most 256 jobs"));
            }
            let job: Job =
                name.parse().map_err(|_| wrong("a job's name, 1 to 128 of A-Z a-z 0-9 . _ -"))?;
            jobs.insert(job, read_rule(layers, Some(name), rule)?);
        }
        Ok(Self { rule, jobs })
    }
}

fn read_rule(layers: &Layers<'_>, job: Option<&str>, otherwise: Rule) -> Result<Rule, ConfigError> {
    let or_never = "a whole number of steps, or \"never\"";
    let or_all = "a whole number of steps from 1, or \"all\"";
    let every = "a whole number from 1, or \"never\"";
    let keys = match job {
        None => ["policy.archive_all_but", "policy.keep_newest", "policy.keep_every"],
        Some(_) => super::JOB_SETTINGS,
    };
    let [archive_all_but, keep_newest, keep_every] = keys;
    let read = |key, expected, none, least| {
        layers.get_in(key, job, expected, |value| number_or(value, none, least))
    };
    let small = |found: Option<u64>| found.map(|steps| u32::try_from(steps).unwrap_or(u32::MAX));
    Ok(Rule {
        archive_all_but: read(archive_all_but, or_never, "never", 0)?
            .map_or(otherwise.archive_all_but, small),
        keep_newest: read(keep_newest, or_all, "all", 1)?.map_or(otherwise.keep_newest, small),
        keep_every: read(keep_every, every, "never", 1)?.unwrap_or(otherwise.keep_every),
    })
}

/// Reads a number of at least `least`, or the word `none`. The inner `None` stands for the word.
fn number_or(value: &Value, none: &str, least: u64) -> Option<Option<u64>> {
    if value.text() == Some(none) {
        return Some(None);
    }
    u64::try_from(value.integer()?).ok().filter(|number| *number >= least).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the actions for steps `1..=count`, newest first.
    fn fates(rule: Rule, count: u64) -> Vec<Fate> {
        (0..count).map(|newer| rule.fate(Step(count - newer), newer)).collect()
    }

    #[test]
    fn the_newest_stay_and_the_rest_is_archived_or_retired() {
        use Fate::{Archived, Retired, Stays};
        let rule = Rule { archive_all_but: Some(1), keep_newest: Some(3), keep_every: Some(4) };
        assert_eq!(
            fates(rule, 9),
            [Stays, Archived, Archived, Retired, Retired, Archived, Retired, Retired, Retired]
        );
        assert_eq!(fates(Rule::default(), 4), [Stays, Stays, Archived, Archived]);
        assert_eq!(fates(Rule::NOTHING, 3), [Stays; 3]);
        let at_once = Rule { archive_all_but: Some(0), ..Rule::NOTHING };
        assert_eq!(fates(at_once, 2), [Archived; 2]);
    }

    #[test]
    fn the_newest_is_never_retired() {
        for keep_newest in [Some(0), Some(1), None] {
            let rule = Rule { keep_newest, ..Rule::NOTHING };
            assert_eq!(rule.fate(Step(7), 0), Fate::Stays);
        }
        let rule = Rule { keep_newest: Some(1), keep_every: Some(0), ..Rule::NOTHING };
        assert_eq!(rule.fate(Step(0), 1), Fate::Retired, "nothing is divisible by 0");
    }
}
