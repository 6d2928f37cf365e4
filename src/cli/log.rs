//! The destination of log lines: stderr. A node logs as its configuration says, the staging daemon
//! at level info, and every other command only if `RUST_LOG` asks for it.

use std::collections::BTreeMap;
use std::io;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{LogFormat, NodeConfig};

/// The variable that selects log lines by module and level. It overrides all other settings.
const FILTER: &str = "RUST_LOG";

/// Starts the log of a node.
pub fn of_daemon(config: &NodeConfig) {
    let level = config.log_level.as_str();
    // Lines of the crates below this one matter only when something is wrong.
    let default = format!("warn,rapidraid={level}");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    start(filter, config.log_format);
}

/// Starts the log of a staging daemon.
pub fn of_staging() {
    let filter = EnvFilter::try_from_default_env();
    start(filter.unwrap_or_else(|_| EnvFilter::new("warn,rapidraid=info")), LogFormat::Text);
}

/// Starts the log of a command if `RUST_LOG` asks for one. Without it, commands do not log.
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
