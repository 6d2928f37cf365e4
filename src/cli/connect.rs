//! From a configuration file to a connection: which file, which identity, which node answers.
//!
//! It promises that a cluster that does not answer is an error within [`CONNECT_LIMIT`] that names the seeds that were
//! tried and the file that they come from.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use super::args::Connect;
use super::printer::Failure;
use super::words::Setting;
use super::{files, known_nodes};
use crate::client::{Client, ClientError, join_some};
use crate::clock::{SystemClock, deadline};
use crate::config::{ClientConfig, ConfigError, MAX_FILE_BYTES, Membership, Sources};
use crate::kind::ErrorKind;
use crate::net::identity::Identity;

/// How long the seeds may take together to answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long connections may take to close.
const CLOSE_LIMIT: Duration = Duration::from_millis(200);
/// How long a question may take whose answer is no work, such as a list.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// A failure of the client library, with its own hint where it has one.
pub fn failure(error: &ClientError) -> Failure {
    let failure = Failure::of(error.kind(), error);
    match error.hint() {
        Some(hint) => failure.with_hint(hint),
        None => failure,
    }
}

/// A failure of a configuration: mend the file.
pub fn config_failure(error: &ConfigError) -> Failure {
    Failure::of(error.kind(), error)
        .with_hint("docs/configuration.md has every setting with its range")
}

/// Settings from the command line, by name; the last one wins.
pub fn options(set: &[Setting]) -> BTreeMap<String, String> {
    set.iter().map(|setting| (setting.key.clone(), setting.value.clone())).collect()
}

/// The client's configuration and the file that it is from.
pub fn client_config(
    connect: &Connect,
    env: &BTreeMap<String, String>,
) -> Result<(PathBuf, ClientConfig), Failure> {
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
    Err(Failure::new(ErrorKind::NotFound, message).with_hint(
        "name it with --config or RAPIDRAID_CONFIG; `rapidraid cluster init` writes one as client/rapidraid.toml",
    ))
}

/// Who this process is, from the files of its configuration.
pub fn identity(membership: &Membership) -> Result<Identity, Failure> {
    let ca = files::read_certificate(&membership.ca)?;
    let certificate = files::read_certificate(&membership.certificate)?;
    let key = files::read_secret(&membership.key)?;
    let identity = Identity::from_pem(&ca, &certificate, &key)
        .map_err(|error| Failure::of(error.kind(), &error))?;
    let wrong = |what: &str, file: &str, certificate: &dyn std::fmt::Display| {
        let path = membership.certificate.display();
        let message = format!(
            "the configuration says {what} {file}, the certificate {path} says {certificate}"
        );
        Err(Failure::new(ErrorKind::Denied, message))
    };
    if identity.cluster() != membership.cluster {
        return wrong("cluster", &membership.cluster.to_string(), &identity.cluster());
    }
    if *identity.name() != membership.name {
        return wrong("name", membership.name.as_str(), identity.name());
    }
    Ok(identity)
}

/// A client of the cluster that the configuration names.
pub async fn client(connect: &Connect, env: &BTreeMap<String, String>) -> Result<Client, Failure> {
    client_beside(connect, env, Vec::new()).await
}

/// The same, when `others` may answer too.
pub async fn client_beside(
    connect: &Connect,
    env: &BTreeMap<String, String>,
    others: Vec<String>,
) -> Result<Client, Failure> {
    let (file, config) = client_config(connect, env)?;
    let identity = identity(&config.membership)?;
    let mut seeds: Vec<String> = config.membership.seeds.iter().map(ToString::to_string).collect();
    seeds.extend(others);
    let tried = join_some(&seeds);
    let hint = format!(
        "start the daemons (`rapidraid node --config ...`), or correct `seeds` in {}",
        file.display()
    );
    let connecting = Client::connect_by(&identity, seeds, config.congestion);
    match deadline(&*SystemClock::new(), CONNECT_LIMIT, connecting).await {
        Ok(Ok(client)) => {
            known_nodes::learn(&client, &file).await;
            Ok(client)
        }
        Ok(Err(error)) if error.kind().is_transient() => {
            Err(Failure::of(error.kind(), &error).with_hint(hint))
        }
        Ok(Err(error)) => Err(failure(&error)),
        Err(elapsed) => {
            let message = format!("no node answers: {elapsed} from {tried}");
            Err(Failure::new(ErrorKind::Unavailable, message).with_hint(hint))
        }
    }
}

/// Lets a client go. Nodes that are dead take no leave: that is not waited for.
pub async fn close(client: &Client) {
    let _ = deadline(&*SystemClock::new(), CLOSE_LIMIT, client.close()).await;
}

/// Asks something whose answer is no work.
pub async fn ask<T>(question: impl Future<Output = Result<T, ClientError>>) -> Result<T, Failure> {
    match deadline(&*SystemClock::new(), ANSWER_LIMIT, question).await {
        Ok(answer) => answer.map_err(|error| failure(&error)),
        Err(elapsed) => {
            let message = format!("{elapsed}: the catalogue, or the way to it, is not available");
            Err(Failure::new(ErrorKind::Timeout, message))
        }
    }
}
