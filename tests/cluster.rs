//! Clusters in one process, under virtual time: what the promises of docs/semantics.md look like from outside.

mod world;

#[path = "cluster/plans.rs"]
mod plans;
#[path = "cluster/refused.rs"]
mod refused;
#[path = "cluster/removal.rs"]
mod removal;
#[path = "cluster/restores.rs"]
mod restores;
#[path = "cluster/rot.rs"]
mod rot;
#[path = "cluster/saves.rs"]
mod saves;
#[path = "cluster/sizes.rs"]
mod sizes;
#[path = "cluster/takeover.rs"]
mod takeover;
