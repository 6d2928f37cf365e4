//! The calls on the data that this node stores, and the state of its disk.

mod copy_replica;
pub(super) mod damage;
pub(super) mod disk_space;
pub(super) mod examine;
pub(super) mod fencing;
pub(super) mod health;
pub(super) mod inventory;
mod plan_parts;
pub(super) mod purge;
pub(super) mod put_block;
mod read_file;
pub(super) mod records;
