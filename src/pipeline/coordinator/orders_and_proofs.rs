//! Builds one order for each node from a checked plan, and verifies the proofs of the nodes.

use std::collections::BTreeMap;

use super::CoordinatorError;
use super::owned_stripe::OwnedStripe;
use super::plan_execution::NodeOrder;
use crate::code::Code;
use crate::format::records::{PieceForm, ReceiptPiece, StripeFixed};
use crate::gf::Fingerprint;
use crate::id::NodeId;
use crate::plan::check::Checked;
use crate::plan::{Hop, Input, Output, Plan, StreamNo};
use crate::wire::NodeAddress;
use crate::wire::order::{Codec, HopOrder, InputOrder, Order, OutputOrder, RunReport};

impl OwnedStripe<'_> {
    /// Builds one order for each node of the plan. Hops that receive no stream send at most
    /// `bytes_per_s`. Returns the orders in node-id order.
    pub(super) fn build_orders(
        &self,
        plan: &Plan,
        checked: &Checked,
        code: &Code,
        codec: Codec,
        bytes_per_s: Option<u64>,
    ) -> Result<Vec<NodeOrder>, CoordinatorError> {
        let receivers = map_stream_receivers(plan);
        let (coordinator, shard) = (self.coordinator, self.shard);
        let run = coordinator.entropy.id();
        let order = |node: NodeId| {
            let hops = plan.hops.iter().filter(|hop| hop.node == Some(node));
            let hops = hops.map(|hop| build_hop_order(self, code, hop, checked, &receivers));
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
                codec,
                bytes_per_s,
                hops: hops.collect::<Result<_, _>>()?,
                kept: kept.collect(),
            };
            Ok(NodeOrder { node, address: find_address(self, node)?, order })
        };
        plan.nodes().into_iter().map(order).collect()
    }

    /// Verifies that each of the n pieces has the fingerprints that follow from its row of the
    /// generator and the fingerprints of the blocks. Returns all n pieces, for the receipt.
    pub(super) fn verify_all_pieces(
        &self,
        plan: &Plan,
        code: &Code,
        reports: &[(NodeId, RunReport)],
    ) -> Result<Vec<ReceiptPiece>, CoordinatorError> {
        let mut pieces = Vec::with_capacity(code.n());
        for piece in 0..code.n() as u8 {
            let (node, root) = self.verify_piece(plan, code, reports, piece)?;
            let form = match plan.kept.iter().any(|(kept, _)| *kept == piece) {
                true => PieceForm::Replica { block: piece },
                false => PieceForm::File,
            };
            pieces.push(ReceiptPiece { piece, node, form, root });
        }
        Ok(pieces)
    }

    /// Verifies the proof of one piece in the report of the node that the plan assigns it to.
    /// Returns this node, and the root that it proved.
    ///
    /// # Errors
    /// [`CoordinatorError::Unproven`] if there is no proof, or if a fingerprint is not the one that
    /// the code prescribes.
    pub(super) fn verify_piece(
        &self,
        plan: &Plan,
        code: &Code,
        reports: &[(NodeId, RunReport)],
        piece: u8,
    ) -> Result<(NodeId, [u8; 32]), CoordinatorError> {
        let unproven = |why: String| CoordinatorError::Unproven {
            stripe: plan.stripe,
            what: format!("piece {piece}{why}"),
        };
        let of_home = reports.iter().filter(|(node, _)| plan.home(piece) == Some(*node));
        let mut proofs = of_home
            .flat_map(|(node, report)| report.proofs.iter().map(move |proof| (*node, proof)))
            .filter(|(_, proof)| proof.piece == piece);
        let (node, proof) =
            proofs.next_back().ok_or_else(|| unproven(", which no node proved,".into()))?;
        let (row, grains) = (code.generator().row(piece.into()), plan.cut.grains());
        for grain in 0..grains {
            let found = proof.fingerprints.get(grain as usize).copied();
            if found != Some(combined_fingerprint(row, &self.info.fixed, grain)?)
                || proof.fingerprints.len() as u64 != grains
            {
                let name = self.directory.name(node);
                return Err(unproven(format!(" on {name} (grain {grain})")));
            }
        }
        Ok((node, proof.root))
    }
}

/// Returns the fingerprint, at one grain, of the linear combination of the blocks with the
/// coefficients `row`.
fn combined_fingerprint(
    row: &[u8],
    fixed: &StripeFixed,
    grain: u64,
) -> Result<Fingerprint, CoordinatorError> {
    let blocks: Vec<Fingerprint> = (0..row.len()).map(|j| fixed.fingerprint(j, grain)).collect();
    Fingerprint::combine(row, &blocks).map_err(|error| CoordinatorError::Format(error.to_string()))
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

fn find_address(stripe: &OwnedStripe<'_>, node: NodeId) -> Result<NodeAddress, CoordinatorError> {
    stripe.directory.address(node).ok_or(CoordinatorError::Unregistered { node })
}

/// Builds the order for one hop: the fingerprints that its inputs must have, and the nodes that its
/// output streams go to.
fn build_hop_order(
    stripe: &OwnedStripe<'_>,
    code: &Code,
    hop: &Hop,
    checked: &Checked,
    receivers: &BTreeMap<StreamNo, NodeId>,
) -> Result<HopOrder, CoordinatorError> {
    let (fixed, generator) = (&stripe.info.fixed, code.generator());
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
