//! The hops of an archiving as a trace for the viewers of browsers (Chrome's Trace Event Format,
//! "complete" events). A stripe is a process, a hop is a thread, and a thread shows a sample of the
//! grains that its hop processed. Times are in microseconds.
//!
//! The times within a stripe are those that its nodes measured. The offset between stripes follows
//! from the arrival times of their reports, because clocks of different machines are never
//! compared.
//!
//! The stripes are written as they come: those of a large checkpoint would fill the memory.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::time::Duration;

use serde_json::{Value, json};

use crate::wire::calls::StripeReport;
use crate::wire::order::{ChunkTimes, HopWork};

/// A trace that grows stripe by stripe, in a file.
#[derive(Debug)]
pub struct Trace {
    file: BufWriter<File>,
    stripes: u64,
    /// Whether the file can be written, until [`Trace::finish`] returns the error.
    written: io::Result<()>,
}

impl Trace {
    /// Begins a trace in `file`, which must be empty.
    pub fn new(file: File) -> Self {
        let mut file = BufWriter::new(file);
        let written = file.write_all(br#"{"displayTimeUnit":"ms","traceEvents":["#);
        Self { file, stripes: 0, written }
    }

    /// Adds a stripe. `now` is the time at which its report arrived. After a failure to write, adds
    /// nothing.
    pub fn add(&mut self, report: &StripeReport, now: Duration) {
        self.stripes += 1;
        if self.written.is_ok() {
            let events = stripe_events(self.stripes, report, now);
            self.written = self.write_events(&events);
        }
    }

    fn write_events(&mut self, events: &[Value]) -> io::Result<()> {
        for (number, event) in events.iter().enumerate() {
            if self.stripes > 1 || number > 0 {
                self.file.write_all(b",")?;
            }
            serde_json::to_writer(&mut self.file, event)?;
        }
        Ok(())
    }

    /// Completes the file and syncs it. Returns the first error of a write to it.
    pub fn finish(mut self) -> io::Result<()> {
        self.written?;
        self.file.write_all(b"]}")?;
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }
}

/// Returns the events of a stripe, the `process`-th one of the trace.
fn stripe_events(process: u64, report: &StripeReport, now: Duration) -> Vec<Value> {
    let names = json!({ "name": format!("stripe {}", report.stripe) });
    let mut events =
        vec![json!({ "name": "process_name", "ph": "M", "pid": process, "args": names })];
    let all: u64 = report.phases_us.iter().fold(0, |sum, us| sum.saturating_add(*us));
    let now_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
    let mut at = now_us.saturating_sub(all);
    let mut run_at = at;
    let phases = ["reserve", "run and prove", "receipts and commit", "drop replicas"];
    for (place, (name, us)) in phases.into_iter().zip(report.phases_us).enumerate() {
        if place == 1 {
            run_at = at;
        }
        events.push(json!({
            "name": name, "cat": "phase", "ph": "X", "ts": at, "dur": us, "pid": process, "tid": 0,
        }));
        at = at.saturating_add(us);
    }
    for (hop, view) in report.hops.iter().enumerate() {
        let thread = hop + 1;
        let name = format!("hop {thread} {}", view.node);
        events.push(json!({
            "name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": { "name": name },
        }));
        let HopWork { in_bytes, out_bytes, span_us, times, chunks } = &view.work;
        events.push(json!({
            "name": view.node, "cat": "hop", "ph": "X", "pid": process, "tid": thread,
            "ts": run_at.saturating_add(span_us.0), "dur": span_us.1.saturating_sub(span_us.0),
            "args": {
                "in_bytes": in_bytes, "out_bytes": out_bytes, "waited_upstream_us": times.upstream_us,
                "queued_us": times.queued_us, "computed_us": times.computed_us, "disk_us": times.disk_us,
                "waited_downstream_us": times.downstream_us,
            },
        }));
        for ChunkTimes { grains: (first, end), span_us: (begun, done) } in chunks {
            events.push(json!({
                "name": format!("grains {first} to {}", end.saturating_sub(1)), "cat": "chunk", "ph": "X",
                "pid": process, "tid": thread,
                "ts": run_at.saturating_add(*begun), "dur": done.saturating_sub(*begun),
            }));
        }
    }
    events
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods)] // the test reads the file that was written

    use std::io::Seek;

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
        let mut file = tempfile::tempfile().unwrap();
        let mut trace = Trace::new(file.try_clone().unwrap());
        trace.add(&report, Duration::from_micros(1000));
        trace.add(&report, Duration::from_micros(2000));
        trace.finish().unwrap();
        file.rewind().unwrap();
        let document: Value = serde_json::from_reader(file).unwrap();
        let events = document["traceEvents"].as_array().unwrap();
        let (first, second): (Vec<&Value>, Vec<&Value>) =
            events.iter().partition(|event| event["pid"] == 1);
        assert_eq!(first.len(), second.len());
        let spans: Vec<(&str, u64, u64)> = first
            .into_iter()
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

    #[test]
    fn a_trace_that_cannot_be_written_is_an_error_at_its_end() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut trace = Trace::new(full);
        let report = StripeReport {
            stripe: StripeId { shard: ShardId([1; 16]), index: 0 },
            code: CodeId(1),
            block_bytes: 7,
            hops: Vec::new(),
            phases_us: [0; 4],
        };
        (0..100).for_each(|_| trace.add(&report, Duration::ZERO));
        assert_eq!(trace.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
