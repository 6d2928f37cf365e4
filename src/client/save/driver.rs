//! Who decides during a save: its id, its shards once the code is known, and whether it is committed.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;

use crate::client::ClientError;
use crate::entropy::Entropy;
use crate::id::{SaveId, ShardName};
use crate::pipeline::upload::ShardSource;

/// One shard to save.
#[derive(Clone)]
pub struct NewShard {
    /// Its name.
    pub name: ShardName,
    /// Its bytes.
    pub source: Arc<dyn ShardSource>,
}

/// Steers a save: [`crate::client::Client::save_with`] asks it at each decision. A save that begins anew, because nodes failed under it, asks again.
#[async_trait]
pub trait SaveDriver: Send + Sync {
    /// Returns the id under which attempt `attempt` (from 0) begins. Whoever wants to know after a crash what became of the save keeps it
    /// before this returns, and asks [`crate::client::Client::settle_save`] later. Every attempt needs an id of its own.
    fn begin(&self, attempt: u32) -> io::Result<SaveId>;

    /// Returns the shards, which may be cut to fit the code that the cluster has chosen.
    fn shards(&self, code: SaveCode) -> Result<Vec<NewShard>, ClientError>;

    /// Decides whether to commit, when every byte is stored. An error aborts the save with its words.
    async fn confirm(&self) -> Result<(), String>;
}

/// The code that a save will be archived by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveCode {
    /// Pieces of a stripe.
    pub n: u8,
    /// Blocks of a stripe.
    pub k: u8,
    /// Length of a full block.
    pub block_bytes: u64,
}

impl SaveCode {
    /// Bytes of a full stripe.
    pub fn stripe_bytes(&self) -> u64 {
        self.block_bytes.saturating_mul(self.k.into())
    }
}

/// What became of a save whose client does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveFate {
    /// It is committed.
    Committed,
    /// It is not, and never will be.
    Aborted,
}

/// A save of shards that are known beforehand, committed without a question.
pub(in crate::client) struct PlainSave {
    pub(in crate::client) shards: Vec<NewShard>,
    pub(in crate::client) entropy: Arc<dyn Entropy>,
}

#[async_trait]
impl SaveDriver for PlainSave {
    fn begin(&self, _attempt: u32) -> io::Result<SaveId> {
        let mut save = SaveId([0; 12]);
        self.entropy.fill(&mut save.0);
        Ok(save)
    }

    fn shards(&self, _code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        Ok(self.shards.clone())
    }

    async fn confirm(&self) -> Result<(), String> {
        Ok(())
    }
}
