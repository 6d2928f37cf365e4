//! The number of plans in which a repair has used each node, so that the load spreads.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::id::NodeId;
use crate::plan::Plan;

/// The nodes that a repair has used.
#[derive(Debug, Default)]
pub(super) struct NodeLoads(Mutex<HashMap<NodeId, u64>>);

impl NodeLoads {
    /// Builds a plan by the present loads, and counts its nodes. No other plan is built meanwhile.
    pub fn build_plan<T, E>(
        &self,
        build: impl FnOnce(&dyn Fn(NodeId) -> u64) -> Result<(Plan, T), E>,
    ) -> Result<(Plan, T), E> {
        let mut loads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let load_of = |node| loads.get(&node).copied().unwrap_or(0);
        let built = build(&load_of)?;
        for node in built.0.hops.iter().filter_map(|hop| hop.node) {
            *loads.entry(node).or_default() += 1;
        }
        Ok(built)
    }

    /// Returns the number of hops that a node has had.
    pub fn load_of(&self, node: NodeId) -> u64 {
        let loads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        loads.get(&node).copied().unwrap_or(0)
    }
}
