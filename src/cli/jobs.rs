//! The open saves and the newest launches of jobs, which `ls` and `status` show.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{Client, ClientError};
use crate::clock::{SystemClock, deadline};
use crate::id::Job;
use crate::units::date;
use crate::wire::calls::{LaunchView, OpenSaveView, StepView};

/// How long `status` waits for the saves and launches of jobs.
const LIST_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of launches in the text of `status`.
const LAUNCHES_SHOWN: usize = 16;

/// The open saves and the newest launches of jobs.
pub struct JobsUnderWay {
    /// The saves that are not committed yet, or the reason why they are not known.
    open: Result<Vec<OpenSaveView>, String>,
    /// The newest launch of each job, or the reason why they are not known.
    launches: Result<Vec<LaunchView>, String>,
}

impl JobsUnderWay {
    /// Lists the open saves and the newest launches of one job, or of all jobs that have an open save
    /// or one of the committed steps `steps`.
    pub async fn list_for_steps(client: &Client, job: Option<&Job>, steps: &[StepView]) -> Self {
        let mut found = Self::list(client, job).await;
        if let (None, Ok(launches)) = (job, &mut found.launches) {
            let mut jobs: BTreeSet<&Job> = steps.iter().map(|view| &view.job).collect();
            jobs.extend(found.open.iter().flatten().map(|view| &view.job));
            launches.retain(|launch| jobs.contains(&launch.job));
        }
        found
    }

    /// Lists the open saves and the newest launches of all jobs. A list that takes longer than
    /// [`LIST_LIMIT`] is unknown.
    pub async fn list_soon(client: &Client) -> Self {
        let (open, launches) = tokio::join!(
            within_limit(client.list_open_saves(None)),
            within_limit(client.list_newest_launches())
        );
        Self { open, launches }
    }

    /// Lists the open saves and the newest launches of one job, or of all jobs.
    async fn list(client: &Client, job: Option<&Job>) -> Self {
        let told = |error: ClientError| error.to_string();
        let open = client.list_open_saves(job).await.map_err(told);
        let launches = list_newest_launches(client, job).await.map_err(told);
        Self { open, launches }
    }

    /// Returns a value that says why nothing is known.
    pub fn unknown(reason: &str) -> Self {
        Self { open: Err(reason.to_owned()), launches: Err(reason.to_owned()) }
    }

    /// Returns a line for each save that is not committed yet.
    pub fn open_text(&self) -> String {
        match &self.open {
            Ok(open) => open.iter().map(open_line).collect(),
            Err(reason) => format!("saves that are not committed yet are not listed: {reason}\n"),
        }
    }

    /// Returns a line for the newest launch of each job.
    pub fn launches_text(&self) -> String {
        match &self.launches {
            Ok(launches) => launches.iter().map(launch_line).collect(),
            Err(reason) => format!("launches are not listed: {reason}\n"),
        }
    }

    /// Returns a line for each save that is not committed yet, and for the newest launches.
    pub fn summary(&self) -> String {
        let (Ok(_), Ok(launches)) = (&self.open, &self.launches) else {
            return self.open_text() + &self.launches_text();
        };
        let mut newest: Vec<&LaunchView> = launches.iter().collect();
        newest.sort_by_key(|view| std::cmp::Reverse(view.registered.registered_at));
        let mut out = self.open_text();
        out.extend(newest.iter().take(LAUNCHES_SHOWN).map(|view| launch_line(view)));
        if newest.len() > LAUNCHES_SHOWN {
            let more = newest.len() - LAUNCHES_SHOWN;
            out.push_str(&format!("and {more} more jobs with launches (--json has all)\n"));
        }
        out
    }

    /// Returns the fields `open_saves` and `launches`; null if they are not known.
    pub fn json(&self) -> [(String, Value); 2] {
        let open = |view: &OpenSaveView| {
            json!({
                "job": view.job, "step": view.step, "save": view.save.to_string(), "decided": view.is_decided,
                "complete_shards": view.complete_shards, "shards": view.shards, "hosts": view.writers,
                "late_hosts": view.late_writers, "dropped_host": view.dropped_writer,
            })
        };
        let launch = |view: &LaunchView| {
            json!({
                "job": view.job, "launch": view.registered.launch.to_string(),
                "number": view.registered.number, "registered_at": view.registered.registered_at,
                "resumed": view.registered.resumed,
            })
        };
        let open = self.open.iter().map(|views| Value::from_iter(views.iter().map(open))).next();
        let launches =
            self.launches.iter().map(|views| Value::from_iter(views.iter().map(launch))).next();
        [
            ("open_saves".to_owned(), open.unwrap_or_default()),
            ("launches".to_owned(), launches.unwrap_or_default()),
        ]
    }
}

