//! The messages of a repair.

use rapidraid::id::Step;
use rapidraid::wire::calls::{
    RepairEvent, RepairMode, RepairOptions, RepairPlan, RepairStep, RepairSummary,
};

use crate::messages::Calls;
use crate::records::root;

/// Adds the requests and events of a repair.
pub fn repair_events(calls: &mut Calls) {
    let away = vec![("node-3".parse().unwrap(), 304)];
    let summary = RepairSummary { stripes: 300, made_bytes: 1 << 40, away, ..Default::default() };
    let (done_bytes, total_bytes, made_bytes) = (300, 301, 1 << 30);
    let call = |mode, plan| {
        let options = RepairOptions { mode, plan, parallel: 300 };
        RepairStep { job: root().job, step: Step(1000), options }
    };
    calls
        .request("", call(RepairMode::Repair, RepairPlan::Chain))
        .request(", dry run, star", call(RepairMode::DryRun, RepairPlan::Star))
        .answer::<RepairStep>(
            ", progress",
            RepairEvent::Progress { done_bytes, total_bytes, made_bytes },
        )
        .answer::<RepairStep>(", note", RepairEvent::Note("no spare".into()))
        .answer::<RepairStep>(", done", RepairEvent::Done(summary));
}
