//! Draws a record as a picture: a panel for each question, a row for each contestant, one column of
//! bars in cache and one from memory. The SVG has no font, script or link, and is readable on light
//! and dark pages.

use std::fmt::Write;

use crate::groups::ANY_FIVE;
use crate::harness::Role;
use crate::lanes::Place;
use crate::record::{GroupRecord, Record, Row};

const STYLE: &str = "<style>\
    text{font:13px ui-sans-serif,system-ui,sans-serif;fill:#1f2937}\
    .t{font-weight:600;font-size:18px}.n{font-weight:600;font-size:15px}.s{font-size:12px;fill:#6b7280}\
    .o{fill:#2563eb}.f{fill:#9ca3af}.p{fill:#d97706}.q{stroke:#111827;stroke-width:1.5}.g{stroke:#e5e7eb}\
    @media(prefers-color-scheme:dark){text{fill:#e5e7eb}.s{fill:#9ca3af}.f{fill:#6b7280}\
    .q{stroke:#f9fafb}.g{stroke:#374151}}\
    </style>";

const MARGIN: usize = 24;
const LABELS: usize = 400;
const BARS: usize = 250;
/// Room after the longest bar, for its figure.
const FIGURE: usize = 70;
const WIDTH: usize = MARGIN + LABELS + 2 * (BARS + FIGURE) + MARGIN;
const ROW: usize = 21;
const PLACES: [Place; 2] = [Place::Cache, Place::Memory];

/// A question with its groups.
struct Panel<'r> {
    question: &'r str,
    groups: Vec<&'r GroupRecord>,
}

impl<'r> Panel<'r> {
    /// Returns the names of all contestants, in the order of the group that has most.
    fn names(&self) -> Vec<&'r str> {
        let mut names: Vec<&str> = Vec::new();
        let mut groups = self.groups.clone();
        groups.sort_by_key(|group| std::cmp::Reverse(group.contestants.len()));
        for row in groups.into_iter().flat_map(|group| &group.contestants) {
            if !names.contains(&row.name.as_str()) {
                names.push(&row.name);
            }
        }
        names
    }

    fn at(&self, place: Place) -> Option<&'r GroupRecord> {
        self.groups.iter().copied().find(|group| group.place == place)
    }
}

/// Returns the picture of a record as SVG.
pub fn draw(record: &Record) -> String {
    let mut panels: Vec<Panel<'_>> = Vec::new();
    for group in record.groups.iter().filter(|group| group.question != ANY_FIVE) {
        match panels.iter_mut().find(|panel| panel.question == group.question) {
            Some(panel) => panel.groups.push(group),
            None => panels.push(Panel { question: &group.question, groups: vec![group] }),
        }
    }
    let mut body = String::new();
    let mut y = 84;
    for panel in &panels {
        y = draw_panel(&mut body, panel, y) + 34;
    }
    let title = "How many GB each second one core takes through the kernels of rapidraid";
    let machine = &record.machine;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y}\" width=\"{WIDTH}\" height=\"{y}\" role=\"img\">\n\
         <title>{title}</title>\n{STYLE}\n"
    );
    text(&mut out, "t", MARGIN, 32, title);
    let about = format!(
        "{}, one core, {}. Longer is faster; the line on a bar spans its quartiles.",
        machine.processor, record.date
    );
    text(&mut out, "s", MARGIN, 52, &about);
    let keys = [("o", "rapidraid"), ("f", "floor: moves the bytes only"), ("p", "others")];
    for ((class, key), x) in keys.into_iter().zip([MARGIN, MARGIN + 110, MARGIN + 320]) {
        bar(&mut out, class, x, 60, 12);
        text(&mut out, "s", x + 18, 71, key);
    }
    out + &body + "</svg>\n"
}

/// Draws a panel below `y`. Returns the position of its end.
fn draw_panel(out: &mut String, panel: &Panel<'_>, y: usize) -> usize {
    let counted = panel.groups.first().map_or(1, |group| group.work_bytes / group.buffer_bytes);
    let what = match counted {
        1 => "GB/s of one stream".to_owned(),
        _ => format!("GB/s of all {counted} blocks"),
    };
    text(out, "n", MARGIN, y + 22, panel.question);
    let top = y + 40;
    let names = panel.names();
    let bottom = top + 14 + names.len() * ROW + 8;
    for (column, place) in PLACES.into_iter().enumerate() {
        let x = MARGIN + LABELS + column * (BARS + FIGURE);
        put(out, format_args!("<path class=\"g\" d=\"M{x} {}V{bottom}\"/>", top + 8));
        let Some(group) = panel.at(place) else { continue };
        text(out, "s", x, top, &format!("{}, {what}", place.name()));
        let most = group.contestants.iter().map(|row| row.gigabytes_per_second[2]);
        let most = most.fold(f64::MIN_POSITIVE, f64::max);
        for row in &group.contestants {
            let place = names.iter().position(|name| *name == row.name).unwrap_or_default();
            draw_row(out, row, x, top + 14 + place * ROW, BARS as f64 / most);
        }
    }
    for (place, name) in names.iter().enumerate() {
        text(out, "", MARGIN, top + 28 + place * ROW, name);
    }
    bottom
}

fn draw_row(out: &mut String, row: &Row, x: usize, y: usize, scale: f64) {
    let [low, median, high] = row.gigabytes_per_second.map(|rate| (rate * scale).round() as usize);
    let class = match row.role {
        Role::Ours => "o",
        Role::Floor => "f",
        Role::Peer => "p",
    };
    bar(out, class, x, y + 3, median.max(1));
    put(
        out,
        format_args!("<path class=\"q\" d=\"M{} {}H{}\"/>", x + low, y + 9, x + high.max(low + 1)),
    );
    let rate = row.gigabytes_per_second[1];
    let figure = if rate < 10.0 { format!("{rate:.2}") } else { format!("{rate:.1}") };
    text(out, "", x + high.max(median) + 6, y + 14, &figure);
}

fn bar(out: &mut String, class: &str, x: usize, y: usize, width: usize) {
    put(
        out,
        format_args!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"13\" rx=\"2\"/>"
        ),
    );
}

fn text(out: &mut String, class: &str, x: usize, y: usize, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    put(out, format_args!("<text{class} x=\"{x}\" y=\"{y}\">{text}</text>"));
}

fn put(out: &mut String, element: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "{element}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Machine;

    #[test]
    fn a_contestant_has_one_row_and_a_bar_at_each_place() {
        let group = |place| GroupRecord {
            question: "Q".to_owned(),
            place,
            buffer_bytes: 1,
            work_bytes: 1,
            contestants: vec![Row {
                name: "a<b".to_owned(),
                role: Role::Ours,
                rounds: 1,
                repetitions: 1,
                gigabytes_per_second: [1.0, 2.0, 4.0],
            }],
        };
        let record = Record {
            date: String::new(),
            command: String::new(),
            compiler: String::new(),
            machine: Machine::this(None, 0),
            peers: vec![],
            skipped: vec![],
            groups: vec![group(Place::Cache), group(Place::Memory)],
            bars: vec![],
        };
        let picture = draw(&record);
        assert_eq!(picture.matches(">a&lt;b<").count(), 1);
        assert_eq!(picture.matches("class=\"o\"").count(), 3, "two bars and the key");
        assert_eq!(picture.matches(&format!("width=\"{}\"", BARS / 2)).count(), 2);
    }
}
