//! `cluster init`: creates the files of a new cluster as complete folders, ready to be copied to
//! their machines.
//!
//! Guarantees: each configuration was parsed by the code that will read it; private keys have mode
//! 0600; no existing file is changed; a failure leaves no file behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::args::Init;
use super::files::{self, PUBLIC, SECRET};
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Tint};
use super::words::{NewNode, Setting};
use super::{Outcome, connect};
use crate::config::{
    ClientConfig, ConfigError, FILE_NAME, HostPort, NODE_SETTINGS, NodeConfig, Sources,
};
use crate::entropy::{Entropy, SystemEntropy};
use crate::id::{ClusterId, PeerName};
use crate::kind::ErrorKind;
use crate::net::Role;
use crate::net::authority::Authority;
use crate::net::identity::IdentityError;

/// The name in the client's certificate.
const CLIENT: &str = "client";
/// The number of seeds in a node's configuration. A node still finds the cluster when one seed is
/// down, and a person can read the list at a glance.
const SEEDS: usize = 3;
/// The maximum number of seeds in the configuration of a client or of an added node, which lists all
/// nodes up to this limit.
pub(super) const MAX_SEEDS: usize = 64;
/// The settings that `--set` refuses, because they differ from node to node or follow from
/// `--node`.
pub(super) const OWN: &[&str] = &[
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
    "catalogue.serve",
];

/// A cluster whose files were created.
pub struct NewCluster {
    /// The folder of the cluster.
    pub dir: PathBuf,
    /// The id of the cluster.
    pub cluster: ClusterId,
    /// The nodes of the cluster. The first one serves the catalogue.
    pub nodes: Vec<NewNode>,
    /// The number of nodes that the smallest configured code needs.
    pub nodes_needed: usize,
}

impl NewCluster {
    /// Returns the path of a node's configuration.
    pub fn node_config(&self, node: &PeerName) -> PathBuf {
        self.dir.join("nodes").join(node.as_str()).join(FILE_NAME)
    }

    /// Returns a remark if the cluster has too few nodes to save; an empty text if it has enough.
    fn describe_shortage(&self) -> String {
        let (nodes, needed) = (self.nodes.len(), self.nodes_needed);
        if nodes >= needed {
            return String::new();
        }
        format!(
            "\nNothing can be saved yet: the smallest configured code needs {needed} nodes, and the cluster has {nodes}.\n\
             Add nodes with `rapidraid cluster add-node`, or remove {} and make the cluster again with\n\
             `--set code.list=4,2`, which needs 4 nodes.\n",
            self.dir.display()
        )
    }

    /// Returns the path of the client's configuration.
    pub fn client_config(&self) -> PathBuf {
        self.dir.join("client").join(FILE_NAME)
    }
}

/// Runs the command `cluster init`.
pub fn run(options: &Init) -> Outcome {
    Ok(Box::new(create(&options.dir, &options.nodes, &options.set)?))
}

/// Creates the files of a cluster in `dir`. Returns `Invalid` for nodes or settings that make no
/// cluster, and `Exists` if `dir` is not free.
pub fn create(
    dir: &Path,
    nodes: &[NewNode],
    set: &[Setting],
) -> Result<NewCluster, CommandFailure> {
    check(nodes, set)?;
    check_free(dir)?;
    let mut cluster = NewCluster {
        dir: dir.to_owned(),
        cluster: ClusterId(SystemEntropy.id()),
        nodes: nodes.to_vec(),
        nodes_needed: 0,
    };
    let (texts, nodes_needed) = texts(&cluster, set)?;
    cluster.nodes_needed = nodes_needed;
    write_all(dir, cluster.cluster, &texts)?;
    Ok(cluster)
}

/// Returns `Exists` unless `dir` is an empty folder or does not exist.
pub(super) fn check_free(dir: &Path) -> Result<(), CommandFailure> {
    if files::is_free(dir)? {
        return Ok(());
    }
    let message = format!("{} exists and is not an empty folder", dir.display());
    Err(CommandFailure::new(ErrorKind::Exists, message)
        .with_hint("choose another folder: files of a cluster are never written over"))
}

fn check(nodes: &[NewNode], set: &[Setting]) -> Result<(), CommandFailure> {
    let twice = |what: &str, value: &str| {
        CommandFailure::new(ErrorKind::Invalid, format!("two nodes have the {what} {value}"))
            .with_hint("every --node needs a name and an address of its own")
    };
    let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    for node in nodes {
        if !names.insert(&node.name) {
            return Err(twice("name", node.name.as_str()));
        }
        if !addresses.insert(&node.address) {
            return Err(twice("address", node.address.as_str()));
        }
    }
    check_settings(set)
}

