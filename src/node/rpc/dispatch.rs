//! Connections and calls: identification of the peer, permission, dispatch to the handler.
//!
//! Every wait for a peer has a limit, and every connection has a bounded number of concurrent
//! calls. A stream carries one call.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::error::RpcError;
use crate::budget::Budget;
use crate::clock::deadline;
use crate::kind::ErrorKind;
use crate::net::frame::FramedRecv;
use crate::net::{Connection, NetError, Peer, RecvStream, Role, Transport};
use crate::node::budgets::Budgets;
use crate::node::context::NodeContext;
use crate::node::incoming_call::{IncomingCall, Request};
use crate::node::services::Services;
use crate::node::standings::get_standing;
use crate::node::storage::node_inventory::{list_inventory, list_marked_saves, survey_shard};
use crate::pipeline::executor::IncomingStream;
use crate::wire::calls::{
    ALL, AbortSave, ArchiveStep, BeginLaunchSave, BeginSave, CatchUp, ClaimEpoch, CommitSave,
    CompareAndSetKey, CompareAndSetKeyGuarded, CompleteShard, CopyReplica, DropReplicas,
    ExamineStripe, FindRemovedSaves, GetKey, GetNodeStatus, GetPolicyStatus, GetRecord,
    GetRepairStatus, GetShardState, GetStanding, GrantLease, Hello, JoinSave, LabelStep,
    ListCompletedShards, ListDamagedMarks, ListFiles, ListInventory, ListKeys, ListLabels,
    ListLaunches, ListMarkedSaves, ListMembers, ListNodes, ListOpenSaves, ListRemovedSaves,
    ListRingChanges, ListSources, ListSteps, MoveCatalogue, PauseWrites, PurgeSave, PutBlock,
    PutLeaves, PutMark, PutPlaces, PutReceipt, PutRecord, PutTombstone, ReadFile, ReadSource,
    RebuildCatalogue, RegisterLaunch, RegisterNode, ReleasePart, RemoveLaunchStep, RemoveNode,
    RemoveStep, RenewLease, RepairStep, ReplaceNode, ReservePart, RevokeLease, RunPart,
    SetMaintenance, SetRetention, ShowStep, SurveyShard, TouchLease, TransferCatalogue, VerifyFile,
};
use crate::wire::{
    AllowedCaller, Call, MAX_FRAME_BYTES, RemoteError, StreamHeader, parse_message, split_request,
};

/// Maximum length of a [`StreamHeader`].
const MAX_STREAM_HEADER_BYTES: usize = 64;
/// Time limit for a peer to send its request after it opens a stream.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// Maximum length of a short request. Short requests have a memory share of their own.
const SHORT_REQUEST_BYTES: usize = 64 << 10;
/// Calls whose requests may be longer, because their content grows with the blocks of a stripe or
/// the stripes of a shard. The requests of all other calls must be short: a list takes many times
/// its encoded length in memory when it is parsed.
const LONG_CALLS: &[u8] = &[
    PutRecord::NUMBER,
    PutLeaves::NUMBER,
    PutPlaces::NUMBER,
    PutReceipt::NUMBER,
    ReservePart::NUMBER,
];
/// Maximum number of concurrent calls on one connection.
const CALLS_AT_ONCE: usize = 256;
/// Before its requests have arrived, one connection can reserve this fraction (1/8) of the memory
/// share for short requests and of the one for long requests, and always the memory of one request
/// of each kind. A connection that announces requests and does not send them must not take the
/// memory of all others.
const UNSENT_PART: u64 = 8;
/// How long the connection of a client stays open without a call; it is closed after twice this time
/// at the latest. Clients connect again by themselves, and the number of connections is limited.
const CLIENT_IDLE_LIMIT: Duration = Duration::from_secs(60);

/// Permits of one connection to reserve memory for requests that have not arrived yet.
struct UnsentRequests {
    short: Semaphore,
    long: Semaphore,
}

