//! The result of the demo: a summary for people, a document for programs.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::facts::{HopSum, times};
use crate::cli::printer::CommandOutput;
use crate::cli::table::{Paint, Table, Tint};
use crate::cli::transfer::counted;
use crate::id::PeerName;
use crate::units::ByteCount;

/// The cluster that stays, and how to use it.
pub struct Left {
    /// The cluster's folder.
    pub dir: PathBuf,
    /// The client's configuration.
    pub client_config: PathBuf,
    /// The path of the program.
    pub program: String,
}

/// The results of the demo.
pub struct DemoReport {
    /// Number of pieces and of blocks of the code.
    pub shape: (u8, u8),
    /// Length of the saved file.
    pub input_bytes: u64,
    /// Block length of the first stripe.
    pub block_bytes: u64,
    /// Number of stripes.
    pub stripes: u64,
    /// Bytes on all nodes after the save.
    pub replicated_bytes: u64,
    /// Bytes on all nodes after archiving.
    pub archived_bytes: u64,
    /// Durations of saving, archiving and restoring.
    pub took: [Duration; 3],
    /// The nodes that were killed.
    pub killed: Vec<PeerName>,
    /// The bytes that the hops moved.
    pub hops: Vec<HopSum>,
    /// The cluster, if it stays.
    pub left: Option<Left>,
}

impl CommandOutput for DemoReport {
    fn json(&self) -> Map<String, Value> {
        let [save, archive, restore] = self.took.map(|took| took.as_secs_f64());
        let hop = |hop: &HopSum| json!({ "node": hop.node, "in_bytes": hop.in_bytes, "out_bytes": hop.out_bytes });
        let hops: Vec<Value> = self.hops.iter().map(hop).collect();
        let fields = json!({
            "n": self.shape.0, "k": self.shape.1, "input_bytes": self.input_bytes, "block_bytes": self.block_bytes,
            "stripes": self.stripes, "stored_bytes_replicated": self.replicated_bytes,
            "stored_bytes_archived": self.archived_bytes, "save_s": save, "archive_s": archive, "restore_s": restore,
            "killed": self.killed, "verified": true, "hops": hops, "dir": self.left.as_ref().map(|left| left.dir.display().to_string()),
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, paint: Paint) -> String {
        let [save, archive, restore] = self.took;
        let (n, k) = self.shape;
        let mut table = Table::new(&["", ">BYTES", ">TIME", ">RATE", ""]);
        let mut row = |what: &str, stored: String, took: Duration, note: String| {
            let seconds = took.as_secs_f64().max(0.001);
            let rate = ByteCount((self.input_bytes as f64 / seconds) as u64);
            table.row([
                what.to_owned(),
                stored,
                format!("{seconds:.2} s"),
                format!("{rate}/s"),
                note,
            ]);
        };
        row(
            "save",
            times(self.replicated_bytes, self.input_bytes),
            save,
            "survives the loss of any node".to_owned(),
        );
        row(
            "archive",
            times(self.archived_bytes, self.input_bytes),
            archive,
            format!("survives the loss of any {} nodes", n.saturating_sub(k)),
        );
        row(
            "restore",
            ByteCount(self.input_bytes).to_string(),
            restore,
            format!("identical, with {} lost", counted(self.killed.len() as u64, "node")),
        );
        let mut out = format!("\n{}", table.render(paint));
        out.push_str(&paint.tint(
            Tint::Dim,
            "\nAll nodes share this machine's processors and disk: the times say that it works, not how fast a cluster is.\n",
        ));
        if let Some(left) = &self.left {
            out.push_str(&left.text(paint, &self.killed));
        }
        out
    }
}

impl Left {
    fn text(&self, paint: Paint, killed: &[PeerName]) -> String {
        let (dir, program) = (self.dir.display(), &self.program);
        let mut lines = vec![
            format!("export RAPIDRAID_CONFIG={}", self.client_config.display()),
            format!("{program} status"),
            format!("{program} show demo/1"),
            format!("{program} save mine/1 README.md"),
        ];
        if let Some(name) = killed.first() {
            lines.push(format!("{program} node --config {dir}/cluster/nodes/{name}/rapidraid.toml    # brings {name} back"));
        }
        let tried: Vec<String> =
            lines.iter().map(|line| format!("  {}\n", paint.tint(Tint::Cyan, line))).collect();
        let stop = format!("kill $(cat {dir}/cluster/nodes/*/pid); rm -r {dir}");
        format!(
            "\nThe cluster is still up. Try:\n\n{}\nEnd it:\n\n  {}\n",
            tried.concat(),
            paint.tint(Tint::Cyan, &stop)
        )
    }
}
