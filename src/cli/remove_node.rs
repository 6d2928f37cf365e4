//! `cluster remove-node`: a node that is gone for good leaves the list of members.

use serde_json::{Map, Value, json};

use super::args::RemoveNode;
use super::printer::Answer;
use super::table::Paint;
use super::{Front, Outcome, connect};
use crate::id::PeerName;
use crate::kind::ErrorKind;

/// The command.
pub async fn run(front: &mut Front, options: RemoveNode) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let removed = client.remove_node(&options.name).await;
    connect::close(&client).await;
    removed.map_err(|error| {
        let failure = connect::failure(&error);
        match failure.kind {
            ErrorKind::Exists => failure.with_hint(
                "replace the machine under the same name, with an empty data folder; or `rapidraid rm` these checkpoints",
            ),
            _ => failure,
        }
    })?;
    Ok(Box::new(Gone(options.name)))
}

struct Gone(PeerName);

impl Answer for Gone {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([("removed".to_owned(), json!(self.0))])
    }

    fn text(&self, _: Paint) -> String {
        format!(
            "{} is no member any more. Destroy its key and data: with them its daemon would be one again.\n",
            self.0
        )
    }
}
