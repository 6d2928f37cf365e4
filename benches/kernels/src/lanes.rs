//! The buffers of a group, and where they are when the work begins: in the caches, like the tiles
//! that a node just received, or in memory.

use anyhow::Result;

use crate::raw::memory::Arena;

/// The place of a group's buffers.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// All buffers together fit into a second-level cache.
    Cache,
    /// Each buffer is many times as large as that cache.
    Memory,
}

impl Place {
    pub fn name(self) -> &'static str {
        match self {
            Place::Cache => "in cache",
            Place::Memory => "from memory",
        }
    }
}

/// The buffers of one group, all of the same length.
pub struct Lanes<'m> {
    pub inputs: Vec<&'m [u8]>,
    pub outputs: Vec<&'m mut [u8]>,
    /// A stream for work that is done in place, which changes it.
    pub stream: &'m mut [u8],
}

impl<'m> Lanes<'m> {
    /// Returns the number of buffers for this number of inputs and outputs.
    pub fn count(inputs: usize, outputs: usize) -> usize {
        inputs + outputs + 1
    }

    /// Cuts the arena into buffers. The arena must have room for [`Lanes::count`] buffers.
    pub fn new(arena: &'m mut Arena, inputs: usize, outputs: usize, bytes: usize) -> Result<Self> {
        let mut buffers = arena.buffers(Self::count(inputs, outputs), bytes)?.into_iter();
        let stream = buffers.next().unwrap_or_default();
        let outputs = buffers.by_ref().take(outputs).collect();
        Ok(Self { inputs: buffers.map(|buffer| &*buffer).collect(), outputs, stream })
    }

    pub fn bytes(&self) -> usize {
        self.stream.len()
    }
}
