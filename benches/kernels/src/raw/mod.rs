//! All code of this package that needs `unsafe`: memory on huge pages, the loops of the floor, and
//! ISA-L. The functions of each module are safe.

pub mod floor;
pub mod isal;
pub mod memory;
