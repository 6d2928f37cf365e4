//! Measures the speed of the kernels. Each group asks one question of this library, of other
//! libraries for the same work, and of loops that only move the bytes. `docs/benchmarks/kernels.md`
//! explains the output.
#![allow(clippy::disallowed_methods)] // measures this machine and writes records: nothing here replays from a seed

mod bars;
mod check;
mod groups;
mod harness;
mod lanes;
mod picture;
mod raw;
mod record;
mod report;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rapidraid::gf::Kernel;

use groups::{Cast, Planned};
use lanes::{Lanes, Place};
use raw::isal::Isal;
use raw::memory::Arena;
use record::{GroupRecord, Machine, Record};

const HELP: &str = "\
cargo xtask bench kernels [--short] [--only WORDS] [--json]
cargo xtask bench plot

--short       few rounds over shorter buffers, 20 s at most: a trial, not a measurement
--only WORDS  measure only the questions whose line on the terminal contains these words; writes nothing
--json        print one JSON document instead of tables";

/// The amount of measuring.
#[derive(Debug, PartialEq)]
struct Effort {
    cache_rounds: usize,
    memory_rounds: usize,
    /// Bytes of each buffer of a hop, and of each of the many buffers of a codec.
    memory_bytes: [usize; 2],
    draws: usize,
}

const FULL: Effort =
    Effort { cache_rounds: 41, memory_rounds: 15, memory_bytes: [64 << 20, 32 << 20], draws: 32 };
const SHORT: Effort =
    Effort { cache_rounds: 5, memory_rounds: 3, memory_bytes: [16 << 20, 4 << 20], draws: 4 };

/// The arguments of the command line.
#[derive(Debug, Default, PartialEq)]
struct Asked {
    short: bool,
    json: bool,
    only: Option<String>,
    record: Option<PathBuf>,
    page: Option<PathBuf>,
    picture: Option<PathBuf>,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["plot", record, picture] => {
            let drawn = picture::draw(&Record::read(Path::new(record))?);
            write(Path::new(picture), &drawn)
        }
        ["--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        ref rest => run(&parse(rest)?),
    }
}

fn parse(arguments: &[&str]) -> Result<Asked> {
    let mut asked = Asked::default();
    let mut rest = arguments.iter();
    while let Some(&argument) = rest.next() {
        let mut value = || rest.next().with_context(|| format!("{argument} needs a value"));
        match argument {
            "--short" => asked.short = true,
            "--json" => asked.json = true,
            "--only" => asked.only = Some((*value()?).to_owned()),
            "--record" => asked.record = Some(value()?.into()),
            "--page" => asked.page = Some(value()?.into()),
            "--picture" => asked.picture = Some(value()?.into()),
            other => bail!("no such argument: {other}\n\n{HELP}"),
        }
    }
    let writes = asked.record.is_some() || asked.page.is_some() || asked.picture.is_some();
    ensure!(asked.only.is_none() || !writes, "--only measures a part, which is no record");
    Ok(asked)
}

fn run(asked: &Asked) -> Result<()> {
    let record = measure(asked)?;
    if asked.json {
        print!("{}", record.to_json()?);
    } else {
        print!("{}", report::terminal(&record)?);
    }
    if let Some(path) = &asked.record {
        write(path, &record.to_json()?)?;
    }
    if let Some(path) = &asked.page {
        let page = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        write(path, &report::rewritten(&page, &record)?)?;
    }
    if let Some(path) = &asked.picture {
        write(path, &picture::draw(&record))?;
    }
    Ok(())
}

fn title(planned: &Planned) -> String {
    format!("{}, {}", planned.question, planned.place.name())
}

/// Returns the groups to measure.
fn choose(asked: &Asked) -> Result<Vec<Planned>> {
    let words = asked.only.as_deref().unwrap_or_default();
    let chosen: Vec<_> =
        groups::all().into_iter().filter(|planned| title(planned).contains(words)).collect();
    ensure!(
        !chosen.is_empty(),
        "--only {words:?}: no question contains these words: run without --only to see all"
    );
    Ok(chosen)
}

fn measure(asked: &Asked) -> Result<Record> {
    let chosen = choose(asked)?;
    let effort = if asked.short { SHORT } else { FULL };
    let (isal, mut skipped) = Isal::find();
    if !has_simd_accel() {
        skipped.push("reed-solomon-erasure with simd-accel: it needs AVX2".to_owned());
    }
    let cast = Cast { isal, kernel: Kernel::from_env()?, draws: effort.draws };
    let pinned_to = match harness::pin() {
        Ok(cpu) => Some(cpu),
        Err(error) => {
            skipped.push(format!("staying on one processor: {error:#}"));
            None
        }
    };
    let (mut outcomes, mut huge_pages_mib) = (Vec::new(), 0);
    for planned in chosen {
        eprintln!("{}", title(&planned));
        let (bytes, rounds) = effort.of(&planned);
        let shape = planned.shape;
        let count = Lanes::count(shape.inputs, shape.outputs);
        let mut arena = Arena::new(count, bytes)?;
        let mut lanes = Lanes::new(&mut arena, shape.inputs, shape.outputs, bytes)?;
        outcomes.push(harness::measure(planned.group(&cast)?, &mut lanes, rounds)?);
        huge_pages_mib = huge_pages_mib.max(record::huge_pages_mib());
    }
    Ok(Record {
        date: record::today(),
        command: command(asked),
        compiler: env!("COMPILER").to_owned(),
        machine: Machine::this(pinned_to, huge_pages_mib),
        peers: peers(&cast),
        skipped,
        groups: outcomes.iter().map(GroupRecord::new).collect(),
        bars: bars::judge(&cast, &outcomes)?,
    })
}

