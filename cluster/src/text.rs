//! Text files that people write: read as a whole, up to a size limit.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Returns the text of a file. A file of more than `limit` bytes is an error.
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
