//! A cluster that has come to rest: what is left half done goes on until nothing is left, and then everything is as the ledger has it.

use std::collections::{BTreeMap, BTreeSet};

use rapidraid::catalogue::records::{Archiving, parse};
use rapidraid::client::Client;
use rapidraid::format::records::{Checkpoint, Record, Writing};
use rapidraid::id::{SaveId, Step};
use rapidraid::store::Kv;
use rapidraid::wire::calls::PlanChoice;

use super::ledger::Ledger;
use super::look::files_below;
use super::{Machine, World, job, options, restore};

impl World {
    /// What the catalogue has that somebody still has to finish. Where a file has `rotted` an archiving may wait for a piece, which
    /// nothing makes again.
    pub fn unfinished(&self, rotted: bool) -> Vec<String> {
        let kv = self.map();
        let mut left = self.catalogue_keys("x/");
        for (key, value) in kv.scan(b"k/a/", None, 1000).unwrap() {
            let key = String::from_utf8_lossy(&key).into_owned();
            let wish: Archiving = parse(&key, &value[8..]).unwrap();
            left.extend((!rotted || wish.waiting.is_none()).then_some(key));
        }
        for (key, value) in kv.scan(b"k/c/", None, 1000).unwrap() {
            let checkpoint = Checkpoint::parse(&value[8..]).unwrap();
            let key = String::from_utf8_lossy(&key).into_owned();
            left.extend(checkpoint.writing.iter().map(|writing| match writing {
                Writing::Open { save, .. } => format!("{key}: {save} is open"),
                Writing::Decided { saved } => format!("{key}: {} is decided", saved.save),
            }));
            left.extend(checkpoint.removing.iter().map(|of| format!("{key}: {} goes", of.save)));
        }
        left
    }

    /// Waits until nothing is unfinished, and checks all that must hold then: each step is what the ledger allows, every committed
    /// byte is there, and nothing else.
    pub async fn assert_rest(&self, client: &Client, ledger: &mut Ledger, rotted: bool) {
        // The catalogue's host changes nothing until it has heard the others again.
        tokio::time::sleep(self.lease).await;
        let at_rest = || self.unfinished(rotted).is_empty();
        self.until_or("rest", at_rest, || format!("{:?}", self.unfinished(rotted))).await;
        let listed = client.list(None).await.unwrap();
        let saves: BTreeMap<u64, SaveId> =
            listed.iter().map(|view| (view.step.0, view.saved.save)).collect();
        for step in ledger.steps() {
            let found = match saves.contains_key(&step) {
                true => {
                    self.assert_invariant(client, step).await;
                    let (out, _) = restore(client, step)
                        .await
                        .unwrap_or_else(|error| panic!("step {step} at rest: {error}"));
                    let version = ledger.version_of(step, &out);
                    Some(version.unwrap_or_else(|| panic!("step {step} is no version of it")))
                }
                false => None,
            };
            ledger.settle(step, found);
        }
        self.assert_swept(client).await;
        // An order that came again may have begun a piece, and stands still for a while.
        let temporary = || {
            let of = |machine: &Machine| files_below(&*machine.disk, "tmp");
            self.machines.iter().map(of).collect::<Vec<_>>()
        };
        let none = || temporary().iter().all(Vec::is_empty);
        self.until_or("no temporary files", none, || format!("{:?}", temporary())).await;
        self.assert_idle().await;
    }

    /// Archives what is committed, now that everybody is there, and checks that nothing but the pieces stays. Where a file has
    /// `rotted` a piece may be gone, and replicas stay for it: nothing makes pieces again.
    pub async fn assert_archivable(&self, client: &Client, ledger: &mut Ledger, rotted: bool) {
        let listed = client.list(None).await.unwrap();
        for view in &listed {
            let chain = options(PlanChoice::Chain);
            let archived =
                client.archive(&job(), Some(view.step), chain, &mut |_| ()).await.unwrap();
            assert!(archived.undropped == 0 || rotted, "step {}: {archived:?}", view.step);
            let held = self.assert_invariant(client, view.step.0).await;
            assert_eq!(held.archived, held.stripes, "step {}", view.step);
            let save = view.saved.save.to_string();
            // A spare that was given a replica, and was away when its place went to another one, is asked by nobody: on nodes
            // without a piece a replica may stay until the step is removed (docs/durability-bugs.md).
            let pieces = self.files(|path| path.contains(&save) && path.ends_with(".pc"));
            let folder = |(machine, path): &(usize, String)| -> (usize, String) {
                (*machine, path.rsplit_once('/').unwrap().0.to_owned())
            };
            let pieces: BTreeSet<_> = pieces.iter().map(folder).collect();
            let mut files = self.files(|path| path.contains(&save) && path.ends_with(".rep"));
            files.retain(|file| pieces.contains(&folder(file)));
            assert!(files.is_empty() || rotted, "replicas of step {}: {files:?}", view.step);
        }
        self.assert_rest(client, ledger, rotted).await;
        assert_eq!(client.list(None).await.unwrap().len(), listed.len());
    }

    /// A step of one shard, saved with everybody there.
    pub async fn assert_saves(&self, client: &Client, ledger: &mut Ledger, step: u64) {
        let shards = vec![("last".to_owned(), super::content(1000, step))];
        self.until_live(self.machines.len() - 1).await;
        let version = ledger.save(step, shards.clone());
        let named: Vec<_> = shards.iter().map(|(name, bytes)| super::shard(name, bytes)).collect();
        let saved =
            client.save(&job(), Step(step), named, Default::default(), super::quiet()).await;
        ledger.saved(step, version, false, &saved);
        saved.unwrap();
    }
}
