//! The keys of the catalogue, and typed reads and writes of its records.

use serde::{Deserialize, Serialize};

use super::key_scan::KeyScan;
use super::{Catalogue, CatalogueError, Entry, Guard, GuardedOutcome, SetOutcome};
use crate::format::envelope::RecordKind;
use crate::format::records::{JointSave, Record, RingChanges, SaveRing};
use crate::id::{Job, LeaseId, NodeId, PeerName, SaveId, ShardId, Step, StepRef};
use crate::wire::calls::ArchiveOptions;

/// Prefix of the nodes' records.
pub const NODES: &str = "n/";
/// Prefix of the checkpoints' records.
pub const CHECKPOINTS: &str = "c/";

/// Returns the key of a step. The keys of a job's steps sort by step number.
pub fn checkpoint_key(step_ref: StepRef<'_>) -> String {
    let StepRef { job, step } = step_ref;
    format!("{CHECKPOINTS}{job}/{:020}", step.0)
}

/// Parses the key of a checkpoint. Returns its job and step.
pub fn parse_checkpoint_key(key: &str) -> Option<(Job, Step)> {
    parse_job_and_step(key.strip_prefix(CHECKPOINTS)?)
}

/// Prefix of all shard roots.
pub const SHARD_ROOTS: &str = "s/";
/// Prefix of all shard states.
pub const SHARD_STATES: &str = "t/";

/// Returns the prefix of the shard roots of a save.
pub fn shard_roots_prefix(save: SaveId) -> String {
    format!("{SHARD_ROOTS}{save}/")
}

/// A key that a database of a new cluster has from its beginning until it forgets the first removal of
/// a committed save. While the key is there, the database has records of all such removals. A rebuilt
/// database never has the key.
pub const NOTHING_FORGOTTEN: &str = "nothing-forgotten";
/// The key, without a value, that a catalogue has while retention is paused (docs/semantics.md, 9).
pub const RETENTION_PAUSED: &str = "retention-paused";
/// Prefix of the orphans: saves that are to be removed and belong to no step's record.
pub const ORPHANS: &str = "x/";

/// Returns the key of an orphan.
pub fn orphan_key(save: SaveId) -> String {
    format!("{ORPHANS}{save}")
}

/// Prefix of the deferred removals: removals of aborted saves that some storage nodes have not purged
/// yet.
pub const DEFERRED_REMOVALS: &str = "d/";

/// Returns the key of a deferred removal.
pub fn deferred_removal_key(save: SaveId) -> String {
    format!("{DEFERRED_REMOVALS}{save}")
}

/// Returns the key of a shard's root.
pub fn shard_root_key(save: SaveId, index: u32) -> String {
    format!("{SHARD_ROOTS}{save}/{index:08x}")
}

/// Returns the key of a shard's state.
pub fn shard_state_key(shard: ShardId) -> String {
    format!("{SHARD_STATES}{shard}")
}

/// Returns the prefix of the shard states of a save. A shard's id begins with its save's id.
pub fn shard_states_prefix(save: SaveId) -> String {
    format!("{SHARD_STATES}{save}")
}

/// Prefix of the records of joint saves.
pub const JOINT_SAVES: &str = "j/";

/// Returns the key of the record of a joint save.
pub fn joint_save_key(save: SaveId) -> String {
    format!("{JOINT_SAVES}{save}")
}

/// Prefix of the rings of saves that belong to no launch.
pub const SAVE_RINGS: &str = "o/";

/// Returns the key of the ring of a save that belongs to no launch.
pub fn save_ring_key(save: SaveId) -> String {
    format!("{SAVE_RINGS}{save}")
}

/// Reads the ring of an open save. Returns `None` if it is not recorded yet, or if the gateway of the
/// save runs an older program: only the client knows the ring then.
///
/// # Errors
/// If the catalogue does not answer, or if the record does not parse.
pub async fn read_ring_of_open_save(
    catalogue: &dyn Catalogue,
    save: SaveId,
) -> Result<Option<SaveRing>, CatalogueError> {
    if let Some((joint, _)) = read_record::<JointSave>(catalogue, &joint_save_key(save)).await? {
        return Ok(Some(joint.into()));
    }
    let ring = read_record::<SaveRing>(catalogue, &save_ring_key(save)).await?;
    Ok(ring.map(|(ring, _)| ring))
}

/// Prefix of the keys of the launch orders. The launch order of a job lists its launches in the
/// order of their registration.
pub const LAUNCH_ORDERS: &str = "l/";

/// Returns the key of the order of a job's launches.
pub fn launch_order_key(job: &Job) -> String {
    format!("{LAUNCH_ORDERS}{job}")
}

/// Parses the key of an order of launches. Returns its job.
pub fn parse_launch_order_key(key: &str) -> Option<Job> {
    key.strip_prefix(LAUNCH_ORDERS)?.parse().ok()
}

/// Prefix of the labels.
pub const LABELS: &str = "b/";

/// Returns the prefix of the keys of the labels of a job's steps.
pub fn labels_prefix(job: &Job) -> String {
    format!("{LABELS}{job}/")
}

