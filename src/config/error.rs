//! Configuration errors: each names the place, the value that was found and the value that is
//! expected.

use std::fmt;
use std::path::PathBuf;

use crate::kind::ErrorKind;

/// The origin of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettingPlace {
    /// A line of the configuration file.
    File {
        /// The path of the file, as the caller gave it.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
    },
    /// An environment variable.
    Environment(String),
    /// A command-line option, by the setting that it sets.
    Option(String),
}

impl fmt::Display for SettingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingPlace::File { path, line } => write!(f, "{}:{line}", path.display()),
            SettingPlace::Environment(name) => write!(f, "environment variable {name}"),
            SettingPlace::Option(key) => write!(f, "option for `{key}`"),
        }
    }
}

/// The reason why a configuration is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not TOML.
    #[error("{place}: {message}; fix the line (docs/configuration.md shows a complete file)")]
    Syntax {
        /// The line where parsing stopped.
        place: SettingPlace,
        /// The message of the TOML parser.
        message: String,
    },
    /// The file is longer than any valid configuration.
    #[error("{}: {len_bytes} bytes, expected at most {limit_bytes}: is this a configuration file?", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The length of the file in bytes.
        len_bytes: usize,
        /// The largest accepted length in bytes.
        limit_bytes: usize,
    },
    /// The setting does not exist.
    #[error(
        "{place}: found the setting `{key}`, which {reader} does not have; expected {expected}"
    )]
    Unknown {
        /// The place of the setting.
        place: SettingPlace,
        /// The setting, cut to 80 characters.
        key: String,
        /// The kind of process that the configuration is for: "a node" or "a client".
        reader: &'static str,
        /// The setting with the most similar name, or a list of all settings.
        expected: String,
    },
    /// The setting does not accept this value.
    #[error("{place}: `{key}` is {found}; expected {expected}")]
    Wrong {
        /// The place of the value.
        place: SettingPlace,
        /// The setting.
        key: String,
        /// The value, cut to 80 characters.
        found: String,
        /// The values that the setting accepts.
        expected: &'static str,
    },
    /// A setting without a default is missing.
    #[error(
        "{}: `{key}` is missing; expected {expected}: write it into the file, or set {variable}", path.display()
    )]
    Missing {
        /// The file in which the setting belongs.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// The values that the setting accepts.
        expected: &'static str,
        /// The environment variable that also sets it.
        variable: String,
    },
}

impl ConfigError {
    /// Returns [`ErrorKind::Invalid`]: only a different configuration helps.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}
