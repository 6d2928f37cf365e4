//! A trainer's connection to the staging daemon of its host. Calls block, have deadlines, and run
//! one at a time.
#![allow(clippy::disallowed_methods)] // a trainer's process waits by the clock of its machine

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Uid, getpid, pidfd_open};

use super::error::StagingError;
use super::fill::{OrderedSegment, Segment};
use super::frames::{Frame, Incoming, Outgoing};
use super::protocol::{
    Answer, OLDEST, Place, Request, StagingHello, StagingHelloAnswer, VERSION, parse, to_bytes,
};
use crate::entropy::{Entropy, SystemEntropy};
use crate::id::{ClusterId, InstanceId, MemberId};

/// The file name of the socket in the staging folder.
pub const SOCKET: &str = "socket";
/// Returns the staging folder of this user for a cluster, for use if none is configured.
pub fn default_dir(cluster: ClusterId) -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    let cluster: String = cluster.to_string().chars().take(8).collect();
    PathBuf::from(format!("/dev/shm/rapidraid-{user}-{cluster}"))
}

/// How often a waiting call asks its caller whether to continue.
const SLICE: Duration = Duration::from_millis(50);
/// How long the daemon may delay an answer, in milliseconds. The caller repeats the request until
/// its own deadline.
const ANSWER_SLICE_MS: u32 = 2_000;

/// The deadline of a call, and a function through which the caller can end it earlier.
pub struct Wait<'a> {
    limit: Duration,
    until: Instant,
    proceed: &'a mut dyn FnMut() -> bool,
}

impl<'a> Wait<'a> {
    /// Creates a wait that ends after `limit`, or when `proceed` returns false. `proceed` is called
    /// many times a second.
    pub fn new(limit: Duration, proceed: &'a mut dyn FnMut() -> bool) -> Self {
        let now = Instant::now();
        let until = now.checked_add(limit).unwrap_or(now + Duration::from_secs(86_400 * 365));
        Self { limit, until, proceed }
    }

    /// Returns the time left until the deadline.
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    pub(super) fn check(&mut self, what: &'static str, state: &str) -> Result<(), StagingError> {
        if !(self.proceed)() {
            return Err(StagingError::Interrupted { what });
        }
        if self.left().is_zero() {
            let state = if state.is_empty() { String::new() } else { format!(": {state}") };
            let limit_s = self.limit.as_secs_f64();
            return Err(StagingError::Deadline { what: what.to_owned(), limit_s, state });
        }
        Ok(())
    }

    /// Returns how long the daemon may delay the answer to the next request, in milliseconds.
    fn answer_ms(&self) -> u32 {
        u32::try_from(self.left().as_millis()).unwrap_or(u32::MAX).min(ANSWER_SLICE_MS)
    }
}

/// An answer and the descriptors that accompanied it.
pub type Answered = (Answer, VecDeque<OwnedFd>);

struct Connection {
    socket: UnixStream,
    incoming: Incoming,
}

/// The connection of a launch's process to the daemon.
pub struct Session {
    pub(super) dir: PathBuf,
    token: Option<PathBuf>,
    member: MemberId,
    pub(super) hello: StagingHelloAnswer,
    /// The connection; `None` after a failure. The next call then connects again.
    connection: Option<Connection>,
    pub(super) place: Option<Place>,
    is_forgotten: bool,
    /// The segments that this process made, for [`Session::leave_to_parent`].
    pub(super) made: Vec<Weak<Segment>>,
    /// The segments that the daemon has ordered and that are not made yet.
    pub(super) ordered: VecDeque<OrderedSegment>,
}

impl Session {
    /// Connects to the daemon whose staging folder is `dir`.
    pub fn connect(
        dir: &Path,
        token: Option<&Path>,
        wait: &mut Wait<'_>,
    ) -> Result<Self, StagingError> {
        let member = MemberId(SystemEntropy.id());
        let (connection, hello) = connect(dir, token, member, wait)?;
        Ok(Self {
            dir: dir.to_owned(),
            token: token.map(Path::to_owned),
            member,
            hello,
            connection: Some(connection),
            place: None,
            is_forgotten: false,
            made: Vec::new(),
            ordered: VecDeque::new(),
        })
    }

