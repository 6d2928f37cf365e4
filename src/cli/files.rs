//! The files and variables that the command line itself reads and writes: configurations,
//! certificates, keys, and the files that are saved and restored. Data folders belong to the store.
//!
//! Guarantees: configurations, certificates, keys and tokens are read up to a limit; a secret that
//! others can read is refused; [`write_new`] and [`create_new`] never overwrite a file.
#![allow(clippy::disallowed_methods)] // the command line reads and writes its own files

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::printer::CommandFailure;
use crate::kind::ErrorKind;
use crate::net::identity::check_secret_file_mode;

/// Maximum size of a certificate or key file; these files have a few kilobytes.
const MAX_PEM_BYTES: usize = 64 << 10;

/// Maximum length of a token.
const MAX_TOKEN_BYTES: usize = 4096;

/// The bits of a mode by which users outside the file's group may read or write it.
const OTHERS_READ_WRITE: u32 = 0o006;
/// The mode of a file that every user may read.
pub const PUBLIC: u32 = 0o644;
/// The mode of a file with a secret.
pub const SECRET: u32 = 0o600;

/// The beginning of the names of this program's environment variables.
const OWN_VARIABLES: &str = "RAPIDRAID_";

/// Returns the environment variables that are valid UTF-8.
///
/// Returns `Invalid` if a variable of this program is not. Without it the program would use another
/// value, such as the configuration of another cluster.
pub fn environment() -> Result<BTreeMap<String, String>, CommandFailure> {
    text_of_variables(std::env::vars_os())
}

fn text_of_variables(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<BTreeMap<String, String>, CommandFailure> {
    let mut texts = BTreeMap::new();
    for (name, value) in variables {
        let Ok(name) = name.into_string() else { continue };
        match value.into_string() {
            Ok(value) => drop(texts.insert(name, value)),
            Err(value) if name.starts_with(OWN_VARIABLES) => {
                let value = value.to_string_lossy();
                let message = format!("environment variable {name}: {value:?} is no text (UTF-8)");
                return Err(CommandFailure::new(ErrorKind::Invalid, message)
                    .with_hint(format!("set {name} to a text in UTF-8, or unset it")));
            }
            Err(_) => {}
        }
    }
    Ok(texts)
}

/// Raises this process's limit of open files to the maximum that the system allows. A shell often
/// grants less than a save, which has all files of a checkpoint open, or a staging daemon with many
/// trainers needs.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // If the system refuses, the old limit stays, and the error names the file that cannot be
    // opened.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Converts an error of the system about `path`.
pub fn io_failure(verb: &str, path: &Path, error: &io::Error) -> CommandFailure {
    let kind = match error.kind() {
        io::ErrorKind::NotFound => ErrorKind::NotFound,
        io::ErrorKind::AlreadyExists => ErrorKind::Exists,
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        _ => ErrorKind::Io,
    };
    let failure = CommandFailure::new(kind, format!("cannot {verb} {}: {error}", path.display()));
    match kind {
        ErrorKind::NotFound => failure.with_hint("check the path"),
        ErrorKind::Exists => failure.with_hint("choose another name, or remove what is there"),
        ErrorKind::Denied => failure.with_hint("check who owns it and who may use it (ls -l)"),
        _ => failure,
    }
}

/// Reads a text file of at most `max_bytes`. Returns `Invalid` if the file is longer or not UTF-8.
pub fn read_text(path: &Path, max_bytes: usize) -> Result<String, CommandFailure> {
    let failed = |error: io::Error| io_failure("read", path, &error);
    read_bounded(File::open(path).map_err(failed)?, path, max_bytes)
}

fn read_bounded(file: File, path: &Path, max_bytes: usize) -> Result<String, CommandFailure> {
    String::from_utf8(bounded(file, path, max_bytes)?).map_err(|_| {
        let message = format!("{} is no text (UTF-8)", path.display());
        CommandFailure::new(ErrorKind::Invalid, message).with_hint("is this the right file?")
    })
}

fn bounded(file: File, path: &Path, max_bytes: usize) -> Result<Vec<u8>, CommandFailure> {
    let mut bytes = Vec::new();
    let limit = max_bytes as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(|error| io_failure("read", path, &error))?;
    if bytes.len() > max_bytes {
        let message = format!("{} has more than {max_bytes} bytes", path.display());
        return Err(
            CommandFailure::new(ErrorKind::Invalid, message).with_hint("is this the right file?")
        );
    }
    Ok(bytes)
}

/// Reads a file of at most `max_bytes`. Returns `Invalid` if the file is longer.
pub fn read_bytes(path: &Path, max_bytes: usize) -> Result<Vec<u8>, CommandFailure> {
    let failed = |error: io::Error| io_failure("read", path, &error);
    bounded(File::open(path).map_err(failed)?, path, max_bytes)
}

/// Reads a certificate.
pub fn read_certificate(path: &Path) -> Result<String, CommandFailure> {
    read_text(path, MAX_PEM_BYTES)
}

/// Reads a private key. Returns an error if the file's group or others may access it.
pub fn read_secret(path: &Path) -> Result<String, CommandFailure> {
    let failed = |error: io::Error| io_failure("read", path, &error);
    let file = File::open(path).map_err(failed)?;
    // The mode is that of the open file, so that the file cannot be exchanged between the check and
    // the read.
    let mode = file.metadata().map_err(failed)?.mode();
    check_secret_file_mode(mode, path).map_err(|error| {
        let hint = format!("chmod 600 {}", path.display());
        CommandFailure::new(error.kind(), error.to_string()).with_hint(hint)
    })?;
    read_bounded(file, path, MAX_PEM_BYTES)
}

/// Reads the token of a staging daemon. Its trainers may share it as a group.
///
/// Returns `Denied` if users outside the file's group may read or write it, and `Invalid` if it is
/// empty: an empty token would be that of every trainer that has none.
pub fn read_token(path: &Path) -> Result<Vec<u8>, CommandFailure> {
    let failed = |error: io::Error| io_failure("read", path, &error);
    let file = File::open(path).map_err(failed)?;
    // As in `read_secret`, the mode is that of the open file.
    if file.metadata().map_err(failed)?.mode() & OTHERS_READ_WRITE != 0 {
        let message = format!("every user may read or write the token file {}", path.display());
        return Err(CommandFailure::new(ErrorKind::Denied, message)
            .with_hint(format!("chmod o-rw {}", path.display())));
    }
    let token = bounded(file, path, MAX_TOKEN_BYTES)?;
    if token.is_empty() {
        let message = format!("the token file {} is empty", path.display());
        return Err(CommandFailure::new(ErrorKind::Invalid, message)
            .with_hint("write a secret into it, or remove the setting staging.token"));
    }
    Ok(token)
}

/// Creates the folder and its parents.
pub fn make_folder(path: &Path) -> Result<(), CommandFailure> {
    fs::create_dir_all(path).map_err(|error| io_failure("create", path, &error))
}

/// Creates a folder, and its parents, that only its owner can enter.
pub fn make_private_folder(path: &Path) -> Result<(), CommandFailure> {
    use std::os::unix::fs::DirBuilderExt;
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| io_failure("create", path, &error))
}

