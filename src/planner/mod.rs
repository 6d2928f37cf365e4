//! Planners only build plans; [`crate::plan::check`] proves them and the engine runs them.

mod chain;
mod read;
mod star;

pub use chain::chain;
pub use read::direct_read;
pub use star::{best_star, naive_star, striped_star};

use crate::code::Code;
use crate::format::geometry::StripeCut;
use crate::id::{Attempt, NodeId, StripeId};
use crate::kind::ErrorKind;

/// What every plan is about: one stripe, one attempt, one code, and the node at each position.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The stripe.
    pub stripe: StripeId,
    /// Names the pieces.
    pub attempt: Attempt,
    /// The stripe's cut.
    pub cut: StripeCut,
    /// The node at each position of the standard layout, n of them.
    pub places: &'a [NodeId],
    /// The code to encode into.
    pub code: &'a Code,
}

/// No plan of the wanted shape exists.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The plan makes another kind of code.
    #[error("a {plan} plan does not make code {code}: take another plan or another code")]
    Code {
        /// The plan.
        plan: &'static str,
        /// The code.
        code: String,
    },
    /// The places are not n nodes.
    #[error("{have} places are known, the code needs {need}")]
    Places {
        /// n.
        need: usize,
        /// How many.
        have: usize,
    },
}

impl PlannerError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            PlannerError::Code { .. } => ErrorKind::Invalid,
            PlannerError::Places { .. } => ErrorKind::Unavailable,
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
