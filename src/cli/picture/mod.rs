//! Pictures of an archiving: the chain, the times of its hops, what each node holds.
//!
//! Plain functions from facts to text, for a terminal (bounded by its width, with an ASCII twin of every character)
//! and as SVG. They know nothing of codes or clusters: labels come from the caller.

mod chain;
mod map;
pub mod svg;
mod timeline;

use std::collections::BTreeMap;

pub use chain::chain;
pub use map::map;
pub use timeline::timeline;

use super::table::Paint;

/// How to draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Characters in a line; fewer than 60 or more than 200 are taken as that.
    pub columns: usize,
    /// Lines and blocks of Unicode, or ASCII only.
    pub unicode: bool,
    /// Colours.
    pub paint: Paint,
}

impl Style {
    /// The style for a terminal with this environment: 100 columns unless COLUMNS says otherwise, Unicode where the
    /// locale has it.
    pub fn of_env(env: &BTreeMap<String, String>, paint: Paint) -> Self {
        let get = |name: &str| env.get(name).filter(|value| !value.is_empty());
        let columns = get("COLUMNS").and_then(|text| text.parse().ok()).unwrap_or(100);
        // The order in which the C library looks.
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

/// A node in the order in which the chain visits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// Its name.
    pub node: String,
    /// The blocks that it holds and adds, such as `o2`.
    pub blocks: Vec<String>,
    /// The piece that it keeps, such as `c1`.
    pub piece: String,
}

/// When a hop worked, and what it moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HopSpan {
    /// The node.
    pub node: String,
    /// When its first byte moved, in milliseconds since the archiving began.
    pub start_ms: u64,
    /// When it was done, its piece proven.
    pub end_ms: u64,
    /// Bytes that came in.
    pub in_bytes: u64,
    /// Bytes that went out.
    pub out_bytes: u64,
}

/// What a node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The node.
    pub node: String,
    /// Its replicas, such as `o1`.
    pub replicas: Vec<String>,
    /// Its piece, such as `c2`.
    pub piece: Option<String>,
    /// Whether it is lost, with all that it holds.
    pub dead: bool,
}

/// `text` in exactly `width` characters: padded, or cut with a mark.
fn fit(text: &str, width: usize) -> String {
    let text = super::table::shown(text);
    let length = text.chars().count();
    if length <= width {
        return format!("{text}{}", " ".repeat(width - length));
    }
    text.chars().take(width.saturating_sub(1)).chain(['~']).take(width).collect()
}

/// A time as people read it.
fn milliseconds(ms: u64) -> String {
    if ms < 10_000 { format!("{ms} ms") } else { format!("{:.1} s", ms as f64 / 1000.0) }
}

#[cfg(test)]
mod tests;
