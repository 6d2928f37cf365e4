//! The calls that any daemon serves for a client: saves, steps, removals, and reads while no
//! catalogue answers.

pub(super) mod removal;
pub(super) mod saves;
pub(super) mod steps;
pub(super) mod without_catalogue;
