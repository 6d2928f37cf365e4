//! `cluster maintenance`: announces that a node will be away.

use serde_json::{Map, Value, json};

use super::args::MaintainNode;
use super::interrupt::unless_interrupted;
use super::printer::CommandOutput;
use super::table::Paint;
use super::{Front, Outcome, connect};
use crate::id::PeerName;

/// Runs the command `cluster maintenance`.
pub async fn run(front: &mut Front, options: MaintainNode) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let (name, seconds) = (&options.name, options.seconds);
    let what = format!("the maintenance of {name} may have been recorded");
    let hint = "`rapidraid status` shows it; run the command again to be sure";
    let announced = unless_interrupted(client.set_maintenance(name, seconds), &what, hint).await;
    connect::close(&client).await;
    announced?.map_err(|error| connect::failure(&error))?;
    Ok(Box::new(Announced { node: options.name, seconds: options.seconds }))
}

struct Announced {
    node: PeerName,
    seconds: u64,
}

impl CommandOutput for Announced {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([
            ("node".to_owned(), json!(self.node)),
            ("seconds".to_owned(), json!(self.seconds)),
        ])
    }

    fn text(&self, _: Paint) -> String {
        let Self { node, seconds } = self;
        match seconds {
            0 => format!("{node} is not in maintenance any more\n"),
            _ => {
                format!("automatic repair ignores the absence of {node} for the next {seconds} s\n")
            }
        }
    }
}
