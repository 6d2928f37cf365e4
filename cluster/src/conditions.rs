//! The settings of one point of an experiment, complete and checked.

use serde::{Deserialize, Serialize};

use crate::hosts::{HostNo, RateMbit};

/// Relayed links. The first nodes by name have such a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Relayed {
    /// Number of nodes with a relayed link.
    pub nodes: u32,
    /// Delay of packets in each direction, in milliseconds.
    pub delay_ms: u32,
    /// Packet loss in each direction, in percent.
    pub loss_percent: f64,
}

/// A stream of checkpoints, saved one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    /// Number of checkpoints.
    pub saves: u32,
    /// Seconds from one save to the next.
    pub every_s: u32,
}

/// The settings of one point, complete and checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// The label of the point.
    pub label: String,
    /// Number of times that each arm is run.
    #[serde(default)]
    pub rounds: u32,
    /// Number of storage nodes.
    pub nodes: u32,
    /// Number of pieces of a stripe.
    pub n: u32,
    /// Number of blocks of a stripe.
    pub k: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Number of shards of a checkpoint.
    pub shards: u32,
    /// Working memory of one daemon, in bytes.
    pub memory_bytes: u64,
    /// Rate of every node's link in both directions, in Mbit/s. None if not shaped.
    pub rate_mbit: Option<u32>,
    /// Rate of the client's link, in Mbit/s. None if not shaped.
    pub client_rate_mbit: Option<u32>,
    /// Number of slow nodes.
    pub slow_nodes: u32,
    /// Rate of the slow nodes' links, in Mbit/s.
    pub slow_rate_mbit: Option<u32>,
    /// The links of the slow nodes, if they delay or lose packets.
    #[serde(default)]
    pub relayed: Option<Relayed>,
    /// The congestion controller; absent for the default one.
    #[serde(default)]
    pub congestion: Option<String>,
    /// The setting `repair.grace_s`; absent for the default one.
    #[serde(default)]
    pub repair_grace_s: Option<u32>,
    /// If given, each run is a stream of checkpoints.
    #[serde(default)]
    pub stream: Option<Stream>,
}

impl Conditions {
    /// Returns the conditions without shaped links. Conditions with slow nodes are refused before.
    pub fn unshaped(self) -> Self {
        Self { rate_mbit: None, client_rate_mbit: None, ..self }
    }

    /// Returns whether any link has a rate.
    pub fn is_shaped(&self) -> bool {
        [self.rate_mbit, self.client_rate_mbit, self.slow_rate_mbit].iter().any(Option::is_some)
    }

    /// Returns the bytes of a checkpoint.
    pub fn checkpoint_bytes(&self) -> u64 {
        u64::from(self.shards) * u64::from(self.k) * self.block_bytes
    }

    /// Returns the nodes with the slow rate. Each round takes the next nodes by name, so that a
    /// plan whose coder is always the same node has a slow coder as often as any other plan.
    pub fn slow_in(&self, round: u32) -> Vec<HostNo> {
        let (nodes, slow) = (self.nodes as usize, self.slow_nodes as usize);
        let first = round as usize * slow;
        let slow = if self.slow_rate_mbit.is_some() { slow } else { 0 };
        (first..first + slow).map(|node| node % nodes).collect()
    }

    /// Returns the rate of each node in a round.
    pub fn rates_in(&self, round: u32) -> Vec<RateMbit> {
        let mut rates = vec![self.rate_mbit; self.nodes as usize];
        for node in self.slow_in(round) {
            rates[node] = self.slow_rate_mbit;
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::experiment::Experiment;

    #[test]
    fn every_node_is_slow_as_often_as_any_other() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments/slow-nodes.toml");
        for at in Experiment::read(&file, false).unwrap().conditions(false).unwrap() {
            let mut often = vec![0; at.nodes as usize];
            for round in 0..at.nodes {
                at.slow_in(round).into_iter().for_each(|node| often[node] += 1);
                let rates = at.rates_in(round);
                let slow = rates.iter().filter(|rate| **rate == at.slow_rate_mbit).count();
                assert_eq!((rates.len(), slow), (16, at.slow_nodes as usize), "{at:?}");
            }
            assert_eq!(often, vec![at.slow_nodes; 16]);
        }
    }
}
