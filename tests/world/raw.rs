//! Raw access to nodes without the client: single calls from any peer, and malformed frames.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use rapidraid::clock::SystemClock;
use rapidraid::format::records::{FIELD_GF8, LAYOUT_STANDARD, ShardRoot, stripes_root};
use rapidraid::format::tree::{GrainTree, grain_hash};
use rapidraid::gf::FingerprintKey;
use rapidraid::id::{SaveId, ShardId, Step, StripeId};
use rapidraid::net::call::{CallError, Caller, Exchange, address};
use rapidraid::net::frame::{FramedRecv, write_frame};
use rapidraid::net::pool::Pool;
use rapidraid::net::{Connection, NetError, Peer, Role};
use rapidraid::placement::ring;
use rapidraid::units::GRAIN_BYTES;
use rapidraid::wire::calls::{
    BeginSave, BeginSaveAnswer, BlockAdmitted, BlockTrailer, CompareAndSetKey, GetKey, PutBlock,
    PutBlockAnswer,
};
use rapidraid::wire::{Call, MAX_FRAME_BYTES, NodeAddress, message_to_bytes, parse_answer};

use super::{World, job};

pub const KEY: [u8; 32] = [5; 32];

/// A peer that makes single calls.
pub struct Voice {
    caller: Arc<Caller>,
    name: String,
    begun: AtomicU32,
}

impl World {
    pub fn voice(&self, role: Role, name: &str) -> Voice {
        let peer = Peer { role, name: name.parse().unwrap() };
        let transport = Arc::new(self.network.join(peer, &format!("{name}:1")));
        let clock = SystemClock::new();
        let pool = Pool::new(transport, clock.clone());
        let caller = Caller::new(pool, clock, Duration::from_secs(60));
        Voice { caller, name: name.to_owned(), begun: AtomicU32::new(0) }
    }

    pub fn node_address(&self, index: usize) -> NodeAddress {
        NodeAddress { name: self.machines[index].name.clone(), host_port: super::address(index) }
    }
}

impl Voice {
    pub async fn ask<C: Call>(&self, to: &NodeAddress, call: &C) -> Result<C::Answer, CallError> {
        self.caller.call(to, call).await
    }

    pub async fn connection(&self, to: &NodeAddress) -> Arc<dyn Connection> {
        self.caller.connection(to).await.unwrap()
    }

    /// Sends one frame as it is. Returns the node's answer, which must be empty or an error.
    pub async fn send(&self, to: &NodeAddress, frame: &[u8]) -> Result<(), CallError> {
        let net = |source| CallError::Net { call: "raw", to: to.name.to_string(), source };
        let connection = self.connection(to).await;
        let (mut send, recv) = connection.open_bi().await.map_err(net)?;
        let mut recv = FramedRecv::new(recv);
        let frame = Bytes::copy_from_slice(frame);
        write_frame(&mut *send, MAX_FRAME_BYTES, frame).await.map_err(net)?;
        send.finish().await.map_err(net)?;
        let answer = recv.read_frame(MAX_FRAME_BYTES).await.map_err(net)?;
        let answer = answer.ok_or_else(|| net(NetError::Ended))?;
        let wire = |source| CallError::Wire { call: "raw", to: to.name.to_string(), source };
        Ok(parse_answer::<()>(&answer).map_err(wire)??)
    }

    /// Removes a key of the catalogue, as a node may.
    pub async fn remove_key(&self, server: &NodeAddress, key: String) {
        let found = self.ask(server, &GetKey { key: key.clone() }).await.unwrap();
        let expected = found.map(|(_, revision)| revision);
        self.ask(server, &CompareAndSetKey { key, expected, value: None }).await.unwrap();
    }

