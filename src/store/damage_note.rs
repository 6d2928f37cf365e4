//! A damage note as the store holds it in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::format::file::FileKey;
use crate::format::records::Damage;

/// A damage note as the store holds it in memory.
#[derive(Debug, Clone)]
pub(super) struct DamageNote {
    pub damage: Arc<Damage>,
    /// Whether the note is known to describe the file that has the name now.
    pub describes_current_file: bool,
}

/// The damage notes of a data folder, by file.
pub(super) type DamageNotes = BTreeMap<FileKey, DamageNote>;
