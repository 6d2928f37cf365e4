//! `status`: how many nodes may be lost, the nodes, what they hold and what they use.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::args::StatusOptions;
use super::jobs::JobsUnderWay;
use super::printer::CommandOutput;
use super::table::{Paint, Table, Tint, shown};
use super::transfer::counted;
use super::{Front, Outcome, connect, rules, safety};
use crate::client::{NodeReport, StatusReport};
use crate::format::records::{LeaveState, RingChange};
use crate::id::PeerName;
use crate::units::ByteCount;

/// Runs the command `status`.
pub async fn run(front: &mut Front, options: StatusOptions) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let report = connect::ask(client.status()).await;
    let under_way = match report.as_ref().map(|report| &report.catalogue.read_only_reason) {
        Ok(None) => JobsUnderWay::list_soon(&client).await,
        Ok(Some(reason)) => JobsUnderWay::unknown(reason),
        Err(error) => JobsUnderWay::unknown(&error.message),
    };
    connect::close(&client).await;
    Ok(Box::new(Nodes(report?, under_way)))
}

struct Nodes(StatusReport, JobsUnderWay);

/// Returns the bytes of replicas and pieces on all nodes that answered.
pub fn stored_bytes(report: &StatusReport) -> u64 {
    let answers = report.nodes.iter().filter_map(|node| node.held.as_ref());
    answers.fold(0, |sum, answer| {
        sum.saturating_add(answer.replicas.1).saturating_add(answer.pieces.1)
    })
}

fn node_json(report: &NodeReport) -> Value {
    let NodeReport { view, hello, held } = report;
    let (node, version) = (&view.node, hello.as_ref().map(|hello| &hello.version));
    let mut fields = json!({
        "name": node.name, "address": node.address, "zone": node.zone, "rack": node.rack,
        "storage": node.storage, "live": view.live, "answers": hello.is_some(), "version": version,
    });
    let held = held.as_ref().map(|answer| {
        let budgets: Vec<Value> = answer
            .budgets
            .iter()
            .map(|(name, used, peak, total)| {
                json!({ "name": name, "used_bytes": used, "peak_bytes": peak, "total_bytes": total })
            })
            .collect();
        json!({
            "replicas": answer.replicas.0, "replica_bytes": answer.replicas.1, "pieces": answer.pieces.0,
            "piece_bytes": answer.pieces.1, "record_bytes": answer.record_bytes, "quarantined": answer.quarantined,
            "disk_total_bytes": answer.disk.0, "disk_free_bytes": answer.disk.1, "budgets": budgets,
            "peak_memory_bytes": answer.peak_memory_bytes, "segmentation_offload": answer.segmentation_offload,
            "notes": answer.notes,
        })
    });
    if let (Some(fields), Some(Value::Object(held))) = (fields.as_object_mut(), held) {
        fields.extend(held);
    }
    fields
}

/// Returns the state of a node as text. A catalogue that is read-only renews no lease of a node, so an expired
/// lease does not show then that its node is dead.
fn state(report: &StatusReport, node: &NodeReport) -> &'static str {
    let has_lease = node.view.live || report.catalogue.read_only_reason.is_some();
    match (has_lease, &node.hello) {
        (true, Some(_)) => "up",
        (false, Some(_)) => "not registered",
        (true, None) => "no answer",
        (false, None) => "DEAD",
    }
}

/// Returns a line about the versions of a cluster that runs several, or None.
fn mixed(report: &StatusReport) -> Option<String> {
    let mut nodes: BTreeMap<&str, usize> = BTreeMap::new();
    for hello in report.nodes.iter().filter_map(|node| node.hello.as_ref()) {
        *nodes.entry(hello.version.as_str()).or_default() += 1;
    }
    let each = |(version, count): (&&str, &usize)| {
        format!("{} on {}", shown(version), counted(*count as u64, "node"))
    };
    let all: Vec<String> = nodes.iter().map(each).collect();
    (all.len() > 1).then(|| format!("several versions run: {}; finish the upgrade", all.join(", ")))
}

/// Returns the ring changes of the nodes that are leaving.
fn leaving(report: &StatusReport) -> impl Iterator<Item = &RingChange> {
    let changes = report.ring_changes.changes.iter();
    changes.filter(|change| change.state == LeaveState::Leaving)
}

fn leaving_json(change: &RingChange) -> Value {
    json!({ "node": change.node, "successors": change.successors })
}

fn names(nodes: &[PeerName]) -> String {
    nodes.iter().map(PeerName::as_str).collect::<Vec<_>>().join(", ")
}

/// Returns the lines that begin the text: whether something can be saved, and how many nodes may be
/// lost.
fn safety_text(report: &StatusReport, paint: Paint) -> String {
    let mut out = String::new();
    let read_only_reason = report.catalogue.read_only_reason.as_ref();
    if let Some(why) = read_only_reason {
        let text = format!("nothing can be saved, archived or removed now: {}", shown(why));
        out.push_str(&format!("{}\n", paint.tint(Tint::Red, &text)));
    }
    match (&report.repair, read_only_reason) {
        (Some(repair), _) => out.push_str(&safety::text(repair, paint)),
        (None, Some(_)) => {
            out.push_str("safety: not known: no catalogue server surveys the checkpoints\n");
        }
        (None, None) => {
            out.push_str("safety: not known: the catalogue server does not say what it surveys; it is slow, or runs an older program\n");
        }
    }
    out
}

