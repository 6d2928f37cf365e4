//! The types of single settings, and their parsers.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use super::layers::Value;
use crate::code::table::find;
use crate::units::ByteCount;

/// An address `HOST:PORT`. The host is a name, an IPv4 address, or an IPv6 address in brackets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort(String);

/// The error for a text that is not `HOST:PORT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected HOST:PORT, such as \"node-1:7440\" or \"[::1]:7440\"")]
pub struct HostPortError;

impl HostPort {
    /// Returns the text, in the form that the resolver accepts.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for HostPort {
    type Err = HostPortError;
    fn from_str(text: &str) -> Result<Self, HostPortError> {
        let (host, port) = text.rsplit_once(':').ok_or(HostPortError)?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host_is_good = match bracketed {
            Some(address) => address.parse::<Ipv6Addr>().is_ok(),
            None => {
                let letter = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
                (1..=253).contains(&host.len()) && host.bytes().all(letter)
            }
        };
        let digits = (1..=5).contains(&port.len()) && port.bytes().all(|b| b.is_ascii_digit());
        match port.parse::<u16>() {
            Ok(1..) if digits && host_is_good => Ok(Self(text.to_owned())),
            _ => Err(HostPortError),
        }
    }
}

/// The parameters of a code: n pieces, from k of which the blocks are reconstructed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CodeShape {
    /// The number of pieces.
    pub n: u8,
    /// The number of source blocks.
    pub k: u8,
}

impl CodeShape {
    /// The codes of a cluster whose configuration names none. The cluster uses the first one for
    /// which it has enough nodes.
    pub const DEFAULTS: [CodeShape; 4] = [
        CodeShape { n: 16, k: 11 },
        CodeShape { n: 14, k: 10 },
        CodeShape { n: 12, k: 8 },
        CodeShape { n: 6, k: 4 },
    ];

    /// Parses `n,k`. Two replicas of k blocks fill n positions only when k < n <= 2k.
    fn parse(text: &str) -> Option<Self> {
        let (n, k) = text.split_once(',')?;
        let (n, k): (u8, u8) = (n.trim().parse().ok()?, k.trim().parse().ok()?);
        (k < n && n <= 32 && n <= 2 * k).then_some(Self { n, k })
    }
}

impl fmt::Display for CodeShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.n, self.k)
    }
}

/// The importance of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say it")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// Returns the level as it is written in a configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let all =
            [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace];
        all.into_iter().find(|level| level.as_str() == text)
    }
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// A JSON object per line.
    Json,
}

impl LogFormat {
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "text" => Some(LogFormat::Text),
            "json" => Some(LogFormat::Json),
            _ => None,
        }
    }
}

/// The congestion control algorithm: how a sender estimates the capacity of a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC, RFC 9438. It takes a lost packet as a sign of a full queue, which is right on paths
    /// that lose packets for no other reason.
    #[default]
    Cubic,
    /// BBR version 1, which follows the rate that it measures. It keeps its rate on a path that
    /// loses packets at random, and is a little slower than CUBIC on a path that loses none.
    Bbr,
}

impl Congestion {
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "cubic" => Some(Congestion::Cubic),
            "bbr" => Some(Congestion::Bbr),
            _ => None,
        }
    }
}

/// Reads a size in bytes: text with a unit, or a plain number of bytes.
pub(super) fn size(value: &Value) -> Option<u64> {
    match value {
        Value::Integer(bytes) => u64::try_from(*bytes).ok(),
        other => other.text()?.parse::<ByteCount>().ok().map(|count| count.0),
    }
}

/// Reads a list of `least` to 64 addresses.
pub(super) fn seeds(value: &Value, least: usize) -> Option<Vec<HostPort>> {
    let list = value.list().filter(|list| (least..=64).contains(&list.len()))?;
    list.into_iter().map(|item| item.parse().ok()).collect()
}

/// Reads a list of 1 to 8 different codes, each of which must be in the table of codes.
pub(super) fn codes(value: &Value) -> Option<Vec<CodeShape>> {
    let list = value.list().filter(|list| (1..=8).contains(&list.len()))?;
    let codes: Vec<CodeShape> = list.into_iter().map(CodeShape::parse).collect::<Option<_>>()?;
    let is_shipped = |code: &CodeShape| find(usize::from(code.n), usize::from(code.k)).is_some();
    let different = codes.iter().enumerate().all(|(at, code)| !codes[..at].contains(code));
    (different && codes.iter().all(is_shipped)).then_some(codes)
}
