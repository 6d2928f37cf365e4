//! Serves trainers: one task per connection, one request at a time on each.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener as StdListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::unix::pipe;
use tokio::net::{UnixListener, UnixStream};

use super::core::{Ending, FillOutcome, MAX_WHY_CHARS};
use super::loads::Tickets;
use super::records::{LaunchHosts, OwnerRecord};
use super::trace::{StagingPoint, trace_point};
use super::{MAX_HELD_BACK, StagingDaemon, StartError};
use crate::client::ClientError;
use crate::clock::deadline;
use crate::format::step_labels::LabelChange;
use crate::id::{FillId, Job, Label, MemberId, SegmentId, Step, StepRef};
use crate::kind::ErrorKind;
use crate::trainer::frames::{Frame, Incoming, Outgoing};
use crate::trainer::protocol::{
    Answer, Failure, Hosts, LoadFrom, MAX_LABEL_BYTES, OLDEST, Pending, Place, Prepare, Request,
    StagingHello, StagingHelloAnswer, Status, StepInfo, VERSION, parse, to_bytes,
};
use crate::trainer::session::user_of_peer;

/// Maximum number of open connections that are served: two launches of as many ranks as a host may
/// have, and some more. Further ones are refused.
const MAX_CONNECTIONS: usize = 512;
/// Maximum number of connections that are told at once that they are refused. Further ones are closed
/// immediately.
const MAX_REFUSALS: usize = 64;
/// Maximum number of received descriptors that no frame has claimed. A greeting has one; no other
/// message has any.
const MAX_RECEIVED: usize = 2;
/// How long a new connection may take to send its greeting, and a trainer to receive an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Interval between two checks of memory that processes may have released: no event reports this.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// The hint of an answer that is longer than a message may be.
const TOO_LONG_HINT: &str = "`rapidraid ls` lists any number of steps";

type Replied = Result<(Answer, Vec<OwnedFd>), Failure>;

fn plain(answer: Answer) -> Replied {
    Ok((answer, Vec::new()))
}

fn waiting(what: String) -> Replied {
    plain(Answer::Pending(Pending { what, done_bytes: 0, total_bytes: 0 }))
}

/// A connection to a trainer.
struct Connection {
    socket: UnixStream,
    incoming: Incoming,
}