impl CommandOutput for Nodes {
    fn json(&self) -> Map<String, Value> {
        let nodes: Vec<Value> = self.0.nodes.iter().map(node_json).collect();
        let fields = json!({ "catalogue": self.0.catalogue.catalogue_server, "unchanged": self.0.catalogue.read_only_reason,
                "epoch": self.0.epoch, "nodes": nodes,
                "policy": self.0.policy.as_ref().map(rules::json),
                "retention_paused": self.0.is_retention_paused,
                "repair": self.0.repair.as_ref().map(safety::json),
                "leaving": leaving(&self.0).map(leaving_json).collect::<Vec<_>>() });
        let mut fields = fields.as_object().cloned().unwrap_or_default();
        fields.extend(self.1.json());
        fields
    }

    fn text(&self, paint: Paint) -> String {
        let report = &self.0;
        let headings = [
            "NODE",
            "ADDRESS",
            "DOMAIN",
            "STATE",
            "VERSION",
            ">REPLICAS",
            ">SIZE",
            ">PIECES",
            ">SIZE",
            ">DISK FREE",
            ">PEAK MEMORY",
        ];
        let mut table = Table::new(&headings);
        let mut notes = String::new();
        for of_node in &report.nodes {
            let NodeReport { view, hello, held: answer } = of_node;
            let node = &view.node;
            let domain = match (node.zone.as_str(), node.rack.as_str()) {
                ("", "") => "-".to_owned(),
                (zone, rack) => format!("{zone}/{rack}"),
            };
            let version = hello.as_ref().map_or("-", |hello| hello.version.as_str());
            let mut row = vec![
                node.name.to_string(),
                node.address.clone(),
                domain,
                state(report, of_node).to_owned(),
                shown(version).to_string(),
            ];
            if let Some(held) = answer {
                let size = |bytes: u64| ByteCount(bytes).to_string();
                row.extend([
                    held.replicas.0.to_string(),
                    size(held.replicas.1),
                    held.pieces.0.to_string(),
                    size(held.pieces.1),
                ]);
                row.extend([size(held.disk.1), size(held.peak_memory_bytes)]);
                for note in &held.notes {
                    notes.push_str(&format!("{}: {}\n", node.name, shown(note)));
                }
            }
            table.row(row);
        }
        for change in leaving(report) {
            let node = &change.node;
            let successors = match change.successors.is_empty() {
                true => String::new(),
                false => format!(" (successor: {})", names(&change.successors)),
            };
            notes.push_str(&format!(
                "{node} is leaving{successors}: `rapidraid cluster remove-node {node}` completes this\n"
            ));
        }
        if report.is_retention_paused == Some(true) {
            notes.push_str("retention is paused, so no rule removes old checkpoints and disks may fill up: after a rebuild, set the lost labels again; then `rapidraid catalogue retention --resume`\n");
        }
        let up = report.nodes.iter().filter(|node| state(report, node) == "up").count();
        let catalogue = report.catalogue.catalogue_server.as_ref();
        let catalogue = catalogue.map_or("not found".to_owned(), |name| format!("on {name}"));
        // A node that does not answer may hold data, so the sum is only a lower bound.
        let all_answer = report.nodes.iter().all(|node| node.held.is_some());
        let least = if all_answer { "" } else { "at least " };
        let mut out = safety_text(report, paint);
        out.push_str(&format!(
            "\n{}\n{up} of {} live, {least}{} stored; catalogue {catalogue}, epoch {}\n",
            table.render(paint),
            counted(report.nodes.len() as u64, "node"),
            ByteCount(stored_bytes(report)),
            report.epoch,
        ));
        if let Some(versions) = mixed(report) {
            out.push_str(&format!("{versions}\n"));
        }
        out.push_str(&report.policy.as_ref().map_or_else(String::new, rules::text));
        out.push_str(&self.1.summary());
        if !notes.is_empty() {
            out.push_str(&format!("\n{}\n{notes}", paint.tint(Tint::Yellow, "warnings:")));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::CatalogueReport;
    use crate::format::records::RingChanges;
    use crate::id::Epoch;
    use crate::wire::calls::RepairStatus;

    fn report(repair: Option<RepairStatus>, read_only_reason: Option<&str>) -> StatusReport {
        let read_only_reason = read_only_reason.map(str::to_owned);
        let catalogue = CatalogueReport { catalogue_server: None, read_only_reason };
        let (epoch, ring_changes) = (Epoch::default(), RingChanges::default());
        StatusReport {
            nodes: Vec::new(),
            catalogue,
            epoch,
            policy: None,
            is_retention_paused: None,
            repair,
            ring_changes,
        }
    }

    #[test]
    fn what_is_not_known_of_the_safety_is_said_at_the_top() {
        let text = |report: &StatusReport| {
            Nodes(report.clone(), JobsUnderWay::unknown("no answer")).text(Paint::PLAIN)
        };
        let silent = text(&report(None, Some("no node serves the catalogue")));
        let first = "nothing can be saved, archived or removed now: no node serves the catalogue\n\
                     safety: not known: no catalogue server surveys the checkpoints\n\n";
        assert!(silent.starts_with(first), "{silent}");
        assert!(text(&report(None, None)).starts_with("safety: not known: the catalogue server"));
        let surveyed = text(&report(Some(RepairStatus::default()), Some("why")));
        assert!(
            surveyed.contains("now: why\nsafety: not known yet; the first survey"),
            "{surveyed}"
        );
    }
}
