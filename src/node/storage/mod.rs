//! Calls on the data that this node holds, and the state of its disk.

pub(super) mod blocks;
pub(super) mod damage;
pub(super) mod disk_space;
pub(super) mod examine;
pub(super) mod fencing;
pub(super) mod health;
pub(super) mod inventory;
pub(super) mod purge;
pub(super) mod records;
