//! The errors of tables: bytes that are damaged, and rows that break a rule.

use std::fmt;

use super::limits::MAX_QUOTED_CHARS;
use super::path::PathError;
use crate::kind::ErrorKind;

/// A section of a table, i.e. one of the three kinds of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// Names.
    Names,
    /// Regions.
    Regions,
    /// Extents.
    Extents,
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Names => "names",
            Self::Regions => "regions",
            Self::Extents => "extents",
        })
    }
}

/// A part of a table's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TablePart {
    /// The whole table.
    Table,
    /// The footer.
    Footer,
    /// The directory.
    Directory,
    /// A block, counted from 0 in its section.
    Block(Section, usize),
}

impl fmt::Display for TablePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table => f.write_str("the table"),
            Self::Footer => f.write_str("the table's footer"),
            Self::Directory => f.write_str("the table's directory"),
            Self::Block(section, number) => write!(f, "block {number} of the table's {section}"),
        }
    }
}

/// The reason why bytes or rows are not a table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The first bytes of the footer are not the magic bytes of the format.
    #[error(
        "no table ends here (its magic bytes are missing): it is damaged, or not in this format"
    )]
    Magic,
    /// The number of bytes differs from the lengths inside them.
    #[error("{part} has {found_bytes} bytes, {expected_bytes} expected: use another copy")]
    Length {
        /// The part that was read.
        part: TablePart,
        /// The length that it should have, in bytes.
        expected_bytes: u64,
        /// The length that it has, in bytes.
        found_bytes: u64,
    },
    /// The checksum does not match the bytes.
    #[error("{part} fails its checksum: use another copy")]
    Checksum {
        /// The part that was read.
        part: TablePart,
    },
    /// The checksum matches, but the bytes do not decode: their writer was faulty.
    #[error("{part} does not decode ({why}): use another copy")]
    Malformed {
        /// The part that was read.
        part: TablePart,
        /// The rule that is broken.
        why: &'static str,
    },
    /// The bytes decode, but their rows break a rule: their writer was faulty.
    #[error("the table is whole and its rows contradict each other ({0}): use another copy")]
    Contradiction(Box<TableError>),
    /// The table is intact, but of a version that this release does not read.
    #[error("the table is of version {found}; this release reads version {newest}: upgrade it")]
    Version {
        /// The version that was found.
        found: u32,
        /// The newest version that can be read.
        newest: u32,
    },
    /// The table is intact, but has flags that this release does not know.
    #[error("the table has flags {flags:#x} that this release does not know: upgrade it")]
    Flags {
        /// The flags that are not known.
        flags: u32,
    },
    /// The source of the bytes failed.
    #[error("{part} cannot be read ({why}): try again, or use another copy")]
    Read {
        /// The part that was to be read.
        part: TablePart,
        /// The message of the source.
        why: String,
    },
    /// There are more rows than a table may have.
    #[error("{count} {section} are over the limit of {limit} for one table: split the save")]
    TooMany {
        /// The kind of rows.
        section: Section,
        /// The number of rows.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// A part would be longer than the format allows.
    #[error("{part} would have {bytes} bytes, over the limit of {limit_bytes}: split the save")]
    TooLong {
        /// The part.
        part: TablePart,
        /// The length in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// A path is not valid.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A name's properties do not fit each other or the limits.
    #[error("{name}: {why}")]
    Name {
        /// The name.
        name: String,
        /// The rule that is broken, and what to do.
        why: &'static str,
    },
    /// A name was given twice.
    #[error("{name} is given twice: give each name of a space once")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A region does not fit its name.
    #[error("{name}: its region {form} {why}")]
    Region {
        /// The name.
        name: String,
        /// The region's form.
        form: String,
        /// The rule that is broken, and what to do.
        why: &'static str,
    },
    /// A name has two regions of the same form.
    #[error("{name}: its region {form} is given twice: let one owner save it")]
    DuplicateRegion {
        /// The name.
        name: String,
        /// The form.
        form: String,
    },
    /// The length of an extent differs from that of its region.
    #[error(
        "{name}: its region {form} takes {expected_bytes} bytes and its extent has {found_bytes}"
    )]
    RegionLength {
        /// The name.
        name: String,
        /// The region's form.
        form: String,
        /// The length that follows from form and element type, in bytes.
        expected_bytes: u64,
        /// The length of the extent, in bytes.
        found_bytes: u64,
    },
    /// A row refers to another row that does not exist.
    #[error("a region names row {row} of {rows} {section}: give it a row that was added before")]
    Row {
        /// The kind of the missing row.
        section: Section,
        /// The number of the missing row.
        row: u32,
        /// The number of rows that exist.
        rows: usize,
    },
    /// An extent is at an invalid place.
    #[error("the extent at {offset_bytes} of shard {shard}, {len_bytes} bytes long, {why}")]
    Extent {
        /// The shard.
        shard: u32,
        /// The offset of the extent in bytes.
        offset_bytes: u64,
        /// The length of the extent in bytes.
        len_bytes: u64,
        /// The rule that is broken.
        why: &'static str,
    },
    /// An element is held by two regions.
    #[error("{name}: {element} is held by two regions or more: let one owner save it")]
    Overlap {
        /// The name.
        name: String,
        /// The first such element in row-major order.
        element: String,
    },
    /// An element is held by no region.
    #[error("{name}: {element} is held by no region: save all ranks that hold a part of it")]
    Gap {
        /// The name.
        name: String,
        /// The first such element in row-major order.
        element: String,
    },
    /// A region has a form that this release does not know.
    #[error("{name}: its region {form} is of a form that this release does not read: upgrade it")]
    UnknownForm {
        /// The name.
        name: String,
        /// The form.
        form: String,
    },
    /// The regions are cut in so many dimensions at once that they cannot be compared within the
    /// limit of steps.
    #[error(
        "{name}: its regions are cut in too many dimensions at once to be checked: cut it in fewer"
    )]
    Fragmented {
        /// The name.
        name: String,
    },
    /// Two tables describe one name differently.
    #[error(
        "{name}: its {what} is {first} in table {first_table} and {second} in table {second_table}: \
        save one model, or keep what differs private to its rank"
    )]
    Disagreement {
        /// The name.
        name: String,
        /// The name of the property that differs.
        what: &'static str,
        /// The first table, counted from 0 in the order of the merge.
        first_table: usize,
        /// The property in the first table.
        first: String,
        /// The second table.
        second_table: usize,
        /// The property in the second table.
        second: String,
    },
    /// Some extents have hashes and others have none, which one table cannot hold.
    #[error("some extents have a hash and others have none: give all of them one, or none")]
    MixedHashes,
}

