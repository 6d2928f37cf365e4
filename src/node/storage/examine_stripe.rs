//! Examination of a stripe on this node: every file and record is read from the disk and checked
//! (docs/semantics.md, 6, *Verify*). Nothing is moved or mended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;

use super::damage_mending::Mending;
use super::record_names::{LEAVES, MARK, RECEIPT_PREFIX, RECORD, record_location};
use crate::format::file::FileKey;
use crate::format::records::{CommitMark, Leaves, Receipt, Record, StripeRecord};
use crate::format::{FormatError, digest};
use crate::id::{ShardId, StripeId};
use crate::kind::ErrorKind;
use crate::node::context::NodeContext;
use crate::node::remote_errors::remote_error;
use crate::store::{FileCheck, RecordScope, Store, StoreError};
use crate::wire::RemoteError;
use crate::wire::calls::{ExamineAnswer, ExamineStripe, RecordName, RecordView, SourceView};

/// Maximum number of examinations that run or wait.
const MAX_EXAMS: usize = 64;
/// Maximum number of checks of a file that is replaced again and again.
const MAX_LOOKS: u32 = 4;
/// Maximum number of damaged records that are kept for `status`.
const MAX_REMEMBERED: usize = 4096;
/// Maximum number of damaged records that `status` reads again each time. They may have been
/// rewritten.
const MAX_READ_AGAIN: usize = 64;

/// The damaged records found since the start, by the names printed for people. They are kept in
/// memory only: the next read of such a record finds the damage again.
#[derive(Default)]
pub(in crate::node) struct DamagedRecords(Mutex<BTreeMap<String, (ShardId, RecordName)>>);

impl DamagedRecords {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (ShardId, RecordName)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records whether a record is damaged.
    pub(in crate::node) fn set_damaged(
        &self,
        shard: ShardId,
        record: RecordName,
        is_damaged: bool,
    ) {
        let name = record_display_name(shard, record);
        let mut records = self.lock();
        if !is_damaged {
            records.remove(&name);
        } else if records.len() < MAX_REMEMBERED
            && records.insert(name.clone(), (shard, record)).is_none()
        {
            tracing::warn!(record = name, "a record is damaged");
        }
    }
}

/// The limits on examinations of a node.
pub(in crate::node) struct ExamLimit {
    /// One permit for each examination that runs or waits.
    places: Semaphore,
    /// Held while a file is examined, so that any other check waits for at most one examination.
    turn: tokio::sync::Mutex<()>,
}

impl Default for ExamLimit {
    fn default() -> Self {
        Self { places: Semaphore::new(MAX_EXAMS), turn: tokio::sync::Mutex::default() }
    }
}

/// The service that examines all files and records of a stripe.
pub(in crate::node) struct Examination {
    context: Arc<NodeContext>,
    mending: Arc<Mending>,
    damaged_records: Arc<DamagedRecords>,
    exam_limit: ExamLimit,
}

impl Examination {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        mending: Arc<Mending>,
        damaged_records: Arc<DamagedRecords>,
    ) -> Self {
        Self { context, mending, damaged_records, exam_limit: ExamLimit::default() }
    }

    /// Checks every file of the stripe that has a name on this node, one after the other, and the
    /// records. Returns what it found.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if too many examinations wait.
    pub(in crate::node) async fn examine_stripe(
        &self,
        call: ExamineStripe,
    ) -> Result<ExamineAnswer, RemoteError> {
        let Ok(_place) = self.exam_limit.places.try_acquire() else {
            let text = format!("{MAX_EXAMS} stripes wait to be examined here: ask again");
            return Err(remote_error(ErrorKind::Busy, text));
        };
        let stripe = call.stripe;
        let mut files = Vec::new();
        for name in self.context.on_store(move |store| store.list_file_names(stripe)).await? {
            let _turn = self.exam_limit.turn.lock().await;
            files.extend(self.examine_file(FileKey { stripe, name }).await?);
        }
        let with_shard = call.with_shard;
        let records =
            self.context.on_store(move |store| examine_records(store, stripe, with_shard));
        let records = records.await?;
        for view in &records {
            self.damaged_records.set_damaged(stripe.shard, view.record, view.digest.is_none());
        }
        Ok(ExamineAnswer { files, records })
    }

    /// Checks a file, again if it was replaced meanwhile. Returns `None` if there is no such file
    /// or its content is not that of its name.
    async fn examine_file(&self, key: FileKey) -> Result<Option<SourceView>, RemoteError> {
        for _ in 0..MAX_LOOKS {
            let damaged = match self.mending.check_and_note_damage(key).await? {
                FileCheck::Whole => None,
                FileCheck::Damaged(damage) => Some(damage.grains.clone()),
                FileCheck::Misplaced(_) => return Ok(None),
                FileCheck::Gone => {
                    let names = self
                        .context
                        .on_store(move |store| store.list_file_names(key.stripe))
                        .await?;
                    if names.contains(&key.name) {
                        continue;
                    }
                    return Ok(None);
                }
            };
            let content = self
                .context
                .on_store(move |store| Ok::<_, StoreError>(read_len_and_root(store, key)));
            let content = content.await?;
            if damaged.is_some() || content.is_some() {
                return Ok(Some(SourceView { file: key.name, content, damaged }));
            }
        }
        Err(remote_error(ErrorKind::Busy, format!("{key} changes while it is examined: ask again")))
    }

    /// Returns a warning about the damaged records: their number, and the first `named` names.
    pub(in crate::node) async fn recheck_damaged_records_warning(
        &self,
        max_names: usize,
    ) -> Option<String> {
        let known: Vec<_> =
            self.damaged_records.lock().values().take(MAX_READ_AGAIN).copied().collect();
        for (shard, record) in known {
            let read =
                self.context.on_store(move |store| read_record_digest(store, shard, record)).await;
            self.damaged_records.set_damaged(shard, record, matches!(read, Ok(Some(None))));
        }
        let records = self.damaged_records.lock();
        let first: Vec<&str> = records.keys().take(max_names).map(String::as_str).collect();
        let more = if records.len() > max_names { ", ..." } else { "" };
        match records.len() {
            0 => None,
            1 => Some(format!("1 record is damaged: {}", first.join(", "))),
            many => Some(format!("{many} records are damaged: {}{more}", first.join(", "))),
        }
    }
}

