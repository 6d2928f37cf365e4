//! Tests that flip single bits, drawn from a seed: in segments after they were hashed, in data that
//! was read from the cluster, and in stored files. No wrong byte is committed or loaded, and a step
//! with a good copy left can be loaded.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::trainer::daemon::trace::StagingPoint;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::launch::{Launch, Plan, ROWS, Trainer};
use crate::machine::{Cluster, files_below};
use crate::stage::Stage;

/// The number of times that each outcome was seen, by the place of the bits.
pub type Seen = BTreeMap<&'static str, BTreeMap<&'static str, u64>>;

/// Offset and length in bytes of an extent of the first rank in its segment.
const WEIGHTS: (u64, u64) = (4096, ROWS * 64);

struct Flips<'a> {
    cluster: &'a Cluster,
    stage: Stage<'a>,
    random: SeededEntropy,
    seen: Seen,
}

/// Number of launches that are tried for a flip between the hashes and the commit.
const HASHED_TRIES: u32 = 3;

/// Flips `count` bits in each place. Returns the outcomes.
pub fn play(cluster: &Cluster, count: u64, seed: u64) -> Seen {
    let stage = Stage::start(cluster, "64MiB", &[]);
    let mut flips = Flips { cluster, stage, random: SeededEntropy::new(seed), seen: Seen::new() };
    for step in (1..=count).map(|number| number * 10) {
        flips.hashed(step);
        flips.committed(step);
        flips.fetched_and_stored(step);
    }
    flips.stage.assert_sound();
    flips.seen
}

impl Flips<'_> {
    fn below(&mut self, limit: u64) -> u64 {
        let mut bytes = [0; 8];
        self.random.fill(&mut bytes);
        u64::from_le_bytes(bytes) % limit
    }

    fn flip(&mut self, path: &Path, (start, len): (u64, u64)) {
        let (at, bit) = (start + self.below(len), self.below(8));
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << bit], at).unwrap();
    }

    fn count(&mut self, place: &'static str, end: &'static str) {
        *self.seen.entry(place).or_default().entry(end).or_default() += 1;
    }

    fn segment(&self, saved: &Value) -> PathBuf {
        self.stage.segment(saved["segment"].as_str().unwrap())
    }

    /// Flips a bit after the hashes were recorded and before the commit: the step is dropped, and
    /// the one before it stays.
    fn hashed(&mut self, step: u64) {
        let is_done = (1..=HASHED_TRIES).any(|number| self.try_hashed(step, number));
        assert!(is_done, "the daemon was always stopped before it had answered the rank");
    }

    /// Returns `false` if the daemon was stopped before it had answered the rank.
    fn try_hashed(&mut self, step: u64, number: u32) -> bool {
        let job = format!("hashed-{step}-{number}");
        let mut launch = Launch::ready(&self.stage, &Plan::new(&job, 1));
        launch.save(1);
        launch.wait(1);
        self.stage.watch.set_trap(StagingPoint::Saving, &[self.stage.pid()], Signal::STOP);
        let saved = match launch.ranks[0].step("save", 2) {
            Ok(saved) => saved,
            Err(refused) => {
                refused.says("Timeout", &["the end of a save"]);
                self.stage.signal(Signal::CONT);
                launch.kill();
                self.stage.free(&job);
                return false;
            }
        };
        self.stage.until("the save begins", || self.stage.watch.has_sprung());
        self.flip(&self.segment(&saved), WEIGHTS);
        self.stage.signal(Signal::CONT);
        launch.ranks[0].step("wait", 2).unwrap_err().says("Corrupt", &["weights"]);
        assert_eq!(self.stage.committed(&job), [1]);
        assert_eq!(self.stage.load(&job, None).unwrap().unwrap().step, 1);
        self.count("segments, hashed and not committed", "found: not committed, not loaded");
        launch.kill();
        self.stage.free(&job);
        true
    }

    /// Flips a bit in a segment of a committed step: the step is loaded from the cluster.
    fn committed(&mut self, step: u64) {
        let job = format!("committed-{step}");
        let mut launch = Launch::ready(&self.stage, &Plan::new(&job, 1));
        let saved = launch.ranks[0].step("save", 1).unwrap();
        launch.wait(1);
        self.flip(&self.segment(&saved), WEIGHTS);
        let mut reader = Trainer::start(&self.stage.dir(), None);
        let load = json!({ "do": "load", "job": job });
        reader.ask(&load).unwrap_err().says("Corrupt", &["weights is damaged"]);
        let healed = reader.ask(&load).unwrap();
        assert_eq!((&healed["memory"], &healed["fill"]), (&json!(false), &saved["fill"]));
        self.count("segments of committed steps", "found: loaded from the cluster");
        launch.kill();
        self.stage.free(&job);
    }

    /// Flips a bit in the memory into which a step was read, and one in a file on a node's disk.
    fn fetched_and_stored(&mut self, step: u64) {
        let job = format!("stored-{step}");
        let before = stored(self.cluster);
        let mut launch = Launch::ready(&self.stage, &Plan::new(&job, 1));
        let fill = launch.save(1);
        launch.wait(1);
        launch.kill();
        let files: Vec<PathBuf> =
            stored(self.cluster).into_iter().filter(|path| !before.contains(path)).collect();
        self.stage.forget(&job);
        let struck = files[self.below(files.len() as u64) as usize].clone();
        let len = std::fs::metadata(&struck).unwrap().len();
        self.flip(&struck, (0, len));
        let mut reader = Trainer::start(&self.stage.dir(), None);
        assert_eq!(reader.ask(&json!({ "do": "open", "job": job })).unwrap(), 1);
        assert_eq!(reader.tell("check").unwrap()["fill"], json!(fill));
        reader.tell("release").unwrap();
        let end = match struck.exists() {
            true => "not read: another copy was",
            false => "found: set aside, loaded from another copy",
        };
        self.count("stored files", end);
        let files = self.stage.files("fetched");
        self.flip(&self.stage.dir().join("fetched").join(&files[0]), (0, WEIGHTS.1));
        let load = json!({ "do": "load", "job": job });
        reader.ask(&load).unwrap_err().says("Corrupt", &["is damaged"]);
        let healed = reader.ask(&load).unwrap();
        assert_eq!((&healed["memory"], &healed["fill"]), (&json!(false), &json!(fill)));
        self.count("memory that a step was read into", "found: read again");
        reader.kill();
        self.stage.forget(&job);
    }
}

/// Returns the files of blocks on all nodes.
fn stored(cluster: &Cluster) -> Vec<PathBuf> {
    let nodes = cluster.path("cluster/nodes");
    let files = files_below(&nodes).into_iter().filter(|file| file.contains("/shards/"));
    files.map(|file| nodes.join(file)).collect()
}