/// Returns `Invalid` if `set` names a setting that `--set` may not change or that a node does not
/// have.
pub(super) fn check_settings(set: &[Setting]) -> Result<(), CommandFailure> {
    for Setting { key, .. } in set {
        let why = if OWN.contains(&key.as_str()) {
            "which follows from --node"
        } else if !NODE_SETTINGS.contains(&key.as_str()) {
            "which a node does not have"
        } else {
            continue;
        };
        let failure =
            CommandFailure::new(ErrorKind::Invalid, format!("--set names `{key}`, {why}"));
        return Err(failure.with_hint("docs/configuration.md has every setting"));
    }
    Ok(())
}

/// The text of a configuration that was parsed, with the role and name of its owner.
pub(super) struct Text {
    pub(super) role: Role,
    pub(super) name: PeerName,
    pub(super) file: PathBuf,
    pub(super) text: String,
}

/// Returns all configurations. Each is parsed here, so that an invalid one is refused before any
/// file is written. Also returns the number of nodes that the smallest configured code needs.
fn texts(cluster: &NewCluster, set: &[Setting]) -> Result<(Vec<Text>, usize), CommandFailure> {
    let nothing = BTreeMap::new();
    let refused = |error: ConfigError| connect::config_failure(&error);
    let mut texts = Vec::with_capacity(cluster.nodes.len() + 1);
    let mut nodes_needed = 0;
    for (at, node) in cluster.nodes.iter().enumerate() {
        let (text, file) = (node_text(cluster, at, set), cluster.node_config(&node.name));
        let sources = Sources { file: &file, text: &text, env: &nothing, options: &nothing };
        let config = NodeConfig::parse(sources).map_err(refused)?;
        // All nodes have the same codes.
        nodes_needed = config.codes.iter().map(|code| code.n.into()).min().unwrap_or(0);
        texts.push(Text { role: Role::Node, name: node.name.clone(), file, text });
    }
    let (text, file) = (client_text(cluster, set), cluster.client_config());
    let sources = Sources { file: &file, text: &text, env: &nothing, options: &nothing };
    let client = ClientConfig::parse(sources).map_err(refused)?;
    texts.push(Text { role: Role::Client, name: client.membership.name, file, text });
    Ok((texts, nodes_needed))
}

/// Writes a new authority and the folders of all members to `dir`, which is free. A failure leaves no
/// file behind.
pub(super) fn write_all(
    dir: &Path,
    cluster: ClusterId,
    texts: &[Text],
) -> Result<(), CommandFailure> {
    let failed = |error: IdentityError| CommandFailure::of(error.kind(), &error);
    let authority = Authority::create(cluster).map_err(failed)?;
    let (ca, pem) = (dir.join("ca"), authority.to_pem());
    let write = || {
        files::make_private_folder(&ca)?;
        files::write_new(&ca.join("key.pem"), &pem.key_pem, SECRET)?;
        files::write_new(&ca.join("ca.pem"), &pem.cert_pem, PUBLIC)?;
        texts.iter().try_for_each(|text| write_member(dir, &authority, text))
    };
    write().inspect_err(|_| {
        for part in ["ca", "nodes", "client", "clients"] {
            files::remove_folder(&dir.join(part));
        }
    })
}

/// Writes the folder of a node or client. The configuration is written last.
pub(super) fn write_member(
    dir: &Path,
    authority: &Authority,
    of: &Text,
) -> Result<(), CommandFailure> {
    let Text { role, name, file, text } = of;
    let issued = authority.issue(*role, name);
    let issued = issued.map_err(|error| CommandFailure::of(error.kind(), &error))?;
    let folder = file.parent().unwrap_or(dir);
    files::make_private_folder(folder)?;
    files::write_new(&folder.join("key.pem"), &issued.key_pem, SECRET)?;
    files::write_new(&folder.join("certificate.pem"), &issued.cert_pem, PUBLIC)?;
    files::write_new(&folder.join("ca.pem"), authority.cert_pem(), PUBLIC)?;
    files::write_new(file, text, PUBLIC)
}

/// Returns the addresses of the first `count` nodes as a TOML list, without the node at index
/// `skip`, which does not need itself as a seed.
fn seeds(cluster: &NewCluster, skip: Option<usize>, count: usize) -> String {
    let others = cluster.nodes.iter().enumerate().filter(|(at, _)| Some(*at) != skip);
    let all: Vec<String> =
        others.take(count).map(|(_, node)| quoted(node.address.as_str())).collect();
    format!("[{}]", all.join(", "))
}