/// Returns whether `path` is an empty folder or does not exist.
pub fn is_free(path: &Path) -> Result<bool, CommandFailure> {
    match fs::read_dir(path) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(false),
        Err(error) => Err(io_failure("read", path, &error)),
    }
}

/// Creates a file with this text and mode, and syncs it. Returns `Exists` if the file exists.
pub fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), CommandFailure> {
    let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    written
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(|error| io_failure("write", path, &error))
}

/// Creates a file and opens it for writing. Returns `Exists` if the file exists.
pub fn create_new(path: &Path) -> Result<File, CommandFailure> {
    let opened = OpenOptions::new().write(true).create_new(true).open(path);
    opened.map_err(|error| io_failure("write", path, &error))
}

/// Writes the content of a file that was just created, and makes the content and the name durable.
pub fn write_durably(mut file: File, path: &Path, bytes: &[u8]) -> Result<(), CommandFailure> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let written = file
        .write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| File::open(folder.unwrap_or(Path::new(".")))?.sync_all());
    written.map_err(|error| io_failure("write", path, &error))
}

/// Removes a file if it exists. Errors are ignored.
pub fn remove_file(path: &Path) {
    let _ = fs::remove_file(path);
}

/// Replaces a file as a whole by one with this text. If two processes do so at the same time, one
/// of the two texts remains.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let replaced = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    replaced
}

/// Removes a folder if it is empty. Errors are ignored.
pub fn remove_empty_folder(path: &Path) {
    let _ = fs::remove_dir(path);
}

/// Removes a folder and its content as far as possible. Errors are ignored.
pub fn remove_folder(path: &Path) {
    let _ = fs::remove_dir_all(path);
}

/// Returns the BLAKE3 hash of a file. The memory used does not depend on the file's size.
pub fn hash(path: &Path) -> Result<blake3::Hash, CommandFailure> {
    let mut hasher = blake3::Hasher::new();
    let file = File::open(path).and_then(|file| hasher.update_reader(file).map(drop));
    file.map_err(|error| io_failure("read", path, &error))?;
    Ok(hasher.finalize())
}

/// Returns the last `count` lines within the last 16 KiB of a file, or an empty text if the file
/// cannot be read.
pub fn last_lines(path: &Path, count: usize) -> String {
    use std::io::{Seek, SeekFrom};
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(16 << 10)))?;
        let mut bytes = Vec::new();
        file.take(16 << 10).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(count)..).unwrap_or_default().join("\n")
}

