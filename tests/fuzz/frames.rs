//! Target for a stream of frames and bulk bytes that is cut and read at random places, with reads
//! that are cancelled half way. The result equals that of a slow reference reader over the whole
//! bytes.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use async_trait::async_trait;
use bytes::Bytes;
use rapidraid::net::frame::{FramedRecv, MAX_CONTIGUOUS_BYTES};
use rapidraid::net::{NetError, RecvStream};

use crate::mutate::Draw;
use crate::target::{Memory, Seen, Target, Verdict, within};

/// Length in bytes of the script that controls the reads; it precedes the bytes of the stream.
const SCRIPT_BYTES: usize = 8;
const MAX_READS: usize = 64;

/// A stream that returns its parts in order; an empty part makes one read wait once.
struct Parts(VecDeque<Bytes>);

#[async_trait]
impl RecvStream for Parts {
    async fn read(&mut self, max_bytes: usize) -> Result<Option<Bytes>, NetError> {
        if self.0.front().is_some_and(Bytes::is_empty) {
            self.0.pop_front();
            std::future::pending::<()>().await;
        }
        let Some(front) = self.0.front_mut() else { return Ok(None) };
        let part = front.split_to(front.len().min(max_bytes));
        if front.is_empty() {
            self.0.pop_front();
        }
        Ok(Some(part))
    }

    fn stop(&mut self, _: u32) {}
}

/// Polls reads until one completes: drops each read that has to wait, and starts it again.
macro_rules! insist {
    ($read:expr) => {
        loop {
            let read = pin!($read);
            if let Poll::Ready(done) = read.poll(&mut Context::from_waker(Waker::noop())) {
                break done;
            }
        }
    };
}

/// The slow reference reader: the unread rest of the stream.
struct Slow<'a>(&'a [u8]);

impl<'a> Slow<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// Returns the next frame; `Ok(None)` at the end; `Err` where the reader under test has to
    /// fail.
    fn frame(&mut self, limit_bytes: usize) -> Result<Option<&'a [u8]>, ()> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let len = self.take(4).and_then(|len| Some(u32::from_le_bytes(len.try_into().ok()?)));
        let len = len.filter(|len| *len as usize <= limit_bytes).ok_or(())?;
        self.take(len as usize).map(Some).ok_or(())
    }
}

fn cut(draw: &mut Draw, stream: &[u8]) -> Parts {
    let mut parts = VecDeque::new();
    let mut rest = Bytes::copy_from_slice(stream);
    let most = [1, 5, 40, 1452, 70_000][draw.below(5)].max(stream.len() / 300);
    while !rest.is_empty() {
        if draw.below(4) == 0 {
            parts.push_back(Bytes::new());
        }
        parts.push_back(rest.split_to((1 + draw.below(most)).min(rest.len())));
    }
    Parts(parts)
}

fn differ(what: &str, found: impl std::fmt::Debug, expected: impl std::fmt::Debug) -> String {
    format!("{what} gives {found:?}, not {expected:?}")
}

fn read_all(
    draw: &mut Draw,
    stream: &[u8],
    parts: Parts,
    limit_bytes: usize,
) -> Result<bool, String> {
    let mut slow = Slow(stream);
    let mut recv = FramedRecv::new(Box::new(parts));
    for _ in 0..MAX_READS {
        match draw.below(8) {
            0 => {
                let len = draw.below(3000);
                let found = insist!(recv.read_exact(len));
                let expected = slow.take(len);
                if found.as_deref().ok() != expected {
                    return Err(differ("read_exact", found, expected));
                }
                if expected.is_none() {
                    return Ok(false);
                }
            }
            1 => {
                let most = draw.below(3000);
                let Ok(found) = insist!(recv.read_some(most)) else { return Ok(false) };
                let expected = found.as_ref().and_then(|part| slow.take(part.len()));
                let fits =
                    found.as_ref().is_none_or(|part| (1..=most.max(1)).contains(&part.len()));
                if found.as_deref() != expected || !fits || found.is_none() && !slow.0.is_empty() {
                    return Err(differ("read_some", found, expected));
                }
            }
            2 => {
                let found = insist!(recv.at_end());
                if found != Ok(slow.0.is_empty()) {
                    return Err(differ("at_end", found, slow.0.is_empty()));
                }
            }
            3 => {
                if insist!(recv.read_exact(MAX_CONTIGUOUS_BYTES + 1)).is_ok() {
                    return Err("read_exact takes more than it says".into());
                }
            }
            _ => {
                let found = insist!(recv.read_frame(limit_bytes));
                let expected = slow.frame(limit_bytes);
                let same = match (&found, expected) {
                    (Ok(found), Ok(expected)) => found.as_deref() == expected,
                    (Err(_), Err(())) => true,
                    _ => false,
                };
                if !same {
                    return Err(differ("read_frame", found, expected));
                }
                match expected {
                    Ok(None) => return Ok(true),
                    Ok(Some(_)) => {}
                    // Bytes after a refused frame are not checked.
                    Err(()) => return Ok(false),
                }
            }
        }
    }
    Ok(true)
}

fn check(input: &[u8]) -> Verdict {
    let Some((script, stream)) = input.split_at_checked(SCRIPT_BYTES) else {
        return Ok(Seen::default());
    };
    let mut draw = Draw::of(script);
    let limit_bytes = 1 << draw.below(17);
    let parts = cut(&mut draw, stream);
    // The limit covers the frame that is assembled, which never exceeds `limit_bytes`, whatever
    // length it claims.
    let memory = Memory { base_bytes: (16 << 10) + 2 * limit_bytes, per_byte: 2 };
    let (read, peak_bytes) =
        within(memory, input.len(), || read_all(&mut draw, stream, parts, limit_bytes))?;
    Ok(Seen { accepted: read?, peak_bytes })
}

pub fn frames() -> Target {
    let frame = |body: &[u8]| [&(body.len() as u32).to_le_bytes()[..], body].concat();
    let bodies = [frame(b""), frame(b"x"), frame(&[7; 300]), frame(&[8; 20_000])];
    // The corpus takes the first eight scripts that read only frames and whose limit admits all of
    // them.
    let stream = bodies.concat();
    let with = |script: u64| [&script.to_be_bytes()[..], &stream].concat();
    let reads = |input: &Vec<u8>| check(input).is_ok_and(|seen| seen.accepted);
    let corpus = (0..).map(with).filter(reads).take(8).collect();
    Target { name: "frames", cases: 30_000, corpus, words: Vec::new(), check: Box::new(check) }
}
