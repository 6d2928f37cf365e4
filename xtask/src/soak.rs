//! `cargo xtask soak`: runs the whole of the matrices and storms that the suite samples. The tests
//! are those of the suite; environment variables tell them how much to do.
//!
//! Tests are built optimised but with their assertions, so another profile would gain nothing.

use std::process::ExitCode;

use crate::cargo;

/// The arguments of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Soak {
    test: &'static str,
    settings: Vec<(&'static str, u64)>,
}

/// Parses the arguments. Returns a description of the mistake if they are wrong.
pub fn parse(arguments: &[&str]) -> Result<Soak, String> {
    let mut matrix = false;
    let mut settings = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let name = match *argument {
            "--matrix" => {
                matrix = true;
                continue;
            }
            "--seeds" => "RAPIDRAID_STORM_SEEDS",
            "--from" => "RAPIDRAID_STORM_FROM",
            "--jobs" => "RAPIDRAID_SOAK_JOBS",
            other => return Err(format!("soak does not know {other}")),
        };
        let number = rest.next().and_then(|text| text.parse().ok());
        settings.push((name, number.ok_or_else(|| format!("{argument} needs a number"))?));
    }
    let seeds = settings.iter().any(|(name, _)| *name == "RAPIDRAID_STORM_SEEDS");
    let from = settings.iter().any(|(name, _)| *name == "RAPIDRAID_STORM_FROM");
    match (matrix, seeds) {
        (true, false) if !from => {
            settings.push(("RAPIDRAID_MATRIX_STRIDE", 1));
            Ok(Soak { test: "syncs", settings })
        }
        (false, true) => Ok(Soak { test: "storm", settings }),
        _ => Err("soak plays either --matrix or --seeds N".to_owned()),
    }
}

/// Runs the test and shows its output: the runs per second, and the first that failed.
pub fn soak(soak: &Soak) -> ExitCode {
    let settings = soak.settings.iter().map(|(name, value)| (*name, value.to_string()));
    cargo::test(soak.test, &[], settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_say_one_thing() {
        let storm = parse(&["--seeds", "20", "--from", "7", "--jobs", "2"]).unwrap();
        assert_eq!(storm.test, "storm");
        assert_eq!(storm.settings[1], ("RAPIDRAID_STORM_FROM", 7));
        let matrix = parse(&["--matrix", "--jobs", "2"]).unwrap();
        assert_eq!(matrix.test, "syncs");
        let stride = ("RAPIDRAID_MATRIX_STRIDE", 1);
        assert_eq!(matrix.settings, [("RAPIDRAID_SOAK_JOBS", 2), stride]);
        for wrong in [
            &["--jobs", "2"][..],
            &["--seeds"],
            &["--seeds", "many"],
            &["--matrix", "--seeds", "3"],
            &["--matrix", "--from", "3"],
            &["--fast"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
