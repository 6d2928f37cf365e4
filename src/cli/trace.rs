//! The hops of an archiving as a trace for the viewers of browsers (Chrome's Trace Event Format,
//! "complete" events). A stripe is a process, a hop is a thread, and a thread shows a sample of the
//! grains that its hop processed. Times are in microseconds.
//!
//! The times within a stripe are those that its nodes measured. The offset between stripes follows
//! from the arrival times of their reports, because clocks of different machines are never
//! compared.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::{Value, json};

use crate::wire::calls::StripeReport;
use crate::wire::order::{ChunkTimes, HopWork};

/// A trace that grows stripe by stripe.
#[derive(Debug, Default)]
pub struct Trace {
    events: Vec<Value>,
    stripes: u64,
}

impl Trace {
    /// Adds a stripe. `now` is the time at which its report arrived.
    pub fn add(&mut self, report: &StripeReport, now: Duration) {
        self.stripes += 1;
        let process = self.stripes;
        let names = json!({ "name": format!("stripe {}", report.stripe) });
        self.events
            .push(json!({ "name": "process_name", "ph": "M", "pid": process, "args": names }));
        let all: u64 = report.phases_us.iter().fold(0, |sum, us| sum.saturating_add(*us));
        let now_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let mut at = now_us.saturating_sub(all);
        let mut run_at = at;
        let phases = ["reserve", "run and prove", "receipts and commit", "drop replicas"];
        for (place, (name, us)) in phases.into_iter().zip(report.phases_us).enumerate() {
            if place == 1 {
                run_at = at;
            }
            self.events.push(json!({
                "name": name, "cat": "phase", "ph": "X", "ts": at, "dur": us, "pid": process, "tid": 0,
            }));
            at = at.saturating_add(us);
        }
        for (hop, view) in report.hops.iter().enumerate() {
            let thread = hop + 1;
            let name = format!("hop {thread} {}", view.node);
            self.events.push(json!({
                "name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": { "name": name },
            }));
            let HopWork { in_bytes, out_bytes, span_us, times, chunks } = &view.work;
            self.events.push(json!({
                "name": view.node, "cat": "hop", "ph": "X", "pid": process, "tid": thread,
                "ts": run_at.saturating_add(span_us.0), "dur": span_us.1.saturating_sub(span_us.0),
                "args": {
                    "in_bytes": in_bytes, "out_bytes": out_bytes, "waited_upstream_us": times.upstream_us,
                    "queued_us": times.queued_us, "computed_us": times.computed_us, "disk_us": times.disk_us,
                    "waited_downstream_us": times.downstream_us,
                },
            }));
            for ChunkTimes { grains: (first, end), span_us: (begun, done) } in chunks {
                self.events.push(json!({
                    "name": format!("grains {first} to {}", end.saturating_sub(1)), "cat": "chunk", "ph": "X",
                    "pid": process, "tid": thread,
                    "ts": run_at.saturating_add(*begun), "dur": done.saturating_sub(*begun),
                }));
            }
        }
    }

    /// Writes the trace to `file` and syncs it.
    pub fn write(&self, mut file: std::fs::File) -> io::Result<()> {
        let document = json!({ "displayTimeUnit": "ms", "traceEvents": self.events });
        file.write_all(document.to_string().as_bytes())?;
        file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::CodeId;
    use crate::id::{ShardId, StripeId};
    use crate::wire::calls::HopView;

    #[test]
    fn hops_lie_inside_the_run() {
        let hop = |name: &str, span_us| HopView {
            node: name.parse().unwrap(),
            pieces: vec![0],
            work: HopWork {
                span_us,
                chunks: vec![ChunkTimes { grains: (4, 7), span_us: (20, 25) }],
                ..HopWork::default()
            },
        };
        let report = StripeReport {
            stripe: StripeId { shard: ShardId([1; 16]), index: 0 },
            code: CodeId(1),
            block_bytes: 7,
            hops: vec![hop("a", (0, 80)), hop("b", (10, 100))],
            phases_us: [50, 100, 30, 20],
        };
        let mut trace = Trace::default();
        trace.add(&report, Duration::from_micros(1000));
        let spans: Vec<(&str, u64, u64)> = trace
            .events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|e| {
                (e["name"].as_str().unwrap(), e["ts"].as_u64().unwrap(), e["dur"].as_u64().unwrap())
            })
            .collect();
        let expected = [
            ("reserve", 800, 50),
            ("run and prove", 850, 100),
            ("receipts and commit", 950, 30),
            ("drop replicas", 980, 20),
            ("a", 850, 80),
            ("grains 4 to 6", 870, 5),
            ("b", 860, 90),
            ("grains 4 to 6", 870, 5),
        ];
        assert_eq!(spans, expected);
    }
}
