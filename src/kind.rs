//! What kind of failure an error is: the one question whose answer retry, wire codes, hints and exit codes need.

use serde::{Deserialize, Serialize};

/// The kinds of failure. Few on purpose: each tells the caller what can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
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

impl Kind {
    /// Whether the same request may succeed when it is made again.
    pub fn is_transient(self) -> bool {
        matches!(self, Kind::Unavailable | Kind::Busy | Kind::Timeout)
    }

    /// The code that ends a stream or request on the wire (docs/protocol.md).
    pub fn wire_code(self) -> u32 {
        match self {
            Kind::Invalid => 1,
            Kind::NotFound => 2,
            Kind::Exists => 3,
            Kind::Denied => 4,
            Kind::Fenced => 5,
            Kind::Unavailable => 6,
            Kind::Busy => 7,
            Kind::Timeout => 8,
            Kind::Corrupt => 9,
            Kind::Lost => 10,
            Kind::Io => 11,
            Kind::Internal => 12,
        }
    }

    /// The kind behind a wire code; unknown codes are `Internal`.
    pub fn from_wire_code(code: u32) -> Self {
        match code {
            1 => Kind::Invalid,
            2 => Kind::NotFound,
            3 => Kind::Exists,
            4 => Kind::Denied,
            5 => Kind::Fenced,
            6 => Kind::Unavailable,
            7 => Kind::Busy,
            8 => Kind::Timeout,
            9 => Kind::Corrupt,
            10 => Kind::Lost,
            11 => Kind::Io,
            _ => Kind::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_codes_round_trip() {
        for code in 1..=12 {
            assert_eq!(Kind::from_wire_code(code).wire_code(), code);
        }
        assert_eq!(Kind::from_wire_code(99), Kind::Internal);
    }
}
