//! The buffers of a group, and where they lie when the work begins: in the caches, as the tiles that a node just
//! received, or in memory.

use anyhow::Result;

use crate::raw::memory::Arena;

/// Where the buffers of a group lie.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// All of them together in a second-level cache.
    Cache,
    /// Each of them many times as large as that.
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

/// The buffers of one group, all of one length.
pub struct Lanes<'m> {
    pub inputs: Vec<&'m [u8]>,
    pub outputs: Vec<&'m mut [u8]>,
    /// A stream that work done in place begins with and leaves changed.
    pub stream: &'m mut [u8],
}

impl<'m> Lanes<'m> {
    /// How many buffers so many inputs and outputs take.
    pub fn count(inputs: usize, outputs: usize) -> usize {
        inputs + outputs + 1
    }

    /// Cuts the arena, which must have been made for [`Lanes::count`] buffers.
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
