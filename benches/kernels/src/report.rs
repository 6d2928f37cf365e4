//! The output for people: tables on the terminal, and the table of bars between two marks of a
//! page.

use std::fmt::Write;

use anyhow::{Context, Result};

use crate::bars::Verdict;
use crate::harness::Role;
use crate::record::Record;

/// The marks before and after the table of a page.
pub const MARKS: [&str; 2] = ["<!-- measured: begin -->", "<!-- measured: end -->"];

/// Returns all results as text for the terminal.
pub fn terminal(record: &Record) -> Result<String> {
    let mut out = String::new();
    for group in &record.groups {
        let (place, kib) = (group.place.name(), group.buffer_bytes >> 10);
        writeln!(out, "\n{}, {place} ({kib} KiB per buffer), GB/s", group.question)?;
        for row in &group.contestants {
            let [low, median, high] = row.gigabytes_per_second;
            let role = match row.role {
                Role::Ours => "",
                Role::Floor => "floor",
                Role::Peer => "peer",
            };
            writeln!(out, "  {median:>8.2}  {low:>8.2} to {high:>8.2}  {role:<5}  {}", row.name)?;
        }
    }
    writeln!(out, "\nbars (median of the ratios of all rounds)")?;
    for verdict in &record.bars {
        let outcome = outcome(verdict);
        let measured = verdict.measured.map_or("-".to_owned(), |[_, median, _]| figure(median));
        writeln!(out, "  {outcome:<12}  {measured:>8}  {:<12}  {}", verdict.bar, verdict.measure)?;
    }
    for line in &record.peers {
        writeln!(out, "peer: {line}")?;
    }
    for line in &record.skipped {
        writeln!(out, "skipped: {line}")?;
    }
    Ok(out)
}

/// Returns the page with the text between its marks replaced by the bars of this record. Returns an
/// error if a mark is missing.
pub fn rewritten(page: &str, record: &Record) -> Result<String> {
    let [begin, end] = MARKS;
    let missing = || format!("the page has no `{begin}` with an `{end}` behind it");
    let (before, rest) = page.split_once(begin).with_context(missing)?;
    let (_, after) = rest.split_once(end).with_context(missing)?;
    Ok(format!("{before}{begin}\n{}{end}{after}", table(record)?))
}

fn table(record: &Record) -> Result<String> {
    let mut out = String::new();
    let machine = &record.machine;
    writeln!(
        out,
        "{}. {}, {} cores, {}; {}. `{}`\n",
        record.date,
        machine.processor,
        machine.cores,
        machine.kernel,
        record.compiler,
        record.command
    )?;
    writeln!(out, "| measure | bar | measured | quartiles | |\n|---|---|---|---|---|")?;
    for verdict in &record.bars {
        let cells = match verdict.measured {
            Some([low, median, high]) => {
                format!("{} | {} to {}", figure(median), figure(low), figure(high))
            }
            None => "- | -".to_owned(),
        };
        writeln!(
            out,
            "| {} | {} | {cells} | {} |",
            verdict.measure,
            verdict.bar,
            outcome(verdict)
        )?;
    }
    writeln!(out, "\nPeers: {}.", record.peers.join("; "))?;
    for line in &record.skipped {
        writeln!(out, "Skipped: {line}.")?;
    }
    Ok(out)
}

fn outcome(verdict: &Verdict) -> &'static str {
    match verdict.met {
        Some(true) => "met",
        Some(false) => "**not met**",
        None => "not measured",
    }
}

/// Returns the value with two decimals below ten, and with one above.
fn figure(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Machine;

    fn record() -> Record {
        let verdict = |measured: Option<[f64; 3]>, met| Verdict {
            measure: "m".to_owned(),
            bar: ">= 2x".to_owned(),
            measured,
            met,
        };
        Record {
            date: "2026-11-22".to_owned(),
            command: "c".to_owned(),
            compiler: "r".to_owned(),
            machine: Machine::this(None, 0),
            peers: vec!["p".to_owned()],
            skipped: vec![],
            groups: vec![],
            bars: vec![verdict(Some([1.0, 2.5, 33.0]), Some(true)), verdict(None, None)],
        }
    }

    #[test]
    fn only_what_stands_between_the_marks_changes() {
        let page = format!("a\n{}\nold\n{}\nb\n", MARKS[0], MARKS[1]);
        let once = rewritten(&page, &record()).unwrap();
        assert!(once.starts_with("a\n") && once.ends_with("\nb\n") && !once.contains("old"));
        assert!(once.contains("| m | >= 2x | 2.50 | 1.00 to 33.0 | met |"), "{once}");
        assert!(once.contains("| m | >= 2x | - | - | not measured |"), "{once}");
        assert_eq!(rewritten(&once, &record()).unwrap(), once);
        assert!(rewritten("no marks", &record()).is_err());
    }
}
