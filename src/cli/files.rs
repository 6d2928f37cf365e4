//! The files and variables that the command line itself reads and writes: configurations, certificates, keys, what
//! is to be saved. Data folders are the store's.
//!
//! It promises that nothing is read without a bound, that a secret is refused when others can read it, and that a
//! file that exists is never written over.
#![allow(clippy::disallowed_methods)] // the binary's front asks the system for its own files

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::printer::Failure;
use crate::kind::ErrorKind;
use crate::net::identity::check_secret_file_mode;

/// Certificates and keys are a few kilobytes.
const MAX_PEM_BYTES: usize = 64 << 10;

/// The mode of a file that everybody may read.
pub const PUBLIC: u32 = 0o644;
/// The mode of a file with a secret.
pub const SECRET: u32 = 0o600;

/// The environment, as far as it is text: nothing of ours has another form.
pub fn environment() -> BTreeMap<String, String> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

/// Lets this process open as many files as the system would let it, where a shell grants less: the shards of a checkpoint are open
/// together.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // Where it is refused the old limit stays, and the file that cannot be opened is named.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// What the system said about `path`, as a failure.
pub fn io_failure(verb: &str, path: &Path, error: &io::Error) -> Failure {
    let kind = match error.kind() {
        io::ErrorKind::NotFound => ErrorKind::NotFound,
        io::ErrorKind::AlreadyExists => ErrorKind::Exists,
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        _ => ErrorKind::Io,
    };
    let failure = Failure::new(kind, format!("cannot {verb} {}: {error}", path.display()));
    match kind {
        ErrorKind::NotFound => failure.with_hint("check the path"),
        ErrorKind::Denied => failure.with_hint("check who owns it and who may use it (ls -l)"),
        _ => failure,
    }
}

/// The text of a file of at most `max_bytes`.
pub fn read_text(path: &Path, max_bytes: usize) -> Result<String, Failure> {
    let failed = |error: io::Error| io_failure("read", path, &error);
    read_bounded(File::open(path).map_err(failed)?, path, max_bytes)
}

fn read_bounded(file: File, path: &Path, max_bytes: usize) -> Result<String, Failure> {
    String::from_utf8(bounded(file, path, max_bytes)?).map_err(|_| {
        let message = format!("{} is no text (UTF-8)", path.display());
        Failure::new(ErrorKind::Invalid, message).with_hint("is this the right file?")
    })
}

fn bounded(file: File, path: &Path, max_bytes: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let limit = max_bytes as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(|error| io_failure("read", path, &error))?;
    if bytes.len() > max_bytes {
        let message = format!("{} has more than {max_bytes} bytes", path.display());
        return Err(Failure::new(ErrorKind::Invalid, message).with_hint("is this the right file?"));
    }
    Ok(bytes)
}

/// The bytes of a file of at most `max_bytes`.
pub fn read_bytes(path: &Path, max_bytes: usize) -> Result<Vec<u8>, Failure> {
    let failed = |error: io::Error| io_failure("read", path, &error);
    bounded(File::open(path).map_err(failed)?, path, max_bytes)
}

/// The text of a certificate.
pub fn read_certificate(path: &Path) -> Result<String, Failure> {
    read_text(path, MAX_PEM_BYTES)
}

/// The text of a private key, which nobody else may be able to read.
pub fn read_secret(path: &Path) -> Result<String, Failure> {
    let failed = |error: io::Error| io_failure("read", path, &error);
    let file = File::open(path).map_err(failed)?;
    // Of the open file, so that it cannot be exchanged between the question and the reading.
    let mode = file.metadata().map_err(failed)?.mode();
    check_secret_file_mode(mode, path).map_err(|error| {
        let hint = format!("chmod 600 {}", path.display());
        Failure::new(error.kind(), error.to_string()).with_hint(hint)
    })?;
    read_bounded(file, path, MAX_PEM_BYTES)
}

/// Makes the folder and those above it.
pub fn make_folder(path: &Path) -> Result<(), Failure> {
    fs::create_dir_all(path).map_err(|error| io_failure("create", path, &error))
}

