//! The only module that writes results, notes and failures. Data goes to stdout, everything else to
//! stderr, as do progress bars ([`super::progress`]) and the log.
//!
//! Guarantees:
//! - A process has one outcome: [`Printer::finish`] consumes the printer.
//! - With `--json` stdout holds exactly one JSON document with `"schema": 1`, also when the command
//!   fails.
//! - The exit code is 0 for success, 2 for an invalid request, 128 plus the signal's number for a
//!   command that a signal ended, and 1 for any other failure and for an answer that reports a
//!   problem.
//! - A reader that closes the pipe (`| head`) is not an error; a full disk behind stdout is one.
//! - Colours appear on terminals only, never under `NO_COLOR`, and never carry information that the
//!   words do not.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, IsTerminal, Write};

use serde_json::{Map, Value, json};

use super::table::{Paint, Tint, shown};
use crate::kind::ErrorKind;
use crate::wire::calls::StepView;

/// The version of every JSON document that the command line prints.
pub const SCHEMA: u32 = 1;

/// The result of a command that ran to its end. The exit code says whether it reports a problem.
pub trait CommandOutput {
    /// Returns the fields of the JSON document, without `schema`.
    fn json(&self) -> Map<String, Value>;

    /// Returns the same result for people: text that ends with a line break, or nothing.
    fn text(&self, paint: Paint) -> String;

    /// Returns the exit code: 0, unless the answer reports a problem.
    fn exit_code(&self) -> u8 {
        0
    }
}

/// The result of a command that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandFailure {
    /// The kind of failure. It decides the exit code and the default hint.
    pub kind: ErrorKind,
    /// The message: what happened, and to what.
    pub message: String,
    /// The advice: what to do next. Empty if the message has it, or if none is known.
    pub hint: String,
    /// The number of the signal that ended the command, if one did.
    pub signal: Option<u8>,
}

impl CommandFailure {
    /// Creates a failure with the default hint of its kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: hint_of(kind).to_owned(), signal: None }
    }

    /// Creates a failure from an error and its chain of causes. A cause is left out if the message
    /// before it already ends with it.
    pub fn of(kind: ErrorKind, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !message.ends_with(&text) {
                message = format!("{message}: {text}");
            }
            cause = error.source();
        }
        Self::new(kind, message)
    }

    /// Adapts a failure whose message is an answer of a daemon: removes the default hint of the
    /// kinds `NotFound`, `Exists` and `Io`, because it speaks of the caller's own names, files and
    /// disk.
    pub fn as_told_by_daemon(self) -> Self {
        match self.kind {
            ErrorKind::NotFound | ErrorKind::Exists | ErrorKind::Io => self.with_hint(""),
            _ => self,
        }
    }

    /// Returns the failure with `hint` in place of its hint.
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: hint.into(), ..self }
    }

    /// Returns the exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match (self.signal, self.kind) {
            // Shells report the end of a process by a signal in the same way.
            (Some(signal), _) => signal.saturating_add(128),
            (None, ErrorKind::Invalid) => 2,
            (None, _) => 1,
        }
    }
}

/// Returns the name of a kind for JSON and scripts. These names do not change.
pub fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "invalid",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Exists => "exists",
        ErrorKind::Denied => "denied",
        ErrorKind::Fenced => "fenced",
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Busy => "busy",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Lost => "lost",
        ErrorKind::Io => "io",
        ErrorKind::Internal => "internal",
    }
}

fn hint_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "`--help` shows what the command takes",
        ErrorKind::NotFound => "`rapidraid ls` shows what there is",
        ErrorKind::Exists => "choose another name, or say that it may be replaced",
        ErrorKind::Denied => {
            "use the certificate and key of this cluster that `cluster init` wrote for this role"
        }
        ErrorKind::Fenced => {
            "a newer owner is at work: run `rapidraid status` and start again from what it shows"
        }
        ErrorKind::Unavailable => {
            "`rapidraid status` shows which nodes answer; try again when they do"
        }
        ErrorKind::Busy => "try again shortly; `rapidraid status` shows what is short",
        ErrorKind::Timeout => "try again; `rapidraid status` shows which node is slow",
        ErrorKind::Corrupt => {
            "`rapidraid verify JOB/STEP` checks every copy of a checkpoint, `rapidraid status` shows what is damaged or was set aside"
        }
        ErrorKind::Lost => {
            "bring lost nodes back: every node that returns may be the one that is missing"
        }
        ErrorKind::Io => {
            "look at the disk or socket that the message names: space, permissions, cable"
        }
        ErrorKind::Internal => "this is a defect of rapidraid: please report it with this message",
    }
}

/// The form of the two outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Whether stdout is one JSON document.
    pub json: bool,
    /// Whether stdout has colours.
    pub colour_out: bool,
    /// Whether stderr has colours.
    pub colour_err: bool,
    /// Whether stderr is a terminal, so that progress is worth showing.
    pub watched: bool,
}