/// Returns the key of a step's labels. The keys of a job's steps sort by step number.
pub fn labels_key(step_ref: StepRef<'_>) -> String {
    let StepRef { job, step } = step_ref;
    format!("{LABELS}{job}/{:020}", step.0)
}

/// Parses the key of a step's labels. Returns its job and step.
pub fn parse_labels_key(key: &str) -> Option<(Job, Step)> {
    parse_job_and_step(key.strip_prefix(LABELS)?)
}

/// Prefix of the ring changes.
pub const RING_CHANGES: &str = "r/";

/// Returns the key of a node's ring change.
pub fn ring_change_key(node: &PeerName) -> String {
    format!("{RING_CHANGES}{node}")
}

/// Reads all ring changes.
///
/// # Errors
/// If the catalogue does not answer, or if a ring change does not parse.
pub async fn read_ring_changes(catalogue: &dyn Catalogue) -> Result<RingChanges, CatalogueError> {
    let mut found = RingChanges::default();
    let mut scan = KeyScan::of_prefix(catalogue, RING_CHANGES);
    while let Some((key, entry)) = scan.next().await? {
        found.merge(parse_record(&key, &entry.value)?);
    }
    Ok(found)
}

/// Prefix of the maintenance records.
pub const MAINTENANCE: &str = "m/";

/// Returns the key of a node's maintenance.
pub fn maintenance_key(node: &PeerName) -> String {
    format!("{MAINTENANCE}{node}")
}

/// Prefix of the archive requests.
pub const ARCHIVE_REQUESTS: &str = "a/";

/// Returns the key of a step's archive request.
pub fn archive_request_key(step_ref: StepRef<'_>) -> String {
    let StepRef { job, step } = step_ref;
    format!("{ARCHIVE_REQUESTS}{job}/{:020}", step.0)
}

/// Parses the key of an archive request. Returns its job and step.
pub fn parse_archive_request_key(key: &str) -> Option<(Job, Step)> {
    parse_job_and_step(key.strip_prefix(ARCHIVE_REQUESTS)?)
}

fn parse_job_and_step(text: &str) -> Option<(Job, Step)> {
    let (job, step) = text.rsplit_once('/')?;
    Some((job.parse().ok()?, step.parse().ok()?))
}

/// An archive request: an archiving that was requested and has not ended. When its lease is over,
/// any daemon may take it over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveRequest {
    /// The coordinator's node.
    pub node: NodeId,
    /// The coordinator's lease, which is also the lease of the shards it owns.
    pub lease: LeaseId,
    /// The save that is to be archived. Another save of the same step is not.
    pub save: SaveId,
    /// The plan and its parameters.
    pub options: ArchiveOptions,
    /// Number of consecutive failures.
    pub failures: u32,
    /// The reason of the last failure, in at most [`MAX_WHY_CHARS`] characters, if the request
    /// waits for a retry. `None` while a coordinator works on the request, and also if that
    /// coordinator died.
    pub waiting: Option<String>,
}

impl ArchiveRequest {
    /// Returns whether a live coordinator works on the request. Nobody works on a request that waits
    /// for a retry, even while its last lease lives because it could not be revoked.
    pub async fn has_coordinator(&self, catalogue: &dyn Catalogue) -> Result<bool, CatalogueError> {
        Ok(self.waiting.is_none() && catalogue.is_lease_alive(self.lease).await?)
    }
}

/// Maximum length of the reason in a record, in characters. It keeps the record far below the
/// longest value.
pub const MAX_WHY_CHARS: usize = 500;

impl Record for ArchiveRequest {
    const KIND: RecordKind = RecordKind::Archiving;
}

/// Parses the record at `key`. Returns [`CatalogueError::Record`] if it does not parse.
pub fn parse_record<R: Record>(key: &str, value: &[u8]) -> Result<R, CatalogueError> {
    R::parse(value)
        .map_err(|error| CatalogueError::Record { key: key.to_owned(), reason: error.to_string() })
}

/// Reads the record at `key`. Returns it with its revision, or `None` if the key does not exist.
pub async fn read_record<R: Record>(
    catalogue: &dyn Catalogue,
    key: &str,
) -> Result<Option<(R, u64)>, CatalogueError> {
    parse_entry(key, catalogue.get(key).await?)
}

fn parse_entry<R: Record>(
    key: &str,
    entry: Option<Entry>,
) -> Result<Option<(R, u64)>, CatalogueError> {
    entry.map(|entry| Ok((parse_record(key, &entry.value)?, entry.revision))).transpose()
}

fn encode_record<R: Record>(key: &str, record: &R) -> Result<Vec<u8>, CatalogueError> {
    record
        .to_bytes()
        .map_err(|error| CatalogueError::Record { key: key.to_owned(), reason: error.to_string() })
}

/// The outcome of a typed compare-and-set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordSetOutcome<R> {
    /// The change is durable. Holds the key's new revision.
    Set(u64),
    /// The key is not as expected. Holds its current record and revision.
    Conflict(Option<(R, u64)>),
}

