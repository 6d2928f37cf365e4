//! The real node: it executes the operations, reports its holdings, and is compared with the model.

use std::collections::BTreeSet;

use rapidraid::catalogue::record_access::shard_state_key;
use rapidraid::code::table;
use rapidraid::format::file::FileName;
use rapidraid::format::records::{LAYOUT_STANDARD, Record, Run, ShardState, StripeState};
use rapidraid::id::{Attempt, NodeId, SaveId, ShardId, StripeId};
use rapidraid::net::Role;
use rapidraid::net::call::CallError;
use rapidraid::store::{PieceSpec, RecordScope, Store};
use rapidraid::wire::NodeAddress;
use rapidraid::wire::calls::{
    CompareAndSetKey, FindRemovedSaves, GetRecord, ListFiles, ListInventory, ListMarkedSaves,
    RecordName,
};

use crate::draw::{BLOCK, Draw, PIECE_BYTES};
use crate::state::{self, Deed, Held, State};
use world::World;
use world::power::Leaves;
use world::raw::{Voice, finish_block};

/// The machine of the node. Machine 0 is the catalogue server.
const NODE: usize = 1;

/// The node and its model.
pub struct Subject {
    world: World,
    client: Voice,
    peer: Voice,
    to: NodeAddress,
    pub model: State,
}

impl Subject {
    pub async fn start(draw: &Draw, seed: u64) -> Self {
        let world = World::simulated(1, &[(4, 2)], BLOCK, seed).await;
        let (client, peer) = (world.voice(Role::Client, "writer"), world.voice(Role::Node, "boss"));
        let (to, home) = (world.node_address(NODE), world.node_address(0));
        let archived = draw.archived();
        for (stripe, &(attempt, generation)) in &archived {
            let code = table::find(4, 2).unwrap().id();
            let state = StripeState::Archived { attempt, code, generation, dropped: false };
            let runs = [state, StripeState::Replicated].map(|state| Run { count: 1, state }).into();
            let state = ShardState { generation, owner: None, deleting: false, runs };
            let (key, value) = (shard_state_key(stripe.shard), Some(state.to_bytes().unwrap()));
            peer.ask(&home, &CompareAndSetKey { key, expected: None, value }).await.unwrap();
        }
        let store = world.nodes[&NODE].store();
        let (epoch, map, held) =
            (store.highest_seen_epoch(), store.db_id_of_highest_epoch(), Held::new());
        let me = NodeId::of(&world.machines[NODE].name);
        assert!(map.is_some());
        Self { world, client, peer, to, model: State { me, held, epoch, map, archived } }
    }

    fn store(&self) -> &Store {
        self.world.nodes[&NODE].store()
    }

    async fn make(&self, deed: &Deed) -> Result<(), CallError> {
        let to = &self.to;
        match deed {
            Deed::Block(call, bytes, lies) => {
                let mut exchange = self.client.open_block(to, call).await?;
                let whole = if *lies { &world::content(bytes.len(), 99) } else { bytes };
                finish_block(&mut exchange, whole, bytes).await.map(drop)
            }
            Deed::Piece(stripe, piece, attempt, bytes) => {
                let spec = PieceSpec {
                    stripe: *stripe,
                    piece: *piece,
                    attempt: *attempt,
                    code: table::find(4, 2).unwrap().id().0,
                    layout: LAYOUT_STANDARD,
                    len_bytes: PIECE_BYTES,
                };
                // This write is no request, so it gives no answer. The test infers from the
                // holdings afterwards whether the power failed.
                let written = self.store().create_piece_writer(spec).and_then(|mut writer| {
                    writer.write_grain(0, bytes)?;
                    writer.finish(&mut |_, _| ())
                });
                written.map(drop).map_err(|error| {
                    let (kind, message) = (error.kind(), error.to_string());
                    rapidraid::wire::RemoteError { kind, message }.into()
                })
            }
            Deed::Record(call) => self.client.ask(to, call).await,
            Deed::Places(call) => self.peer.ask(to, call).await,
            Deed::Mark(call) => self.peer.ask(to, call).await,
            Deed::Receipt(call) => self.peer.ask(to, call).await,
            Deed::Tombstone(call) => self.peer.ask(to, call).await,
            Deed::Sweep(call) => self.peer.ask(to, call).await.map(drop),
            Deed::Drop(call) => self.peer.ask(to, call).await.map(drop),
            Deed::Claim(call) => self.peer.ask(to, call).await,
        }
    }