/// Returns the entries of a folder, sorted by name, so that the same folder is always saved in the
/// same order.
pub fn entries(folder: &Path) -> Result<Vec<(PathBuf, fs::FileType)>, CommandFailure> {
    let failed = |error: io::Error| io_failure("read", folder, &error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // This is the type of the entry itself: a symbolic link is not followed.
        found.push((entry.path(), entry.file_type().map_err(failed)?));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// Returns the length of a file in bytes.
pub fn length(path: &Path) -> Result<u64, CommandFailure> {
    Ok(fs::metadata(path).map_err(|error| io_failure("read", path, &error))?.len())
}

/// Returns the bytes that an unprivileged process can still use on the disk of `path`.
pub fn free_bytes(path: &Path) -> Result<u64, CommandFailure> {
    let found = rustix::fs::statvfs(path).map_err(|e| io_failure("inspect", path, &e.into()))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Returns the size in bytes of the file system of `path`, used or free.
pub fn total_bytes(path: &Path) -> Result<u64, CommandFailure> {
    let found = rustix::fs::statvfs(path).map_err(|e| io_failure("inspect", path, &e.into()))?;
    Ok(found.f_blocks.saturating_mul(found.f_frsize))
}

/// Returns the type of the file at `path`. Symbolic links are followed.
pub fn kind_of(path: &Path) -> Result<fs::FileType, CommandFailure> {
    let found = fs::metadata(path).map_err(|error| io_failure("read", path, &error))?;
    Ok(found.file_type())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_stay_secret_and_files_stay_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (key, big) = (folder.path().join("key.pem"), folder.path().join("big"));
        write_new(&key, "secret", SECRET).unwrap();
        assert_eq!(read_secret(&key).as_deref(), Ok("secret"));
        let exists = write_new(&key, "x", SECRET).unwrap_err();
        assert_eq!(exists.kind, ErrorKind::Exists);
        assert!(exists.hint.ends_with("or remove what is there"), "{}", exists.hint);
        write_new(&big, &"x".repeat(101), PUBLIC).unwrap();
        assert_eq!(read_text(&big, 100).unwrap_err().kind, ErrorKind::Invalid);
        assert!(read_text(&big, 101).is_ok());
        let exposed = read_secret(&big).unwrap_err();
        assert_eq!(exposed.kind, ErrorKind::Denied);
        assert!(exposed.hint.starts_with("chmod 600 "), "{}", exposed.hint);
        assert_eq!(read_text(&folder.path().join("no"), 1).unwrap_err().kind, ErrorKind::NotFound);
    }

    #[test]
    fn a_token_is_not_empty_and_not_for_everybody() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str, mode| {
            let path = folder.path().join(name);
            write_new(&path, text, mode).unwrap();
            path
        };
        for mode in [SECRET, 0o640] {
            let token = read_token(&write(&format!("{mode:o}"), "secret", mode));
            assert_eq!(token.unwrap(), b"secret");
        }
        let exposed = read_token(&write("exposed", "secret", PUBLIC)).unwrap_err();
        assert_eq!(exposed.kind, ErrorKind::Denied);
        assert!(exposed.hint.starts_with("chmod o-rw "), "{}", exposed.hint);
        let empty = read_token(&write("empty", "", SECRET)).unwrap_err();
        assert_eq!(empty.kind, ErrorKind::Invalid);
        let long = write("long", &"x".repeat(MAX_TOKEN_BYTES + 1), SECRET);
        assert_eq!(read_token(&long).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn a_variable_of_this_program_is_text_or_an_error() {
        use std::os::unix::ffi::OsStringExt;
        let read = |name: &str, value: &[u8]| {
            let variable = (OsString::from(name), OsString::from_vec(value.to_vec()));
            text_of_variables(std::iter::once(variable))
        };
        assert_eq!(read("RAPIDRAID_CONFIG", b"a").unwrap()["RAPIDRAID_CONFIG"], "a");
        assert_eq!(read("LESS", b"\xff"), Ok(BTreeMap::new()));
        let failure = read("RAPIDRAID_CONFIG", b"/a\xff").unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.message.contains("RAPIDRAID_CONFIG"), "{}", failure.message);
    }

    #[test]
    fn a_folder_is_free_when_empty_or_missing() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(is_free(folder.path()), Ok(true));
        assert_eq!(is_free(&folder.path().join("no")), Ok(true));
        write_new(&folder.path().join("a"), "1\n2\n3\n", PUBLIC).unwrap();
        assert_eq!(is_free(folder.path()), Ok(false));
        assert_eq!(is_free(&folder.path().join("a")), Ok(false));
        assert_eq!(last_lines(&folder.path().join("a"), 2), "2\n3");
        assert_eq!(last_lines(&folder.path().join("no"), 2), "");
    }
}
