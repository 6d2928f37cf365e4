//! The allowed states of each filling, derived from the messages of its ranks: the reference with
//! which loads and the list of committed steps are compared.
//!
//! A filling must be committed if all ranks got the answer *staged*, or had written so before
//! another daemon was started. It must not come back if a rank was told that it is dropped, or if a
//! later launch has abandoned it. Any other filling may be committed or lost, but whole or not at
//! all.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// One filling of a step.
#[derive(Debug, Default, Clone)]
struct Filling {
    step: u64,
    /// The number of the launch; launches are numbered in the order of their creation.
    launch: u64,
    world: usize,
    /// The process id of the daemon that created the filling.
    daemon: u64,
    /// The ranks that were about to write their headers (`begun`), that had written them
    /// (`written`), and that got the answer *staged* (`staged`).
    begun: BTreeSet<u64>,
    written: BTreeSet<u64>,
    staged: BTreeSet<u64>,
    must_stay: bool,
    must_go: bool,
    /// Whether a later launch may abandon the filling.
    may_go: bool,
    was_removed: bool,
    dropped: Vec<String>,
}

/// A launch: the step that it asked for and the one that it loaded.
#[derive(Debug, Default, Clone)]
struct Launch {
    /// The step that the launch asked for; later ones are abandoned.
    asked: Option<u64>,
    /// The lowest step that its load may return.
    floor: Option<u64>,
    loaded: Option<Option<(u64, String)>>,
    has_filled: bool,
}

/// All fillings of a job.
#[derive(Debug, Default)]
pub struct Ledger {
    fillings: BTreeMap<String, Filling>,
    launches: BTreeMap<u64, Launch>,
    /// The process id of the daemon that runs, or ran last; `None` while another one is being
    /// started.
    daemon: Option<u64>,
    /// Steps that the concurrent reader has read.
    reads: BTreeSet<(u64, String)>,
    /// The violations that were found.
    pub wrong: Vec<String>,
}

impl Ledger {
    /// Records that another daemon is about to be started.
    pub fn starting(&mut self) {
        self.daemon = None;
    }

    /// Records that the daemon was started.
    pub fn started(&mut self, pid: u64) {
        self.daemon = Some(pid);
    }

    /// Records that a launch begins. With `asked` it goes back to that step and abandons the later
    /// ones.
    pub fn launch(&mut self, launch: u64, asked: Option<u64>) {
        self.launches.insert(launch, Launch { asked, ..Launch::default() });
    }

    /// Returns the newest step that must be there.
    pub fn newest(&self) -> Option<u64> {
        let there =
            self.fillings.values().filter(|filling| filling.must_stay && !filling.was_removed);
        there.map(|filling| filling.step).max()
    }

    /// Returns the steps that must be there.
    pub fn steps(&self) -> Vec<u64> {
        let there =
            self.fillings.values().filter(|filling| filling.must_stay && !filling.was_removed);
        there.map(|filling| filling.step).collect()
    }

    /// Records a message of a rank.
    pub fn heard(&mut self, launch: u64, rank: u64, world: usize, said: &Value) {
        if let Some(asked) = said.get("loading") {
            let floor = if asked.is_null() { self.newest() } else { asked.as_u64() };
            let known = self.launches.get_mut(&launch).unwrap();
            // Ranks that ask later get the same answer, so the limit stays.
            known.floor = if known.loaded.is_none() { floor } else { known.floor };
        } else if let Some(loaded) = said.get("loaded") {
            self.loaded(launch, loaded);
        } else if let Some(about) = said.get("filling") {
            self.filling(launch, world, about);
        } else if let Some(about) = said.get("header") {
            self.of(about).begun.insert(rank);
        } else if let Some(about) = said.get("wrote") {
            let daemon = self.daemon;
            let filling = self.of(about);
            filling.written.insert(rank);
            if filling.written.len() == filling.world && daemon == Some(filling.daemon) {
                self.must_stay(about, "all headers said staged");
            }
        } else if let Some(about) = said.get("staged") {
            let filling = self.of(about);
            filling.staged.insert(rank);
            if filling.staged.len() == filling.world {
                self.must_stay(about, "all ranks were told so");
            }
        } else if let Some(about) = said.get("committed") {
            self.must_stay(about, "a rank was told that it is committed");
        } else if let Some(about) = said.get("dropped") {
            let why = said["why"]["message"].as_str().unwrap_or_default().to_owned();
            let filling = self.of(about);
            filling.dropped.push(why.clone());
            if filling.must_stay && !filling.may_go {
                let line = format!("a whole step was dropped: {about}: {why}");
                self.wrong.push(line);
            } else {
                filling.must_go = true;
            }
        }
    }

