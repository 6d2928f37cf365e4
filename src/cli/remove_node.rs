//! `cluster remove-node`: removes a node that is lost permanently from the list of members.

use serde_json::{Map, Value, json};

use super::args::RemoveNode;
use super::interrupt::unless_interrupted;
use super::printer::CommandOutput;
use super::table::Paint;
use super::{Front, Outcome, connect};
use crate::id::PeerName;
use crate::kind::ErrorKind;

/// Runs the command `cluster remove-node`.
pub async fn run(front: &mut Front, options: RemoveNode) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let what = format!(
        "{} may have been recorded as leaving, or removed from the list of members",
        options.name
    );
    let hint = "`rapidraid status` shows the members; if it is one of them, run the command again, or start its daemon to keep it";
    let removed = unless_interrupted(client.remove_node(&options.name), &what, hint).await;
    connect::close(&client).await;
    removed?.map_err(|error| {
        let failure = connect::failure(&error);
        let name = &options.name;
        match failure.kind {
            ErrorKind::Exists => failure.with_hint(format!(
                "start the other nodes that are down, run `rapidraid repair --node {name}`, then try again; if there is no spare node, start a new machine, and run `rapidraid cluster replace-node {name} --by NEW` before the repair"
            )),
            _ => failure,
        }
    })?;
    Ok(Box::new(Gone(options.name)))
}

struct Gone(PeerName);

impl CommandOutput for Gone {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([("removed".to_owned(), json!(self.0))])
    }

    fn text(&self, _: Paint) -> String {
        format!(
            "{name} is no member any more. Destroy its key and data: a daemon with them would register again.\nRemove the folder nodes/{name} of the cluster's folder too: `rapidraid cluster add-node` takes addresses from it.\n",
            name = self.0
        )
    }
}
