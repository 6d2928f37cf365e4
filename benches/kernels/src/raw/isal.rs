//! ISA-L, loaded at run time so that it is not needed to compile: the system's `libisal.so.2`, and
//! the library at the path in [`PATH_VARIABLE`], if set.

use std::ffi::{OsStr, c_int, c_uchar};

use anyhow::{Context, Result};
use libloading::Library;
use rapidraid::gf::Matrix;

/// The environment variable with the path of a library to measure in addition to the system's.
pub const PATH_VARIABLE: &str = "RAPIDRAID_ISAL";

type InitTables = unsafe extern "C" fn(c_int, c_int, *const c_uchar, *mut c_uchar);
type EncodeData = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    *const c_uchar,
    *const *const c_uchar,
    *const *mut c_uchar,
);

/// Maximum number of inputs or of outputs of one call here.
const MAX_SIDE: usize = 32;
/// Bytes of ISA-L's tables for each coefficient.
const TABLE_BYTES: usize = 32;

/// A loaded library with its two functions.
#[derive(Clone, Copy)]
pub struct Isal {
    init: InitTables,
    encode: EncodeData,
    version: Option<(u32, u32)>,
    has_gfni: bool,
}

impl Isal {
    /// Returns the libraries that were found, and a line for each one that was not. Comparisons use
    /// the last one: the library at [`PATH_VARIABLE`], if it was found.
    pub fn find() -> (Vec<Isal>, Vec<String>) {
        let (mut found, mut skipped) = (Vec::new(), Vec::new());
        // The system's library must come first: later, the loader would resolve its bare name to
        // any loaded library of that name.
        let system = Self::load(OsStr::new("libisal.so.2"));
        let asked = std::env::var_os(PATH_VARIABLE);
        for outcome in std::iter::once(system).chain(asked.map(|path| Self::load(&path))) {
            match outcome {
                Ok(isal) => found.push(isal),
                Err(error) => skipped.push(format!("ISA-L: {error:#}")),
            }
        }
        (found, skipped)
    }

    fn load(path: &OsStr) -> Result<Isal> {
        let shown = path.to_string_lossy();
        let shown = shown.rsplit('/').next().unwrap_or_default().to_owned();
        let before = mapped_libraries();
        // SAFETY: loading runs the initialisers of ISA-L, which do nothing. That the file is ISA-L
        // is the caller's responsibility, as for every shared library.
        let library =
            unsafe { Library::new(path) }.with_context(|| format!("cannot load {shown}"))?;
        // The library is never unloaded, so that its functions stay valid until the program ends.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: the types are those of ISA-L's `erasure_code.h`; adding `const` to parameters
        // that it only reads does not change the ABI.
        let (init, encode) = unsafe {
            let init = library.get::<InitTables>("ec_init_tables");
            let encode = library.get::<EncodeData>("ec_encode_data");
            (init.with_context(|| shown.clone())?, encode.with_context(|| shown.clone())?)
        };
        let file = mapped_libraries().into_iter().rfind(|file| !before.contains(file));
        let version = file.as_deref().and_then(version_of);
        let mut isal = Isal { init: *init, encode: *encode, version, has_gfni: false };
        isal.has_gfni = isal.tables_are_affine();
        Ok(isal)
    }

    /// Returns the name of the library, such as `ISA-L 2.30 GFNI`. The version is omitted if the
    /// file's name does not contain it, and `GFNI` if the library does not use it.
    pub fn name(&self) -> String {
        let version = self.version.map(|(major, minor)| format!(" {major}.{minor}"));
        let gfni = if self.has_gfni { " GFNI" } else { "" };
        format!("ISA-L{}{gfni}", version.unwrap_or_default())
    }

