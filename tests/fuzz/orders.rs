//! Target for a coordinator's orders: an order that parses is admitted or refused, runs to an end,
//! leaves only proven pieces behind, and stays within the memory that was reserved for it.

use std::sync::Arc;
use std::time::Duration;

use rapidraid::budget::Budget;
use rapidraid::clock::SystemClock;
use rapidraid::code::{RsCode, table};
use rapidraid::format::file::FileKey;
use rapidraid::format::geometry::StripeCut;
use rapidraid::format::tree::GrainTree;
use rapidraid::gf::FingerprintKey;
use rapidraid::id::{Attempt, ClusterId, Epoch, Generation, NodeId, PeerName, ShardId, StripeId};
use rapidraid::kind::ErrorKind;
use rapidraid::net::call::Caller;
use rapidraid::net::memory::MemoryNetwork;
use rapidraid::net::pool::Pool;
use rapidraid::net::{Peer, Role};
use rapidraid::pipeline::executor::{Executor, RunError, order_memory_bytes};
use rapidraid::plan::{Input, Output};
use rapidraid::store::{BlockSpec, Disk, LOCK_FILE, MemoryDisk, MemoryKv, Store};
use rapidraid::units::GRAIN_BYTES;
use rapidraid::wire::NodeAddress;
use rapidraid::wire::calls::ReservePart;
use rapidraid::wire::order::{Codec, HopOrder, InputOrder, Order, OutputOrder};
use rapidraid::wire::{parse_request, request_to_bytes, split_request};
use rapidraid::workers::Workers;
use tokio_util::sync::CancellationToken;

use crate::target::{Memory, Seen, Target, Verdict, within};
use crate::wire::MESSAGE;

const K: u8 = 4;
/// Length of a block in bytes: two grains, the second a short one.
const BLOCK_BYTES: u64 = GRAIN_BYTES + 4480;
const CUT: StripeCut =
    StripeCut { offset_bytes: 0, len_bytes: 4 * BLOCK_BYTES - 100, block_bytes: BLOCK_BYTES, k: K };
const STRIPE: StripeId = StripeId { shard: ShardId([0x5a; 16]), index: 3 };
const KEY: [u8; 32] = [0x0f; 32];
const BUDGET_BYTES: u64 = 32 << 20;
/// Capacity of the disk in bytes. The disk is in memory, so it counts as memory too.
const DISK_BYTES: u64 = 2 << 20;

fn block(block: u8) -> Vec<u8> {
    (0..CUT.block_len(block)).map(|at| (at % 251) as u8 ^ block).collect()
}

fn store_of(disk: &MemoryDisk) -> Store {
    let name: PeerName = "node-1".parse().unwrap();
    let lock = disk.lock(LOCK_FILE).unwrap();
    let (disk, kv) = (Arc::new(disk.clone()), Arc::new(MemoryKv::new()));
    Store::open(disk, lock, kv, ClusterId([0xc1; 16]), &name).unwrap().0
}

/// Returns a node's disk with all blocks of the stripe.
fn disk() -> MemoryDisk {
    let disk = MemoryDisk::new(DISK_BYTES);
    let store = store_of(&disk);
    for number in 0..K {
        let data = block(number);
        let len_bytes = data.len() as u64;
        let spec = BlockSpec { stripe: STRIPE, block: number, layout: 1, len_bytes };
        let mut writer = store.create_block_writer(spec, None).unwrap();
        writer.write(&data).unwrap();
        writer.finish(Some(GrainTree::of(&data).root())).unwrap();
    }
    drop(store);
    disk
}

fn input(number: u8, grains: (u64, u64)) -> InputOrder {
    let mut padded = block(number);
    padded.resize(BLOCK_BYTES as usize, 0);
    let key = FingerprintKey::derive(&KEY);
    let all = padded.chunks(GRAIN_BYTES as usize).map(|grain| key.fingerprint(grain).unwrap());
    let count = (grains.1 - grains.0) as usize;
    let expected = all.skip(grains.0 as usize).take(count).collect();
    InputOrder { input: Input::Block(number), expected }
}

fn output(output: Output) -> OutputOrder {
    let name = "node-2".parse().unwrap();
    let to = NodeAddress { name, host_port: "node-2:1".into() };
    OutputOrder { output, to: matches!(output, Output::Stream(_)).then_some(to) }
}

fn order(hops: Vec<HopOrder>) -> Order {
    let code = table::all().iter().find(|code| (code.n(), code.k()) == (6, 4)).unwrap();
    Order {
        run: [0x70; 16],
        stripe: STRIPE,
        attempt: Attempt([0xa7; 16]),
        generation: Generation { epoch: Epoch(3), counter: 300 },
        coordinator: NodeId(7),
        code: code.id(),
        cut: CUT,
        fingerprint_key: KEY,
        codec: Codec::Kernel,
        bytes_per_s: None,
        hops,
        kept: Vec::new(),
    }
}