/// Writes a record by compare-and-set.
pub async fn compare_and_set_record<R: Record>(
    catalogue: &dyn Catalogue,
    key: &str,
    expected: Option<u64>,
    record: &R,
) -> Result<RecordSetOutcome<R>, CatalogueError> {
    let value = encode_record(key, record)?;
    match catalogue.compare_and_set(key, expected, Some(value)).await? {
        SetOutcome::Set(revision) => Ok(RecordSetOutcome::Set(revision)),
        SetOutcome::Conflict(entry) => parse_entry(key, entry).map(RecordSetOutcome::Conflict),
    }
}

/// Writes a record by compare-and-set as [`compare_and_set_record`] does. With a guard, the key in
/// the guard must have the revision in the guard at the same moment; otherwise the outcome is a
/// conflict with the record as it is now.
pub async fn compare_and_set_record_guarded<R: Record>(
    catalogue: &dyn Catalogue,
    key: &str,
    expected: Option<u64>,
    record: &R,
    guard: Option<&Guard>,
) -> Result<RecordSetOutcome<R>, CatalogueError> {
    let Some(guard) = guard else {
        return compare_and_set_record(catalogue, key, expected, record).await;
    };
    let value = encode_record(key, record)?;
    match catalogue.compare_and_set_guarded(key, expected, value, guard).await? {
        GuardedOutcome::Set(revision) => Ok(RecordSetOutcome::Set(revision)),
        GuardedOutcome::Conflict(entry) => parse_entry(key, entry).map(RecordSetOutcome::Conflict),
        GuardedOutcome::GuardConflict => {
            read_record(catalogue, key).await.map(RecordSetOutcome::Conflict)
        }
    }
}

/// Changes a record: reads it, applies `change`, and writes the result by compare-and-set. Starts
/// again when another writer was faster. A record that does not exist counts as the default. `change`
/// returns `None` to leave the record as it is. Returns the record as it is now.
///
/// After a lost answer the record is read again, so `change` may see a record that it has already
/// changed. It must leave such a record as it is.
pub async fn update_record<R: Record + Default + Clone, E: From<CatalogueError>>(
    catalogue: &dyn Catalogue,
    key: &str,
    mut change: impl FnMut(R) -> Result<Option<R>, E>,
) -> Result<R, E> {
    let mut current: Option<(R, u64)> = read_record(catalogue, key).await?;
    loop {
        let before = current.as_ref().map(|(record, _)| record.clone()).unwrap_or_default();
        let Some(after) = change(before.clone())? else { return Ok(before) };
        let expected = current.map(|(_, revision)| revision);
        match compare_and_set_record(catalogue, key, expected, &after).await? {
            RecordSetOutcome::Set(_) => return Ok(after),
            RecordSetOutcome::Conflict(now) => current = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::joint_save::{JointSave, MAX_WRITERS, WriterState};
    use crate::format::launch_order::{LaunchOrder, MAX_LAUNCHES};
    use crate::format::records::{MAX_RING, RingNode};
    use crate::id::LaunchId;

    #[test]
    fn the_longest_joint_save_fits_into_a_value() {
        let (shards, progress, reports) = (u32::MAX, u32::MAX, u32::MAX);
        let state = WriterState::Reporting { shards, progress, reports };
        let node = RingNode { node: NodeId(u64::MAX), domain: u16::MAX };
        let longest = JointSave {
            save: SaveId([1; 12]),
            launch: LaunchId([2; 16]),
            lease: LeaseId([3; 16]),
            seed: [4; 32],
            n: u8::MAX,
            k: u8::MAX,
            block_bytes: u64::MAX,
            ring: vec![node; MAX_RING],
            writers: vec![state; MAX_WRITERS],
        };
        let len_bytes = longest.to_bytes().unwrap().len();
        assert!(len_bytes <= crate::catalogue::MAX_VALUE_BYTES, "{len_bytes}");
    }

    #[test]
    fn the_longest_order_of_launches_fits_into_a_value() {
        let mut order = LaunchOrder::default();
        for number in 0..=MAX_LAUNCHES as u8 {
            order.register(LaunchId([number; 16]), u64::MAX, Some(Step(u64::MAX)));
            if let Some(newest) = order.launches.last_mut() {
                newest.number = u64::MAX;
            }
        }
        let len_bytes = order.to_bytes().unwrap().len();
        assert!(len_bytes <= crate::catalogue::MAX_VALUE_BYTES, "{len_bytes}");
    }

    #[test]
    fn checkpoint_keys_sort_by_step_and_parse_back() {
        let job: Job = "a.b-c".parse().unwrap();
        let keys: Vec<String> =
            [9, 10, u64::MAX].iter().map(|&step| checkpoint_key(job.at(Step(step)))).collect();
        assert!(keys.is_sorted());
        assert_eq!(parse_checkpoint_key(&keys[1]), Some((job, Step(10))));
        assert_eq!(parse_checkpoint_key("c/x"), None);
    }
}
