//! Generates a hostile input from a seed: takes a valid input and damages it in one to eight ways
//! that break parsers.
//!
//! The input of a case follows from seed, target, case and corpus alone.

/// Maximum length of an input, in bytes.
pub const MAX_INPUT_BYTES: usize = 160 << 10;

/// Numbers at which arithmetic on lengths and counters fails.
const EXTREMES: [u64; 18] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x3fff,
    0x4000,
    0xffff,
    0x1_0000,
    0x40_0000,
    0x40_0001,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    i64::MAX as u64,
    u64::MAX - 1,
    u64::MAX,
];

/// A small random number generator (splitmix64): one seed, one stream.
pub struct Draw(u64);

impl Draw {
    /// Creates the stream of one case.
    pub fn new(seed: u64, target: &str, case: u64) -> Self {
        let mut draw = Self(seed);
        for byte in target.bytes() {
            draw.0 = draw.next() ^ u64::from(byte);
        }
        draw.0 = draw.next() ^ case;
        draw
    }

    /// Creates a stream seeded with `bytes`, for targets that draw decisions from their input.
    pub fn of(bytes: &[u8]) -> Self {
        Self(bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.next().checked_rem(bound as u64).unwrap_or(0) as usize
    }

    fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> Option<&'a T> {
        of.get(self.below(of.len())).copied()
    }

    /// Draws a place in a sequence of `len` bytes: anywhere, or near one of its ends, where the
    /// lengths are.
    fn place(&mut self, len: usize) -> usize {
        match self.below(4) {
            0 => self.below(len.min(64)),
            1 => len.saturating_sub(1 + self.below(len.min(512))),
            _ => self.below(len),
        }
    }

    /// Draws a range within `len` bytes, usually a short one.
    fn range(&mut self, len: usize) -> (usize, usize) {
        let from = self.place(len);
        let most = if self.below(4) == 0 { len - from } else { (len - from).min(16) };
        (from, from + self.below(most + 1))
    }
}

/// Returns `number` as a postcard varint, followed by `padding` superfluous bytes.
fn varint(mut number: u64, padding: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
    for _ in 0..padding {
        if let Some(last) = out.last_mut() {
            *last |= 0x80;
        }
        out.push(0);
    }
    out
}

/// Returns the input of a case: a damaged entry of `corpus`. `words` are the words of the target's
/// language.
pub fn input(draw: &mut Draw, corpus: &[Vec<u8>], words: &[&[u8]]) -> Vec<u8> {
    let entries: Vec<&[u8]> = corpus.iter().map(Vec::as_slice).collect();
    let mut bytes = draw.pick(&entries).unwrap_or_default().to_vec();
    let rounds = 1 + draw.below(8).min(draw.below(8));
    for _ in 0..rounds {
        damage(draw, &mut bytes, &entries, words);
        bytes.truncate(MAX_INPUT_BYTES);
    }
    bytes
}

fn damage(draw: &mut Draw, bytes: &mut Vec<u8>, corpus: &[&[u8]], words: &[&[u8]]) {
    let at = draw.place(bytes.len());
    let other = draw.pick(corpus).unwrap_or_default();
    match draw.below(if words.is_empty() { 12 } else { 15 }) {
        0 | 1 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << draw.below(8);
            }
        }
        2 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = EXTREMES[draw.below(5)] as u8;
            }
        }
        3 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = byte.wrapping_add(draw.below(9) as u8).wrapping_sub(4);
            }
        }
        4 => {
            let byte = if draw.below(2) == 0 { 0 } else { draw.next() as u8 };
            let new = vec![byte; 1 + draw.below(16)];
            bytes.splice(at..at, new);
        }
        5 => {
            let (from, to) = draw.range(bytes.len());
            bytes.drain(from..to);
        }
        6 => {
            // Repeat the range once, or very often.
            let (from, to) = draw.range(bytes.len());
            let times = if draw.below(8) == 0 { draw.below(2000) } else { 1 };
            let times = times.min(MAX_INPUT_BYTES / (to - from).max(1));
            let copy = bytes[from..to].repeat(times);
            bytes.splice(to..to, copy);
        }
        7 => {
            let (from, to) = draw.range(bytes.len());
            let copy = bytes[from..to].to_vec();
            overwrite(bytes, at, &copy);
        }
        8 => {
            // Overwrite the varint that may start here.
            let behind = bytes[at..].iter().take(10).take_while(|byte| **byte >= 0x80).count();
            let end = (at + behind + 1).min(bytes.len());
            let padding = if draw.below(8) == 0 { draw.below(10) } else { 0 };
            let number = varint(EXTREMES[draw.below(EXTREMES.len())], padding);
            bytes.splice(at..end, number);
        }
        9 => {
            let number = EXTREMES[draw.below(EXTREMES.len())].to_le_bytes();
            overwrite(bytes, at, &number[..[2, 4, 8][draw.below(3)]]);
        }
        10 => bytes.truncate(at),
        11 => {
            // Join the head of this entry to the tail of another, or insert a part of the other.
            let (from, to) = draw.range(other.len());
            if draw.below(2) == 0 {
                bytes.truncate(at);
                bytes.extend(&other[from..]);
            } else {
                bytes.splice(at..at, other[from..to].iter().copied());
            }
        }
        12 => overwrite(bytes, at, draw.pick(words).unwrap_or_default()),
        _ => {
            let word = draw.pick(words).unwrap_or_default();
            bytes.splice(at..at, word.iter().copied());
        }
    }
}

fn overwrite(bytes: &mut [u8], at: usize, new: &[u8]) {
    for (old, new) in bytes.iter_mut().skip(at).zip(new) {
        *old = *new;
    }
}

#[test]
fn a_case_is_its_numbers_and_nothing_else() {
    let corpus = vec![(0..200).collect::<Vec<u8>>(), vec![7; 40], Vec::new()];
    let words: [&[u8]; 2] = [b"name", b"="];
    let made = |seed, target, case| input(&mut Draw::new(seed, target, case), &corpus, &words);
    for case in 0..20_000 {
        assert_eq!(made(1, "a", case), made(1, "a", case), "case {case}");
    }
    let all = |seed, target| (0..50).map(|case| made(seed, target, case)).collect::<Vec<_>>();
    assert_ne!(all(1, "a"), all(2, "a"));
    assert_ne!(all(1, "a"), all(1, "b"));
}

#[test]
fn varints_are_those_of_postcard() {
    for number in EXTREMES {
        assert_eq!(varint(number, 0), postcard::to_stdvec(&number).unwrap());
    }
    assert_eq!(postcard::from_bytes::<u64>(&varint(1, 3)), Ok(1), "superfluous bytes are taken");
}
