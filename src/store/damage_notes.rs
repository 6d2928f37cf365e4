//! Damaged files. A note beside the file records the damage. The file does not count as a copy, and
//! its good grains are still read (docs/semantics.md, 6, *Damage*).

use std::sync::{Arc, MutexGuard, PoisonError};

use super::StoreError;
use super::damage_note::{DamageNote, DamageNotes};
use super::data_folder::Store;
use super::disk::{DiskError, DiskFile};
use super::durable_paths::none_if_not_found;
use super::durable_paths::{file_path, stripe_dir};
use super::stored_file::{StoredFile, read_tail, read_tail_past_cache};
use super::unverified_file::UnverifiedFile;
use crate::format::file::{FileHeader, FileKey, FileName};
use crate::format::grain_set::GrainSet;
use crate::format::records::{Damage, Record};
use crate::format::tree::{GrainTree, Hash};
use crate::id::StripeId;
use crate::kind::ErrorKind;

/// The prefix of a note's name. The name of the file follows, without its suffix.
const PREFIX: &str = "damage-";

/// Number of damaged grains that a log line names.
const LOGGED: usize = 8;

/// The result of checking a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileCheck {
    /// There is no such file, or another file took its name during the check.
    Gone,
    /// The file is complete and undamaged.
    Whole,
    /// The file is damaged and has a damage note.
    Damaged(Arc<Damage>),
    /// The header does not match the name; the text describes the mismatch. The file belongs in
    /// quarantine.
    Misplaced(String),
}

/// A file of a stripe from which grains can be read, whether or not it is damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrainSource {
    /// Its name.
    pub file: FileName,
    /// The length of its data in bytes and their BLAKE3 hash, if its tail is good.
    pub content: Option<(u64, Hash)>,
    /// The grains that are known to be damaged; `None` if the file counts as a copy: it is in the
    /// index and has no damage note.
    pub damaged: Option<GrainSet>,
}

fn damage_note_name(name: FileName) -> String {
    let name = name.to_string();
    let stem = name.split_once('.').map_or(&*name, |(stem, _)| stem);
    format!("{PREFIX}{stem}")
}

/// Returns the file that a small record of this name describes, or `None` if the name is not that
/// of a damage note.
pub(super) fn parse_damage_note_name(name: &str) -> Option<FileName> {
    let stem = name.strip_prefix(PREFIX)?;
    ["rep", "pc"].iter().find_map(|end| format!("{stem}.{end}").parse().ok())
}

/// Returns whether an error of reading the tail of a file means that the file is damaged, and not,
/// for example, that a later release wrote it.
pub(super) fn is_damage_error(error: &StoreError) -> bool {
    match error {
        StoreError::Misplaced { .. } => false,
        StoreError::Disk(error @ DiskError::Io { .. }) => !error.is_too_many_open_files(),
        error => error.kind() == ErrorKind::Corrupt,
    }
}

impl Store {
    pub(super) fn lock_damage_notes(&self) -> MutexGuard<'_, DamageNotes> {
        self.damage_notes_mutex().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the file has a damage note and therefore does not count as a copy.
    pub fn is_damaged(&self, key: FileKey) -> bool {
        self.lock_damage_notes().contains_key(&key)
    }

    /// Returns all files that have a damage note, each with its damage, ordered by key.
    pub fn damaged_files(&self) -> Vec<(FileKey, Arc<Damage>)> {
        let notes = self.lock_damage_notes();
        notes.iter().map(|(key, noted)| (*key, noted.damage.clone())).collect()
    }

    /// Returns the files whose damage note is not known to describe the file that has the name now.
    /// They have to be checked again.
    pub fn files_to_recheck(&self) -> Vec<FileKey> {
        let notes = self.lock_damage_notes();
        notes
            .iter()
            .filter(|(_, noted)| !noted.describes_current_file)
            .map(|(key, _)| *key)
            .collect()
    }

    /// Opens a file to read grains from, whether or not it has a damage note.
    ///
    /// # Errors
    /// [`DiskError::NotFound`] if there is none, [`StoreError::Misplaced`] if its header names
    /// another file, or another error that does not mean that the tail is damaged.
    pub fn open_grain_source(&self, key: FileKey) -> Result<UnverifiedFile, StoreError> {
        let file = self.disk().open(&file_path(key))?;
        let tail = match self.read_checked_tail(&*file, key) {
            Ok(tail) => Some(tail),
            Err(error) if is_damage_error(&error) => None,
            Err(error) => return Err(error),
        };
        let noted = self
            .lock_damage_notes()
            .get(&key)
            .filter(|noted| noted.describes_current_file)
            .cloned();
        let damaged = noted.map(|noted| noted.damage.grains.clone()).unwrap_or_default();
        Ok(UnverifiedFile::new(file, tail, damaged))
    }

    fn read_checked_tail(
        &self,
        file: &dyn DiskFile,
        key: FileKey,
    ) -> Result<(FileHeader, GrainTree), StoreError> {
        let (header, tree) = read_tail(file, file.len_bytes()?, &file_path(key))?;
        StoredFile::check_header_matches(&header, self.cluster(), key)?;
        Ok((header, tree))
    }

