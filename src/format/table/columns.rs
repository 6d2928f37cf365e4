//! Columns of numbers and bytes: writing them, and reading them without trusting any length.
//!
//! A number is a varint: 7 bits per byte, lowest first, the top bit set in all bytes but the last.
//! The parser accepts the shortest form of a value and no other, so that each value has one
//! encoding.

use super::limits::{MAX_PATH_BYTES, MAX_TABLE_BLOCK_BYTES};

/// The rule of the encoding that the bytes break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed(pub &'static str);

pub(super) type Decoded<T> = Result<T, Malformed>;

/// Returns an error unless `holds`.
pub(super) fn require(holds: bool, why: &'static str) -> Decoded<()> {
    if holds { Ok(()) } else { Err(Malformed(why)) }
}

/// Appends a number.
pub(super) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Maps numbers near 0 of both signs to small ones: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
pub(super) fn zigzag(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)) as u64
}

/// Undoes [`zigzag`].
pub(super) fn unzigzag(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}

/// A sequence of bytes that is read from the front.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column<'a>(pub &'a [u8]);

impl<'a> Column<'a> {
    /// Reads one byte.
    pub fn byte(&mut self) -> Decoded<u8> {
        let (byte, rest) = self.0.split_first().ok_or(Malformed("a column ends early"))?;
        self.0 = rest;
        Ok(*byte)
    }

    /// Reads `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Decoded<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Malformed("a column ends early"))?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Reads a fixed number of bytes.
    pub fn array<const N: usize>(&mut self) -> Decoded<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Malformed("a column ends early"))?;
        self.0 = rest;
        Ok(*bytes)
    }

    /// Reads a number.
    pub fn number(&mut self) -> Decoded<u64> {
        let first = self.byte()?;
        if first < 0x80 {
            return Ok(first.into());
        }
        let mut number = u64::from(first & 0x7f);
        for shift in (7..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            require(shift < 63 || bits <= 1, "a number is longer than 64 bits")?;
            number |= bits << shift;
            if byte < 0x80 {
                require(byte != 0, "a number is not in its shortest form")?;
                return Ok(number);
            }
        }
        Err(Malformed("a number is longer than 64 bits"))
    }

    /// Reads a number of at most `limit`.
    pub fn number_to(&mut self, limit: usize) -> Decoded<usize> {
        let number = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        require(number <= limit, "a number is over its limit")?;
        Ok(number)
    }

    /// Reads a number of 32 bits.
    pub fn number32(&mut self) -> Decoded<u32> {
        u32::try_from(self.number()?).map_err(|_| Malformed("a number is longer than 32 bits"))
    }

    /// Returns an error when bytes remain.
    pub fn end(self) -> Decoded<()> {
        require(self.0.is_empty(), "bytes are left over")
    }
}

/// Joins columns into one block: the length of each as 4 bytes little-endian, then the columns.
pub(super) fn join_columns<const N: usize>(columns: [Vec<u8>; N]) -> Vec<u8> {
    let all: usize = columns.iter().map(Vec::len).sum();
    let mut block = Vec::with_capacity(4 * N + all);
    for column in &columns {
        block.extend((column.len() as u32).to_le_bytes());
    }
    for column in &columns {
        block.extend(column);
    }
    block
}

/// Splits a block into its columns, which must fill it exactly.
pub(super) fn split_columns<const N: usize>(block: &[u8]) -> Decoded<[Column<'_>; N]> {
    require(block.len() <= MAX_TABLE_BLOCK_BYTES, "a block is over its limit")?;
    let mut lengths = Column(block.get(..4 * N).ok_or(Malformed("a block ends early"))?);
    let mut rest = Column(block.get(4 * N..).unwrap_or_default());
    let mut columns = [Column(&[]); N];
    for column in &mut columns {
        let len = u32::from_le_bytes(lengths.array()?);
        *column = Column(rest.bytes(len as usize)?);
    }
    rest.end()?;
    Ok(columns)
}

/// Returns the maximum number of bytes that a path of `len` bytes may share with the path before
/// it.
///
/// With this limit, a suffix of s bytes stands for at most 64 + 33 s bytes, so a hostile column of
/// paths expands at most by a known factor. Paths of up to 64 bytes share everything that they have
/// in common.
pub(super) fn most_shared(len: usize) -> usize {
    (64 + 32 * len) / 33
}

