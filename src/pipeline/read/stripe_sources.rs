//! The sources of a stripe, and the faults that were found in them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use super::file_probe::request_verification;
use super::read_session::{MAX_BAD_FILES, NodeFileKey, ReadSession, lock};
use super::source_selection::{RemoteFile, SourceSet};
use crate::format::file::FileName;
use crate::gf::FingerprintKey;
use crate::pipeline::record_fetch::StripeInfo;

/// The fault of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SourceFault {
    /// The node no longer has the file, or cannot read it.
    Missing,
    /// The node does not answer, or its answer breaks off.
    Unresponsive,
    /// The bytes are not what they should be.
    Corrupt,
}

/// The sources of a stripe. A source that fails is excluded; a grain that is damaged in one source
/// is read from another one.
pub(super) struct StripeSources {
    pub(super) reading: Arc<ReadSession>,
    pub(super) key: Arc<FingerprintKey>,
    pub(super) info: Arc<StripeInfo>,
    pub(super) found: SourceSet,
    /// The excluded sources: they failed as a whole.
    excluded: Mutex<BTreeSet<RemoteFile>>,
}

impl StripeSources {
    /// Creates the sources of a stripe, of which none is excluded.
    pub(super) fn new(
        reading: Arc<ReadSession>,
        key: Arc<FingerprintKey>,
        info: Arc<StripeInfo>,
        found: SourceSet,
    ) -> Self {
        Self { reading, key, info, found, excluded: Mutex::default() }
    }

    /// Returns the number of data bytes of a source's file.
    pub(super) fn file_len(&self, source: RemoteFile) -> u64 {
        match source.file {
            FileName::Replica { block } => self.info.fixed.cut.block_len(block),
            FileName::Piece { .. } => self.info.fixed.cut.block_bytes,
        }
    }

    pub(super) fn node_file_key(&self, source: &RemoteFile) -> NodeFileKey {
        (self.info.fixed.stripe, source.node, source.file)
    }

    /// Returns whether this grain can be read from the source: the source is not excluded, and the
    /// grain is not known to be damaged in its file.
    pub(super) fn has_good_grain(&self, source: &RemoteFile, grain: u64) -> bool {
        !lock(&self.excluded).contains(source)
            && !self.reading.is_grain_damaged(self.node_file_key(source), grain)
    }

    pub(super) fn damaged_grain_count(&self, source: &RemoteFile) -> usize {
        self.reading.damaged_grain_count(self.node_file_key(source))
    }

    pub(super) fn exclude_and_report_source(
        &self,
        holding: &RemoteFile,
        reason: &str,
        fault: SourceFault,
    ) {
        lock(&self.excluded).insert(*holding);
        if fault == SourceFault::Unresponsive {
            self.reading.directory.heard(holding.node, false);
        }
        let name = self.reading.directory.name(holding.node);
        let stripe = self.info.fixed.stripe;
        self.reading.record_incident(format!(
            "{} of stripe {stripe} on {name} is left out: {reason}",
            holding.file
        ));
        if fault == SourceFault::Missing && matches!(holding.file, FileName::Replica { .. }) {
            let mut leaving = lock(&self.reading.replicas_dropping);
            if leaving.len() < MAX_BAD_FILES {
                leaving.insert(stripe);
            }
        }
        let known = match fault {
            SourceFault::Unresponsive => return,
            SourceFault::Missing => &self.reading.unreadable,
            SourceFault::Corrupt => &self.reading.corrupt,
        };
        let mut known = lock(known);
        if known.len() < MAX_BAD_FILES {
            known.insert((stripe, holding.node, holding.file));
        }
        drop(known);
        if holding.counts_as_copy {
            self.spawn_damage_report(holding);
        }
    }

    /// Records that a grain of a source is damaged, so that it is read from other sources. Reports
    /// the file to its node, which verifies the file itself.
    pub(super) fn exclude_and_report_damaged_grain(&self, holding: &RemoteFile, grain: u64) {
        let file = self.node_file_key(holding);
        if !self.reading.try_record_damaged_grain(file, grain) {
            lock(&self.excluded).insert(*holding);
        }
        self.report_damaged_file_once(
            holding,
            &format!("its grain {grain} is read from elsewhere"),
        );
    }

    /// Records that a source is damaged. Its good grains are still used. The damage is reported
    /// once to the source's node and in the incidents.
    pub(super) fn report_damaged_file_once(&self, holding: &RemoteFile, detail: &str) {
        let is_news = {
            let mut told = lock(&self.reading.reported);
            told.len() < MAX_BAD_FILES && told.insert(self.node_file_key(holding))
        };
        if is_news {
            let name = self.reading.directory.name(holding.node);
            let (file, stripe) = (holding.file, self.info.fixed.stripe);
            self.reading.record_incident(format!(
                "{file} of stripe {stripe} on {name} is damaged: {detail}"
            ));
            // The node of a file that does not count as a copy already knows of the damage. Two
            // nodes that mend their files from each other would otherwise send each other reports
            // for ever.
            if holding.counts_as_copy {
                self.spawn_damage_report(holding);
            }
        }
    }

    /// Asks the source's node to verify the file: the node records damage, and removes a missing
    /// file from its index. The read does not wait for that.
    fn spawn_damage_report(&self, holding: &RemoteFile) {
        if let Some(to) = self.reading.directory.address(holding.node) {
            let (stripe, file) = (self.info.fixed.stripe, holding.file);
            let caller = self.reading.caller.clone();
            tokio::spawn(async move {
                request_verification(&caller, &to, stripe, file).await;
            });
        }
    }
}
