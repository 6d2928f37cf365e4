//! What kind of failure an error is: the one question whose answer retry, wire codes, hints and exit codes need.

use serde::{Deserialize, Serialize};

/// The kinds of failure. Few on purpose: each tells the caller what can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request itself is wrong: changing it is the only help.
    Invalid,
    /// What was asked for does not exist.
    NotFound,
    /// It exists already, or somebody else is at it.
    Exists,
    /// The caller may not do this.
    Denied,
    /// A newer owner, generation, epoch or save is known: stop.
    Fenced,
    /// The other side cannot be reached or does not answer: try again, or elsewhere.
    Unavailable,
    /// Memory, disk or streams are short now: try again later.
    Busy,
    /// A deadline passed.
    Timeout,
    /// Bytes are not what they should be: use another source.
    Corrupt,
    /// Too much is lost to go on.
    Lost,
    /// The operating system refused (disk, socket).
    Io,
    /// A defect of ours.
    Internal,
}

impl ErrorKind {
    /// Whether the same request may succeed when it is made again.
    pub fn is_transient(self) -> bool {
        matches!(self, ErrorKind::Unavailable | ErrorKind::Busy | ErrorKind::Timeout)
    }

    /// The code that ends a stream or request on the wire (docs/protocol.md).
    pub fn wire_code(self) -> u32 {
        match self {
            ErrorKind::Invalid => 1,
            ErrorKind::NotFound => 2,
            ErrorKind::Exists => 3,
            ErrorKind::Denied => 4,
            ErrorKind::Fenced => 5,
            ErrorKind::Unavailable => 6,
            ErrorKind::Busy => 7,
            ErrorKind::Timeout => 8,
            ErrorKind::Corrupt => 9,
            ErrorKind::Lost => 10,
            ErrorKind::Io => 11,
            ErrorKind::Internal => 12,
        }
    }

    /// The kind behind a wire code; unknown codes are `Internal`.
    pub fn from_wire_code(code: u32) -> Self {
        match code {
            1 => ErrorKind::Invalid,
            2 => ErrorKind::NotFound,
            3 => ErrorKind::Exists,
            4 => ErrorKind::Denied,
            5 => ErrorKind::Fenced,
            6 => ErrorKind::Unavailable,
            7 => ErrorKind::Busy,
            8 => ErrorKind::Timeout,
            9 => ErrorKind::Corrupt,
            10 => ErrorKind::Lost,
            11 => ErrorKind::Io,
            _ => ErrorKind::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_codes_round_trip() {
        for code in 1..=12 {
            assert_eq!(ErrorKind::from_wire_code(code).wire_code(), code);
        }
        assert_eq!(ErrorKind::from_wire_code(99), ErrorKind::Internal);
    }
}
