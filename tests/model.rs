//! One node against a model of it: random calls from a seed, restarts and power cuts. The answers
//! and the holdings of both must be equal.
#![allow(clippy::disallowed_methods)] // a cluster in one process waits in virtual time

#[path = "model/draw.rs"]
mod draw;
#[path = "model/node.rs"]
mod node;
#[path = "model/state.rs"]
mod state;

use draw::Draw;
use node::Subject;
use world::runs::{number, play, play_all};

/// Number of seeds in the test suite.
const SEEDS: u64 = 30;
/// Number of operations in a run.
const DEEDS: usize = 60;

async fn run_of(seed: u64) {
    let draw = Draw::new(seed);
    let mut subject = Subject::start(&draw, seed).await;
    for at in 0..DEEDS {
        let deed = draw.deed(&subject.model);
        match draw.below(20) {
            0 => subject.restart().await,
            1..3 => subject.cut_power_amid(&draw, &deed).await,
            _ => subject.answers_alike(&deed).await,
        }
        subject.holds_alike(|| format!("deed {at} of seed {seed}: {deed:?}"));
        subject.tells_alike(&draw).await;
    }
}

fn run(seed: u64) -> Result<(), String> {
    let replay = format!("RAPIDRAID_MODEL_SEED={seed} cargo test --workspace --test model");
    play(run_of(seed)).map_err(|why| format!("{why}\n{replay}"))
}

#[test]
fn a_node_is_what_the_model_says() {
    let seeds: Vec<u64> = match number("RAPIDRAID_MODEL_SEED") {
        Some(seed) => vec![seed],
        None => {
            let from = number("RAPIDRAID_MODEL_FROM").unwrap_or(0);
            (from..from + number("RAPIDRAID_MODEL_SEEDS").unwrap_or(SEEDS)).collect()
        }
    };
    play_all(&seeds, run);
}
