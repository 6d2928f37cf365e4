//! The connection to the staging daemon, for Python.
#![allow(clippy::disallowed_methods)] // a configuration lies outside any store

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use rapidraid::config::{ClientConfig, MAX_FILE_BYTES, Sources};
use rapidraid::format::step_labels::LabelChange;
use rapidraid::id::{FillId, IdError, Job, Label, LaunchId, Step};
use rapidraid::kind::ErrorKind;
use rapidraid::trainer::StagingError;
use rapidraid::trainer::fill::Segment;
use rapidraid::trainer::protocol::{
    Answer, Hosts, Load, LoadFrom, Place, Prepare, Request, Resumed, Sample,
};
use rapidraid::trainer::segment::{HEADER_BYTES, Header, stage};
use rapidraid::trainer::session::{Wait, default_dir};

use crate::buffer::SegmentBuffer;
use crate::errors::{of_staging, raise};
use crate::loaded::LoadedStep;
use crate::table::{TableWriter, table_error};

/// The staging folder, the token's file or `None`, and the cluster's id.
pub type StagingPlace = (PathBuf, Option<PathBuf>, String);

/// Returns the place of the staging daemon according to a client's configuration.
pub fn staging_place(py: Python<'_>, file: &Path) -> PyResult<StagingPlace> {
    let failed = |kind, message: String| {
        raise(py, kind, &message, "docs/configuration.md has every setting")
    };
    let read = std::fs::read(file);
    let bytes =
        read.map_err(|error| failed(ErrorKind::NotFound, format!("{}: {error}", file.display())))?;
    if bytes.len() > MAX_FILE_BYTES {
        return Err(failed(ErrorKind::Invalid, format!("{} is too long", file.display())));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| failed(ErrorKind::Invalid, format!("{} is not UTF-8", file.display())))?;
    let env = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let options = Default::default();
    let sources = Sources { file, text: &text, env: &env, options: &options };
    let config = ClientConfig::parse(sources).map_err(|e| failed(e.kind(), e.to_string()))?;
    let cluster = config.membership.cluster;
    let dir = config.staging.dir.unwrap_or_else(|| default_dir(cluster));
    Ok((dir, config.staging.token, cluster.to_string()))
}

/// A connection to the staging daemon, and the segments of a rank.
#[pyclass(module = "rapidraid._native")]
pub struct Session {
    session: rapidraid::trainer::session::Session,
    place: Option<Place>,
    segments: Vec<Arc<Segment>>,
}

