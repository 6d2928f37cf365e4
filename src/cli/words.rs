//! Arguments with a syntax of their own: `JOB/STEP`, `N,K`, `A..B`, `NAME=HOST:PORT`.
//!
//! Each type parses an argument into checked values; its error names the expected syntax.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::config::HostPort;
use crate::id::{Job, PeerName, Step};
use crate::units::ByteCount;

/// The reason why an argument is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WordError(String);

fn wrong(expected: &str) -> impl Fn() -> WordError + '_ {
    move || WordError(format!("expected {expected}"))
}

/// A step of a job, named by its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExactStep {
    /// The job.
    pub job: Job,
    /// The step.
    pub step: Step,
}

/// A step of a job, or the committed step with the greatest number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnyStep {
    /// The job.
    pub job: Job,
    /// The step; `None` is the latest one.
    pub step: Option<Step>,
}

impl FromStr for AnyStep {
    type Err = WordError;
    fn from_str(text: &str) -> Result<Self, WordError> {
        let (job, step) =
            text.split_once('/').ok_or_else(wrong("JOB/STEP, such as gpt/1200 or gpt/latest"))?;
        let said = |error: crate::id::IdError| WordError(error.to_string());
        let step = match step {
            "latest" => None,
            step => Some(step.parse().map_err(said)?),
        };
        Ok(Self { job: job.parse().map_err(said)?, step })
    }
}

impl FromStr for ExactStep {
    type Err = WordError;
    fn from_str(text: &str) -> Result<Self, WordError> {
        let AnyStep { job, step } = text.parse()?;
        let step =
            step.ok_or_else(wrong("the step's number here, such as gpt/1200, not `latest`"))?;
        Ok(Self { job, step })
    }
}

impl fmt::Display for ExactStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job, self.step)
    }
}

/// The size of a code. Whether such a code exists is decided by `code`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Number of pieces.
    pub n: usize,
    /// Number of blocks.
    pub k: usize,
}

impl FromStr for Shape {
    type Err = WordError;
    fn from_str(text: &str) -> Result<Self, WordError> {
        let (n, k) = text.split_once(',').ok_or_else(wrong("N,K, such as 16,11"))?;
        let number = |text: &str| text.trim().parse::<u8>().map(usize::from);
        match (number(n), number(k)) {
            (Ok(n), Ok(k)) => Ok(Self { n, k }),
            _ => Err(wrong("N,K, such as 16,11")()),
        }
    }
}

/// A range of bytes, the end not included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteRange(pub Range<u64>);

impl FromStr for ByteRange {
    type Err = WordError;
    fn from_str(text: &str) -> Result<Self, WordError> {
        let form = wrong("A..B with A < B, such as 0..4096 or 1MiB..2MiB (B is not included)");
        let (from, to) = text.split_once("..").ok_or_else(&form)?;
        let bytes = |text: &str| text.parse::<ByteCount>().map(|count| count.0);
        match (bytes(from), bytes(to)) {
            (Ok(from), Ok(to)) if from < to => Ok(Self(from..to)),
            _ => Err(form()),
        }
    }
}

/// A node of a new cluster, or a further node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewNode {
    /// The name of the node.
    pub name: PeerName,
    /// The address under which others reach the node.
    pub address: HostPort,
    /// The failure domain of the node: zone and rack.
    pub domain: Option<(PeerName, PeerName)>,
}

impl FromStr for NewNode {
    type Err = WordError;
    fn from_str(text: &str) -> Result<Self, WordError> {
        let form = wrong(
            "NAME=HOST:PORT or NAME=HOST:PORT,ZONE/RACK, such as node-1=10.0.0.1:7440,north/r7",
        );
        let (name, place) = text.split_once('=').ok_or_else(&form)?;
        let (address, domain) = match place.split_once(',') {
            Some((address, domain)) => (address, Some(domain)),
            None => (place, None),
        };
        let said = |error: crate::id::IdError| WordError(error.to_string());
        let domain = match domain.map(|domain| domain.split_once('/')) {
            None => None,
            Some(None) => return Err(form()),
            Some(Some((zone, rack))) => {
                Some((zone.parse().map_err(said)?, rack.parse().map_err(said)?))
            }
        };
        let address = address.parse().map_err(|_| form())?;
        Ok(Self { name: name.parse().map_err(said)?, address, domain })
    }
}

/// A setting of a configuration and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The name of the setting, such as `code.block`.
    pub key: String,
    /// The value as text.
    pub value: String,
}

impl FromStr for Setting {
    type Err = WordError;
    fn from_str(text: &str) -> Result<Self, WordError> {
        let form =
            wrong("SETTING=VALUE, such as memory=512MiB (docs/configuration.md has them all)");
        let (key, value) =
            text.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or_else(form)?;
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps() {
        let any: AnyStep = "gpt-2/latest".parse().unwrap();
        assert_eq!((any.job.as_str(), any.step), ("gpt-2", None));
        let exact: ExactStep = "a/007".parse().unwrap();
        assert_eq!(exact.to_string(), "a/7");
        for bad in ["", "a", "a/", "/1", "a/b", "../1", "a/1/2", "a/-1", "a b/1", "a/+1"] {
            assert!(bad.parse::<AnyStep>().is_err(), "{bad:?}");
        }
        let message = "a/latest".parse::<ExactStep>().unwrap_err().to_string();
        assert!(message.contains("not `latest`"), "{message}");
    }

    #[test]
    fn ranges_and_shapes() {
        assert_eq!("0..64KiB".parse(), Ok(ByteRange(0..65_536)));
        for bad in ["", "1", "5..5", "6..5", "..5", "5..", "a..b", "-1..2", "0...5"] {
            assert!(bad.parse::<ByteRange>().is_err(), "{bad:?}");
        }
        assert_eq!("16, 11".parse(), Ok(Shape { n: 16, k: 11 }));
        for bad in ["", "16", "16,", "16,11,2", "300,11", "-1,2"] {
            assert!(bad.parse::<Shape>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn nodes() {
        let node: NewNode = "n1=[::1]:7440,north/r7".parse().unwrap();
        assert_eq!((node.name.as_str(), node.address.as_str()), ("n1", "[::1]:7440"));
        assert_eq!(
            node.domain.map(|(zone, rack)| format!("{zone} {rack}")).as_deref(),
            Some("north r7")
        );
        assert_eq!("n1=h:1".parse::<NewNode>().unwrap().domain, None);
        for bad in [
            "",
            "n1",
            "n1=",
            "n1=h",
            "n1=h:0",
            "=h:1",
            "../x=h:1",
            "n1=h:1,",
            "n1=h:1,a",
            "n1=h:1,a/b/c",
            "n1=h:1,/b",
        ] {
            assert!(bad.parse::<NewNode>().is_err(), "{bad:?}");
        }
        assert!("x".parse::<Setting>().is_err() && "=x".parse::<Setting>().is_err());
        assert_eq!("a=b=c".parse::<Setting>().unwrap().value, "b=c");
    }
}
