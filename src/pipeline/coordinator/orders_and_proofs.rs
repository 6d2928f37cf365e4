//! Builds one order for each node from a checked plan, and verifies the proofs of the nodes.

use std::collections::BTreeMap;

use super::ArchiveError;
use super::plan_execution::NodeOrder;
use super::stripe_archiving::StripeArchiving;
use crate::format::records::{PieceForm, ReceiptPiece, StripeFixed};
use crate::gf::Fingerprint;
use crate::id::NodeId;
use crate::plan::check::Checked;
use crate::plan::{Hop, Input, Output, Plan, StreamNo};
use crate::wire::NodeAddress;
use crate::wire::order::{HopOrder, InputOrder, Order, OutputOrder, PieceProof, RunReport};

impl StripeArchiving<'_> {
    /// Builds one order for each node of the plan. Returns the orders in node-id order.
    pub(super) fn build_orders(
        &self,
        plan: &Plan,
        checked: &Checked,
    ) -> Result<Vec<NodeOrder>, ArchiveError> {
        let receivers = map_stream_receivers(plan);
        let (coordinator, shard) = (self.coordinator, self.shard);
        let run = coordinator.entropy.id();
        let order = |node: NodeId| {
            let hops = plan.hops.iter().filter(|hop| hop.node == Some(node));
            let hops = hops.map(|hop| build_hop_order(self, hop, checked, &receivers));
            // A systematic piece is the replica of the block with the same number.
            let kept =
                plan.kept.iter().filter(|(_, at)| *at == node).map(|(piece, _)| (*piece, *piece));
            let order = Order {
                run,
                stripe: plan.stripe,
                attempt: plan.attempt,
                generation: shard.generation,
                coordinator: coordinator.me,
                code: plan.code,
                cut: plan.cut,
                fingerprint_key: shard.root.fingerprint_key,
                codec: self.options.codec,
                hops: hops.collect::<Result<_, _>>()?,
                kept: kept.collect(),
            };
            Ok(NodeOrder { node, address: find_address(self, node)?, order })
        };
        plan.nodes().into_iter().map(order).collect()
    }

    /// Verifies that each of the n pieces has the fingerprints that follow from its row of the
    /// generator and the fingerprints of the blocks. Returns all n pieces, for the receipt.
    pub(super) fn verify_proofs(
        &self,
        plan: &Plan,
        reports: &[(NodeId, RunReport)],
    ) -> Result<Vec<ReceiptPiece>, ArchiveError> {
        let (shard, fixed, directory) = (self.shard, &self.info.fixed, &self.directory);
        let mut proofs: BTreeMap<u8, (NodeId, &PieceProof)> = BTreeMap::new();
        for (node, report) in reports {
            for proof in &report.proofs {
                if plan.home(proof.piece) == Some(*node) {
                    proofs.insert(proof.piece, (*node, proof));
                }
            }
        }
        let unproven = |piece: u8, why: String| ArchiveError::Unproven {
            stripe: plan.stripe,
            what: format!("piece {piece}{why}"),
        };
        let mut pieces = Vec::with_capacity(shard.code.n());
        for piece in 0..shard.code.n() as u8 {
            let Some((node, proof)) = proofs.get(&piece) else {
                return Err(unproven(piece, ", which no node proved,".into()));
            };
            let row = shard.code.generator().row(piece.into());
            let grains = plan.cut.grains();
            for grain in 0..grains {
                let found = proof.fingerprints.get(grain as usize).copied();
                if found != Some(combined_fingerprint(row, fixed, grain)?)
                    || proof.fingerprints.len() as u64 != grains
                {
                    return Err(unproven(
                        piece,
                        format!(" on {} (grain {grain})", directory.name(*node)),
                    ));
                }
            }
            let form = match plan.kept.iter().any(|(kept, _)| *kept == piece) {
                true => PieceForm::Replica { block: piece },
                false => PieceForm::File,
            };
            pieces.push(ReceiptPiece { piece, node: *node, form, root: proof.root });
        }
        Ok(pieces)
    }
}

/// Returns the fingerprint, at one grain, of the linear combination of the blocks with the
/// coefficients `row`.
fn combined_fingerprint(
    row: &[u8],
    fixed: &StripeFixed,
    grain: u64,
) -> Result<Fingerprint, ArchiveError> {
    let blocks: Vec<Fingerprint> = (0..row.len()).map(|j| fixed.fingerprint(j, grain)).collect();
    Fingerprint::combine(row, &blocks).map_err(|error| ArchiveError::Format(error.to_string()))
}

/// Returns the node that receives each stream of the plan.
fn map_stream_receivers(plan: &Plan) -> BTreeMap<StreamNo, NodeId> {
    let mut receivers = BTreeMap::new();
    for hop in &plan.hops {
        for input in &hop.inputs {
            if let (Input::Stream(stream), Some(node)) = (input, hop.node) {
                receivers.insert(*stream, node);
            }
        }
    }
    receivers
}

fn find_address(stripe: &StripeArchiving<'_>, node: NodeId) -> Result<NodeAddress, ArchiveError> {
    stripe.directory.address(node).ok_or(ArchiveError::Unregistered { node })
}

/// Builds the order for one hop: the fingerprints that its inputs must have, and the nodes that its
/// output streams go to.
fn build_hop_order(
    stripe: &StripeArchiving<'_>,
    hop: &Hop,
    checked: &Checked,
    receivers: &BTreeMap<StreamNo, NodeId>,
) -> Result<HopOrder, ArchiveError> {
    let (fixed, generator) = (&stripe.info.fixed, stripe.shard.code.generator());
    let mut inputs = Vec::with_capacity(hop.inputs.len());
    for input in &hop.inputs {
        let expected = hop.range().map(|grain| match *input {
            Input::Block(block) => Ok(fixed.fingerprint(block.into(), grain)),
            Input::Stream(stream) => combined_fingerprint(&checked.streams[&stream], fixed, grain),
            Input::Piece(piece) => combined_fingerprint(generator.row(piece.into()), fixed, grain),
        });
        let expected = expected.collect::<Result<_, _>>()?;
        inputs.push(InputOrder { input: *input, expected });
    }
    let mut outputs = Vec::with_capacity(hop.outputs.len());
    for output in &hop.outputs {
        let to = match output {
            Output::Stream(stream) => Some(find_address(stripe, receivers[stream])?),
            _ => None,
        };
        outputs.push(OutputOrder { output: *output, to });
    }
    Ok(HopOrder { grains: hop.grains, inputs, outputs, matrix: hop.matrix.clone() })
}
