//! The project's recipes: `cargo xtask test` runs what CI runs.
fn main() {}
