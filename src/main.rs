//! The `rapidraid` binary.
fn main() {}
