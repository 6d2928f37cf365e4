//! Keys, and typed reads and writes of the catalogue's records.

use serde::{Deserialize, Serialize};

use super::{Catalogue, CatalogueError, SetOutcome};
use crate::format::envelope::RecordKind;
use crate::format::records::Record;
use crate::id::{Job, LeaseId, NodeId, SaveId, ShardId, Step};
use crate::wire::calls::ArchiveOptions;

/// Prefix of the nodes' records.
pub const NODES: &str = "n/";
/// Prefix of the checkpoints' records.
pub const CHECKPOINTS: &str = "c/";

/// Key of a step; steps of a job sort by number.
pub fn checkpoint_key(job: &Job, step: Step) -> String {
    format!("{CHECKPOINTS}{job}/{:020}", step.0)
}

/// Job and step of a checkpoint's key.
pub fn parse_checkpoint_key(key: &str) -> Option<(Job, Step)> {
    parse_step(key.strip_prefix(CHECKPOINTS)?)
}

/// Prefix of all shard roots.
pub const ROOTS: &str = "s/";
/// Prefix of all shard states.
pub const STATES: &str = "t/";

/// Prefix of the shard roots of a save.
pub fn roots_prefix(save: SaveId) -> String {
    format!("{ROOTS}{save}/")
}

/// In a map from its beginning until the first removal of a committed save is forgotten: until then all of them are in it.
pub const NOTHING_FORGOTTEN: &str = "nothing-forgotten";
/// Prefix of the saves that are to be removed and belong to no step's record.
pub const ORPHANS: &str = "x/";

/// Key of such a save.
pub fn orphan_key(save: SaveId) -> String {
    format!("{ORPHANS}{save}")
}

/// Key of a shard's root.
pub fn root_key(save: SaveId, index: u32) -> String {
    format!("{ROOTS}{save}/{index:08x}")
}

/// Key of a shard's state.
pub fn state_key(shard: ShardId) -> String {
    format!("{STATES}{shard}")
}

/// Prefix of the shard states of a save: a shard's id begins with its save's.
pub fn states_prefix(save: SaveId) -> String {
    format!("{STATES}{save}")
}

/// Prefix of the archivings under way.
pub const ARCHIVINGS: &str = "a/";

/// Key of a step's archiving.
pub fn archiving_key(job: &Job, step: Step) -> String {
    format!("{ARCHIVINGS}{job}/{:020}", step.0)
}

/// Job and step of an archiving's key.
pub fn parse_archiving_key(key: &str) -> Option<(Job, Step)> {
    parse_step(key.strip_prefix(ARCHIVINGS)?)
}

fn parse_step(text: &str) -> Option<(Job, Step)> {
    let (job, step) = text.rsplit_once('/')?;
    Some((job.parse().ok()?, step.parse().ok()?))
}

/// An archiving that was asked for and has not ended: when its lease is over, any daemon goes on with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Archiving {
    /// The coordinator's node.
    pub node: NodeId,
    /// Its lease; also that of the shards it owns.
    pub lease: LeaseId,
    /// What is to be archived; another save of the step is not.
    pub save: SaveId,
    /// How.
    pub options: ArchiveOptions,
    /// Failures in a row.
    pub failures: u32,
    /// That it waits since the last of these, and its reason in at most [`MAX_WHY_CHARS`]; `None` while somebody is at it, and also when
    /// he died at it.
    pub waiting: Option<String>,
}

/// The longest reason in a record, in characters: with it the record stays far below the longest value.
pub const MAX_WHY_CHARS: usize = 500;

impl Record for Archiving {
    const KIND: RecordKind = RecordKind::Archiving;
}

/// Opens a record.
pub fn parse<R: Record>(key: &str, value: &[u8]) -> Result<R, CatalogueError> {
    R::parse(value)
        .map_err(|error| CatalogueError::Record { key: key.to_owned(), reason: error.to_string() })
}

/// Reads a record and its revision.
pub async fn read<R: Record>(
    catalogue: &dyn Catalogue,
    key: &str,
) -> Result<Option<(R, u64)>, CatalogueError> {
    let entry = catalogue.get(key).await?;
    entry.map(|entry| Ok((parse(key, &entry.value)?, entry.revision))).transpose()
}

/// How a typed compare-and-set ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written<R> {
    /// Done; the new revision.
    Set(u64),
    /// Not as expected; what the key is now.
    Other(Option<(R, u64)>),
}

/// Writes a record by compare-and-set.
pub async fn write<R: Record>(
    catalogue: &dyn Catalogue,
    key: &str,
    expected: Option<u64>,
    record: &R,
) -> Result<Written<R>, CatalogueError> {
    let value = record.to_bytes().map_err(|error| CatalogueError::Record {
        key: key.to_owned(),
        reason: error.to_string(),
    })?;
    match catalogue.compare_and_set(key, expected, Some(value)).await? {
        SetOutcome::Set(revision) => Ok(Written::Set(revision)),
        SetOutcome::Conflict(entry) => {
            let now = entry.map(|entry| Ok((parse(key, &entry.value)?, entry.revision)));
            now.transpose().map(Written::Other)
        }
    }
}

/// Changes a record by read, `change`, compare-and-set, again when somebody else came first. `change` returns `None` to leave it.
///
/// An answer that was lost is repeated by reading first: `change` must leave a record alone that it has already changed.
pub async fn update<R: Record + Default + Clone, E: From<CatalogueError>>(
    catalogue: &dyn Catalogue,
    key: &str,
    mut change: impl FnMut(R) -> Result<Option<R>, E>,
) -> Result<R, E> {
    let mut current: Option<(R, u64)> = read(catalogue, key).await?;
    loop {
        let before = current.as_ref().map(|(record, _)| record.clone()).unwrap_or_default();
        let Some(after) = change(before.clone())? else { return Ok(before) };
        let expected = current.map(|(_, revision)| revision);
        match write(catalogue, key, expected, &after).await? {
            Written::Set(_) => return Ok(after),
            Written::Other(now) => current = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_keys_sort_by_step_and_parse_back() {
        let job: Job = "a.b-c".parse().unwrap();
        let keys: Vec<String> =
            [9, 10, u64::MAX].iter().map(|&step| checkpoint_key(&job, Step(step))).collect();
        assert!(keys.is_sorted());
        assert_eq!(parse_checkpoint_key(&keys[1]), Some((job, Step(10))));
        assert_eq!(parse_checkpoint_key("c/x"), None);
    }
}