    fn of(&mut self, about: &Value) -> &mut Filling {
        let fill = about["fill"].as_str().unwrap();
        self.fillings.get_mut(fill).unwrap_or_else(|| panic!("{about}: no such filling"))
    }

    fn must_stay(&mut self, about: &Value, why: &str) {
        let filling = self.of(about);
        if filling.must_go && !filling.may_go {
            let line = format!("{about} was dropped ({:?}), then {why}", filling.dropped);
            self.wrong.push(line);
        } else if !filling.may_go {
            filling.must_stay = true;
        }
    }

    fn filling(&mut self, launch: u64, world: usize, about: &Value) {
        let (step, daemon) = (about["step"].as_u64().unwrap(), about["daemon"].as_u64().unwrap());
        let fill = about["fill"].as_str().unwrap().to_owned();
        self.abandon(launch, true);
        let new = || Filling { step, launch, world, daemon, ..Filling::default() };
        let known = self.fillings.entry(fill).or_insert_with(new);
        assert_eq!((known.step, known.launch), (step, launch), "a filling belongs to one step");
    }

    /// Marks the fillings that a launch abandons when it goes back to an earlier step: from the
    /// launch's first filling on they must be gone, and before that they may be.
    fn abandon(&mut self, launch: u64, has_filled: bool) {
        let known = self.launches.get_mut(&launch).unwrap();
        let (Some(asked), Some(_)) = (known.asked, &known.loaded) else { return };
        if known.has_filled {
            return;
        }
        known.has_filled = has_filled;
        let later = |filling: &&mut Filling| filling.launch < launch && filling.step > asked;
        for filling in self.fillings.values_mut().filter(later) {
            filling.must_stay = false;
            filling.may_go = true;
            filling.must_go |= has_filled;
        }
    }

    fn loaded(&mut self, launch: u64, loaded: &Value) {
        let found = loaded.as_object().map(|_| {
            (loaded["step"].as_u64().unwrap(), loaded["fill"].as_str().unwrap().to_owned())
        });
        let known = self.launches.get_mut(&launch).unwrap();
        let first = known.loaded.get_or_insert_with(|| found.clone()).clone();
        let floor = known.floor;
        if first != found {
            self.wrong.push(format!("launch {launch} was given {first:?} and {found:?}"));
        }
        if found.as_ref().map(|found| found.0) < floor {
            let line = format!("launch {launch} loaded {found:?}, and step {floor:?} is there");
            self.wrong.push(line);
        }
        if let Some((step, fill)) = &found {
            self.read(*step, fill);
        }
        self.abandon(launch, false);
    }

    /// Returns the fillings that no load may return any more.
    pub fn gone(&self) -> BTreeSet<String> {
        let gone =
            self.fillings.iter().filter(|(_, filling)| filling.must_go || filling.was_removed);
        gone.map(|(fill, _)| fill.clone()).collect()
    }

    /// Records a step that the concurrent reader has read. `gone` are the fillings that were gone
    /// before the read. `at_rest` checks later whether the step was whole, when all messages have
    /// arrived.
    pub fn read_beside(&mut self, step: u64, fill: &str, gone: &BTreeSet<String>) {
        if gone.contains(fill) {
            self.wrong.push(format!("step {step} was read, and is {fill}, which was gone before"));
        }
        self.reads.insert((step, fill.to_owned()));
    }

    /// Records that a step was read and is this filling.
    pub fn read(&mut self, step: u64, fill: &str) {
        let Some(filling) = self.fillings.get(fill) else {
            return self
                .wrong
                .push(format!("step {step} is of filling {fill}, which nobody knows"));
        };
        let is_whole = filling.begun.len() == filling.world;
        if filling.step != step || filling.must_go || filling.was_removed || !is_whole {
            self.wrong.push(format!("step {step} was read, and is {fill}: {filling:?}"));
        }
    }