/// Returns orders that run: one over ranges, one with the classical codec, one of an empty stripe,
/// and one that waits for a stream and sends one.
fn corpus() -> Vec<Vec<u8>> {
    let local = |grains, pieces: &[u8]| HopOrder {
        grains,
        inputs: vec![input(0, grains), input(1, grains)],
        outputs: pieces.iter().map(|piece| output(Output::Store(*piece))).collect(),
        matrix: pieces.iter().map(|piece| vec![1, 2 + piece]).collect(),
    };
    let ranges = order(vec![local((0, 1), &[2, 3]), local((1, 2), &[2, 3])]);
    let all = (0, 2);
    let classical = HopOrder {
        grains: all,
        inputs: (0..K).map(|number| input(number, all)).collect(),
        outputs: vec![output(Output::Store(4)), output(Output::Store(5))],
        matrix: vec![vec![1, 1, 1, 1], vec![1, 2, 3, 4]],
    };
    let mut classical = order(vec![classical]);
    classical.code = RsCode::new(6, 4).unwrap().id();
    classical.codec = Codec::ReedSolomonErasure;
    classical.kept = vec![(0, 0), (3, 3)];
    let mut empty = order(vec![local((0, 1), &[0])]);
    empty.cut = StripeCut { len_bytes: 0, block_bytes: 128, ..CUT };
    for input in &mut empty.hops[0].inputs {
        input.expected = vec![FingerprintKey::derive(&KEY).fingerprint(&[0; 128]).unwrap()];
    }
    let mut through = local(all, &[1]);
    through.inputs[0].input = Input::Stream(300);
    through.outputs.push(output(Output::Stream(301)));
    through.matrix.push(vec![3, 4]);
    let orders = [ranges, classical, empty, order(vec![through])];
    orders.map(|order| request_to_bytes(&ReservePart { order }).unwrap()).to_vec()
}

/// Runs an order on a fresh node. Returns whether the order was admitted; an error names the law
/// that was broken.
async fn run(disk: &MemoryDisk, order: Order) -> Result<bool, String> {
    let clock = SystemClock::new();
    let peer = Peer { role: Role::Node, name: "node-1".parse().unwrap() };
    let transport = MemoryNetwork::new().join(peer, "node-1:1");
    let pool = Pool::new(Arc::new(transport), clock.clone());
    let caller = Caller::new(pool, clock.clone(), Duration::from_secs(10));
    let budget = Budget::new("archive", BUDGET_BYTES);
    let store = store_of(disk);
    let runs = Executor::new(store.clone(), Workers::inline(), caller, clock, budget.clone());
    let (number, stripe, attempt, cut) = (order.run, order.stripe, order.attempt, order.cut);
    let is_ours = |error: &RunError| error.kind() == ErrorKind::Internal;
    match runs.reserve_part(order).await {
        Err(error) if is_ours(&error) => return Err(format!("it is called a defect: {error}")),
        Err(_) => return Ok(false),
        Ok(()) => {}
    }
    if runs.part_input_files(number).is_none_or(|inputs| inputs.stripe != stripe) {
        return Err("what was admitted is another stripe".into());
    }
    match runs.run_reserved(number, &CancellationToken::new()).await {
        Err(error) if is_ours(&error) => return Err(format!("it is called a defect: {error}")),
        Err(_) => {}
        Ok(report) => {
            for proof in report.proofs {
                let key = match proof.kept_block {
                    // A block past the stripe's end has no file.
                    Some(block) if cut.block_len(block) == 0 => continue,
                    Some(block) => FileKey::replica(stripe, block),
                    None => FileKey::piece(stripe, proof.piece, attempt),
                };
                let file =
                    store.open_undamaged_file(key).map_err(|error| format!("proven: {error}"))?;
                if file.tree().root() != proof.root || !file.scrub().is_empty() {
                    return Err(format!("{key} is not what was proven"));
                }
            }
        }
    }
    if budget.used_bytes() != 0 {
        return Err(format!("{} bytes of its memory are still taken", budget.used_bytes()));
    }
    Ok(true)
}

fn check(disk: &MemoryDisk, runtime: &tokio::runtime::Runtime, frame: &[u8]) -> Verdict {
    let parse = |frame: &[u8]| split_request(frame).and_then(|(_, body)| parse_request(body));
    let (parsed, peak_bytes) = within(MESSAGE, frame.len(), || parse(frame))?;
    let Ok(ReservePart { order }) = parsed else { return Ok(Seen::default()) };
    // Memory beyond the order's reservation: the copy of the disk, the order itself, and an idle
    // node.
    let base_bytes =
        order_memory_bytes(&order).min(BUDGET_BYTES) as usize + 2 * DISK_BYTES as usize;
    let memory = Memory { base_bytes: base_bytes + (1 << 20), ..MESSAGE };
    let (done, run_bytes) = within(memory, frame.len(), || {
        let disk = disk.crash_after_writeback();
        runtime.block_on(run(&disk, order))
    })?;
    Ok(Seen { accepted: done?, peak_bytes: peak_bytes.max(run_bytes) })
}

pub fn orders() -> Target {
    let disk = disk();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    Target {
        name: "orders",
        cases: 15_000,
        corpus: corpus(),
        words: Vec::new(),
        check: Box::new(move |frame| check(&disk, &runtime, frame)),
    }
}
