//! `cluster replace-node`: lets a storage node take the place of another one.

use serde_json::{Map, Value, json};

use super::args::ReplaceNode;
use super::interrupt::unless_interrupted;
use super::printer::CommandOutput;
use super::table::Paint;
use super::{Front, Outcome, connect};
use crate::id::PeerName;

/// Runs the command `cluster replace-node`.
pub async fn run(front: &mut Front, options: ReplaceNode) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let ReplaceNode { name, by, .. } = &options;
    let what = format!(
        "{by} may have been recorded as the successor of {name}, and not all nodes know it"
    );
    let hint = "run the command again: it waits until more than half of the nodes know it";
    let replaced = unless_interrupted(client.replace_node(name, by), &what, hint).await;
    connect::close(&client).await;
    replaced?.map_err(|error| connect::failure(&error))?;
    Ok(Box::new(Replaced { node: options.name, by: options.by }))
}

struct Replaced {
    node: PeerName,
    by: PeerName,
}

impl CommandOutput for Replaced {
    fn json(&self) -> Map<String, Value> {
        Map::from_iter([
            ("replaced".to_owned(), json!(self.node)),
            ("by".to_owned(), json!(self.by)),
        ])
    }

    fn text(&self, _: Paint) -> String {
        let Self { node, by } = self;
        format!(
            "{by} takes the place of {node}. Next: if {node} serves the catalogue, move it (`rapidraid catalogue move`); stop {node}, run `rapidraid repair --node {node}`, then `rapidraid cluster remove-node {node}`\n"
        )
    }
}
