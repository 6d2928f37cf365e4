//! The path of a name: nested keys, encoded so that different keys give different bytes and bytes
//! sort as keys do.
//!
//! Each key is a tag byte and its content:
//!
//! ```text
//! 0x01  text      UTF-8 in which each NUL is followed by 0xFF, then one NUL
//! 0x02  integer   8 bytes big-endian, the sign bit inverted
//! 0x03  position  4 bytes big-endian
//! ```
//!
//! Tags are below 0xFF, so a NUL before another key is never mistaken for an escaped one. The
//! readable text form is in `path_text`.

use std::borrow::Cow;

use super::limits::{MAX_PATH_BYTES, MAX_PATH_KEYS};
use crate::kind::ErrorKind;

const TEXT: u8 = 1;
const INTEGER: u8 = 2;
const POSITION: u8 = 3;
/// The byte that follows each NUL of a text, so that the NUL is not mistaken for the end.
const ESCAPE: u8 = 0xff;
const SIGN_BIT: u64 = 1 << 63;

/// A step into a nested structure. Integer key 0, text key "0" and list position 0 are three
/// different keys.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A key that is text. Dots and slashes in it have no meaning.
    Text(String),
    /// A key that is a number.
    Integer(i64),
    /// A position in a list or tuple.
    Position(u32),
}

/// A path of 1 to 64 keys, encoded. Paths sort as their lists of keys do.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(Box<[u8]>);

/// The reason why keys, bytes or a text are not a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// There is no key.
    #[error("a path needs at least one key: give the value a name")]
    Empty,
    /// There are too many keys.
    #[error(
        "a path has more than {MAX_PATH_KEYS} keys: flatten a part of the structure into one value"
    )]
    TooDeep,
    /// The encoded keys are too long.
    #[error(
        "a path takes {bytes} bytes, more than the limit of {MAX_PATH_BYTES}: shorten its keys"
    )]
    TooLong {
        /// The encoded length in bytes, up to the first key that exceeds the limit; of a text that
        /// is too long, the length of the text.
        bytes: usize,
    },
    /// The bytes are not an encoded path.
    #[error("the bytes of a path do not decode: use another copy")]
    Encoding,
    /// The text is not the printed form of a path.
    #[error(
        "{text:?} is not the text of a path, as in model/layers.0.weight, state{{0}}/step or files[3]"
    )]
    Text {
        /// The text, cut to 128 characters.
        text: String,
    },
}

impl PathError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Empty | Self::TooDeep | Self::TooLong { .. } | Self::Text { .. } => {
                ErrorKind::Invalid
            }
            Self::Encoding => ErrorKind::Corrupt,
        }
    }
}

/// A key that borrows from its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeyRef<'a> {
    Text(Cow<'a, str>),
    Integer(i64),
    Position(u32),
}

/// Splits the content of a text key from the bytes after it. The content still has its escapes.
fn split_text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut from = 0;
    loop {
        let end = from + bytes.get(from..)?.iter().position(|byte| *byte == 0)?;
        if bytes.get(end + 1) != Some(&ESCAPE) {
            return Some((bytes.get(..end)?, bytes.get(end + 1..)?));
        }
        from = end + 2;
    }
}

/// Removes the escapes from the content of a text key.
fn unescape(content: &[u8]) -> Option<Cow<'_, str>> {
    if !content.contains(&0) {
        return std::str::from_utf8(content).ok().map(Cow::Borrowed);
    }
    let mut out = Vec::with_capacity(content.len());
    let mut bytes = content.iter();
    while let Some(byte) = bytes.next() {
        out.push(*byte);
        if *byte == 0 && bytes.next() != Some(&ESCAPE) {
            return None;
        }
    }
    String::from_utf8(out).ok().map(Cow::Owned)
}

/// Decodes the first key of `bytes`. Returns it and the bytes after it.
fn split_key(bytes: &[u8]) -> Option<(KeyRef<'_>, &[u8])> {
    let (tag, rest) = bytes.split_first()?;
    match *tag {
        TEXT => {
            let (content, rest) = split_text(rest)?;
            Some((KeyRef::Text(unescape(content)?), rest))
        }
        INTEGER => {
            let (number, rest) = rest.split_first_chunk()?;
            Some((KeyRef::Integer((u64::from_be_bytes(*number) ^ SIGN_BIT) as i64), rest))
        }
        POSITION => {
            let (number, rest) = rest.split_first_chunk()?;
            Some((KeyRef::Position(u32::from_be_bytes(*number)), rest))
        }
        _ => None,
    }
}

fn put_key(out: &mut Vec<u8>, key: &Key) {
    match key {
        Key::Text(text) => {
            out.push(TEXT);
            for byte in text.bytes() {
                out.push(byte);
                if byte == 0 {
                    out.push(ESCAPE);
                }
            }
            out.push(0);
        }
        Key::Integer(number) => {
            out.push(INTEGER);
            out.extend((*number as u64 ^ SIGN_BIT).to_be_bytes());
        }
        Key::Position(number) => {
            out.push(POSITION);
            out.extend(number.to_be_bytes());
        }
    }
}

