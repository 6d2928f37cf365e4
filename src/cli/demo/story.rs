//! The demo, chapter by chapter.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use super::daemons::Daemons;
use super::facts::{HopSum, check_model, spans, stops, times};
use super::report::{DemoReport, Left};
use super::stage::{self, NODES};
use crate::cli::args::Demo;
use crate::cli::holdings::holdings;
use crate::cli::init::NewCluster;
use crate::cli::picture::{self, Holding, Style};
use crate::cli::printer::CommandFailure;
use crate::cli::table::{Tint, shown};
use crate::cli::{Front, connect, files, transfer};
use crate::client::FileSource;
use crate::client::{
    Client, NewShard, Progress, RestoreRequest, SaveOptions, ShowReport, StripeFiles,
};
use crate::clock::{Clock, SystemClock};
use crate::entropy::{Entropy, SeededEntropy};
use crate::id::{Job, PeerName, ShardName, Step};
use crate::kind::ErrorKind;
use crate::store::RealDisk;
use crate::units::ByteCount;
use crate::wire::calls::{ArchiveEvent, ArchiveOptions, PlanChoice, StripeReport};
use crate::wire::order::Codec;

/// Number of nodes that are killed: as many as the default code can lose.
const LOSSES: usize = 5;
const STEP: Step = Step(1);

/// Runs all chapters of the demo. Returns their results.
pub async fn tell(front: &mut Front, options: &Demo) -> Result<DemoReport, CommandFailure> {
    let folder = stage::folder(options)?;
    let job: Job = "demo".parse().map_err(|_| defect("the demo's job"))?;
    let style = Style::of_env(&front.env, front.printer.paint());
    let mut story = Story { front, style, clock: SystemClock::new(), job };

    let (cluster, mut daemons, client) = story.start(folder.path(), options.stay).await?;
    let (path, about) = stage::input(options, folder.path()).await?;
    let name = shard_name(&path)?;
    let save = story.save(&client, &path, name.clone(), &about).await?;
    let archive = story.archive(&client, &save).await?;
    let killed = victims(&cluster, options.seed);
    story.lose(&client, &mut daemons, &killed).await?;
    let restore_took = story.restore(&cluster, folder.path(), &path, &name, save.k).await?;

    let left = if options.stay { Some(leave(daemons, folder, &cluster)) } else { None };
    Ok(DemoReport {
        shape: (save.n, save.k),
        input_bytes: save.input_bytes,
        block_bytes: archive.block_bytes,
        stripes: archive.stripes,
        replicated_bytes: save.stored_bytes,
        archived_bytes: archive.stored_bytes,
        took: [save.took, archive.took, restore_took],
        killed,
        hops: archive.hops,
        left,
    })
}

/// The results of the chapter `Save`.
struct Save {
    n: u8,
    k: u8,
    input_bytes: u64,
    stored_bytes: u64,
    took: Duration,
}

/// The results of the chapter `Archive`.
struct Archive {
    stripes: u64,
    block_bytes: u64,
    stored_bytes: u64,
    hops: Vec<HopSum>,
    took: Duration,
}

/// The narrator of the demo.
struct Story<'a> {
    front: &'a mut Front,
    style: Style,
    clock: Arc<SystemClock>,
    job: Job,
}

