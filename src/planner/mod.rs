//! The planners. They only build plans: [`crate::plan::check`] proves a plan, and the executor or
//! the reader runs it.

mod chain;
mod read;
mod repair;
mod star;

pub use chain::chain;
pub use read::direct_read;
pub use repair::{RepairSource, RepairSubject, RepairTarget, repair_chain, repair_star};
pub use star::{best_star, naive_star, striped_star};

use crate::code::{Code, CodeError};
use crate::format::geometry::StripeCut;
use crate::id::{Attempt, NodeId, StripeId};
use crate::kind::ErrorKind;

/// The subject of a plan: one stripe, one attempt, one code, and the node at each position.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The stripe.
    pub stripe: StripeId,
    /// The attempt that names the pieces.
    pub attempt: Attempt,
    /// The cut of the stripe: its range in the shard and its block length.
    pub cut: StripeCut,
    /// The node at each position of the standard layout, n of them.
    pub places: &'a [NodeId],
    /// The code to encode into.
    pub code: &'a Code,
}

/// The errors of a planner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The kind of plan cannot produce this kind of code.
    #[error("a {plan} plan does not make code {code}: take another plan or another code")]
    Code {
        /// Name of the plan.
        plan: &'static str,
        /// Name of the code.
        code: String,
    },
    /// The number of places is not n.
    #[error("{have} places are known, the code needs {need}")]
    Places {
        /// Number of places that the code needs, n.
        need: usize,
        /// Number of places that are given.
        have: usize,
    },
    /// The pieces that are left do not determine the missing ones.
    #[error(transparent)]
    Pieces(#[from] CodeError),
}

impl PlannerError {
    /// Returns the error kind: `Invalid` for an unsuitable code, `Unavailable` for a wrong number
    /// of places, `Lost` for too few pieces.
    pub fn kind(&self) -> ErrorKind {
        match self {
            PlannerError::Code { .. } => ErrorKind::Invalid,
            PlannerError::Places { .. } => ErrorKind::Unavailable,
            PlannerError::Pieces(error) => error.kind(),
        }
    }
}

impl Subject<'_> {
    fn check_places(&self) -> Result<(), PlannerError> {
        if self.places.len() == self.code.n() {
            Ok(())
        } else {
            Err(PlannerError::Places { need: self.code.n(), have: self.places.len() })
        }
    }
}

#[cfg(test)]
mod tests;