impl UnsentRequests {
    fn new(budgets: &Budgets) -> Self {
        let part = |share: &Budget, request_bytes: usize| {
            let requests = share.total_bytes() / request_bytes as u64 / UNSENT_PART;
            Semaphore::new(requests.max(1) as usize)
        };
        Self {
            short: part(&budgets.requests, SHORT_REQUEST_BYTES),
            long: part(&budgets.control, MAX_FRAME_BYTES),
        }
    }
}

/// The service that accepts connections and dispatches calls to the other services.
pub(in crate::node) struct RpcServer {
    context: Arc<NodeContext>,
    budgets: Arc<Budgets>,
    transport: Arc<dyn Transport>,
    services: Services,
}

impl RpcServer {
    /// Creates the service.
    pub(in crate::node) fn new(
        context: Arc<NodeContext>,
        budgets: Arc<Budgets>,
        transport: Arc<dyn Transport>,
        services: Services,
    ) -> Self {
        Self { context, budgets, transport, services }
    }

    /// Returns the services that the calls are dispatched to.
    pub(in crate::node) fn services(&self) -> &Services {
        &self.services
    }

    /// Accepts connections until the transport closes.
    pub(in crate::node) async fn accept_connections(self: Arc<Self>) {
        while let Some(connection) = self.transport.accept().await {
            self.context.tasks.spawn_until_stop(self.clone().serve_connection(connection));
        }
    }