impl Story<'_> {
    fn chapter(&mut self, number: u8, title: &str, text: &str) {
        let title = self.style.paint.tint(Tint::Bold, &format!("{number}. {title}"));
        self.front.printer.show(&format!("\n{title}  {}\n", shown(text)));
    }

    fn line(&mut self, text: &str) {
        self.front.printer.show(&format!("   {text}\n"));
    }

    fn picture(&mut self, picture: &str) {
        self.front.printer.show(&format!("\n{picture}"));
    }

    async fn start(
        &mut self,
        folder: &Path,
        stay: bool,
    ) -> Result<(NewCluster, Daemons, Client), CommandFailure> {
        let about = format!(
            "{NODES} storage nodes on this machine, each a process with its own certificate and folder"
        );
        self.chapter(1, "Start", &about);
        let from = self.clock.now();
        let cluster = stage::cluster(folder)?;
        let ours: Vec<&String> =
            self.front.env.keys().filter(|name| name.starts_with("RAPIDRAID_")).collect();
        let mut daemons = Daemons::start(&cluster, stay, &ours)?;
        daemons.ready().await?;
        let client = stage::client(&cluster).await?;
        stage::all_live(&client).await?;
        let seconds = (self.clock.now() - from).as_secs_f64();
        self.line(&format!("all live after {seconds:.1} s; they talk QUIC with mutual TLS"));
        Ok((cluster, daemons, client))
    }

    async fn save(
        &mut self,
        client: &Client,
        path: &Path,
        name: ShardName,
        about: &str,
    ) -> Result<Save, CommandFailure> {
        self.chapter(2, "Save", about);
        let source =
            FileSource::open(path).map_err(|error| files::io_failure("read", path, &error))?;
        let shard = NewShard { name, source: Arc::new(source) };
        let progress = transfer::watch(self.front, "save".to_owned());
        let from = self.clock.now();
        let saved = client
            .save(&self.job, STEP, vec![shard], SaveOptions { replace: false }, progress)
            .await;
        let saved = saved.map_err(|error| connect::failure(&error))?;
        let took = self.clock.now() - from;
        let stored_bytes = stage::stored(client).await?;
        let input_bytes = saved.len_bytes;
        let (pace, times) = (transfer::pace(input_bytes, took), times(stored_bytes, input_bytes));
        self.line(&format!(
            "{} in {pace}; stored {times}: each block on two nodes",
            ByteCount(input_bytes)
        ));
        let map = first_stripe(&connect::ask(client.show_step(&self.job, Some(STEP))).await?);
        self.picture(&picture::map(&map, self.style));
        Ok(Save { n: saved.n, k: saved.k, input_bytes, stored_bytes, took })
    }

    async fn archive(&mut self, client: &Client, save: &Save) -> Result<Archive, CommandFailure> {
        let about = "a chain through all nodes: each adds its blocks to the stream, keeps a piece, sends the stream on";
        self.chapter(3, "Archive", about);
        let bar = transfer::watch(self.front, "archive".to_owned());
        let mut on_event = |event: &ArchiveEvent| {
            if let ArchiveEvent::Progress { done_bytes, total_bytes } = event {
                bar(Progress { done_bytes: *done_bytes, total_bytes: *total_bytes });
            }
        };
        let how = ArchiveOptions { plan: PlanChoice::Chain, codec: Codec::Kernel, parallel: 0 };
        let from = self.clock.now();
        let archived = client.archive(&self.job, Some(STEP), how, &mut on_event).await;
        let archived = archived.map_err(|error| connect::failure(&error))?;
        let took = self.clock.now() - from;
        drop(bar);
        if archived.undropped > 0 {
            let message = format!(
                "{} stripes kept replicas: {}",
                archived.undropped,
                archived.notes.join("; ")
            );
            return Err(CommandFailure::new(ErrorKind::Unavailable, message));
        }
        let mut reports = archived.reports;
        reports.sort_by_key(|report| report.stripe);
        let first = reports.first().ok_or_else(|| defect("the archiving's report"))?;
        let hops = check_model(&reports, usize::from(save.n))?;
        let stored_bytes = stage::stored(client).await?;
        self.draw(first);
        let Save { n, .. } = save;
        let each = match archived.stripes {
            1 => String::new(),
            many => format!(" in each of {many} stripes (the first is shown)"),
        };
        let transfers = n.saturating_sub(1);
        self.line(&format!("checked: {transfers} transfers of one block{each}, at most one in and one out a node, as the model says"));
        let seconds = took.as_secs_f64();
        self.line(&format!(
            "{seconds:.2} s; the replicas were dropped only after all {n} pieces had been read back and proven"
        ));
        let (pieces, replicas) =
            (times(stored_bytes, save.input_bytes), times(save.stored_bytes, save.input_bytes));
        self.line(&format!("stored {pieces} instead of {replicas}"));
        Ok(Archive {
            stripes: archived.stripes,
            block_bytes: first.block_bytes,
            stored_bytes,
            hops,
            took,
        })
    }

    fn draw(&mut self, report: &StripeReport) {
        self.picture(&picture::chain(&stops(report), self.style));
        self.picture(&picture::timeline(&spans(report), self.style));
        self.front.printer.show("\n");
    }

    async fn lose(
        &mut self,
        client: &Client,
        daemons: &mut Daemons,
        killed: &[PeerName],
    ) -> Result<(), CommandFailure> {
        let names: Vec<&str> = killed.iter().map(PeerName::as_str).collect();
        let show = connect::ask(client.show_step(&self.job, Some(STEP))).await?;
        connect::close(client).await;
        self.chapter(4, "Lose five nodes", &format!("kill -9 {}", names.join(" ")));
        daemons.kill(killed);
        let mut map = first_stripe(&show);
        for holding in &mut map {
            holding.dead = names.contains(&holding.node.as_str());
        }
        self.picture(&picture::map(&map, self.style));
        Ok(())
    }

    async fn restore(
        &mut self,
        cluster: &NewCluster,
        folder: &Path,
        path: &Path,
        name: &ShardName,
        k: u8,
    ) -> Result<Duration, CommandFailure> {
        let nodes_left = NODES - LOSSES;
        self.chapter(
            5,
            "Restore",
            &format!("a new client asks the {nodes_left} nodes that are left"),
        );
        let out = folder.join("restored");
        let disk =
            RealDisk::open(&out).map_err(|error| CommandFailure::of(error.kind(), &error))?;
        let request =
            RestoreRequest { out: Arc::new(disk), force: false, shard: None, range: None };
        let progress = transfer::watch(self.front, "restore".to_owned());
        let from = self.clock.now();
        let client = stage::client(cluster).await?;
        let restored = client.restore(&self.job, Some(STEP), request, progress).await;
        let restored = restored.map_err(|error| connect::failure(&error))?;
        let took = self.clock.now() - from;
        connect::close(&client).await;
        let (before, after) =
            (stage::hash(path.to_owned()).await?, stage::hash(out.join(name.as_str())).await?);
        if before != after {
            let message = format!("the restored file has BLAKE3 {after}, the saved one {before}");
            return Err(CommandFailure::new(ErrorKind::Internal, message));
        }
        let pace = transfer::pace(restored.len_bytes, took);
        self.line(&format!("{} in {pace}, decoded from {k} pieces", ByteCount(restored.len_bytes)));
        let same = self.style.paint.tint(Tint::Green, "identical");
        let hex = after.to_hex();
        self.line(&format!("{same}: BLAKE3 {}... before and after", hex.get(..16).unwrap_or(&hex)));
        Ok(took)
    }
}

