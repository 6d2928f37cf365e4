//! A rank of a storm: loads, then saves one step after the other until it is killed, and reports
//! each of its actions.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rapidraid::entropy::{Entropy, SeededEntropy};
use rapidraid::id::{LaunchId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::trainer::StagingError;
use rapidraid::trainer::fill::Segment;
use rapidraid::trainer::protocol::{Answer, Load, Place, Prepare, Request, Resumed};
use rapidraid::trainer::session::{Session, Wait};
use serde_json::{Value, json};

use crate::content::{self, Shape};
use crate::role::{failure, say, told};

/// The environment variable with a rank's settings, as JSON.
pub const SETTINGS: &str = "RAPIDRAID_TEST_RANK";

/// Time limit of one call.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a call is retried while no daemon runs.
const PATIENCE: Duration = Duration::from_secs(40);

struct Rank {
    session: Session,
    place: Place,
    shape: Shape,
    segments: Vec<Arc<Segment>>,
    random: SeededEntropy,
}

fn with_limit<T>(call: impl FnOnce(&mut Wait<'_>) -> T) -> T {
    let mut proceed = || true;
    call(&mut Wait::new(LIMIT, &mut proceed))
}

/// Returns whether a failure may be temporary: the daemon is down, or has just been started.
fn may_pass(error: &StagingError) -> bool {
    !matches!(error, StagingError::Failed(_))
        && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
        || error.kind() == ErrorKind::Busy
}

/// Retries a call while its failure may be temporary.
fn insist<T>(
    mut call: impl FnMut(&mut Wait<'_>) -> Result<T, StagingError>,
) -> Result<T, StagingError> {
    let began = Instant::now();
    loop {
        match with_limit(&mut call) {
            Err(error) if may_pass(&error) && began.elapsed() < PATIENCE => {
                sleep(Duration::from_millis(20));
            }
            ended => return ended,
        }
    }
}

/// Ends the process when the process that started it has ended.
fn end_with_the_starter() {
    std::thread::spawn(|| {
        let mut byte = [0];
        while matches!(std::io::stdin().read(&mut byte), Ok(1..)) {}
        std::process::exit(0);
    });
}

/// Runs a rank until it is killed or may not write any more.
pub fn play(folder: &Path) {
    end_with_the_starter();
    let settings: Value = serde_json::from_str(&std::env::var(SETTINGS).unwrap()).unwrap();
    if let Err(error) = run(folder, &settings) {
        say(&json!({ "ended": failure(&error) }));
    }
}

fn run(folder: &Path, settings: &Value) -> Result<(), StagingError> {
    let number = |field: &str| settings[field].as_u64();
    let launch: LaunchId = settings["launch"].as_str().unwrap().parse().unwrap();
    let (rank, world) = (number("rank").unwrap() as u32, number("world").unwrap() as u32);
    let shape = Shape::on_one_host(rank, world, number("rows").unwrap());
    let job: rapidraid::id::Job = settings["job"].as_str().unwrap().parse().unwrap();
    let mut session = insist(|wait| Session::connect(folder, None, wait))?;
    say(&json!({ "loading": number("load") }));
    let load = Load {
        job: job.clone(),
        launch: Some((launch, 1)),
        step: number("load").map(Step),
        offline: false,
        table_first: false,
        limit_ms: 0,
    };
    let loaded = insist(|wait| content::load(&mut session, &load, wait))?;
    say(&json!({ "loaded": loaded.as_ref().map(told) }));
    let place = Place { job, launch, world, rank };
    let prepare = Prepare {
        place: place.clone(),
        segment_bytes: shape.segment_bytes(),
        launch_bytes: shape.host_bytes(),
        born_ns: number("born_ns").unwrap(),
        resumed: Resumed {
            loaded: loaded.as_ref().map(|loaded| Step(loaded.step)),
            newest_seen: loaded.as_ref().and_then(|loaded| loaded.newest_committed.map(Step)),
            abandon_later: number("load").is_some(),
        },
        keep: 0,
        limit_ms: 0,
    };
    let segments = insist(|wait| session.prepare(&prepare, None, wait))?;
    let random = SeededEntropy::new(number("seed").unwrap());
    let mut rank = Rank { session, place, shape, segments, random };
    let mut step = loaded.map_or(0, |loaded| loaded.step);
    loop {
        step += 1;
        rank.save(Step(step))?;
    }
}

impl Rank {
    fn pause(&self) {
        if self.random.below(3) == 0 {
            sleep(Duration::from_millis(self.random.below(30)));
        }
    }

    /// Saves a step, or gives it up. An error ends the rank.
    fn save(&mut self, step: Step) -> Result<(), StagingError> {
        let filled = insist(|wait| self.session.fill(step, false, &mut self.segments, wait));
        let (at, fill) = match filled {
            Ok(filled) => filled.expect("it may not be skipped"),
            // The step is staged already: the answer to *staged* was lost, and the header counted.
            Err(error) if error.to_string().contains("is saved already") => return Ok(()),
            Err(error) => return Err(error),
        };
        let about = json!({
            "step": step.0, "fill": fill.to_string(), "daemon": self.session.daemon_pid(),
        });
        say(&json!({ "filling": about }));
        self.pause();
        let segment = self.segments[at].clone();
        content::write_extents(&segment.map, &self.shape, fill);
        self.pause();
        say(&json!({ "header": about }));
        content::write_header(&segment, &self.shape, self.place.launch, step, fill);
        say(&json!({ "wrote": about }));
        self.pause();
        let segment = segment.id;
        let request = Request::Staged { step, segment, fill, samples: Vec::new() };
        let mut staged = with_limit(|wait| self.session.tell("the end of a save", &request, wait));
        if self.random.below(2) == 0 && staged.as_ref().is_err_and(may_pass) {
            staged = insist(|wait| self.session.tell("the end of a save", &request, wait));
        }
        match staged {
            Ok(()) => say(&json!({ "staged": about })),
            Err(error) if may_pass(&error) => return Ok(()),
            Err(error) => {
                say(&json!({ "dropped": about, "why": failure(&error) }));
                return if error.kind() == ErrorKind::Fenced { Err(error) } else { Ok(()) };
            }
        }
        self.pause();
        if self.random.below(3) == 0 {
            self.wait(step, &about);
        }
        Ok(())
    }

    /// Waits for the commit of a step that this rank has staged.
    fn wait(&mut self, step: Step, about: &Value) {
        let request = |limit_ms| Request::Wait { step, limit_ms };
        let ended =
            with_limit(|wait| self.session.ask_until("the commit", request, &mut |_| (), wait));
        match ended {
            Ok((Answer::Committed { .. }, _)) => say(&json!({ "committed": about })),
            Ok((other, _)) => panic!("{other:?}"),
            Err(error) if may_pass(&error) => {}
            // A daemon that was restarted since then knows nothing of steps that are over.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => say(&json!({ "dropped": about, "why": failure(&error) })),
        }
    }
}
