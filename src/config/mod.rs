//! The settings of a node and of a client, from text to checked values.
//!
//! Every returned value is inside its stated range, and every path is joined to the file's folder.
//! This module reads no file and no environment: the caller does, and passes both as [`Sources`].
//! `docs/configuration.md` lists every setting; a test keeps that page and this module in step.

mod error;
mod layers;
mod policy;
mod repair;
mod value;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::{ConfigError, SettingPlace};
use layers::Layers;
pub use layers::{MAX_FILE_BYTES, Sources, variable_of};
pub use policy::{Fate, Policy, Rule};
pub use repair::RepairRules;
pub use value::{CodeShape, Congestion, HostPort, LogFormat, LogLevel};

use crate::id::{ClusterId, PeerName};
use crate::units::{BLOCK_LENGTHS, DEFAULT_BLOCK_BYTES, MIB, is_block_length};

/// The default lifetime of leases. It is short enough, together with the interval between two scans
/// for unfinished work (`node::retry_schedule`), that another daemon continues the work of a failed
/// daemon within ten seconds of the failure.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(7);
/// The default name of a configuration file.
pub const FILE_NAME: &str = "rapidraid.toml";

/// All settings of a node's file but those for single jobs ([`JOB_SETTINGS`]). A setting in a
/// section is written as `section.name`.
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
    "repair.share",
    "repair.grace_s",
    "repair.brake",
];

/// All settings of a node's file for a single job. The `*` stands for the job's name, which is the
/// name of a table. These settings have no environment variables.
pub const JOB_SETTINGS: [&str; 3] =
    ["policy.job.*.archive_all_but", "policy.job.*.keep_newest", "policy.job.*.keep_every"];

/// All settings of a client's file.
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
    "staging.stall_s",
    "staging.nice",
];

/// The identity of this process in its cluster, and the nodes that it asks first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// The id of the cluster.
    pub cluster: ClusterId,
    /// The name of this process, as in its certificate.
    pub name: PeerName,
    /// The path of the certificate, PEM.
    pub certificate: PathBuf,
    /// The path of its private key, PEM. No other user may be able to read it.
    pub key: PathBuf,
    /// The path of the certificate of the cluster's authority, PEM.
    pub ca: PathBuf,
    /// The nodes to ask for the catalogue server.
    pub seeds: Vec<HostPort>,
}

/// A node's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Cluster, name, certificate, seeds.
    pub membership: Membership,
    /// The UDP address on which the node listens.
    pub listen: SocketAddr,
    /// The address at which other nodes reach this node.
    pub advertise: HostPort,
    /// The failure domain above the rack, if the operator names one.
    pub zone: Option<String>,
    /// The failure domain above the host, if the operator names one.
    pub rack: Option<String>,
    /// The folder of all the node's data.
    pub data_dir: PathBuf,
    /// Whether the node stores blocks and pieces. Without storage it is only a gateway or a
    /// catalogue server.
    pub storage: bool,
    /// The limit on the memory of all the node's work together, in bytes.
    pub memory_bytes: u64,
    /// The lowest level of lines that are logged.
    pub log_level: LogLevel,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// Whether this daemon serves the catalogue.
    pub serve_catalogue: bool,
    /// The codes to archive with, best first. The first code for which enough nodes are alive is
    /// used.
    pub codes: Vec<CodeShape>,
    /// The length of a full block, in bytes.
    pub block_bytes: u64,
    /// The congestion control of what this node sends.
    pub congestion: Congestion,
    /// Time limits.
    pub timeouts: Timeouts,
    /// The limit on the disk usage, in percent. The node refuses a block of a new save that would
    /// exceed it.
    pub high_water_percent: u8,
    /// The policy for committed steps. The daemon that serves the catalogue applies it.
    pub policy: Policy,
    /// The rules of automatic repair. The daemon that serves the catalogue applies them.
    pub repair: RepairRules,
}

/// The lifetime of leases: those of saves, of the registrations of nodes, and of coordinators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// The lifetime of a lease that its holder does not renew: how long a save, a node's registration
    /// and a coordinator's ownership of shards last without a sign of life.
    pub lease: Duration,
}

/// A client's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// Cluster, name, certificate, seeds.
    pub membership: Membership,
    /// The congestion control of what this client sends.
    pub congestion: Congestion,
    /// The settings of a staging daemon on a training host.
    pub staging: StagingConfig,
}

/// The settings of a staging daemon (docs/staging.md).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagingConfig {
    /// The staging folder. `None` stands for a folder in the host's shared memory, one for each
    /// user and cluster.
    pub dir: Option<PathBuf>,
    /// The limit on all segments together, in bytes. `None` derives it from the size of the
    /// folder's file system.
    pub memory_bytes: Option<u64>,
    /// The path of a file whose content trainers must send.
    pub token: Option<PathBuf>,
    /// The time that the ranks of a launch may take to stage a step, from the first rank that
    /// begins.
    pub fill: Duration,
    /// The time for which a daemon that was asked to stop continues to save staged steps.
    pub stop: Duration,
    /// How long a save of several hosts waits for hosts that make no progress.
    pub stall: Duration,
    /// The nice value of the daemon's heavy work.
    pub nice: i32,
}

/// The default time that ranks may take to stage a step.
const DEFAULT_FILL: Duration = Duration::from_secs(120);
/// The default nice value of a staging daemon's heavy work, which gives it a tenth of the weight of
/// training.
const DEFAULT_NICE: i32 = 10;
/// The default time that a save of several hosts waits for hosts that make no progress.
const DEFAULT_STALL: Duration = Duration::from_secs(600);
/// The default time for which a staging daemon continues to save after SIGTERM.
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
    /// Parses a node's configuration. Returns an error for the first setting that is unknown,
    /// invalid or missing.
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
        let codes = "1 to 8 codes as \"n,k\" of those that `rapidraid code list` shows, such as [\"16,11\", \"6,4\"]";
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
            repair: RepairRules::read(&layers)?,
        })
    }
}

impl ClientConfig {
    /// Parses a client's configuration. Returns an error for the first setting that is unknown,
    /// invalid or missing.
    pub fn parse(sources: Sources<'_>) -> Result<Self, ConfigError> {
        let layers = Layers::parse(sources, "a client", CLIENT_SETTINGS, &[], NODE_SETTINGS)?;
        let seeds = layers.need("seeds", SEEDS, |v| value::seeds(v, 1))?;
        let congestion = congestion(&layers)?;
        let staging = StagingConfig::read(&layers)?;
        Ok(Self { membership: Membership::read(&layers, seeds)?, congestion, staging })
    }

    /// Returns the files that may hold a client's configuration, in the order in which to try them;
    /// the first that exists is used. A file named by the option or by `RAPIDRAID_CONFIG` is the
    /// only candidate.
    pub fn candidates(option: Option<&Path>, env: &BTreeMap<String, String>) -> Vec<PathBuf> {
        let set = |name: &str| env.get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(named) = option.map(Path::to_owned).or_else(|| set("RAPIDRAID_CONFIG")) {
            return vec![named];
        }
        // XDG Base Directory Specification: a relative XDG_CONFIG_HOME must be ignored.
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
            stall: seconds(layers, "staging.stall_s", DEFAULT_STALL)?,
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

/// Reads the name of a failure domain, which follows the same rule as the name of a node.
fn domain(layers: &Layers<'_>, key: &'static str) -> Result<Option<String>, ConfigError> {
    layers.get(key, "a name of 1 to 63 letters, digits, `.`, `_` or `-`", |v| {
        v.text()?.parse::<PeerName>().ok().map(String::from)
    })
}

#[cfg(test)]
mod tests;
