//! What is wrong with a configuration: where it stands, what was found, what was expected.

use std::fmt;
use std::path::PathBuf;

use crate::kind::ErrorKind;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// A line of the configuration file, from 1.
    File {
        /// The file as it was named.
        path: PathBuf,
        /// The line.
        line: usize,
    },
    /// An environment variable.
    Environment(String),
    /// An option of the command line, by the setting that it sets.
    Option(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File { path, line } => write!(f, "{}:{line}", path.display()),
            Place::Environment(name) => write!(f, "environment variable {name}"),
            Place::Option(key) => write!(f, "option for `{key}`"),
        }
    }
}

/// Why a configuration is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not TOML.
    #[error("{place}: {message}; mend the line (docs/configuration.md shows a complete file)")]
    Syntax {
        /// The line where reading stopped.
        place: Place,
        /// What the TOML reader says.
        message: String,
    },
    /// The file is longer than any configuration.
    #[error("{}: {len_bytes} bytes, expected at most {limit_bytes}: is this a configuration file?", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        len_bytes: usize,
        /// The most that is read.
        limit_bytes: usize,
    },
    /// A setting that does not exist.
    #[error(
        "{place}: found the setting `{key}`, which {reader} does not have; expected {expected}"
    )]
    Unknown {
        /// Where it stands.
        place: Place,
        /// The setting, cut to 80 characters.
        key: String,
        /// Whose configuration it is: "a node" or "a client".
        reader: &'static str,
        /// The nearest setting, or all of them.
        expected: String,
    },
    /// A value that its setting cannot have.
    #[error("{place}: `{key}` is {found}; expected {expected}")]
    Wrong {
        /// Where it stands.
        place: Place,
        /// The setting.
        key: String,
        /// The value, cut to 80 characters.
        found: String,
        /// What the setting takes.
        expected: &'static str,
    },
    /// A setting without a default that nobody set.
    #[error(
        "{}: `{key}` is missing; expected {expected}: write it into the file, or set {variable}", path.display()
    )]
    Missing {
        /// The file in which it should stand.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// What it takes.
        expected: &'static str,
        /// The environment variable that sets it as well.
        variable: String,
    },
}

impl ConfigError {
    /// Always [`ErrorKind::Invalid`]: only another configuration helps.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}
