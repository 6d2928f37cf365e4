//! The file that holds the record of a save, from which `restore --record` reads without a catalogue.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::args::Show;
use super::printer::{CommandFailure, CommandOutput};
use super::table::{Paint, Tint, shown};
use super::words::ExactStep;
use super::{Front, Outcome, connect, files};
use crate::format::save_record::SaveRecord;
use crate::kind::ErrorKind;

/// Runs the command `show --record`: writes the record of a committed step to `path`, which must not
/// exist.
pub async fn show(front: &mut Front, options: &Show, path: &Path) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let (job, step) = (&options.step.job, options.step.step);
    let record = client.fetch_save_record(job, step).await;
    connect::close(&client).await;
    let record = record.map_err(|error| connect::failure(&error))?;
    write(files::create_new(path)?, path, &record)?;
    let step = ExactStep { job: record.job().clone(), step: record.step() };
    Ok(Box::new(Written { step, save: record.saved().save.to_string(), path: path.to_owned() }))
}

/// Writes a record to the file that was just created at `path`. Removes the file if that fails.
pub fn write(file: File, path: &Path, record: &SaveRecord) -> Result<(), CommandFailure> {
    let bytes = record.to_bytes().map_err(|error| CommandFailure::of(error.kind(), &error));
    let written = bytes.and_then(|bytes| files::write_durably(file, path, &bytes));
    // A part of a record restores nothing, and would be in the way of the next attempt.
    written.inspect_err(|_| files::remove_file(path))
}

/// Returns the failure of a save that is committed and whose record could not be written.
pub fn not_written(step: &ExactStep, reason: &str) -> CommandFailure {
    let message = format!("{step} is committed, but its record is missing: {reason}");
    CommandFailure::new(ErrorKind::Io, message)
        .with_hint(format!("`rapidraid show {step} --record FILE` writes it; do not save again"))
}

struct Written {
    step: ExactStep,
    save: String,
    path: PathBuf,
}

impl CommandOutput for Written {
    fn json(&self) -> Map<String, Value> {
        let (job, step, record) = (&self.step.job, self.step.step, self.path.display().to_string());
        let fields = json!({ "job": job, "step": step, "save": self.save, "record": record });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let (word, path) = (paint.tint(Tint::Green, "recorded"), self.path.display().to_string());
        format!("{word} {} in {}\n", self.step, shown(&path))
    }
}
