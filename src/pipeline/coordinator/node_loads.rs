//! The number of hops that a repair has given to each node. Plans prefer nodes with few hops.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::id::NodeId;
use crate::plan::Plan;

/// The number of hops that one repair has given to each node. Hops that have ended count, too.
#[derive(Debug, Default)]
pub(super) struct NodeLoads(Mutex<HashMap<NodeId, u64>>);

impl NodeLoads {
    /// Builds a plan by the present loads and adds its hops to them. Plans are built one at a time.
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

    /// Returns the number of hops that the repair has given to a node.
    pub fn load_of(&self, node: NodeId) -> u64 {
        let loads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        loads.get(&node).copied().unwrap_or(0)
    }
}