impl Effort {
    /// Returns the length of each buffer in bytes, and the number of rounds.
    fn of(&self, planned: &Planned) -> (usize, usize) {
        let [few, many] = self.memory_bytes;
        match planned.place {
            Place::Cache => (planned.shape.cache_bytes, self.cache_rounds),
            Place::Memory if planned.counted_buffers == 1 => (few, self.memory_rounds),
            Place::Memory => (many, self.memory_rounds),
        }
    }
}

/// Returns whether this processor has the instructions for which the C code of
/// `reed-solomon-erasure` is compiled. That code does not check itself.
fn has_simd_accel() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    return true;
}

fn peers(cast: &Cast) -> Vec<String> {
    let mut peers: Vec<String> =
        cast.isal.iter().map(|isal| format!("{} runs {}", isal.name(), isal.runs())).collect();
    let arch = "compiled for Haswell unless RUST_REED_SOLOMON_ERASURE_ARCH says otherwise";
    peers.push("reed-solomon-erasure 6.0 with default features".to_owned());
    peers.push(format!("reed-solomon-erasure 5.0 with simd-accel, {arch}"));
    peers.push("reed-solomon-simd 3.1 by detection (AVX2 at most)".to_owned());
    peers.push("BLAKE3 1.8 by detection".to_owned());
    peers
}

/// Returns the command as a person types it, without the paths of one machine.
fn command(asked: &Asked) -> String {
    let mut command = String::new();
    if std::env::var_os(raw::isal::PATH_VARIABLE).is_some() {
        command += &format!("{}=... ", raw::isal::PATH_VARIABLE);
    }
    if let Some(kernel) = std::env::var_os(rapidraid::gf::kernel::ENV) {
        command += &format!("{}={} ", rapidraid::gf::kernel::ENV, kernel.to_string_lossy());
    }
    command + "cargo xtask bench kernels" + if asked.short { " --short" } else { "" }
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::write(path, text).with_context(|| path.display().to_string())?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_say_what_is_written() {
        let asked = parse(&["--short", "--record", "a", "--page", "b"]).unwrap();
        assert!(asked.short && asked.record.is_some() && asked.picture.is_none());
        for (words, count) in [("A hop with two local blocks, in cache", 1), ("no such", 0)] {
            let asked = parse(&["--only", words]).unwrap();
            assert_eq!(choose(&asked).map_or(0, |chosen| chosen.len()), count, "{words}");
        }
        for wrong in [&["--record"][..], &["--long"], &["--only", "hop", "--page", "b"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    /// Every contestant that a bar names must exist in some group, except for contestants that only
    /// some machines have.
    #[test]
    fn bars_name_rows() {
        let cast = Cast { isal: Isal::find().0, kernel: Kernel::active(), draws: 2 };
        let outcome = |planned: &Planned| harness::Outcome {
            question: planned.question,
            place: planned.place,
            buffer_bytes: 1,
            work_bytes: 1,
            contestants: planned.group(&cast).unwrap().contestants.iter().map(sample).collect(),
        };
        let outcomes: Vec<_> = groups::all().iter().map(outcome).collect();
        let verdicts = bars::judge(&cast, &outcomes).unwrap();
        let may_lack = ["ISA-L", "AVX2", "SIMD feature", "GF(2^16)", "written over", "from memory"];
        for verdict in verdicts.iter().filter(|verdict| verdict.measured.is_none()) {
            let is_known = may_lack.iter().any(|words| verdict.measure.contains(words));
            assert!(is_known, "no row for a bar: {}", verdict.measure);
        }
    }

    fn sample(contestant: &harness::Contestant<'_>) -> harness::Measured {
        let (name, role) = (contestant.name.clone(), contestant.role);
        harness::Measured { name, role, repetitions: 1, seconds: vec![1.0] }
    }

    /// Every contestant must produce the bytes of the portable kernel.
    #[test]
    fn every_contestant_is_right() {
        let cast = Cast { isal: Isal::find().0, kernel: Kernel::active(), draws: 3 };
        for planned in groups::all() {
            let (shape, bytes) = (planned.shape, 64 << 10);
            let mut arena = Arena::new(Lanes::count(shape.inputs, shape.outputs), bytes).unwrap();
            let mut lanes = Lanes::new(&mut arena, shape.inputs, shape.outputs, bytes).unwrap();
            for contestant in &mut planned.group(&cast).unwrap().contestants {
                let outcome = contestant.check.run(&mut contestant.run, &mut lanes);
                assert!(outcome.is_ok(), "{}, {}: {outcome:?}", planned.question, contestant.name);
            }
        }
    }
}
