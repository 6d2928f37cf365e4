//! The text form of a path, for messages, logs and the command line. One path has one text.
//!
//! ```text
//! path      = first { next }
//! first     = text | integer | position
//! next      = "/" text | integer | position
//! integer   = "{" decimal, with "-" in front of a negative one "}"
//! position  = "[" decimal "]"
//! text      = plain | '"' { character | escape } '"'
//! plain     = one or more characters, none of / [ ] { } " \ and no control character
//! escape    = \" \\ \b \f \n \r \t, or \u and four hexadecimal digits (other control characters)
//! ```
//!
//! A text key is quoted only if it cannot be plain, and a number has no superfluous sign or zero.
//! `from_str` accepts what `Display` prints and nothing else.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use super::limits::{MAX_PATH_KEYS, MAX_PATH_TEXT_BYTES};
use super::path::{Key, KeyRef, Path, PathError};

fn is_plain(c: char) -> bool {
    !c.is_control() && !matches!(c, '/' | '[' | ']' | '{' | '}' | '"' | '\\')
}

/// Returns the letter that stands for `c` after a backslash, if there is one.
fn escape_of(c: char) -> Option<char> {
    Some(match c {
        '"' | '\\' => c,
        '\u{8}' => 'b',
        '\u{c}' => 'f',
        '\n' => 'n',
        '\r' => 'r',
        '\t' => 't',
        _ => return None,
    })
}

fn write_text(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    if !text.is_empty() && text.chars().all(is_plain) {
        return f.write_str(text);
    }
    f.write_char('"')?;
    for c in text.chars() {
        match escape_of(c) {
            Some(letter) => write!(f, "\\{letter}")?,
            None if c.is_control() => write!(f, "\\u{:04x}", u32::from(c))?,
            None => f.write_char(c)?,
        }
    }
    f.write_char('"')
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, key) in self.key_refs().enumerate() {
            match key {
                KeyRef::Position(number) => write!(f, "[{number}]")?,
                KeyRef::Integer(number) => write!(f, "{{{number}}}")?,
                KeyRef::Text(text) => {
                    if at > 0 {
                        f.write_char('/')?;
                    }
                    write_text(f, &text)?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Path({self})")
    }
}

/// Reads a quoted text after its opening quote. Returns it and the rest after the closing quote.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut out = String::new();
    let mut rest = quoted.chars();
    loop {
        match rest.next()? {
            '"' => return Some((out, rest.as_str())),
            '\\' => out.push(match rest.next()? {
                letter @ ('"' | '\\') => letter,
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    let (digits, behind) = rest.as_str().split_at_checked(4)?;
                    rest = behind.chars();
                    char::from_u32(u32::from_str_radix(digits, 16).ok()?)?
                }
                _ => return None,
            }),
            c if c.is_control() => return None,
            c => out.push(c),
        }
    }
}

/// Reads the first key of `text`. A text key that is not the path's first key begins with a slash.
/// Returns the key and the rest after it.
fn read_key(text: &str, is_first: bool) -> Option<(Key, &str)> {
    if let Some(inside) = text.strip_prefix('[') {
        let (number, rest) = inside.split_once(']')?;
        return Some((Key::Position(number.parse().ok()?), rest));
    }
    if let Some(inside) = text.strip_prefix('{') {
        let (number, rest) = inside.split_once('}')?;
        return Some((Key::Integer(number.parse().ok()?), rest));
    }
    let text = if is_first { text } else { text.strip_prefix('/')? };
    if let Some(quoted) = text.strip_prefix('"') {
        let (text, rest) = unquote(quoted)?;
        return Some((Key::Text(text), rest));
    }
    let end = text.find(|c| !is_plain(c)).unwrap_or(text.len());
    let (plain, rest) = text.split_at(end);
    (!plain.is_empty()).then(|| (Key::Text(plain.to_owned()), rest))
}

fn read_keys(text: &str) -> Option<Vec<Key>> {
    let (mut keys, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let (key, behind) = read_key(rest, keys.is_empty())?;
        // The caller refuses a path with one key too many, so further keys would only take memory.
        if keys.len() > MAX_PATH_KEYS {
            break;
        }
        keys.push(key);
        rest = behind;
    }
    Some(keys)
}