/// Appends a path as the length that it shares with the path before it, the length of the rest, and
/// the rest.
pub(super) fn put_path(out: &mut Vec<u8>, before: &[u8], path: &[u8]) {
    let common = before.iter().zip(path).take_while(|(a, b)| a == b).count();
    let shared = common.min(most_shared(path.len()));
    let rest = path.get(shared..).unwrap_or_default();
    put_number(out, shared as u64);
    put_number(out, rest.len() as u64);
    out.extend(rest);
}

/// Reads a path into `path`, which must hold the path before it.
pub(super) fn read_path(column: &mut Column<'_>, path: &mut Vec<u8>) -> Decoded<()> {
    let shared = column.number_to(path.len())?;
    let rest_len = column.number_to(MAX_PATH_BYTES - shared.min(MAX_PATH_BYTES))?;
    let rest = column.bytes(rest_len)?;
    let most = most_shared(shared + rest_len);
    let is_longest = shared == most || rest.is_empty() || path.get(shared) != rest.first();
    require(shared <= most && is_longest, "a path shares another part than it should")?;
    path.truncate(shared);
    path.extend(rest);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Decoded<u64> {
        let mut column = Column(bytes);
        let number = column.number()?;
        column.end()?;
        Ok(number)
    }

    #[test]
    fn numbers_are_varints_in_their_shortest_form() {
        let mut out = Vec::new();
        put_number(&mut out, 300);
        assert_eq!(out, [0xac, 0x02]);
        for bad in [&[0x80, 0x00][..], &[0x80], &[], &[0xff; 10], &[0x80; 11], &[0, 0]] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        let most = [&[0xff; 9][..], &[1]].concat();
        assert_eq!(read(&most), Ok(u64::MAX));
        assert!(read(&[&[0xff; 9][..], &[2]].concat()).is_err());
        assert_eq!([0, -1, 1, -2].map(zigzag), [0, 1, 2, 3]);
    }

    #[test]
    fn a_block_is_its_columns_and_nothing_else() {
        let block = join_columns([vec![1, 2], Vec::new(), vec![3]]);
        let [a, b, c] = split_columns(&block).unwrap();
        assert_eq!((a.0, b.0, c.0), (&[1, 2][..], &[][..], &[3][..]));
        assert!(split_columns::<3>(&block[..block.len() - 1]).is_err());
        assert!(split_columns::<3>(&[block.as_slice(), &[0]].concat()).is_err());
        assert!(split_columns::<3>(&block[..11]).is_err());
    }

    #[test]
    fn a_shared_part_is_bounded_by_what_follows_it() {
        let (mut out, long) = (Vec::new(), vec![7; MAX_PATH_BYTES - 1]);
        put_path(&mut out, &long, &[long.as_slice(), &[8]].concat());
        assert!(MAX_PATH_BYTES <= 64 + 33 * out.len(), "{} bytes", out.len());
        for short in 0..=64 {
            assert!(most_shared(short) >= short, "{short}");
        }
    }

    proptest! {
        #[test]
        fn numbers_read_as_written(number: u64, signed: i64) {
            let mut out = Vec::new();
            put_number(&mut out, number);
            prop_assert_eq!(read(&out), Ok(number));
            prop_assert_eq!(unzigzag(zigzag(signed)), signed);
        }

        #[test]
        fn paths_read_as_written(
            paths in prop::collection::vec((0..300usize, "[ab]{1,9}"), 1..20)
        ) {
            let paths: Vec<Vec<u8>> = paths
                .into_iter()
                .map(|(a, rest)| [vec![b'a'; a].as_slice(), rest.as_bytes()].concat())
                .collect();
            let (mut out, mut before) = (Vec::new(), Vec::new());
            for path in &paths {
                put_path(&mut out, &before, path);
                before = path.clone();
            }
            let (mut column, mut found) = (Column(&out), Vec::new());
            for path in &paths {
                read_path(&mut column, &mut found).unwrap();
                prop_assert_eq!(&found, path);
            }
            prop_assert_eq!(column.end(), Ok(()));
        }
    }
}
