//! The decisions of a save's caller: on the save's id, on its shards once the code is known, and on
//! whether it is committed.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;

use crate::client::ClientError;
use crate::entropy::Entropy;
use crate::id::{LaunchId, SaveId, ShardName};
use crate::pipeline::upload::ShardSource;

/// A shard to save.
#[derive(Clone)]
pub struct NewShard {
    /// The shard's name.
    pub name: ShardName,
    /// The shard's bytes.
    pub source: Arc<dyn ShardSource>,
}

/// The decisions of a save's caller. [`crate::client::Client::save_with_decisions`] calls these
/// methods, and calls them again if the save starts again.
#[async_trait]
pub trait SaveDecisions: Send + Sync {
    /// Returns the id of attempt `attempt` (from 0). Every attempt needs an id of its own. To learn
    /// after a crash whether the save was committed, store the id durably before this returns, and
    /// call [`crate::client::Client::settle_save`] later.
    fn assign_save_id(&self, attempt: u32) -> io::Result<SaveId>;

    /// Returns the launch that the save belongs to, if it belongs to one. The launch must be
    /// registered ([`crate::client::Client::register_launch`]).
    fn launch(&self) -> Option<LaunchId> {
        None
    }

    /// Returns the shards. The caller may cut them to fit the code that the cluster has chosen.
    fn shards_for_code(&self, code: SaveCode) -> Result<Vec<NewShard>, ClientError>;

    /// Decides whether to commit. Called when every byte is stored. An error aborts the save; its
    /// text becomes the reason.
    async fn approve_commit(&self) -> Result<(), String>;
}

/// The code by which a save will be archived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveCode {
    /// Number of pieces of a stripe.
    pub n: u8,
    /// Number of blocks of a stripe.
    pub k: u8,
    /// Length of a full block in bytes.
    pub block_bytes: u64,
}

impl SaveCode {
    /// Returns the length of a full stripe in bytes.
    pub fn stripe_bytes(&self) -> u64 {
        self.block_bytes.saturating_mul(self.k.into())
    }
}

/// The fate of a save, for a client that does not know whether the save was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveFate {
    /// The save is committed, or was committed and has been removed or replaced since.
    Committed,
    /// The save is not committed and never will be.
    Aborted,
}

/// The decisions for a save whose shards are known beforehand. They commit without further conditions.
pub(in crate::client) struct PlainSave {
    pub(in crate::client) shards: Vec<NewShard>,
    pub(in crate::client) entropy: Arc<dyn Entropy>,
}

#[async_trait]
impl SaveDecisions for PlainSave {
    fn assign_save_id(&self, _attempt: u32) -> io::Result<SaveId> {
        let mut save = SaveId([0; 12]);
        self.entropy.fill(&mut save.0);
        Ok(save)
    }

    fn shards_for_code(&self, _code: SaveCode) -> Result<Vec<NewShard>, ClientError> {
        Ok(self.shards.clone())
    }

    async fn approve_commit(&self) -> Result<(), String> {
        Ok(())
    }
}