fn node_text(cluster: &NewCluster, at: usize, set: &[Setting]) -> String {
    let mut out =
        String::from("# A node of a rapidraid cluster. docs/configuration.md has every setting.\n");
    let mut line = |key: &str, value: &str| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "{key} = {value}");
    };
    let Some(node) = cluster.nodes.get(at) else { return out };
    line("cluster", &quoted(&cluster.cluster.to_string()));
    line("name", &quoted(node.name.as_str()));
    line("listen", &quoted(&listen(&node.address)));
    line("advertise", &quoted(node.address.as_str()));
    if let Some((zone, rack)) = &node.domain {
        line("zone", &quoted(zone.as_str()));
        line("rack", &quoted(rack.as_str()));
    }
    line("seeds", &seeds(cluster, Some(at), SEEDS));
    let (top, sections): (Vec<&Setting>, Vec<&Setting>) =
        set.iter().partition(|setting| !setting.key.contains('.'));
    for setting in top {
        line(&setting.key, &toml_value(setting));
    }
    let mut by_section: BTreeMap<&str, Vec<(&str, String)>> = BTreeMap::new();
    if at == 0 {
        by_section.entry("catalogue").or_default().push(("serve", "true".to_owned()));
    }
    for setting in sections {
        if let Some((section, name)) = setting.key.split_once('.') {
            by_section.entry(section).or_default().push((name, toml_value(setting)));
        }
    }
    for (section, settings) in by_section {
        let _ = writeln!(out, "\n[{section}]");
        for (name, value) in settings {
            let _ = writeln!(out, "{name} = {value}");
        }
    }
    out
}

/// Returns the configuration of the client. A client shares the network settings of the nodes.
fn client_text(cluster: &NewCluster, set: &[Setting]) -> String {
    let mut out = format!(
        "# A client of a rapidraid cluster. docs/configuration.md has every setting.\n\
         cluster = {}\nname = {}\nseeds = {}\n",
        quoted(&cluster.cluster.to_string()),
        quoted(CLIENT),
        seeds(cluster, None, MAX_SEEDS)
    );
    let shared = set.iter().filter_map(|s| Some((s.key.strip_prefix("network.")?, toml_value(s))));
    for (at, (name, value)) in shared.enumerate() {
        let head = if at == 0 { "\n[network]\n" } else { "" };
        // Writing to a string does not fail.
        let _ = writeln!(out, "{head}{name} = {value}");
    }
    out
}

/// Returns the address on which a node listens whose advertised address is `address`: a loopback
/// address is kept, any other one becomes all interfaces.
pub(super) fn listen(address: &HostPort) -> String {
    let text = address.as_str();
    let (host, port) = text.rsplit_once(':').unwrap_or((text, "7440"));
    let ip: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
    match ip {
        Some(ip) if ip.is_loopback() => text.to_owned(),
        Some(IpAddr::V6(_)) => format!("[{}]:{port}", Ipv6Addr::UNSPECIFIED),
        _ => format!("0.0.0.0:{port}"),
    }
}

/// Returns a value in the syntax of TOML: settings that are numbers, booleans or lists are not
/// quoted.
pub(super) fn toml_value(setting: &Setting) -> String {
    let value = setting.value.trim();
    let section = setting.key.split('.').next().unwrap_or_default();
    match (section, setting.key.as_str()) {
        (_, "code.list") => {
            let items: Vec<String> = value.split_whitespace().map(quoted).collect();
            format!("[{}]", items.join(", "))
        }
        ("timeouts" | "disk" | "policy" | "repair", _) if value.parse::<i64>().is_ok() => {
            value.to_owned()
        }
        (_, "storage") if value.parse::<bool>().is_ok() => value.to_owned(),
        _ => quoted(value),
    }
}

/// Returns a basic string of TOML. Its escapes are those of JSON.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

