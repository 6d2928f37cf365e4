//! The services of a node, and the order in which they are built: the constructor of a service
//! takes the services that it calls.

use std::sync::Arc;

use super::background::archiving_takeover::ArchivingTakeover;
use super::background::automatic_repair::AutomaticRepair;
use super::background::catch_up::CatchUpRounds;
use super::background::deferred_removals::DeferredRemovals;
use super::background::keep_registered::RegistrationRenewal;
use super::background::orphan_gc::OrphanGc;
use super::background::replica_gc::ReplicaGc;
use super::background::retention::Retention;
use super::background::save_recovery::SaveRecovery;
use super::budgets::Budgets;
use super::catalogue_server::catalogue_calls::CatalogueCalls;
use super::catalogue_server::cluster_inventory::InventoryReader;
use super::catalogue_server::maintenance::MaintenanceCalls;
use super::catalogue_server::majority::MajorityChecks;
use super::catalogue_server::membership::Membership;
use super::catalogue_server::rebuild::CatalogueRebuild;
use super::catalogue_server::remove_node::NodeRemoval;
use super::catalogue_server::replace_node::NodeReplacement;
use super::catalogue_server::transfer::CatalogueTransfer;
use super::context::NodeContext;
use super::gateway::begin_save::SaveGateway;
use super::gateway::committed_steps::CommittedSteps;
use super::gateway::reads_without_catalogue::OutageReader;
use super::gateway::removal::SaveRemoval;
use super::registration::{CatchUpRequests, Registration};
use super::rpc::status_report::StatusReport;
use super::storage::copy_replica::ReplicaCopies;
use super::storage::damage_mending::Mending;
use super::storage::damaged_records::DamagedRecords;
use super::storage::examine_stripe::Examination;
use super::storage::fencing::Fencing;
use super::storage::full_disk::DiskSpace;
use super::storage::plan_parts::PlanParts;
use super::storage::put_block::BlockWrites;
use super::storage::read_file::FileReads;
use super::storage::records_and_drops::ShardRecords;
use super::tasks::Tasks;
use crate::pipeline::executor::Executor;

/// The services of a node.
pub(in crate::node) struct Services {
    // The calls on this node's own data.
    pub(in crate::node) fencing: Arc<Fencing>,
    pub(in crate::node) shard_records: Arc<ShardRecords>,
    pub(in crate::node) mending: Arc<Mending>,
    pub(in crate::node) examination: Arc<Examination>,
    pub(in crate::node) block_writes: Arc<BlockWrites>,
    pub(in crate::node) replica_copies: Arc<ReplicaCopies>,
    pub(in crate::node) file_reads: Arc<FileReads>,
    pub(in crate::node) plan_parts: Arc<PlanParts>,
    pub(in crate::node) disk_space: Arc<DiskSpace>,
    // The catalogue and the list of nodes.
    pub(in crate::node) membership: Arc<Membership>,
    pub(in crate::node) majority_checks: Arc<MajorityChecks>,
    pub(in crate::node) catalogue_calls: Arc<CatalogueCalls>,
    pub(in crate::node) rebuild: Arc<CatalogueRebuild>,
    pub(in crate::node) transfer: Arc<CatalogueTransfer>,
    pub(in crate::node) node_removal: Arc<NodeRemoval>,
    pub(in crate::node) node_replacement: Arc<NodeReplacement>,
    pub(in crate::node) maintenance: Arc<MaintenanceCalls>,
    // The calls that any client may make.
    pub(in crate::node) saves: Arc<SaveGateway>,
    pub(in crate::node) steps: Arc<CommittedSteps>,
    pub(in crate::node) outage_reader: Arc<OutageReader>,
    pub(in crate::node) status_report: Arc<StatusReport>,
    // Work without a request.
    pub(in crate::node) registration_renewal: Arc<RegistrationRenewal>,
    pub(in crate::node) catch_up: Arc<CatchUpRounds>,
    pub(in crate::node) takeover: Arc<ArchivingTakeover>,
    pub(in crate::node) retention: Arc<Retention>,
    pub(in crate::node) automatic_repair: Arc<AutomaticRepair>,
    pub(in crate::node) save_recovery: Arc<SaveRecovery>,
    pub(in crate::node) deferred_removals: Arc<DeferredRemovals>,
    pub(in crate::node) orphan_gc: Arc<OrphanGc>,
    pub(in crate::node) replica_gc: Arc<ReplicaGc>,
}

