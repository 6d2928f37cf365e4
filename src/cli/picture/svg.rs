//! The pictures of the chain and of the times of its hops as SVG, for pages. The SVG has no font,
//! script or link, and is readable on light and dark pages.

use std::fmt::Write;

use super::{HopSpan, Stop, milliseconds};
use crate::units::ByteCount;

const STYLE: &str = "<style>\
    text{font:13px ui-sans-serif,system-ui,sans-serif;fill:#1f2937}\
    .n{font-weight:600}.s{font-size:11px;fill:#6b7280}.c{fill:#fff;font-weight:600;font-size:12px}\
    .b{fill:#f9fafb;stroke:#9ca3af}.o{fill:#2563eb}.p{fill:#c2410c}.g{stroke:#e5e7eb}\
    .a{stroke:#6b7280;stroke-width:2;fill:none}.h{fill:#6b7280}\
    @media(prefers-color-scheme:dark){text{fill:#e5e7eb}.s{fill:#9ca3af}.b{fill:#1f2937;stroke:#6b7280}\
    .g{stroke:#374151}.a{stroke:#9ca3af}.h{fill:#9ca3af}.c{fill:#fff}}\
    </style>";
const ARROW: &str = "<defs><marker id=\"h\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"8\" \
    markerHeight=\"8\" markerUnits=\"userSpaceOnUse\" orient=\"auto\">\
    <path class=\"h\" d=\"M0 0 8 4 0 8z\"/></marker></defs>";

const BOX: (usize, usize) = (96, 84);
const GAP: usize = 26;
const ROW_GAP: usize = 44;
const PER_ROW: usize = 8;

/// Draws the chain with eight nodes in a row.
pub fn chain(stops: &[Stop]) -> String {
    let rows = stops.len().div_ceil(PER_ROW).max(1);
    let width = GAP + PER_ROW * (BOX.0 + GAP);
    let height = 16 + rows * BOX.1 + (rows - 1) * ROW_GAP + 46;
    let mut out =
        open(width, height, "The nodes of a chain in visiting order, with blocks and pieces");
    out.push_str(ARROW);
    let corner =
        |at: usize| (GAP + at % PER_ROW * (BOX.0 + GAP), 12 + at / PER_ROW * (BOX.1 + ROW_GAP));
    for (at, stop) in stops.iter().enumerate() {
        let (x, y) = corner(at);
        put(
            &mut out,
            format_args!(
                "<rect class=\"b\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"8\"/>",
                BOX.0, BOX.1
            ),
        );
        put(
            &mut out,
            format_args!(
                "<text class=\"n\" x=\"{}\" y=\"{}\">{}</text>",
                x + 10,
                y + 20,
                escape(&stop.node)
            ),
        );
        for (slot, block) in stop.blocks.iter().take(2).enumerate() {
            chip(&mut out, "o", x + 10 + 40 * slot, y + 29, block);
        }
        put(
            &mut out,
            format_args!("<text class=\"s\" x=\"{}\" y=\"{}\">keeps</text>", x + 10, y + 70),
        );
        chip(&mut out, "p", x + 50, y + 56, &stop.piece);
        if at + 1 == stops.len() {
            continue;
        }
        let (next, middle) = (corner(at + 1), y + BOX.1 / 2);
        let end = x + BOX.0;
        if next.1 == y {
            put(
                &mut out,
                format_args!(
                    "<path class=\"a\" marker-end=\"url(#h)\" d=\"M{end} {middle}H{}\"/>",
                    next.0
                ),
            );
        } else {
            let (turn, into) = (y + BOX.1 + ROW_GAP / 2, next.0 + BOX.0 / 2);
            put(
                &mut out,
                format_args!(
                    "<path class=\"a\" marker-end=\"url(#h)\" d=\"M{end} {middle}h{0}V{turn}H{into}V{1}\"/>",
                    GAP / 2,
                    next.1
                ),
            );
        }
    }
    let base = height - 14;
    chip(&mut out, "o", GAP, base - 15, "o");
    put(
        &mut out,
        format_args!(
            "<text class=\"s\" x=\"{}\" y=\"{base}\">a block that the node holds already and adds</text>",
            GAP + 42
        ),
    );
    chip(&mut out, "p", GAP + 330, base - 15, "c");
    put(
        &mut out,
        format_args!(
            "<text class=\"s\" x=\"{}\" y=\"{base}\">the piece that it keeps</text>",
            GAP + 372
        ),
    );
    put(
        &mut out,
        format_args!(
            "<text class=\"s\" x=\"{}\" y=\"{base}\">each arrow carries one block, chunk by chunk, all at the same time</text>",
            GAP + 540
        ),
    );
    out.push_str("</svg>\n");
    out
}

/// Draws the hops over time, with a row for each hop.
pub fn timeline(hops: &[HopSpan]) -> String {
    const LEFT: usize = 110;
    const BARS: usize = 700;
    const RIGHT: usize = 180;
    const ROW: usize = 22;
    let end = hops.iter().map(|hop| hop.end_ms).max().unwrap_or(0).max(1);
    let (width, height) = (LEFT + BARS + RIGHT, 34 + hops.len() * ROW + 12);
    let mut out = open(width, height, "The hops of an archiving over time");
    for tick in 0..=4 {
        let x = LEFT + BARS * tick / 4;
        let label = milliseconds(end.saturating_mul(tick as u64) / 4);
        put(&mut out, format_args!("<path class=\"g\" d=\"M{x} 26V{}\"/>", height - 8));
        put(
            &mut out,
            format_args!(
                "<text class=\"s\" x=\"{x}\" y=\"18\" text-anchor=\"middle\">{label}</text>"
            ),
        );
    }
    put(
        &mut out,
        format_args!("<text class=\"s\" x=\"{}\" y=\"18\">in / out</text>", LEFT + BARS + 44),
    );
    for (at, hop) in hops.iter().enumerate() {
        let y = 34 + at * ROW;
        let x = |ms: u64| LEFT as f64 + BARS as f64 * ms.min(end) as f64 / end as f64;
        let (from, to) = (x(hop.start_ms), x(hop.end_ms));
        let text = y + 13;
        put(
            &mut out,
            format_args!(
                "<text x=\"{}\" y=\"{text}\" text-anchor=\"end\">{}</text>",
                LEFT - 10,
                escape(&hop.node)
            ),
        );
        put(
            &mut out,
            format_args!(
                "<rect class=\"o\" x=\"{from:.1}\" y=\"{}\" width=\"{:.1}\" height=\"14\" rx=\"3\"/>",
                y + 2,
                (to - from).max(1.5)
            ),
        );
        put(
            &mut out,
            format_args!(
                "<text class=\"s\" x=\"{}\" y=\"{text}\">{} / {}</text>",
                LEFT + BARS + 16,
                ByteCount(hop.in_bytes),
                ByteCount(hop.out_bytes)
            ),
        );
    }
    out.push_str("</svg>\n");
    out
}

fn open(width: usize, height: usize, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\">\n<title>{title}</title>\n{STYLE}\n"
    )
}

fn chip(out: &mut String, class: &str, x: usize, y: usize, label: &str) {
    put(
        out,
        format_args!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"36\" height=\"20\" rx=\"5\"/>"
        ),
    );
    put(
        out,
        format_args!(
            "<text class=\"c\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x + 18,
            y + 14,
            escape(label)
        ),
    );
}

/// Adds a line. Writing to a string cannot fail.
fn put(out: &mut String, line: std::fmt::Arguments<'_>) {
    let _ = writeln!(out, "{line}");
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in super::super::table::shown(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}
