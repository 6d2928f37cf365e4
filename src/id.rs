//! Names and identifiers. Each has its own type and is validated when it is made, so that no layer
//! above has to check again which characters a string holds.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The reason why a text is not a valid name or identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {what}: {expected}")]
#[non_exhaustive]
pub struct IdError {
    /// The expected kind of name, e.g. "job name".
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
    /// The identifier of a cluster, drawn once by `cluster init`.
    ClusterId, 16, "cluster id"
);
random_id!(
    /// The identifier of one catalogue database. Two databases of the same epoch have different
    /// ids.
    DbId, 16, "database id"
);
random_id!(
    /// The identifier of one shard of one save: the save's 12 bytes and the shard's number,
    /// big-endian. A second save of the same step has other shard ids.
    ShardId, 16, "shard id"
);
random_id!(
    /// The identifier of one save, i.e. of one attempt to write a checkpoint.
    SaveId, 12, "save id"
);
random_id!(
    /// The identifier of one archiving of one shard's stripes. It is part of the name of every piece
    /// file, so that pieces of two archivings never mix.
    Attempt, 16, "attempt"
);
random_id!(
    /// The identifier of a lease that the catalogue granted. The lease ends by the clock of the
    /// catalogue server.
    LeaseId, 16, "lease id"
);

random_id!(
    /// The identifier of a launch: one run of a training job with all its ranks. A restart is a new
    /// launch.
    LaunchId, 16, "launch id"
);
random_id!(
    /// The identifier of one process of a launch, drawn by the process when it connects to the
    /// staging daemon.
    MemberId, 16, "member id"
);
random_id!(
    /// The identifier of one filling: one writing of one step by the ranks of a launch on one host.
    /// A step that is dropped and filled again gets a new id, so data of two fillings never mixes.
    FillId, 16, "fill id"
);
random_id!(
    /// The identifier of the staging folder of one host. The id outlives the daemon, so ranks that
    /// see the same id are on the same host.
    InstanceId, 16, "instance id"
);
random_id!(
    /// The identifier of a segment: a shared-memory file into which a trainer writes its state.
    SegmentId, 16, "segment id"
);

impl ShardId {
    /// Returns the id of shard `index` of `save`. No shard has the number `u32::MAX`: nodes store
    /// the records of the save as a whole under the id with this number.
    pub fn new(save: SaveId, index: u32) -> Self {
        let mut bytes = [0; 16];
        bytes[..12].copy_from_slice(&save.0);
        bytes[12..].copy_from_slice(&index.to_be_bytes());
        Self(bytes)
    }

    /// Returns the id immediately before all shard ids of `save`, or `None` when no id precedes
    /// them.
    pub fn before(save: SaveId) -> Option<Self> {
        let first = u128::from_be_bytes(Self::new(save, 0).0);
        first.checked_sub(1).map(|before| Self(before.to_be_bytes()))
    }

    /// Returns the shard's number within its save, from 0.
    pub fn index(self) -> u32 {
        let [.., a, b, c, d] = self.0;
        u32::from_be_bytes([a, b, c, d])
    }

    /// Returns the save that the shard belongs to.
    pub fn save(self) -> SaveId {
        let mut bytes = [0; 12];
        bytes.copy_from_slice(&self.0[..12]);
        SaveId(bytes)
    }
}

/// A stripe, named by its shard and its number in the shard.
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
            /// Returns the name as text.
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
    /// The name of a node or of a client, as in its certificate.
    PeerName, "node or client name", "1 to 63 of A-Z a-z 0-9 . _ - (not dots alone)", |t| is_word(t, 63)
);
text_id!(
    /// A label of a committed step.
    Label, "label", "1 to 64 of A-Z a-z 0-9 . _ - (not dots alone)", |t| is_word(t, 64)
);
text_id!(
    /// The name of a shard: a relative path. A restore joins it to a folder, so a text that could
    /// leave that folder is not a valid name.
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

impl Job {
    /// Returns `step` of this job.
    pub fn at(&self, step: Step) -> StepRef<'_> {
        StepRef { job: self, step }
    }
}

/// A step of a job. It is printed as `JOB/STEP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepRef<'a> {
    /// The job.
    pub job: &'a Job,
    /// The step.
    pub step: Step,
}

impl fmt::Display for StepRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job, self.step)
    }
}

/// A node, by a number that follows from its name, so that records can name a hundred nodes in a
/// kilobyte.
///
/// The number is the first 8 bytes, big-endian, of BLAKE3's key derivation (context `rapidraid node
/// id v1`) over the name. The catalogue refuses to register a second name with the same number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u64);

impl NodeId {
    /// Returns the id of the node called `name`.
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

/// The catalogue's epoch, which grows with every rebuild and every transfer. Nodes refuse orders of
/// an older epoch.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Maximum distance of a plausible epoch from the newest one that a node has seen. No catalogue
    /// is rebuilt or transferred so often while a node is unreachable.
    const NEAR: u64 = 1 << 16;

    /// Returns the epoch that follows.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Returns whether a node that has seen `seen` accepts this epoch as plausible. Without this
    /// check, one flipped bit could raise the epoch so far that hardly any higher epoch is left.
    pub fn is_near(self, seen: Epoch) -> bool {
        self.0 <= seen.0.saturating_add(Self::NEAR)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The fencing token of a shard. Every new owner of the shard raises it, and a node refuses
/// generations lower than the highest that it has seen for the shard.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Generation {
    /// The catalogue's epoch, which is compared first.
    pub epoch: Epoch,
    /// A counter that each takeover raises by one.
    pub counter: u64,
}

impl Generation {
    /// Returns the generation that a new owner takes in a catalogue of `epoch`.
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
