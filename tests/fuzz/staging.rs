//! Targets for the exchange between trainers and their staging daemon: messages, the stream of
//! frames with descriptors, and segments in shared memory.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use rapidraid::id::SegmentId;
use rapidraid::trainer::frames::{Incoming, Outgoing};
use rapidraid::trainer::mapping::Readable;
use rapidraid::trainer::protocol::{
    Answer, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, Request, StagingHello, StagingHelloAnswer, parse,
    to_bytes,
};
use rapidraid::trainer::segment::{
    HEADER_BYTES, filling_of, read_header, read_staged, still_holds,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::fixtures;
use crate::mutate::Draw;
use crate::target::{Memory, Seen, Target, Verdict, round_trip, seen, within};
use crate::wire::MESSAGE;

/// Length in bytes of the script that controls the sending; it precedes the bytes of the stream.
const SCRIPT_BYTES: usize = 8;
/// Memory of a stream: a frame and one read, and the capacity to which both grow.
const STREAM: Memory = Memory { base_bytes: 1 << 20, per_byte: 4 };
/// Memory of a segment: header and table are copied once; a table takes what the target `tables`
/// allows.
const SEGMENT: Memory = Memory { base_bytes: 64 << 10, per_byte: 70 };
/// Length in bytes of the part of the header that is not zero.
const HEAD_BYTES: usize = 128;
/// Position of the state within the header. The range of the hashed part follows.
const STATE_AT: usize = 12;
const HASHED: std::ops::Range<usize> = 16..96;

fn message<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Verdict {
    round_trip(MESSAGE, bytes, parse::<T>, to_bytes).map(seen)
}

/// Fuzzes messages. The first byte selects the kind of the message.
pub fn staging_messages() -> Target {
    let kinds = ["hello", "hello answer", "request", "answer"];
    let of = |(name, bytes): (String, Vec<u8>)| {
        let name = name.split(',').next().unwrap();
        let is_it = |kind: &str| name == kind || name.starts_with(&format!("{kind} "));
        // Take the longest kind that matches: "hello" is a prefix of "hello answer".
        let (kind, _) = kinds.iter().enumerate().rev().find(|(_, kind)| is_it(kind)).unwrap();
        [vec![kind as u8], bytes].concat()
    };
    let corpus = fixtures::lines("wire/v1/staging.txt").into_iter().map(of).collect();
    let check = |bytes: &[u8]| match bytes.split_first() {
        Some((0, message_bytes)) => message::<StagingHello>(message_bytes),
        Some((1, message_bytes)) => message::<StagingHelloAnswer>(message_bytes),
        Some((2, message_bytes)) => message::<Request>(message_bytes),
        Some((3, message_bytes)) => message::<Answer>(message_bytes),
        _ => Ok(Seen::default()),
    };
    Target {
        name: "staging_messages",
        cases: 200_000,
        corpus,
        words: Vec::new(),
        check: Box::new(check),
    }
}

/// The slow reference reader: only the bytes and descriptors that have arrived.
#[derive(Default)]
struct Slow {
    bytes: Vec<u8>,
    descriptors: usize,
}

impl Slow {
    /// Returns the next frame and the number of its descriptors; `Err` where the reader under test
    /// has to fail.
    fn frame(&mut self) -> Result<Option<(Vec<u8>, usize)>, ()> {
        let [a, b, c, d, descriptors, rest @ ..] = &self.bytes[..] else { return Ok(None) };
        let (len, count) =
            (u32::from_le_bytes([*a, *b, *c, *d]) as usize, usize::from(*descriptors));
        if len > MAX_MESSAGE_BYTES {
            return Err(());
        }
        if rest.len() < len {
            return Ok(None);
        }
        if count > MAX_DESCRIPTORS || count > self.descriptors {
            return Err(());
        }
        let message = rest[..len].to_vec();
        self.bytes.drain(..5 + len);
        self.descriptors -= count;
        Ok(Some((message, count)))
    }
}

fn null(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
}

/// Sends the stream in pieces, some of them with descriptors, and reads after each piece. Returns
/// whether every byte was read as part of a frame.
fn play_stream(draw: &mut Draw, mut stream: &[u8]) -> Result<bool, String> {
    let (out, inside) = UnixStream::pair().unwrap();
    let max = [2, 2 * MAX_DESCRIPTORS][draw.below(2)];
    let (mut slow, mut incoming) = (Slow::default(), Incoming::with_descriptors(max));
    let most = [1, 5, 300, 30_000][draw.below(4)].max(stream.len() / 100);
    while !stream.is_empty() {
        let (piece, rest) = stream.split_at((1 + draw.below(most)).min(stream.len()));
        stream = rest;
        let count = if draw.below(3) == 0 { draw.below(4) } else { 0 };
        send(&out, piece, count);
        slow.bytes.extend(piece);
        slow.descriptors += count;
        let received = incoming.receive(inside.as_fd());
        if received.is_err() != (slow.descriptors > max) {
            return Err(format!("{} descriptors of {max}: {received:?}", slow.descriptors));
        }
        if received.is_err() {
            return Ok(false);
        }
        loop {
            let found = incoming.frame().map_err(|_| ());
            let found = found.map(|frame| frame.map(|f| (f.bytes, f.descriptors.len())));
            let expected = slow.frame();
            if found != expected {
                return Err(format!("frame gives {found:?}, not {expected:?}"));
            }
            match expected {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(()) => return Ok(false),
            }
        }
    }
    Ok(slow.bytes.is_empty())
}

/// Sends a piece unframed, because the stream itself contains the hostile frames.
fn send(out: &UnixStream, piece: &[u8], count: usize) {
    // [`Outgoing`] writes a frame's head before its message. Here only the first byte of the piece
    // carries the descriptors.
    let Some((first, rest)) = piece.split_first() else { return };
    if count == 0 {
        return (&*out).write_all(piece).unwrap();
    }
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    let descriptors = null(count);
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&borrowed)));
    let parts = [std::io::IoSlice::new(std::slice::from_ref(first)), std::io::IoSlice::new(rest)];
    let sent = rustix::net::sendmsg(out, &parts, &mut ancillary, rustix::net::SendFlags::NOSIGNAL);
    assert_eq!(sent.unwrap(), piece.len());
}