    /// Returns the files of a stripe that have a damage note.
    pub fn damaged_files_of_stripe(&self, stripe: StripeId) -> Vec<FileName> {
        let from = FileKey { stripe, name: FileName::Replica { block: 0 } };
        let notes = self.lock_damage_notes();
        let of = notes.range(from..).take_while(|(key, _)| key.stripe == stripe);
        of.map(|(key, _)| key.name).collect()
    }

    /// Returns the names of the replicas and pieces in a stripe's folder, in whatever state they
    /// are.
    pub fn list_file_names_on_disk(&self, stripe: StripeId) -> Result<Vec<FileName>, StoreError> {
        let entries = none_if_not_found(self.disk().list(&stripe_dir(stripe)))?.unwrap_or_default();
        let files = entries.into_iter().filter(|entry| !entry.is_dir);
        Ok(files.filter_map(|entry| entry.name.parse().ok()).collect())
    }

    /// Returns every file in a stripe's folder that can be a source of grains, ordered by name. A
    /// file that is not in the index yet does not count as a copy until it is checked.
    pub fn list_grain_sources(&self, stripe: StripeId) -> Result<Vec<GrainSource>, StoreError> {
        let listed = self.list_undamaged_files(stripe)?;
        let mut sources = Vec::new();
        for file in self.list_file_names_on_disk(stripe)? {
            // The file was removed meanwhile, or cannot be a source.
            let Ok(opened) = self.open_grain_source(FileKey { stripe, name: file }) else {
                continue;
            };
            let content = opened.tail().map(|(header, _)| (header.len_bytes, header.root));
            let counts = content.is_some() && listed.iter().any(|info| info.content.name() == file);
            let damaged = (!counts).then(|| opened.damaged_grains().clone());
            sources.push(GrainSource { file, content, damaged });
        }
        Ok(sources)
    }

    /// Reads a whole file past the page cache. Writes a damage note if it is damaged, and removes
    /// an old note if it is whole or gone. Returns the result.
    ///
    /// # Errors
    /// If the file cannot be checked: a later release wrote it, or too many files are open. A disk that
    /// fails to open the file is no error: the file counts as damaged.
    pub fn check_and_note_damage(&self, key: FileKey) -> Result<FileCheck, StoreError> {
        let file = match none_if_not_found(self.disk().open(&file_path(key))) {
            Ok(Some(file)) => file,
            Ok(None) => {
                self.remove_damage_note_if(key, |_| self.current_inode_number(key).is_none())?;
                self.correct_index_entry(key)?;
                return Ok(FileCheck::Gone);
            }
            // The file has a name, but none of its bytes can be read.
            Err(error @ DiskError::Io { .. }) if !error.is_too_many_open_files() => {
                return Ok(self.record_damage(key, Damage::default()));
            }
            Err(error) => return Err(error.into()),
        };
        let number = file.inode_number()?;
        let file_bytes = file.len_bytes()?;
        let tail = read_tail_past_cache(&*file, file_bytes, &file_path(key)).and_then(|tail| {
            StoredFile::check_header_matches(&tail.0, self.cluster(), key)?;
            Ok(tail)
        });
        match tail {
            Ok((header, tree)) => {
                let opened = StoredFile::from_parts(file, key, header, tree, file_bytes);
                let grains: GrainSet = opened.scrub().into_iter().collect();
                if grains.is_empty() {
                    self.remove_damage_note_if(key, |_| {
                        self.current_inode_number(key) == Some(number)
                    })?;
                    self.correct_index_entry(key)?;
                    return Ok(FileCheck::Whole);
                }
                // The file stays open until the note is written, so that no other file can get its
                // inode number.
                Ok(self.record_damage(key, Damage { number, has_tail: true, grains }))
            }
            Err(error @ StoreError::Misplaced { .. }) => {
                Ok(FileCheck::Misplaced(error.to_string()))
            }
            Err(error) if is_damage_error(&error) => {
                Ok(self.record_damage(key, Damage { number, ..Damage::default() }))
            }
            Err(error) => Err(error),
        }
    }

    /// Writes a damage note for the checked file if that file still has the name. From then on the
    /// file does not count as a copy. `damage.number` is 0 for a file that could not be opened.
    /// Returns the result of the check.
    fn record_damage(&self, key: FileKey, damage: Damage) -> FileCheck {
        match self.put_damage_note(key, damage) {
            Some((damage, (old_bytes, new_bytes))) => {
                self.index().adjust_total_record_bytes(old_bytes, new_bytes);
                FileCheck::Damaged(damage)
            }
            None => FileCheck::Gone,
        }
    }

