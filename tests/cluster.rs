//! Clusters in one process, under virtual time: the promises of docs/semantics.md, tested from
//! outside.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits in real or virtual time

#[path = "cluster/accepted_losses.rs"]
mod accepted_losses;
#[path = "cluster/admission.rs"]
mod admission;
#[path = "cluster/away.rs"]
mod away;
#[path = "cluster/by_itself.rs"]
mod by_itself;
#[path = "cluster/checks.rs"]
mod checks;
#[path = "cluster/decisions.rs"]
mod decisions;
#[path = "cluster/deferred.rs"]
mod deferred;
#[path = "cluster/gateways.rs"]
mod gateways;
#[path = "cluster/given_up.rs"]
mod given_up;
#[path = "cluster/grains.rs"]
mod grains;
#[path = "cluster/joint.rs"]
mod joint;
#[path = "cluster/joint_inputs.rs"]
mod joint_inputs;
#[path = "cluster/joint_rebuild.rs"]
mod joint_rebuild;
#[path = "cluster/joint_runs.rs"]
mod joint_runs;
#[path = "cluster/joint_silence.rs"]
mod joint_silence;
#[path = "cluster/kept_replicas.rs"]
mod kept_replicas;
#[path = "cluster/launch_races.rs"]
mod launch_races;
#[path = "cluster/launches.rs"]
mod launches;
#[path = "cluster/members.rs"]
mod members;
#[path = "cluster/moves.rs"]
mod moves;
#[path = "cluster/patience.rs"]
mod patience;
#[path = "cluster/plans.rs"]
mod plans;
#[path = "cluster/policy.rs"]
mod policy;
#[path = "cluster/rebuild.rs"]
mod rebuild;
#[path = "cluster/refused.rs"]
mod refused;
#[path = "cluster/removal.rs"]
mod removal;
#[path = "cluster/repair.rs"]
mod repair;
#[path = "cluster/repair_rate.rs"]
mod repair_rate;
#[path = "cluster/restores.rs"]
mod restores;
#[path = "cluster/ring_changes.rs"]
mod ring_changes;
#[path = "cluster/room.rs"]
mod room;
#[path = "cluster/rot.rs"]
mod rot;
#[path = "cluster/runs.rs"]
mod runs;
#[path = "cluster/saves.rs"]
mod saves;
#[path = "cluster/sizes.rs"]
mod sizes;
#[path = "cluster/slow.rs"]
mod slow;
#[path = "cluster/surplus.rs"]
mod surplus;
#[path = "cluster/takeover.rs"]
mod takeover;
#[path = "cluster/unknown.rs"]
mod unknown;
#[path = "cluster/vanished.rs"]
mod vanished;
#[path = "cluster/verify.rs"]
mod verify;
#[path = "cluster/witnesses.rs"]
mod witnesses;
