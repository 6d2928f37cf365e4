//! A record as one SVG: bars of medians with their quartiles, and a mark for the model's
//! prediction.

use std::fmt::Write as _;

use crate::arm::Kind;
use crate::numbers::Spread;
use crate::record::Record;
use crate::report::{Row, rows};

const LEFT: f64 = 170.0;
const BARS: f64 = 560.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 58.0;
const BAR: f64 = 22.0;
const GROUP_GAP: f64 = 26.0;

const STYLE: &str = "<style>\
    text{font:13px ui-sans-serif,system-ui,sans-serif;fill:#1f2937}\
    .t{font-weight:600;font-size:15px}.g{font-weight:600}.s{font-size:11px;fill:#6b7280}\
    .b0{fill:#2563eb}.b1{fill:#9ca3af}.b2{fill:#c2410c}.b3{fill:#7c3aed}.b4{fill:#0f766e}.b5{fill:#be185d}\
    .w{stroke:#111827;stroke-width:1.5}.m{stroke:#16a34a;stroke-width:2.5}.l{stroke:#e5e7eb}\
    @media(prefers-color-scheme:dark){text{fill:#e5e7eb}.s{fill:#9ca3af}.l{stroke:#374151}.w{stroke:#f9fafb}}\
    </style>";

/// Draws the record.
pub fn draw(record: &Record) -> String {
    let groups: Vec<(&str, Vec<Row>)> =
        record.points.iter().map(|point| (point.label.as_str(), rows(record, point))).collect();
    let in_blocks = groups.iter().flat_map(|(_, rows)| rows).all(|row| row.block_times.is_some())
        && record.experiment.arms.iter().all(|arm| matches!(arm.kind(), Kind::Archive(_)));
    let value =
        |row: &Row| -> Spread { row.block_times.filter(|_| in_blocks).unwrap_or(row.seconds) };
    let all = || groups.iter().flat_map(|(_, rows)| rows);
    let model = |row: &Row| row.model.filter(|_| in_blocks).map(|cost| cost.block_times);
    let greatest =
        all().map(|row| value(row).high.max(model(row).unwrap_or(0.0))).fold(1e-9, f64::max);
    let step = nice_step(greatest / 5.0);
    let end = (greatest / step).ceil() * step;
    let x = |value: f64| LEFT + BARS * value / end;
    let first = record.experiment.arms.first().map_or("", |arm| arm.word());
    let has_heads = groups.len() > 1;
    let head = if has_heads { 18.0 } else { 0.0 };
    let height = TOP
        + groups.iter().map(|(_, rows)| head + rows.len() as f64 * BAR + GROUP_GAP).sum::<f64>()
        + 10.0;
    let width = LEFT + BARS + RIGHT;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\">\n<title>{0}</title>\n{STYLE}\n\
         <text class=\"t\" x=\"14\" y=\"22\">{0}</text>\n",
        escape(&record.experiment.question)
    );
    let unit =
        if in_blocks { "block times (the time of one block over one link)" } else { "seconds" };
    let has_models = all().any(|row| model(row).is_some());
    let legend = match has_models {
        true => "bar: median; line: quartiles; green: the model",
        false => "bar: median; line: quartiles",
    };
    let _ = writeln!(out, "<text class=\"s\" x=\"14\" y=\"40\">{unit}. {legend}</text>");
    let mut tick = 0.0;
    while tick <= end + step / 2.0 {
        let at = x(tick);
        let _ = writeln!(out, "<path class=\"l\" d=\"M{at:.1} {TOP}V{:.1}\"/>", height - 10.0);
        let label = label(tick, step);
        let _ = writeln!(
            out,
            "<text class=\"s\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            TOP - 4.0
        );
        tick += step;
    }
    let mut y = TOP + 8.0;
    for (label, rows) in &groups {
        if has_heads {
            let _ = writeln!(
                out,
                "<text class=\"g\" x=\"14\" y=\"{:.1}\">{}</text>",
                y + 8.0,
                escape(label)
            );
            y += head;
        }
        for (at, row) in rows.iter().enumerate() {
            let spread = value(row);
            let middle = y + BAR / 2.0 - 2.0;
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 10.0,
                middle + 4.0,
                row.arm.word()
            );
            let _ = writeln!(
                out,
                "<rect class=\"b{}\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\" rx=\"3\"/>",
                at % 6,
                y,
                (x(spread.median) - LEFT).max(1.0),
                BAR - 5.0
            );
            let _ = writeln!(
                out,
                "<path class=\"w\" d=\"M{:.1} {middle:.1}H{:.1}\"/>",
                x(spread.low),
                x(spread.high)
            );
            if let Some(model) = model(row) {
                let at = x(model);
                let _ = writeln!(
                    out,
                    "<path class=\"m\" d=\"M{at:.1} {:.1}V{:.1}\"/>",
                    y - 1.0,
                    y + BAR - 4.0
                );
            }
            let ratio = row.ratio.map(|ratio| format!(", {:.2}x {first}", ratio.median));
            let _ = writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\">{:.2}{}</text>",
                x(spread.high.max(model(row).unwrap_or(0.0))) + 8.0,
                middle + 4.0,
                spread.median,
                ratio.unwrap_or_default()
            );
            y += BAR;
        }
        y += GROUP_GAP;
    }
    out.push_str("</svg>\n");
    out
}

/// Returns the smallest number that is 1, 2 or 5 times a power of ten and at least `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|times| times * power >= least);
    times.unwrap_or(10.0) * power
}

fn label(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

/// Escapes text for XML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        for (least, step) in [(0.13, 0.2), (1.0, 1.0), (2.3, 5.0), (51.0, 100.0), (0.05, 0.05)] {
            assert!((nice_step(least) - step).abs() < 1e-9, "{least}");
        }
        assert_eq!((label(0.25, 0.05), label(12.0, 2.0)), ("0.25".into(), "12".into()));
    }
}
