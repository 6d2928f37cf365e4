//! What is fuzzed: a parser, inputs that it takes, and the laws that hold for whatever it is given. And the machine that feeds it.

use std::fmt::Debug;
use std::io::{IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::memory::peak_of;
use crate::mutate::{self, Draw};

/// What a parser may take: `base_bytes`, and so many bytes for each byte of its input.
#[derive(Clone, Copy)]
pub struct Memory {
    pub base_bytes: usize,
    pub per_byte: usize,
}

/// What came of one input.
#[derive(Default)]
pub struct Seen {
    pub accepted: bool,
    pub peak_bytes: usize,
}

/// `Err` says which law is broken.
pub type Verdict = Result<Seen, String>;

/// Feeds an input to the parser and holds the laws against what comes of it.
pub type Check = Box<dyn Fn(&[u8]) -> Verdict>;

/// A parser under test.
pub struct Target {
    pub name: &'static str,
    /// Cases in the suite.
    pub cases: u64,
    /// Inputs to damage; all of them must be accepted, so that the fuzzer knows what it starts from.
    pub corpus: Vec<Vec<u8>>,
    /// What its language knows, if it is one of words.
    pub words: Vec<&'static [u8]>,
    pub check: Check,
}

/// Does `work` on an input of `len_bytes` within its memory.
pub fn within<T>(
    memory: Memory,
    len_bytes: usize,
    work: impl FnOnce() -> T,
) -> Result<(T, usize), String> {
    let (done, peak_bytes) = peak_of(work);
    let limit_bytes = memory.base_bytes + memory.per_byte * len_bytes;
    if peak_bytes > limit_bytes {
        return Err(format!(
            "{peak_bytes} bytes were held for an input of {len_bytes}: {limit_bytes} are allowed"
        ));
    }
    Ok((done, peak_bytes))
}

/// The laws of bytes that stand for a value. Parsing keeps within `memory`. What parses is written, in no more bytes than were read,
/// and these parse as the same value; with a byte behind it, it is refused. `None`: it was refused as it is.
pub fn round_trip<T: PartialEq + Debug, E, F: Debug>(
    memory: Memory,
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, E>,
    write: impl Fn(&T) -> Result<Vec<u8>, F>,
) -> Result<(Option<T>, usize), String> {
    let (value, peak_bytes) = within(memory, bytes.len(), || parse(bytes))?;
    let Ok(value) = value else { return Ok((None, peak_bytes)) };
    let written = write(&value).map_err(|error| format!("{value:?} is not written: {error:?}"))?;
    if written.len() > bytes.len() {
        return Err(format!("{value:?} came in {} bytes, goes in {written:?}", bytes.len()));
    }
    if parse(&[bytes, &[0]].concat()).is_ok() {
        return Err(format!("{value:?} is also read with a byte behind it"));
    }
    match parse(&written) {
        Ok(again) if again == value => {}
        Ok(again) => return Err(format!("{value:?} reads back as {again:?}")),
        Err(_) => return Err(format!("{value:?} is written as {written:?}, which is refused")),
    }
    Ok((Some(value), peak_bytes))
}

/// As much as [`round_trip`] says to whoever looks at the value no further.
pub fn seen<T>((value, peak_bytes): (Option<T>, usize)) -> Seen {
    Seen { accepted: value.is_some(), peak_bytes }
}

/// What was asked for by the environment.
struct Wish {
    seed: u64,
    /// All of one target's cases end then; `None` is the suite's short run.
    length: Option<Duration>,
    case: Option<u64>,
    input: Option<PathBuf>,
    /// Writes each input before it is used: for what ends the process.
    trace: bool,
}

/// The seed of the suite.
const SEED: u64 = 1;

impl Wish {
    fn of_environment(targets: usize) -> Self {
        let number = |name: &str| {
            let text = std::env::var(name).ok()?;
            Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is no number")))
        };
        let seconds = number("RAPIDRAID_FUZZ_SECONDS");
        // One that runs alone has all the time.
        let is_alone = std::env::var_os("RAPIDRAID_FUZZ_TARGET").is_some();
        let targets = if is_alone { 1 } else { targets.max(1) as u32 };
        Self {
            seed: number("RAPIDRAID_FUZZ_SEED").unwrap_or(SEED),
            length: seconds.map(|all| Duration::from_secs(all) / targets),
            case: number("RAPIDRAID_FUZZ_CASE"),
            input: std::env::var_os("RAPIDRAID_FUZZ_INPUT").map(PathBuf::from),
            trace: std::env::var_os("RAPIDRAID_FUZZ_TRACE").is_some(),
        }
    }
}

/// Runs a target as the environment asks, one of `targets` that share the time; panics with the first find.
pub fn play(target: &Target, targets: usize) {
    let wish = Wish::of_environment(targets);
    for entry in &target.corpus {
        let verdict = judge(target, entry);
        let is_good = verdict.as_ref().is_ok_and(|seen| seen.accepted);
        let why = verdict.err().unwrap_or_else(|| "it is refused".to_owned());
        assert!(is_good, "{}: the corpus has {entry:?}: {why}", target.name);
    }
    if let Some(path) = &wish.input {
        let input = std::fs::read(path).unwrap();
        let seen = judge(target, &input).unwrap_or_else(|why| panic!("{}: {why}", target.name));
        println!("{}: accepted: {}, no law broken", target.name, seen.accepted);
        return;
    }
    let begun = Instant::now();
    let mut shown = begun;
    let first = wish.case.unwrap_or(0);
    let (mut accepted, mut worst) = (0u64, (0, 0));
    let mut case = first;
    loop {
        let spent = begun.elapsed();
        let is_over = match (wish.case, wish.length) {
            (Some(only), _) => case > only,
            (None, Some(length)) => case.is_multiple_of(64) && spent >= length,
            (None, None) => case >= target.cases,
        };
        if is_over {
            break;
        }
        if wish.length.is_some() && shown.elapsed() > Duration::from_secs(1) {
            shown = Instant::now();
            progress(target, case, spent);
        }
        let mut draw = Draw::new(wish.seed, target.name, case);
        let input = mutate::input(&mut draw, &target.corpus, &target.words);
        if wish.trace {
            std::fs::write(kept(target, "last"), &input).unwrap();
        }
        match judge(target, &input) {
            Ok(seen) => {
                accepted += u64::from(seen.accepted);
                worst = worst.max((seen.peak_bytes, input.len()));
            }
            Err(why) => report(target, wish.seed, case, &input, &why),
        }
        case += 1;
    }
    let cases = case - first;
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{}: seed {}, {cases} cases ({accepted} accepted) in {seconds:.1} s, {:.0}/s; at most {} bytes held, for an input of {}",
        target.name,
        wish.seed,
        cases as f64 / seconds.max(1e-9),
        worst.0,
        worst.1,
    );
}

/// The verdict, a panic included.
fn judge(target: &Target, input: &[u8]) -> Verdict {
    catch_unwind(AssertUnwindSafe(|| (target.check)(input))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("it panics: {}", text.unwrap_or("without a word")))
    })
}

fn kept(target: &Target, what: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{}-{what}", target.name))
}

fn report(target: &Target, seed: u64, case: u64, input: &[u8], why: &str) -> ! {
    let path = kept(target, &format!("{seed}-{case}"));
    std::fs::write(&path, input).unwrap();
    panic!(
        "fuzz target {name}, seed {seed}, case {case}: {why}\nits {len} bytes are in {path}; again:\n  \
        RAPIDRAID_FUZZ_SEED={seed} RAPIDRAID_FUZZ_CASE={case} cargo test --test fuzz -- --exact {name}",
        name = target.name,
        len = input.len(),
        path = path.display(),
    )
}

fn progress(target: &Target, cases: u64, spent: Duration) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r{}: {cases} cases in {} s ", target.name, spent.as_secs());
        let _ = stderr.flush();
    }
}
