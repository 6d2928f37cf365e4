//! A trainer as a process of its own: the test binary, started again, executes orders from stdin
//! and answers on stdout.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rapidraid::id::{FillId, LaunchId, Step};
use rapidraid::trainer::StagingError;
use rapidraid::trainer::fill::Segment;
use rapidraid::trainer::load::LoadedStep;
use rapidraid::trainer::protocol::{
    Answer, Hosts, Load, LoadFrom, Place, Prepare, Request, Resumed, Sample,
};
use rapidraid::trainer::session::{Session, Wait};
use serde_json::{Value, json};

use crate::content::{self, Shape};

/// The environment variable with the staging folder; a process that has it is a trainer.
pub const FOLDER: &str = "RAPIDRAID_TEST_TRAINER";
/// The environment variable with the path of the token file, if there is one.
pub const TOKEN: &str = "RAPIDRAID_TEST_TOKEN";
/// The first character of every line that is an answer; the test binary prints other lines too.
pub const MARK: char = '@';

/// Time limit of a call if the order has none.
pub const CALL_LIMIT: Duration = Duration::from_secs(20);

/// The place and shape of a rank in its launch.
struct Rank {
    place: Place,
    shape: Shape,
}

/// The state of a trainer.
struct Trainer {
    folder: PathBuf,
    token: Option<PathBuf>,
    session: Option<Session>,
    rank: Option<Rank>,
    segments: Vec<Arc<Segment>>,
    /// The index of the segment that is being filled, the filling and the step.
    filling: Option<(usize, FillId, Step)>,
    loaded: Option<LoadedStep>,
}

/// Prints an answer for the process that started this one.
pub fn say(line: &Value) {
    let mut out = std::io::stdout().lock();
    // The process that reads may have ended.
    let _ = writeln!(out, "\n{MARK}{line}").and_then(|()| out.flush());
}

/// Returns a failure as JSON.
pub fn failure(error: &StagingError) -> Value {
    json!({ "kind": format!("{:?}", error.kind()), "message": error.to_string(), "hint": error.hint() })
}

/// Runs a trainer if this process is one, and never returns then.
pub fn play_if_started() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let token = std::env::var_os(TOKEN).map(PathBuf::from);
    if std::env::var_os(crate::rank::SETTINGS).is_some() {
        crate::rank::play(&folder);
        std::process::exit(0);
    }
    let mut trainer = Trainer {
        folder,
        token,
        session: None,
        rank: None,
        segments: Vec::new(),
        filling: None,
        loaded: None,
    };
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let order: Value = serde_json::from_str(&line).unwrap();
        let mut proceed = || true;
        let limit = order["limit_ms"].as_u64().map_or(CALL_LIMIT, Duration::from_millis);
        let mut wait = Wait::new(limit, &mut proceed);
        match trainer.obey(&order, &mut wait) {
            Ok(answer) => say(&json!({ "ok": answer })),
            Err(error) => say(&json!({ "error": failure(&error) })),
        }
    }
    std::process::exit(0);
}

fn number(order: &Value, field: &str) -> Option<u64> {
    order[field].as_u64()
}

fn launch_of(order: &Value) -> LaunchId {
    order["launch"].as_str().unwrap().parse().unwrap()
}

impl Trainer {
    fn session(&mut self, wait: &mut Wait<'_>) -> Result<&mut Session, StagingError> {
        if self.session.is_none() {
            self.session = Some(Session::connect(&self.folder, self.token.as_deref(), wait)?);
        }
        Ok(self.session.as_mut().unwrap())
    }

    fn obey(&mut self, order: &Value, wait: &mut Wait<'_>) -> Result<Value, StagingError> {
        match order["do"].as_str().unwrap() {
            "connect" => Ok(json!(self.session(wait)?.instance().to_string())),
            "prepare" => self.prepare(order, wait),
            "fill" => self.fill(order, wait),
            "write" => {
                let (at, fill, _) = self.filling.unwrap();
                content::write_extents(&self.segments[at].map, &self.rank().shape, fill);
                Ok(Value::Null)
            }
            "header" => {
                let (at, fill, step) = self.filling.unwrap();
                let rank = self.rank();
                let launch = rank.place.launch;
                content::write_header(&self.segments[at], &rank.shape, launch, step, fill);
                Ok(Value::Null)
            }
            "say" => self.staged(order, wait),
            "save" => {
                let filled = self.fill(order, wait)?;
                for what in ["write", "header"] {
                    self.obey(&json!({ "do": what }), wait)?;
                }
                self.staged(order, wait)?;
                Ok(filled)
            }
            "give_up" => {
                let (_, fill, step) = self.filling.unwrap();
                let why = order["why"].as_str().unwrap_or("why").to_owned();
                let request = Request::GiveUp { step, fill, why };
                self.session(wait)?.tell("giving up", &request, wait)?;
                Ok(Value::Null)
            }
            "wait" => {
                let step = Step(number(order, "step").unwrap());
                let request = |limit_ms| Request::Wait { step, limit_ms };
                let (answer, _) =
                    self.session(wait)?.ask_until("the commit", request, &mut |_| (), wait)?;
                let Answer::Committed { save, notes } = answer else { panic!("{answer:?}") };
                Ok(json!({ "save": save.to_string(), "notes": notes }))
            }
            "notices" => {
                let (answer, _) = self.session(wait)?.ask("notices", &Request::Notices, wait)?;
                let Answer::Notices(notices) = answer else { panic!("{answer:?}") };
                let one = |notice: &rapidraid::trainer::protocol::Notice| match &notice.failure {
                    Some(failure) => json!([notice.step.0, failure.message]),
                    None => json!([notice.step.0, notice.warning]),
                };
                Ok(notices.iter().map(one).collect())
            }
            "load" => {
                let load = load_of(order);
                let from = from_of(order);
                let found = content::load_from(self.session(wait)?, &load, from, wait)?;
                Ok(found.map_or(Value::Null, |found| told(&found)))
            }
            "open" => {
                let load = load_of(order);
                let from = from_of(order);
                self.loaded = self.session(wait)?.load(&load, from, &mut |_, _| (), wait)?;
                Ok(json!(self.loaded.as_ref().map(|loaded| loaded.step().0)))
            }
            "check" => {
                let mut loaded = self.loaded.take().unwrap();
                let found = match from_of(order) {
                    LoadFrom::Anywhere => content::check(self.session(wait)?, &mut loaded, wait),
                    LoadFrom::Cluster => {
                        content::check_hosts(self.session(wait)?, &mut loaded, wait)
                    }
                };
                self.loaded = Some(loaded);
                Ok(told(&found?))
            }
            "release" => {
                let loaded = self.loaded.take().unwrap();
                self.session(wait)?.release(loaded, wait)?;
                Ok(Value::Null)
            }
            "corrupt" => {
                let loaded = self.loaded.take().unwrap();
                let error = StagingError::Corrupt { name: "weights".into() };
                self.session(wait)?.give_up_load(loaded, &error, wait)?;
                Ok(Value::Null)
            }
            "segments" => {
                let ids = self.segments.iter().map(|segment| segment.id.to_string());
                Ok(ids.collect())
            }
            "let go" => {
                self.segments.clear();
                Ok(Value::Null)
            }
            other => panic!("no order {other}"),
        }
    }

