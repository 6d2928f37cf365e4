//! `label`: mark checkpoints.

use serde_json::{Map, Value, json};

use super::args::LabelOptions;
use super::interrupt::unless_interrupted;
use super::printer::CommandOutput;
use super::table::Paint;
use super::words::ExactStep;
use super::{Front, Outcome, connect};
use crate::id::Label;
use crate::wire::calls::LabelChange;

/// Runs the command `label`.
pub async fn label(front: &mut Front, options: LabelOptions) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let change = if options.remove { LabelChange::Remove } else { LabelChange::Add };
    let ExactStep { job, step } = &options.step;
    let (of, label) = (&options.step, &options.label);
    let what = match change {
        LabelChange::Add => format!("{of} may have got the label {label}"),
        LabelChange::Remove => format!("{of} may have lost the label {label}"),
    };
    let hint = format!("`rapidraid ls {job}` shows the labels");
    let labelling = client.label_step(job.at(*step), label, change);
    let labels = unless_interrupted(labelling, &what, &hint).await;
    connect::close(&client).await;
    let labels = labels?.map_err(|error| connect::failure(&error))?;
    Ok(Box::new(Labelled { step: options.step, labels }))
}

struct Labelled {
    step: ExactStep,
    /// All labels of the step.
    labels: Vec<Label>,
}

impl CommandOutput for Labelled {
    fn json(&self) -> Map<String, Value> {
        let ExactStep { job, step } = &self.step;
        let fields = [("job", json!(job)), ("step", json!(step)), ("labels", json!(self.labels))];
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn text(&self, _paint: Paint) -> String {
        let labels: Vec<&str> = self.labels.iter().map(Label::as_str).collect();
        match labels.len() {
            0 => format!("{} has no labels\n", self.step),
            1 => format!("{} has the label {}\n", self.step, labels.concat()),
            _ => format!("{} has the labels {}\n", self.step, labels.join(", ")),
        }
    }
}
