//! Connections and calls: identification of the peer, permission, dispatch to the handler.
//!
//! Every wait for a peer has a limit, and every connection has a bounded number of concurrent
//! calls. A stream carries one call.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::budget::Reservation;
use crate::clock::deadline;
use crate::kind::ErrorKind;
use crate::net::frame::{FramedRecv, write_frame};
use crate::net::{Connection, NetError, Peer, RecvStream, Role, SendStream};
use crate::node::Node;
use crate::node::remote_errors::remote_error;
use crate::pipeline::executor::IncomingStream;
use crate::wire::calls::{
    ALL, AbortSave, ArchiveStep, BeginSave, CatchUp, ClaimEpoch, CommitSave, CompareAndSetKey,
    CompleteShard, CopyReplica, DropReplicas, ExamineStripe, FindRemovedSaves, GetKey,
    GetNodeStatus, GetPolicyStatus, GetRecord, GetShardState, GetStanding, GrantLease, Hello,
    ListDamagedMarks, ListFiles, ListInventory, ListKeys, ListMarkedSaves, ListMembers, ListNodes,
    ListRemovedSaves, ListSources, ListSteps, MoveCatalogue, PauseWrites, PurgeSave, PutBlock,
    PutMark, PutPlaces, PutReceipt, PutRecord, PutTombstone, ReadFile, ReadSource,
    RebuildCatalogue, RegisterNode, ReleasePart, RemoveNode, RemoveStep, RenewLease, ReservePart,
    RevokeLease, RunPart, ShowStep, TouchLease, TransferCatalogue, VerifyFile,
};
use crate::wire::{
    AllowedCaller, Call, MAX_FRAME_BYTES, RemoteError, StreamHeader, WireError, answer_to_bytes,
    parse_message, parse_request, split_request,
};

/// Maximum length of a [`StreamHeader`].
const MAX_STREAM_HEADER_BYTES: usize = 64;
/// Time limit for a peer to send its request after it opens a stream.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for a peer to take an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Maximum length of a short request. Short requests have a memory share of their own.
const SHORT_REQUEST_BYTES: usize = 64 << 10;
/// Calls whose requests may be longer, because their content grows with a stripe's blocks. A list
/// takes many times its encoded length when it is parsed.
const LONG_CALLS: &[u8] =
    &[PutRecord::NUMBER, PutPlaces::NUMBER, PutReceipt::NUMBER, ReservePart::NUMBER];
/// Maximum number of concurrent calls on one connection.
const CALLS_AT_ONCE: usize = 256;

/// A received request, with the memory reserved for it until it is parsed.
pub(in crate::node) struct Request {
    frame: Bytes,
    _memory: Reservation,
}

impl Request {
    /// Parses the request. Returns the call and releases the memory.
    pub(in crate::node) fn parse<C: Call>(self) -> Result<C, WireError> {
        let (_, body) = split_request(&self.frame)?;
        parse_request(body)
    }
}

/// An open call on the serving side.
pub(in crate::node) struct IncomingCall {
    /// The peer that made the call.
    pub peer: Peer,
    /// The stream for answers.
    pub send: Box<dyn SendStream>,
    /// The stream of the request, from which its bulk bytes are read.
    pub recv: FramedRecv,
}

impl Node {
    /// Accepts connections until the transport closes.
    pub(in crate::node) async fn accept_connections(self: Arc<Self>) {
        while let Some(connection) = self.transport.accept().await {
            let node = self.clone();
            self.spawn_until_stop(|_| node.serve_connection(connection));
        }
    }

    /// Serves the streams and calls of one connection until it closes.
    async fn serve_connection(self: Arc<Self>, connection: Arc<dyn Connection>) {
        let peer = connection.peer().clone();
        tracing::debug!(%peer, "connected");
        let slots = Arc::new(Semaphore::new(CALLS_AT_ONCE));
        loop {
            tokio::select! {
                biased;
                stream = connection.accept_uni() => {
                    let Ok(stream) = stream else { break };
                    let (node, peer) = (self.clone(), peer.clone());
                    self.spawn_until_stop(|_| async move { node.accept_hop_stream(&peer, stream).await });
                }
                stream = connection.accept_bi() => {
                    let Ok((send, recv)) = stream else { break };
                    let Ok(slot) = slots.clone().acquire_owned().await else { break };
                    let (node, peer, connection) = (self.clone(), peer.clone(), connection.clone());
                    self.spawn_until_stop(|_| async move {
                        let served = IncomingCall { peer, send, recv: FramedRecv::new(recv) };
                        tokio::select! {
                            biased;
                            () = connection.closed() => {}
                            () = node.serve_call(served) => {}
                        }
                        drop(slot);
                    });
                }
            }
        }
        tracing::debug!(%peer, "disconnected");
    }

