//! `cluster renew-keys`: creates the folders of an existing cluster anew, with a new authority and new
//! keys for all members. It is the remedy for a leaked key, and for a lost key of the authority.
//!
//! The cluster keeps its id, so the members keep their data. No existing file is changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::args::RenewKeys;
use super::files;
use super::init::{Text, check_free, write_all};
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Tint};
use super::transfer::counted;
use super::{Outcome, connect};
use crate::config::{ClientConfig, FILE_NAME, MAX_FILE_BYTES, Membership, NodeConfig, Sources};
use crate::id::{ClusterId, PeerName};
use crate::kind::ErrorKind;
use crate::net::Role;

/// Maximum number of entries of the folder `nodes`, and of the folder `clients`.
const MAX_FOLDERS: usize = 4096;

/// The output of `cluster renew-keys`: the folder that was created, the old one, and the members
/// with new keys.
struct Renewed {
    dir: PathBuf,
    old: PathBuf,
    cluster: ClusterId,
    nodes: Vec<PeerName>,
    clients: Vec<PeerName>,
}

/// The members that were read, with the configurations to write.
#[derive(Default)]
struct Members {
    texts: Vec<Text>,
    cluster: Option<ClusterId>,
}

/// Runs the command `cluster renew-keys`.
pub fn run(options: &RenewKeys) -> Outcome {
    let RenewKeys { dir: old, new: dir } = options;
    check_free(dir)?;
    let mut members = Members::default();
    members.read_all(&old.join("nodes"), &dir.join("nodes"), Role::Node)?;
    let Some(cluster) = members.cluster else {
        let message = format!("{} has no folder of a node", old.join("nodes").display());
        return Err(CommandFailure::new(ErrorKind::NotFound, message)
            .with_hint("DIR is the folder that `cluster init` made"));
    };
    members.read_one(&old.join("client"), &dir.join("client"), Role::Client)?;
    members.read_all(&old.join("clients"), &dir.join("clients"), Role::Client)?;
    write_all(dir, cluster, &members.texts)?;
    let names = |role: Role| {
        let of_role = members.texts.iter().filter(|text| text.role == role);
        of_role.map(|text| text.name.clone()).collect()
    };
    let (nodes, clients) = (names(Role::Node), names(Role::Client));
    Ok(Box::new(Renewed { dir: dir.clone(), old: old.clone(), cluster, nodes, clients }))
}

impl Members {
    /// Reads the folders of members in `from`, if it exists.
    fn read_all(&mut self, from: &Path, to: &Path, role: Role) -> Result<(), CommandFailure> {
        if files::kind_of(from).is_err() {
            return Ok(());
        }
        let folders = files::entries(from)?;
        if folders.len() > MAX_FOLDERS {
            let message = format!("{} has more than {MAX_FOLDERS} entries", from.display());
            return Err(CommandFailure::new(ErrorKind::Invalid, message)
                .with_hint("is this the folder that `cluster init` made?"));
        }
        for (folder, kind) in folders {
            if let (true, Some(name)) = (kind.is_dir(), folder.file_name()) {
                self.read_one(&folder, &to.join(name), role)?;
            }
        }
        Ok(())
    }

    /// Reads the configuration of a member, if the folder `from` has one.
    fn read_one(&mut self, from: &Path, to: &Path, role: Role) -> Result<(), CommandFailure> {
        let file = from.join(FILE_NAME);
        if files::kind_of(&file).is_err() {
            return Ok(());
        }
        let text = files::read_text(&file, MAX_FILE_BYTES)?;
        let Membership { cluster, name, .. } = parse_membership(&file, &text, role)?;
        if self.cluster.is_some_and(|known| known != cluster) {
            let message = format!("{} is of another cluster than the first node", file.display());
            return Err(CommandFailure::new(ErrorKind::Invalid, message)
                .with_hint("move it away: a folder has the members of one cluster"));
        }
        self.cluster = Some(cluster);
        self.texts.push(Text { role, name, file: to.join(FILE_NAME), text });
        Ok(())
    }
}

fn parse_membership(file: &Path, text: &str, role: Role) -> Result<Membership, CommandFailure> {
    let nothing = BTreeMap::new();
    let sources = Sources { file, text, env: &nothing, options: &nothing };
    let parsed = match role {
        Role::Node => NodeConfig::parse(sources).map(|config| config.membership),
        Role::Client => ClientConfig::parse(sources).map(|config| config.membership),
    };
    parsed.map_err(|error| connect::config_failure(&error))
}