/// Makes a folder that only its owner can enter.
pub fn make_private_folder(path: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| io_failure("create", path, &error))
}

/// Whether `path` is a folder without anything in it, or not there at all.
pub fn is_free(path: &Path) -> Result<bool, Failure> {
    match fs::read_dir(path) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(false),
        Err(error) => Err(io_failure("read", path, &error)),
    }
}

/// Writes a new file with this mode and syncs it.
pub fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), Failure> {
    let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    written
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(|error| io_failure("write", path, &error))
}

/// Opens a new file for writing.
pub fn create_new(path: &Path) -> Result<File, Failure> {
    let opened = OpenOptions::new().write(true).create_new(true).open(path);
    opened.map_err(|error| io_failure("write", path, &error))
}

/// Writes all of a file that was just created, and makes it and its name durable.
pub fn write_durably(mut file: File, path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let written = file
        .write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| File::open(folder.unwrap_or(Path::new(".")))?.sync_all());
    written.map_err(|error| io_failure("write", path, &error))
}

/// Removes a file, if it is there.
pub fn remove_file(path: &Path) {
    let _ = fs::remove_file(path);
}

/// Puts a whole file with this text in the place of the one that is there. Two that do so at once leave one of both.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let replaced = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    replaced
}

/// Removes a folder, if nothing is in it.
pub fn remove_empty_folder(path: &Path) {
    let _ = fs::remove_dir(path);
}

/// Removes a folder and what is in it, as far as that goes.
pub fn remove_folder(path: &Path) {
    let _ = fs::remove_dir_all(path);
}

/// BLAKE3 of a file, in memory that does not grow with it.
pub fn hash(path: &Path) -> Result<blake3::Hash, Failure> {
    let mut hasher = blake3::Hasher::new();
    let file = File::open(path).and_then(|file| hasher.update_reader(file).map(drop));
    file.map_err(|error| io_failure("read", path, &error))?;
    Ok(hasher.finalize())
}

/// The last `count` lines of a file, of its last 16 KiB; nothing when it cannot be read.
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

/// What a folder has, sorted by name, so that the same folder is always saved in the same order.
pub fn entries(folder: &Path) -> Result<Vec<(PathBuf, fs::FileType)>, Failure> {
    let failed = |error: io::Error| io_failure("read", folder, &error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // Of the entry itself: a symbolic link is not followed.
        found.push((entry.path(), entry.file_type().map_err(failed)?));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The length of a file.
pub fn length(path: &Path) -> Result<u64, Failure> {
    Ok(fs::metadata(path).map_err(|error| io_failure("read", path, &error))?.len())
}

/// Free bytes of the disk that `path` is on, for those without privileges.
pub fn free_bytes(path: &Path) -> Result<u64, Failure> {
    let found = rustix::fs::statvfs(path).map_err(|e| io_failure("look at", path, &e.into()))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Bytes of the file system that `path` is on, used or free.
pub fn total_bytes(path: &Path) -> Result<u64, Failure> {
    let found = rustix::fs::statvfs(path).map_err(|e| io_failure("look at", path, &e.into()))?;
    Ok(found.f_blocks.saturating_mul(found.f_frsize))
}

/// What a path leads to; symbolic links are followed.
pub fn kind_of(path: &Path) -> Result<fs::FileType, Failure> {
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
        assert_eq!(write_new(&key, "x", SECRET).unwrap_err().kind, ErrorKind::Exists);
        write_new(&big, &"x".repeat(101), PUBLIC).unwrap();
        assert_eq!(read_text(&big, 100).unwrap_err().kind, ErrorKind::Invalid);
        assert!(read_text(&big, 101).is_ok());
        let exposed = read_secret(&big).unwrap_err();
        assert_eq!(exposed.kind, ErrorKind::Denied);
        assert!(exposed.hint.starts_with("chmod 600 "), "{}", exposed.hint);
        assert_eq!(read_text(&folder.path().join("no"), 1).unwrap_err().kind, ErrorKind::NotFound);
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
