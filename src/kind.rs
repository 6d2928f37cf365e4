//! The kind of an error: the one property on which retries, wire codes, hints and exit codes
//! depend.

use serde::{Deserialize, Serialize};

/// The kinds of errors. There are few on purpose: each tells the caller what can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request itself is wrong. Only a different request can succeed.
    Invalid,
    /// The requested object does not exist.
    NotFound,
    /// The object exists already, or another party is working on it.
    Exists,
    /// The caller has no permission for this request, or the state of the object forbids it for
    /// good: a committed shard does not change, and a record of another cluster is not stored.
    Denied,
    /// A newer owner, generation, epoch or save is known. The caller must stop.
    Fenced,
    /// The other side is unreachable or does not answer. Try again, or use another node.
    Unavailable,
    /// Memory, disk space or streams are short at the moment. Try again later.
    Busy,
    /// A deadline passed.
    Timeout,
    /// Bytes are not what they should be. Use another source.
    Corrupt,
    /// Too much is lost to continue.
    Lost,
    /// The operating system reported an error (disk, socket).
    Io,
    /// A defect in this program.
    Internal,
}

impl ErrorKind {
    /// Returns whether the same request may succeed when it is repeated.
    pub fn is_transient(self) -> bool {
        matches!(self, ErrorKind::Unavailable | ErrorKind::Busy | ErrorKind::Timeout)
    }

    /// Returns the code that ends a stream or request on the wire (docs/protocol.md).
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

    /// Returns the kind for a wire code. Unknown codes give `Internal`.
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