    /// Passes a stream to the hop that waits for it. Only nodes may open one.
    async fn accept_hop_stream(&self, peer: &Peer, mut stream: Box<dyn RecvStream>) {
        if peer.role != Role::Node {
            tracing::warn!(%peer, "a client opened a hop's stream");
            stream.stop(ErrorKind::Denied.wire_code());
            return;
        }
        let mut stream = FramedRecv::new(stream);
        let frame = stream.read_frame(MAX_STREAM_HEADER_BYTES);
        let frame = deadline(&*self.context.clock, REQUEST_LIMIT, frame).await;
        let header = match frame {
            Ok(Ok(Some(frame))) => parse_message::<StreamHeader>(&frame, "a stream header").ok(),
            _ => None,
        };
        match header {
            Some(header) => {
                let from = peer.name.to_string();
                self.executor.accept_stream(&header, IncomingStream { from, recv: stream });
            }
            None => stream.stop(ErrorKind::Invalid.wire_code()),
        }
    }

    /// Reads a request, checks the caller's permission and dispatches the call.
    async fn serve_call(self: &Arc<Self>, mut served: IncomingCall) {
        let read =
            deadline(&*self.context.clock, REQUEST_LIMIT, self.read_request(&mut served.recv))
                .await;
        let request = match read {
            Ok(Ok(Some(request))) => request,
            Ok(Ok(None)) => return,
            Ok(Err(error)) => {
                tracing::warn!(peer = %served.peer, %error, "cannot read a request");
                let refusal = remote_error(error.kind(), error.to_string());
                return self.refuse(served, refusal).await;
            }
            Err(_) => return served.recv.stop(ErrorKind::Timeout.wire_code()),
        };
        let number = match split_request(&request.frame) {
            Ok((number, _)) => number,
            Err(error) => return self.refuse(served, error.into()).await,
        };
        let Some((_, name, who)) = ALL.iter().find(|(known, _, _)| *known == number) else {
            let unknown = format!("call {number} is unknown here: the peer speaks a newer version");
            return self.refuse(served, remote_error(ErrorKind::Invalid, unknown)).await;
        };
        if request.frame.len() > SHORT_REQUEST_BYTES && !LONG_CALLS.contains(&number) {
            let long = format!(
                "{name} of {} bytes: it may have {SHORT_REQUEST_BYTES}",
                request.frame.len()
            );
            return self.refuse(served, remote_error(ErrorKind::Invalid, long)).await;
        }
        if *who == AllowedCaller::Nodes && served.peer.role != Role::Node {
            tracing::warn!(peer = %served.peer, call = name, "refused: a node's call by a client");
            let denied =
                format!("{name} is for nodes of the cluster; {} is a client", served.peer.name);
            return self.refuse(served, remote_error(ErrorKind::Denied, denied)).await;
        }
        self.dispatch(number, request, served).await;
    }

    /// Reads a request. Returns `None` if the stream ended before one. Memory is reserved before
    /// the bytes are read, so long requests wait for each other instead of taking more memory, and
    /// short ones do not wait for long ones.
    async fn read_request(&self, recv: &mut FramedRecv) -> Result<Option<Request>, NetError> {
        let Some(len_bytes) = recv.frame_len(MAX_FRAME_BYTES).await? else { return Ok(None) };
        let is_short = len_bytes <= SHORT_REQUEST_BYTES;
        let share = if is_short { &self.budgets.requests } else { &self.budgets.control };
        let memory = share.reserve(len_bytes as u64).await;
        let memory = memory.map_err(|_| NetError::FrameTooLong {
            len_bytes: len_bytes as u64,
            limit_bytes: share.total_bytes(),
        })?;
        let frame = recv.read_frame(MAX_FRAME_BYTES).await?;
        Ok(frame.map(|frame| Request { frame, _memory: memory }))
    }

