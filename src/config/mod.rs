//! The settings of a node and of a client, from text to checked values.
//!
//! It promises that every value it returns is inside its stated range and every path is joined to the file's folder.
//! It reads no file and no environment: the caller does, and hands them over as [`Sources`].
//! `docs/configuration.md` has every setting; a test here keeps that page and this module in step.

mod error;
mod layers;
mod policy;
mod value;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::{ConfigError, Place};
use layers::Layers;
pub use layers::{MAX_FILE_BYTES, Sources, variable_of};
pub use policy::{Fate, Policy, Rule};
pub use value::{CodeShape, Congestion, HostPort, LogFormat, LogLevel};

use crate::id::{ClusterId, PeerName};
use crate::units::{BLOCK_LENGTHS, DEFAULT_BLOCK_BYTES, MIB, is_block_length};

/// How long leases live where nothing else is configured. With the looks at what is left (`node::waits`) somebody goes on within ten seconds.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(7);
/// The name of a configuration file where no other is given.
pub const FILE_NAME: &str = "rapidraid.toml";

/// Every setting of a node's file, as `section.name`.
pub const NODE_SETTINGS: &[&str] = &[
    "cluster",
    "name",
    "listen",
    "advertise",
    "zone",
    "rack",
    "data_dir",
    "certificate",
    "key",
    "ca",
    "seeds",
    "storage",
    "memory",
    "log.level",
    "log.format",
    "catalogue.serve",
    "code.list",
    "code.block",
    "network.congestion",
    "timeouts.lease_s",
    "disk.high_water",
    "policy.archive_all_but",
    "policy.keep_newest",
    "policy.keep_every",
];

/// Every setting of a node's file for a single job: the `*` stands for its name, which is a table's. They have no variables.
pub const JOB_SETTINGS: [&str; 3] =
    ["policy.job.*.archive_all_but", "policy.job.*.keep_newest", "policy.job.*.keep_every"];

/// Every setting of a client's file.
pub const CLIENT_SETTINGS: &[&str] = &[
    "cluster",
    "name",
    "certificate",
    "key",
    "ca",
    "seeds",
    "network.congestion",
    "staging.dir",
    "staging.memory",
    "staging.token",
    "staging.fill_s",
    "staging.stop_s",
    "staging.nice",
];

/// Who this process is, how it proves it, and whom it asks first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// The cluster.
    pub cluster: ClusterId,
    /// The name in the certificate.
    pub name: PeerName,
    /// The certificate, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM; nobody else may be able to read it.
    pub key: PathBuf,
    /// The certificate of the cluster's authority, PEM.
    pub ca: PathBuf,
    /// Nodes that know where the catalogue is.
    pub seeds: Vec<HostPort>,
}

/// A node's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Cluster, name, certificate, seeds.
    pub membership: Membership,
    /// Where it listens (UDP).
    pub listen: SocketAddr,
    /// Where others reach it.
    pub advertise: HostPort,
    /// The failure domain above the rack, if the operator names one.
    pub zone: Option<String>,
    /// The failure domain above the host, if the operator names one.
    pub rack: Option<String>,
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// Whether it stores blocks and pieces; without, it is a gateway or a catalogue alone.
    pub storage: bool,
    /// The memory that all its work together may take, in bytes.
    pub memory_bytes: u64,
    /// The least important lines that are logged.
    pub log_level: LogLevel,
    /// How lines are logged.
    pub log_format: LogFormat,
    /// Whether the catalogue is in this daemon.
    pub serve_catalogue: bool,
    /// The codes to archive with, best first; the first for which enough nodes live is taken.
    pub codes: Vec<CodeShape>,
    /// The length of a full block, in bytes.
    pub block_bytes: u64,
    /// How it finds out what its links carry.
    pub congestion: Congestion,
    /// Time limits.
    pub timeouts: Timeouts,
    /// How full the disk may be for new saves, in percent.
    pub high_water_percent: u8,
    /// What becomes of committed steps; applied by the daemon that serves the catalogue.
    pub policy: Policy,
}

/// The time limits of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// How long a coordinator that is not heard of keeps its shard.
    pub lease: Duration,
}

/// A client's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// Cluster, name, certificate, seeds.
    pub membership: Membership,
    /// How it finds out what its link carries.
    pub congestion: Congestion,
    /// The staging daemon of a training host.
    pub staging: StagingConfig,
}

