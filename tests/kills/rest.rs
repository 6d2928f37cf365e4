//! Checks that a fleet is at rest: no operation is open, no removal is outstanding, no memory is
//! held, and no unreferenced file or stray key is left.

use std::thread::sleep;
use std::time::Instant;

use serde_json::Value;

use crate::fleet::{Fleet, LOOK, SETTLE_LIMIT};
use crate::machine::files_below;

/// Files that a data folder may contain when no checkpoint is committed.
const KEPT: [&str; 9] = [
    "lock",
    "node.id",
    "epoch",
    "heard",
    "members",
    "catch-up",
    "slots",
    "reserve",
    "ring-changes",
];
const KEPT_BELOW: [&str; 3] = ["index/", "catalogue/", "graves/"];
/// Prefix of a catalogue database that was set aside. A rebuild sets aside the database that an
/// interrupted rebuild began.
const KEPT_ASIDE: &str = "catalogue.broken-";

impl Fleet {
    /// Waits until no step is committed, and no node or catalogue has any file or key of a removed
    /// step.
    pub fn until_bare(&self) {
        self.until_none("nothing is left of what was removed", |fleet| fleet.not_bare());
    }

    /// Waits until all nodes are live, no node has a note or holds memory, and no work of the
    /// policy waits.
    pub fn until_idle(&self) {
        self.until_none("all nodes are idle", |fleet| not_idle(&fleet.ask("status --json")));
    }

    fn not_bare(&self) -> Vec<String> {
        let listed = self.ask("ls --json");
        let steps = listed["steps"].as_array().unwrap();
        let mut why: Vec<String> = steps.iter().map(|step| format!("{step} is there")).collect();
        let status = self.ask("status --json");
        why.extend(not_idle(&status));
        for node in status["nodes"].as_array().unwrap() {
            for field in ["replicas", "replica_bytes", "pieces", "piece_bytes"] {
                if node[field] != 0 {
                    why.push(format!("{}: {field} is {}", node["name"], node[field]));
                }
            }
        }
        if !why.is_empty() {
            return why;
        }
        for at in 0..self.members.len() {
            let name = &self.members[at].name;
            why.extend(self.needless(at).into_iter().map(|file| format!("{name}: {file}")));
        }
        match self.catalogue_keys(status["catalogue"].as_str().unwrap_or_default()) {
            // Ring changes are kept for ever.
            Ok(keys) => why.extend(
                keys.into_iter().filter(|key| !key.starts_with("n/") && !key.starts_with("r/")),
            ),
            Err(error) => why.push(error),
        }
        why
    }

    /// Returns the files of a node that nothing refers to when no checkpoint is committed.
    fn needless(&self, at: usize) -> Vec<String> {
        let is_kept = |file: &String| {
            KEPT.contains(&file.as_str())
                || file.starts_with(KEPT_ASIDE)
                || KEPT_BELOW.iter().any(|below| file.starts_with(below))
        };
        let mut files = files_below(&self.data_folder(at));
        files.retain(|file| !is_kept(file));
        files
    }

    /// Waits until no node has a temporary or quarantined file. A node that writes a small record
    /// has a temporary file for a moment.
    pub fn until_tidy(&self) {
        self.until_none("nothing is left over", |fleet| fleet.leftovers());
    }

    fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (at, member) in self.members.iter().enumerate() {
            for below in ["tmp", "quarantine"] {
                let files = files_below(&self.data_folder(at).join(below));
                found.extend(files.iter().map(|file| format!("{}: {below}/{file}", member.name)));
            }
        }
        found
    }

    /// Waits until `look` returns no objection. Panics after [`SETTLE_LIMIT`].
    fn until_none(&self, what: &str, look: impl Fn(&Self) -> Vec<String>) {
        let started = Instant::now();
        loop {
            let why = look(self);
            if why.is_empty() {
                return;
            }
            let tails = || self.watch.tails();
            assert!(started.elapsed() < SETTLE_LIMIT, "not yet: {what}: {why:#?}\n{}", tails());
            sleep(LOOK);
        }
    }
}

/// Returns the reasons why the nodes are not idle.
fn not_idle(status: &Value) -> Vec<String> {
    let mut why = Vec::new();
    for node in status["nodes"].as_array().unwrap() {
        let name = &node["name"];
        if node["live"] != true || node["answers"] != true {
            why.push(format!("{name} is away"));
            continue;
        }
        if node["notes"] != Value::Array(Vec::new()) || node["quarantined"] != 0 {
            why.push(format!("{name}: {} ({} set aside)", node["notes"], node["quarantined"]));
        }
        for budget in node["budgets"].as_array().unwrap() {
            if budget["used_bytes"] != 0 {
                why.push(format!("{name} holds memory: {budget}"));
            }
        }
    }
    let policy = &status["policy"];
    if policy["removing"] != 0 || policy["waiting"] != Value::Array(Vec::new()) {
        why.push(format!("work waits: {policy}"));
    }
    why
}