    /// Returns the instructions that the library chose on this processor, by the layout of its
    /// tables.
    pub fn runs(&self) -> &'static str {
        if self.has_gfni { "GFNI (affine matrices)" } else { "shuffles (tables of nibbles)" }
    }

    /// Returns whether the tables are affine matrices. Tables of nibbles begin with the multiples
    /// 0, 2, 4 and 6 of the coefficient 2; an 8x8 bit matrix does not.
    fn tables_are_affine(&self) -> bool {
        let mut tables = [0; TABLE_BYTES];
        // SAFETY: the table of one coefficient has at most TABLE_BYTES.
        unsafe { (self.init)(1, 1, [2].as_ptr(), tables.as_mut_ptr()) };
        tables[..4] != [0, 2, 4, 6]
    }

    /// Returns the tables of a matrix.
    ///
    /// # Panics
    /// Panics if the matrix has more than 32 rows or columns.
    pub fn tables(&self, matrix: &Matrix) -> Tables {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        assert!(rows <= MAX_SIDE && cols <= MAX_SIDE);
        let entries: Vec<u8> = matrix.iter().flatten().copied().collect();
        let mut tables = vec![0; TABLE_BYTES * rows * cols];
        // SAFETY: there are rows * cols entries, and the table of each has at most TABLE_BYTES.
        unsafe {
            (self.init)(cols as c_int, rows as c_int, entries.as_ptr(), tables.as_mut_ptr());
        }
        Tables { encode: self.encode, rows, cols, tables }
    }
}

/// The tables of one matrix, made by and for one library.
pub struct Tables {
    encode: EncodeData,
    rows: usize,
    cols: usize,
    tables: Vec<u8>,
}

impl Tables {
    /// Applies the matrix to whole buffers.
    pub fn apply(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let bytes = inputs[0].len();
        self.apply_tiled(inputs, outputs, bytes);
    }

    /// Applies the matrix to the first `tile_bytes` of all buffers, then to the next, until their
    /// end.
    ///
    /// # Panics
    /// Panics if the buffers do not match the matrix or differ in length.
    pub fn apply_tiled(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]], tile_bytes: usize) {
        assert!(inputs.len() == self.cols && outputs.len() == self.rows && tile_bytes > 0);
        let bytes = inputs[0].len();
        assert!(inputs.iter().all(|input| input.len() == bytes));
        assert!(outputs.iter().all(|output| output.len() == bytes));
        for start in (0..bytes).step_by(tile_bytes) {
            let tile = tile_bytes.min(bytes - start);
            let mut from = [std::ptr::null(); MAX_SIDE];
            let mut to = [std::ptr::null_mut(); MAX_SIDE];
            for (from, input) in from.iter_mut().zip(inputs) {
                *from = input[start..].as_ptr();
            }
            for (to, output) in to.iter_mut().zip(outputs.iter_mut()) {
                *to = output[start..].as_mut_ptr();
            }
            let (cols, rows) = (self.cols as c_int, self.rows as c_int);
            // SAFETY: `tile` bytes are valid behind each of the `cols` and `rows` pointers, the
            // tables were made by this library for that shape, and no output overlaps another
            // buffer, because outputs are borrowed mutably.
            unsafe {
                let tables = self.tables.as_ptr();
                (self.encode)(tile as c_int, cols, rows, tables, from.as_ptr(), to.as_ptr());
            }
        }
    }
}

/// Returns the files of ISA-L that this process has mapped.
fn mapped_libraries() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let files = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let mut files: Vec<String> =
        files.filter(|file| file.contains("libisal")).map(str::to_owned).collect();
    files.dedup();
    files
}

/// Returns major and minor version from a file name: 2 and 30 for `libisal.so.2.0.30`.
fn version_of(file: &str) -> Option<(u32, u32)> {
    let mut numbers = file.rsplit_once(".so.")?.1.split('.');
    let major = numbers.next()?.parse().ok()?;
    Some((major, numbers.nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_name_tells_the_version() {
        assert_eq!(version_of("/usr/lib/libisal.so.2.0.30"), Some((2, 30)));
        assert_eq!(version_of("/usr/lib/libisal.so"), None);
    }
}
