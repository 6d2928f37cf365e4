//! Frames with descriptors on a Unix socket. Nothing here blocks: the trainer's side and the daemon
//! wait in their own ways.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::protocol::{MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, MessageError};

const HEAD_BYTES: usize = 5;
const READ_BYTES: usize = 64 << 10;
/// Maximum number of descriptors that the kernel passes in one message (SCM_MAX_FD).
const KERNEL_DESCRIPTORS: usize = 253;

/// A message and the descriptors that came with it.
#[derive(Debug)]
pub struct Frame {
    /// The message.
    pub bytes: Vec<u8>,
    /// The descriptors, in order.
    pub descriptors: VecDeque<OwnedFd>,
}

/// Bytes and descriptors that were received and do not form a whole frame yet. Bounded by one frame
/// and one read.
#[derive(Debug)]
pub struct Incoming {
    bytes: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
    max_descriptors: usize,
}

impl Default for Incoming {
    fn default() -> Self {
        Self::with_descriptors(2 * MAX_DESCRIPTORS)
    }
}

impl Incoming {
    /// Creates an empty buffer that accepts at most `max_descriptors` descriptors. More of them end
    /// the connection.
    pub fn with_descriptors(max_descriptors: usize) -> Self {
        Self { bytes: Vec::new(), descriptors: VecDeque::new(), max_descriptors }
    }

    /// Receives once. Returns how many bytes arrived; 0 means the end of the stream.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let start = self.bytes.len();
        self.bytes.resize(start + READ_BYTES, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let result = recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut self.bytes[start..])],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        );
        let count = result.as_ref().map_or(0, |message| message.bytes);
        self.bytes.truncate(start + count);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                self.descriptors.extend(received);
            }
        }
        result?;
        if self.descriptors.len() > self.max_descriptors {
            let (found, expected) = (self.descriptors.len(), self.max_descriptors);
            return Err(io::Error::other(MessageError::Descriptors { found, expected }));
        }
        Ok(count)
    }

    /// Takes the first frame. Returns `None` while it is incomplete.
    pub fn frame(&mut self) -> Result<Option<Frame>, MessageError> {
        let Some((head, _)) = self.bytes.split_first_chunk::<HEAD_BYTES>() else { return Ok(None) };
        let [a, b, c, d, descriptors] = *head;
        let (len, expected) = (u32::from_le_bytes([a, b, c, d]) as usize, usize::from(descriptors));
        if len > MAX_MESSAGE_BYTES {
            return Err(MessageError::TooLong { bytes: len });
        }
        if self.bytes.len() < HEAD_BYTES + len {
            return Ok(None);
        }
        if expected > MAX_DESCRIPTORS || self.descriptors.len() < expected {
            return Err(MessageError::Descriptors { found: self.descriptors.len(), expected });
        }
        let bytes = self.bytes[HEAD_BYTES..HEAD_BYTES + len].to_vec();
        self.bytes.drain(..HEAD_BYTES + len);
        let descriptors = self.descriptors.drain(..expected).collect();
        Ok(Some(Frame { bytes, descriptors }))
    }
}

/// A frame that is being sent.
#[derive(Debug)]
pub struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    descriptors: Vec<OwnedFd>,
}

impl Outgoing {
    /// Creates the frame of `message`. Fails if the message is too long or has too many
    /// descriptors.
    pub fn new(message: &[u8], descriptors: Vec<OwnedFd>) -> Result<Self, MessageError> {
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(MessageError::TooLong { bytes: message.len() });
        }
        if descriptors.len() > MAX_DESCRIPTORS {
            let (found, expected) = (descriptors.len(), MAX_DESCRIPTORS);
            return Err(MessageError::Descriptors { found, expected });
        }
        let mut bytes = Vec::with_capacity(HEAD_BYTES + message.len());
        bytes.extend((message.len() as u32).to_le_bytes());
        bytes.push(descriptors.len() as u8);
        bytes.extend(message);
        Ok(Self { bytes, sent: 0, descriptors })
    }

    /// Sends as much as the socket accepts now. Returns whether the whole frame is sent.
    pub fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<BorrowedFd<'_>> = self.descriptors.iter().map(AsFd::as_fd).collect();
        if !borrowed.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        self.sent +=
            sendmsg(socket, &[IoSlice::new(&self.bytes[self.sent..])], &mut ancillary, flags)?;
        // The kernel sent the descriptors with the first byte of the frame.
        self.descriptors.clear();
        Ok(self.sent == self.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn frames_and_their_descriptors_arrive_in_order() {
        let (a, b) = pair();
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        for (message, count) in [(&b"one"[..], 2), (b"", 0), (b"three", 1)] {
            let mut out = Outgoing::new(message, (0..count).map(|_| file()).collect()).unwrap();
            assert!(out.send(a.as_fd()).unwrap());
        }
        let mut incoming = Incoming::default();
        let mut seen = Vec::new();
        while seen.len() < 3 {
            incoming.receive(b.as_fd()).unwrap();
            while let Some(frame) = incoming.frame().unwrap() {
                seen.push((frame.bytes, frame.descriptors.len()));
            }
        }
        assert_eq!(seen, [(b"one".to_vec(), 2), (Vec::new(), 0), (b"three".to_vec(), 1)]);
    }

    #[test]
    fn a_long_frame_comes_in_parts() {
        let (a, b) = pair();
        let message: Vec<u8> = (0..MAX_MESSAGE_BYTES).map(|at| (at % 251) as u8).collect();
        let mut out = Outgoing::new(&message, vec![tempfile::tempfile().unwrap().into()]).unwrap();
        let mut incoming = Incoming::default();
        let frame = loop {
            match out.send(a.as_fd()) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            match incoming.receive(b.as_fd()) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            if let Some(frame) = incoming.frame().unwrap() {
                break frame;
            }
        };
        assert!(frame.bytes == message && frame.descriptors.len() == 1);
    }

    #[test]
    fn lengths_and_counts_from_outside_are_checked() {
        let (a, b) = pair();
        let hostile = |head: [u8; 5]| {
            let mut incoming = Incoming::default();
            rustix::io::write(&a, &head).unwrap();
            incoming.receive(b.as_fd()).unwrap();
            incoming.frame().unwrap_err()
        };
        assert!(matches!(hostile([0xff, 0xff, 0xff, 0xff, 0]), MessageError::TooLong { .. }));
        assert!(matches!(hostile([0, 0, 0, 0, 1]), MessageError::Descriptors { .. }));
        let files = (0..3).map(|_| tempfile::tempfile().unwrap().into()).collect();
        Outgoing::new(b"", files).unwrap().send(a.as_fd()).unwrap();
        assert!(Incoming::with_descriptors(2).receive(b.as_fd()).is_err());
        assert!(Outgoing::new(&vec![0; MAX_MESSAGE_BYTES + 1], Vec::new()).is_err());
    }
}
