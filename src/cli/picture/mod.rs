//! Pictures of an archiving: the chain, the times of its hops, and the files that each node holds.
//!
//! These are plain functions from facts to text, for a terminal (bounded by its width, with an
//! ASCII alternative for every character) and as SVG. They know nothing of codes or clusters: the
//! caller passes the labels.

mod chain;
mod map;
pub mod svg;
mod timeline;

use std::collections::BTreeMap;

pub use chain::chain;
pub use map::map;
pub use timeline::timeline;

use super::table::Paint;

/// The style of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Characters in a line, limited to the range from 60 to 200.
    pub columns: usize,
    /// Whether lines and blocks use Unicode instead of ASCII.
    pub unicode: bool,
    /// The colours.
    pub paint: Paint,
}

impl Style {
    /// Returns the style for a terminal with this environment: 100 columns unless COLUMNS says
    /// otherwise, and Unicode if the locale has it.
    pub fn of_env(env: &BTreeMap<String, String>, paint: Paint) -> Self {
        let get = |name: &str| env.get(name).filter(|value| !value.is_empty());
        let columns = get("COLUMNS").and_then(|text| text.parse().ok()).unwrap_or(100);
        // The C library reads these variables in the same order.
        let locale = get("LC_ALL").or_else(|| get("LC_CTYPE")).or_else(|| get("LANG"));
        let locale = locale.map(|name| name.to_ascii_lowercase()).unwrap_or_default();
        let unicode = locale.contains("utf-8") || locale.contains("utf8");
        Self { columns, unicode, paint }
    }

    fn width(&self) -> usize {
        self.columns.clamp(60, 200)
    }

    fn pick<'a>(&self, unicode: &'a str, ascii: &'a str) -> &'a str {
        if self.unicode { unicode } else { ascii }
    }
}

/// A node of a chain, in visiting order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// The name of the node.
    pub node: String,
    /// The blocks that the node holds and adds, such as `o2`.
    pub blocks: Vec<String>,
    /// The piece that the node keeps, such as `c1`.
    pub piece: String,
}

/// The time span of a hop's work, and the bytes that it moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HopSpan {
    /// The node.
    pub node: String,
    /// When work on the first grain began, in milliseconds since the node began to run its part.
    pub start_ms: u64,
    /// When the last grain was stored and the streams were finished, on the same clock.
    pub end_ms: u64,
    /// Bytes received.
    pub in_bytes: u64,
    /// Bytes sent.
    pub out_bytes: u64,
}

/// The files that a node holds of a stripe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The node.
    pub node: String,
    /// The replicas, such as `o1`.
    pub replicas: Vec<String>,
    /// The piece, such as `c2`, or the pieces, such as `c2,c5`.
    pub piece: Option<String>,
    /// Whether the node is lost, with all that it holds.
    pub dead: bool,
}

/// Returns `text` in exactly `width` characters: padded, or cut with a mark.
fn fit(text: &str, width: usize) -> String {
    let text = super::table::shown(text);
    let length = text.chars().count();
    if length <= width {
        return format!("{text}{}", " ".repeat(width - length));
    }
    text.chars().take(width.saturating_sub(1)).chain(['~']).take(width).collect()
}

/// Returns a time in a form for people.
fn milliseconds(ms: u64) -> String {
    if ms < 10_000 { format!("{ms} ms") } else { format!("{:.1} s", ms as f64 / 1000.0) }
}

#[cfg(test)]
mod tests;