    /// Answers a call with an error and ends its streams.
    pub(in crate::node) async fn refuse(&self, mut served: IncomingCall, refusal: RemoteError) {
        if self.send_answer::<()>(&mut served, Err(refusal)).await {
            // Without a clean end, the caller would see a reset and lose the reason.
            let _ = served.send.finish().await;
        }
        served.recv.stop(ErrorKind::Invalid.wire_code());
    }

    /// Writes an answer. Returns whether it was delivered to the stream; if not, the peer is gone.
    pub(in crate::node) async fn send_answer<C: serde::Serialize>(
        &self,
        served: &mut IncomingCall,
        answer: Result<C, RemoteError>,
    ) -> bool {
        // Paths are the same on every machine, so the message names the node whose disk failed.
        let answer = answer.map_err(|failure| match failure.kind {
            ErrorKind::Io => {
                let message = format!("node {}: {}", self.context.settings.name, failure.message);
                RemoteError { message, ..failure }
            }
            _ => failure,
        });
        let bytes = match answer_to_bytes(&answer) {
            Ok(bytes) => bytes,
            Err(error) => match answer_to_bytes::<()>(&Err(error.into())) {
                Ok(bytes) => bytes,
                Err(_) => return false,
            },
        };
        let write = write_frame(&mut *served.send, MAX_FRAME_BYTES, bytes.into());
        matches!(deadline(&*self.context.clock, ANSWER_LIMIT, write).await, Ok(Ok(())))
    }

    /// Parses the request, does the work and answers. The work is cancelled if the caller resets
    /// its stream.
    async fn run_and_answer<C, F>(
        self: &Arc<Self>,
        request: Request,
        mut served: IncomingCall,
        handler: impl FnOnce(C) -> F,
    ) where
        C: Call,
        F: Future<Output = Result<C::Answer, RemoteError>>,
    {
        let call = match request.parse::<C>() {
            Ok(call) => call,
            Err(error) => return self.refuse(served, error.into()).await,
        };
        let work = handler(call);
        tokio::pin!(work);
        let answer = tokio::select! {
            biased;
            answer = &mut work => answer,
            // A clean end says only that the request is complete. A reset says that the caller has
            // gone.
            ended = served.recv.at_end() => match ended {
                Ok(_) => work.await,
                Err(_) => return tracing::debug!(peer = %served.peer, call = C::NAME, "cancelled by its caller"),
            },
        };
        if let Err(failure) = &answer {
            tracing::debug!(peer = %served.peer, call = C::NAME, %failure, "refused or failed");
        }
        if self.send_answer(&mut served, answer).await {
            let _ = served.send.finish().await;
        }
    }

