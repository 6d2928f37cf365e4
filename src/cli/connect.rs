//! The way from a configuration file to a connected client: the file, the identity, and a node that
//! answers.
//!
//! If no node answers, the commands here return an error within [`CONNECT_LIMIT`] that names the
//! seeds that were tried and the file that lists them.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use super::args::Connect;
use super::printer::CommandFailure;
use super::words::Setting;
use super::{files, known_nodes};
use crate::client::{Client, ClientError, summarize_addresses};
use crate::clock::{SystemClock, deadline};
use crate::config::{ClientConfig, ConfigError, MAX_FILE_BYTES, Membership, Sources};
use crate::kind::ErrorKind;
use crate::net::call::CallError;
use crate::net::identity::Identity;
use crate::wire::RemoteError;

/// Maximum total time for the seeds to answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time to tell the peers that the connections close. QUIC sends each peer one packet, which
/// is not acknowledged. A peer that misses it closes the connection after its idle timeout.
const CLOSE_LIMIT: Duration = Duration::from_millis(20);
/// Maximum time for the state of the cluster and of retention. Calls about committed steps may take
/// longer, and end by themselves.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Converts an error of the client library, with its own hint if it has one.
pub fn failure(error: &ClientError) -> CommandFailure {
    let failure = CommandFailure::of(error.kind(), error);
    match (error.hint(), error) {
        (_, ClientError::Call(CallError::Failed(answer))) if answer.is_unknown_call() => {
            outdated(answer)
        }
        (Some(hint), _) => failure.with_hint(hint),
        (None, ClientError::Call(CallError::Failed(_))) => failure.as_told_by_daemon(),
        (None, _) => failure,
    }
}

/// Returns the failure of a command that asks for more than a daemon of an older version knows. The
/// request itself is not wrong, so the kind is not `Invalid`.
fn outdated(answer: &RemoteError) -> CommandFailure {
    let message = format!("a daemon of an older version does not know what it was asked: {answer}");
    CommandFailure::new(ErrorKind::Unavailable, message)
        .with_hint("`rapidraid status` shows the version of each node: upgrade the older ones")
}

/// Converts an error of a configuration. The hint names the page that lists all settings.
pub fn config_failure(error: &ConfigError) -> CommandFailure {
    CommandFailure::of(error.kind(), error)
        .with_hint("docs/configuration.md has every setting with its range")
}

/// Returns the settings of the command line by name. The last value of a setting wins.
pub fn options(set: &[Setting]) -> BTreeMap<String, String> {
    set.iter().map(|setting| (setting.key.clone(), setting.value.clone())).collect()
}

/// Reads the client's configuration. Returns it with the path of its file.
///
/// Returns `NotFound` if none of the candidate files exists. The nodes of the file `known-nodes`
/// beside the configuration are added to its seeds.
pub fn client_config(
    connect: &Connect,
    env: &BTreeMap<String, String>,
) -> Result<(PathBuf, ClientConfig), CommandFailure> {
    let candidates = ClientConfig::candidates(connect.config.as_deref(), env);
    let last = candidates.len().saturating_sub(1);
    for (at, file) in candidates.iter().enumerate() {
        match files::read_text(file, MAX_FILE_BYTES) {
            Ok(text) => {
                let options = options(&connect.set);
                let sources = Sources { file, text: &text, env, options: &options };
                let mut config = ClientConfig::parse(sources).map_err(|e| config_failure(&e))?;
                let seeds = &mut config.membership.seeds;
                let known = known_nodes::read(file);
                seeds.extend(
                    known.into_iter().filter(|node| !seeds.contains(node)).collect::<Vec<_>>(),
                );
                return Ok((file.clone(), config));
            }
            Err(failure) if failure.kind == ErrorKind::NotFound && at < last => {}
            Err(failure) if failure.kind != ErrorKind::NotFound => return Err(failure),
            Err(_) => break,
        }
    }
    let tried: Vec<String> = candidates.iter().map(|file| file.display().to_string()).collect();
    let message = format!("there is no configuration of a client: looked for {}", tried.join(", "));
    Err(CommandFailure::new(ErrorKind::NotFound, message).with_hint(
        "name it with --config or RAPIDRAID_CONFIG; `rapidraid cluster init` writes one as client/rapidraid.toml",
    ))
}