fn stream(input: &[u8]) -> Verdict {
    let Some((script, stream)) = input.split_at_checked(SCRIPT_BYTES) else {
        return Ok(Seen::default());
    };
    let mut draw = Draw::of(script);
    let (read, peak_bytes) = within(STREAM, input.len(), || play_stream(&mut draw, stream))?;
    Ok(Seen { accepted: read?, peak_bytes })
}

/// Fuzzes frames and descriptors on a real socket, cut at random places.
pub fn staging_frames() -> Target {
    let frame = |message: &[u8]| {
        let (out, mut inside) = UnixStream::pair().unwrap();
        assert!(Outgoing::new(message, Vec::new()).unwrap().send(out.as_fd()).unwrap());
        drop(out);
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut inside, &mut bytes).unwrap();
        bytes
    };
    let bodies = [frame(b""), frame(b"x"), frame(&[7; 300]), frame(&[8; 20_000])];
    // The corpus takes the first eight scripts that read the whole stream.
    let all = bodies.concat();
    let with = |script: u64| [&script.to_be_bytes()[..], &all].concat();
    let reads = |input: &Vec<u8>| stream(input).is_ok_and(|seen| seen.accepted);
    let corpus = (0..).map(with).filter(reads).take(8).collect();
    Target {
        name: "staging_frames",
        cases: 10_000,
        corpus,
        words: Vec::new(),
        check: Box::new(stream),
    }
}

fn golden() -> Vec<u8> {
    fixtures::lines("format/v1/segments.txt").remove(0).1
}

