//! Names and identifiers. Each is a type of its own, validated where it is made, so that no layer above
//! has to ask again what a string may hold.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not the name or identifier it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {what}: {expected}")]
#[non_exhaustive]
pub struct IdError {
    /// What was wanted, e.g. "job name".
    pub what: &'static str,
    /// The rule that the text breaks.
    pub expected: &'static str,
    /// The text, cut to 128 characters.
    pub text: String,
}

impl IdError {
    fn new(what: &'static str, expected: &'static str, text: &str) -> Self {
        Self { what, expected, text: text.chars().take(128).collect() }
    }
}

fn parse_hex<const N: usize>(what: &'static str, text: &str) -> Result<[u8; N], IdError> {
    let wrong = || IdError::new(what, "expected lower-case hexadecimal digits, two a byte", text);
    if text.len() != 2 * N || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(wrong());
    }
    let mut out = [0; N];
    for (slot, pair) in out.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
        *slot = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
    }
    Ok(out)
}

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub [u8; $bytes]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                parse_hex($what, text).map(Self)
            }
        }
    };
}

random_id!(
    /// A cluster, drawn once by `cluster init`.
    ClusterId, 16, "cluster id"
);
random_id!(
    /// One catalogue's map: two maps of one epoch differ in it.
    DbId, 16, "map id"
);
random_id!(
    /// One shard of one save: the save's 12 bytes and the shard's number, big-endian. A second save of the same step has other shard ids.
    ShardId, 16, "shard id"
);
random_id!(
    /// One attempt to write one checkpoint.
    SaveId, 12, "save id"
);
random_id!(
    /// One archiving of one shard's stripe; part of the name of every piece file, so that pieces of two
    /// archivings never mix.
    Attempt, 16, "attempt"
);
random_id!(
    /// A lease that the catalogue granted; alive until the catalogue's clock says otherwise.
    LeaseId, 16, "lease id"
);

random_id!(
    /// One incarnation of a training job with all its ranks; a restart is a new launch.
    LaunchId, 16, "launch id"
);
random_id!(
    /// One process of a launch, as the staging daemon knows it.
    MemberId, 16, "member id"
);
random_id!(
    /// One filling of one step by all ranks of a launch. A step that is dropped and filled again has another one, so parts of two fillings
    /// never mix.
    FillId, 16, "fill id"
);
random_id!(
    /// The staging folder of one host. It outlives the daemon, so ranks that see the same one are on the same host.
    InstanceId, 16, "instance id"
);
random_id!(
    /// A shared-memory file that a trainer writes its state into.
    SegmentId, 16, "segment id"
);

impl ShardId {
    /// Shard `index` of `save`. The number `u32::MAX` stands for the save itself, in places that file by shard.
    pub fn new(save: SaveId, index: u32) -> Self {
        let mut bytes = [0; 16];
        bytes[..12].copy_from_slice(&save.0);
        bytes[12..].copy_from_slice(&index.to_be_bytes());
        Self(bytes)
    }

    /// What comes right before all shards of `save`; `None` when nothing does.
    pub fn before(save: SaveId) -> Option<Self> {
        let first = u128::from_be_bytes(Self::new(save, 0).0);
        first.checked_sub(1).map(|before| Self(before.to_be_bytes()))
    }

    /// Its place among the shards of its save.
    pub fn index(self) -> u32 {
        let [.., a, b, c, d] = self.0;
        u32::from_be_bytes([a, b, c, d])
    }

    /// The save that it belongs to.
    pub fn save(self) -> SaveId {
        let mut bytes = [0; 12];
        bytes.copy_from_slice(&self.0[..12]);
        SaveId(bytes)
    }
}

/// A stripe: its shard and its place in it, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StripeId {
    /// The shard.
    pub shard: ShardId,
    /// The stripe's number in the shard, from 0.
    pub index: u32,
}

impl fmt::Display for StripeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.shard, self.index)
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $expected:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                let check: fn(&str) -> bool = $check;
                if check(text) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(IdError::new($what, $expected, text))
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", self.0)
            }
        }
    };
}

fn is_word(text: &str, max: usize) -> bool {
    (1..=max).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        && text.bytes().any(|b| b != b'.')
}

