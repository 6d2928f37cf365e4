//! The hops of traced runs over time, as one SVG: when each hop worked on which of its grains, and
//! how it spent its time.

use std::fmt::Write as _;

use serde_json::Value;

use crate::picture::escape;
use crate::record::{Record, RunRecord, TRACE};

const LEFT: f64 = 120.0;
const TIME: f64 = 560.0;
const GAP: f64 = 24.0;
const SHARES: f64 = 170.0;
const ROW: f64 = 17.0;
const TOP: f64 = 64.0;
/// Maximum number of hops that are drawn for a run: the first ones of its plan.
const MAX_ROWS: usize = 64;

/// The parts of a hop's time: the name in the trace, and a name for people.
const PARTS: [(&str, &str); 5] = [
    ("waited_upstream_us", "waiting for input"),
    ("queued_us", "waiting for a processor"),
    ("computed_us", "computing"),
    ("disk_us", "hashing and disk"),
    ("waited_downstream_us", "waiting for the next hop"),
];

const STYLE: &str = "<style>\
    text{font:12px ui-sans-serif,system-ui,sans-serif;fill:#1f2937}\
    .t{font-weight:600;font-size:15px}.g{font-weight:600}.s{font-size:11px;fill:#6b7280}\
    .span{fill:#dbeafe}.chunk{fill:#2563eb}\
    .p0{fill:#e5e7eb}.p1{fill:#f59e0b}.p2{fill:#2563eb}.p3{fill:#7c3aed}.p4{fill:#9ca3af}\
    @media(prefers-color-scheme:dark){text{fill:#e5e7eb}.s{fill:#9ca3af}.span{fill:#1e3a5f}.p0{fill:#374151}}\
    </style>";

/// A hop of a trace. Times are in microseconds.
struct Hop {
    name: String,
    thread: u64,
    start: f64,
    end: f64,
    parts: [f64; PARTS.len()],
    chunks: Vec<(f64, f64)>,
}

/// Draws the traced runs of a record. Returns `None` if it has none.
pub fn draw(record: &Record) -> Option<String> {
    let runs = record.points.iter().flat_map(|point| &point.runs);
    let traced: Vec<(&RunRecord, Vec<Hop>)> = runs
        .filter_map(|run| Some((run, hops(run.notes.get(TRACE)?))))
        .filter(|(_, hops)| !hops.is_empty())
        .collect();
    if traced.is_empty() {
        return None;
    }
    let rows: usize = traced.iter().map(|(_, hops)| hops.len().min(MAX_ROWS)).sum();
    let height = TOP + rows as f64 * ROW + traced.len() as f64 * 52.0;
    let width = LEFT + TIME + GAP + SHARES + 14.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\">\n<title>{0}</title>\n{STYLE}\n\
         <text class=\"t\" x=\"14\" y=\"22\">{0}</text>\n",
        escape(&record.experiment.question)
    );
    let legend = "A row a hop. Light: from its first grain to its last. Dark: a sample of its jobs, at most 64. Right: what its worker's time went into.";
    let _ = writeln!(out, "<text class=\"s\" x=\"14\" y=\"40\">{legend}</text>");
    let mut x = 14.0;
    for (at, (_, name)) in PARTS.iter().enumerate() {
        let _ = writeln!(
            out,
            "<rect class=\"p{at}\" x=\"{x}\" y=\"47\" width=\"10\" height=\"10\"/>\
             <text class=\"s\" x=\"{}\" y=\"56\">{name}</text>",
            x + 14.0
        );
        x += 34.0 + 6.2 * name.len() as f64;
    }
    let mut y = TOP + 8.0;
    for (run, hops) in &traced {
        run_rows(&mut out, &mut y, run, hops);
    }
    out.push_str("</svg>\n");
    Some(out)
}

fn run_rows(out: &mut String, y: &mut f64, run: &RunRecord, hops: &[Hop]) {
    let start = hops.iter().map(|hop| hop.start).fold(f64::MAX, f64::min);
    let end = hops.iter().map(|hop| hop.end).fold(start + 1.0, f64::max);
    let x = |at: f64| LEFT + TIME * (at - start) / (end - start);
    *y += 18.0;
    let title = format!(
        "{}: {:.2} s from the first grain to the last",
        run.arm.word(),
        (end - start) / 1e6
    );
    let _ = writeln!(out, "<text class=\"g\" x=\"14\" y=\"{:.1}\">{title}</text>", *y - 6.0);
    for hop in hops.iter().take(MAX_ROWS) {
        let middle = *y + ROW / 2.0 + 3.0;
        let _ = writeln!(
            out,
            "<text class=\"s\" x=\"{}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>\
             <rect class=\"span\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\"/>",
            LEFT - 8.0,
            escape(&hop.name),
            x(hop.start),
            *y,
            x(hop.end) - x(hop.start),
            ROW - 4.0
        );
        for (from, to) in &hop.chunks {
            let _ = writeln!(
                out,
                "<rect class=\"chunk\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\"/>",
                x(*from),
                *y,
                (x(*to) - x(*from)).max(0.6),
                ROW - 4.0
            );
        }
        let all = hop.parts.iter().sum::<f64>().max(1.0);
        let mut from = LEFT + TIME + GAP;
        for (at, part) in hop.parts.iter().enumerate() {
            let wide = SHARES * part / all;
            let _ = writeln!(
                out,
                "<rect class=\"p{at}\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{wide:.1}\" height=\"{}\"/>",
                *y,
                ROW - 4.0
            );
            from += wide;
        }
        *y += ROW;
    }
    *y += 34.0;
}

/// Returns the hops of the first stripe of a trace, in the plan's order.
fn hops(trace: &Value) -> Vec<Hop> {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut hops: Vec<Hop> = Vec::new();
    let events = trace["traceEvents"].as_array().map(Vec::as_slice).unwrap_or_default();
    for event in events.iter().filter(|event| event["pid"] == 1) {
        let (start, thread) = (number(&event["ts"]), event["tid"].as_u64().unwrap_or(0));
        let end = start + number(&event["dur"]);
        match event["cat"].as_str() {
            Some("hop") => hops.push(Hop {
                name: event["name"].as_str().unwrap_or_default().to_owned(),
                thread,
                start,
                end,
                parts: PARTS.map(|(name, _)| number(&event["args"][name])),
                chunks: Vec::new(),
            }),
            Some("chunk") => {
                if let Some(hop) = hops.iter_mut().find(|hop| hop.thread == thread) {
                    hop.chunks.push((start, end));
                }
            }
            _ => {}
        }
    }
    hops
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hops_have_their_chunks_and_other_stripes_are_left_out() {
        let event = |cat: &str, pid, tid, ts, dur| {
            json!({ "name": "n", "cat": cat, "ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur,
                "args": { "disk_us": 3 } })
        };
        let events = [
            event("phase", 1, 0, 0, 9),
            event("hop", 1, 1, 10, 90),
            event("chunk", 1, 1, 20, 5),
            event("hop", 1, 2, 15, 90),
            event("chunk", 1, 2, 30, 5),
            event("chunk", 1, 2, 40, 6),
            event("hop", 2, 1, 1, 1),
        ];
        let found = hops(&json!({ "traceEvents": events }));
        let chunks: Vec<_> = found.iter().map(|hop| hop.chunks.clone()).collect();
        assert_eq!(chunks, [vec![(20.0, 25.0)], vec![(30.0, 35.0), (40.0, 46.0)]]);
        assert_eq!((found[0].start, found[0].end, found[0].parts[3]), (10.0, 100.0, 3.0));
        assert!(hops(&json!(null)).is_empty());
    }
}
