//! Fuzzing of untrusted bytes: every parser of bytes from the network, from a disk or from people
//! gets damaged inputs. It does not panic, allocates no memory for lengths that are only claimed,
//! and writes and reads again every value that it accepts.
//!
//! The suite runs some thousands of cases of each target, always the same ones; `cargo xtask fuzz`
//! runs for any length of time.
#![allow(clippy::disallowed_methods)] // reads fixtures, writes what it finds, and stops by the clock

#[path = "fuzz/files.rs"]
mod files;
#[path = "fuzz/fixtures.rs"]
mod fixtures;
#[path = "fuzz/frames.rs"]
mod frames;
#[path = "fuzz/identities.rs"]
mod identities;
#[path = "fuzz/memory.rs"]
mod memory;
#[path = "fuzz/mutate.rs"]
mod mutate;
#[path = "fuzz/orders.rs"]
mod orders;
#[path = "fuzz/records.rs"]
mod records;
#[path = "fuzz/staging.rs"]
mod staging;
#[path = "fuzz/tables.rs"]
mod tables;
#[path = "fuzz/target.rs"]
mod target;
#[path = "fuzz/text.rs"]
mod text;
#[path = "fuzz/wire.rs"]
mod wire;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

macro_rules! targets {
    ($($module:ident::$name:ident),* $(,)?) => {
        /// All targets. Their number divides the time of a long run.
        const TARGETS: &[&str] = &[$(stringify!($name)),*];

        $(
            #[test]
            fn $name() {
                let target = $module::$name();
                assert_eq!(target.name, stringify!($name), "a test has the name of its target");
                target::play(&target, TARGETS.len());
            }
        )*
    };
}

targets![
    wire::requests,
    wire::answers,
    wire::messages,
    wire::evidence,
    frames::frames,
    orders::orders,
    records::records,
    records::record_bodies,
    records::folders,
    files::files,
    files::tails,
    tables::tables,
    tables::table_columns,
    staging::staging_messages,
    staging::staging_frames,
    staging::segments,
    staging::segment_headers,
    text::names,
    text::configurations,
    text::code_reports,
    identities::identities,
];