/// Reads the identity of this process from the files that its configuration names. Returns `Denied`
/// if the certificate names another cluster or another name than the configuration.
pub fn identity(membership: &Membership) -> Result<Identity, CommandFailure> {
    let ca = files::read_certificate(&membership.ca)?;
    let certificate = files::read_certificate(&membership.certificate)?;
    let key = files::read_secret(&membership.key)?;
    let identity = Identity::from_pem(&ca, &certificate, &key)
        .map_err(|error| CommandFailure::of(error.kind(), &error))?;
    let wrong = |what: &str, file: &str, certificate: &dyn std::fmt::Display| {
        let path = membership.certificate.display();
        let message = format!(
            "the configuration says {what} {file}, the certificate {path} says {certificate}"
        );
        Err(CommandFailure::new(ErrorKind::Denied, message))
    };
    if identity.cluster() != membership.cluster {
        return wrong("cluster", &membership.cluster.to_string(), &identity.cluster());
    }
    if *identity.name() != membership.name {
        return wrong("name", membership.name.as_str(), identity.name());
    }
    Ok(identity)
}

/// Connects a client to the cluster that the configuration names.
pub async fn client(
    connect: &Connect,
    env: &BTreeMap<String, String>,
) -> Result<Client, CommandFailure> {
    client_beside(connect, env, Vec::new()).await
}

/// Connects a client as [`client`] does. The addresses in `others` are tried in addition to the
/// seeds.
pub async fn client_beside(
    connect: &Connect,
    env: &BTreeMap<String, String>,
    others: Vec<String>,
) -> Result<Client, CommandFailure> {
    let (file, config) = client_config(connect, env)?;
    let identity = identity(&config.membership)?;
    let mut seeds: Vec<String> = config.membership.seeds.iter().map(ToString::to_string).collect();
    seeds.extend(others);
    let tried = summarize_addresses(&seeds);
    let hint = format!(
        "start the daemons (`rapidraid node --config ...`), or correct `seeds` in {}",
        file.display()
    );
    let connecting = Client::connect_with_congestion(&identity, seeds, config.congestion);
    match deadline(&*SystemClock::new(), CONNECT_LIMIT, connecting).await {
        Ok(Ok(client)) => {
            known_nodes::learn(&client, &file).await;
            Ok(client)
        }
        Ok(Err(error)) if error.kind().is_transient() => {
            Err(CommandFailure::of(error.kind(), &error).with_hint(hint))
        }
        Ok(Err(error)) => Err(failure(&error)),
        Err(elapsed) => {
            let message = format!("no node answers: {elapsed} from {tried}");
            Err(CommandFailure::new(ErrorKind::Unavailable, message).with_hint(hint))
        }
    }
}

/// Closes a client, within [`CLOSE_LIMIT`].
pub async fn close(client: &Client) {
    let _ = deadline(&*SystemClock::new(), CLOSE_LIMIT, client.close()).await;
}

/// Awaits a request about the state of the cluster, for at most [`ANSWER_LIMIT`].
pub async fn ask<T>(
    question: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, CommandFailure> {
    match deadline(&*SystemClock::new(), ANSWER_LIMIT, question).await {
        Ok(answer) => answer.map_err(|error| failure(&error)),
        Err(elapsed) => {
            let message =
                format!("{elapsed}: the catalogue server does not answer or cannot be reached");
            Err(CommandFailure::new(ErrorKind::Timeout, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_a_daemon_has_no_default_hint_about_the_callers_files_or_command() {
        let hint = |kind| {
            let message = "there is nothing to rebuild".to_owned();
            failure(&ClientError::Call(CallError::Failed(RemoteError { kind, message }))).hint
        };
        for kind in [ErrorKind::Exists, ErrorKind::NotFound, ErrorKind::Io] {
            assert_eq!(hint(kind), "", "{kind:?}");
        }
        assert!(hint(ErrorKind::Unavailable).contains("rapidraid status"));
        let unknown = RemoteError::unknown_call(71);
        let older = failure(&ClientError::Call(CallError::Failed(unknown)));
        assert!(older.exit_code() == 1 && older.hint.contains("version of each node"), "{older:?}");
        let here = failure(&ClientError::InTheWay { path: "a".into(), found: "a folder" });
        assert!(here.hint.contains("another name"), "{here:?}");
    }
}
