//! The hops over time: a row for each hop, with a bar from its first grain to its last one.

use super::{HopSpan, Style, fit, milliseconds};
use crate::cli::table::Tint;
use crate::units::ByteCount;

/// Width of the column `in` and of the column `out`, each including the blanks before its number.
const BYTES: usize = 12;

/// Returns the number of marks on an axis of `width` characters.
fn ticks(width: usize) -> usize {
    if width < 40 { 2 } else { 4 }
}

/// Draws the hops over a common time axis.
pub fn timeline(hops: &[HopSpan], style: Style) -> String {
    let names = hops.iter().map(|hop| hop.node.chars().count()).max().unwrap_or(0).clamp(4, 16);
    let left = 6 + names + 2;
    let bars = style.width().saturating_sub(left + 2 * BYTES).max(1);
    let end = hops.iter().map(|hop| hop.end_ms).max().unwrap_or(0).max(1);
    let mut out = format!(" hop  {}  {}", fit("node", names), axis(end, bars));
    out.push_str(&format!("{:>BYTES$}{:>BYTES$}\n", "in", "out"));
    for (number, hop) in hops.iter().enumerate() {
        let bytes = |count: u64| ByteCount(count).to_string();
        out.push_str(&format!(
            "{:>4}  {}  {}{:>BYTES$}{:>BYTES$}\n",
            number + 1,
            fit(&hop.node, names),
            bar(hop, end, bars, style),
            bytes(hop.in_bytes),
            bytes(hop.out_bytes),
        ));
    }
    let moved = ByteCount(hops.iter().map(|hop| hop.out_bytes).fold(0, u64::saturating_add));
    out.push_str(&format!(
        "      {} hops in {}, {moved} over the network\n",
        hops.len(),
        milliseconds(end)
    ));
    out
}

/// Returns the labels at the marks of the axis.
fn axis(end_ms: u64, width: usize) -> String {
    let (mut out, ticks) = (String::new(), ticks(width));
    for tick in 0..ticks {
        let label = milliseconds(end_ms.saturating_mul(tick as u64) / ticks as u64);
        let next = (tick + 1) * width / ticks;
        let room = next.saturating_sub(out.chars().count());
        let label = if label.len() < room { label } else { String::new() };
        out.push_str(&fit(&label, room));
    }
    out
}

/// Returns the bar of a hop. Every hop is visible, however short. Dots continue the marks of the
/// axis.
fn bar(hop: &HopSpan, end_ms: u64, width: usize, style: Style) -> String {
    let column = |ms: u64| {
        let at = u128::from(ms.min(end_ms)) * width as u128 / u128::from(end_ms);
        usize::try_from(at).unwrap_or(width)
    };
    let from = column(hop.start_ms).min(width - 1);
    let to = column(hop.end_ms).clamp(from + 1, width);
    let grid = |range: std::ops::Range<usize>| {
        let marked = |at: usize| (0..ticks(width)).any(|tick| at == tick * width / ticks(width));
        range.map(|at| if marked(at) { style.pick("·", ".") } else { " " }).collect::<String>()
    };
    let full = style.pick("█", "#").repeat(to - from);
    format!("{}{}{}", grid(0..from), style.paint.tint(Tint::Cyan, &full), grid(to..width))
}
