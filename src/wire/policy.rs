//! What the catalogue's host says about its policy.

use serde::{Deserialize, Serialize};

use crate::id::{Job, Step};

/// Answer to [`GetPolicyStatus`](super::calls::GetPolicyStatus).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyAnswer {
    /// The rules in force; the first is that of all jobs without one of their own.
    pub rules: Vec<PolicyRule>,
    /// Committed steps that are to be archived and are not known to be: more than there really are until the host has looked
    /// at all of them after its start.
    pub to_archive: u64,
    /// Committed steps that are to be retired.
    pub to_retire: u64,
    /// Removed saves that nodes have not all confirmed.
    pub removing: u64,
    /// What failed and is tried again, by whomever it was asked for; the first 64.
    pub waiting: Vec<PolicyWait>,
}

/// A rule of the policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRule {
    /// Only for this job.
    pub job: Option<Job>,
    /// So many of the newest stay replicated; `None`: nothing is archived.
    pub archive_all_but: Option<u32>,
    /// So many of the newest are kept; `None`: all.
    pub keep_newest: Option<u32>,
    /// Steps divisible by this are kept for ever.
    pub keep_every: Option<u64>,
}

/// Work on a step that failed and is tried again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyWait {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
    /// Failures in a row.
    pub failures: u32,
    /// The last one, in words.
    pub why: String,
}
