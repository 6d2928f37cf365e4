//! A cluster that has come to rest: what is left half done goes on until nothing is left, and then everything is as the ledger has it.

use std::collections::BTreeMap;

use rapidraid::catalogue::records::{Archiving, parse};
use rapidraid::client::{ArchiveReport, Client};
use rapidraid::format::file::FileName;
use rapidraid::format::records::{
    Checkpoint, PieceForm, Receipt, Record, ShardRoot, ShardState, StripeState, Writing,
};
use rapidraid::id::{SaveId, Step, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::store::{Kv, RecordScope, Store};
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

    /// The files of a step's archived stripes that no receipt of the attempt that counts ascribes to their node, there.
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
                let files = store.find(stripe).unwrap().into_iter().map(|info| info.key());
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

    /// Archives a step; a successor may be at it still, and has its lease's time to end.
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

    /// Archives what is committed, now that everybody is there, and checks that nothing but the pieces stays. Where a file has
    /// `rotted` a piece may be gone, and replicas stay for it: nothing makes pieces again.
    pub async fn assert_archivable(&self, client: &Client, ledger: &mut Ledger, rotted: bool) {
        let listed = client.list(None).await.unwrap();
        for view in &listed {
            let archived = self.archived_by_then(client, view.step).await;
            assert!(archived.undropped == 0 || rotted, "step {}: {archived:?}", view.step);
            let held = self.assert_invariant(client, view.step.0).await;
            assert_eq!(held.archived, held.stripes, "step {}", view.step);
            // A node that was away when its replica was ordered to be dropped, and that no record names, finds it itself.
            let left = || self.unexplained(view.step.0);
            let dropped = || rotted || left().is_empty();
            self.until_or("the replicas are dropped", dropped, || format!("{:?}", left())).await;
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
