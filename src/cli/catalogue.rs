//! `catalogue rebuild` and `catalogue move`: the commands that choose the catalogue server.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::args::{Move, Rebuild};
use super::interrupt::unless_interrupted;
use super::printer::CommandOutput;
use super::progress::ProgressLine;
use super::table::{Paint, shown};
use super::transfer::counted;
use super::{Front, Outcome, connect};
use crate::client::ClientError;
use crate::clock::{Clock, SystemClock, deadline};
use crate::net::Address;
use crate::wire::calls::{MoveCatalogueAnswer, RebuildAnswer};

/// Interval at which the display is updated.
const TICK: Duration = Duration::from_millis(500);
/// Time limit for the question whether retention is paused, after a rebuild that is done.
const PAUSE_LIMIT: Duration = Duration::from_secs(3);
/// Maximum number of entries of each list that are printed; JSON has all entries of the answer.
const LISTED: usize = 20;
/// The hint after an interrupt.
const WHO_SERVES: &str =
    "`rapidraid status` shows who serves the catalogue; if need be, run the command again";

/// Runs the command `catalogue rebuild`.
pub async fn rebuild(front: &mut Front, options: Rebuild) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let on = options.on.map(|host_port| Address { host_port, node: None });
    let rebuilding = async {
        match options.accept_loss {
            false => client.rebuild_catalogue(on.as_ref()).await,
            true => client.rebuild_catalogue_despite_loss(on.as_ref()).await,
        }
    };
    let rebuilding = watched(front, "reading the nodes", rebuilding);
    let what = "the daemon may have begun to rebuild the catalogue; if so, it continues";
    let answer = unless_interrupted(rebuilding, what, WHO_SERVES).await;
    // A daemon of an older version does not pause retention.
    let is_retention_paused = match &answer {
        Ok(Ok(_)) => {
            let (clock, asked) = (SystemClock::new(), client.is_retention_paused());
            deadline(&*clock, PAUSE_LIMIT, asked).await.ok().and_then(Result::ok)
        }
        _ => None,
    };
    connect::close(&client).await;
    let answer = answer?.map_err(|error| connect::failure(&error))?;
    Ok(Box::new(Rebuilt { answer, is_retention_paused }))
}

/// Runs the command `catalogue move`.
pub async fn move_to(front: &mut Front, options: Move) -> Outcome {
    let client = connect::client(&options.connect, &front.env).await?;
    let on = Address { host_port: options.on, node: None };
    let moving = watched(front, "copying the catalogue", client.move_catalogue(&on));
    let what = "the daemon may have begun to copy the catalogue; if so, it continues";
    let answer = unless_interrupted(moving, what, WHO_SERVES).await;
    connect::close(&client).await;
    Ok(Box::new(Moved(answer?.map_err(|error| connect::failure(&error))?)))
}

/// Awaits `work` and shows the elapsed time meanwhile. The amount of work is not known before it
/// ends.
async fn watched<T>(
    front: &Front,
    what: &str,
    work: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    let (clock, progress) =
        (SystemClock::new(), ProgressLine::new(front.printer.look().watched, what, None));
    tokio::pin!(work);
    loop {
        tokio::select! {
            answer = &mut work => return answer,
            () = clock.sleep(TICK) => progress.set(0, ""),
        }
    }
}

struct Moved(MoveCatalogueAnswer);

impl CommandOutput for Moved {
    fn json(&self) -> Map<String, Value> {
        let MoveCatalogueAnswer { epoch, home, from, entries } = &self.0;
        let fields = json!({ "epoch": epoch, "home": home, "from": from, "entries": entries });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, _: Paint) -> String {
        let MoveCatalogueAnswer { epoch, home, from, entries } = &self.0;
        let entries = counted(*entries, "record");
        format!(
            "The catalogue is served by {home} now: epoch {epoch}, {entries} copied from {from}.\n"
        )
    }
}

struct Rebuilt {
    answer: RebuildAnswer,
    /// `None` if it could not be found out.
    is_retention_paused: Option<bool>,
}

impl CommandOutput for Rebuilt {
    fn json(&self) -> Map<String, Value> {
        let answer = &self.answer;
        let damaged: Vec<String> = answer.damaged.iter().map(ToString::to_string).collect();
        let fields = json!({
            "epoch": answer.epoch, "home": answer.home, "reached": answer.reached, "missing": answer.missing,
            "steps": answer.steps, "shards": answer.shards, "orphans": answer.orphans,
            "incomplete": answer.incomplete, "damaged": damaged,
            "retention_paused": self.is_retention_paused,
        });
        fields.as_object().cloned().unwrap_or_default()
    }

    fn text(&self, _: Paint) -> String {
        let answer = &self.answer;
        let mut text = format!(
            "The catalogue was rebuilt: epoch {}, served by {}.\n  {} with {}, read from {}\n",
            answer.epoch,
            answer.home,
            counted(answer.steps.into(), "checkpoint"),
            counted(answer.shards.into(), "shard"),
            counted(answer.reached.len() as u64, "storage node"),
        );
        if answer.orphans > 0 {
            let saves = counted(answer.orphans.into(), "save");
            text.push_str(&format!(
                "  {saves} that were never committed, or were removed, will be purged\n"
            ));
        }
        text.push_str(match self.is_retention_paused {
            Some(true) => {
                "  labels are lost, so retention is paused: set them again, then `rapidraid catalogue retention --resume`\n"
            }
            Some(false) => {
                "  labels are lost, and retention is not paused: set them again before old checkpoints are removed\n"
            }
            None => "  labels are lost: set them again; `rapidraid status` says whether retention is paused\n",
        });
        let missing: Vec<String> = answer.missing.iter().map(ToString::to_string).collect();
        let damaged: Vec<String> = answer.damaged.iter().map(ToString::to_string).collect();
        let lists = [
            ("not reached; facts that only these nodes know are not in the catalogue", &missing),
            ("checkpoints that could not be brought back", &answer.incomplete),
            ("stripes of which too little was found to read them now", &damaged),
        ];
        for (what, list) in lists.iter().filter(|(_, list)| !list.is_empty()) {
            text.push_str(&format!("{what}:\n"));
            for entry in list.iter().take(LISTED) {
                text.push_str(&format!("  {}\n", shown(entry)));
            }
            if list.len() > LISTED {
                text.push_str(&format!("  and {} more (--json has them)\n", list.len() - LISTED));
            }
        }
        text
    }
}