    /// Checks the state at rest: `committed` lists the committed steps, each with the filling that
    /// a load returned, and contains every filling that must be there.
    pub fn at_rest(&mut self, committed: &[(u64, String)]) {
        let there: BTreeSet<&String> = committed.iter().map(|(_, fill)| fill).collect();
        for (fill, filling) in &self.fillings {
            if filling.must_stay && !filling.was_removed && !there.contains(fill) {
                self.wrong.push(format!("{fill} is not committed: {filling:?}"));
            }
        }
        for (step, fill) in committed {
            self.read(*step, fill);
        }
        for (step, fill) in std::mem::take(&mut self.reads) {
            let is_it =
                |filling: &Filling| filling.step == step && filling.begun.len() == filling.world;
            if !self.fillings.get(&fill).is_some_and(is_it) {
                self.wrong
                    .push(format!("step {step} was read, and is {fill}, which was never whole"));
            }
        }
        // From now on these fillings must stay.
        for (_, fill) in committed {
            if let Some(filling) = self.fillings.get_mut(fill) {
                filling.must_stay = true;
                filling.may_go = false;
            }
        }
    }

    /// Records that the test has removed a step.
    pub fn removed(&mut self, fill: &str) {
        if let Some(filling) = self.fillings.get_mut(fill) {
            (filling.was_removed, filling.must_stay) = (true, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn about(fill: &str) -> Value {
        json!({ "step": 7, "fill": fill, "daemon": 100 })
    }

    /// Returns the ledger of a launch of two ranks that has begun a filling.
    fn begun() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.started(100);
        ledger.launch(1, None);
        for rank in 0..2 {
            ledger.heard(1, rank, 2, &json!({ "filling": about("a") }));
            ledger.heard(1, rank, 2, &json!({ "header": about("a") }));
        }
        ledger
    }

    #[test]
    fn what_all_ranks_have_written_under_one_daemon_must_stay() {
        let mut ledger = begun();
        ledger.heard(1, 0, 2, &json!({ "wrote": about("a") }));
        assert_eq!(ledger.newest(), None);
        ledger.heard(1, 1, 2, &json!({ "wrote": about("a") }));
        assert_eq!(ledger.newest(), Some(7));
        ledger.at_rest(&[]);
        assert_eq!(ledger.wrong.len(), 1, "{:?}", ledger.wrong);
        // Under another daemon the filling may have been dropped in between.
        let mut ledger = begun();
        ledger.heard(1, 0, 2, &json!({ "wrote": about("a") }));
        ledger.starting();
        ledger.started(101);
        ledger.heard(1, 1, 2, &json!({ "wrote": about("a") }));
        ledger.at_rest(&[]);
        ledger.at_rest(&[(7, "a".into())]);
        assert_eq!(ledger.wrong, Vec::<String>::new());
    }

    #[test]
    fn what_was_dropped_or_abandoned_does_not_come_back() {
        let mut ledger = begun();
        ledger.heard(1, 0, 2, &json!({ "dropped": about("a"), "why": { "message": "why" } }));
        ledger.read(7, "a");
        assert_eq!(ledger.wrong.len(), 1);
        let mut ledger = begun();
        for rank in 0..2 {
            ledger.heard(1, rank, 2, &json!({ "staged": about("a") }));
        }
        ledger.launch(2, Some(5));
        let loaded = json!({ "step": 5, "fill": "b" });
        ledger.heard(2, 0, 1, &json!({ "loaded": loaded }));
        ledger.wrong.clear();
        ledger.read(7, "a");
        assert_eq!(ledger.wrong, Vec::<String>::new(), "not yet");
        let other = json!({ "step": 6, "fill": "c", "daemon": 100 });
        ledger.heard(2, 0, 1, &json!({ "filling": other }));
        ledger.read(7, "a");
        assert_eq!(ledger.wrong.len(), 1);
    }

    #[test]
    fn a_load_gives_what_is_there_and_all_ranks_the_same() {
        let mut ledger = begun();
        for rank in 0..2 {
            ledger.heard(1, rank, 2, &json!({ "staged": about("a") }));
        }
        ledger.launch(2, None);
        ledger.heard(2, 0, 2, &json!({ "loading": null }));
        ledger.heard(2, 0, 2, &json!({ "loaded": null }));
        assert_eq!(ledger.wrong.len(), 1, "step 7 is there");
        ledger.heard(2, 1, 2, &json!({ "loaded": { "step": 7, "fill": "a" } }));
        assert_eq!(ledger.wrong.len(), 2, "the first rank was given nothing");
    }
}