impl Look {
    /// Returns the form that the terminals and the environment of this process ask for.
    pub fn of_process(json: bool, env: &BTreeMap<String, String>) -> Self {
        let colour = may_colour(env);
        let (out, err) = (io::stdout().is_terminal(), io::stderr().is_terminal());
        Self { json, colour_out: out && colour && !json, colour_err: err && colour, watched: err }
    }
}

/// Returns whether colours are allowed: not with a non-empty NO_COLOR (no-color.org), and not on a
/// terminal without colours.
fn may_colour(env: &BTreeMap<String, String>) -> bool {
    env.get("NO_COLOR").is_none_or(String::is_empty)
        && env.get("TERM").is_none_or(|term| term != "dumb")
}

/// The writer of a command's notes and of its outcome.
pub struct Printer {
    look: Look,
    out: Box<dyn Write + Send>,
    err: Box<dyn Write + Send>,
}

impl Printer {
    /// Creates the printer of this process.
    pub fn of_process(look: Look) -> Self {
        Self::new(look, Box::new(io::stdout()), Box::new(io::stderr()))
    }

    /// Creates a printer on any two writers.
    pub fn new(look: Look, out: Box<dyn Write + Send>, err: Box<dyn Write + Send>) -> Self {
        Self { look, out, err }
    }

    /// Returns the form of the outputs.
    pub fn look(&self) -> Look {
        self.look
    }

    /// Returns the colours for stdout.
    pub fn paint(&self) -> Paint {
        Paint { colour: self.look.colour_out }
    }

    /// Writes a note on stderr about what happens. Write errors are ignored: without a reader the
    /// note has no use.
    pub fn note(&mut self, text: &str) {
        let _ = writeln!(self.err, "{}", shown(text));
    }

    /// Writes a warning on stderr, and a hint about what to do.
    pub fn warn(&mut self, text: &str, hint: &str) {
        self.tagged(Tint::Yellow, "warning:", text);
        self.tagged(Tint::Cyan, "hint:", hint);
    }

    /// Writes text of several lines that is neither data nor a note, such as a picture, to stdout;
    /// with `--json` writes nothing. Returns false if stdout cannot be written, for example because
    /// its reader is gone.
    pub fn show(&mut self, text: &str) -> bool {
        self.look.json
            || self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).is_ok()
    }

    fn tagged(&mut self, tint: Tint, tag: &str, text: &str) {
        let tag = Paint { colour: self.look.colour_err }.tint(tint, tag);
        for (at, line) in text.lines().enumerate() {
            let before = if at == 0 { &*tag } else { "      " };
            let _ = writeln!(self.err, "{before} {}", shown(line));
        }
    }

    /// Prints the outcome. Returns the exit code of the process.
    pub fn finish<A: CommandOutput + ?Sized>(mut self, outcome: Result<&A, &CommandFailure>) -> u8 {
        let (document, text, code) = match outcome {
            Ok(answer) => {
                let mut fields = answer.json();
                fields.insert("schema".to_owned(), json!(SCHEMA));
                let text = if self.look.json { String::new() } else { answer.text(self.paint()) };
                (Value::Object(fields), text, answer.exit_code())
            }
            Err(failure) => {
                self.tagged(Tint::Red, "error:", &failure.message);
                self.tagged(Tint::Cyan, "hint:", &failure.hint);
                let (kind, code) = (kind_name(failure.kind), failure.exit_code());
                let error =
                    json!({ "kind": kind, "message": failure.message, "hint": failure.hint });
                (json!({ "schema": SCHEMA, "error": error }), String::new(), code)
            }
        };
        let text = if self.look.json { format!("{document}\n") } else { text };
        match self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()) {
            Ok(()) => code,
            // The reader closed the pipe because it has what it wanted.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => code,
            Err(error) => {
                self.tagged(Tint::Red, "error:", &format!("cannot write to stdout: {error}"));
                self.tagged(Tint::Cyan, "hint:", hint_of(ErrorKind::Io));
                code.max(1)
            }
        }
    }
}

