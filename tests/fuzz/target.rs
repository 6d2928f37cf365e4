//! Fuzz targets (a parser, inputs that it accepts, and the laws that hold for any input) and the
//! engine that runs them.

use std::fmt::Debug;
use std::io::{IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::memory::peak_of;
use crate::mutate::{self, Draw};

/// Memory limit of a parser: `base_bytes`, and `per_byte` more for each byte of its input.
#[derive(Clone, Copy)]
pub struct Memory {
    pub base_bytes: usize,
    pub per_byte: usize,
}

/// The result of one input.
#[derive(Default)]
pub struct Seen {
    pub accepted: bool,
    pub peak_bytes: usize,
}

/// The outcome of a check; `Err` names the law that was broken.
pub type Verdict = Result<Seen, String>;

/// A function that gives an input to the parser and checks the laws on the result.
pub type Check = Box<dyn Fn(&[u8]) -> Verdict>;

/// A parser under test.
pub struct Target {
    pub name: &'static str,
    /// Number of cases that the test suite runs.
    pub cases: u64,
    /// Inputs to damage. The parser must accept all of them, so that the fuzzer starts from known
    /// inputs.
    pub corpus: Vec<Vec<u8>>,
    /// Words of the parser's language, if it has words.
    pub words: Vec<&'static [u8]>,
    pub check: Check,
}

/// Runs `work` on an input of `len_bytes`. Returns its result and the peak memory in bytes, or an
/// error if the peak exceeds `memory`.
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

/// Checks the laws of bytes that represent a value. Parsing stays within `memory`. A parsed value
/// is written in no more bytes than were read, and these bytes parse as the same value; the input
/// with one more byte is refused.
///
/// Returns the value, or `None` if the input was refused, and the peak memory in bytes.
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

/// Converts the result of [`round_trip`] for callers that do not inspect the value.
pub fn seen<T>((value, peak_bytes): (Option<T>, usize)) -> Seen {
    Seen { accepted: value.is_some(), peak_bytes }
}

/// The run that the environment requests.
struct Wish {
    seed: u64,
    /// How long one target runs; `None` is the suite's short run.
    length: Option<Duration>,
    case: Option<u64>,
    input: Option<PathBuf>,
    /// Whether each input is written to a file before it is used, which keeps an input that ends
    /// the process.
    trace: bool,
}

/// The seed of the test suite.
const SEED: u64 = 1;

impl Wish {
    fn of_environment(targets: usize) -> Self {
        let number = |name: &str| {
            let text = std::env::var(name).ok()?;
            Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is no number")))
        };
        let seconds = number("RAPIDRAID_FUZZ_SECONDS");
        // A target that runs alone gets all the time.
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

/// Runs a target as the environment requests; `targets` of them share the time. Panics at the first
/// broken law.
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

/// Returns the verdict on an input; a panic of the check is an `Err`.
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
        RAPIDRAID_FUZZ_SEED={seed} RAPIDRAID_FUZZ_CASE={case} cargo test --workspace --test fuzz -- --exact {name}",
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
