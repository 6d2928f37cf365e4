//! The Python package: its environment for tests, its wheel, and its checks.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cargo::{cargo, target_dir};

/// The oldest interpreter for which the extension is built.
const OLDEST: (u32, u32) = (3, 11);

/// The environment in which the package is built and tested.
pub struct Environment {
    root: PathBuf,
    venv: PathBuf,
    /// Whether torch could be installed.
    pub has_torch: bool,
}

/// The reason why the package cannot be tested here.
pub enum Unable {
    /// A tool or package that it needs is missing.
    Missing(String),
    /// A step that should work failed.
    Failed(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Unable {
    fn from(error: E) -> Self {
        Unable::Failed(error.into())
    }
}

fn quiet(command: &mut Command) -> bool {
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Creates the environment with torch and the wheel of this profile, for a command that needs both.
/// Returns an error if torch cannot be installed.
pub fn with_wheel(root: &Path, profile: &str, packages: &[&str]) -> Result<Environment> {
    let environment = match Environment::make(root) {
        Ok(environment) if environment.has_torch => environment,
        Ok(_) => bail!("torch cannot be installed here"),
        Err(Unable::Missing(what)) => bail!("{what}"),
        Err(Unable::Failed(error)) => return Err(error),
    };
    if !packages.is_empty() {
        let mut pip = environment.command("python");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        run(pip.args(packages))?;
    }
    environment.install(&environment.wheel(profile)?)?;
    Ok(environment)
}

impl Environment {
    /// Creates the environment, or reuses the one of an earlier call.
    pub fn make(root: &Path) -> Result<Self, Unable> {
        let missing = |what: &str| Err(Unable::Missing(what.to_owned()));
        let check = format!("import sys, venv, ensurepip; sys.exit(sys.version_info < {OLDEST:?})");
        if !quiet(Command::new("python3").args(["-c", &check])) {
            let (major, minor) = OLDEST;
            return missing(&format!("there is no python3 of {major}.{minor} or later with venv"));
        }
        for tool in ["gcc", "readelf"] {
            if !quiet(Command::new(tool).arg("--version")) {
                return missing(&format!("{tool} is not installed"));
            }
        }
        let venv = root.join("target/python/venv");
        let mut make = Command::new("python3");
        make.arg(root.join("python/tools/test_environment.py")).arg(&venv);
        let status = make.status().context("cannot start python3")?;
        let has_torch = match status.code() {
            Some(0) => true,
            Some(3) => false,
            _ => {
                return missing("the packages that the tests need cannot be installed (see above)");
            }
        };
        Ok(Self { root: root.to_owned(), venv, has_torch })
    }

    /// Returns a command for a program of the environment, run in the package's folder.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.venv.join("bin").join(program));
        command.current_dir(self.root.join("python"));
        command.env("VIRTUAL_ENV", &self.venv).env_remove("RAPIDRAID_CONFIG");
        command
    }

    /// Builds the wheel of a profile with the program in it. Returns the path of the wheel.
    pub fn wheel(&self, profile: &str) -> Result<PathBuf> {
        let mut build = cargo();
        build.args(["build", "--locked", "--package", "rapidraid", "--bin", "rapidraid"]);
        run(build.args(["--profile", profile]).current_dir(&self.root))?;
        let folder = if profile == "dev" { "debug" } else { profile };
        self.wheel_with(&target_dir(&self.root).join(folder).join("rapidraid"), profile)
    }

    /// Builds the wheel with a program that is built already. Returns the path of the wheel.
    pub fn wheel_with(&self, program: &Path, profile: &str) -> Result<PathBuf> {
        let inside = self.root.join("python/rapidraid/_bin");
        std::fs::create_dir_all(&inside).with_context(|| inside.display().to_string())?;
        let to = inside.join("rapidraid");
        // The file is removed first, because a daemon of an earlier run may still execute it.
        let _ = std::fs::remove_file(&to);
        std::fs::copy(program, &to).with_context(|| program.display().to_string())?;
        run(Command::new("strip").arg(&to))?;
        let out = self.root.join("target/python/wheels");
        let _ = std::fs::remove_dir_all(&out);
        let mut maturin = self.command("maturin");
        maturin.args(["build", "--locked", "--quiet", "--profile", profile, "--out"]).arg(&out);
        run(&mut maturin)?;
        let wheels = std::fs::read_dir(&out).with_context(|| out.display().to_string())?;
        let mut wheels = wheels.flatten().map(|entry| entry.path());
        wheels.next().context("maturin made no wheel")
    }

    /// Returns a command that runs the tests of a file or folder below `python/`. The tests, and
    /// the programs that they start, use the installed package instead of the folder beside the
    /// tests.
    pub fn pytest(&self, tests: &str) -> Command {
        let mut command = self.command("python");
        command.env("PYTHONSAFEPATH", "1");
        // Each test starts several processes that import torch. Without compiled modules, each of
        // them would compile it again, which takes longer than most tests.
        command.env_remove("PYTHONDONTWRITEBYTECODE");
        command.env("PYTHONPYCACHEPREFIX", self.root.join("target/python/pycache"));
        command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", tests]);
        command
    }

    /// Installs a wheel in place of an earlier one.
    pub fn install(&self, wheel: &Path) -> Result<()> {
        let mut pip = self.command("python");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        run(pip.args(["--no-deps", "--force-reinstall"]).arg(wheel))
    }
}

/// Runs a command. Returns an error unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    let line = format!("{command:?}");
    let status = command.status().with_context(|| format!("cannot start {line}"))?;
    if !status.success() {
        bail!("{line} ({status})");
    }
    Ok(())
}
