//! `cluster add-node`: creates the folders of further nodes of an existing cluster in the folder
//! that `cluster init` made.
//!
//! A new node gets the settings of an existing one, so that codes, leases and rules are the same
//! everywhere. No existing file is changed: the other nodes learn of the new node from the
//! catalogue when it registers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use toml::Table;

use super::args::AddNode;
use super::files;
use super::init::{MAX_SEEDS, OWN, Text, check_settings, listen, quoted, toml_value, write_member};
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Tint};
use super::words::NewNode;
use super::{Outcome, connect};
use crate::config::{FILE_NAME, HostPort, MAX_FILE_BYTES, NodeConfig, Sources};
use crate::id::PeerName;
use crate::kind::ErrorKind;
use crate::net::Role;
use crate::net::authority::Authority;
use crate::net::identity::IdentityError;

/// Maximum number of node folders that are read.
const MAX_FOLDERS: usize = 4096;

/// A node whose folder exists.
struct Known {
    name: PeerName,
    address: HostPort,
    settings: Table,
    stores: bool,
}

/// The nodes that were added.
struct Added {
    dir: PathBuf,
    nodes: Vec<NewNode>,
    /// The node whose settings the new nodes have.
    like: PeerName,
}

/// Runs the command `cluster add-node`.
pub fn run(options: &AddNode) -> Outcome {
    let (dir, set) = (&options.dir, &options.set);
    check_settings(set)?;
    let authority = read_authority(dir)?;
    let known = known(dir, &authority)?;
    let Some(like) = known.iter().find(|node| node.stores).or(known.first()) else {
        let message = format!("{} has no folder of a node", dir.join("nodes").display());
        return Err(CommandFailure::new(ErrorKind::NotFound, message).with_hint(
            "a new node takes its settings from one that is there: put one node's folder back",
        ));
    };
    check(&options.nodes, &known)?;
    // Some of the folders may be of nodes that were removed from the cluster. So a new node gets
    // more seeds than `cluster init` gives to a node.
    let seeds: Vec<String> =
        known.iter().take(MAX_SEEDS).map(|node| node.address.as_str().to_owned()).collect();
    let mut settings = like.settings.clone();
    for setting in set {
        let value = format!("x = {}", toml_value(setting)).parse::<Table>();
        let value = value.ok().and_then(|mut table| table.remove("x"));
        let value = value.unwrap_or_else(|| toml::Value::String(setting.value.clone()));
        put(&mut settings, &setting.key, value);
    }
    let mut texts = Vec::new();
    for node in &options.nodes {
        let folder = dir.join("nodes").join(node.name.as_str());
        if files::kind_of(&folder).is_ok() {
            let message = format!("{} exists", folder.display());
            return Err(CommandFailure::new(ErrorKind::Exists, message)
                .with_hint("files of a cluster are never written over: move it away"));
        }
        let file = dir.join("nodes").join(node.name.as_str()).join(FILE_NAME);
        let text = text(&authority, node, &seeds, &settings);
        let nothing = BTreeMap::new();
        let sources = Sources { file: &file, text: &text, env: &nothing, options: &nothing };
        NodeConfig::parse(sources).map_err(|error| connect::config_failure(&error))?;
        texts.push(Text { role: Role::Node, name: node.name.clone(), file, text });
    }
    texts.iter().try_for_each(|text| write_member(dir, &authority, text)).inspect_err(|_| {
        // All these folders are new, so removing them loses nothing.
        for folder in texts.iter().filter_map(|text| text.file.parent()) {
            files::remove_folder(folder);
        }
    })?;
    let like = like.name.clone();
    Ok(Box::new(Added { dir: dir.clone(), nodes: options.nodes.clone(), like }))
}

/// Reads the authority of the cluster whose folders are in `dir`.
pub(super) fn read_authority(dir: &Path) -> Result<Authority, CommandFailure> {
    let ca = dir.join("ca");
    let hint = |failure: CommandFailure| {
        failure.with_hint(
            "DIR is the folder that `cluster init` made; its `ca` decides who is in the cluster",
        )
    };
    let cert = files::read_certificate(&ca.join("ca.pem")).map_err(hint)?;
    let key = files::read_secret(&ca.join("key.pem")).map_err(hint)?;
    let failed = |error: IdentityError| CommandFailure::of(error.kind(), &error);
    Authority::from_pem(&cert, &key).map_err(failed)
}

