//! The list of saves that are not committed yet.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::begin_save::SaveGateway;
use super::page_limits::OPEN_SAVES_SHOWN;
use crate::catalogue::Catalogue;
use crate::catalogue::key_scan::KeyScan;
use crate::catalogue::record_access::{
    CHECKPOINTS, joint_save_key, parse_checkpoint_key, parse_record, read_record,
    shard_roots_prefix,
};
use crate::format::joint_save::JointSave;
use crate::format::records::{Checkpoint, ShardRoot, Writing};
use crate::id::{Job, Step};
use crate::wire::RemoteError;
use crate::wire::calls::{ListOpenSaves, OpenSaveView};

impl SaveGateway {
    /// Lists the first open and decided saves, in order of job and step, with the progress of each.
    pub(in crate::node) async fn list_open_saves(
        self: &Arc<Self>,
        call: ListOpenSaves,
    ) -> Result<Vec<OpenSaveView>, RemoteError> {
        let catalogue = self.context.catalogue();
        let prefix = match &call.job {
            Some(job) => format!("{CHECKPOINTS}{job}/"),
            None => CHECKPOINTS.to_owned(),
        };
        let mut found = Vec::new();
        let mut checkpoints = KeyScan::of_prefix(&*catalogue, prefix);
        while let Some((key, entry)) = checkpoints.next().await? {
            // A damaged record must not hide the saves of all other steps.
            let checkpoint: Checkpoint = match parse_record(&key, &entry.value) {
                Ok(checkpoint) => checkpoint,
                Err(error) => {
                    tracing::error!(key, %error, "the record of a step does not parse: a save of this step that is open is not listed");
                    continue;
                }
            };
            let Some(job_and_step) = parse_checkpoint_key(&key) else { continue };
            let Some(writing) = checkpoint.writing else { continue };
            found.push(describe(&*catalogue, job_and_step, &writing).await?);
            if found.len() == OPEN_SAVES_SHOWN {
                break;
            }
        }
        Ok(found)
    }
}

async fn describe(
    catalogue: &dyn Catalogue,
    (job, step): (Job, Step),
    writing: &Writing,
) -> Result<OpenSaveView, RemoteError> {
    let save = writing.save();
    let mut complete = BTreeSet::new();
    let mut shards = None;
    let mut roots = KeyScan::of_prefix(catalogue, shard_roots_prefix(save));
    while let Some((key, entry)) = roots.next().await? {
        let root: ShardRoot = parse_record(&key, &entry.value)?;
        complete.insert(root.index);
        shards = Some(root.shards);
    }
    let joint = read_record::<JointSave>(catalogue, &joint_save_key(save)).await?;
    let joint = joint.map(|(joint, _)| joint);
    let late_writers =
        joint.as_ref().map_or(Vec::new(), |joint| find_late_writers(joint, &complete));
    Ok(OpenSaveView {
        job,
        step,
        save,
        is_decided: matches!(writing, Writing::Decided { .. }),
        complete_shards: complete.len() as u32,
        shards: joint.as_ref().and_then(JointSave::shard_count).or(shards),
        writers: joint.as_ref().map_or(0, |joint| joint.writers.len() as u32),
        late_writers,
        dropped_writer: joint.as_ref().and_then(JointSave::dropped_writer),
    })
}

/// Returns the writers that have not announced their shards. If all have announced theirs, returns
/// the writers that have not completed theirs.
fn find_late_writers(joint: &JointSave, complete: &BTreeSet<u32>) -> Vec<u32> {
    let unknown = joint.unknown_writers();
    if !unknown.is_empty() {
        return unknown;
    }
    let is_late = |writer: &u32| {
        let writer = *writer as usize;
        let (first, end) = (joint.first_shard(writer), joint.first_shard(writer + 1));
        let mut shards = first.unwrap_or(0)..end.unwrap_or(0);
        shards.any(|index| !complete.contains(&index))
    };
    (0..joint.writers.len() as u32).filter(is_late).collect()
}
