//! Everything here that needs `unsafe`: memory on huge pages, the loops that set the floor, and ISA-L. What each
//! module offers is safe; nothing else of this package has the word.

pub mod floor;
pub mod isal;
pub mod memory;
