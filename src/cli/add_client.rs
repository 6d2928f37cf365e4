//! `cluster add-client`: creates the folder of a further client of an existing cluster, so that each
//! group of users has a key of its own.
//!
//! A new client gets the settings of the one that `cluster init` made. No existing file is changed.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Map, Value, json};
use toml::Table;

use super::add_node::read_authority;
use super::args::AddClient;
use super::files;
use super::init::{Text, write_member};
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Tint};
use super::{Outcome, connect};
use crate::config::{ClientConfig, FILE_NAME, MAX_FILE_BYTES, Sources};
use crate::id::PeerName;
use crate::kind::ErrorKind;
use crate::net::Role;

/// The client that was added.
struct Added {
    name: PeerName,
    folder: PathBuf,
}

/// Runs the command `cluster add-client`.
pub fn run(options: &AddClient) -> Outcome {
    let AddClient { dir, name } = options;
    let authority = read_authority(dir)?;
    let like = dir.join("client").join(FILE_NAME);
    let text = files::read_text(&like, MAX_FILE_BYTES)?;
    let nothing = BTreeMap::new();
    let sources = Sources { file: &like, text: &text, env: &nothing, options: &nothing };
    let known = ClientConfig::parse(sources).map_err(|error| connect::config_failure(&error))?;
    if known.membership.cluster != authority.cluster() {
        let message =
            format!("{} is of another cluster than {}", like.display(), dir.join("ca").display());
        return Err(CommandFailure::new(ErrorKind::Invalid, message));
    }
    let folder = dir.join("clients").join(name.as_str());
    if known.membership.name == *name || files::kind_of(&folder).is_ok() {
        let message = format!("there is a client with the name {name} already");
        return Err(CommandFailure::new(ErrorKind::Exists, message)
            .with_hint("choose another name: files of a cluster are never written over"));
    }
    let mut settings = text.parse::<Table>().map_err(|error| {
        let message = format!("{}: {}", like.display(), error.message());
        CommandFailure::new(ErrorKind::Invalid, message)
    })?;
    settings.insert("name".to_owned(), toml::Value::String(name.as_str().to_owned()));
    // A table of strings, numbers, booleans and lists can always be serialized.
    let settings = toml::to_string(&settings).unwrap_or_default();
    let text = format!(
        "# A client of a rapidraid cluster. docs/configuration.md has every setting.\n{settings}"
    );
    let file = folder.join(FILE_NAME);
    let text = Text { role: Role::Client, name: name.clone(), file, text };
    // The folder is new, so removing it loses nothing.
    write_member(dir, &authority, &text).inspect_err(|_| files::remove_folder(&folder))?;
    Ok(Box::new(Added { name: name.clone(), folder }))
}

impl CommandOutput for Added {
    fn json(&self) -> Map<String, Value> {
        let config = self.folder.join(FILE_NAME).display().to_string();
        let fields = json!({ "name": self.name, "config": config });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let command = "rapidraid status --config rapidraid.toml";
        format!(
            "{} {}\n\nNext: give this folder to its users. They run there {}.\n",
            paint.tint(Tint::Bold, self.name.as_str()),
            self.folder.display(),
            paint.tint(Tint::Cyan, command)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::init::create;
    use crate::cli::words::Setting;

    #[test]
    fn a_new_client_has_a_key_of_its_own_and_the_settings_of_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("c");
        let set: Vec<Setting> = vec!["network.congestion=bbr".parse().unwrap()];
        create(&dir, &["a=h:1".parse().unwrap(), "b=h:2".parse().unwrap()], &set).unwrap();
        let add = |name: &str| run(&AddClient { dir: dir.clone(), name: name.parse().unwrap() });
        add("team-b").unwrap();
        let file = dir.join("clients/team-b").join(FILE_NAME);
        let text = files::read_text(&file, MAX_FILE_BYTES).unwrap();
        let nothing = BTreeMap::new();
        let sources = Sources { file: &file, text: &text, env: &nothing, options: &nothing };
        let config = ClientConfig::parse(sources).unwrap();
        assert_eq!((config.membership.name.as_str(), config.membership.seeds.len()), ("team-b", 2));
        assert_eq!(config.congestion, crate::config::Congestion::Bbr);
        assert_eq!(connect::identity(&config.membership).unwrap().name().as_str(), "team-b");
        for taken in ["team-b", "client"] {
            assert_eq!(add(taken).err().unwrap().kind, ErrorKind::Exists);
        }
    }
}
