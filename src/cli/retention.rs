//! `catalogue retention`: pauses and resumes the removal of old checkpoints.

use serde_json::{Map, Value, json};

use super::args::Retention;
use super::printer::CommandOutput;
use super::table::Paint;
use super::{Front, Outcome, connect};
use crate::wire::policy::RetentionChange;

/// Runs the command `catalogue retention`.
pub async fn run(front: &mut Front, options: Retention) -> Outcome {
    let change = match (options.pause, options.resume) {
        (true, _) => RetentionChange::Pause,
        (false, true) => RetentionChange::Resume,
        (false, false) => RetentionChange::None,
    };
    let client = connect::client(&options.connect, &front.env).await?;
    let is_paused = connect::ask(client.set_retention(change)).await;
    connect::close(&client).await;
    Ok(Box::new(RetentionView { is_paused: is_paused? }))
}

struct RetentionView {
    is_paused: bool,
}

impl CommandOutput for RetentionView {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([("paused".to_owned(), json!(self.is_paused))])
    }

    fn text(&self, _: Paint) -> String {
        match self.is_paused {
            true => "retention is paused: no rule removes checkpoints until it is resumed\n".into(),
            false => {
                "retention is not paused: rules that keep only the newest checkpoints apply, if there are any\n".into()
            }
        }
    }
}