fn id() -> SegmentId {
    SegmentId([0x5e; 16])
}

/// Runs all code that reads a segment on a mapped file with this content.
fn read_segment(input: &[u8]) -> Verdict {
    let head = input.len().min(HEAD_BYTES);
    let file =
        File::from(rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&vec![0; HEADER_BYTES as usize], 0).unwrap();
    file.write_all_at(&input[..head], 0).unwrap();
    file.write_all_at(&input[head..], HEADER_BYTES).unwrap();
    let len_bytes = file.metadata().unwrap().len();
    let map = Readable::map(&file, len_bytes).unwrap();
    let (read, peak_bytes) = within(SEGMENT, input.len(), || read_staged(id(), &map).ok())?;
    let _ = filling_of(&file).map_err(|error| error.to_string())?;
    let header = read_header(id(), &map).ok();
    let Some((found, table)) = read else { return Ok(Seen { accepted: false, peak_bytes }) };
    if header != Some(found) {
        return Err(format!("read_header gives {header:?}, read_staged {found:?}"));
    }
    let end = found.table_offset.checked_add(found.table_bytes);
    if end.is_none_or(|end| end > len_bytes) || found.table_offset < HEADER_BYTES {
        return Err(format!("{found:?} lies outside the {len_bytes} bytes of its segment"));
    }
    for extent in table.extents() {
        let end = extent.offset_bytes.checked_add(extent.len_bytes);
        if end.is_none_or(|end| HEADER_BYTES + end > found.table_offset) {
            return Err(format!("{extent:?} lies outside the extents of {found:?}"));
        }
    }
    let holds = still_holds(&map, found.fill).map_err(|error| error.to_string())?;
    if !holds {
        return Err(format!("{found:?} does not hold its own filling"));
    }
    Ok(Seen { accepted: true, peak_bytes })
}

/// Fuzzes whole segments: only the golden header and table are accepted.
pub fn segments() -> Target {
    let whole = golden();
    let corpus = vec![whole.clone()];
    let check = move |bytes: &[u8]| {
        let seen = read_segment(bytes)?;
        // The header's hash does not cover extents: they have their own hashes, which the daemon
        // computes.
        let same = |range: std::ops::Range<usize>| bytes.get(range.clone()) == whole.get(range);
        let is_golden = same(0..HEAD_BYTES) && same(HEAD_BYTES + 64..whole.len());
        if seen.accepted && !is_golden {
            return Err("a damaged segment is believed".into());
        }
        Ok(seen)
    };
    Target { name: "segments", cases: 30_000, corpus, words: Vec::new(), check: Box::new(check) }
}

/// Returns `input` with a correct hash in its header, as its owner would have written it.
fn resealed(input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    if bytes.len() < HEAD_BYTES {
        return bytes;
    }
    let number = |at: usize| {
        let bytes: [u8; 8] = bytes[at..at + 8].try_into().unwrap();
        usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
    };
    // Position of the table in the file, as far as the file contains it.
    let from = number(80).saturating_sub(HEADER_BYTES as usize - HEAD_BYTES);
    let table = bytes.get(from..from.saturating_add(number(88))).unwrap_or_default();
    let mut hasher = blake3::Hasher::new_derive_key("rapidraid segment header v1");
    hasher.update(&bytes[..STATE_AT]);
    hasher.update(&bytes[HASHED]);
    hasher.update(table);
    let hash = hasher.finalize();
    bytes[HASHED.end..HEAD_BYTES].copy_from_slice(hash.as_bytes());
    bytes
}

/// Fuzzes false headers and tables under right hashes.
pub fn segment_headers() -> Target {
    let corpus = vec![golden()];
    assert_eq!(resealed(&corpus[0]), corpus[0], "the header is hashed otherwise");
    let check = |input: &[u8]| read_segment(&resealed(input));
    Target {
        name: "segment_headers",
        cases: 30_000,
        corpus,
        words: Vec::new(),
        check: Box::new(check),
    }
}
