//! Many runs of simulated clusters. Each run has its own thread, runtime and paused time. A panic
//! in any of its tasks fails the run.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once};

/// Maximum number of recorded failures. More would add no information.
const MAX_FAILURES: usize = 20;

thread_local! {
    /// The panics on this thread during the run, including those of detached tasks.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("RAPIDRAID_LOG").is_some() {
            let filter = tracing_subscriber::EnvFilter::from_env("RAPIDRAID_LOG");
            tracing_subscriber::fmt()
                .with_ansi(false)
                .without_time()
                .with_env_filter(filter)
                .with_writer(std::io::stderr)
                .init();
        }
        std::panic::set_hook(Box::new(|info| {
            let text = info.to_string();
            PANICS.with_borrow_mut(|panics| panics.push(text));
        }));
    });
}

/// Runs `run` to its end. Returns its result, or the text of all panics in it.
pub fn play<T>(run: impl Future<Output = T>) -> Result<T, String> {
    note_panics();
    PANICS.take();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap();
    let ended = catch_unwind(AssertUnwindSafe(|| runtime.block_on(run)));
    drop(runtime);
    let panics = PANICS.take();
    match ended {
        Ok(result) if panics.is_empty() => Ok(result),
        _ => Err(panics.join("\n")),
    }
}

/// Returns the number in the environment variable `name`, if it is set. Panics if it is not a
/// number.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Runs `run` for each case of `all` on `RAPIDRAID_SOAK_JOBS` threads (default 1). Panics with the
/// first failures, in order of the cases.
pub fn play_all<C: Copy + Send + Sync + std::fmt::Debug>(
    all: &[C],
    run: impl Fn(C) -> Result<(), String> + Sync,
) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let began = std::time::Instant::now();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&case) = all.get(at) else { return };
            if let Err(why) = run(case) {
                eprintln!("{case:?} failed: {why}");
                failures.lock().unwrap().push((at, why));
                if failures.lock().unwrap().len() >= MAX_FAILURES {
                    next.store(all.len(), Ordering::Relaxed);
                }
            }
        }
    };
    let jobs = number("RAPIDRAID_SOAK_JOBS").unwrap_or(1);
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("{} runs in {seconds:.1} s: {:.1} a second", all.len(), all.len() as f64 / seconds);
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    let lines: Vec<_> = failures.iter().map(|(at, why)| format!("{:?}: {why}", all[*at])).collect();
    assert!(lines.is_empty(), "{} runs failed:\n{}", lines.len(), lines.join("\n\n"));
}