    /// Returns the id of the staging folder. Ranks that see the same id are on one host.
    pub fn instance(&self) -> InstanceId {
        self.hello.instance
    }

    /// Returns the id of the cluster that the daemon saves to.
    pub fn cluster(&self) -> ClusterId {
        self.hello.cluster
    }

    /// Returns the daemon's process id, for messages to people.
    pub fn daemon_pid(&self) -> u32 {
        self.hello.pid
    }

    /// Ends the session and notifies the daemon that this process no longer fills or maps any
    /// segment. The daemon can reuse the memory while the process keeps running. The session ends
    /// even if the daemon does not answer; the daemon then waits for the end of the process.
    pub fn leave(&mut self, wait: &mut Wait<'_>) -> Result<(), StagingError> {
        let is_member = self.place.is_some() && !self.is_forgotten;
        let told =
            if is_member { self.ask("the end", &Request::Leave, wait).map(drop) } else { Ok(()) };
        self.forget();
        told
    }

    /// Ends the session without notifying the daemon. For a forked child, whose parent continues to
    /// use the session.
    pub fn forget(&mut self) {
        self.connection = None;
        self.place = None;
        self.ordered.clear();
        self.is_forgotten = true;
    }

    /// Ends the session in a forked child. Also releases the child's copies of the segments' locks:
    /// the segments are the parent's and must become free when the parent ends. The child has no
    /// mapping of their memory.
    pub fn leave_to_parent(&mut self) {
        self.forget();
        for segment in self.made.drain(..).filter_map(|segment| segment.upgrade()) {
            segment.unlock();
            // The child has no mapping of the segment and may have mapped something else at its
            // address, which dropping the segment would unmap.
            std::mem::forget(segment);
        }
    }

    /// Sends a request and waits for its answer. Fails if the daemon answers with a failure.
    pub fn ask(
        &mut self,
        what: &'static str,
        request: &Request,
        wait: &mut Wait<'_>,
    ) -> Result<Answered, StagingError> {
        if self.is_forgotten {
            return Err(StagingError::Forked);
        }
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.reconnect(wait)?,
        };
        let frame = exchange(&mut connection, what, &to_bytes(request)?, Vec::new(), wait)?;
        let answer = parse(&frame.bytes)?;
        // Keep the connection only on success. After a failure it could still deliver the answer to
        // the failed request, so it is not used again.
        self.connection = Some(connection);
        match answer {
            Answer::Failed(failure) => Err(failure.into()),
            answer => Ok((answer, frame.descriptors)),
        }
    }

    /// Repeats a request until the answer is not [`Answer::Pending`]. `request` receives how long
    /// the daemon may delay its answer, in milliseconds.
    pub fn ask_until(
        &mut self,
        what: &'static str,
        request: impl Fn(u32) -> Request,
        on_pending: &mut dyn FnMut(&super::protocol::Pending),
        wait: &mut Wait<'_>,
    ) -> Result<Answered, StagingError> {
        loop {
            match self.ask(what, &request(wait.answer_ms()), wait)? {
                (Answer::Pending(pending), _) => {
                    on_pending(&pending);
                    wait.check(what, &pending.what)?;
                }
                answered => return Ok(answered),
            }
        }
    }

    /// Sends a request whose answer is [`Answer::Done`].
    pub fn tell(
        &mut self,
        what: &'static str,
        request: &Request,
        wait: &mut Wait<'_>,
    ) -> Result<(), StagingError> {
        match self.ask(what, request, wait)? {
            (Answer::Done, _) => Ok(()),
            _ => Err(StagingError::Unexpected { what }),
        }
    }

    fn reconnect(&mut self, wait: &mut Wait<'_>) -> Result<Connection, StagingError> {
        let (mut connection, hello) = connect(&self.dir, self.token.as_deref(), self.member, wait)?;
        if hello.instance != self.hello.instance {
            return Err(StagingError::Refused {
                dir: self.dir.clone(),
                reason: "it is another staging folder than when this process began".into(),
            });
        }
        if let Some(place) = &self.place {
            let message = to_bytes(&Request::Attach(place.clone()))?;
            let frame = exchange(&mut connection, "attach", &message, Vec::new(), wait)?;
            match parse(&frame.bytes)? {
                Answer::Attached { .. } => {}
                Answer::Failed(failure) => return Err(failure.into()),
                _ => return Err(StagingError::Unexpected { what: "attach" }),
            }
        }
        self.hello = hello;
        Ok(connection)
    }
}

