//! The source of a load's bytes: segments in memory, files that were read from the cluster, or both.
#![allow(clippy::disallowed_methods)] // shared memory lies outside any store

use std::fs::File;
use std::sync::Arc;

use super::assemble::{Assembled, parts_of};
use super::fetch::Fetched;
use super::folder::Folder;
use super::held_part::HeldPart;
use super::hold::Hold;
use crate::format::table::Table;
use crate::id::{FillId, SaveId, SegmentId};
use crate::kind::ErrorKind;
use crate::trainer::protocol::{Failure, LoadSource, Part};

/// The source of a load's bytes, held until the load is released.
pub enum Source {
    /// The segments of the step.
    Memory {
        /// The step.
        step: Arc<Assembled>,
        /// Holds on the segments of the step.
        _holds: Vec<Hold>,
    },
    /// Files that were read from the cluster. A load by ranges has no files, only the table and the
    /// part of the step that is in this host's memory.
    Cluster {
        /// The step as it was read.
        fetched: Arc<Fetched>,
        /// The part in this host's memory, in a load by ranges.
        held: Option<Arc<HeldPart>>,
    },
}

/// The content that a load reads. Row numbers of extents are valid within one content only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadedContent {
    /// A filling in memory.
    Filling(FillId),
    /// A committed save, as the cluster has it.
    Save(SaveId),
    /// A copy of this host's memory in fetched files.
    Copied(SegmentId),
}

impl Source {
    /// Returns the table of the step.
    pub fn table(&self) -> &Table {
        match self {
            Source::Memory { step, .. } => &step.table,
            Source::Cluster { fetched, .. } => &fetched.table,
        }
    }

    /// Returns the source as the protocol names it.
    pub fn kind(&self) -> LoadSource {
        match self {
            Source::Memory { .. } => LoadSource::Memory,
            Source::Cluster { fetched, .. } if fetched.files.is_empty() => LoadSource::Ranges,
            Source::Cluster { .. } => LoadSource::Cluster,
        }
    }

    /// Returns the content.
    pub fn content(&self) -> LoadedContent {
        match self {
            Source::Memory { step, .. } => LoadedContent::Filling(step.fill),
            Source::Cluster { fetched, .. } => match &fetched.copied {
                Some(copied) => LoadedContent::Copied(copied.id),
                None => LoadedContent::Save(fetched.save),
            },
        }
    }

    /// Returns the parts, in the order of their descriptors.
    pub fn parts(&self) -> Vec<Part> {
        match self {
            Source::Memory { step, .. } => parts_of(&step.parts),
            Source::Cluster { held: Some(held), .. } => {
                held.ranges.iter().map(|(_, part)| *part).collect()
            }
            Source::Cluster { fetched, .. } => {
                fetched.files.iter().map(|(_, part)| *part).collect()
            }
        }
    }

    /// Opens the file of a part for reading. Returns `None` if there is no such part.
    pub fn open_part(&self, folder: &Folder, at: usize) -> Result<Option<File>, Failure> {
        let segment = match self {
            Source::Memory { step, .. } => step.parts.get(at).map(|part| part.segment),
            Source::Cluster { held: Some(held), .. } => held.ranges.get(at).map(|part| part.0),
            Source::Cluster { fetched, held: None } => {
                let Some((path, _)) = fetched.files.get(at) else { return Ok(None) };
                let failed = |error| format!("{}: {error}", path.display());
                let file = File::open(path);
                return file.map(Some).map_err(|e| Failure::new(ErrorKind::Io, failed(e), ""));
            }
        };
        let Some(segment) = segment else { return Ok(None) };
        let file = folder.open_segment(segment);
        file.map(Some).map_err(|error| Failure::new(error.kind(), error.to_string(), ""))
    }
}
