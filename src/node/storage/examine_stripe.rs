//! Examination of a stripe on this node: every file and record is read from the disk and checked
//! (docs/semantics.md, 6, *Verify*). Nothing is moved or mended.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::damage_mending::Mending;
use super::damaged_records::{DamagedRecords, read_record_digest};
use super::error::StorageError;
use super::record_names::{LEAVES, MARK, RECEIPT_PREFIX, RECORD};
use crate::format::file::FileKey;
use crate::id::StripeId;
use crate::node::context::NodeContext;
use crate::store::{FileCheck, RecordScope, Store, StoreError};
use crate::wire::RemoteError;
use crate::wire::calls::{ExamineAnswer, ExamineStripe, RecordName, RecordView, SourceView};

/// Maximum number of examinations that run or wait.
const MAX_EXAMS: usize = 64;
/// Maximum number of checks of a file that is replaced again and again.
const MAX_LOOKS: u32 = 4;

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

    /// Checks the stripe's files and records on this node, one file after the other. The files are
    /// those in the stripe's folder, in whatever state they are. Returns the findings.
    ///
    /// # Errors
    /// [`StorageError::TooManyExaminations`] if too many examinations run or wait.
    pub(in crate::node) async fn examine_stripe(
        &self,
        call: ExamineStripe,
    ) -> Result<ExamineAnswer, RemoteError> {
        let Ok(_place) = self.exam_limit.places.try_acquire() else {
            return Err(StorageError::TooManyExaminations { limit: MAX_EXAMS }.into());
        };
        let stripe = call.stripe;
        let mut files = Vec::new();
        for name in
            self.context.run_on_store(move |store| store.list_file_names_on_disk(stripe)).await?
        {
            let _turn = self.exam_limit.turn.lock().await;
            files.extend(self.examine_file(FileKey { stripe, name }).await?);
        }
        let with_shard = call.with_shard;
        let records =
            self.context.run_on_store(move |store| examine_records(store, stripe, with_shard));
        let records = records.await?;
        for view in &records {
            self.damaged_records.set_or_clear_damaged(
                stripe.shard,
                view.record,
                view.digest.is_none(),
            );
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
                        .run_on_store(move |store| store.list_file_names_on_disk(key.stripe))
                        .await?;
                    if names.contains(&key.name) {
                        continue;
                    }
                    return Ok(None);
                }
            };
            let content = self
                .context
                .run_on_store(move |store| Ok::<_, StoreError>(read_len_and_root(store, key)));
            let content = content.await?;
            if damaged.is_some() || content.is_some() {
                return Ok(Some(SourceView { file: key.name, content, damaged }));
            }
        }
        Err(StorageError::FileChanging { key }.into())
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