/// Opens the staging folder. The folder must belong to this user, and no other user may have
/// access.
fn open_folder(dir: &Path) -> Result<File, StagingError> {
    let flags = (rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC).bits() as i32;
    let opened = File::options().read(true).custom_flags(flags).open(dir);
    let folder = opened.map_err(|error| StagingError::NoDaemon {
        dir: dir.to_owned(),
        reason: match error.kind() {
            io::ErrorKind::NotFound => "there is no such folder".into(),
            _ => error.to_string(),
        },
    })?;
    let untrusted = |problem: String| StagingError::Untrusted { dir: dir.to_owned(), problem };
    let metadata = folder.metadata().map_err(|error| untrusted(error.to_string()))?;
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() != own {
        return Err(untrusted(format!("belongs to user {}, not to user {own}", metadata.uid())));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o7777;
        return Err(untrusted(format!("can be entered by others (mode {mode:04o})")));
    }
    Ok(folder)
}

fn connect(
    dir: &Path,
    token: Option<&Path>,
    member: MemberId,
    wait: &mut Wait<'_>,
) -> Result<(Connection, StagingHelloAnswer), StagingError> {
    use std::os::fd::AsRawFd;
    const WHAT: &str = "the staging daemon";
    let folder = open_folder(dir)?;
    // The path through the open folder names the folder that was checked, and is short enough for a
    // socket's address.
    let path = format!("/proc/self/fd/{}/{SOCKET}", folder.as_raw_fd());
    let socket = loop {
        match UnixStream::connect(&path) {
            Ok(socket) => break socket,
            // The daemon's queue of connections to accept is full.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait.check(WHAT, "")?;
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => {
                let reason = match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                        "nobody listens on its socket".into()
                    }
                    _ => error.to_string(),
                };
                return Err(StagingError::NoDaemon { dir: dir.to_owned(), reason });
            }
        }
    };
    let failed = |what: &str, source| StagingError::Io { what: what.to_owned(), source };
    socket.set_nonblocking(true).map_err(|error| failed("a socket", error))?;
    check_peer(&socket, dir)?;
    let own = pidfd_open(getpid(), PidfdFlags::empty())
        .map_err(|error| failed("a descriptor of this process", error.into()))?;
    let token = match token {
        Some(file) => std::fs::read(file).map_err(|error| {
            failed(&format!("reading the token file {}", file.display()), error)
        })?,
        None => Vec::new(),
    };
    let hello =
        StagingHello { oldest: OLDEST, newest: VERSION, member, pid: std::process::id(), token };
    let mut connection = Connection { socket, incoming: Incoming::default() };
    let answered = exchange(&mut connection, WHAT, &to_bytes(&hello)?, vec![own], wait);
    let frame = answered.map_err(|error| match error {
        // The daemon was ending. No request was sent, so the caller may start another daemon.
        StagingError::Disconnected { .. } => StagingError::NoDaemon {
            dir: dir.to_owned(),
            reason: "its daemon ended before it answered".into(),
        },
        error => error,
    })?;
    let answer: StagingHelloAnswer = parse(&frame.bytes)?;
    if !answer.refused.is_empty() {
        return Err(StagingError::Refused { dir: dir.to_owned(), reason: answer.refused });
    }
    if !(OLDEST..=VERSION).contains(&answer.version) {
        let reason = format!(
            "it speaks no version from {OLDEST} to {VERSION} of the protocol: upgrade it or the package"
        );
        return Err(StagingError::Refused { dir: dir.to_owned(), reason });
    }
    Ok((connection, answer))
}