impl CommandOutput for NewCluster {
    fn json(&self) -> Map<String, Value> {
        let nodes: Vec<Value> = self
            .nodes
            .iter()
            .map(|node| {
                let config = self.node_config(&node.name).display().to_string();
                json!({ "name": node.name, "address": node.address.as_str(), "config": config })
            })
            .collect();
        let fields = json!({
            "dir": self.dir.display().to_string(), "cluster": self.cluster.to_string(), "nodes": nodes,
            "client_config": self.client_config().display().to_string(),
            "nodes_needed": self.nodes_needed,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let (dir, first) = (self.dir.display(), self.nodes.first());
        let first = first.map_or("", |node| node.name.as_str());
        let title = format!("cluster {} of {} nodes in {dir}", self.cluster, self.nodes.len());
        let step = |text: &str| paint.tint(Tint::Cyan, text);
        format!(
            "{title}\n\n\
             Next:\n\
             1. Copy {dir}/nodes/NAME to the machine of each node, and there run\n   {}\n\
             2. Give {dir}/client to those who save and restore. They run\n   {}\n\
             3. Keep {dir}/ca to yourself, off the nodes: its key decides who is in the cluster.\n\n\
             {first} serves the catalogue: its folder must survive.\n{}",
            step("rapidraid node --config NAME/rapidraid.toml"),
            step("rapidraid status --config client/rapidraid.toml"),
            self.describe_shortage(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Congestion;

    fn nodes(words: &[&str]) -> Vec<NewNode> {
        words.iter().map(|word| word.parse().unwrap()).collect()
    }

    #[test]
    fn a_cluster_that_is_too_small_to_save_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let four = nodes(&["a=h:1", "b=h:2", "c=h:3", "d=h:4"]);
        let text = |name: &str, set: &[Setting]| {
            create(&folder.path().join(name), &four, set).unwrap().text(Paint::PLAIN)
        };
        let code: Setting = "code.list=6,4 4,2".parse().unwrap();
        assert!(text("default", &[]).contains("needs 6 nodes, and the cluster has 4"));
        assert!(!text("smaller", &[code]).contains("needs"));
    }

    #[test]
    fn folders_are_complete_and_keys_private() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("c");
        let words = [
            "a=127.0.0.1:7001,north/r1",
            "b=example.org:7002",
            "c=[fe80::1]:7003",
            "d=10.0.0.1:7004",
        ];
        let set: Vec<Setting> = [
            "memory=128MiB",
            "code.list=6,4 4,2",
            "timeouts.lease_s=3",
            "network.congestion=bbr",
            "policy.keep_newest=5",
            "policy.archive_all_but=never",
        ]
        .iter()
        .map(|w| w.parse().unwrap())
        .collect();
        let cluster = create(&dir, &nodes(&words), &set).unwrap();
        for node in &cluster.nodes {
            let file = cluster.node_config(&node.name);
            let text = files::read_text(&file, 1 << 20).unwrap();
            let nothing = BTreeMap::new();
            let config = NodeConfig::parse(Sources {
                file: &file,
                text: &text,
                env: &nothing,
                options: &nothing,
            })
            .unwrap();
            assert_eq!(
                (config.memory_bytes, config.codes.len(), config.timeouts.lease.as_secs()),
                (128 << 20, 2, 3)
            );
            assert_eq!(config.congestion, Congestion::Bbr);
            let rule = config.policy.rule;
            assert_eq!((rule.archive_all_but, rule.keep_newest), (None, Some(5)));
            assert_eq!(config.serve_catalogue, node.name.as_str() == "a");
            assert!(
                config.membership.seeds.len() == 3
                    && !config.membership.seeds.contains(&node.address)
            );
            assert_eq!(connect::identity(&config.membership).unwrap().name(), &node.name);
            let mode = std::fs::metadata(&config.membership.key).unwrap().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let text = files::read_text(&cluster.client_config(), 1 << 20).unwrap();
        // The client must know all nodes, because any one of them may be the last one that is up.
        assert!(cluster.nodes.iter().all(|node| text.contains(node.address.as_str())), "{text}");
        assert!(text.ends_with("\n[network]\ncongestion = \"bbr\"\n"), "{text}");
        let listens: Vec<String> = cluster.nodes.iter().map(|node| listen(&node.address)).collect();
        assert_eq!(listens, ["127.0.0.1:7001", "0.0.0.0:7002", "[::]:7003", "0.0.0.0:7004"]);
        let again = create(&dir, &nodes(&words), &[]).err().unwrap();
        assert_eq!(again.kind, ErrorKind::Exists);
    }

    #[test]
    fn a_folder_whose_name_is_not_utf_8_is_told_as_json() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join(std::ffi::OsStr::from_bytes(b"c\xff"));
        let cluster = create(&dir, &nodes(&["a=h:1"]), &[]).unwrap();
        let told = cluster.json();
        let is_shown = |path: &Value| path.as_str().is_some_and(|path| path.contains("c\u{fffd}"));
        assert!(is_shown(&told["dir"]) && is_shown(&told["client_config"]), "{told:?}");
        assert!(is_shown(&told["nodes"][0]["config"]), "{told:?}");
    }

    #[test]
    fn what_makes_no_cluster_is_refused_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("c");
        let two = ["a=h:1", "b=h:2"];
        let refused = |words: &[&str], set: &str| {
            let set: Vec<Setting> = set.split_terminator(' ').map(|w| w.parse().unwrap()).collect();
            let failure = create(&dir, &nodes(words), &set).err().unwrap();
            assert_eq!(failure.kind, ErrorKind::Invalid, "{}", failure.message);
            assert!(!dir.exists());
        };
        refused(&["a=h:1", "a=h:2"], "");
        refused(&["a=h:1", "b=h:1"], "");
        refused(&two, "name=x");
        refused(&two, "memroy=1GiB");
        refused(&two, "memory=1MiB");
        refused(&two, "timeouts.lease_s=x");
        refused(&two, "network.congestion=reno");
    }
}