impl Path {
    /// Encodes `keys`. Returns an error when there are none, when there are more than 64, or when
    /// they take more than 4 KiB.
    pub fn new(keys: &[Key]) -> Result<Self, PathError> {
        if keys.is_empty() {
            return Err(PathError::Empty);
        }
        if keys.len() > MAX_PATH_KEYS {
            return Err(PathError::TooDeep);
        }
        let mut bytes = Vec::new();
        for key in keys {
            if let Key::Text(text) = key
                && text.len() > MAX_PATH_BYTES
            {
                return Err(PathError::TooLong { bytes: text.len() });
            }
            put_key(&mut bytes, key);
            if bytes.len() > MAX_PATH_BYTES {
                return Err(PathError::TooLong { bytes: bytes.len() });
            }
        }
        Ok(Self(bytes.into()))
    }

    /// Checks encoded bytes and returns their path.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PathError> {
        if bytes.len() > MAX_PATH_BYTES {
            return Err(PathError::TooLong { bytes: bytes.len() });
        }
        if bytes.is_empty() {
            return Err(PathError::Empty);
        }
        let (mut rest, mut keys) = (bytes, 0);
        while !rest.is_empty() {
            (_, rest) = split_key(rest).ok_or(PathError::Encoding)?;
            keys += 1;
        }
        if keys > MAX_PATH_KEYS {
            return Err(PathError::TooDeep);
        }
        Ok(Self(bytes.into()))
    }

    /// Returns the encoded keys.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the keys, outermost first.
    pub fn keys(&self) -> Vec<Key> {
        let owned = |key| match key {
            KeyRef::Text(text) => Key::Text(text.into_owned()),
            KeyRef::Integer(number) => Key::Integer(number),
            KeyRef::Position(number) => Key::Position(number),
        };
        self.key_refs().map(owned).collect()
    }

    /// Returns an iterator over the keys that does not copy their text. The bytes were checked, so
    /// every key decodes.
    pub(super) fn key_refs(&self) -> impl Iterator<Item = KeyRef<'_>> {
        let mut rest: &[u8] = &self.0;
        std::iter::from_fn(move || {
            let (key, behind) = split_key(rest)?;
            rest = behind;
            Some(key)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub fn any_key() -> impl Strategy<Value = Key> {
        prop_oneof![
            "[a-c.\u{0}/\u{7f}\u{e9}]{0,5}".prop_map(Key::Text),
            prop_oneof![any::<i64>(), -2..3i64].prop_map(Key::Integer),
            prop_oneof![any::<u32>(), 0..3u32].prop_map(Key::Position),
        ]
    }

    fn any_keys() -> impl Strategy<Value = Vec<Key>> {
        prop::collection::vec(any_key(), 1..6)
    }

    #[test]
    fn the_bytes_are_the_ones_of_the_page() {
        let keys =
            [Key::Text("a\0b".into()), Key::Integer(-1), Key::Position(258), Key::Text("".into())];
        let expected = b"\x01a\0\xffb\0\x02\x7f\xff\xff\xff\xff\xff\xff\xff\x03\0\0\x01\x02\x01\0";
        let path = Path::new(&keys).unwrap();
        assert_eq!(path.as_bytes(), expected);
        assert_eq!(path.keys(), keys);
        assert_eq!(Path::from_bytes(expected), Ok(path));
    }

    #[test]
    fn what_is_no_path_is_refused() {
        let bad: [&[u8]; 9] = [
            b"",
            b"\0",
            b"\x04",
            b"\x01a",
            b"\x01a\0\xff",
            b"\x01\xc3\0",
            b"\x02\0\0\0",
            b"\x03\0\0\0",
            b"\x01a\0\0",
        ];
        for bytes in bad {
            assert!(Path::from_bytes(bytes).is_err(), "{bytes:?}");
        }
        let long = Key::Text("x".repeat(MAX_PATH_BYTES - 2));
        assert!(Path::new(std::slice::from_ref(&long)).is_ok());
        assert!(matches!(Path::new(&[long, Key::Position(0)]), Err(PathError::TooLong { .. })));
        let deep = vec![Key::Position(0); MAX_PATH_KEYS];
        assert!(Path::new(&deep).is_ok());
        let deeper = vec![Key::Position(0); MAX_PATH_KEYS + 1];
        assert_eq!(Path::new(&deeper), Err(PathError::TooDeep));
        assert_eq!(Path::from_bytes(&[3, 0, 0, 0, 0].repeat(65)), Err(PathError::TooDeep));
        assert_eq!(Path::new(&[]), Err(PathError::Empty));
    }

    proptest! {
        #[test]
        fn bytes_sort_as_keys_do(a in any_keys(), b in any_keys()) {
            let (pa, pb) = (Path::new(&a).unwrap(), Path::new(&b).unwrap());
            prop_assert_eq!(pa.cmp(&pb), a.cmp(&b));
            prop_assert_eq!(Path::from_bytes(pa.as_bytes()), Ok(pa.clone()));
            prop_assert_eq!(pa.keys(), a);
        }
    }
}