    /// Executes an operation on the node and on the model, and checks that the answers are equal.
    pub async fn answers_alike(&mut self, deed: &Deed) {
        let (answer, expected) = (self.make(deed).await, self.model.take(deed));
        let is_alike = match (&answer, expected) {
            (Ok(()), Ok(())) | (Err(_), Err(None)) => true,
            (Err(error), Err(Some(kind))) => error.kind() == kind,
            _ => false,
        };
        assert!(is_alike, "{deed:?}: {answer:?}, the model says {expected:?}");
    }

    pub async fn restart(&mut self) {
        self.world.kill(NODE).await;
        self.world.boot(NODE);
    }

    /// Cuts the power at one of the operation's changes, or after it. Each file is then in its
    /// state before or after the operation; if the operation was confirmed, all files are in their
    /// state after it.
    pub async fn cut_power_amid(&mut self, draw: &Draw, deed: &Deed) {
        let machine = self.world.machines[NODE].clone();
        let (power, network) = (machine.power.clone(), self.world.network.clone());
        let cut = move || {
            power.turn(false);
            network.kill(&world::address(NODE));
        };
        machine.power.cut_after(draw.below(14), cut);
        let answer = self.make(deed).await;
        machine.power.calm();
        self.world.cut_power(NODE);
        let leaves = match draw.below(4) {
            0 => Leaves::Synced,
            1 => Leaves::Torn(draw.below(u64::MAX)),
            2 => Leaves::All,
            _ => Leaves::Cache,
        };
        self.world.lose_unsynced(NODE, leaves).await;
        self.world.boot(NODE);

        let before = self.model.clone();
        let expected = self.model.take(deed);
        let after = self.model.clone();
        if answer.is_ok() {
            assert_eq!(expected, Ok(()), "{deed:?}");
            return;
        }
        let (held, epoch, map) =
            (self.held(), self.store().highest_seen_epoch(), self.store().db_id_of_highest_epoch());
        for path in held.keys().chain(before.held.keys()).chain(after.held.keys()) {
            let found = held.get(path);
            let is_either = found == before.held.get(path) || found == after.held.get(path);
            assert!(is_either, "{deed:?} cut off: {path} is {found:?}");
        }
        let tenures = [(before.epoch, before.map), (after.epoch, after.map)];
        assert!(tenures.contains(&(epoch, map)), "{deed:?} cut off: {epoch} {map:?}");
        (self.model.held, self.model.epoch, self.model.map) = (held, epoch, map);
    }

    /// Returns the complete contents of the data folder.
    fn held(&self) -> Held {
        let (store, mut held) = (self.store(), Held::new());
        let small = |scope, path: &dyn Fn(&str) -> String, held: &mut Held| {
            for (name, _) in store.list_record_files(scope).unwrap() {
                held.insert(path(&name), store.get_record_file(scope, &name).unwrap().unwrap());
            }
        };
        for shard in store.list_shards(None, 1000).unwrap() {
            small(RecordScope::Shard(shard), &|name| state::of_shard(shard, name), &mut held);
            if store.is_recorded_removed(shard.save()).unwrap() {
                held.insert(state::grave(shard.save()), Vec::new());
            }
            for stripe in store.list_stripes(shard, None, 1000).unwrap() {
                small(
                    RecordScope::Stripe(stripe),
                    &|name| state::of_stripe(stripe, name),
                    &mut held,
                );
                for (key, _) in store.list_all_files(stripe).unwrap() {
                    let file = store.open_undamaged_file(key).unwrap();
                    assert_eq!(file.scrub(), Vec::<u64>::new(), "{key}");
                    held.insert(state::file(stripe, key.name), file.index_entry().root.to_vec());
                }
            }
        }
        for save in self.saves() {
            if store.is_recorded_removed(save).unwrap() {
                held.insert(state::grave(save), Vec::new());
            }
        }
        held
    }

