//! A cluster at rest: unfinished operations continue until none is left, and then the state of the
//! cluster matches the ledger.

use std::collections::BTreeMap;

use rapidraid::catalogue::record_access::{ArchiveRequest, parse_record};
use rapidraid::client::{ArchiveReport, Client};
use rapidraid::format::file::FileName;
use rapidraid::format::records::{
    Checkpoint, PieceForm, Receipt, Record, ShardRoot, ShardState, StripeState, Writing,
};
use rapidraid::id::{SaveId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Kv, RecordScope, Store};
use rapidraid::wire::calls::{PlanChoice, RepairOptions};

use super::ledger::Ledger;
use super::look::files_below;
use super::{Machine, World, job, options, restore};

impl World {
    /// Returns the unfinished operations in the catalogue. Where a file has `rotted`, an archiving
    /// may wait for a lost piece, which is never recreated; such an archiving does not count.
    pub fn unfinished(&self, rotted: bool) -> Vec<String> {
        let kv = self.map();
        let mut left = [self.catalogue_keys("x/"), self.catalogue_keys("d/")].concat();
        for (key, value) in kv.scan(b"k/a/", None, 1000).unwrap() {
            let key = String::from_utf8_lossy(&key).into_owned();
            let wish: ArchiveRequest = parse_record(&key, &value[8..]).unwrap();
            let is_left = !rotted || wish.waiting.is_none();
            left.extend(is_left.then(|| format!("{key}: {:?}", wish.waiting)));
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

    /// Waits until nothing is unfinished and checks the state at rest: each step has a content that
    /// the ledger allows, every committed byte is present, and nothing else is.
    pub async fn assert_rest(&self, client: &Client, ledger: &mut Ledger, rotted: bool) {
        // The catalogue server changes nothing until it has heard from the other nodes again.
        tokio::time::sleep(self.lease).await;
        let at_rest = || self.unfinished(rotted).is_empty();
        self.until_or("rest", at_rest, || format!("{:?}", self.unfinished(rotted))).await;
        let listed = client.list_steps(None).await.unwrap();
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
        // A duplicated order may have begun a piece, which then stays in `tmp` for a while.
        let temporary = || {
            let of = |machine: &Machine| files_below(&*machine.disk, "tmp");
            self.machines.iter().map(of).collect::<Vec<_>>()
        };
        let none = || temporary().iter().all(Vec::is_empty);
        self.until_or("no temporary files", none, || format!("{:?}", temporary())).await;
        self.assert_idle().await;
    }

    /// Returns the files of a step's archived stripes that no receipt on their own node ascribes to
    /// it. Only receipts of the attempt in the catalogue count.
    fn unexplained(&self, step: u64) -> Vec<String> {
        let images = self.machines[1..].iter().map(Machine::after_power_cut);
        let found = self.committed(step).unwrap();
        let of_shard = |store: &Store, root: &ShardRoot, state: &ShardState| {
            let archived = (0..).zip(state.states()).filter_map(|(index, state)| match state {
                StripeState::Archived { attempt, .. } => Some((index, attempt)),
                _ => None,
            });
            let mut left = Vec::new();
            for (index, attempt) in archived {
                let stripe = StripeId { shard: root.shard, index };
                let name = format!("receipt-{attempt}");
                let receipt = store.get_record_file(RecordScope::Stripe(stripe), &name).unwrap();
                let pieces =
                    receipt.map_or(Vec::new(), |bytes| Receipt::parse(&bytes).unwrap().pieces);
                let is_ours = |name: FileName| {
                    pieces.iter().any(|piece| {
                        piece.node == store.node()
                            && match piece.form {
                                PieceForm::File => {
                                    name == FileName::Piece { piece: piece.piece, attempt }
                                }
                                PieceForm::Replica { block } => name == FileName::Replica { block },
                            }
                    })
                };
                let files =
                    store.list_undamaged_files(stripe).unwrap().into_iter().map(|info| info.key());
                let files = files.filter(|key| !is_ours(key.name));
                left.extend(files.map(|key| format!("{key} on {}", store.node())));
            }
            left
        };
        images
            .flat_map(|store| {
                found
                    .iter()
                    .flat_map(|(root, state)| of_shard(&store, root, state))
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    /// Archives a step. Another coordinator may still be archiving it after a takeover, so the call
    /// is repeated for some lease periods.
    async fn archived_by_then(&self, client: &Client, step: Step) -> ArchiveReport {
        let end = tokio::time::Instant::now() + 8 * self.lease;
        loop {
            let chain = options(PlanChoice::Chain);
            match client.archive(&job(), Some(step), chain, &mut |_| ()).await {
                Err(error)
                    if error.kind() == ErrorKind::Exists && tokio::time::Instant::now() < end =>
                {
                    tokio::time::sleep(self.lease / 4).await;
                }
                archived => return archived.unwrap(),
            }
        }
    }

    /// Archives all committed steps, now that all nodes run, and checks that only the pieces
    /// remain. Where a file has `rotted`, a piece may be lost and its replicas stay: pieces are
    /// never recreated.
    pub async fn assert_archivable(&self, client: &Client, ledger: &mut Ledger, rotted: bool) {
        let listed = client.list_steps(None).await.unwrap();
        for view in &listed {
            let archived = self.archived_by_then(client, view.step).await;
            assert!(archived.undropped == 0 || rotted, "step {}: {archived:?}", view.step);
            let held = self.assert_invariant(client, view.step.0).await;
            assert_eq!(held.archived, held.stripes, "step {}", view.step);
            // A node that was down when its replica was ordered to be dropped, and that no record
            // names, finds the replica itself.
            let left = || self.unexplained(view.step.0);
            let dropped = || rotted || left().is_empty();
            self.until_or("the replicas are dropped", dropped, || format!("{:?}", left())).await;
        }
        self.assert_rest(client, ledger, rotted).await;
        assert_eq!(client.list_steps(None).await.unwrap().len(), listed.len());
    }

    /// Replaces the disks of these storage nodes by empty ones, one after the other, and checks that
    /// a repair makes again all that each node had.
    pub async fn assert_repairable(&mut self, client: &Client, machines: &[usize]) {
        for &machine in machines {
            if self.serving().contains(&machine) {
                continue;
            }
            self.kill(machine).await;
            self.replace(machine);
            self.boot(machine);
            self.until_live(self.machines.len() - 1).await;
            self.until_caught_up().await;
            for view in client.list_steps(None).await.unwrap() {
                let options = RepairOptions::default();
                let repaired =
                    client.repair(&job(), Some(view.step), options, &[], &mut |_| ()).await;
                let notes = repaired.unwrap().notes;
                assert_eq!(notes, Vec::<String>::new(), "step {}", view.step);
                let verified =
                    client.verify(&job(), Some(view.step), super::quiet()).await.unwrap();
                assert_eq!((verified.faults, verified.lacking), (vec![], vec![]));
                self.assert_invariant(client, view.step.0).await;
            }
        }
    }

    /// Saves a step of one shard while all nodes run.
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
