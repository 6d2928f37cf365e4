//! The limits of a table (docs/limits.md). Each is checked before the memory or the work that it
//! bounds.

/// Maximum number of names of one table.
pub const MAX_NAMES: usize = 1 << 24;
/// Maximum number of regions of one table.
pub const MAX_REGIONS: usize = 1 << 24;
/// Maximum number of extents of one table.
pub const MAX_EXTENTS: usize = 1 << 24;
/// The longest table in bytes, including the footer.
pub const MAX_TABLE_BYTES: u64 = 1 << 32;
/// The longest directory in bytes. The largest table in full blocks, 256 of each section, takes
/// about a quarter of it, even with paths of 4 KiB.
pub const MAX_DIRECTORY_BYTES: usize = 4 << 20;
/// Maximum number of rows of one block.
pub const MAX_BLOCK_ROWS: usize = 65_536;
/// The longest block that is read, in bytes.
pub const MAX_TABLE_BLOCK_BYTES: usize = 16 << 20;
/// The length in bytes at which a writer ends a block, so that one more row keeps it below the
/// limit of readers.
pub const FULL_BLOCK_BYTES: usize = 8 << 20;
/// The longest encoded path in bytes.
pub const MAX_PATH_BYTES: usize = 4096;
/// Maximum number of keys of one path.
pub const MAX_PATH_KEYS: usize = 64;
/// The longest text form of a path in bytes. A control character takes one byte encoded and six as
/// text.
pub const MAX_PATH_TEXT_BYTES: usize = 6 * MAX_PATH_BYTES;
/// The longest name of an element type in bytes.
pub const MAX_ELEMENT_NAME_BYTES: usize = 64;
/// Maximum number of dimensions of a tensor.
pub const MAX_DIMS: usize = 64;
/// The longest content of an unknown form in bytes.
pub const MAX_FORM_BYTES: usize = 1 << 20;
/// Maximum number of steps of a coverage check, per region. Ten dimensions can be cut at once
/// before the check gives up.
pub const MAX_STEPS_PER_REGION: usize = 1024;
/// Maximum number of characters of a name or a form that an error quotes.
pub const MAX_QUOTED_CHARS: usize = 200;

/// The alignment of extents in bytes: every extent begins at a multiple of it.
pub const EXTENT_ALIGN_BYTES: u64 = 64;
