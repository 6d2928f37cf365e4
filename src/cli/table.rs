//! Text for terminals: escaping, colours and columns.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns text from outside in a form that is safe to show. Control characters, which could move
/// the cursor or colour the screen, and characters that turn the direction of writing are escaped.
pub fn shown(text: &str) -> Cow<'_, str> {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.chars().any(hidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if hidden(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// The colour or weight of a text. A colour never carries information that the words do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tint {
    /// Headings.
    Bold,
    /// Details that may be skipped.
    Dim,
    /// Failed, lost.
    Red,
    /// Done, safe.
    Green,
    /// Needs attention.
    Yellow,
    /// Advice: what to do next.
    Cyan,
}

/// Colours text, or leaves it plain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint {
    /// Whether text is coloured.
    pub colour: bool,
}

impl Paint {
    /// Leaves text plain.
    pub const PLAIN: Self = Self { colour: false };

    /// Returns `text` in the tint, or unchanged without colours.
    pub fn tint(self, tint: Tint, text: &str) -> String {
        let code = match tint {
            Tint::Bold => "1",
            Tint::Dim => "2",
            Tint::Red => "31",
            Tint::Green => "32",
            Tint::Yellow => "33",
            Tint::Cyan => "36",
        };
        if self.colour && !text.is_empty() {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Rows under headings. Cells are escaped with [`shown`]; widths are counted in characters.
#[derive(Debug, Clone)]
pub struct Table {
    headings: Vec<&'static str>,
    numeric: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these columns. A heading that begins with `>` (which is not shown) is a
    /// column of numbers, aligned to the right.
    pub fn new(headings: &[&'static str]) -> Self {
        let numeric = headings.iter().map(|heading| heading.starts_with('>')).collect();
        let headings = headings.iter().map(|heading| heading.trim_start_matches('>')).collect();
        Self { headings, numeric, rows: Vec::new() }
    }

    /// Adds a row. Missing cells are empty; cells beyond the headings are dropped.
    pub fn row<T: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = T>) {
        let cells = cells.into_iter().map(|cell| shown(cell.as_ref()).into_owned());
        let mut row: Vec<String> = cells.take(self.headings.len()).collect();
        row.resize(self.headings.len(), String::new());
        self.rows.push(row);
    }

    /// Returns whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the table as text: one line for each row, without blanks at the ends of lines.
    pub fn render(&self, paint: Paint) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            widest.max(self.headings.get(column).map_or(0, |heading| heading.len()))
        };
        let widths: Vec<usize> = (0..self.headings.len()).map(width).collect();
        let headings: Vec<String> = self.headings.iter().map(|h| (*h).to_owned()).collect();
        let mut out = paint.tint(Tint::Bold, &self.line(&headings, &widths));
        out.push('\n');
        for row in &self.rows {
            out.push_str(&self.line(row, &widths));
            out.push('\n');
        }
        out
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let mut out = String::new();
        for ((cell, width), numeric) in cells.iter().zip(widths).zip(&self.numeric) {
            // Writing to a string does not fail.
            let _ = match numeric {
                true => write!(out, "{cell:>width$}  "),
                false => write!(out, "{cell:<width$}  "),
            };
        }
        out.truncate(out.trim_end().len());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_touch_the_terminal() {
        assert_eq!(shown("a/b ü"), "a/b ü");
        assert_eq!(shown("a\u{1b}[2Jb\rc"), "a\\u{1b}[2Jb\\rc");
        assert_eq!(shown("exe\u{202e}gpj"), "exe\\u{202e}gpj");
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["NODE", ">BYTES", "STATE"]);
        table.row(["node-1", "7", "up"]);
        table.row(["ü", "1024", "dead\n"]);
        table.row(["short"]);
        let expected = "\
NODE    BYTES  STATE
node-1      7  up
ü        1024  dead\\n
short
";
        assert_eq!(table.render(Paint::PLAIN), expected);
        let heading = "\u{1b}[1mNODE    BYTES  STATE\u{1b}[0m\n";
        assert!(table.render(Paint { colour: true }).starts_with(heading));
    }
}
