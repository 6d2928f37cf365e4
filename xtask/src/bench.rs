//! `cargo xtask bench`: runs the kernel benchmarks and draws their record. The package that
//! measures is not a default member of the workspace. It is compiled here, in release mode, and
//! receives the paths of the files to write.

use std::path::Path;
use std::process::ExitCode;

use crate::cargo::cargo;

const RECORD: &str = "benches/record/kernels.json";
const PAGE: &str = "docs/benchmarks/kernels.md";
const PICTURE: &str = "docs/benchmarks/kernels.svg";
/// A short run is no record: its files stay in the build folder.
const SHORT_RECORD: &str = "target/bench/kernels.json";
const SHORT_PICTURE: &str = "target/bench/kernels.svg";

/// Converts the arguments to those of the program that measures. Returns a description of the
/// mistake if they are wrong.
pub fn parse(arguments: &[&str]) -> Result<Vec<String>, String> {
    let owned = |arguments: &[&str]| arguments.iter().map(|text| (*text).to_owned()).collect();
    match arguments {
        ["plot"] => Ok(owned(&["plot", RECORD, PICTURE])),
        ["kernels", "--as", name, rest @ ..] => {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            if name.is_empty() || !name.chars().all(plain) {
                return Err(format!("--as {name:?}: expected lower-case letters, digits and `-`"));
            }
            if rest.contains(&"--only") || rest.contains(&"--short") {
                return Err("--as is for a whole run".to_owned());
            }
            let mut asked: Vec<String> = owned(rest);
            for (option, file) in [("--record", RECORD), ("--page", PAGE), ("--picture", PICTURE)] {
                asked.extend([
                    option.to_owned(),
                    file.replace("kernels.", &format!("kernels-{name}.")),
                ]);
            }
            Ok(asked)
        }
        ["kernels", rest @ ..] => {
            let mut asked: Vec<String> = owned(rest);
            if rest.contains(&"--only") || rest.contains(&"--help") {
                return Ok(asked);
            }
            if rest.contains(&"--short") {
                asked
                    .extend(["--record", SHORT_RECORD, "--picture", SHORT_PICTURE].map(Into::into));
            } else {
                asked.extend(
                    ["--record", RECORD, "--page", PAGE, "--picture", PICTURE].map(Into::into),
                );
            }
            Ok(asked)
        }
        other => Err(format!(
            "cargo xtask bench knows no {:?}: kernels, trainers or plot",
            other.join(" ")
        )),
    }
}

/// Compiles the program that measures and runs it in the root of the repository.
pub fn bench(arguments: &[String]) -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let mut command = cargo();
    command.args(["run", "--locked", "--release", "--package", "rapidraid-kernel-bench", "--"]);
    match command.args(arguments).current_dir(root).status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cannot start cargo: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_run_writes_to_the_repository() {
        let writes_page = |arguments: &[&str]| parse(arguments).unwrap().contains(&PAGE.to_owned());
        assert!(writes_page(&["kernels"]));
        assert!(!writes_page(&["kernels", "--short"]));
        assert_eq!(parse(&["kernels", "--only", "hop"]).unwrap(), ["--only", "hop"]);
        let other = parse(&["kernels", "--as", "epyc"]).unwrap();
        assert!(other.contains(&"docs/benchmarks/kernels-epyc.md".to_owned()), "{other:?}");
        assert!(parse(&["kernels", "--as", "../x"]).is_err());
        assert!(parse(&["kernels", "--as", "x", "--short"]).is_err());
        assert_eq!(parse(&["plot"]).unwrap(), ["plot", RECORD, PICTURE]);
        assert!(parse(&["disks"]).is_err());
    }
}
