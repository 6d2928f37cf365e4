//! The answer of the catalogue server about its policy, and the pause of retention.

use serde::{Deserialize, Serialize};

use crate::id::{Job, Step};

/// Answer to [`GetPolicyStatus`](super::calls::GetPolicyStatus).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyAnswer {
    /// The rules in force. The first applies to all jobs that have no rule of their own.
    pub rules: Vec<PolicyRule>,
    /// Number of committed steps that are to be archived and are not known to be archived. After a
    /// start of the catalogue server the number is too high until the server has inspected all of
    /// these steps.
    pub to_archive: u64,
    /// Number of committed steps that are to be retired.
    pub to_retire: u64,
    /// Number of removed saves whose removal not all nodes have confirmed.
    pub removing: u64,
    /// Work that failed and will be retried, whether the policy or a client requested it; the first
    /// 64.
    pub waiting: Vec<PolicyWait>,
}

/// A change of the pause of retention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RetentionChange {
    /// Nothing changes.
    None,
    /// Retention is paused.
    Pause,
    /// Retention goes on.
    Resume,
}

/// A rule of the policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRule {
    /// The job that the rule applies to; `None`: all jobs without a rule of their own.
    pub job: Option<Job>,
    /// Number of newest steps that stay replicated; `None`: no step is archived.
    pub archive_all_but: Option<u32>,
    /// Number of newest steps that are kept; `None`: all.
    pub keep_newest: Option<u32>,
    /// Steps divisible by this number are never retired.
    pub keep_every: Option<u64>,
}

/// Work on a step that failed and will be retried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyWait {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Number of consecutive failures.
    pub failures: u32,
    /// The message of the last failure, for users.
    pub why: String,
}