impl TableError {
    /// Returns the kind of the error. A version that is too new is not corruption: those bytes must
    /// be kept.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Magic
            | Self::Length { .. }
            | Self::Checksum { .. }
            | Self::Malformed { .. }
            | Self::Contradiction(_) => ErrorKind::Corrupt,
            Self::Read { .. } => ErrorKind::Io,
            Self::Path(error) => error.kind(),
            Self::Version { .. }
            | Self::Flags { .. }
            | Self::TooMany { .. }
            | Self::TooLong { .. }
            | Self::Name { .. }
            | Self::DuplicateName { .. }
            | Self::Region { .. }
            | Self::DuplicateRegion { .. }
            | Self::RegionLength { .. }
            | Self::Row { .. }
            | Self::Extent { .. }
            | Self::Overlap { .. }
            | Self::Gap { .. }
            | Self::UnknownForm { .. }
            | Self::Fragmented { .. }
            | Self::Disagreement { .. }
            | Self::MixedHashes => ErrorKind::Invalid,
        }
    }
}

/// Returns `value` as text, cut to the length that an error may quote.
pub(super) fn quoted(value: &dyn fmt::Display) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

/// Returns the words for one element of a tensor.
pub(super) fn element_text(index: &[u64]) -> String {
    match index {
        [] => "its value".to_owned(),
        index => quoted(&format_args!("element {index:?}")),
    }
}
