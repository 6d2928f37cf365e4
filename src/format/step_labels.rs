//! The record of the labels of a committed save (docs/semantics.md, 9).

use serde::{Deserialize, Serialize};

use super::envelope::RecordKind;
use super::records::Record;
use crate::id::{Label, SaveId};

/// Maximum number of labels of one save.
pub const MAX_LABELS: usize = 16;

/// The labels of a committed save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepLabels {
    /// The save. A save that replaces it has none of its labels.
    pub save: SaveId,
    /// The labels, ascending, at most [`MAX_LABELS`].
    pub labels: Vec<Label>,
}

/// A change of a save's labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LabelChange {
    /// The label is added.
    Add,
    /// The label is removed.
    Remove,
}

impl Record for StepLabels {
    const KIND: RecordKind = RecordKind::StepLabels;
}