    /// Writes a damage note. Returns the noted damage, and the lengths of the replaced and the new
    /// record; `None` if the checked file no longer has the name. If the record cannot be written, the
    /// note is kept in memory only, and both lengths are absent.
    fn put_damage_note(
        &self,
        key: FileKey,
        damage: Damage,
    ) -> Option<(Arc<Damage>, RecordLengths)> {
        let (damage, path) = (Arc::new(damage), damage_note_path(key));
        let is_it = || match self.current_inode_number(key) {
            Some(number) => number == damage.number,
            None => damage.number == 0,
        };
        let noted = DamageNote { damage: damage.clone(), describes_current_file: true };
        let is_noted = self.durable_names().run_with_names_locked(|| {
            is_it() && {
                self.lock_damage_notes().insert(key, noted);
                true
            }
        });
        if !is_noted {
            return None;
        }
        let first: Vec<u64> = damage.grains.iter().take(LOGGED).collect();
        tracing::warn!(%key, has_tail = damage.has_tail, grains = damage.grains.len(), ?first, "a file is damaged: it does not count as a copy");
        let format = |source| StoreError::Format { path: path.clone(), source };
        let put = damage.to_bytes().map_err(format).and_then(|bytes| {
            let is_still = || match is_it() {
                true => Ok(()),
                false => Err(StoreError::Conflict { key }),
            };
            let old_bytes = self.put_record_checked(&path, &bytes, is_still)?;
            Ok((old_bytes, Some(bytes.len() as u64)))
        });
        match put {
            Ok(lengths) => Some((damage, lengths)),
            Err(StoreError::Conflict { .. }) => None,
            Err(error) => {
                tracing::error!(%key, %error, "cannot write the damage note: after its next start the daemon may count the file as a copy again");
                Some((damage, (None, None)))
            }
        }
    }

    /// Removes the note of `key` if there is one and `may_remove`, which runs while no name can
    /// change, agrees. Returns once the removal is durable.
    pub(super) fn remove_damage_note_if(
        &self,
        key: FileKey,
        may_remove: impl FnOnce(&Damage) -> bool,
    ) -> Result<(), StoreError> {
        if !self.is_damaged(key) {
            return Ok(());
        }
        let path = damage_note_path(key);
        let bytes =
            none_if_not_found(self.disk().open(&path))?.map(|file| file.len_bytes()).transpose()?;
        let removed = self.durable_names().remove_file_and_empty_dirs_if(&path, || {
            let mut notes = self.lock_damage_notes();
            let may_go = notes.get(&key).is_some_and(|noted| may_remove(&noted.damage));
            if may_go {
                notes.remove(&key);
            }
            may_go
        })?;
        if removed {
            self.index().adjust_total_record_bytes(bytes, None);
        }
        Ok(())
    }

    /// Returns the inode number of the file that has the name now, or `None` if it does not open.
    pub(super) fn current_inode_number(&self, key: FileKey) -> Option<u64> {
        self.disk().open(&file_path(key)).and_then(|file| file.inode_number()).ok()
    }

    /// Returns the inode number of the file that the note of `key` describes, for a writer that is
    /// about to take the name.
    pub(super) fn noted_inode_number(&self, key: FileKey) -> Option<u64> {
        self.lock_damage_notes().get(&key).map(|noted| noted.damage.number)
    }

    /// Reads the damage notes of a stripe's folder at start. Removes notes without a file. If a
    /// note describes another file than the present one or does not parse, or if the present file
    /// does not open, the file does not count as a copy until it is checked again.
    pub(super) fn load_damage_notes(
        &self,
        stripe: StripeId,
        folder_entry_names: &[String],
    ) -> Result<(), StoreError> {
        for name in folder_entry_names {
            let Some(file) = parse_damage_note_name(name) else { continue };
            let key = FileKey { stripe, name: file };
            let there = none_if_not_found(self.disk().open(&file_path(key)));
            if let Ok(None) = there {
                self.durable_names().remove_file_and_empty_dirs(&damage_note_path(key))?;
                continue;
            }
            let number = there.ok().flatten().and_then(|there| there.inode_number().ok());
            let record = self.get_record(&damage_note_path(key)).ok().flatten().unwrap_or_default();
            let damage = Damage::parse(&record).ok();
            let is_checked =
                number.is_some() && damage.as_ref().map(|damage| damage.number) == number;
            let damage = Arc::new(damage.unwrap_or_default());
            self.lock_damage_notes()
                .insert(key, DamageNote { damage, describes_current_file: is_checked });
        }
        Ok(())
    }

    /// Writes a damage note for a file whose tail does not open, at start. Returns the length of the
    /// note, or `None` if the error is not damage or the file no longer has the name.
    pub(super) fn note_damaged_tail(&self, key: FileKey, error: &StoreError) -> Option<u64> {
        if !is_damage_error(error) {
            return None;
        }
        let number = self.current_inode_number(key).unwrap_or_default();
        let (_, (_, new_bytes)) =
            self.put_damage_note(key, Damage { number, ..Damage::default() })?;
        Some(new_bytes.unwrap_or_default())
    }
}

/// The lengths in bytes of a replaced record and of the record that is there now.
type RecordLengths = (Option<u64>, Option<u64>);

fn damage_note_path(key: FileKey) -> String {
    format!("{}/{}", stripe_dir(key.stripe), damage_note_name(key.name))
}
