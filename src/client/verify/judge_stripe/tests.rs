//! Judgements of stripes that are intact except for the changes of a test.

use super::*;
use crate::code::RsCode;
use crate::format::records::{BlockInfo, ReceiptPiece, RingNode, StripeFixed};
use crate::format::samples;
use crate::id::{ClusterId, Generation, StripeId};
use crate::wire::calls::RecordView;

const ATTEMPT: Attempt = Attempt([1; 16]);
const LEAF: [u8; 32] = [9; 32];

/// A stripe of four blocks, archived by the classical code with six pieces. The first four pieces
/// are replicas that stay. Each piece is on the node of its number.
struct Stripe {
    root: ShardRoot,
    info: StripeInfo,
    receipt: Receipt,
    answers: BTreeMap<NodeId, ExamineAnswer>,
}

fn file(file: FileName) -> SourceView {
    SourceView { file, content: Some((GRAIN_BYTES, [7; 32])), damaged: None }
}

impl Stripe {
    fn whole() -> Self {
        let ring = (0..8).map(|node| RingNode { node: NodeId(node), domain: 0 }).collect();
        let root = samples::shard_root(ring);
        let stripe = StripeId { shard: root.shard, index: 0 };
        let cut = root.geometry().unwrap().stripe(0).unwrap();
        let block = BlockInfo { len_bytes: GRAIN_BYTES, root: [7; 32], fingerprints: Vec::new() };
        let fixed = StripeFixed { stripe, cut, blocks: vec![block; 4] };
        let info = StripeInfo { fixed, places: (0..6).map(NodeId).collect() };
        let piece = |piece: u8| ReceiptPiece {
            piece,
            node: NodeId(piece.into()),
            form: if piece < 4 { PieceForm::Replica { block: piece } } else { PieceForm::File },
            root: [7; 32],
        };
        let receipt = Receipt {
            cluster: ClusterId([0; 16]),
            stripe,
            attempt: ATTEMPT,
            generation: Generation::default(),
            code: RsCode::new(6, 4).unwrap().id(),
            pieces: (0..6).map(piece).collect(),
            order: Generation::default(),
        };
        let digest = digest::of_receipt(&receipt);
        let records = |node: u64| {
            let of_receipt = RecordName::Receipt { index: 0, attempt: ATTEMPT };
            let mut records = vec![RecordView { record: of_receipt, digest }];
            let record = RecordName::Stripe { index: 0 };
            records.push(RecordView { record, digest: Some(LEAF) });
            if node < 6 { records } else { Vec::new() }
        };
        let files = |node: u64| match u8::try_from(node).unwrap() {
            block @ 0..4 => vec![file(FileName::Replica { block })],
            piece @ 4..6 => vec![file(FileName::Piece { piece, attempt: ATTEMPT })],
            _ => Vec::new(),
        };
        let answer =
            |node| (NodeId(node), ExamineAnswer { files: files(node), records: records(node) });
        Self { root, info, receipt, answers: (0..8).map(answer).collect() }
    }

    fn files(&mut self, node: u64) -> &mut Vec<SourceView> {
        &mut self.answers.get_mut(&NodeId(node)).unwrap().files
    }

    fn judge(&self, dropped: bool) -> StripeJudgement {
        let (code, generation) = (self.receipt.code, self.receipt.generation);
        let ring: Vec<NodeId> = self.root.ring.iter().map(|member| member.node).collect();
        let examined = ExaminedStripe {
            root: &self.root,
            ring: &ring,
            info: Some((&self.info, LEAF)),
            state: StripeState::Archived { attempt: ATTEMPT, code, generation, dropped },
            receipt: Some(&self.receipt),
            answers: &self.answers,
            with_shard: false,
        };
        examined.judge_stripe(&mut SurvivableLossCache::default())
    }
}

#[test]
fn copies_that_are_to_be_dropped_replace_none_and_are_no_fault() {
    let mut stripe = Stripe::whole();
    let whole = stripe.judge(true);
    assert_eq!((whole.faults, whole.survives), (vec![], Some(2)));
    // A node that was down at the drop still has its replica of block 0.
    stripe.files(7).push(file(FileName::Replica { block: 0 }));
    let left = stripe.judge(false);
    assert_eq!((left.faults, left.survives), (vec![], Some(2)));
    // The copy that the receipt names is lost. That is a fault although another copy exists.
    stripe.files(0).clear();
    let lost = stripe.judge(false);
    let fault =
        JudgedFault { node: NodeId(0), held: HeldItem::Replica(0), wrong: Problem::Missing };
    assert_eq!((lost.faults, lost.survives), (vec![fault], Some(1)));
    // A copy that is to be dropped counts if no other is left.
    (1..3).for_each(|node| stripe.files(node).clear());
    assert_eq!(stripe.judge(false).survives, Some(0));
    // Damage of such a copy is no fault of the checkpoint.
    stripe.files(7)[0].damaged = Some([0].into_iter().collect());
    let rotten = stripe.judge(false);
    assert_eq!((rotten.faults.len(), rotten.survives), (3, None));
}

#[test]
fn an_earlier_receipt_on_a_node_that_was_replaced_is_no_fault() {
    let mut stripe = Stripe::whole();
    let record = RecordName::Receipt { index: 0, attempt: ATTEMPT };
    let earlier = RecordView { record, digest: Some([3; 32]) };
    stripe.answers.get_mut(&NodeId(6)).unwrap().records.push(earlier.clone());
    assert_eq!(stripe.judge(true).faults, vec![]);
    // On a node that the receipt names, it is a fault.
    stripe.answers.get_mut(&NodeId(5)).unwrap().records[0] = earlier;
    let fault = JudgedFault { node: NodeId(5), held: HeldItem::Receipt, wrong: Problem::Other };
    assert_eq!(stripe.judge(true).faults, vec![fault]);
}

#[test]
fn records_are_missed_when_fewer_are_there_than_the_commit_needs() {
    let mut stripe = Stripe::whole();
    for missing in 1..=4 {
        stripe.answers.get_mut(&NodeId(missing - 1)).unwrap().records.truncate(1);
        let exam = stripe.judge(true);
        let expected = if missing <= 3 { (0, missing as usize) } else { (4, 0) };
        assert_eq!((exam.faults.len(), exam.lacking.len()), expected, "{missing} missing");
        assert_eq!(exam.survives, Some((6 - missing as usize - 1).min(2)));
    }
}
