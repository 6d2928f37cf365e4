//! The chain plan: each node combines its blocks with the incoming stream. It stores one
//! combination as its piece and forwards another.
//!
//! Hop i stores `c_i = x_{i-1} + sum xi o_j` and forwards `x_i = x_{i-1} + sum psi o_j` (paper,
//! section IV). The plan moves n-1 blocks over the network: one into each node but the head, and one
//! out of each node but the tail.

use super::{PlannerError, Subject};
use crate::code::Code;
use crate::plan::{Hop, Input, Output, Plan};

/// Builds the chain plan in the code's own order. Returns [`PlannerError::Code`] unless the code is
/// a chain code, and [`PlannerError::Places`] unless the subject has n places.
pub fn chain(subject: &Subject<'_>) -> Result<Plan, PlannerError> {
    let Code::Chain(code) = subject.code else {
        return Err(PlannerError::Code { plan: "chain", code: subject.code.name().to_owned() });
    };
    subject.check_places()?;
    let last = code.n() - 1;
    let hops = (0..code.n())
        .map(|hop| {
            let mut inputs = Vec::new();
            let mut outputs = vec![Output::Store(hop as u8)];
            let mut store = Vec::new();
            let mut forward = Vec::new();
            if hop > 0 {
                inputs.push(Input::Stream(hop as u16 - 1));
                store.push(1);
                forward.push(1);
            }
            for (local, block) in code.blocks_of_hop(hop).enumerate() {
                inputs.push(Input::Block(block as u8));
                store.push(code.xi()[hop][local]);
                forward.push(code.psi()[hop][local]);
            }
            let mut matrix = vec![store];
            if hop < last {
                outputs.push(Output::Stream(hop as u16));
                matrix.push(forward);
            }
            Hop {
                node: Some(subject.places[code.order()[hop]]),
                grains: (0, subject.cut.grains()),
                inputs,
                outputs,
                matrix,
            }
        })
        .collect();
    Ok(Plan {
        stripe: subject.stripe,
        attempt: subject.attempt,
        code: subject.code.id(),
        cut: subject.cut,
        hops,
        kept: Vec::new(),
    })
}