impl FromStr for Path {
    type Err = PathError;

    /// Accepts only texts that [`Display`](fmt::Display) prints, so that one path has one text.
    fn from_str(text: &str) -> Result<Self, PathError> {
        let wrong = || PathError::Text { text: text.chars().take(128).collect() };
        if text.len() > MAX_PATH_TEXT_BYTES {
            return Err(PathError::TooLong { bytes: text.len() });
        }
        let path = Self::new(&read_keys(text).ok_or_else(wrong)?)?;
        if path.to_string() == text { Ok(path) } else { Err(wrong()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(text: &str) -> Key {
        Key::Text(text.into())
    }

    #[test]
    fn paths_are_printed_as_the_page_says() {
        let known: [(&[Key], &str); 9] = [
            (&[text("model"), text("layers.0.weight")], "model/layers.0.weight"),
            (
                &[text("optim"), text("state"), Key::Integer(0), text("exp_avg")],
                "optim/state{0}/exp_avg",
            ),
            (&[text("data"), text("files"), Key::Position(3)], "data/files[3]"),
            (&[Key::Position(0), Key::Integer(-7), text("x")], "[0]{-7}/x"),
            (&[text("")], "\"\""),
            (&[text("a/b"), text("")], "\"a/b\"/\"\""),
            (&[text("say \"x\"\\"), text("[0]")], "\"say \\\"x\\\"\\\\\"/\"[0]\""),
            (&[text("\n\t\u{1}\u{7f}\u{85}")], "\"\\n\\t\\u0001\\u007f\\u0085\""),
            (&[text(" a b "), text("\u{fc}:.-*")], " a b /\u{fc}:.-*"),
        ];
        for (keys, expected) in known {
            let path = Path::new(keys).unwrap();
            assert_eq!(path.to_string(), expected);
            assert_eq!(expected.parse(), Ok(path));
        }
    }

    #[test]
    fn another_spelling_of_a_path_is_refused() {
        let bad = [
            "",
            "/",
            "a/",
            "/a",
            "a//b",
            "[00]",
            "[-1]",
            "[+1]",
            "[4294967296]",
            "{-0}",
            "{+1}",
            "{01}",
            "[0",
            "{0",
            "a]",
            "a}",
            "a\\",
            "\"a\"",
            "\"a",
            "\"\\u0041\"",
            "\"\\/\"",
            "\"\\u000A\"",
            "\"\\n",
            "\"\\u00\"",
            "\"\\ud800\"",
            "a[0]b",
            "a\"b\"",
            "a\nb",
            "\"\\x\"",
            "\"\\u+001\"",
        ];
        for text in bad {
            assert!(text.parse::<Path>().is_err(), "{text:?}");
        }
        assert!(matches!("[0]".repeat(65).parse::<Path>(), Err(PathError::TooDeep)));
        let long = "x".repeat(MAX_PATH_TEXT_BYTES + 1);
        assert!(matches!(long.parse::<Path>(), Err(PathError::TooLong { .. })));
    }

    #[test]
    fn the_longest_text_is_read() {
        let key = Key::Text("\u{1}".repeat(super::super::limits::MAX_PATH_BYTES - 2));
        let path = Path::new(&[key]).unwrap();
        assert_eq!(path.to_string().parse(), Ok(path));
    }

    proptest! {
        #[test]
        fn one_path_has_one_text(
            keys in prop::collection::vec(
                prop_oneof![
                    "[ab./\\[\\]{}\"\\\\\n\u{0}\u{1}\u{9f}\u{e9}0]{0,6}".prop_map(Key::Text),
                    any::<i64>().prop_map(Key::Integer),
                    any::<u32>().prop_map(Key::Position),
                ],
                1..6,
            )
        ) {
            let path = Path::new(&keys).unwrap();
            prop_assert_eq!(path.to_string().parse(), Ok(path));
        }

        #[test]
        fn what_is_read_is_printed_the_same(text in "[ab/\\[\\]{}\"\\\\0-9u-]{0,12}") {
            if let Ok(path) = text.parse::<Path>() {
                prop_assert_eq!(path.to_string(), text);
            }
        }
    }
}
