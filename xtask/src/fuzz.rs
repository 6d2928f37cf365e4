//! `cargo xtask fuzz`: runs the targets of `tests/fuzz.rs` for any length of time, from another
//! seed each time.
//!
//! Tests are built optimised but with their assertions, so that an overflow which a release build
//! would wrap is detected.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::cargo;

/// The file that lists the targets as `module::name,`.
const TARGETS: &str = include_str!("../../tests/fuzz.rs");
/// Default duration in seconds.
const SECONDS: u64 = 60;

/// The arguments of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Fuzz {
    /// Duration of all targets together.
    seconds: u64,
    target: Option<String>,
    seed: Option<u64>,
}

/// Parses the arguments. Returns a description of the mistake if they are wrong.
pub fn parse(arguments: &[&str]) -> Result<Fuzz, String> {
    let mut fuzz = Fuzz { seconds: SECONDS, target: None, seed: None };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let value = rest.next();
        let number = || {
            let number = value.and_then(|text| text.parse().ok());
            number.ok_or_else(|| format!("{argument} needs a number"))
        };
        match *argument {
            "--seconds" => fuzz.seconds = number()?,
            "--seed" => fuzz.seed = Some(number()?),
            "--target" => {
                let name = value.ok_or("--target needs a name")?;
                if !targets().any(|known| known == *name) {
                    let known = targets().collect::<Vec<_>>().join(", ");
                    return Err(format!("there is no target {name}: it is one of {known}"));
                }
                fuzz.target = Some((*name).to_owned());
            }
            other => return Err(format!("fuzz does not know {other}")),
        }
    }
    Ok(fuzz)
}

fn targets() -> impl Iterator<Item = &'static str> {
    let list = TARGETS.split_once("targets![").map_or("", |(_, list)| list);
    list.lines().filter_map(|line| Some(line.trim().strip_suffix(',')?.split_once("::")?.1))
}

/// Runs the targets and shows their output: the cases per second, or the failures that they found.
pub fn fuzz(fuzz: &Fuzz) -> ExitCode {
    let seed = fuzz.seed.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs())
    });
    println!("seed {seed}, {} s", fuzz.seconds);
    let mut arguments = vec!["--test-threads", "1"];
    let mut settings = vec![
        ("RAPIDRAID_FUZZ_SEED", seed.to_string()),
        ("RAPIDRAID_FUZZ_SECONDS", fuzz.seconds.to_string()),
    ];
    if let Some(target) = &fuzz.target {
        arguments.extend(["--exact", target]);
        settings.push(("RAPIDRAID_FUZZ_TARGET", target.clone()));
    }
    cargo::test("fuzz", &arguments, settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_named() {
        let all = parse(&["--target", "frames", "--seconds", "5", "--seed", "7"]).unwrap();
        assert_eq!(all, Fuzz { seconds: 5, target: Some("frames".into()), seed: Some(7) });
        assert_eq!(parse(&[]).unwrap(), Fuzz { seconds: SECONDS, target: None, seed: None });
        for wrong in
            [&["--seconds"][..], &["--seconds", "x"], &["--target", "frame"], &["frames", "1"]]
        {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
