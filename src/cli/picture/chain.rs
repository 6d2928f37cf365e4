//! The chain as boxes in visiting order, wrapped to the width.

use super::{Stop, Style, fit};
use crate::cli::table::Tint;

/// The columns between two boxes of a row, and at both ends of a row.
const GAP: usize = 2;

/// Draws the chain: each node with the blocks that it adds to the stream and the piece that it
/// keeps.
pub fn chain(stops: &[Stop], style: Style) -> String {
    let longest = |of: &dyn Fn(&Stop) -> String| {
        stops.iter().map(|stop| of(stop).chars().count()).max().unwrap_or(0)
    };
    let needed = longest(&|s| s.node.clone()).max(longest(&blocks_of)).max(longest(&piece_of));
    let inner = needed.clamp(4, style.width() - 2 * GAP - 4);
    let fitting = (style.width() - GAP) / (inner + 4 + GAP);
    // There are as many rows as needed, all equally full.
    let rows = stops.len().div_ceil(fitting.max(1)).max(1);
    let per_row = stops.len().div_ceil(rows).max(1);
    let mut out = String::new();
    let count = stops.chunks(per_row).count();
    for (number, row) in stops.chunks(per_row).enumerate() {
        draw_row(row, inner, number > 0, number + 1 < count, style, &mut out);
    }
    out
}

fn blocks_of(stop: &Stop) -> String {
    stop.blocks.join(" ")
}

fn piece_of(stop: &Stop) -> String {
    format!("keeps {}", stop.piece)
}

fn draw_row(
    row: &[Stop],
    inner: usize,
    from_above: bool,
    goes_on: bool,
    style: Style,
    out: &mut String,
) {
    let pick = |unicode, ascii| style.pick(unicode, ascii);
    let (side, line, arrow) = (pick("│", "|"), pick("─", "-"), pick("─▶", "->"));
    let blank = " ".repeat(GAP);
    let boxed = |part: &dyn Fn(&Stop) -> String, between: &str| {
        row.iter().map(part).collect::<Vec<_>>().join(between)
    };
    let content = |text: String, tint: Tint| {
        format!("{side} {} {side}", style.paint.tint(tint, &fit(&text, inner)))
    };
    let top = |stop: &Stop| {
        let node = super::super::table::shown(&stop.node).into_owned();
        let name = fit(&node, node.chars().count().min(inner));
        let rest = line.repeat(inner - name.chars().count());
        let name = style.paint.tint(Tint::Bold, &name);
        format!("{} {name} {rest}{}", pick("╭", "."), pick("╮", "."))
    };
    let bottom =
        |_: &Stop| format!("{}{}{}", pick("╰", "'"), line.repeat(inner + 2), pick("╯", "'"));
    let (above, enter) = match from_above {
        true => (format!("{side} "), format!("{}{}", pick("╰", "'"), pick("▶", ">"))),
        false => (blank.clone(), blank.clone()),
    };
    let (leave, down) = match goes_on {
        true => (format!("{line}{}", pick("╮", ".")), format!(" {side}")),
        false => (String::new(), String::new()),
    };
    let lines = [
        format!("{above}{}", boxed(&top, &blank)),
        format!("{enter}{}{leave}", boxed(&|s| content(blocks_of(s), Tint::Green), arrow)),
        format!("{blank}{}{down}", boxed(&|s| content(piece_of(s), Tint::Cyan), &blank)),
        format!("{blank}{}{down}", boxed(&bottom, &blank)),
    ];
    for text in lines {
        out.push_str(&text);
        out.push('\n');
    }
    if goes_on {
        let across = GAP + row.len() * (inner + 4) + (row.len() - 1) * GAP;
        let (left, right) = (pick("╭", "."), pick("╯", "'"));
        out.push_str(&format!("{left}{}{right}\n", line.repeat(across)));
    }
}
