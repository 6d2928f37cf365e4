//! The settings of one point of an experiment, complete and checked.

use serde::{Deserialize, Serialize};

use crate::hosts::{HostNo, RateMbit};

/// Links through a relay: those of the first nodes by name.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Relayed {
    /// Of how many nodes.
    pub nodes: u32,
    /// How late packets come, in each direction.
    pub delay_ms: u32,
    /// How many of a hundred are lost, in each direction.
    pub loss_percent: f64,
}

/// Checkpoints one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    /// How many.
    pub saves: u32,
    /// Seconds from one to the next.
    pub every_s: u32,
}

/// The settings of one point, complete and checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// The point's label.
    pub label: String,
    /// How often each arm is played.
    #[serde(default)]
    pub rounds: u32,
    /// Storage nodes.
    pub nodes: u32,
    /// Pieces of a stripe.
    pub n: u32,
    /// Blocks of a stripe.
    pub k: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Shards of a checkpoint.
    pub shards: u32,
    /// Bytes that the work of one daemon may take.
    pub memory_bytes: u64,
    /// Of every node, both directions.
    pub rate_mbit: Option<u32>,
    /// Of the client.
    pub client_rate_mbit: Option<u32>,
    /// How many nodes are slow.
    pub slow_nodes: u32,
    /// The rate of those.
    pub slow_rate_mbit: Option<u32>,
    /// The slow nodes' links, if they are late or lose packets.
    #[serde(default)]
    pub relayed: Option<Relayed>,
    /// What finds out what a path carries; absent: the default.
    #[serde(default)]
    pub congestion: Option<String>,
    /// A run is a stream of checkpoints.
    #[serde(default)]
    pub stream: Option<Stream>,
}

impl Conditions {
    /// The same with links as they are. Slow nodes are refused before.
    pub fn unshaped(self) -> Self {
        Self { rate_mbit: None, client_rate_mbit: None, ..self }
    }

    /// Whether any link has a rate.
    pub fn is_shaped(&self) -> bool {
        [self.rate_mbit, self.client_rate_mbit, self.slow_rate_mbit].iter().any(Option::is_some)
    }

    /// Bytes of a checkpoint.
    pub fn checkpoint_bytes(&self) -> u64 {
        u64::from(self.shards) * u64::from(self.k) * self.block_bytes
    }

    /// The nodes with the slow rate: in each round the next ones by name, so that a plan whose coder is always the same node has it among
    /// them as often as any other.
    pub fn slow_in(&self, round: u32) -> Vec<HostNo> {
        let (nodes, slow) = (self.nodes as usize, self.slow_nodes as usize);
        let first = round as usize * slow;
        let slow = if self.slow_rate_mbit.is_some() { slow } else { 0 };
        (first..first + slow).map(|node| node % nodes).collect()
    }

    /// The rate of each node in a round.
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