    fn saves(&self) -> BTreeSet<SaveId> {
        self.model.archived.keys().map(|stripe| stripe.shard.save()).collect()
    }

    /// Checks that the node holds what the model holds, and that the model is sound.
    pub fn holds_alike(&self, when: impl Fn() -> String) {
        assert_eq!(self.held(), self.model.held, "{}", when());
        let store = self.store();
        assert_eq!(
            (store.highest_seen_epoch(), store.db_id_of_highest_epoch()),
            (self.model.epoch, self.model.map),
            "{}",
            when()
        );
        self.model.assert_sound();
    }

    /// Checks that the node's answers about its holdings match the model.
    pub async fn tells_alike(&self, draw: &Draw) {
        let (peer, to, held) = (&self.peer, &self.to, &self.model.held);
        let (stripe, attempt) = (draw.stripe(), draw.attempt());
        let (shard, index) = (stripe.shard, stripe.index);
        for record in [
            RecordName::Leaves,
            RecordName::Mark,
            RecordName::Stripe { index },
            RecordName::Receipt { index, attempt },
        ] {
            let found = peer.ask(to, &GetRecord { shard, record }).await.unwrap();
            assert_eq!(found.as_ref(), held.get(&state::record(shard, record)), "{record:?}");
        }
        let views = peer.ask(to, &ListFiles { stripe }).await.unwrap();
        let mut found: Vec<String> =
            views.iter().map(|view| state::file(stripe, view.file)).collect();
        found.sort();
        assert_eq!(found, self.model.files(stripe));

        let (saves, all) = (self.saves(), self.saves().into_iter().collect());
        let buried = peer.ask(to, &FindRemovedSaves { saves: all }).await.unwrap();
        let expected: Vec<SaveId> =
            saves.iter().copied().filter(|save| self.model.is_buried(*save)).collect();
        assert_eq!(buried, expected);
        let marked = peer.ask(to, &ListMarkedSaves { after: None }).await.unwrap();
        let marked: BTreeSet<SaveId> = marked.saves.iter().map(|found| found.saved.save).collect();
        assert!(saves.iter().all(|save| marked.contains(save) == self.model.has_mark(*save)));

        let only = draw.below(2).eq(&0).then(|| draw.save());
        let (mut told, mut shards, mut after) = (BTreeSet::new(), Vec::new(), None);
        loop {
            let page = peer.ask(to, &ListInventory { after, only }).await.unwrap();
            assert!(page.next.is_none_or(|next| after.is_none_or(|after| next > after)));
            shards.extend(page.shards);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        for found in &shards {
            let shard: ShardId = found.shard;
            let path = |name| state::of_shard(shard, name);
            told.extend(found.mark.is_some().then(|| path("commit")));
            told.extend(found.root.is_some().then(|| path("leaves")));
            told.extend(found.tombstone.is_some().then(|| path("tombstone")));
            for held in &found.stripes {
                let stripe = StripeId { shard, index: held.index };
                let replica = |block: &u8| FileName::Replica { block: *block };
                let piece = |&(piece, attempt): &(u8, Attempt)| FileName::Piece { piece, attempt };
                let names = held.replicas.iter().map(replica).chain(held.pieces.iter().map(piece));
                told.extend(names.map(|name| state::file(stripe, name)));
                told.extend(held.receipts.iter().map(|held| state::receipt(stripe, held.0)));
            }
        }
        let start = only.map_or("shards/".to_owned(), |save| format!("shards/{save}"));
        let is_told = |path: &&String| {
            path.starts_with(&start) && !path.ends_with("/fence") && !path.ends_with("/record")
        };
        let expected: BTreeSet<String> = held.keys().filter(is_told).cloned().collect();
        assert_eq!(told, expected);
    }
}