impl Connection {
    /// Returns the next frame, or `None` at the end of the stream.
    async fn receive(&mut self) -> std::io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.incoming.frame().map_err(std::io::Error::other)? {
                return Ok(Some(frame));
            }
            self.socket.readable().await?;
            let receive = || self.incoming.receive(self.socket.as_fd());
            match self.socket.try_io(Interest::READABLE, receive) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn send(&mut self, message: &[u8], descriptors: Vec<OwnedFd>) -> std::io::Result<()> {
        let mut out = Outgoing::new(message, descriptors).map_err(std::io::Error::other)?;
        loop {
            self.socket.writable().await?;
            match self.socket.try_io(Interest::WRITABLE, || out.send(self.socket.as_fd())) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// The trainer at the other end of a connection.
struct Peer {
    member: MemberId,
    /// A descriptor of the process, until the process joins a launch and is watched.
    process: Option<OwnedFd>,
    /// Whether the watched process has ended. A request that it made before must not make it a member
    /// again.
    has_ended: Arc<AtomicBool>,
    tickets: Tickets,
}

impl Peer {
    /// Fails if the process has ended. Called while the state is locked: the end is noted before the
    /// member is removed from the state.
    fn ensure_alive(&self) -> Result<(), Failure> {
        match self.has_ended.load(Ordering::Acquire) {
            true => Err(Failure::new(ErrorKind::Unavailable, "the process has ended", "")),
            false => Ok(()),
        }
    }
}

impl StagingDaemon {
    /// Creates the socket and listens on it.
    pub(super) fn listen(&self) -> Result<UnixListener, StartError> {
        use std::os::fd::AsRawFd;
        let failed = |source| StartError::Socket { dir: self.settings.dir.clone(), source };
        self.folder.new_socket()?;
        // The path through the open folder is short enough for a socket's address, however long the
        // folder's own path is.
        let folder = rustix::fs::open(
            self.folder.path(),
            rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        );
        let folder = folder.map_err(|error| failed(error.into()))?;
        let path =
            format!("/proc/self/fd/{}/{}", folder.as_raw_fd(), crate::trainer::session::SOCKET);
        let listener = StdListener::bind(path).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        UnixListener::from_std(listener).map_err(failed)
    }

    pub(super) async fn serve(self: Arc<Self>, listener: UnixListener) {
        loop {
            let socket = match listener.accept().await {
                Ok((socket, _)) => socket,
                Err(error) => {
                    tracing::warn!(%error, "the staging socket failed to accept a connection: trying again");
                    self.clock.sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let open = *self.connections.borrow();
            if open >= MAX_CONNECTIONS {
                tracing::warn!("{MAX_CONNECTIONS} connections are open: refusing a new one");
            }
            if open >= MAX_CONNECTIONS + MAX_REFUSALS {
                continue;
            }
            self.connections.send_modify(|count| *count += 1);
            let daemon = self.clone();
            tokio::spawn(async move {
                let is_full = open >= MAX_CONNECTIONS;
                if let Err(error) = daemon.clone().serve_one(socket, is_full).await {
                    tracing::debug!(%error, "a connection ended");
                }
                daemon.account_fetches();
                daemon.connections.send_modify(|count| *count -= 1);
            });
        }
    }

    /// Serves a connection until it ends. Refuses it after the greeting if the daemon `is_full`.
    async fn serve_one(self: Arc<Self>, socket: UnixStream, is_full: bool) -> std::io::Result<()> {
        let peer_user = user_of_peer(&socket)?;
        let mut connection =
            Connection { socket, incoming: Incoming::with_descriptors(MAX_RECEIVED) };
        let clock = self.clock.clone();
        let first = deadline(&*clock, PATIENCE, connection.receive()).await;
        let Some(mut frame) = first.map_err(std::io::Error::other)?? else { return Ok(()) };
        let hello: StagingHello = parse(&frame.bytes).map_err(std::io::Error::other)?;
        let process = frame.descriptors.pop_front();
        let refused = self.refusal(&hello, peer_user, process.is_some()).or_else(|| {
            is_full.then(|| {
                format!("it has {MAX_CONNECTIONS} connections open: close Checkpointers, or wait until the processes of earlier launches have ended")
            })
        });
        let version = hello.newest.min(VERSION);
        let is_spoken = version >= hello.oldest.max(OLDEST);
        let answer = StagingHelloAnswer {
            version: if is_spoken { version } else { 0 },
            instance: self.folder.instance(),
            cluster: self.settings.cluster,
            pid: std::process::id(),
            refused: refused.clone().unwrap_or_default(),
        };
        let bytes = to_bytes(&answer).map_err(std::io::Error::other)?;
        connection.send(&bytes, Vec::new()).await?;
        if refused.is_some() || !is_spoken {
            return Ok(());
        }
        let (member, has_ended) = (hello.member, Arc::default());
        let mut peer = Peer { member, process, has_ended, tickets: Tickets::default() };
        while let Some(frame) = connection.receive().await? {
            let request: Request = parse(&frame.bytes).map_err(std::io::Error::other)?;
            let (answer, descriptors) = match self.reply(&mut peer, request).await {
                Ok(answered) => answered,
                Err(failure) => (Answer::Failed(failure), Vec::new()),
            };
            let (bytes, descriptors) = match to_bytes(&answer) {
                Ok(bytes) => (bytes, descriptors),
                Err(error) => {
                    let message = format!("the answer cannot be sent: {error}");
                    let failure = Failure::new(ErrorKind::Invalid, message, TOO_LONG_HINT);
                    let failed = to_bytes(&Answer::Failed(failure));
                    (failed.map_err(std::io::Error::other)?, Vec::new())
                }
            };
            let sent = deadline(&*clock, PATIENCE, connection.send(&bytes, descriptors)).await;
            sent.map_err(std::io::Error::other)??;
        }
        Ok(())
    }

    fn refusal(
        &self,
        hello: &StagingHello,
        user: rustix::process::Uid,
        has_process: bool,
    ) -> Option<String> {
        let own = rustix::process::geteuid();
        if user != own {
            return Some(format!("it serves user {}, not user {}", own.as_raw(), user.as_raw()));
        }
        if !has_process {
            return Some("no descriptor of the process came with the greeting".into());
        }
        // Compare the hashes, so that the time of the comparison reveals nothing about the token.
        let is_same = blake3::hash(&hello.token) == blake3::hash(&self.settings.token);
        if !self.settings.token.is_empty() && !is_same {
            return Some("the token is not the one of staging.token".into());
        }
        None
    }

    async fn reply(self: &Arc<Self>, peer: &mut Peer, request: Request) -> Replied {
        match request {
            Request::Prepare(prepare) => self.prepare(peer, &prepare, None).await,
            Request::PrepareOnHost(prepare, hosts) => {
                self.prepare(peer, &prepare, Some(&hosts)).await
            }
            Request::Attach(place) => {
                let segments = self.with(|core| {
                    peer.ensure_alive()?;
                    core.attach(peer.member, &place)
                })?;
                self.watch(peer);
                plain(Answer::Attached { segments })
            }
            Request::Fill { step, or_skip, limit_ms } => {
                self.fill(peer.member, step, or_skip, limit_ms).await
            }
            Request::Staged { step, segment, fill, samples } => {
                self.with(|core| core.staged(peer.member, step, segment, fill, samples))?;
                plain(Answer::Done)
            }
            Request::GiveUp { step, fill, why } => {
                self.with(|core| core.give_up(peer.member, step, fill, &why))?;
                plain(Answer::Done)
            }
            Request::NotMade { segment, why } => {
                let why: String = why.chars().take(MAX_WHY_CHARS).collect();
                if let Some(rank) = self.with(|core| core.stop_growth(peer.member, segment)) {
                    tracing::warn!(member = %peer.member, rank, %segment, why, "a rank has no memory for another segment: its saves wait until one of its segments is free");
                }
                plain(Answer::Done)
            }
            Request::Wait { step, limit_ms } => self.wait(peer.member, step, limit_ms).await,
            Request::Notices => {
                plain(Answer::Notices(self.with(|core| core.take_notices(peer.member))))
            }
            Request::Load(load) => {
                self.load(peer.member, &load, LoadFrom::Anywhere, &mut peer.tickets).await
            }
            Request::LoadFromCluster(load) => {
                self.load(peer.member, &load, LoadFrom::Cluster, &mut peer.tickets).await
            }
            Request::Open { ticket, first } => self.open_parts(&peer.tickets, ticket, first),
            Request::Verified { ticket, extents } => {
                self.set_verified(&peer.tickets, ticket, &extents)?;
                plain(Answer::Done)
            }
            Request::Corrupt { ticket, name } => {
                self.set_corrupt(&mut peer.tickets, ticket, &name).await?;
                self.account_fetches();
                plain(Answer::Done)
            }
            Request::Release { ticket } => {
                self.release(&mut peer.tickets, ticket);
                self.account_fetches();
                plain(Answer::Done)
            }
            Request::Steps { job } => self.steps(&job).await,
            Request::Remove { job, step } => self.remove(&job, step).await,
            Request::LabelStep { job, step, label, change } => {
                self.label(job.at(step), &label, change).await
            }
            Request::ListLabels { job } => self.labels(&job).await,
            Request::Status => plain(Answer::Status(self.status())),
            Request::Free { job, with_unsaved } => {
                let is_unmapped = |id: SegmentId| self.folder.is_unmapped(id);
                let bytes = self.with(|core| core.free_job(&job, with_unsaved, &is_unmapped));
                plain(Answer::Freed { bytes: bytes + self.free_fetches(Some(&job)) })
            }
            Request::ReadExtents { ticket, extents, limit_ms } => {
                self.read_extents(&mut peer.tickets, ticket, extents, limit_ms).await
            }
            Request::Leave => {
                self.member_ended(peer.member, Ending::Left);
                plain(Answer::Done)
            }
        }
    }

    /// Makes segments if there is room for them, and watches the process from now on.
    async fn prepare(
        self: &Arc<Self>,
        peer: &mut Peer,
        prepare: &Prepare,
        hosts: Option<&Hosts>,
    ) -> Replied {
        let made = self.prepare_segments(peer, prepare, hosts).await;
        self.spawn_launch_order_read(&prepare.place);
        // Watch the process after a failure too, because it may already be a member of its launch.
        // Do not watch it before the files exist: the remains of an ended process are looked for
        // only once.
        self.watch(peer);
        made
    }

    async fn prepare_segments(
        self: &Arc<Self>,
        peer: &Peer,
        prepare: &Prepare,
        hosts: Option<&Hosts>,
    ) -> Replied {
        let member = peer.member;
        let limit = Duration::from_millis(prepare.limit_ms.into()).min(MAX_HELD_BACK);
        let until = self.clock.now() + limit;
        let is_unmapped = |id: SegmentId| self.folder.is_unmapped(id);
        let mut new_id = || SegmentId(self.entropy.id());
        // `prepare` ends older launches. Before that, accept the parts that their ranks have
        // staged.
        self.accept_headers(None);
        let mut heard = self.bell.listen();
        if let Some(hosts) = hosts {
            self.keep_hosts_first(prepare, hosts)?;
        }
        let segments = loop {
            let made = self.with(|core| {
                peer.ensure_alive()?;
                core.prepare(member, prepare, hosts, &is_unmapped, &mut new_id)
            });
            match made {
                Ok(segments) => break segments,
                // Free the fetched files that are kept only for possible later readers, and try
                // again.
                Err(failure)
                    if failure.kind() == ErrorKind::Busy && self.free_fetches(None) > 0 => {}
                Err(failure) if failure.kind() == ErrorKind::Busy => {
                    // Processes of an earlier launch may still be releasing their memory.
                    let now = self.clock.now();
                    if self.with(|core| prepare.launch_bytes > core.limit_bytes()) {
                        return Err(failure);
                    }
                    if now >= until {
                        if !self.with(|core| core.may_get_room(&prepare.place)) {
                            return Err(failure);
                        }
                        return waiting(failure.message);
                    }
                    self.wait_for_bell(&mut heard, (until - now).min(LOOK_AGAIN)).await;
                }
                Err(failure) => {
                    let Place { job, launch, .. } = &prepare.place;
                    self.with(|core| {
                        if hosts.is_some() && !core.knows_launch(job, *launch) {
                            self.folder.forget_hosts(*launch);
                        }
                    });
                    return Err(failure);
                }
            }
        };
        let mut descriptors = Vec::with_capacity(segments.len());
        for &id in &segments {
            descriptors.push(self.make_segment(
                member,
                &prepare.place,
                id,
                prepare.segment_bytes,
            )?);
        }
        Ok((Answer::Prepared { segments }, descriptors))
    }

    /// Writes the record of a launch's hosts before the launch is known. Without the record, the next
    /// daemon would take this host's part of a step for the whole. Writes under the lock of the
    /// state, because all ranks of the launch may ask for it at once.
    fn keep_hosts_first(self: &Arc<Self>, prepare: &Prepare, hosts: &Hosts) -> Result<(), Failure> {
        let Place { job, launch, .. } = &prepare.place;
        let record = LaunchHosts { launch: *launch, hosts: hosts.clone(), filled: None };
        // A launch that is known without hosts is refused below, and must not get a record.
        let kept = self.with(|core| match core.knows_launch(job, *launch) {
            true => Ok(()),
            false => self.folder.keep_hosts(&record),
        });
        kept.map_err(|error| {
            let hint = "check the free space and the permissions of the staging folder";
            Failure::new(error.kind(), error.to_string(), hint)
        })
    }

    fn make_segment(
        &self,
        member: MemberId,
        place: &Place,
        id: SegmentId,
        len_bytes: u64,
    ) -> Result<OwnedFd, Failure> {
        let owner = OwnerRecord { member, place: place.clone(), len_bytes };
        self.folder.make_segment(id, &owner).map_err(|error| {
            Failure::new(
                error.kind(),
                error.to_string(),
                "check the free space and the permissions of the staging folder",
            )
        })
    }

    /// Watches for the end of the process from now on.
    fn watch(self: &Arc<Self>, peer: &mut Peer) {
        let Some(process) = peer.process.take() else { return };
        let (daemon, member, has_ended) = (self.clone(), peer.member, peer.has_ended.clone());
        tokio::spawn(async move {
            // A pidfd becomes readable when its process ends. Nothing is read from it: it is
            // wrapped as the end of a pipe because tokio can wait for such a descriptor without
            // unsafe code.
            let ended = match pipe::Receiver::from_owned_fd_unchecked(process) {
                Ok(process) => process.readable().await,
                Err(error) => Err(error),
            };
            if let Err(error) = ended {
                return tracing::error!(%error, "cannot watch a trainer's process, so its end will not be noticed: if a restarted rank is refused because it has another live process, restart the staging daemon");
            }
            tracing::debug!(%member, "a trainer's process ended");
            has_ended.store(true, Ordering::Release);
            daemon.member_ended(member, Ending::Died);
        });
    }

    fn member_ended(self: &Arc<Self>, member: MemberId, how: Ending) {
        // The member may have staged a part in a header without the report being read from its
        // connection.
        self.accept_headers(Some(member));
        self.with(|core| core.gone(member, how));
        self.bell.ring();
    }

    async fn fill(
        self: &Arc<Self>,
        member: MemberId,
        step: Step,
        or_skip: bool,
        limit_ms: u32,
    ) -> Replied {
        let limit = Duration::from_millis(limit_ms.into()).min(MAX_HELD_BACK);
        let until = self.clock.now() + limit;
        // The report of the last *staged* part may be lost. That step must not be dropped because
        // the rank begins another one.
        self.accept_headers(Some(member));
        let mut heard = self.bell.listen();
        loop {
            let now = self.clock.now();
            let is_unmapped = |id: SegmentId| self.folder.is_unmapped(id);
            let mut new_fill = || FillId(self.entropy.id());
            let mut new_segment = || SegmentId(self.entropy.id());
            let outcome = self.with(|core| {
                core.fill(member, step, or_skip, now, &is_unmapped, &mut new_fill, &mut new_segment)
            })?;
            match outcome {
                FillOutcome::Segment(segment, fill) => {
                    if let Some(place) = self.with(|core| core.place(member).cloned()) {
                        trace_point(StagingPoint::Filling, &place.job, step);
                    }
                    return plain(Answer::Fill { segment, fill });
                }
                FillOutcome::Unchecked => match self.check_resumed(member, until).await {
                    Ok(None) => {}
                    Ok(Some(what)) => return waiting(what),
                    Err(failure) if failure.kind().is_transient() => {
                        self.clock.sleep(LOOK_AGAIN.min(until.saturating_sub(now))).await;
                        if self.clock.now() >= until {
                            return waiting(failure.message);
                        }
                    }
                    Err(failure) => return Err(failure),
                },
                FillOutcome::Grow { segment, len_bytes } => {
                    let place = self.with(|core| core.place(member).cloned());
                    let Some(place) = place else { continue };
                    let made = self.make_segment(member, &place, segment, len_bytes);
                    let descriptor =
                        made.inspect_err(|_| self.with(|core| core.not_made(segment)))?;
                    return Ok((Answer::Prepared { segments: vec![segment] }, vec![descriptor]));
                }
                FillOutcome::Skipped(what) => return plain(Answer::Skipped { what }),
                FillOutcome::Full(what) => {
                    if now >= until {
                        return waiting(what);
                    }
                    self.wait_for_bell(&mut heard, until - now).await;
                }
            }
        }
    }

    async fn wait(self: &Arc<Self>, member: MemberId, step: Step, limit_ms: u32) -> Replied {
        let limit = Duration::from_millis(limit_ms.into()).min(MAX_HELD_BACK);
        let until = self.clock.now() + limit;
        let mut heard = self.bell.listen();
        loop {
            if let Some((save, notes)) = self.with(|core| core.outcome(member, step))? {
                return plain(Answer::Committed { save, notes });
            }
            let now = self.clock.now();
            if now >= until {
                let key = self.with(|core| {
                    let place = core.place(member)?;
                    core.key_of(&place.job, step, place.launch)
                });
                let what = key.as_ref().map(|key| self.with(|core| core.progress_of(key)));
                let (done_bytes, total_bytes) = key.map_or((0, 0), |key| self.progress_bytes(&key));
                let what = what.unwrap_or_default();
                return plain(Answer::Pending(Pending { what, done_bytes, total_bytes }));
            }
            self.wait_for_bell(&mut heard, until - now).await;
        }
    }

    async fn steps(self: &Arc<Self>, job: &Job) -> Replied {
        let views = self.client.list_steps(Some(job)).await.map_err(|error| told(&error))?;
        let steps = views
            .into_iter()
            .map(|view| StepInfo {
                step: view.step,
                is_committed: true,
                is_in_memory: self.with(|core| core.complete_step(job, view.step).is_some()),
                len_bytes: view.saved.len_bytes,
            })
            .collect();
        plain(Answer::Steps(steps))
    }

    async fn remove(self: &Arc<Self>, job: &Job, step: Step) -> Replied {
        let found = self.client.find_committed_save(job.at(step)).await;
        let save = found.map_err(|error| told(&error))?;
        self.client.remove_save(job.at(step), save).await.map_err(|error| told(&error))?;
        self.with(|core| core.note_removal(job, step, save));
        plain(Answer::Done)
    }

    async fn label(&self, step_ref: StepRef<'_>, label: &Label, change: LabelChange) -> Replied {
        self.client.label_step(step_ref, label, change).await.map_err(|error| told(&error))?;
        plain(Answer::Done)
    }

    async fn labels(&self, job: &Job) -> Replied {
        let labels = self.client.list_labels(job).await.map_err(|error| told(&error))?;
        let mut bytes = 0;
        let fits = |(_, labels): &(Step, Vec<Label>)| {
            bytes += labels.iter().map(|label| label.as_str().len() + 8).sum::<usize>() + 16;
            bytes <= MAX_LABEL_BYTES
        };
        let mut newest: Vec<_> = labels.into_iter().rev().take_while(fits).collect();
        newest.reverse();
        plain(Answer::Labels(newest))
    }

    /// Returns the daemon's status.
    fn status(self: &Arc<Self>) -> Status {
        self.with(|core| Status {
            instance: self.folder.instance(),
            memory_bytes: core.limit_bytes(),
            used_bytes: core.used_bytes(),
            jobs: core.status(),
        })
    }
}

/// Returns what a trainer is told of an error of the cluster.
fn told(error: &ClientError) -> Failure {
    Failure::new(error.kind(), error.to_string(), error.hint().unwrap_or_default())
}