/// Settings of a staging daemon (docs/staging.md).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagingConfig {
    /// The staging folder; `None`: one for the user and the cluster in the host's shared memory.
    pub dir: Option<PathBuf>,
    /// The limit on all segments, in bytes; `None`: it follows from the size of the folder's file system.
    pub memory_bytes: Option<u64>,
    /// A file whose content trainers have to send.
    pub token: Option<PathBuf>,
    /// How long the ranks of a launch may take to stage a step, from the first that begins.
    pub fill: Duration,
    /// How long a daemon that is to end goes on saving what is staged.
    pub stop: Duration,
    /// The nice value of its heavy work.
    pub nice: i32,
}

/// How long ranks may take to stage a step where nothing else is configured.
const DEFAULT_FILL: Duration = Duration::from_secs(120);
/// How much a staging daemon's heavy work yields where nothing else is configured: a tenth of the weight of training.
const DEFAULT_NICE: i32 = 10;
/// How long a staging daemon goes on saving after SIGTERM where nothing else is configured.
const DEFAULT_STOP: Duration = Duration::from_secs(300);

const SEEDS: &str = "a list of 1 to 64 nodes as HOST:PORT";

impl Membership {
    fn read(layers: &Layers<'_>, seeds: Vec<HostPort>) -> Result<Self, ConfigError> {
        let id = "the cluster's id, 32 lower-case hexadecimal digits (`cluster init` prints it)";
        let name = "a name of 1 to 63 letters, digits, `.`, `_` or `-`, as in the certificate";
        Ok(Self {
            cluster: layers.need("cluster", id, |v| v.text()?.parse().ok())?,
            name: layers.need("name", name, |v| v.text()?.parse().ok())?,
            certificate: path(layers, "certificate", "certificate.pem")?,
            key: path(layers, "key", "key.pem")?,
            ca: path(layers, "ca", "ca.pem")?,
            seeds,
        })
    }
}

impl NodeConfig {
    /// Reads a node's configuration.
    pub fn parse(sources: Sources<'_>) -> Result<Self, ConfigError> {
        let layers = Layers::parse(sources, "a node", NODE_SETTINGS, &JOB_SETTINGS, &[])?;
        let serve_catalogue = flag(&layers, "catalogue.serve", false)?;
        let seeds = if serve_catalogue {
            let optional = "a list of up to 64 nodes as HOST:PORT";
            layers.get("seeds", optional, |v| value::seeds(v, 0))?.unwrap_or_default()
        } else {
            layers.need("seeds", SEEDS, |v| value::seeds(v, 1))?
        };
        let listen = "an IP address and a port, such as \"0.0.0.0:7440\" or \"[::]:7440\"";
        let memory = "a size of at least 64MiB, such as \"256MiB\"";
        let level = "error, warn, info, debug or trace";
        let codes =
            "1 to 8 codes as \"n,k\" with k < n <= 2k and n <= 32, such as [\"16,11\", \"6,4\"]";
        Ok(Self {
            membership: Membership::read(&layers, seeds)?,
            listen: layers
                .get("listen", listen, |v| v.text()?.parse().ok())?
                .unwrap_or(SocketAddr::from(([0, 0, 0, 0], 7440))),
            advertise: layers.need(
                "advertise",
                "HOST:PORT under which the other nodes reach this one",
                |v| v.text()?.parse().ok(),
            )?,
            zone: domain(&layers, "zone")?,
            rack: domain(&layers, "rack")?,
            data_dir: path(&layers, "data_dir", "data")?,
            storage: flag(&layers, "storage", true)?,
            memory_bytes: layers
                .get("memory", memory, |v| value::size(v).filter(|bytes| *bytes >= 64 * MIB))?
                .unwrap_or(256 * MIB),
            log_level: layers
                .get("log.level", level, |v| LogLevel::parse(v.text()?))?
                .unwrap_or(LogLevel::Info),
            log_format: layers
                .get("log.format", "text or json", |v| LogFormat::parse(v.text()?))?
                .unwrap_or(LogFormat::Text),
            serve_catalogue,
            codes: layers
                .get("code.list", codes, value::codes)?
                .unwrap_or_else(|| CodeShape::DEFAULTS.to_vec()),
            block_bytes: layers
                .get("code.block", BLOCK_LENGTHS, |v| {
                    value::size(v).filter(|bytes| is_block_length(*bytes))
                })?
                .unwrap_or(DEFAULT_BLOCK_BYTES),
            congestion: congestion(&layers)?,
            timeouts: Timeouts { lease: seconds(&layers, "timeouts.lease_s", DEFAULT_LEASE)? },
            high_water_percent: layers
                .get("disk.high_water", "a whole number of percent, 1 to 99", |v| {
                    u8::try_from(v.integer()?).ok().filter(|percent| (1..=99).contains(percent))
                })?
                .unwrap_or(85),
            policy: Policy::read(&layers)?,
        })
    }
}

