//! The golden bytes of `tests/fixtures/`, as inputs to damage.

fn read(path: &str) -> Vec<u8> {
    std::fs::read(format!("{}/fixtures/{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Returns the values of a golden file: name and bytes.
pub fn lines(path: &str) -> Vec<(String, Vec<u8>)> {
    let text = String::from_utf8(read(path)).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, digits) = line.split_once(": ").unwrap();
            let pair = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
            (name.to_owned(), (0..digits.len()).step_by(2).map(pair).collect())
        })
        .collect()
}

/// Returns the golden data files.
pub fn files() -> Vec<Vec<u8>> {
    let piece = format!("piece-07-{}.pc", "a7".repeat(16));
    let names = ["block-01.rep", "block-03.rep", &piece];
    names.iter().map(|name| read(&format!("format/v1/{name}"))).collect()
}
