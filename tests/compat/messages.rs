//! One value of every request, answer and other message, with all variants of their enumerations.

use rapidraid::format::file::FileName;
use rapidraid::format::launch_order::RegisteredLaunch;
use rapidraid::format::records::Standing;
use rapidraid::gf::Fingerprint;
use rapidraid::id::{Generation, NodeId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::plan::{Input, Output};
use rapidraid::wire::calls::*;
use rapidraid::wire::order::{
    ChunkTimes, Codec, HopOrder, HopReport, HopTimes, HopWork, InputOrder, Order, OutputOrder,
    PieceProof, RunReport,
};
use rapidraid::wire::policy::{PolicyAnswer, PolicyRule, PolicyWait};
use rapidraid::wire::{
    Call, NodeAddress, RemoteError, StreamHeader, WireError, answer_to_bytes, message_to_bytes,
    parse_answer, parse_message, parse_request, request_to_bytes, split_request,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::fixture::Case;
use crate::records::{
    ATTEMPT, CLUSTER, CODE, GENERATION, LAUNCH, LEASE, MAP, SAVE, cut, joint_save, node, root,
    saved, state, stripe,
};

const RUN: [u8; 16] = [0x70; 16];

fn kind(error: WireError) -> ErrorKind {
    error.kind()
}

/// The requests and answers of calls. `note` distinguishes several values of the same kind.
pub struct Calls(Vec<Case>);

impl Calls {
    pub fn request<C: Call + PartialEq + 'static>(&mut self, note: &str, call: C) -> &mut Self {
        let bytes = request_to_bytes(&call).unwrap();
        let parse = move |bytes: &[u8]| {
            let (number, body) = split_request(bytes).map_err(kind)?;
            let found = parse_request::<C>(body).map_err(kind)?;
            Ok(number == C::NUMBER && found == call)
        };
        let name = format!("{:02} {} request{note}", C::NUMBER, C::NAME);
        self.0.push(Case { name, bytes, parse: Box::new(parse) });
        self
    }

    pub fn answer<C: Call>(&mut self, note: &str, answer: C::Answer) -> &mut Self
    where
        C::Answer: PartialEq + 'static,
    {
        let answer = Ok(answer);
        let bytes = answer_to_bytes(&answer).unwrap();
        let parse = move |bytes: &[u8]| Ok(parse_answer(bytes).map_err(kind)? == answer);
        let name = format!("{:02} {} answer{note}", C::NUMBER, C::NAME);
        self.0.push(Case { name, bytes, parse: Box::new(parse) });
        self
    }

    pub fn both<C: Call + PartialEq + 'static>(&mut self, call: C, answer: C::Answer) -> &mut Self
    where
        C::Answer: PartialEq + 'static,
    {
        self.request("", call).answer::<C>("", answer)
    }
}

fn address() -> NodeAddress {
    NodeAddress { name: "node-2".parse().unwrap(), host_port: "node-2.example.org:7440".into() }
}

fn fingerprints(count: u8) -> Vec<Fingerprint> {
    (1..=count).map(|byte| Fingerprint([byte; 16])).collect()
}

fn order() -> Order {
    let input = |input| InputOrder { input, expected: fingerprints(1) };
    let output = |output, to| OutputOrder { output, to };
    let hop = HopOrder {
        grains: (0, 1),
        inputs: vec![input(Input::Stream(300)), input(Input::Block(1)), input(Input::Piece(2))],
        outputs: vec![
            output(Output::Store(3), None),
            output(Output::Stream(301), Some(address())),
            output(Output::Deliver(4), None),
        ],
        matrix: vec![vec![1, 2, 3], vec![1, 0x8e, 0], vec![0, 0, 0xff]],
    };
    Order {
        run: RUN,
        stripe: stripe(),
        attempt: ATTEMPT,
        generation: GENERATION,
        coordinator: NodeId(u64::MAX),
        code: CODE,
        cut: cut(),
        fingerprint_key: [0x0f; 32],
        codec: Codec::ReedSolomonErasure,
        bytes_per_s: Some(1_310_720),
        hops: vec![hop],
        kept: vec![(0, 0), (1, 1)],
    }
}

fn hop_work() -> HopWork {
    let times = HopTimes {
        upstream_us: 300,
        queued_us: 1,
        computed_us: 400,
        disk_us: 2,
        downstream_us: 500,
    };
    HopWork {
        in_bytes: 50_048,
        out_bytes: 50_049,
        span_us: (10, 20_000),
        times,
        chunks: vec![ChunkTimes { grains: (0, 3), span_us: (11, 130) }],
    }
}

fn run_report() -> RunReport {
    let hop = HopReport { hop: 0, work: hop_work() };
    let proof = |piece, kept_block| PieceProof {
        piece,
        kept_block,
        root: [9; 32],
        fingerprints: fingerprints(2),
    };
    RunReport {
        hops: vec![hop],
        proofs: vec![proof(3, None), proof(1, Some(1))],
        total_us: 1 << 20,
    }
}

fn step_view() -> StepView {
    StepView { job: root().job, step: Step(1000), saved: saved(), by_marks: false }
}

fn archive_events(calls: &mut Calls) {
    let hop = HopView { node: "node-1".parse().unwrap(), pieces: vec![0, 3], work: hop_work() };
    let report = StripeReport {
        stripe: stripe(),
        code: CODE,
        block_bytes: 50_048,
        hops: vec![hop],
        phases_us: [100, 200, 300, 400],
    };
    calls
        .answer::<ArchiveStep>(
            ", progress",
            ArchiveEvent::Progress { done_bytes: 300, total_bytes: 1 << 40 },
        )
        .answer::<ArchiveStep>(", stripe", ArchiveEvent::Stripe(report))
        .answer::<ArchiveStep>(", note", ArchiveEvent::Note("trying again".into()))
        .answer::<ArchiveStep>(", done", ArchiveEvent::Done { stripes: 300, undropped: 1 });
}

fn for_clients(calls: &mut Calls) {
    let (job, step, save) = (root().job, Step(1000), SAVE);
    let hello = HelloAnswer {
        cluster: CLUSTER,
        node: "node-1".parse().unwrap(),
        epoch: GENERATION.epoch,
        map: Some(MAP),
        revision: 300,
        catalogue: Some(address()),
        version: "0.1.0".into(),
    };
    let begun = BeginSaveAnswer {
        save,
        generation: GENERATION,
        lease: LEASE,
        lease_ms: 10_000,
        n: 16,
        k: 11,
        block_bytes: 64 << 20,
        nodes: vec![node("node-1"), node("node-2")],
    };
    let join = |report| JoinSave {
        job: job.clone(),
        step,
        launch: LAUNCH,
        writer: 1,
        writers: 300,
        report,
        replace: Some(SAVE),
        avoid: vec![NodeId(300)],
    };
    let open_save = OpenSaveView {
        job: job.clone(),
        step,
        save,
        is_decided: false,
        complete_shards: 3,
        shards: Some(300),
        writers: 4,
        late_writers: vec![1, 3],
        dropped_writer: Some(2),
    };
    let begin =
        BeginSave { job: job.clone(), step, replace: true, save: SAVE, avoid: vec![NodeId(300)] };
    let register =
        |claim| RegisterLaunch { job: job.clone(), launch: LAUNCH, resumed: Some(step), claim };
    let launch_view = |resumed| {
        let (launch, number, registered_at) = (LAUNCH, 300, 1_800_000_000);
        let registered = RegisteredLaunch { launch, number, registered_at, resumed };
        LaunchView { job: job.clone(), registered }
    };
    let announces = WriterReport::Announces { save, shards: 300, sent_mib: 70_000 };
    let reports = WriterReport::Reports { save, shards: 300, progress: 70_000, reports: 400 };
    let nodes = vec![node("node-1"), node("node-2")];
    let joined =
        JoinedSave { joint: joint_save(), generation: GENERATION, lease_ms: 10_000, nodes };
    calls
        .both(Hello { me: None }, hello)
        .request(", node", Hello { me: Some(node("node-1")) })
        .both(begin.clone(), begun.clone())
        .both(BeginLaunchSave { begin, launch: LAUNCH }, begun)
        .both(register(LaunchClaim::After { newest: Some(LAUNCH) }), ())
        .request(", first", register(LaunchClaim::After { newest: None }))
        .request(", again", register(LaunchClaim::Again))
        .both(ListLaunches { job: Some(job.clone()), after: None }, vec![launch_view(Some(step))])
        .request(", newest", ListLaunches { job: None, after: Some(job.clone()) })
        .answer::<ListLaunches>(", nothing loaded", vec![launch_view(None)])
        .both(RebuildCatalogue { accept_loss: true }, rebuilt())
        .both(join(WriterReport::Joins), JoinSaveAnswer::Open(Box::new(joined)))
        .request(", announces", join(announces))
        .request(", drops", join(WriterReport::Drops))
        .request(", reports", join(reports))
        .request(", drops because", join(WriterReport::DropsBecause("a rank died".into())))
        .answer::<JoinSave>(", committed", JoinSaveAnswer::Committed { save })
        .answer::<JoinSave>(", over", JoinSaveAnswer::Over)
        .both(
            ListCompletedShards { job: job.clone(), step, save, first: 300 },
            CompletedShards::Open { roots: vec![root()] },
        )
        .answer::<ListCompletedShards>(", committed", CompletedShards::Committed)
        .answer::<ListCompletedShards>(", over", CompletedShards::Over)
        .both(ListOpenSaves { job: Some(job.clone()) }, vec![open_save])
        .request(", all jobs", ListOpenSaves { job: None })
        .both(MoveCatalogue {}, moved())
        .both(RenewLease { lease: LEASE }, ())
        .both(CompleteShard { root: root() }, ())
        .both(CommitSave { job: job.clone(), step, save, shards: 300 }, saved())
        .both(AbortSave { job: job.clone(), step, save }, ());
    let plans = [
        (", chain", PlanChoice::Chain),
        (", best star", PlanChoice::BestStar),
        (", naive star", PlanChoice::NaiveStar),
        (", striped star", PlanChoice::StripedStar),
        (", random star", PlanChoice::RandomStar),
    ];
    for (note, plan) in plans {
        let options = ArchiveOptions { plan, codec: Codec::Kernel, parallel: 300 };
        calls.request(note, ArchiveStep { job: job.clone(), step, options });
    }
    archive_events(calls);
    crate::repairs::repair_events(calls);
    crate::repairs::ring_messages(calls);
    let waiting = vec!["node-3".parse().unwrap()];
    let remove = RemoveStep { job: job.clone(), step, save };
    let removed = RemoveAnswer { confirmed: 15, waiting };
    let label = |change| LabelStep {
        job: job.clone(),
        step,
        save,
        label: "trusted".parse().unwrap(),
        change,
    };
    let labelled = LabelledStep { step, save, labels: vec!["trusted".parse().unwrap()] };
    let listed = ListStepsAnswer { steps: vec![step_view()], next: Some((job.clone(), step)) };
    let shards = vec![(root(), Some(state())), (root(), None)];
    let status = NodeStatusAnswer {
        replicas: (300, 1 << 40),
        pieces: (400, 1 << 41),
        record_bytes: 5000,
        quarantined: 1,
        disk: (1 << 42, 1 << 41),
        budgets: vec![("archive".into(), 1, 2, 128 << 20)],
        peak_memory_bytes: 200 << 20,
        segmentation_offload: true,
        catalogue: false,
        notes: vec!["1 files are in quarantine".into()],
    };
    calls
        .both(remove.clone(), removed.clone())
        .both(RemoveLaunchStep { remove, launch: LAUNCH }, removed)
        .both(label(LabelChange::Add), vec!["trusted".parse().unwrap()])
        .request(", remove", label(LabelChange::Remove))
        .both(ListLabels { job: job.clone(), after: Some(step) }, vec![labelled])
        .request(", first page", ListLabels { job: job.clone(), after: None })
        .both(ListSteps { job: Some(job.clone()), after: Some((job.clone(), step)) }, listed)
        .request(", all", ListSteps { job: None, after: None })
        .both(
            ShowStep { job: job.clone(), step: Some(step), first_shard: 128 },
            ShowStepAnswer { step: step_view(), shards },
        )
        .request(", latest", ShowStep { job, step: None, first_shard: 0 })
        .both(GetShardState { shard: root().shard }, Some(state()))
        .answer::<GetShardState>(", none", None)
        .both(ListNodes {}, vec![NodeView { node: node("node-1"), live: true }])
        .both(GetNodeStatus {}, status)
        .both(RemoveNode { name: "node-3".parse().unwrap() }, ())
        .both(GetPolicyStatus {}, policy());
}

fn policy() -> PolicyAnswer {
    let rule = |job: Option<&str>, number| PolicyRule {
        job: job.map(|job| job.parse().unwrap()),
        archive_all_but: number,
        keep_newest: number.map(|number| number + 1),
        keep_every: number.map(u64::from),
    };
    let (job, step) = (root().job, root().step);
    PolicyAnswer {
        rules: vec![rule(None, None), rule(Some("gpt-2_small.v1"), Some(300))],
        to_archive: 300,
        to_retire: 301,
        removing: 302,
        waiting: vec![PolicyWait { job, step, failures: 300, why: "node-3 is away".into() }],
    }
}

fn of_data(calls: &mut Calls) {
    let (stripe, generation, shard) = (stripe(), GENERATION, root().shard);
    let (index, attempt) = (stripe.index, ATTEMPT);
    let put = |forward| PutBlock {
        stripe,
        block: 3,
        len_bytes: 49_952,
        generation,
        fingerprint_key: [0x0f; 32],
        forward,
    };
    calls
        .request(", forwarded", put(Some(address())))
        .request("", put(None))
        .answer::<PutBlock>("", PutBlockAnswer { forwarded: None })
        .answer::<PutBlock>(", forwarded", PutBlockAnswer { forwarded: Some(Ok(())) })
        .answer::<PutBlock>(
            ", not forwarded",
            PutBlockAnswer { forwarded: Some(Err("no answer within 15s".into())) },
        );
    let records = [
        (", leaves", RecordName::Leaves),
        (", stripe", RecordName::Stripe { index }),
        (", receipt", RecordName::Receipt { index, attempt }),
        (", mark", RecordName::Mark),
    ];
    let bytes = vec![1, 2, 3];
    for (note, record) in records {
        calls.request(note, PutRecord { shard, record, generation, bytes: bytes.clone() });
    }
    calls.answer::<PutRecord>("", ());
    for (note, record) in records {
        calls.request(note, GetRecord { shard, record });
    }
    calls.answer::<GetRecord>("", Some(bytes)).answer::<GetRecord>(", none", None);
    let (replica, piece) = (FileName::Replica { block: 3 }, FileName::Piece { piece: 7, attempt });
    let file = |file| FileView { file, len_bytes: 50_048, root: [7; 32] };
    let read = |file| ReadFile { stripe, file, from: 65_536, len_bytes: 300, hashes: true };
    let hashes = vec![[1; 32], [2; 32]];
    calls
        .both(ListFiles { stripe }, vec![file(replica), file(piece)])
        .request(", replica", read(replica))
        .request(", piece", read(piece))
        .answer::<ReadFile>("", ReadFileAnswer { len_bytes: 65_836, hashes })
        .both(VerifyFile { stripe, file: piece }, true);
}

fn of_the_catalogue(calls: &mut Calls) {
    let key = || "c/job/00000000000000001000".to_owned();
    let value = vec![1, 2, 3];
    let (expected, prefix) = (Some(300), "c/".to_owned());
    let epoch = GENERATION.epoch;
    let other = Some((value.clone(), 299));
    let guarded = |guard_revision| CompareAndSetKeyGuarded {
        key: key(),
        expected: Some(300),
        value: value.clone(),
        guard_key: "l/gpt".into(),
        guard_revision,
    };
    calls
        .both(
            RegisterNode { node: node("node-1") },
            RegisterAnswer { epoch, map: MAP, revision: 301, members: 299, lease_ms: 10_000 },
        )
        .both(GetKey { key: key() }, Some((value.clone(), 300)))
        .answer::<GetKey>(", none", None)
        .both(
            CompareAndSetKey { key: key(), expected, value: Some(value.clone()) },
            CompareAndSetAnswer::Set(301),
        )
        .request(", remove", CompareAndSetKey { key: key(), expected: None, value: None })
        .answer::<CompareAndSetKey>(
            ", other",
            CompareAndSetAnswer::Conflict(Some((value.clone(), 299))),
        )
        .answer::<CompareAndSetKey>(", gone", CompareAndSetAnswer::Conflict(None))
        .both(guarded(Some(300)), GuardedSetAnswer::Set(301))
        .request(", absent guard", guarded(None))
        .answer::<CompareAndSetKeyGuarded>(", other", GuardedSetAnswer::Conflict(other))
        .answer::<CompareAndSetKeyGuarded>(", gone", GuardedSetAnswer::Conflict(None))
        .answer::<CompareAndSetKeyGuarded>(", other guard", GuardedSetAnswer::GuardConflict)
        .both(ListKeys { prefix, after: Some(key()), limit: 256 }, vec![(key(), value, 300)])
        .both(GrantLease {}, (LEASE, 10_000))
        .both(TouchLease { lease: LEASE, keep: true }, true)
        .both(RevokeLease { lease: LEASE }, ());
}

fn inventory() -> InventoryPage {
    let stripes = vec![StripeHolding {
        index: 7,
        replicas: vec![1, 12],
        pieces: vec![(3, ATTEMPT)],
        receipts: vec![(ATTEMPT, order().code, GENERATION)],
    }];
    let shard = stripe().shard;
    let (mark, tombstone) = (Some(vec![1, 2]), Some(vec![3]));
    let held = ShardHolding { shard, mark, root: Some(root()), tombstone, stripes };
    InventoryPage { shards: vec![held], next: Some((shard, None)) }
}

fn marked() -> MarkedSavesPage {
    let StepView { job, step, saved, .. } = step_view();
    let saves = vec![MarkedSave { job, step, saved, n: 16, k: 11 }];
    MarkedSavesPage { saves, next: Some(stripe().shard) }
}

fn standing() -> StandingAnswer {
    let listed = vec!["node-1".parse().unwrap()];
    StandingAnswer { standing: Standing::CaughtUp, epoch: GENERATION.epoch, revision: 300, listed }
}

fn rebuilt() -> RebuildAnswer {
    RebuildAnswer {
        epoch: GENERATION.epoch,
        home: "node-3".into(),
        reached: vec!["node-1".parse().unwrap()],
        missing: vec!["node-2".parse().unwrap()],
        steps: 300,
        shards: 600,
        orphans: 2,
        incomplete: vec!["job/1: the root of shard 0 of 1 was found nowhere".into()],
        damaged: vec![stripe()],
    }
}

const MAP_SUM: DbChecksum = DbChecksum { revision: 300, sum: [9; 16] };

fn moved() -> MoveCatalogueAnswer {
    let (home, from) = ("node-3".parse().unwrap(), "node-1".parse().unwrap());
    MoveCatalogueAnswer { epoch: GENERATION.epoch, home, from, entries: 300 }
}

fn source(counts: bool) -> SourceView {
    SourceView {
        file: FileName::Piece { piece: 4, attempt: ATTEMPT },
        content: counts.then_some((70_000, [6; 32])),
        damaged: (!counts).then(|| [0, 9].into_iter().collect()),
    }
}

fn examined() -> ExamineAnswer {
    let record = RecordName::Receipt { index: stripe().index, attempt: ATTEMPT };
    ExamineAnswer {
        files: vec![source(false)],
        records: vec![
            RecordView { record, digest: Some([7; 32]) },
            RecordView { record: RecordName::Mark, digest: None },
        ],
    }
}

fn orders(calls: &mut Calls) {
    let (stripe, attempt, generation) = (stripe(), ATTEMPT, GENERATION);
    let coordinator = order().coordinator;
    let owner = Generation { counter: 301, ..generation };
    let bytes = vec![1, 2, 3];
    calls
        .both(ReservePart { order: order() }, ())
        .both(RunPart { run: RUN }, run_report())
        .both(ReleasePart { run: RUN }, ())
        .both(PutMark { bytes: bytes.clone(), epoch: generation.epoch }, ())
        .both(ClaimEpoch { epoch: generation.epoch, map: MAP, home: address() }, ())
        .both(ListMembers {}, vec![node("node-1")])
        .both(FindRemovedSaves { saves: vec![SAVE] }, vec![SAVE])
        .both(PauseWrites {}, MAP_SUM)
        .both(
            TransferCatalogue {
                copied: MAP_SUM,
                epoch: generation.epoch,
                map: MAP,
                home: address(),
            },
            (),
        )
        .both(ListSources { stripe }, vec![source(true), source(false)])
        .both(
            ReadSource {
                stripe,
                file: FileName::Replica { block: 3 },
                from: 65_536,
                len_bytes: 1000,
                hashes: true,
            },
            ReadFileAnswer { len_bytes: 0, hashes: Vec::new() },
        )
        .both(ExamineStripe { stripe, with_shard: true }, examined())
        .both(GetStanding {}, standing())
        .both(ListRemovedSaves { after: Some(SAVE) }, vec![SAVE])
        .both(CatchUp { without: Some("node-2".parse().unwrap()) }, ())
        .both(ListDamagedMarks {}, vec![SAVE])
        .both(ListMarkedSaves { after: Some(stripe.shard) }, marked())
        .request(", all", ListMarkedSaves { after: None })
        .both(
            ListInventory { after: Some((stripe.shard, Some(300))), only: Some(SAVE) },
            inventory(),
        )
        .request(", all", ListInventory { after: None, only: None })
        .both(PutReceipt { bytes: bytes.clone(), owner, coordinator }, ())
        .both(PutLeaves { bytes: bytes.clone(), owner, coordinator }, ())
        .both(PutTombstone { bytes: bytes.clone() }, ())
        .both(
            DropReplicas { stripe, attempt, generation },
            DropReplicasAnswer { files: 2, bytes: 100_096 },
        )
        .both(
            CopyReplica {
                stripe,
                block: 3,
                len_bytes: 49_952,
                root: [7; 32],
                generation,
                coordinator,
                from: address(),
                bytes_per_s: Some(1_310_720),
            },
            (),
        )
        .both(PutPlaces { stripe, generation, coordinator, bytes }, ())
        .both(PurgeSave { save: SAVE }, 1 << 40);
}

fn message<T>(name: &str, value: T) -> Case
where
    T: Serialize + DeserializeOwned + PartialEq + 'static,
{
    let bytes = message_to_bytes(&value, "a fixture").unwrap();
    let parse =
        move |bytes: &[u8]| Ok(parse_message::<T>(bytes, "a fixture").map_err(kind)? == value);
    Case { name: name.to_owned(), bytes, parse: Box::new(parse) }
}

fn failure(kind_of_failure: ErrorKind) -> Case {
    let answer: Result<(), RemoteError> =
        Err(RemoteError { kind: kind_of_failure, message: "what to do next".into() });
    let bytes = answer_to_bytes(&answer).unwrap();
    let parse = move |bytes: &[u8]| Ok(parse_answer::<()>(bytes).map_err(kind)? == answer);
    Case { name: format!("failure, {kind_of_failure:?}"), bytes, parse: Box::new(parse) }
}

/// Returns the requests and answers of all calls.
pub fn calls() -> Vec<Case> {
    let mut calls = Calls(Vec::new());
    for_clients(&mut calls);
    of_data(&mut calls);
    of_the_catalogue(&mut calls);
    orders(&mut calls);
    calls.0
}

/// Returns the frames that are neither a request nor an answer of a call.
pub fn others() -> Vec<Case> {
    let mut cases = vec![
        message("stream header", StreamHeader { run: RUN, stream: 300 }),
        message("block admitted", BlockAdmitted { second_refused: None }),
        message(
            "block admitted, not at the second holder",
            BlockAdmitted { second_refused: Some((7, "no memory free".into())) },
        ),
        message("block trailer", BlockTrailer { root: [7; 32], fingerprints: fingerprints(2) }),
    ];
    cases.extend((1..=12).map(|code| failure(ErrorKind::from_wire_code(code))));
    cases
}