    /// Serves the streams and calls of one connection until it closes.
    async fn serve_connection(self: Arc<Self>, connection: Arc<dyn Connection>) {
        let peer = connection.peer().clone();
        tracing::debug!(%peer, "connected");
        let slots = Arc::new(Semaphore::new(CALLS_AT_ONCE));
        let unsent = Arc::new(UnsentRequests::new(&self.budgets));
        loop {
            // A call that begins after this ends this pass of the loop.
            let is_idle = peer.role == Role::Client && slots.available_permits() == CALLS_AT_ONCE;
            tokio::select! {
                biased;
                stream = connection.accept_uni() => {
                    let Ok(stream) = stream else { break };
                    let (server, peer) = (self.clone(), peer.clone());
                    self.context.tasks.spawn_until_stop(async move {
                        server.accept_hop_stream(&peer, stream).await;
                    });
                }
                stream = connection.accept_bi() => {
                    let Ok((send, recv)) = stream else { break };
                    let Ok(slot) = slots.clone().acquire_owned().await else { break };
                    let (server, connection) = (self.clone(), connection.clone());
                    let (context, peer) = (self.context.clone(), peer.clone());
                    let unsent = unsent.clone();
                    self.context.tasks.spawn_until_stop(async move {
                        let recv = FramedRecv::new(recv);
                        let served = IncomingCall { context, peer, send, recv };
                        tokio::select! {
                            biased;
                            () = connection.closed() => {}
                            () = server.serve_call(served, &unsent) => {}
                        }
                        drop(slot);
                    });
                }
                () = self.context.clock.sleep(CLIENT_IDLE_LIMIT), if peer.role == Role::Client => {
                    if is_idle && slots.available_permits() == CALLS_AT_ONCE {
                        connection.close(ErrorKind::Timeout.wire_code(), "no call for a while");
                        break;
                    }
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
                self.services
                    .plan_parts
                    .accept_stream(&header, IncomingStream { from, recv: stream });
            }
            None => stream.stop(ErrorKind::Invalid.wire_code()),
        }
    }

    /// Reads a request, checks the caller's permission and dispatches the call.
    async fn serve_call(self: &Arc<Self>, mut served: IncomingCall, unsent: &UnsentRequests) {
        let read = self.read_request(&mut served.recv, unsent);
        let read = deadline(&*self.context.clock, REQUEST_LIMIT, read).await;
        let request = match read {
            Ok(Ok(Some(request))) => request,
            Ok(Ok(None)) => return,
            Ok(Err(error)) => {
                tracing::warn!(peer = %served.peer, %error, "cannot read a request");
                return served.refuse(error.into()).await;
            }
            Err(_) => return served.recv.stop(ErrorKind::Timeout.wire_code()),
        };
        let number = match split_request(request.frame()) {
            Ok((number, _)) => number,
            Err(error) => return served.refuse(error.into()).await,
        };
        let Some((_, name, who)) = ALL.iter().find(|(known, _, _)| *known == number) else {
            return served.refuse(RemoteError::unknown_call(number)).await;
        };
        if request.frame().len() > SHORT_REQUEST_BYTES && !LONG_CALLS.contains(&number) {
            let too_long = RpcError::RequestTooLong {
                call: name,
                len_bytes: request.frame().len(),
                limit_bytes: SHORT_REQUEST_BYTES,
            };
            return served.refuse(too_long.into()).await;
        }
        if *who == AllowedCaller::Nodes && served.peer.role != Role::Node {
            tracing::warn!(peer = %served.peer, call = name, "refused a call that only nodes may make: the peer is a client");
            let denied = RpcError::CallerNotNode { call: name, client: served.peer.name.clone() };
            return served.refuse(denied.into()).await;
        }
        self.dispatch(number, request, served).await;
    }

    /// Reads a request. Returns `None` if the stream ended before one. Memory is reserved before
    /// the bytes are read, so long requests wait for each other instead of taking more memory, and
    /// short ones do not wait for long ones. `unsent` bounds the requests of the connection that
    /// have memory and have not arrived yet.
    async fn read_request(
        &self,
        recv: &mut FramedRecv,
        unsent: &UnsentRequests,
    ) -> Result<Option<Request>, NetError> {
        let Some(len_bytes) = recv.frame_len(MAX_FRAME_BYTES).await? else { return Ok(None) };
        let is_short = len_bytes <= SHORT_REQUEST_BYTES;
        let (share, unsent) = match is_short {
            true => (&self.budgets.requests, &unsent.short),
            false => (&self.budgets.control, &unsent.long),
        };
        // The semaphore is never closed.
        let _unsent = unsent.acquire().await.ok();
        let memory = share.reserve(len_bytes as u64).await;
        let memory = memory.map_err(|_| NetError::FrameTooLong {
            len_bytes: len_bytes as u64,
            limit_bytes: share.total_bytes(),
        })?;
        let frame = recv.read_frame(MAX_FRAME_BYTES).await?;
        Ok(frame.map(|frame| Request::new(frame, memory)))
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
            Err(error) => return served.refuse(error.into()).await,
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
        if served.answer(answer).await {
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
                reply!(Hello => |call| self.services.membership.answer_hello(call, peer))
            }
            BeginSave::NUMBER => reply!(BeginSave => |call| self.services.saves.begin_save(call)),
            BeginLaunchSave::NUMBER => {
                reply!(BeginLaunchSave => |call| self.services.saves.begin_launch_save(call))
            }
            RegisterLaunch::NUMBER => {
                reply!(RegisterLaunch => |call| self.services.saves.register_launch(call))
            }
            ListLaunches::NUMBER => {
                reply!(ListLaunches => |call| self.services.saves.list_launches(call))
            }
            RenewLease::NUMBER => {
                reply!(RenewLease => |call| self.services.saves.renew_lease(call))
            }
            CompleteShard::NUMBER => {
                reply!(CompleteShard => |call| self.services.saves.complete_shard(call))
            }
            CommitSave::NUMBER => {
                reply!(CommitSave => |call| self.services.saves.commit_save(call))
            }
            AbortSave::NUMBER => reply!(AbortSave => |call| self.services.saves.abort_save(call)),
            JoinSave::NUMBER => reply!(JoinSave => |call| self.services.saves.join_save(call)),
            ListOpenSaves::NUMBER => {
                reply!(ListOpenSaves => |call| self.services.saves.list_open_saves(call))
            }
            ListCompletedShards::NUMBER => {
                reply!(ListCompletedShards => |call| {
                    self.services.saves.list_completed_shards(call)
                })
            }
            RemoveStep::NUMBER => {
                reply!(RemoveStep => |call| self.services.steps.remove_step(call))
            }
            LabelStep::NUMBER => {
                reply!(LabelStep => |call| self.services.steps.label_step(call))
            }
            ListLabels::NUMBER => {
                reply!(ListLabels => |call| self.services.steps.list_labels(call))
            }
            RemoveLaunchStep::NUMBER => {
                reply!(RemoveLaunchStep => |call| self.services.steps.remove_launch_step(call))
            }
            ListSteps::NUMBER => reply!(ListSteps => |call| self.services.steps.list_steps(call)),
            ShowStep::NUMBER => reply!(ShowStep => |call| self.services.steps.show_step(call)),
            GetShardState::NUMBER => {
                reply!(GetShardState => |call| self.services.steps.get_shard_state(call))
            }
            ListNodes::NUMBER => {
                let role = served.peer.role;
                reply!(ListNodes => |_| self.services.steps.list_nodes(role))
            }
            GetNodeStatus::NUMBER => {
                reply!(GetNodeStatus => |_| self.services.status_report.get_node_status())
            }
            SetRetention::NUMBER => {
                reply!(SetRetention => |call| self.services.steps.set_retention(call))
            }
            SetMaintenance::NUMBER => {
                reply!(SetMaintenance => |call| self.services.maintenance.set_maintenance(call))
            }
            ReplaceNode::NUMBER => {
                reply!(ReplaceNode => |call| self.services.node_replacement.replace_node(call))
            }
            RemoveNode::NUMBER => {
                reply!(RemoveNode => |call| self.services.node_removal.remove_node(call))
            }
            GetPolicyStatus::NUMBER => {
                reply!(GetPolicyStatus => |call| self.services.retention.get_policy_status(call))
            }
            GetRepairStatus::NUMBER => {
                reply!(GetRepairStatus => |call| self.services.automatic_repair.get_repair_status(call))
            }
            PutRecord::NUMBER => {
                reply!(PutRecord => |call| self.services.shard_records.put_record(call))
            }
            GetRecord::NUMBER => {
                reply!(GetRecord => |call| self.services.shard_records.get_record(call))
            }
            ListFiles::NUMBER => {
                reply!(ListFiles => |call| self.services.file_reads.list_files(call))
            }
            VerifyFile::NUMBER => {
                reply!(VerifyFile => |call| self.services.mending.check_file_and_handle_damage(call))
            }
            ListSources::NUMBER => {
                reply!(ListSources => |call| self.services.mending.list_sources(call))
            }
            ExamineStripe::NUMBER => {
                reply!(ExamineStripe => |call| self.services.examination.examine_stripe(call))
            }
            RegisterNode::NUMBER => {
                reply!(RegisterNode => |call| self.services.catalogue_calls.register_node(call))
            }
            GetKey::NUMBER => reply!(GetKey => |call| self.services.catalogue_calls.get_key(call)),
            CompareAndSetKey::NUMBER => {
                reply!(CompareAndSetKey => |call| self.services.catalogue_calls.compare_and_set_key(call))
            }
            CompareAndSetKeyGuarded::NUMBER => {
                reply!(CompareAndSetKeyGuarded => |call| {
                    self.services.catalogue_calls.compare_and_set_key_guarded(call)
                })
            }
            ListKeys::NUMBER => {
                reply!(ListKeys => |call| self.services.catalogue_calls.list_keys(call))
            }
            GrantLease::NUMBER => {
                reply!(GrantLease => |_| self.services.catalogue_calls.grant_lease())
            }
            TouchLease::NUMBER => {
                reply!(TouchLease => |call| self.services.catalogue_calls.renew_or_check_lease(call))
            }
            RevokeLease::NUMBER => {
                reply!(RevokeLease => |call| self.services.catalogue_calls.revoke_lease(call))
            }
            ReservePart::NUMBER => {
                reply!(ReservePart => |call| self.services.plan_parts.reserve_part(call))
            }
            RunPart::NUMBER => reply!(RunPart => |call| self.services.plan_parts.run_part(call)),
            ReleasePart::NUMBER => {
                reply!(ReleasePart => |call| self.services.plan_parts.release_part(call))
            }
            PutMark::NUMBER => reply!(PutMark => |call| self.services.shard_records.put_mark(call)),
            PutReceipt::NUMBER => {
                reply!(PutReceipt => |call| self.services.shard_records.put_receipt(call))
            }
            PutTombstone::NUMBER => {
                reply!(PutTombstone => |call| self.services.shard_records.put_tombstone(call))
            }
            DropReplicas::NUMBER => {
                reply!(DropReplicas => |call| self.services.shard_records.drop_replicas(call))
            }
            CopyReplica::NUMBER => {
                reply!(CopyReplica => |call| self.services.replica_copies.copy_replica(call))
            }
            PutLeaves::NUMBER => {
                reply!(PutLeaves => |call| self.services.shard_records.put_leaves(call))
            }
            PutPlaces::NUMBER => {
                reply!(PutPlaces => |call| self.services.shard_records.put_places(call))
            }
            PurgeSave::NUMBER => {
                reply!(PurgeSave => |call| self.services.fencing.purge_save(call.save))
            }
            RebuildCatalogue::NUMBER => {
                reply!(RebuildCatalogue => |call| self.services.rebuild.rebuild_catalogue(call))
            }
            MoveCatalogue::NUMBER => {
                reply!(MoveCatalogue => |_| self.services.transfer.move_catalogue_here())
            }
            PauseWrites::NUMBER => reply!(PauseWrites => |_| self.services.transfer.pause_writes()),
            TransferCatalogue::NUMBER => {
                reply!(TransferCatalogue => |call| self.services.transfer.cede_catalogue_to_copy(call))
            }
            ClaimEpoch::NUMBER => {
                reply!(ClaimEpoch => |call| self.services.rebuild.claim_epoch(call))
            }
            ListMembers::NUMBER => {
                reply!(ListMembers => |_| self.services.membership.list_known_members())
            }
            ListRingChanges::NUMBER => {
                reply!(ListRingChanges => |call| self.services.steps.list_ring_changes(call))
            }
            FindRemovedSaves::NUMBER => {
                reply!(FindRemovedSaves => |call| self.services.outage_reader.find_removed_saves(call))
            }
            GetStanding::NUMBER => reply!(GetStanding => |_| get_standing(&self.context)),
            ListRemovedSaves::NUMBER => {
                reply!(ListRemovedSaves => |call| self.services.catch_up.list_removed_saves(call))
            }
            CatchUp::NUMBER => {
                reply!(CatchUp => |call| self.services.catch_up.catch_up_on_request(call))
            }
            ListDamagedMarks::NUMBER => {
                reply!(ListDamagedMarks => |_| self.services.catch_up.list_damaged_marks())
            }
            ListMarkedSaves::NUMBER => {
                reply!(ListMarkedSaves => |call| list_marked_saves(&self.context, call))
            }
            ListInventory::NUMBER => {
                reply!(ListInventory => |call| list_inventory(&self.context, call))
            }
            SurveyShard::NUMBER => {
                reply!(SurveyShard => |call| survey_shard(&self.context, call))
            }
            ArchiveStep::NUMBER => self.services.steps.archive_step(request, served).await,
            RepairStep::NUMBER => self.services.steps.repair_step(request, served).await,
            PutBlock::NUMBER => self.services.block_writes.put_block(request, served).await,
            ReadFile::NUMBER => self.services.file_reads.read_file(request, served).await,
            ReadSource::NUMBER => self.services.file_reads.read_source(request, served).await,
            _ => {
                served.refuse(RpcError::NoHandler { number }.into()).await;
            }
        }
    }
}
