//! The messages of repairs and of nodes that leave.

use rapidraid::id::Step;
use rapidraid::wire::calls::{
    DegradedStep, GetRepairStatus, ListRingChanges, RepairEvent, RepairMode, RepairOptions,
    RepairPlan, RepairStatus, RepairStep, RepairSummary, ReplaceNode, RunningRepair,
    SetMaintenance, SetRetention, ShardSurvey, StripeSurvey, SurveyResult, SurveyShard,
};
use rapidraid::wire::policy::{PolicyWait, RetentionChange};

use crate::messages::Calls;
use crate::records::{ATTEMPT, node_id, ring_changes, root};

/// Adds the messages by which nodes leave rings.
pub fn ring_messages(calls: &mut Calls) {
    let replace =
        ReplaceNode { node: "node-1".parse().unwrap(), successor: "node-9".parse().unwrap() };
    calls
        .both(ListRingChanges { only_stored: false }, ring_changes())
        .request(", of the node", ListRingChanges { only_stored: true })
        .both(replace, ())
        .both(SetMaintenance { node: "node-1".parse().unwrap(), seconds: 3600 }, ())
        .both(SetRetention { change: RetentionChange::Pause }, true);
}

/// Adds the requests and events of a repair.
pub fn repair_events(calls: &mut Calls) {
    let away = vec![("node-3".parse().unwrap(), 304)];
    let summary = RepairSummary { stripes: 300, made_bytes: 1 << 40, away, ..Default::default() };
    let (done_bytes, total_bytes, made_bytes) = (300, 301, 1 << 30);
    let call = |mode, plan| {
        let options = RepairOptions { mode, plan, parallel: 300 };
        let given_up = vec![node_id("node-2")];
        RepairStep { job: root().job, step: Step(1000), options, given_up }
    };
    calls
        .request("", call(RepairMode::Repair, RepairPlan::Chain))
        .request(", dry run, star", call(RepairMode::DryRun, RepairPlan::Star))
        .answer::<RepairStep>(
            ", progress",
            RepairEvent::Progress { done_bytes, total_bytes, made_bytes },
        )
        .answer::<RepairStep>(", note", RepairEvent::Note("no spare".into()))
        .answer::<RepairStep>(", done", RepairEvent::Done(summary))
        .both(GetRepairStatus {}, status())
        .answer::<GetRepairStatus>(", none", RepairStatus::default())
        .both(SurveyShard { shard: root().shard, first: 1024 }, survey())
        .answer::<SurveyShard>(", nothing", ShardSurvey::default());
}

fn survey() -> ShardSurvey {
    let stripe = StripeSurvey {
        index: 300,
        replicas: vec![1, 2],
        pieces: vec![(15, ATTEMPT)],
        has_record: true,
        receipts: vec![ATTEMPT],
    };
    ShardSurvey { has_leaves: true, has_mark: true, stripes: vec![stripe] }
}

fn status() -> RepairStatus {
    let (job, step) = (root().job, Step(1000));
    let (missing, missing_bytes) = (305, 1 << 40);
    let worst = DegradedStep {
        job: job.clone(),
        step,
        survives: Some(1),
        missing,
        missing_bytes,
        records: 306,
    };
    let survey = SurveyResult {
        age_ms: 300,
        steps: 301,
        unknown: 302,
        survives: Some(1),
        degraded: 303,
        missing,
        missing_bytes,
        records: 307,
        worst: vec![DegradedStep { survives: None, ..worst.clone() }, worst],
    };
    let running = RunningRepair {
        job: job.clone(),
        step,
        done_bytes: 300,
        total_bytes: 301,
        made_bytes: 1 << 30,
    };
    RepairStatus {
        share_percent: 25,
        survey: Some(survey),
        running: Some(running),
        brake: Some("5 of 16 storage nodes went away together".into()),
        maintenance: vec![("node-3".parse().unwrap(), 3600)],
        waiting: vec![PolicyWait { job, step, failures: 300, why: "node-3 is full".into() }],
    }
}
