//! Files that people write: read whole, up to a limit.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// The text of a file that has at most `limit` bytes.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    let shown = path.display();
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {shown}"))?;
    let mut text = String::new();
    file.take(limit + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("cannot read {shown}"))?;
    ensure!(text.len() as u64 <= limit, "{shown} has more than {limit} bytes");
    Ok(text)
}
