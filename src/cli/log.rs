//! Where log lines go: to stderr, in the daemon as its configuration says, in every other command when `RUST_LOG` asks for them.

use std::collections::BTreeMap;
use std::io;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{LogFormat, NodeConfig};

/// Selects log lines by module and level, over whatever else is set.
const FILTER: &str = "RUST_LOG";

/// The daemon's log.
pub fn of_daemon(config: &NodeConfig) {
    let level = config.log_level.as_str();
    // What crates below us say is wanted only when something is wrong.
    let default = format!("warn,rapidraid={level}");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    start(filter, config.log_format);
}

/// The log of a staging daemon.
pub fn of_staging() {
    let filter = EnvFilter::try_from_default_env();
    start(filter.unwrap_or_else(|_| EnvFilter::new("warn,rapidraid=info")), LogFormat::Text);
}

/// The log of a command: none, unless it is asked for.
pub fn of_command(env: &BTreeMap<String, String>) {
    if let Some(filter) = env.get(FILTER).and_then(|text| EnvFilter::try_new(text).ok()) {
        start(filter, LogFormat::Text);
    }
}

fn start(filter: EnvFilter, format: LogFormat) {
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // A second subscriber in one process (tests) is refused; the first one stays.
    let _ = match format {
        LogFormat::Text => log.with_ansi(false).finish().try_init(),
        LogFormat::Json => log.json().finish().try_init(),
    };
}