    pub async fn begin(&self, to: &NodeAddress, step: u64) -> Result<BeginSaveAnswer, CallError> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let id = blake3::hash(format!("{} {number}", self.name).as_bytes());
        self.begin_as(to, step, SaveId(id.as_bytes()[..12].try_into().unwrap()), false).await
    }

    pub async fn begin_as(
        &self,
        to: &NodeAddress,
        step: u64,
        save: SaveId,
        replace: bool,
    ) -> Result<BeginSaveAnswer, CallError> {
        let begin = BeginSave { job: job(), step: Step(step), replace, save, avoid: Vec::new() };
        self.ask(to, &begin).await
    }

    pub async fn open<C: Call>(&self, to: &NodeAddress, call: &C) -> Exchange {
        self.caller.open(&address(to), call).await.unwrap()
    }

    /// Opens a block. Returns the exchange once the node is ready for the block's bytes.
    pub async fn open_block(
        &self,
        to: &NodeAddress,
        call: &PutBlock,
    ) -> Result<Exchange, CallError> {
        let (exchange, admitted) = self.admission(to, call).await?;
        assert_eq!(admitted.second_refused, None);
        Ok(exchange)
    }

    pub async fn admission(
        &self,
        to: &NodeAddress,
        call: &PutBlock,
    ) -> Result<(Exchange, BlockAdmitted), CallError> {
        let mut exchange = self.open(to, call).await;
        let admitted = exchange.answer().await?;
        Ok((exchange, admitted))
    }

    /// Sends a whole block. Returns the node's answer.
    pub async fn put_block(
        &self,
        to: &NodeAddress,
        call: &PutBlock,
        bytes: &Bytes,
    ) -> Result<PutBlockAnswer, CallError> {
        let mut exchange = self.open_block(to, call).await?;
        finish_block(&mut exchange, bytes, bytes).await
    }
}

/// Sends the `rest` of a block and its trailer. Returns the node's answer.
pub async fn finish_block(
    exchange: &mut Exchange,
    whole: &Bytes,
    rest: &[u8],
) -> Result<PutBlockAnswer, CallError> {
    // A node that refuses the block stops the stream. Its answer gives the reason.
    let _ = exchange.write(Bytes::copy_from_slice(rest)).await;
    let frame = message_to_bytes(&trailer(whole), "a trailer").unwrap();
    let _ = exchange.write_frame(frame).await;
    let _ = exchange.finish().await;
    exchange.answer().await
}

pub fn trailer(bytes: &Bytes) -> BlockTrailer {
    let key = FingerprintKey::derive(&KEY);
    let len = bytes.len() as u64;
    let grains = || bytes.chunks(GRAIN_BYTES as usize);
    let hashes = grains().zip(0..).filter_map(|(grain, index)| grain_hash(len, index, grain));
    let root = GrainTree::from_hashes(len, hashes.collect()).unwrap().root();
    let fingerprints = grains().map(|grain| key.fingerprint(grain).unwrap()).collect();
    BlockTrailer { root, fingerprints }
}

pub fn block_call(begun: &BeginSaveAnswer, len_bytes: usize) -> PutBlock {
    PutBlock {
        stripe: StripeId { shard: ShardId::new(begun.save, 0), index: 0 },
        block: 0,
        len_bytes: len_bytes as u64,
        generation: begun.generation,
        fingerprint_key: KEY,
        forward: None,
    }
}

/// Returns the root of an empty shard.
pub fn empty_root(begun: &BeginSaveAnswer, step: u64, name: &str) -> ShardRoot {
    ShardRoot {
        job: job(),
        step: Step(step),
        save: begun.save,
        index: 0,
        shards: 1,
        shard: ShardId::new(begun.save, 0),
        name: name.parse().unwrap(),
        len_bytes: 0,
        block_bytes: begun.block_bytes,
        n: begun.n,
        k: begun.k,
        layout: LAYOUT_STANDARD,
        field: FIELD_GF8,
        fingerprint_key: KEY,
        ring: ring(&begun.nodes, 0),
        stripes_root: stripes_root(&[]),
    }
}