/// Returns the user id of the process at the other end. The process id is not read: it is 0 if the
/// process belongs to another container, which the result of rustix's `socket_peercred` cannot
/// represent.
pub(crate) fn user_of_peer(socket: &impl AsFd) -> std::io::Result<Uid> {
    let peer = nix::sys::socket::getsockopt(socket, PeerCredentials)?;
    Ok(Uid::from_raw(peer.uid()))
}

/// Fails unless the daemon runs as this user.
fn check_peer(socket: &UnixStream, dir: &Path) -> Result<(), StagingError> {
    let own = rustix::process::geteuid();
    let problem = match user_of_peer(socket) {
        Ok(user) if user == own => return Ok(()),
        Ok(user) => {
            format!("has a socket of user {}, not of user {}", user.as_raw(), own.as_raw())
        }
        Err(error) => error.to_string(),
    };
    Err(StagingError::Untrusted { dir: dir.to_owned(), problem })
}

/// Sends a message and receives the next one.
fn exchange(
    connection: &mut Connection,
    what: &'static str,
    message: &[u8],
    descriptors: Vec<OwnedFd>,
    wait: &mut Wait<'_>,
) -> Result<Frame, StagingError> {
    let mut out = Outgoing::new(message, descriptors)?;
    let gone = |error: io::Error| match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            StagingError::Disconnected { what }
        }
        _ => {
            StagingError::Io { what: format!("talking to the daemon about {what}"), source: error }
        }
    };
    loop {
        match out.send(connection.socket.as_fd()) {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                ready(&connection.socket, PollFlags::OUT, what, wait)?;
            }
            Err(error) => return Err(gone(error)),
        }
    }
    loop {
        if let Some(frame) = connection.incoming.frame()? {
            return Ok(frame);
        }
        match connection.incoming.receive(connection.socket.as_fd()) {
            Ok(0) => return Err(StagingError::Disconnected { what }),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                ready(&connection.socket, PollFlags::IN, what, wait)?;
            }
            Err(error) => return Err(gone(error)),
        }
    }
}

/// Waits until the socket is ready. Fails when the deadline passes or the caller ends the wait.
fn ready(
    socket: &UnixStream,
    flags: PollFlags,
    what: &'static str,
    wait: &mut Wait<'_>,
) -> Result<(), StagingError> {
    // The daemon may delay an answer until the caller's deadline, so the answer may arrive a little
    // later. It is accepted up to this long after the start of the wait.
    const GRACE: Duration = Duration::from_secs(2);
    let started = Instant::now();
    loop {
        let slice = Timespec { tv_sec: 0, tv_nsec: SLICE.as_nanos() as i64 };
        match poll(&mut [PollFd::new(socket, flags)], Some(&slice)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => {
                return Err(StagingError::Io { what: what.to_owned(), source: error.into() });
            }
        }
        if wait.left().is_zero() && started.elapsed() < GRACE {
            if !(wait.proceed)() {
                return Err(StagingError::Interrupted { what });
            }
            continue;
        }
        wait.check(what, "")?;
    }
}

/// Returns the time since the host's boot, by a clock that continues while the host sleeps and that
/// all processes of the host share.
pub fn boot_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_daemon_that_ends_during_the_greeting_is_no_daemon() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(folder.path().join(SOCKET)).unwrap();
        let daemon = std::thread::spawn(move || drop(listener.accept()));
        let mut proceed = || true;
        let mut wait = Wait::new(Duration::from_secs(60), &mut proceed);
        let connected = Session::connect(folder.path(), None, &mut wait);
        assert!(matches!(connected, Err(StagingError::NoDaemon { .. })));
        daemon.join().unwrap();
    }
}
