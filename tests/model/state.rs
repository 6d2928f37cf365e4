//! The state of one node and the effect of each call on it: the rules of docs/semantics.md as a
//! pure state machine.

use std::collections::BTreeMap;

use bytes::Bytes;
use rapidraid::format::file::{FileKey, FileName};
use rapidraid::format::records::{
    CommitMark, Fence, Leaves, PieceForm, Receipt, ReceiptPiece, Record, RemoveReason, StripeFixed,
    StripeRecord, Tombstone,
};
use rapidraid::id::{Attempt, DbId, Epoch, Generation, NodeId, SaveId, ShardId, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::wire::calls::{
    ClaimEpoch, DropReplicas, PurgeSave, PutBlock, PutMark, PutPlaces, PutReceipt, PutRecord,
    PutTombstone, RecordName,
};

use world::CLUSTER;
use world::raw::trailer;

/// One operation on a node: a call, or the piece that a run of a plan leaves.
#[derive(Debug, Clone)]
pub enum Deed {
    /// The last field: whether the sender's trailer contradicts the bytes.
    Block(PutBlock, Bytes, bool),
    Piece(StripeId, u8, Attempt, Bytes),
    Record(PutRecord),
    Places(PutPlaces),
    Mark(PutMark),
    Receipt(PutReceipt),
    Tombstone(PutTombstone),
    Sweep(PurgeSave),
    Drop(DropReplicas),
    Claim(ClaimEpoch),
}

/// Success, or a refusal with its kind. The kind is `None` where the rules do not determine it.
pub type Answer = Result<(), Option<ErrorKind>>;

fn refused(kind: ErrorKind) -> Answer {
    Err(Some(kind))
}

/// The contents of the data folder, by path: the bytes of records, the roots of files.
pub type Held = BTreeMap<String, Vec<u8>>;

/// The model of one node.
#[derive(Debug, Clone)]
pub struct State {
    pub me: NodeId,
    pub held: Held,
    pub epoch: Epoch,
    pub map: Option<DbId>,
    /// The catalogue of epoch 1: the archived stripes, each with its attempt and generation.
    pub archived: BTreeMap<StripeId, (Attempt, Generation)>,
}

pub fn of_shard(shard: ShardId, name: &str) -> String {
    format!("shards/{shard}/{name}")
}

pub fn of_stripe(stripe: StripeId, name: &str) -> String {
    format!("shards/{}/{:08x}/{name}", stripe.shard, stripe.index)
}

pub fn file(stripe: StripeId, name: FileName) -> String {
    format!("shards/{}", FileKey { stripe, name })
}

pub fn tombstone(save: SaveId) -> String {
    of_shard(ShardId::new(save, u32::MAX), "tombstone")
}

pub fn grave(save: SaveId) -> String {
    format!("grave of {save}")
}

pub fn receipt(stripe: StripeId, attempt: Attempt) -> String {
    of_stripe(stripe, &format!("receipt-{attempt}"))
}

/// Returns the path of a record.
pub fn record(shard: ShardId, record: RecordName) -> String {
    match record {
        RecordName::Leaves => of_shard(shard, "leaves"),
        RecordName::Mark => of_shard(shard, "commit"),
        RecordName::Stripe { index } => of_stripe(StripeId { shard, index }, "record"),
        RecordName::Receipt { index, attempt } => receipt(StripeId { shard, index }, attempt),
    }
}

/// Returns the stripe that a stripe record belongs to.
fn stripe_of(bytes: &[u8]) -> StripeId {
    let record = StripeRecord::parse(bytes).unwrap();
    postcard::from_bytes::<StripeFixed>(&record.fixed).unwrap().stripe
}

impl State {
    fn has(&self, path: &str) -> bool {
        self.held.contains_key(path)
    }

    pub fn is_buried(&self, save: SaveId) -> bool {
        self.has(&tombstone(save)) || self.has(&grave(save))
    }

    pub fn has_mark(&self, save: SaveId) -> bool {
        let start = format!("shards/{save}");
        self.held.keys().any(|path| path.starts_with(&start) && path.ends_with("/commit"))
    }

    /// Returns the paths of a stripe's files, without its records.
    pub fn files(&self, stripe: StripeId) -> Vec<String> {
        let is_file = |path: &&String| path.ends_with(".rep") || path.ends_with(".pc");
        let start = of_stripe(stripe, "");
        self.held.keys().filter(|path| path.starts_with(&start)).filter(is_file).cloned().collect()
    }

    fn ours(&self, receipt: &Receipt) -> Vec<(String, ReceiptPiece)> {
        let ours = receipt.pieces.iter().filter(|piece| piece.node == self.me);
        let name = |piece: &ReceiptPiece| match piece.form {
            PieceForm::File => FileName::Piece { piece: piece.piece, attempt: receipt.attempt },
            PieceForm::Replica { block } => FileName::Replica { block },
        };
        ours.map(|piece| (file(receipt.stripe, name(piece)), piece.clone())).collect()
    }

    fn has_pieces(&self, receipt: &Receipt) -> Answer {
        for (path, piece) in self.ours(receipt) {
            match self.held.get(&path) {
                None => return refused(ErrorKind::NotFound),
                Some(root) if *root != piece.root => return refused(ErrorKind::Corrupt),
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn raise(&mut self, epoch: Epoch) -> Answer {
        if epoch < self.epoch {
            return refused(ErrorKind::Fenced);
        }
        if epoch > self.epoch {
            (self.epoch, self.map) = (epoch, None);
        }
        Ok(())
    }

    fn admit(&mut self, save: SaveId, epoch: Epoch) -> Answer {
        if self.is_buried(save) {
            return refused(ErrorKind::Fenced);
        }
        self.raise(epoch)
    }

    fn admit_write(&mut self, shard: ShardId, generation: Generation) -> Answer {
        if generation.epoch > self.epoch {
            // A client cannot raise the epoch. The kind of the refusal depends on whether another
            // node can confirm that the epoch has not begun.
            return Err(None);
        }
        self.admit(shard.save(), generation.epoch)?;
        let is_settled = ["commit", "fence"].iter().any(|name| self.has(&of_shard(shard, name)));
        if is_settled { refused(ErrorKind::Denied) } else { Ok(()) }
    }

    fn admit_order(&mut self, shard: ShardId, generation: Generation, holder: NodeId) -> Answer {
        self.admit(shard.save(), generation.epoch)?;
        let path = of_shard(shard, "fence");
        let known = self.held.get(&path).map(|bytes| Fence::parse(bytes).unwrap().generation);
        if known.is_some_and(|known| known > generation) {
            return refused(ErrorKind::Fenced);
        }
        if known != Some(generation) {
            self.held.insert(path, Fence { generation, holder }.to_bytes().unwrap());
        }
        Ok(())
    }

    /// Applies an operation. Returns the node's answer; the state afterwards is the state that the
    /// node must have.
    pub fn take(&mut self, deed: &Deed) -> Answer {
        match deed {
            Deed::Block(call, bytes, lies) => {
                self.admit_write(call.stripe.shard, call.generation)?;
                let path = file(call.stripe, FileName::Replica { block: call.block });
                let root = trailer(bytes).root.to_vec();
                match self.held.get(&path) {
                    _ if *lies => refused(ErrorKind::Corrupt),
                    Some(there) if *there != root => refused(ErrorKind::Exists),
                    _ => self.put(path, &root),
                }
            }
            Deed::Piece(stripe, piece, attempt, bytes) => {
                let name = FileName::Piece { piece: *piece, attempt: *attempt };
                self.put(file(*stripe, name), &trailer(bytes).root)
            }
            Deed::Record(call) => {
                self.admit_write(call.shard, call.generation)?;
                let fixed = |bytes: &[u8]| match call.record {
                    RecordName::Leaves => bytes.to_vec(),
                    _ => StripeRecord::parse(bytes).unwrap().fixed,
                };
                let is_ours = match call.record {
                    RecordName::Leaves => {
                        Leaves::parse(&call.bytes).unwrap().root.shard == call.shard
                    }
                    RecordName::Stripe { index } => {
                        stripe_of(&call.bytes) == StripeId { shard: call.shard, index }
                    }
                    _ => return refused(ErrorKind::Denied),
                };
                let path = record(call.shard, call.record);
                match self.held.get(&path) {
                    _ if !is_ours => refused(ErrorKind::Invalid),
                    Some(there) if fixed(there) != fixed(&call.bytes) => refused(ErrorKind::Exists),
                    _ => self.put(path, &call.bytes),
                }
            }
            Deed::Places(call) => {
                self.admit_order(call.stripe.shard, call.generation, call.coordinator)?;
                match stripe_of(&call.bytes) == call.stripe {
                    true => self.put(of_stripe(call.stripe, "record"), &call.bytes),
                    false => refused(ErrorKind::Invalid),
                }
            }
            Deed::Mark(call) => {
                let mark = CommitMark::parse(&call.bytes).unwrap();
                if mark.cluster != CLUSTER {
                    return refused(ErrorKind::Denied);
                }
                self.admit(mark.root.save, call.epoch)?;
                self.put(of_shard(mark.root.shard, "commit"), &call.bytes)
            }
            Deed::Receipt(call) => {
                let found = Receipt::parse(&call.bytes).unwrap();
                if found.cluster != CLUSTER {
                    return refused(ErrorKind::Denied);
                }
                self.admit_order(found.stripe.shard, call.owner, call.coordinator)?;
                self.has_pieces(&found)?;
                let path = receipt(found.stripe, found.attempt);
                let is_lowest = found.order == Generation::default();
                let is_higher = self.held.get(&path).is_some_and(|old| {
                    let known = Receipt::parse(old).unwrap();
                    known.order > found.order
                        || known.order == found.order && !is_lowest && *old != call.bytes
                });
                match is_higher {
                    true => refused(ErrorKind::Exists),
                    false => self.put(path, &call.bytes),
                }
            }
            Deed::Tombstone(call) => {
                let Tombstone { cluster, save, generation, reason } =
                    Tombstone::parse(&call.bytes).unwrap();
                if cluster != CLUSTER {
                    return refused(ErrorKind::Denied);
                }
                self.raise(generation.epoch)?;
                if self.has(&grave(save)) {
                    return Ok(());
                }
                if reason == RemoveReason::Aborted && self.has_mark(save) {
                    return refused(ErrorKind::Denied);
                }
                self.put(tombstone(save), &call.bytes)
            }
            Deed::Sweep(PurgeSave { save }) => {
                if !self.is_buried(*save) {
                    return refused(ErrorKind::Denied);
                }
                let start = format!("shards/{save}");
                self.held.retain(|path, _| !path.starts_with(&start));
                self.put(grave(*save), &[])
            }
            Deed::Drop(call) => self.drop_replicas(call),
            Deed::Claim(call) => {
                let is_other =
                    self.epoch == call.epoch && self.map.is_some_and(|map| map != call.map);
                if call.epoch < self.epoch || is_other {
                    return refused(ErrorKind::Fenced);
                }
                (self.epoch, self.map) = (call.epoch, Some(call.map));
                Ok(())
            }
        }
    }

    fn put(&mut self, path: String, bytes: &[u8]) -> Answer {
        self.held.insert(path, bytes.to_vec());
        Ok(())
    }

    /// Drops the replicas of a stripe. The catalogue must have the stripe as archived, and the node
    /// must have its proven piece and the receipt.
    fn drop_replicas(&mut self, call: &DropReplicas) -> Answer {
        let files = self.files(call.stripe);
        if files.is_empty() {
            return Ok(());
        }
        if self.epoch > Epoch(1) {
            // The catalogue belongs to an epoch that is over, or no catalogue server has this
            // epoch.
            return Err(None);
        }
        if self.archived.get(&call.stripe) != Some(&(call.attempt, call.generation)) {
            return refused(ErrorKind::Fenced);
        }
        let ours = receipt(call.stripe, call.attempt);
        let Some(bytes) = self.held.get(&ours) else { return refused(ErrorKind::NotFound) };
        let found = Receipt::parse(bytes).unwrap();
        if found.generation != call.generation {
            return refused(ErrorKind::Corrupt);
        }
        self.has_pieces(&found)?;
        let mut kept: Vec<String> = self.ours(&found).into_iter().map(|(path, _)| path).collect();
        // A piece of the attempt may be one that a repairer has just made.
        let of_attempt = format!("-{}.pc", call.attempt);
        kept.extend(files.iter().filter(|path| path.ends_with(&of_attempt)).cloned());
        let others = of_stripe(call.stripe, "receipt-");
        self.held.retain(|path, _| !path.starts_with(&others) || *path == ours);
        self.held.retain(|path, _| !files.contains(path) || kept.contains(path));
        Ok(())
    }

    /// Checks the conditions that always hold, even in the middle of an operation.
    pub fn assert_sound(&self) {
        for (path, bytes) in self.held.iter().filter(|(path, _)| path.contains("/receipt-")) {
            let receipt = Receipt::parse(bytes).unwrap();
            assert_eq!(self.has_pieces(&receipt), Ok(()), "{path} stands without its piece");
        }
        let graves = self.held.keys().filter_map(|path| path.strip_prefix("grave of "));
        for save in graves {
            let start = format!("shards/{save}");
            let left = |path: &&String| path.starts_with(&start) && !path.ends_with("/tombstone");
            assert_eq!(self.held.keys().find(left), None, "{save} has a grave");
        }
    }
}