impl Services {
    /// Builds the services.
    pub(in crate::node) fn new(
        context: &Arc<NodeContext>,
        budgets: &Arc<Budgets>,
        executor: &Arc<Executor>,
        segmentation_offload: bool,
    ) -> Self {
        let catching_up = Arc::new(CatchUpRequests::default());
        let damaged_records = Arc::new(DamagedRecords::default());
        let registration = Arc::new(Registration::new(context.clone(), catching_up.clone()));

        let fencing = Arc::new(Fencing::new(context.clone(), registration.clone()));
        let shard_records =
            Arc::new(ShardRecords::new(context.clone(), fencing.clone(), damaged_records.clone()));
        let mending = Arc::new(Mending::new(
            context.clone(),
            fencing.clone(),
            budgets.clone(),
            executor.clone(),
            shard_records.clone(),
        ));
        let examination =
            Arc::new(Examination::new(context.clone(), mending.clone(), damaged_records.clone()));
        let block_writes =
            Arc::new(BlockWrites::new(context.clone(), fencing.clone(), budgets.clone()));
        let replica_copies = Arc::new(ReplicaCopies::new(
            context.clone(),
            fencing.clone(),
            budgets.clone(),
            executor.clone(),
            block_writes.clone(),
            mending.clone(),
            shard_records.clone(),
        ));
        let file_reads = Arc::new(FileReads::new(context.clone(), budgets.clone()));
        let plan_parts = Arc::new(PlanParts::new(
            context.clone(),
            fencing.clone(),
            executor.clone(),
            mending.clone(),
        ));
        let disk_space = Arc::new(DiskSpace::new(context.clone()));

        let membership = Arc::new(Membership::new(context.clone()));
        let inventory_reader = Arc::new(InventoryReader::new(context.clone()));
        let majority_checks = Arc::new(MajorityChecks::new(context.clone(), membership.clone()));
        let catalogue_calls = Arc::new(CatalogueCalls::new(context.clone()));
        let rebuild = Arc::new(CatalogueRebuild::new(
            context.clone(),
            membership.clone(),
            inventory_reader.clone(),
        ));
        let transfer = Arc::new(CatalogueTransfer::new(
            context.clone(),
            membership.clone(),
            majority_checks.clone(),
            catalogue_calls.clone(),
            rebuild.clone(),
        ));
        let node_removal = Arc::new(NodeRemoval::new(context.clone(), inventory_reader.clone()));
        let maintenance = Arc::new(MaintenanceCalls::new(context.clone()));
        let node_replacement = Arc::new(NodeReplacement::new(context.clone()));

        let removal = Arc::new(SaveRemoval::new(context.clone()));
        let saves = Arc::new(SaveGateway::new(context.clone(), removal.clone()));
        let outage_reader = Arc::new(OutageReader::new(
            context.clone(),
            fencing.clone(),
            membership.clone(),
            inventory_reader.clone(),
        ));
        let steps = Arc::new(CommittedSteps::new(
            context.clone(),
            catalogue_calls.clone(),
            outage_reader.clone(),
            removal.clone(),
        ));

        let replica_gc =
            Arc::new(ReplicaGc::new(context.clone(), shard_records.clone(), disk_space.clone()));
        let registration_renewal = Arc::new(RegistrationRenewal::new(
            context.clone(),
            executor.clone(),
            registration.clone(),
            catching_up.clone(),
            membership.clone(),
            replica_gc.clone(),
        ));
        let catch_up = Arc::new(CatchUpRounds::new(
            context.clone(),
            fencing.clone(),
            registration,
            catching_up,
            shard_records.clone(),
            membership.clone(),
        ));
        let takeover = Arc::new(ArchivingTakeover::new(context.clone()));
        let orphan_gc = Arc::new(OrphanGc::new(context.clone(), inventory_reader, removal.clone()));
        let retention = Arc::new(Retention::new(context.clone(), removal.clone()));
        let automatic_repair = Arc::new(AutomaticRepair::new(context.clone()));
        let deferred_removals = Arc::new(DeferredRemovals::new(context.clone(), removal.clone()));
        let save_recovery = Arc::new(SaveRecovery::new(
            context.clone(),
            saves.clone(),
            removal,
            deferred_removals.clone(),
            retention.clone(),
        ));
        let status_report = Arc::new(StatusReport::new(
            context.clone(),
            budgets.clone(),
            mending.clone(),
            damaged_records,
            disk_space.clone(),
            orphan_gc.clone(),
            segmentation_offload,
        ));
        Self {
            fencing,
            shard_records,
            mending,
            examination,
            block_writes,
            replica_copies,
            file_reads,
            plan_parts,
            disk_space,
            membership,
            majority_checks,
            catalogue_calls,
            rebuild,
            transfer,
            node_removal,
            node_replacement,
            maintenance,
            saves,
            steps,
            outage_reader,
            status_report,
            registration_renewal,
            catch_up,
            takeover,
            retention,
            automatic_repair,
            save_recovery,
            deferred_removals,
            orphan_gc,
            replica_gc,
        }
    }

    /// Spawns the work that the services do without a request.
    pub(in crate::node) fn spawn_background_work(&self, tasks: &Tasks) {
        tasks.spawn_until_stop(self.registration_renewal.clone().keep_registered());
        tasks.spawn_until_stop(self.takeover.clone().run_archiving_takeover());
        tasks.spawn_until_stop(self.automatic_repair.clone().run_automatic_repair());
        tasks.spawn_until_stop(self.majority_checks.clone().run_majority_checks());
        tasks.spawn_until_stop(self.majority_checks.clone().run_heartbeats());
        tasks.spawn_until_stop(self.save_recovery.clone().run_recovery_and_retention());
        tasks.spawn_until_stop(self.deferred_removals.clone().run_deferred_removals());
        tasks.spawn_until_stop(self.orphan_gc.clone().run_cluster_orphan_gc());
        tasks.spawn_until_stop(self.replica_gc.clone().run_replica_gc());
        tasks.spawn_until_stop(self.catch_up.clone().run_catch_up());
        tasks.spawn_until_stop(self.mending.clone().run_mending());
    }
}
