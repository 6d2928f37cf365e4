//! Passes the version of the compiler to the program, for the record.

use std::process::Command;

fn main() {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("--version").output();
    let version = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    println!("cargo:rustc-env=COMPILER={}", version.as_deref().unwrap_or("unknown"));
    println!("cargo:rerun-if-changed=build.rs");
}