/// Returns the nodes whose folders exist, sorted by name.
fn known(dir: &Path, authority: &Authority) -> Result<Vec<Known>, CommandFailure> {
    let mut known = Vec::new();
    for (folder, kind) in files::entries(&dir.join("nodes"))?.into_iter().take(MAX_FOLDERS) {
        let file = folder.join(FILE_NAME);
        if !kind.is_dir() || files::kind_of(&file).is_err() {
            continue;
        }
        let text = files::read_text(&file, MAX_FILE_BYTES)?;
        let nothing = BTreeMap::new();
        let sources = Sources { file: &file, text: &text, env: &nothing, options: &nothing };
        let config = NodeConfig::parse(sources).map_err(|error| connect::config_failure(&error))?;
        if config.membership.cluster != authority.cluster() {
            let message = format!(
                "{} is of another cluster than {}",
                file.display(),
                dir.join("ca").display()
            );
            return Err(CommandFailure::new(ErrorKind::Invalid, message));
        }
        let mut settings = text.parse::<Table>().map_err(|error| {
            CommandFailure::new(
                ErrorKind::Invalid,
                format!("{}: {}", file.display(), error.message()),
            )
        })?;
        for own in OWN {
            take(&mut settings, own);
        }
        known.push(Known {
            name: config.membership.name,
            address: config.advertise,
            settings,
            stores: config.storage,
        });
    }
    known.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(known)
}

fn check(nodes: &[NewNode], known: &[Known]) -> Result<(), CommandFailure> {
    let mut names: BTreeSet<&str> = known.iter().map(|node| node.name.as_str()).collect();
    let mut addresses: BTreeSet<&str> = known.iter().map(|node| node.address.as_str()).collect();
    for node in nodes {
        let taken = [
            ("name", names.insert(node.name.as_str()), node.name.as_str()),
            ("address", addresses.insert(node.address.as_str()), node.address.as_str()),
        ];
        if let Some((what, _, value)) = taken.into_iter().find(|(_, is_new, _)| !is_new) {
            let message = format!("there is a node with the {what} {value} already");
            return Err(CommandFailure::new(ErrorKind::Exists, message).with_hint(
                "a node whose disk was lost keeps its name and folder: start it with an empty data folder",
            ));
        }
    }
    Ok(())
}

fn text(authority: &Authority, node: &NewNode, seeds: &[String], settings: &Table) -> String {
    let mut out =
        String::from("# A node of a rapidraid cluster. docs/configuration.md has every setting.\n");
    let mut line = |key: &str, value: &str| out.push_str(&format!("{key} = {}\n", quoted(value)));
    line("cluster", &authority.cluster().to_string());
    line("name", node.name.as_str());
    line("listen", &listen(&node.address));
    line("advertise", node.address.as_str());
    if let Some((zone, rack)) = &node.domain {
        line("zone", zone.as_str());
        line("rack", rack.as_str());
    }
    let seeds: Vec<String> = seeds.iter().map(|seed| quoted(seed)).collect();
    out.push_str(&format!("seeds = [{}]\n", seeds.join(", ")));
    // A table of strings, numbers, booleans and lists can always be serialized.
    out + &toml::to_string(settings).unwrap_or_default()
}

/// Removes the setting `section.name` or `name`.
fn take(settings: &mut Table, key: &str) {
    let Some((section, name)) = key.split_once('.') else {
        settings.remove(key);
        return;
    };
    if let Some(toml::Value::Table(inner)) = settings.get_mut(section) {
        inner.remove(name);
        if inner.is_empty() {
            settings.remove(section);
        }
    }
}

fn put(settings: &mut Table, key: &str, value: toml::Value) {
    let Some((section, name)) = key.split_once('.') else {
        settings.insert(key.to_owned(), value);
        return;
    };
    let section = settings.entry(section).or_insert_with(|| toml::Value::Table(Table::new()));
    if let toml::Value::Table(inner) = section {
        inner.insert(name.to_owned(), value);
    }
}

impl Added {
    fn config(&self, node: &NewNode) -> PathBuf {
        self.dir.join("nodes").join(node.name.as_str()).join(FILE_NAME)
    }
}

impl CommandOutput for Added {
    fn json(&self) -> Map<String, Value> {
        let node = |node: &NewNode| {
            let config = self.config(node).display().to_string();
            json!({ "name": node.name, "address": node.address.as_str(), "config": config })
        };
        let nodes: Vec<Value> = self.nodes.iter().map(node).collect();
        Map::from_iter([("nodes".to_owned(), Value::Array(nodes))])
    }