/// Runs `work` with the interpreter released for other threads. Ctrl-C ends its waiting.
pub(crate) fn waiting<T: Send>(
    py: Python<'_>,
    seconds: f64,
    work: impl FnOnce(&mut Wait<'_>) -> Result<T, StagingError> + Send,
) -> PyResult<T> {
    let limit = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
    let mut signal: Option<PyErr> = None;
    let done = py.detach(|| {
        let mut proceed = || match Python::attach(|py| py.check_signals()) {
            Ok(()) => true,
            Err(error) => {
                signal = Some(error);
                false
            }
        };
        work(&mut Wait::new(limit, &mut proceed))
    });
    match (done, signal) {
        (_, Some(signal)) => Err(signal),
        (Ok(done), None) => Ok(done),
        (Err(error), None) => Err(of_staging(py, &error)),
    }
}

fn named<T: std::str::FromStr<Err = IdError>>(py: Python<'_>, text: &str) -> PyResult<T> {
    text.parse().map_err(|error: IdError| raise(py, ErrorKind::Invalid, &error.to_string(), ""))
}

/// A failure or a warning about a step: step; code, message and hint of the failure or `None`; and
/// the warning.
type PyNotice = (u64, Option<PyErrParts>, String);
type PyErrParts = (u32, String, String);

#[pymethods]
impl Session {
    /// Connects to the daemon whose staging folder is `dir`.
    #[new]
    #[pyo3(signature = (dir, token=None, timeout=10.0))]
    fn new(py: Python<'_>, dir: PathBuf, token: Option<PathBuf>, timeout: f64) -> PyResult<Self> {
        let session = waiting(py, timeout, |wait| {
            rapidraid::trainer::session::Session::connect(&dir, token.as_deref(), wait)
        })?;
        Ok(Self { session, place: None, segments: Vec::new() })
    }

    /// The id of the staging folder.
    #[getter]
    fn instance(&self) -> String {
        self.session.instance().to_string()
    }

    /// The id of the cluster that the daemon saves to.
    #[getter]
    fn cluster(&self) -> String {
        self.session.cluster().to_string()
    }

    /// The process id of the daemon.
    #[getter]
    fn daemon_pid(&self) -> u32 {
        self.session.daemon_pid()
    }

    /// Makes the first segment for a rank of a launch. Returns the number of segments.
    #[pyo3(signature = (job, launch, world, rank, *, segment_bytes, launch_bytes, born_ns, loaded=None, newest_seen=None, abandon_later=false, keep=0, hosts=None, timeout=60.0))]
    #[expect(clippy::too_many_arguments, reason = "the package passes them by name")]
    fn prepare(
        &mut self,
        py: Python<'_>,
        job: &str,
        launch: &str,
        world: u32,
        rank: u32,
        segment_bytes: u64,
        launch_bytes: u64,
        born_ns: u64,
        loaded: Option<u64>,
        newest_seen: Option<u64>,
        abandon_later: bool,
        keep: u32,
        hosts: Option<(u32, Vec<String>)>,
        timeout: f64,
    ) -> PyResult<usize> {
        let place = Place { job: named(py, job)?, launch: named(py, launch)?, world, rank };
        let (loaded, newest_seen) = (loaded.map(Step), newest_seen.map(Step));
        let resumed = Resumed { loaded, newest_seen, abandon_later };
        let prepare = Prepare {
            place: place.clone(),
            segment_bytes,
            launch_bytes,
            born_ns,
            resumed,
            keep,
            limit_ms: 0,
        };
        // Release the old segments first: the new ones may need their memory.
        self.segments.clear();
        let session = &mut self.session;
        let hosts = hosts.map(|(own, names)| Hosts { own, names });
        let made = waiting(py, timeout, |wait| session.prepare(&prepare, hosts.as_ref(), wait))?;
        self.segments = made;
        self.place = Some(place);
        Ok(self.segments.len())
    }

    /// Makes the segments that are ordered and not made yet. Returns the number of segments now.
    fn make_ordered_segments(&mut self, py: Python<'_>, timeout: f64) -> PyResult<usize> {
        let (session, segments) = (&mut self.session, &mut self.segments);
        waiting(py, timeout, |wait| session.make_ordered_segments(segments, wait))?;
        Ok(self.segments.len())
    }

    /// Returns the data of a segment.
    fn segment(&self, py: Python<'_>, at: usize) -> PyResult<SegmentBuffer> {
        let segment = self.segments.get(at).cloned();
        let segment =
            segment.ok_or_else(|| raise(py, ErrorKind::Invalid, "there is no such segment", ""))?;
        Ok(SegmentBuffer::new(segment))
    }

    /// Asks into which segment a step is to be written. Returns its index, the id of the filling,
    /// and the number of segments now. If all ranks skip the step, which happens only with
    /// `or_skip`, returns `None` as the index and the reason as the second value.
    fn fill(
        &mut self,
        py: Python<'_>,
        step: u64,
        or_skip: bool,
        timeout: f64,
    ) -> PyResult<(Option<usize>, String, usize)> {
        let (session, segments) = (&mut self.session, &mut self.segments);
        let filled =
            waiting(py, timeout, |wait| session.fill(Step(step), or_skip, segments, wait))?;
        Ok(match filled {
            Ok((at, fill)) => (Some(at), fill.to_string(), self.segments.len()),
            Err(why) => (None, why, self.segments.len()),
        })
    }

    /// Writes the table and reports that a step is staged in a segment. Returns the length of the
    /// table in bytes.
    #[pyo3(signature = (step, at, fill, table, samples, timeout))]
    #[expect(clippy::too_many_arguments, reason = "the package passes them in one place")]
    fn stage(
        &mut self,
        py: Python<'_>,
        step: u64,
        at: usize,
        fill: &str,
        table: &TableWriter,
        samples: Vec<(String, [u8; 16])>,
        timeout: f64,
    ) -> PyResult<usize> {
        let invalid = |what: &str| raise(py, ErrorKind::Invalid, what, "");
        let (bytes, end) = table.encode().map_err(|error| table_error(py, &error))?;
        let segment = self.segments.get(at).ok_or_else(|| invalid("there is no such segment"))?;
        let place = self.place.as_ref().ok_or_else(|| invalid("call prepare first"))?;
        let fill: FillId = named(py, fill)?;
        let header = Header {
            segment: segment.id,
            launch: place.launch,
            world: place.world,
            rank: place.rank,
            step: Step(step),
            fill,
            table_offset: HEADER_BYTES + end,
            table_bytes: bytes.len() as u64,
        };
        stage(&segment.map, header, &bytes).map_err(|error| {
            raise(
                py,
                ErrorKind::Invalid,
                &format!("the table of step {step} does not fit into its segment: {error}"),
                "call prepare again: the state has grown",
            )
        })?;
        let samples = samples.into_iter().map(|(name, hash)| Sample { name, hash }).collect();
        let request = Request::Staged { step: Step(step), segment: segment.id, fill, samples };
        let session = &mut self.session;
        waiting(py, timeout, |wait| session.tell("the end of a save", &request, wait))?;
        Ok(bytes.len())
    }

    /// Abandons the filling of a step.
    fn give_up(
        &mut self,
        py: Python<'_>,
        step: u64,
        fill: &str,
        why: String,
        timeout: f64,
    ) -> PyResult<()> {
        let request = Request::GiveUp { step: Step(step), fill: named(py, fill)?, why };
        let session = &mut self.session;
        waiting(py, timeout, |wait| session.tell("giving up a save", &request, wait))
    }

    /// Waits for the commit of a step. Returns the save's id and remarks; or `None` and the
    /// progress if it is not committed before the timeout.
    fn wait(
        &mut self,
        py: Python<'_>,
        step: u64,
        timeout: f64,
    ) -> PyResult<(Option<String>, Vec<String>)> {
        let session = &mut self.session;
        let request = |limit_ms| Request::Wait { step: Step(step), limit_ms };
        let answer = waiting(py, timeout, |wait| {
            match session.ask_until("the commit", request, &mut |_| (), wait) {
                Ok((answer, _)) => Ok(Ok(answer)),
                Err(StagingError::Deadline { state, .. }) => Ok(Err(state)),
                Err(error) => Err(error),
            }
        })?;
        match answer {
            Ok(Answer::Committed { save, notes }) => Ok((Some(save.to_string()), notes)),
            Ok(_) => Err(raise(py, ErrorKind::Internal, "the daemon gave another answer", "")),
            Err(state) => Ok((None, vec![state])),
        }
    }

    /// Returns the failures and warnings that arose since the last call.
    fn notices(&mut self, py: Python<'_>, timeout: f64) -> PyResult<Vec<PyNotice>> {
        let session = &mut self.session;
        let (answer, _) =
            waiting(py, timeout, |wait| session.ask("notices", &Request::Notices, wait))?;
        let Answer::Notices(notices) = answer else {
            return Err(raise(py, ErrorKind::Internal, "the daemon gave another answer", ""));
        };
        let notice = |notice: rapidraid::trainer::protocol::Notice| {
            let failure = notice.failure.map(|f| (f.code, f.message, f.hint));
            (notice.step.0, failure, notice.warning)
        };
        Ok(notices.into_iter().map(notice).collect())
    }

    /// Opens a step for loading, by default the resume point. Returns `None` if the job has no
    /// step.
    #[pyo3(signature = (job, *, step=None, launch=None, number=0, offline=false, table_first=false, from_cluster=false, on_progress=None, timeout=600.0))]
    #[expect(clippy::too_many_arguments, reason = "the package passes them by name")]
    fn load(
        &mut self,
        py: Python<'_>,
        job: &str,
        step: Option<u64>,
        launch: Option<&str>,
        number: u32,
        offline: bool,
        table_first: bool,
        from_cluster: bool,
        on_progress: Option<Py<PyAny>>,
        timeout: f64,
    ) -> PyResult<Option<LoadedStep>> {
        let job: Job = named(py, job)?;
        let launch: Option<LaunchId> = launch.map(|launch| named(py, launch)).transpose()?;
        let launch = launch.map(|launch| (launch, number));
        let step = step.map(Step);
        let load = Load { job, launch, step, offline, table_first, limit_ms: 0 };
        let from = if from_cluster { LoadFrom::Cluster } else { LoadFrom::Anywhere };
        let session = &mut self.session;
        let mut failed: Option<PyErr> = None;
        let loaded = waiting(py, timeout, |wait| {
            let mut told = |done: u64, total: u64| {
                let Some(on_progress) = &on_progress else { return };
                let called = Python::attach(|py| on_progress.call1(py, (done, total)).map(drop));
                if let Err(error) = called {
                    failed = Some(error);
                }
            };
            session.load(&load, from, &mut told, wait)
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(loaded?.map(LoadedStep::new)),
        }
    }

    /// Reads the extents of one window of a load by ranges. The extents of the previous window
    /// become unreadable.
    fn read_extents(
        &mut self,
        py: Python<'_>,
        loaded: &mut LoadedStep,
        extents: Vec<u32>,
        timeout: f64,
    ) -> PyResult<()> {
        let step = loaded.open_mut(py)?;
        let session = &mut self.session;
        waiting(py, timeout, |wait| session.read_extents(step, &extents, &mut |_, _| (), wait))
    }

    /// Ends a load. `damaged` is the name of a tensor or value that did not match its hash.
    #[pyo3(signature = (loaded, damaged=None, timeout=30.0))]
    fn release(
        &mut self,
        py: Python<'_>,
        loaded: &mut LoadedStep,
        damaged: Option<String>,
        timeout: f64,
    ) -> PyResult<()> {
        let Some(step) = loaded.take() else { return Ok(()) };
        let session = &mut self.session;
        waiting(py, timeout, |wait| match damaged {
            None => session.release(step, wait),
            Some(name) => session.give_up_load(step, &StagingError::Corrupt { name }, wait),
        })
    }

    /// Returns the steps of a job: number, whether it is committed, whether it is in memory, and
    /// length in bytes.
    fn steps(
        &mut self,
        py: Python<'_>,
        job: &str,
        timeout: f64,
    ) -> PyResult<Vec<(u64, bool, bool, u64)>> {
        let request = Request::Steps { job: named(py, job)? };
        let session = &mut self.session;
        let (answer, _) = waiting(py, timeout, |wait| session.ask("the steps", &request, wait))?;
        let Answer::Steps(steps) = answer else {
            return Err(raise(py, ErrorKind::Internal, "the daemon gave another answer", ""));
        };
        let step = |step: rapidraid::trainer::protocol::StepInfo| {
            (step.step.0, step.is_committed, step.is_in_memory, step.len_bytes)
        };
        Ok(steps.into_iter().map(step).collect())
    }

    /// Removes a committed step.
    fn remove(&mut self, py: Python<'_>, job: &str, step: u64, timeout: f64) -> PyResult<()> {
        let request = Request::Remove { job: named(py, job)?, step: Step(step) };
        let session = &mut self.session;
        waiting(py, timeout, |wait| session.tell("the removal", &request, wait))
    }

    /// Adds a label to a committed step, or removes one if `is_removed`.
    #[pyo3(signature = (job, step, label, is_removed, timeout))]
    fn label(
        &mut self,
        py: Python<'_>,
        job: &str,
        step: u64,
        label: &str,
        is_removed: bool,
        timeout: f64,
    ) -> PyResult<()> {
        let (job, label) = (named(py, job)?, named(py, label)?);
        let change = if is_removed { LabelChange::Remove } else { LabelChange::Add };
        let session = &mut self.session;
        waiting(py, timeout, |wait| session.label_step(job, Step(step), label, change, wait))
    }

    /// Returns the labelled steps of a job, in order, with their labels.
    fn labels(
        &mut self,
        py: Python<'_>,
        job: &str,
        timeout: f64,
    ) -> PyResult<Vec<(u64, Vec<String>)>> {
        let job = named(py, job)?;
        let session = &mut self.session;
        let labels = waiting(py, timeout, |wait| session.list_labels(job, wait))?;
        let text = |(step, labels): (Step, Vec<Label>)| {
            (step.0, labels.into_iter().map(String::from).collect())
        };
        Ok(labels.into_iter().map(text).collect())
    }

    /// Ends the session. Segments of this process that hold no staged step become free for others.
    fn leave(&mut self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.segments.clear();
        let session = &mut self.session;
        waiting(py, timeout, |wait| session.leave(wait))
    }

    /// Ends the session in a forked child, and releases the child's copies of everything that
    /// belongs to the parent.
    fn leave_to_parent(&mut self) {
        self.session.leave_to_parent();
        self.segments.clear();
    }
}