async fn within_limit<T>(
    listing: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, String> {
    match deadline(&*SystemClock::new(), LIST_LIMIT, listing).await {
        Ok(listed) => listed.map_err(|error| error.to_string()),
        Err(_) => Err(format!("the catalogue did not answer within {} s", LIST_LIMIT.as_secs())),
    }
}

async fn list_newest_launches(
    client: &Client,
    job: Option<&Job>,
) -> Result<Vec<LaunchView>, ClientError> {
    let Some(job) = job else { return client.list_newest_launches().await };
    let newest = client.fetch_launch_order(job).await?.launches.pop();
    Ok(Vec::from_iter(newest.map(|registered| LaunchView { job: job.clone(), registered })))
}

fn open_line(view: &OpenSaveView) -> String {
    let step = format!("{}/{}", view.job, view.step);
    if view.is_decided {
        return format!("{step} is decided: its commit marks are being written\n");
    }
    if let Some(writer) = view.dropped_writer {
        return format!("{step} is not saved: host {writer} has dropped it\n");
    }
    let by = match view.writers {
        0 => String::new(),
        hosts => format!(" by {hosts} hosts"),
    };
    let shards = match view.shards {
        Some(shards) => {
            format!(": {} of {shards} shards are complete", view.complete_shards)
        }
        None => String::new(),
    };
    let late: Vec<String> = view.late_writers.iter().map(ToString::to_string).collect();
    let late = match late.len() {
        0 => String::new(),
        1 => format!(", waits for host {}", late.concat()),
        _ => format!(", waits for hosts {}", late.join(", ")),
    };
    format!("{step} is being saved{by}{shards}{late}\n")
}

fn launch_line(view: &LaunchView) -> String {
    let launch = &view.registered;
    let from = match launch.resumed {
        Some(step) => format!("resumed from step {step}"),
        None => "from the beginning".to_owned(),
    };
    let (number, since) = (launch.number, date(launch.registered_at));
    format!("job {}: launch {number}, registered {since}, {from}\n", view.job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::launch_order::RegisteredLaunch;
    use crate::id::{LaunchId, SaveId, Step};

    fn open() -> OpenSaveView {
        OpenSaveView {
            job: "gpt".parse().unwrap(),
            step: Step(20),
            save: SaveId([1; 12]),
            is_decided: false,
            shards: Some(9),
            complete_shards: 4,
            writers: 8,
            late_writers: vec![2, 7],
            dropped_writer: None,
        }
    }

    fn under_way(open: OpenSaveView) -> JobsUnderWay {
        JobsUnderWay { open: Ok(vec![open]), launches: Ok(Vec::new()) }
    }

    #[test]
    fn an_open_save_says_what_it_waits_for() {
        let text = under_way(open()).summary();
        let waits =
            "gpt/20 is being saved by 8 hosts: 4 of 9 shards are complete, waits for hosts 2, 7\n";
        assert_eq!(text, waits);
        let dropped = OpenSaveView { dropped_writer: Some(3), ..open() };
        assert_eq!(under_way(dropped).summary(), "gpt/20 is not saved: host 3 has dropped it\n");
        let decided = OpenSaveView { is_decided: true, ..open() };
        assert!(under_way(decided).summary().starts_with("gpt/20 is decided"));
    }

    #[test]
    fn what_is_not_known_is_null() {
        let unknown = JobsUnderWay::unknown("no answer");
        assert!(unknown.json().iter().all(|(_, value)| value.is_null()));
        assert_eq!(unknown.summary().lines().count(), 2);
        let [(_, open), (_, launches)] = under_way(open()).json();
        assert_eq!((&open[0]["late_hosts"], launches), (&json!([2, 7]), json!([])));
    }

    #[test]
    fn the_newest_launches_come_first_and_are_limited() {
        let launch = |at: u64| LaunchView {
            job: format!("job{at}").parse().unwrap(),
            registered: RegisteredLaunch {
                number: 1,
                launch: LaunchId([1; 16]),
                registered_at: at,
                resumed: None,
            },
        };
        let launches = Ok((0..LAUNCHES_SHOWN as u64 + 3).map(launch).collect());
        let text = JobsUnderWay { open: Ok(Vec::new()), launches }.summary();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("job job18: launch 1"), "{text}");
        assert_eq!(
            (lines.len(), lines[16]),
            (17, "and 3 more jobs with launches (--json has all)")
        );
    }
}