    fn text(&self, paint: Paint) -> String {
        let mut out = String::new();
        for node in &self.nodes {
            out.push_str(&format!(
                "{} {}\n",
                paint.tint(Tint::Bold, node.name.as_str()),
                self.config(node).display()
            ));
        }
        let step = paint.tint(Tint::Cyan, "rapidraid node --config NAME/rapidraid.toml");
        out + &format!(
            "\nTheir settings are those of {}.\nNext: copy each folder to its machine and run there {step}.\nA node is a member once it has registered (`rapidraid status`); new checkpoints use it from then on, older ones stay where they are.\n",
            self.like
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::init::create;
    use crate::cli::words::Setting;

    fn nodes(words: &[&str]) -> Vec<NewNode> {
        words.iter().map(|word| word.parse().unwrap()).collect()
    }

    fn add(dir: &Path, words: &[&str], set: &[&str]) -> Outcome {
        let set: Vec<Setting> = set.iter().map(|word| word.parse().unwrap()).collect();
        run(&AddNode { dir: dir.to_owned(), nodes: nodes(words), set })
    }

    #[test]
    fn a_new_node_is_like_those_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("c");
        let set: Vec<Setting> = ["memory=128MiB", "code.list=6,4 4,2", "timeouts.lease_s=3"]
            .map(|word| word.parse().unwrap())
            .into();
        let words = ["a=127.0.0.1:7001,north/r1", "b=example.org:7002"];
        let cluster = create(&dir, &nodes(&words), &set).unwrap();
        add(&dir, &["z=127.0.0.1:7009,south/r9", "y=h:1"], &["timeouts.lease_s=5"]).unwrap();
        let nothing = BTreeMap::new();
        for (name, zone, listen) in [("z", "south", "127.0.0.1:7009"), ("y", "", "0.0.0.0:1")] {
            let file = cluster.node_config(&name.parse().unwrap());
            let text = files::read_text(&file, 1 << 20).unwrap();
            let sources = Sources { file: &file, text: &text, env: &nothing, options: &nothing };
            let config = NodeConfig::parse(sources).unwrap();
            assert_eq!(config.membership.cluster, cluster.cluster);
            assert_eq!((config.memory_bytes, config.codes.len()), (128 << 20, 2));
            assert_eq!((config.timeouts.lease.as_secs(), config.serve_catalogue), (5, false));
            assert_eq!(
                (config.zone.unwrap_or_default().as_str(), config.listen.to_string()),
                (zone, listen.to_owned())
            );
            let seeds: Vec<&str> = config.membership.seeds.iter().map(HostPort::as_str).collect();
            assert_eq!(seeds, ["127.0.0.1:7001", "example.org:7002"]);
            assert_eq!(connect::identity(&config.membership).unwrap().name().as_str(), name);
        }
    }

    /// The folders of removed nodes may be the first ones by name.
    #[test]
    fn a_new_node_asks_more_nodes_than_the_first_three() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("c");
        let words: Vec<String> = (10..90).map(|at| format!("n{at}=h:{at}")).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let cluster = create(&dir, &nodes(&words), &[]).unwrap();
        add(&dir, &["z=h:9"], &[]).unwrap();
        let file = cluster.node_config(&"z".parse().unwrap());
        let text = files::read_text(&file, 1 << 20).unwrap();
        let table = text.parse::<Table>().unwrap();
        let seeds = table.get("seeds").and_then(toml::Value::as_array).unwrap();
        assert_eq!((seeds.len(), seeds[0].as_str()), (MAX_SEEDS, Some("h:10")));
    }

    #[test]
    fn what_is_there_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("c");
        let refused = |words: &[&str], set: &[&str]| add(&dir, words, set).err().unwrap().kind;
        assert_eq!(refused(&["z=h:9"], &[]), ErrorKind::NotFound);
        create(&dir, &nodes(&["a=h:1", "b=h:2"]), &[]).unwrap();
        assert_eq!(refused(&["a=h:9"], &[]), ErrorKind::Exists);
        assert_eq!(refused(&["z=h:1"], &[]), ErrorKind::Exists);
        assert_eq!(refused(&["z=h:9", "z=h:8"], &[]), ErrorKind::Exists);
        assert_eq!(refused(&["z=h:9"], &["seeds=h:1"]), ErrorKind::Invalid);
        assert_eq!(refused(&["z=h:9"], &["memory=1MiB"]), ErrorKind::Invalid);
        assert!(!dir.join("nodes/z").exists());
    }
}