    fn rank(&self) -> &Rank {
        self.rank.as_ref().unwrap()
    }

    fn prepare(&mut self, order: &Value, wait: &mut Wait<'_>) -> Result<Value, StagingError> {
        let (rank, world) = (order["rank"].as_u64().unwrap(), order["world"].as_u64().unwrap());
        let (rank, world) = (rank as u32, world as u32);
        let mut shape = Shape::on_one_host(rank, world, number(order, "rows").unwrap());
        let mut hosts = None;
        if let Some(names) = order["hosts"].as_array() {
            let own = number(order, "host").unwrap() as u32;
            let names: Vec<_> = names.iter().map(|name| name.as_str().unwrap().into()).collect();
            shape.first = own * world;
            (shape.rank, shape.world) = (shape.first + rank, names.len() as u32 * world);
            hosts = Some(Hosts { own, names });
        }
        let job = order["job"].as_str().unwrap().parse().unwrap();
        let place = Place { job, launch: launch_of(order), world, rank };
        let launch_bytes = shape.host_bytes();
        let prepare = Prepare {
            place: place.clone(),
            segment_bytes: shape.segment_bytes(),
            launch_bytes,
            born_ns: number(order, "born_ns").unwrap(),
            resumed: Resumed {
                loaded: number(order, "loaded").map(Step),
                newest_seen: number(order, "newest_seen").map(Step),
                abandon_later: order["abandon_later"] == true,
            },
            keep: number(order, "keep").unwrap_or(0) as u32,
            limit_ms: 0,
        };
        self.segments.clear();
        self.rank = Some(Rank { place, shape });
        self.segments = self.session(wait)?.prepare(&prepare, hosts.as_ref(), wait)?;
        Ok(json!(self.segments.len()))
    }

    fn fill(&mut self, order: &Value, wait: &mut Wait<'_>) -> Result<Value, StagingError> {
        let step = Step(number(order, "step").unwrap());
        self.session(wait)?;
        let session = self.session.as_mut().unwrap();
        let or_skip = order["or_skip"] == true;
        let (at, fill) = match session.fill(step, or_skip, &mut self.segments, wait)? {
            Ok(filled) => filled,
            Err(why) => return Ok(json!({ "skipped": why })),
        };
        self.filling = Some((at, fill, step));
        Ok(json!({ "fill": fill.to_string(), "segment": self.segments[at].id.to_string() }))
    }

    fn staged(&mut self, order: &Value, wait: &mut Wait<'_>) -> Result<Value, StagingError> {
        let (at, fill, step) = self.filling.unwrap();
        let sample = |hash: u64| Sample { name: "weights".into(), hash: [hash as u8; 16] };
        let samples = number(order, "sample").map(sample).into_iter().collect();
        let request = Request::Staged { step, segment: self.segments[at].id, fill, samples };
        self.session(wait)?.tell("the end of a save", &request, wait)?;
        Ok(Value::Null)
    }
}

fn from_of(order: &Value) -> LoadFrom {
    match order["from_cluster"] == true {
        true => LoadFrom::Cluster,
        false => LoadFrom::Anywhere,
    }
}

fn load_of(order: &Value) -> Load {
    Load {
        job: order["job"].as_str().unwrap().parse().unwrap(),
        launch: number(order, "number").map(|number| (launch_of(order), number as u32)),
        step: number(order, "step").map(Step),
        offline: order["offline"] == true,
        table_first: order["table_first"] == true,
        limit_ms: 0,
    }
}

/// Returns a load as JSON.
pub fn told(found: &content::Loaded) -> Value {
    json!({
        "step": found.step, "fill": found.fill.to_string(), "world": found.world,
        "fills": found.fills.iter().map(|fill| fill.to_string()).collect::<Vec<_>>(),
        "memory": found.is_from_memory, "read": found.read_bytes, "newest": found.newest_committed,
    })
}