/// Returns the name of a record as printed for people.
fn record_display_name(shard: ShardId, record: RecordName) -> String {
    match record_location(shard, record) {
        (RecordScope::Shard(shard), name) => format!("{shard}/{name}"),
        (RecordScope::Stripe(stripe), name) => format!("{stripe}/{name}"),
    }
}

/// Returns the length and the root in a file's tail, if the tail is good.
fn read_len_and_root(store: &Store, key: FileKey) -> Option<(u64, [u8; 32])> {
    let source = store.open_grain_source(key).ok()?;
    source.tail().map(|(header, _)| (header.len_bytes, header.root))
}

/// Reads the records of a stripe and, if asked, those of its shard. Returns a digest of each;
/// `None` for a damaged one.
fn examine_records(
    store: &Store,
    stripe: StripeId,
    with_shard: bool,
) -> Result<Vec<RecordView>, StoreError> {
    let index = stripe.index;
    let of_stripe = store.list_record_files(RecordScope::Stripe(stripe))?;
    let of_stripe = of_stripe.iter().filter_map(|(name, _)| match name.as_str() {
        RECORD => Some(RecordName::Stripe { index }),
        name => {
            let attempt = name.strip_prefix(RECEIPT_PREFIX)?.parse().ok()?;
            Some(RecordName::Receipt { index, attempt })
        }
    });
    let mut records: Vec<RecordName> = of_stripe.collect();
    if with_shard {
        let of_shard = store.list_record_files(RecordScope::Shard(stripe.shard))?;
        records.extend(of_shard.iter().filter_map(|(name, _)| match name.as_str() {
            LEAVES => Some(RecordName::Leaves),
            MARK => Some(RecordName::Mark),
            _ => None,
        }));
    }
    let mut views = Vec::with_capacity(records.len());
    for record in records {
        if let Some(digest) = read_record_digest(store, stripe.shard, record)? {
            views.push(RecordView { record, digest });
        }
    }
    Ok(views)
}

/// Reads a record past the page cache. Returns its digest: `None` if there is no record,
/// `Some(None)` if it is damaged.
///
/// # Errors
/// If the record is of a later version, or if too many files are open.
fn read_record_digest(
    store: &Store,
    shard: ShardId,
    record: RecordName,
) -> Result<Option<Option<[u8; 32]>>, StoreError> {
    let (scope, name) = record_location(shard, record);
    let bytes = match store.get_record_file_past_cache(scope, &name) {
        Ok(None) => return Ok(None),
        Ok(Some(bytes)) => bytes,
        Err(StoreError::Disk(error)) if error.is_too_many_files() => return Err(error.into()),
        Err(error) => {
            tracing::warn!(record = record_display_name(shard, record), %error, "a record cannot be read");
            return Ok(Some(None));
        }
    };
    match parse_record_digest(record, &bytes) {
        Ok(digest) => Ok(Some(digest)),
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(Some(None)),
        Err(source) => Err(StoreError::Format { path: record_display_name(shard, record), source }),
    }
}

/// Returns whether the bytes of a record are damaged. A record of a later version is not.
pub(in crate::node) fn is_damaged_record(record: RecordName, bytes: &[u8]) -> bool {
    parse_record_digest(record, bytes).is_err_and(|error| error.kind() == ErrorKind::Corrupt)
}

/// Parses a record. Returns its digest, or `None` for leaves that do not match their root.
fn parse_record_digest(record: RecordName, bytes: &[u8]) -> Result<Option<[u8; 32]>, FormatError> {
    Ok(match record {
        RecordName::Leaves => {
            let leaves = Leaves::parse(bytes)?;
            // Leaves that do not match their own root count as damaged.
            leaves.root.admits(&leaves).then(|| digest::of_root(&leaves.root)).flatten()
        }
        RecordName::Mark => digest::of_root(&CommitMark::parse(bytes)?.root),
        RecordName::Stripe { .. } => Some(StripeRecord::parse(bytes)?.leaf()),
        RecordName::Receipt { .. } => digest::of_receipt(&Receipt::parse(bytes)?),
    })
}