impl CommandOutput for Renewed {
    fn json(&self) -> Map<String, Value> {
        let fields = json!({
            "dir": self.dir.display().to_string(), "cluster": self.cluster.to_string(), "nodes": self.nodes,
            "clients": self.clients,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let (dir, old) = (self.dir.display(), self.old.display());
        let files = paint.tint(Tint::Cyan, "key.pem, certificate.pem and ca.pem");
        format!(
            "new keys in {dir} for cluster {}: {}, {}\n\n\
             Next:\n\
             1. Copy {files} from {dir}/nodes/NAME over those on the machine\n   of each node, and from {dir}/client and {dir}/clients/NAME to the clients.\n\
             2. Restart all daemons. Processes with old keys and processes with new keys refuse each other.\n\
             3. Keep {dir}/ca to yourself, off the nodes, and use {dir} from now on for add-node and\n   add-client. Destroy {old}/ca and all old keys.\n",
            self.cluster,
            counted(self.nodes.len() as u64, "node"),
            counted(self.clients.len() as u64, "client"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{AddClient, AddNode};
    use crate::cli::init::create;
    use crate::cli::words::NewNode;
    use crate::cli::{add_client, add_node};

    fn renew(old: &Path, new: &Path) -> Outcome {
        run(&RenewKeys { dir: old.to_owned(), new: new.to_owned() })
    }

    #[test]
    fn all_members_get_new_keys_of_the_same_cluster() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        let nodes: Vec<NewNode> = ["a=h:1", "b=h:2"].map(|word| word.parse().unwrap()).into();
        let cluster = create(&old, &nodes, &[]).unwrap();
        add_client::run(&AddClient { dir: old.clone(), name: "ops".parse().unwrap() }).unwrap();
        // The key of the authority is not needed: it may be lost.
        files::remove_folder(&old.join("ca"));
        let renewed = renew(&old, &new).unwrap().json();
        assert_eq!(renewed["cluster"], cluster.cluster.to_string());
        assert_eq!(renewed["nodes"], json!(["a", "b"]));
        assert_eq!(renewed["clients"], json!(["client", "ops"]));
        let members = [
            ("nodes/a", Role::Node),
            ("nodes/b", Role::Node),
            ("client", Role::Client),
            ("clients/ops", Role::Client),
        ];
        for (member, role) in members {
            let read = |dir: &Path, name: &str| {
                files::read_text(&dir.join(member).join(name), MAX_FILE_BYTES).unwrap()
            };
            assert_eq!(read(&old, FILE_NAME), read(&new, FILE_NAME));
            let file = new.join(member).join(FILE_NAME);
            let membership = parse_membership(&file, &read(&new, FILE_NAME), role).unwrap();
            connect::identity(&membership).unwrap();
            for name in ["key.pem", "certificate.pem", "ca.pem"] {
                assert_ne!(read(&old, name), read(&new, name), "{member}/{name}");
            }
        }
        assert_eq!(renew(&old, &new).err().unwrap().kind, ErrorKind::Exists);
    }

    #[test]
    fn folders_whose_names_are_not_utf_8_are_told_as_json() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &[u8]| folder.path().join(std::ffi::OsStr::from_bytes(name));
        let (old, new) = (path(b"old\xff"), path(b"new\xff"));
        let nodes = |word: &str| vec![word.parse::<NewNode>().unwrap()];
        create(&old, &nodes("a=h:1"), &[]).unwrap();
        let add = AddClient { dir: old.clone(), name: "ops".parse().unwrap() };
        let client = add_client::run(&add).unwrap().json();
        let add = AddNode { dir: old.clone(), nodes: nodes("b=h:2"), set: Vec::new() };
        let node = add_node::run(&add).unwrap().json();
        let renewed = renew(&old, &new).unwrap().json();
        for told in [&client["config"], &node["nodes"][0]["config"], &renewed["dir"]] {
            assert!(told.as_str().is_some_and(|path| path.contains('\u{fffd}')), "{told}");
        }
    }

    #[test]
    fn folders_of_no_cluster_and_of_two_clusters_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (old, other, new) =
            (folder.path().join("old"), folder.path().join("other"), folder.path().join("new"));
        assert_eq!(renew(&old, &new).err().unwrap().kind, ErrorKind::NotFound);
        let node = |word: &str| vec![word.parse::<NewNode>().unwrap()];
        create(&old, &node("a=h:1"), &[]).unwrap();
        create(&other, &node("b=h:1"), &[]).unwrap();
        let text =
            files::read_text(&other.join("nodes/b").join(FILE_NAME), MAX_FILE_BYTES).unwrap();
        files::make_private_folder(&old.join("nodes/b")).unwrap();
        files::write_new(&old.join("nodes/b").join(FILE_NAME), &text, files::PUBLIC).unwrap();
        assert_eq!(renew(&old, &new).err().unwrap().kind, ErrorKind::Invalid);
        assert!(!new.exists());
    }
}
