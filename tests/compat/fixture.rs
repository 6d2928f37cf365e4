//! Golden files: lines of `name: hexadecimal`, one for each value. Tests compare them and never
//! rewrite them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use rapidraid::kind::ErrorKind;

/// The environment variable that, set to 1, makes a test append new values to the golden file.
const WRITE: &str = "RAPIDRAID_NEW_FIXTURES";

const CHANGED: &str = "A change of bytes comes together with its page in docs/ (format.md or protocol.md), its version \
    number, fixtures of the new version (added; these lines stay as they are and are still read) and docs/changelog.md.";

/// Returns whether bytes parse as the value from which the case was made, or the kind of the error
/// if they do not parse.
pub type Parse = Box<dyn Fn(&[u8]) -> Result<bool, ErrorKind>>;

/// A value: its bytes as today's code writes them, and the function that reads such bytes.
pub struct Case {
    pub name: String,
    pub bytes: Vec<u8>,
    pub parse: Parse,
}

impl Case {
    /// Creates a case of a value that is computed and never parsed.
    pub fn computed(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        let same = bytes.clone();
        Self { name: name.into(), bytes, parse: Box::new(move |bytes| Ok(bytes == same)) }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// Returns the key of a line. The key of a call is its number, without the name that the call had
/// when the line was written.
fn key(name: &str) -> String {
    match name.split(' ').collect::<Vec<_>>()[..] {
        [number, _, ref rest @ ..] if number.parse::<u8>().is_ok() => {
            format!("{number} {}", rest.join(" "))
        }
        _ => name.to_owned(),
    }
}

/// Compares `cases` with the golden file `path` (below `tests/fixtures/`): every value writes the
/// golden bytes, the golden bytes read as the value, and neither side lacks a value.
pub fn hold(path: &str, cases: &[Case]) {
    let path = format!("{}/fixtures/{path}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let mut golden: BTreeMap<String, &str> = BTreeMap::new();
    for line in lines {
        let (name, bytes) = line.split_once(": ").unwrap_or_else(|| panic!("{path}: {line}"));
        assert!(golden.insert(key(name), bytes).is_none(), "{path}: two lines for {name}");
    }
    let mut new = String::new();
    for case in cases {
        let Some(bytes) = golden.remove(&key(&case.name)) else {
            writeln!(new, "{}: {}", case.name, hex(&case.bytes)).unwrap();
            continue;
        };
        let read = (case.parse)(&unhex(bytes));
        assert_eq!(read, Ok(true), "{path}: {} does not read as its value. {CHANGED}", case.name);
        assert_eq!(
            hex(&case.bytes),
            bytes,
            "{path}: {} is written otherwise. {CHANGED}",
            case.name
        );
    }
    assert!(golden.is_empty(), "{path}: no value for {:?}. {CHANGED}", golden.keys());
    if new.is_empty() {
        return;
    }
    assert!(
        std::env::var(WRITE).is_ok_and(|value| value == "1"),
        "{path} lacks lines for new values; {WRITE}=1 adds them (docs/testing.md):\n{new}"
    );
    std::fs::write(&path, format!("{text}{new}")).unwrap();
    panic!("{path}: new lines were added; read them, then run the test again without {WRITE}");
}

/// Damages the bytes of `cases` at every place. No damage makes the parser panic, and the parser
/// refuses bytes that are truncated or followed by others. With `is_sealed` it also refuses every
/// change of a byte.
pub fn damage(cases: &[Case], is_sealed: bool) {
    for Case { name, bytes, parse } in cases {
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{name} cut to {len} bytes");
        }
        assert!(parse(&[bytes, &[0][..]].concat()).is_err(), "{name} with a byte behind it");
        for at in 0..bytes.len() {
            let flips = (0..8).map(|bit| bytes[at] ^ 1 << bit);
            for byte in flips.chain([0x00, 0x7f, 0x80, 0xff]).filter(|byte| *byte != bytes[at]) {
                let mut bad = bytes.clone();
                bad[at] = byte;
                let read = parse(&bad);
                assert!(
                    !is_sealed || read.is_err(),
                    "{name}: byte {at} as {byte:#04x} was believed"
                );
            }
        }
    }
}
