//! The calls on the data that this node stores, and the state of its disk.

pub(super) mod copy_replica;
pub(super) mod damage_mending;
pub(super) mod damaged_records;
pub(super) mod error;
pub(super) mod examine_stripe;
pub(super) mod fencing;
pub(super) mod full_disk;
pub(super) mod node_inventory;
pub(super) mod plan_parts;
pub(super) mod purge;
pub(super) mod put_block;
pub(super) mod read_file;
pub(super) mod record_names;
pub(super) mod records_and_drops;
pub(super) mod surplus_copies;