/// Returns the summary of a step in a list as JSON.
pub fn step_json(view: &StepView) -> Map<String, Value> {
    let saved = &view.saved;
    let fields = json!({
        "job": view.job, "step": view.step, "save": saved.save.to_string(), "shards": saved.shards,
        "by_marks": view.by_marks, "bytes": saved.len_bytes, "generation": saved.generation.to_string(), "saved_at": saved.saved_at,
    });
    fields.as_object().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>, Option<io::ErrorKind>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.1 {
                Some(kind) => Err(kind.into()),
                None => self.0.lock().unwrap().write(bytes),
            }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    struct Saved;

    impl CommandOutput for Saved {
        fn json(&self) -> Map<String, Value> {
            Map::from_iter([("shards".to_owned(), json!(3))])
        }
        fn text(&self, paint: Paint) -> String {
            format!("{} 3 shards\n", paint.tint(Tint::Green, "saved"))
        }
    }

    const PLAIN: Look = Look { json: false, colour_out: false, colour_err: false, watched: false };
    const JSON: Look = Look { json: true, ..PLAIN };

    fn run(
        look: Look,
        outcome: Result<&Saved, &CommandFailure>,
        out: Sink,
    ) -> (u8, String, String) {
        let err = Sink::default();
        let mut printer = Printer::new(look, Box::new(out.clone()), Box::new(err.clone()));
        printer.note("connecting");
        assert_eq!(printer.show("picture\n"), out.1.is_none() || look.json);
        let code = printer.finish(outcome);
        (code, out.text(), err.text())
    }

    #[test]
    fn data_goes_to_stdout_and_the_rest_to_stderr() {
        let (code, out, err) = run(PLAIN, Ok(&Saved), Sink::default());
        assert_eq!(
            (code, out.as_str(), err.as_str()),
            (0, "picture\nsaved 3 shards\n", "connecting\n")
        );
        let failure = CommandFailure::new(ErrorKind::Lost, "shard a/b: 10 of 11 pieces are left");
        let (code, out, err) = run(PLAIN, Err(&failure), Sink::default());
        assert_eq!((code, out.as_str()), (1, "picture\n"));
        assert!(
            err.contains("error: shard a/b: 10 of 11 pieces are left\nhint: bring lost nodes back"),
            "{err}"
        );
    }

    #[test]
    fn json_is_one_document_in_success_and_failure() {
        let (code, out, _) = run(JSON, Ok(&Saved), Sink::default());
        assert_eq!((code, out.as_str()), (0, "{\"schema\":1,\"shards\":3}\n"));
        let failure = CommandFailure::new(ErrorKind::Invalid, "no\u{1b}").with_hint("yes");
        let (code, out, err) = run(JSON, Err(&failure), Sink::default());
        let document: Value = serde_json::from_str(&out).unwrap();
        let error = json!({"kind": "invalid", "message": "no\u{1b}", "hint": "yes"});
        assert_eq!((code, document), (2, json!({"schema": 1, "error": error})));
        assert!(err.contains("error: no\\u{1b}\nhint: yes"), "{err}");
    }

    #[test]
    fn an_error_of_several_lines_has_several_lines() {
        let failure = CommandFailure::new(ErrorKind::Lost, "two stripes:\nfirst\u{7}\nsecond")
            .with_hint("wait");
        let (_, _, err) = run(PLAIN, Err(&failure), Sink::default());
        let lines = "error: two stripes:\n       first\\u{7}\n       second\nhint: wait\n";
        assert!(err.ends_with(lines), "{err}");
    }

    #[test]
    fn a_reader_that_left_is_no_error_and_a_full_disk_is() {
        let gone = Sink(Arc::default(), Some(io::ErrorKind::BrokenPipe));
        assert_eq!(run(PLAIN, Ok(&Saved), gone.clone()).0, 0);
        assert_eq!(run(PLAIN, Err(&CommandFailure::new(ErrorKind::Io, "x")), gone).0, 1);
        let full = Sink(Arc::default(), Some(io::ErrorKind::StorageFull));
        let (code, _, err) = run(JSON, Ok(&Saved), full);
        assert!(code == 1 && err.contains("cannot write to stdout"), "{code} {err}");
    }

    #[test]
    fn colours_need_a_terminal_that_wants_them() {
        let env = |k: &str, v: &str| BTreeMap::from([(k.to_owned(), v.to_owned())]);
        assert!(may_colour(&BTreeMap::new()) && may_colour(&env("NO_COLOR", "")));
        assert!(!may_colour(&env("NO_COLOR", "1")) && !may_colour(&env("TERM", "dumb")));
        let look = Look { colour_out: true, ..PLAIN };
        assert!(run(look, Ok(&Saved), Sink::default()).1.contains("\u{1b}[32msaved\u{1b}[0m 3"));
    }

    #[test]
    fn scripts_can_rely_on_kinds_and_codes() {
        let names: Vec<&str> =
            (1..=12).map(|code| kind_name(ErrorKind::from_wire_code(code))).collect();
        let expected = "invalid not_found exists denied fenced unavailable busy timeout corrupt lost io internal";
        assert_eq!(names.join(" "), expected);
        let code = |kind| CommandFailure::new(kind, "").exit_code();
        assert_eq!(
            (code(ErrorKind::Invalid), code(ErrorKind::NotFound), code(ErrorKind::Internal)),
            (2, 1, 1)
        );
    }

    #[test]
    fn causes_are_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot read a.pem: {source}")]
        struct Outer {
            source: Inner,
        }
        #[derive(Debug, thiserror::Error)]
        #[error("refused")]
        struct Inner(#[source] io::Error);
        let error = Outer { source: Inner(io::Error::other("errno 13")) };
        assert_eq!(
            CommandFailure::of(ErrorKind::Denied, &error).message,
            "cannot read a.pem: refused: errno 13"
        );
    }
}
