//! `cargo xtask kills`: kills real daemons, by the tests `kills`, `sixteen` and `staging`, and by
//! `python/tests/test_kills.py` and `test_hosts.py`. Environment variables tell the tests how much
//! to do.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use crate::cargo;
use crate::python::{run, with_wheel};

/// The arguments of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Kills {
    test: &'static str,
    /// A part of the names of the tests to run. Tests that match `skip` are left out.
    only: &'static str,
    skip: &'static [&'static str],
    settings: Vec<(&'static str, String)>,
}

const CELLS: &str = "at_a_stage";
const RANDOM: &str = "at_any_moment";
const DAY: &str = "a_day_of_faults";
const STANDSTILL: &str = "do_not_stand_still";
/// A file of pytest instead of a test of cargo.
const TORCH: &str = "tests/test_kills.py";
/// The same for a job of several hosts.
const HOSTS: &str = "tests/test_hosts.py";
const FLIPS: &str = "a_bit_that_turns";
const STAGING: &str = "no_whole_step_is_lost";
const SERVERS: &str = "outlives_the_daemons_that_serve_it";

/// Parses the arguments. Returns a description of the mistake if they are wrong.
pub fn parse(arguments: &[&str]) -> Result<Kills, String> {
    let mut what = Vec::new();
    let mut settings = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let (name, number) = match *argument {
            "--cells" => {
                settings.push(("RAPIDRAID_KILLS_CELL", "all".to_owned()));
                what.push(("kills", CELLS, &[][..]));
                continue;
            }
            "--servers" => {
                settings.push(("RAPIDRAID_KILLS_SERVERS", "all".to_owned()));
                what.push(("staging", SERVERS, &[][..]));
                continue;
            }
            "--restores" => {
                what.push(("sixteen", "", &[STANDSTILL][..]));
                continue;
            }
            "--standstill" => {
                what.push(("sixteen", STANDSTILL, &[][..]));
                continue;
            }
            "--cell" => {
                what.push(("kills", CELLS, &[][..]));
                ("RAPIDRAID_KILLS_CELL", false)
            }
            "--random" => {
                what.push(("kills", RANDOM, &[][..]));
                ("RAPIDRAID_KILLS_RANDOM", true)
            }
            "--day" => {
                what.push(("kills", DAY, &[][..]));
                ("RAPIDRAID_KILLS_DAY", true)
            }
            "--staging" => {
                what.push(("staging", STAGING, &[][..]));
                ("RAPIDRAID_KILLS_STAGING", true)
            }
            "--flips" => {
                what.push(("staging", FLIPS, &[][..]));
                ("RAPIDRAID_FLIPS", true)
            }
            "--torch" => {
                what.push((TORCH, "", &[][..]));
                ("RAPIDRAID_KILLS_TORCH", true)
            }
            "--hosts" => {
                what.push((HOSTS, "whoever_is_killed", &[][..]));
                ("RAPIDRAID_KILLS_HOSTS", true)
            }
            "--result" => {
                // The test runs in its own folder, so the path must be absolute.
                let path = rest.next().and_then(|path| std::path::absolute(path).ok());
                let path = path.ok_or("--result needs a file")?;
                settings.push(("RAPIDRAID_KILLS_RESULT", path.display().to_string()));
                continue;
            }
            "--seed" => ("RAPIDRAID_KILLS_SEED", true),
            "--jobs" => ("RAPIDRAID_SOAK_JOBS", true),
            "--mib" => ("RAPIDRAID_KILLS_MIB", true),
            other => return Err(format!("kills does not know {other}")),
        };
        let text = rest.next().filter(|text| !number || text.parse::<u64>().is_ok());
        let text = text.ok_or_else(|| format!("{argument} needs a value"))?;
        settings.push((name, (*text).to_owned()));
    }
    match what[..] {
        [(test, only, skip)] => Ok(Kills { test, only, skip, settings }),
        _ => {
            let all = "--cells, --cell, --random, --day, --restores, --standstill, --staging, --servers, \
                       --flips, --torch, --hosts";
            Err(format!("kills plays one of {all}"))
        }
    }
}

/// Runs the tests and shows their output meanwhile.
pub fn kills(kills: &Kills) -> ExitCode {
    if [TORCH, HOSTS].contains(&kills.test) {
        return match kills_with_torch(kills) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("cargo xtask kills: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    // The tests run one after the other, so that each measurement has the machine for itself.
    let mut arguments = vec!["--test-threads", "1", kills.only];
    arguments.extend(kills.skip.iter().flat_map(|skip| ["--skip", skip]));
    cargo::test(kills.test, &arguments, kills.settings.iter().cloned())
}

fn kills_with_torch(kills: &Kills) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let environment = with_wheel(root, "dev", &[])?;
    let mut tests = environment.pytest(kills.test);
    if !kills.only.is_empty() {
        tests.args(["-k", kills.only]);
    }
    // Each launch reports its result at once.
    tests.arg("-s");
    run(tests.envs(kills.settings.iter().cloned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_say_one_thing() {
        let random = parse(&["--random", "1000", "--seed", "7"]).unwrap();
        assert_eq!((random.test, random.only), ("kills", RANDOM));
        assert_eq!(random.settings[1], ("RAPIDRAID_KILLS_SEED", "7".to_owned()));
        let cell = parse(&["--cell", "head:archive.piece"]).unwrap();
        assert_eq!(cell.settings, [("RAPIDRAID_KILLS_CELL", "head:archive.piece".to_owned())]);
        let day = parse(&["--day", "60"]).unwrap();
        assert_eq!((day.only, day.settings[0].0), (DAY, "RAPIDRAID_KILLS_DAY"));
        let restores = parse(&["--restores", "--mib", "512"]).unwrap();
        assert_eq!((restores.test, restores.skip), ("sixteen", &[STANDSTILL][..]));
        assert_eq!(parse(&["--standstill"]).unwrap().only, STANDSTILL);
        let staging = parse(&["--staging", "1000", "--result", "/tmp/seen.json"]).unwrap();
        assert_eq!((staging.test, staging.only), ("staging", STAGING));
        assert_eq!(staging.settings[1], ("RAPIDRAID_KILLS_RESULT", "/tmp/seen.json".to_owned()));
        let flips = parse(&["--flips", "100"]).unwrap();
        assert_eq!((flips.test, flips.only), ("staging", FLIPS));
        let torch = parse(&["--torch", "20"]).unwrap();
        assert_eq!((torch.test, torch.settings[0].0), (TORCH, "RAPIDRAID_KILLS_TORCH"));
        let hosts = parse(&["--hosts", "20", "--seed", "3"]).unwrap();
        assert_eq!((hosts.test, hosts.settings[0].0), (HOSTS, "RAPIDRAID_KILLS_HOSTS"));
        assert_eq!(parse(&["--cells"]).unwrap().only, CELLS);
        for wrong in [
            &[][..],
            &["--seed", "1"],
            &["--random"],
            &["--random", "many"],
            &["--cells", "--standstill"],
            &["--staging"],
            &["--staging", "9", "--result"],
            &["--fast"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
