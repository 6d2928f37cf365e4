//! The destination of log lines: stderr. A node logs as its configuration says, the staging daemon
//! at level info, and every other command only if `RUST_LOG` asks for it.

use std::io;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

use super::Front;
use crate::config::{LogFormat, NodeConfig};

/// The variable that selects log lines by module and level. It overrides all other settings.
const FILTER: &str = "RUST_LOG";
/// A filter that shows the lines of this program from level info on, and the trace points of
/// operations.
const EXAMPLE: &str = "warn,rapidraid=info,rapidraid::stage=debug";

/// Starts the log of a node.
pub fn of_daemon(front: &mut Front, config: &NodeConfig) {
    let level = config.log_level.as_str();
    // Lines of the crates below this one matter only when something is wrong.
    let default = || EnvFilter::new(format!("warn,rapidraid={level}"));
    start(filter_of_env(front).unwrap_or_else(default), config.log_format);
}

/// Starts the log of a staging daemon.
pub fn of_staging(front: &mut Front) {
    let default = || EnvFilter::new("warn,rapidraid=info");
    start(filter_of_env(front).unwrap_or_else(default), LogFormat::Text);
}

/// Starts the log of a command if `RUST_LOG` asks for one. Without it, commands do not log.
pub fn of_command(front: &mut Front) {
    if let Some(filter) = filter_of_env(front) {
        start(filter, LogFormat::Text);
    }
}

/// Returns the filter in `RUST_LOG`. Returns `None` if the variable is not set, or, after a warning, if
/// it does not parse.
fn filter_of_env(front: &mut Front) -> Option<EnvFilter> {
    let text = front.env.get(FILTER)?;
    match EnvFilter::try_new(text) {
        Ok(filter) => Some(filter),
        Err(error) => {
            let message = format!("{FILTER}={text} is ignored: {error}");
            front.printer.warn(&message, &format!("a filter is for example {FILTER}={EXAMPLE}"));
            None
        }
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