/// Returns the files that the nodes hold of the first stripe.
fn first_stripe(show: &ShowReport) -> Vec<Holding> {
    let first = show.shards.first();
    first
        .map(|(root, state)| holdings(root, state, 0, &show.nodes, &StripeFiles::new()))
        .unwrap_or_default()
}

/// Chooses the nodes that are killed. The catalogue server is never chosen, because the demo does
/// not rebuild a catalogue.
fn victims(cluster: &NewCluster, seed: u64) -> Vec<PeerName> {
    let entropy = SeededEntropy::new(seed);
    let mut candidates: Vec<&PeerName> =
        cluster.nodes.iter().skip(1).map(|node| &node.name).collect();
    let mut chosen = Vec::new();
    while chosen.len() < LOSSES && !candidates.is_empty() {
        let at = usize::try_from(entropy.below(candidates.len() as u64)).unwrap_or(0);
        chosen.push(candidates.swap_remove(at).clone());
    }
    chosen.sort();
    chosen
}

fn shard_name(path: &Path) -> Result<ShardName, CommandFailure> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.parse().map_err(|error: crate::id::IdError| CommandFailure::of(ErrorKind::Invalid, &error))
}

fn leave(daemons: Daemons, folder: TempDir, cluster: &NewCluster) -> Left {
    daemons.leave();
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("rapidraid"));
    Left {
        dir: folder.keep(),
        client_config: cluster.client_config(),
        program: program.display().to_string(),
    }
}

fn defect(what: &str) -> CommandFailure {
    CommandFailure::new(ErrorKind::Internal, format!("{what} is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ClusterId;

    #[test]
    fn a_seed_decides_who_dies_and_the_catalogue_never_does() {
        let nodes =
            (1..=16).map(|at| format!("node-{at:02}=127.0.0.1:{}", 7000 + at).parse().unwrap());
        let cluster = NewCluster {
            dir: PathBuf::new(),
            cluster: ClusterId([0; 16]),
            nodes: nodes.collect(),
            nodes_needed: 6,
        };
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let chosen = victims(&cluster, seed);
            assert_eq!(chosen, victims(&cluster, seed));
            assert_eq!(chosen.len(), LOSSES);
            seen.extend(chosen);
        }
        assert_eq!(seen.len(), 15);
        assert!(!seen.contains(&cluster.nodes[0].name));
    }
}