    /// Calls the handler of the call with `number`.
    async fn dispatch(self: &Arc<Self>, number: u8, request: Request, served: IncomingCall) {
        macro_rules! reply {
            ($call:ident => $work:expr) => {
                self.run_and_answer::<$call, _>(request, served, $work).await
            };
        }
        match number {
            Hello::NUMBER => {
                let peer = served.peer.clone();
                let peer = &peer;
                reply!(Hello => |call| self.record_introduction(call, peer))
            }
            BeginSave::NUMBER => reply!(BeginSave => |call| self.begin_save(call)),
            RenewLease::NUMBER => reply!(RenewLease => |call| self.renew_lease(call)),
            CompleteShard::NUMBER => reply!(CompleteShard => |call| self.complete_shard(call)),
            CommitSave::NUMBER => reply!(CommitSave => |call| self.commit_save(call)),
            AbortSave::NUMBER => reply!(AbortSave => |call| self.abort_save(call)),
            RemoveStep::NUMBER => reply!(RemoveStep => |call| self.remove_step(call)),
            ListSteps::NUMBER => reply!(ListSteps => |call| self.list_steps(call)),
            ShowStep::NUMBER => reply!(ShowStep => |call| self.show_step(call)),
            GetShardState::NUMBER => reply!(GetShardState => |call| self.get_shard_state(call)),
            ListNodes::NUMBER => {
                let role = served.peer.role;
                reply!(ListNodes => |_| self.list_nodes(role))
            }
            GetNodeStatus::NUMBER => reply!(GetNodeStatus => |_| self.get_node_status()),
            RemoveNode::NUMBER => reply!(RemoveNode => |call| self.remove_node(call)),
            GetPolicyStatus::NUMBER => {
                reply!(GetPolicyStatus => |call| self.get_policy_status(call))
            }
            PutRecord::NUMBER => reply!(PutRecord => |call| self.put_record(call)),
            GetRecord::NUMBER => reply!(GetRecord => |call| self.get_record(call)),
            ListFiles::NUMBER => reply!(ListFiles => |call| self.list_files(call)),
            VerifyFile::NUMBER => reply!(VerifyFile => |call| self.check_reported_file(call)),
            ListSources::NUMBER => reply!(ListSources => |call| self.list_sources(call)),
            ExamineStripe::NUMBER => reply!(ExamineStripe => |call| self.examine_stripe(call)),
            RegisterNode::NUMBER => reply!(RegisterNode => |call| self.register_node(call)),
            GetKey::NUMBER => reply!(GetKey => |call| self.get_key(call)),
            CompareAndSetKey::NUMBER => {
                reply!(CompareAndSetKey => |call| self.compare_and_set_key(call))
            }
            ListKeys::NUMBER => reply!(ListKeys => |call| self.list_keys(call)),
            GrantLease::NUMBER => reply!(GrantLease => |_| self.grant_lease()),
            TouchLease::NUMBER => reply!(TouchLease => |call| self.renew_or_check_lease(call)),
            RevokeLease::NUMBER => reply!(RevokeLease => |call| self.revoke_lease(call)),
            ReservePart::NUMBER => reply!(ReservePart => |call| self.reserve_part(call)),
            RunPart::NUMBER => reply!(RunPart => |call| self.run_part(call)),
            ReleasePart::NUMBER => reply!(ReleasePart => |call| self.release_part(call)),
            PutMark::NUMBER => reply!(PutMark => |call| self.put_mark(call)),
            PutReceipt::NUMBER => reply!(PutReceipt => |call| self.put_receipt(call)),
            PutTombstone::NUMBER => reply!(PutTombstone => |call| self.put_tombstone(call)),
            DropReplicas::NUMBER => reply!(DropReplicas => |call| self.drop_replicas(call)),
            CopyReplica::NUMBER => reply!(CopyReplica => |call| self.copy_replica(call)),
            PutPlaces::NUMBER => reply!(PutPlaces => |call| self.put_places(call)),
            PurgeSave::NUMBER => reply!(PurgeSave => |call| self.fencing.purge_save(call.save)),
            RebuildCatalogue::NUMBER => {
                reply!(RebuildCatalogue => |call| self.rebuild_catalogue(call))
            }
            MoveCatalogue::NUMBER => reply!(MoveCatalogue => |_| self.move_catalogue_here()),
            PauseWrites::NUMBER => reply!(PauseWrites => |_| self.pause_writes()),
            TransferCatalogue::NUMBER => {
                reply!(TransferCatalogue => |call| self.give_up_catalogue(call))
            }
            ClaimEpoch::NUMBER => reply!(ClaimEpoch => |call| self.claim_epoch(call)),
            ListMembers::NUMBER => reply!(ListMembers => |_| self.list_members()),
            FindRemovedSaves::NUMBER => {
                reply!(FindRemovedSaves => |call| self.find_removed_saves(call))
            }
            GetStanding::NUMBER => reply!(GetStanding => |_| self.get_standing()),
            ListRemovedSaves::NUMBER => {
                reply!(ListRemovedSaves => |call| self.list_removed_saves(call))
            }
            CatchUp::NUMBER => reply!(CatchUp => |call| self.catch_up_on_request(call)),
            ListDamagedMarks::NUMBER => reply!(ListDamagedMarks => |_| self.list_damaged_marks()),
            ListMarkedSaves::NUMBER => {
                reply!(ListMarkedSaves => |call| self.list_marked_saves(call))
            }
            ListInventory::NUMBER => reply!(ListInventory => |call| self.list_inventory(call)),
            ArchiveStep::NUMBER => self.archive_step(request, served).await,
            PutBlock::NUMBER => self.put_block(request, served).await,
            ReadFile::NUMBER => self.read_file(request, served).await,
            ReadSource::NUMBER => self.read_source(request, served).await,
            _ => {
                let unknown = format!("call {number} has no handler here");
                self.refuse(served, remote_error(ErrorKind::Internal, unknown)).await;
            }
        }
    }
}
