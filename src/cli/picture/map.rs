//! The files that each node holds: a column for each node, with rows for replicas, piece and state.

use super::{Holding, Style, fit};
use crate::cli::table::Tint;

/// Maximum number of replicas that are listed for a node.
const LISTED: usize = 4;
const LABEL: usize = 10;

/// Draws the map. The files of a dead node are crossed out, and its state is written as a word,
/// too.
pub fn map(nodes: &[Holding], style: Style) -> String {
    let prefix = common_prefix(nodes);
    let replicas: Vec<Vec<String>> = nodes.iter().map(listed).collect();
    let labels = nodes.iter().map(|node| node.node.chars().count() - prefix.chars().count());
    let held =
        nodes.iter().flat_map(|n| n.replicas.iter().chain(&n.piece)).map(|l| l.chars().count());
    let cell = labels.chain(held).max().unwrap_or(0).clamp(4, 16) + 1;
    let label = LABEL.max(prefix.chars().count() + 2);
    let per_band = ((style.width() - 1 - label) / cell).max(1);
    let mut out = String::new();
    for (band, list) in nodes.chunks(per_band).zip(replicas.chunks(per_band)) {
        if !out.is_empty() {
            out.push('\n');
        }
        let mut line =
            |name: &str, tint: &dyn Fn(&Holding) -> Tint, text: &dyn Fn(usize) -> String| {
                let mut row = format!(" {}", fit(name, label));
                for (at, node) in band.iter().enumerate() {
                    row.push_str(&style.paint.tint(tint(node), &fit(&text(at), cell - 1)));
                    row.push(' ');
                }
                out.push_str(row.trim_end());
                out.push('\n');
            };
        let gone = |dead: bool, text: &str| match dead && !text.is_empty() {
            true => style.pick("×", "x").to_owned(),
            false => text.to_owned(),
        };
        let name = |at: usize| {
            band.get(at).map_or("", |n| n.node.strip_prefix(prefix).unwrap_or(&n.node)).to_owned()
        };
        line(prefix, &|_| Tint::Bold, &name);
        for depth in 0..list.iter().map(Vec::len).max().unwrap_or(0).max(1) {
            let held =
                |at: usize| list.get(at).and_then(|l| l.get(depth)).map_or("", String::as_str);
            let dead = |at: usize| band.get(at).is_some_and(|node| node.dead);
            let title = if depth == 0 { "replicas" } else { "" };
            line(title, &|n| alive(n, Tint::Green), &|at| match (depth, held(at)) {
                (0, "") => style.pick("·", ".").to_owned(),
                (_, text) => gone(dead(at), text),
            });
        }
        line("piece", &|n| alive(n, Tint::Cyan), &|at| match band.get(at) {
            Some(Holding { piece: Some(piece), dead, .. }) => gone(*dead, piece),
            _ => style.pick("·", ".").to_owned(),
        });
        line("state", &|n| alive(n, Tint::Dim), &|at| {
            if band.get(at).is_some_and(|node| node.dead) { "DEAD" } else { "up" }.to_owned()
        });
    }
    let dead = nodes.iter().filter(|node| node.dead).count();
    let copies = |of: &dyn Fn(&Holding) -> usize| {
        nodes.iter().filter(|node| !node.dead).map(of).sum::<usize>()
    };
    let (pieces, replicas) =
        (copies(&|n| usize::from(n.piece.is_some())), copies(&|n| n.replicas.len()));
    let up = nodes.len() - dead;
    out.push_str(&format!(" {up} up, {dead} dead; {replicas} replicas and {pieces} pieces left\n"));
    out
}

fn alive(node: &Holding, tint: Tint) -> Tint {
    if node.dead { Tint::Red } else { tint }
}

fn listed(node: &Holding) -> Vec<String> {
    let mut out = node.replicas.clone();
    if out.len() > LISTED {
        out.truncate(LISTED - 1);
        out.push(format!("+{}", node.replicas.len() - out.len()));
    }
    out
}

/// Returns the common prefix of all names up to their first digit. It is printed once in front
/// instead of in every column.
fn common_prefix(nodes: &[Holding]) -> &str {
    let Some(first) = nodes.first().map(|node| node.node.as_str()) else { return "" };
    let prefix = first.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default();
    let shared =
        prefix.len() < first.len() && nodes.iter().all(|node| node.node.starts_with(prefix));
    if shared && prefix.len() <= 16 { prefix } else { "" }
}