impl ClientConfig {
    /// Reads a client's configuration.
    pub fn parse(sources: Sources<'_>) -> Result<Self, ConfigError> {
        let layers = Layers::parse(sources, "a client", CLIENT_SETTINGS, &[], NODE_SETTINGS)?;
        let seeds = layers.need("seeds", SEEDS, |v| value::seeds(v, 1))?;
        let congestion = congestion(&layers)?;
        let staging = StagingConfig::read(&layers)?;
        Ok(Self { membership: Membership::read(&layers, seeds)?, congestion, staging })
    }

    /// The files in which a client's configuration may be, in the order in which to look; the first that exists is
    /// the one. A file that was named, by the option or by `RAPIDRAID_CONFIG`, is the only one.
    pub fn candidates(option: Option<&Path>, env: &BTreeMap<String, String>) -> Vec<PathBuf> {
        let set = |name: &str| env.get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(named) = option.map(Path::to_owned).or_else(|| set("RAPIDRAID_CONFIG")) {
            return vec![named];
        }
        // The base directory specification: a relative XDG_CONFIG_HOME is to be ignored.
        let folder = set("XDG_CONFIG_HOME")
            .filter(|folder| folder.is_absolute())
            .or_else(|| set("HOME").map(|home| home.join(".config")));
        let user = folder.map(|folder| folder.join("rapidraid").join(FILE_NAME));
        [Some(PathBuf::from(FILE_NAME)), user].into_iter().flatten().collect()
    }
}

impl StagingConfig {
    fn read(layers: &Layers<'_>) -> Result<Self, ConfigError> {
        let path = |key| -> Result<Option<PathBuf>, ConfigError> {
            let read =
                |v: &layers::Value| v.text().filter(|text| !text.is_empty()).map(PathBuf::from);
            let found = layers.get(key, "a path, relative to this file's folder", read)?;
            Ok(found.map(|path| layers.folder().join(path)))
        };
        let nice = |v: &layers::Value| {
            i32::try_from(v.integer()?).ok().filter(|nice| (0..=19).contains(nice))
        };
        let memory = "a size of at least 1MiB, such as \"64GiB\"";
        Ok(Self {
            dir: path("staging.dir")?,
            memory_bytes: layers
                .get("staging.memory", memory, |v| value::size(v).filter(|bytes| *bytes >= MIB))?,
            token: path("staging.token")?,
            fill: seconds(layers, "staging.fill_s", DEFAULT_FILL)?,
            stop: seconds(layers, "staging.stop_s", DEFAULT_STOP)?,
            nice: layers
                .get("staging.nice", "a nice value, 0 to 19", nice)?
                .unwrap_or(DEFAULT_NICE),
        })
    }
}

fn path(layers: &Layers<'_>, key: &'static str, name: &str) -> Result<PathBuf, ConfigError> {
    let read = |v: &layers::Value| v.text().filter(|text| !text.is_empty()).map(PathBuf::from);
    let path = layers.get(key, "a path, relative to this file's folder", read)?;
    Ok(layers.folder().join(path.unwrap_or_else(|| PathBuf::from(name))))
}

fn flag(layers: &Layers<'_>, key: &'static str, default: bool) -> Result<bool, ConfigError> {
    Ok(layers.get(key, "true or false", layers::Value::flag)?.unwrap_or(default))
}

fn congestion(layers: &Layers<'_>) -> Result<Congestion, ConfigError> {
    let read = |v: &layers::Value| Congestion::parse(v.text()?);
    Ok(layers.get("network.congestion", "cubic or bbr", read)?.unwrap_or_default())
}

fn seconds(
    layers: &Layers<'_>,
    key: &'static str,
    default: Duration,
) -> Result<Duration, ConfigError> {
    let read = |v: &layers::Value| {
        u64::try_from(v.integer()?).ok().filter(|seconds| (1..=86_400).contains(seconds))
    };
    let found = layers.get(key, "a whole number of seconds, 1 to 86400", read)?;
    Ok(found.map_or(default, Duration::from_secs))
}

/// The name of a failure domain follows the rule for names.
fn domain(layers: &Layers<'_>, key: &'static str) -> Result<Option<String>, ConfigError> {
    layers.get(key, "a name of 1 to 63 letters, digits, `.`, `_` or `-`", |v| {
        v.text()?.parse::<PeerName>().ok().map(String::from)
    })
}

#[cfg(test)]
mod tests;