text_id!(
    /// The name of a training job.
    Job, "job name", "1 to 128 of A-Z a-z 0-9 . _ - (not dots alone)", |t| is_word(t, 128)
);
text_id!(
    /// The name of a node or of a client, as its certificate has it.
    PeerName, "node or client name", "1 to 63 of A-Z a-z 0-9 . _ - (not dots alone)", |t| is_word(t, 63)
);
text_id!(
    /// The name of a shard: a relative path. What restores a tree joins it to a folder, so nothing that
    /// could leave that folder is a name.
    ShardName, "shard name",
    "a relative path of 1 to 1024 bytes; components of 1 to 255 bytes, none of them `.` or `..`, no NUL",
    |t| {
        (1..=1024).contains(&t.len())
            && !t.contains('\0')
            && t.split('/').all(|c| (1..=255).contains(&c.len()) && c != "." && c != "..")
    }
);

/// A training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Step(pub u64);

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Step {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let wrong = || IdError::new("step", "expected a decimal number below 2^64", text);
        if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
            return Err(wrong());
        }
        text.parse().map(Self).map_err(|_| wrong())
    }
}

/// A node, by a number that follows from its name, so that records can name a hundred nodes in a kilobyte.
///
/// The first 8 bytes, big-endian, of BLAKE3's key derivation (context `rapidraid node id v1`) over the name; the catalogue refuses to register a second name with the same number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The number of the node called `name`.
    pub fn of(name: &PeerName) -> Self {
        let hash = blake3::derive_key("rapidraid node id v1", name.as_str().as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash[..8]);
        Self(u64::from_be_bytes(first))
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({self})")
    }
}

/// The catalogue's epoch: greater after every rebuild. What an older epoch orders is refused.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u64);

impl Epoch {
    /// How far an epoch may be beyond those that a node has seen: so often is no catalogue rebuilt or moved while a node is away.
    const NEAR: u64 = 1 << 16;

    /// The epoch that follows.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Whether a node that has seen `seen` takes it for an epoch at all: one number that a bit was flipped in would otherwise end all
    /// epochs for good.
    pub fn is_near(self, seen: Epoch) -> bool {
        self.0 <= seen.0.saturating_add(Self::NEAR)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The fencing token of a shard: whoever takes a shard over raises it, and nodes refuse lower ones.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Generation {
    /// The catalogue's epoch; compares first.
    pub epoch: Epoch,
    /// Raised by one at each take-over.
    pub counter: u64,
}

impl Generation {
    /// The generation that a new owner takes in a catalogue of `epoch`.
    pub fn next(self, epoch: Epoch) -> Self {
        Self { epoch: epoch.max(self.epoch), counter: self.counter.saturating_add(1) }
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.counter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_stay_inside_their_folder() {
        for good in ["a", "a/b.bin", "..a/b", "rank 7/ü", &"x".repeat(255)] {
            assert!(good.parse::<ShardName>().is_ok(), "{good}");
        }
        let long_component = "x".repeat(300);
        let long_path = "abcdefg/".repeat(130) + "z";
        for bad in
            ["", "/a", "a/", "a//b", "../a", "a/..", "a/./b", "a\0b", &long_component, &long_path]
        {
            assert!(bad.parse::<ShardName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn jobs_steps_and_hex_ids_parse_only_what_they_print() {
        assert!("gpt-2_small.v1".parse::<Job>().is_ok());
        for bad in ["", "..", "a/b", "a b", &"x".repeat(129)] {
            assert!(bad.parse::<Job>().is_err(), "{bad:?}");
        }
        assert_eq!("18446744073709551615".parse(), Ok(Step(u64::MAX)));
        for bad in ["", "+1", "-1", "18446744073709551616", "1e3"] {
            assert!(bad.parse::<Step>().is_err(), "{bad:?}");
        }
        let id = ShardId([0xab; 16]);
        assert_eq!(id.to_string().parse(), Ok(id));
        let save = SaveId([7; 12]);
        assert_eq!(ShardId::new(save, 3).save(), save);
        assert_ne!(ShardId::new(save, 3), ShardId::new(save, 4));
        assert!("AB".repeat(16).parse::<ShardId>().is_err());
    }

    #[test]
    fn generations_compare_by_epoch_first() {
        let old = Generation { epoch: Epoch(1), counter: 900 };
        let new = Generation { epoch: Epoch(2), counter: 1 };
        assert!(new > old);
        assert_eq!(old.next(Epoch(2)), Generation { epoch: Epoch(2), counter: 901 });
        assert_eq!(new.next(Epoch(1)), Generation { epoch: Epoch(2), counter: 2 });
    }
}
