//! The kill matrix. A cell names an operation, the stage at which a process is killed, and the
//! process. A cell is played on a fleet that is bare before and after.

use std::fmt;
use std::str::FromStr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rapidraid::stage::TracePoint;

use crate::fleet::{Fleet, LEASE, LOOK, SETTLE_LIMIT, kind_of, message_of};
use crate::machine::{Ended, bytes, tree};
use crate::watch::Victim;

/// Number of nodes of a fleet for cells. Three of them are in no stripe 0, and the catalogue server
/// is one of these three.
pub const NODES: usize = 9;
/// The code, as `n,k`.
pub const CODE: &str = "6,4";
/// The block size: small, so that two stripes are 400 KB.
pub const BLOCK: &str = "code.block=64KiB";
/// How long a stage may take after the command has ended, if daemons pass it in the background.
const LATER: Duration = Duration::from_secs(20);

/// The operation of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    Save,
    Replace,
    Archive,
    Rm,
    Restore,
    /// An archiving that must first copy a missing replica from another node.
    Mend,
    /// A rebuild of the catalogue on another daemon, after the catalogue and its server are lost.
    Rebuild,
    /// A repair after a member came back with an empty disk.
    Repair,
    /// A repair that makes the pieces of a member that is down on others.
    GiveUp,
    /// Naming a successor of a member that is down.
    ReplaceNode,
    /// Removing a member that is down, after its pieces are made on others. It comes back later.
    RemoveNode,
}

/// The process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Gateway,
    Head,
    Middle,
    Tail,
    Home,
    Client,
    /// The process that logs the stage.
    Sayer,
}

const DEEDS: [(Deed, &str); 11] = [
    (Deed::Save, "save"),
    (Deed::Replace, "replace"),
    (Deed::Archive, "archive"),
    (Deed::Rm, "rm"),
    (Deed::Restore, "restore"),
    (Deed::Mend, "mend"),
    (Deed::Rebuild, "rebuild"),
    (Deed::Repair, "repair"),
    (Deed::GiveUp, "giveup"),
    (Deed::ReplaceNode, "replacenode"),
    (Deed::RemoveNode, "removenode"),
];
const ROLES: [(Role, &str); 7] = [
    (Role::Gateway, "gateway"),
    (Role::Head, "head"),
    (Role::Middle, "middle"),
    (Role::Tail, "tail"),
    (Role::Home, "home"),
    (Role::Client, "client"),
    (Role::Sayer, "sayer"),
];
/// Index of the member that loses a replica, its disk, or its power: a holder of block 0.
const LOSER: usize = 2;
/// Index of the member on which the catalogue is rebuilt.
const REBUILDER: usize = 0;
/// Index of the member that becomes the successor of the loser: it is in no stripe 0.
const SUCCESSOR: usize = 8;

/// Returns the stages that every run of the operation passes.
fn stages(deed: Deed) -> &'static [TracePoint] {
    use TracePoint::*;
    match deed {
        Deed::Save => &[Begin, Ring, Send, Block, Record, Leaves, Seal, Decide, Mark, Publish],
        Deed::Replace => &[Begin, Block, Decide, Mark, Publish, Fence, Tombstone, Sweep, Forget],
        Deed::Archive => &[
            Request, Take, Replicas, Reserve, Run, Piece, Proof, Receipt, Archived, Drop, Dropped,
            Done,
        ],
        Deed::Rm => &[Removing, Fence, Tombstone, Sweep, Grave, Forget],
        Deed::Restore => &[Plan, Deliver, Finish],
        Deed::Mend => &[Fetch],
        Deed::Rebuild => &[Claim, Census, Map],
        Deed::Repair => &[Take, Reserve, Run, Piece, Proof, Receipt, Leaves],
        Deed::GiveUp => &[Take, Reserve, Run, Piece, Proof, Receipt],
        Deed::ReplaceNode => &[Leaving, CatchUp],
        Deed::RemoveNode => &[Leaving, CatchUp, Left, Unlist],
    }
}

/// Returns whether the operation changes the rings of shards.
fn changes_rings(deed: Deed) -> bool {
    matches!(deed, Deed::ReplaceNode | Deed::RemoveNode)
}

/// A cell of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    role: Role,
    deed: Deed,
    stage: TracePoint,
}

fn word<T: PartialEq>(words: &[(T, &'static str)], of: &T) -> &'static str {
    words.iter().find(|(value, _)| value == of).map_or("", |(_, word)| word)
}

impl Cell {
    /// Returns whether another daemon serves the catalogue after the cell. Such a fleet no longer
    /// suits further cells.
    pub fn moves_the_home(&self) -> bool {
        self.deed == Deed::Rebuild
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (role, deed) = (word(&ROLES, &self.role), word(&DEEDS, &self.deed));
        write!(f, "{role}:{deed}.{}", self.stage.name())
    }
}

impl FromStr for Cell {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = all().into_iter().find(|cell| cell.to_string() == text);
        found.ok_or_else(|| format!("{text} is no cell; one is head:archive.piece"))
    }
}

/// Returns all cells of the matrix.
pub fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (deed, _) in DEEDS {
        for &stage in stages(deed) {
            // Daemons pass these stages after the save has ended, so there is no client to kill.
            let later = deed == Deed::Replace
                && matches!(
                    stage,
                    TracePoint::Fence
                        | TracePoint::Tombstone
                        | TracePoint::Sweep
                        | TracePoint::Forget
                );
            let roles = ROLES.iter().map(|(role, _)| *role);
            let roles = roles.filter(|role| match role {
                // The head is the daemon that rebuilds, and the middle is a node that records the
                // claim. The catalogue server is down already.
                Role::Head | Role::Middle if deed == Deed::Rebuild => true,
                Role::Sayer => {
                    deed == Deed::Mend || stage == TracePoint::Claim || changes_rings(deed)
                }
                _ if deed == Deed::Rebuild => false,
                // The middle node is down before the command runs.
                Role::Middle => deed != Deed::GiveUp && !changes_rings(deed),
                Role::Client => !later,
                // A restore reads from the nodes directly, without a gateway. The gateway of a
                // change of rings is the process that logs the stage.
                Role::Gateway => deed != Deed::Restore && !changes_rings(deed),
                _ => true,
            });
            cells.extend(roles.map(|role| Cell { role, deed, stage }));
        }
    }
    cells
}

/// The state of a cell in play.
struct Play<'a> {
    fleet: &'a Fleet,
    /// The step that the cell works on.
    step: u64,
    outs: u64,
}

impl Fleet {
    /// Plays a cell with a step of its own. `seed` chooses among the variants that the cell leaves
    /// open. Panics with a description of the failure.
    pub fn play(&self, cell: Cell, seed: u64, step: u64) {
        let place = all().iter().position(|other| *other == cell).unwrap() as u64;
        let mut play = Play { fleet: self, step, outs: 0 };
        play.write("old", step * 4);
        play.write("new", step * 4 + 2);
        play.cell(cell, place + place / 6 + seed);
        assert_eq!(self.watch.panics(), Vec::<String>::new());
        for folder in ["old", "new"] {
            std::fs::remove_dir_all(self.path(folder)).unwrap();
        }
    }

    /// Returns the process that has a role.
    fn victim(&self, role: Role) -> Victim {
        let at = match role {
            Role::Gateway => return Victim::Gateway,
            Role::Client => return Victim::Named("client".into()),
            Role::Sayer => return Victim::Sayer,
            Role::Head => 0,
            Role::Middle => 2,
            Role::Tail => 5,
            Role::Home => self.home,
        };
        Victim::Named(self.members[at].name.clone())
    }
}

impl Play<'_> {
    fn write(&self, folder: &str, seed: u64) {
        // `a.bin` has two stripes; `b.bin` is a block of one byte beside them.
        self.fleet.write(&format!("{folder}/a.bin"), &bytes(400_000, seed));
        self.fleet.write(&format!("{folder}/b.bin"), &bytes(1, seed + 1));
    }

    fn line(&self, deed: Deed) -> String {
        let step = self.step;
        match deed {
            Deed::Save => format!("save j/{step} new"),
            Deed::Replace => format!("save j/{step} new --replace"),
            Deed::Archive | Deed::Mend => format!("archive j/{step}"),
            Deed::Rm => format!("rm j/{step}"),
            Deed::Restore => format!("restore j/{step} --force --out out"),
            Deed::Repair => format!("repair j/{step}"),
            Deed::GiveUp => format!("repair --node {}", self.fleet.members[LOSER].name),
            Deed::ReplaceNode => {
                let members = &self.fleet.members;
                let (old, new) = (&members[LOSER].name, &members[SUCCESSOR].name);
                format!("cluster replace-node {old} --by {new}")
            }
            Deed::RemoveNode => format!("cluster remove-node {}", self.fleet.members[LOSER].name),
            Deed::Rebuild => {
                format!("catalogue rebuild --on {}", self.fleet.members[REBUILDER].address)
            }
        }
    }

    fn cell(&mut self, cell: Cell, variant: u64) {
        let (fleet, step) = (self.fleet, self.step);
        let is_archived = variant.is_multiple_of(2);
        match cell.deed {
            Deed::Save => {}
            Deed::Replace => drop(fleet.ask(&format!("save j/{step} old --json"))),
            _ => {
                drop(fleet.ask(&format!("save j/{step} new --json")));
            }
        }
        use Deed::{GiveUp, Mend, Rebuild, RemoveNode, Repair, Replace, ReplaceNode, Restore, Rm};
        let may_be_archived = matches!(cell.deed, Replace | Rm | Restore | Rebuild | ReplaceNode);
        if is_archived && may_be_archived || matches!(cell.deed, Repair | GiveUp | RemoveNode) {
            self.archive();
        }
        match cell.deed {
            Mend => fleet.lose_replica(LOSER),
            Rebuild => fleet.lose_catalogue(),
            Repair => fleet.lose_disk(LOSER),
            GiveUp | ReplaceNode => fleet.take_down(LOSER),
            RemoveNode => {
                fleet.take_down(LOSER);
                self.again(GiveUp, false);
            }
            _ => {}
        }
        // The killed daemon restarts at once, or after leases have ended and other nodes have
        // resumed the work.
        let away = if (variant / 2).is_multiple_of(2) { Duration::ZERO } else { LEASE * 3 / 2 };
        let ended = self.killed_at(cell, away);
        let killed = ended.code == -1 && cell.role == Role::Client;
        // A repair that could not make everything says so.
        let is_left = ended.code == 1 && matches!(cell.deed, Repair | GiveUp);
        let is_legal = is_left || is_legal(&ended);
        assert!(ended.code == 0 || killed || is_legal, "{cell} ended so: {ended:?}");
        let done = ended.code == 0;
        // The first answer counts: an operation that was reported as done took effect, and one that
        // was not took effect entirely or not at all.
        match cell.deed {
            Deed::Save if !done => self.assert_is(&["new"], true),
            Replace if !done => self.assert_is(&["old", "new"], false),
            Rm if !done => self.assert_is(&["new"], true),
            Rm => self.assert_is(&[], true),
            _ => self.assert_is(&["new"], false),
        }
        self.again(cell.deed, done);
        match cell.deed {
            Rebuild => {
                fleet.restart(fleet.home);
                // A rebuilt catalogue has lost the labels, so its retention is paused until a
                // person resumes it.
                let was_paused = fleet.ask("catalogue retention --json");
                assert_eq!(was_paused["paused"], true, "{was_paused}");
                fleet.ask("catalogue retention --resume --json");
            }
            GiveUp | ReplaceNode | RemoveNode => fleet.restart(LOSER),
            _ => {}
        }
        if cell.deed != Deed::Rm {
            self.assert_is(&["new"], false);
            self.archive();
            self.assert_is(&["new"], false);
            self.again(Deed::Rm, false);
        }
        fleet.until_bare();
        fleet.until_tidy();
    }

    /// Runs the operation, kills the process at the stage, and restarts a killed daemon. Returns
    /// the outcome of the command.
    fn killed_at(&self, cell: Cell, away: Duration) -> Ended {
        let (fleet, watch) = (self.fleet, &self.fleet.watch);
        watch.set_trap(cell.stage, fleet.victim(cell.role));
        let running = fleet.spawn("client", &self.line(cell.deed));
        let mut is_back = false;
        let mut exited: Option<Instant> = None;
        loop {
            if let Some(killed) = watch.killed().filter(|_| !is_back) {
                is_back = killed.name == "client";
                if !is_back && killed.at.elapsed() >= away {
                    fleet.restart(fleet.place(&killed.name));
                    is_back = true;
                }
            }
            if exited.is_none() && running.has_exited() {
                watch.is_not("client");
                exited = Some(Instant::now());
            }
            if let Some(exited) = exited {
                if is_back {
                    break;
                }
                let stage = cell.stage.name();
                assert!(exited.elapsed() < LATER, "nobody said {stage}\n{}", watch.tails());
            }
            sleep(Duration::from_millis(2));
        }
        watch.take_trap();
        running.ended(LATER)
    }

    /// Repeats the command until its outcome is final.
    fn again(&self, deed: Deed, was_done: bool) {
        let line = self.line(deed);
        let started = Instant::now();
        loop {
            let ended = self.fleet.run_as("again", &line);
            let (kind, message) = (kind_of(&ended), message_of(&ended));
            let over = match (deed, ended.code) {
                (Deed::Save, 0) => {
                    assert!(!was_done, "{line} saved over what was committed");
                    true
                }
                (_, 0) => true,
                (Deed::Save, _) => kind == "exists" && message.contains("is committed"),
                (Deed::Rm | Deed::RemoveNode, _) => kind == "not_found",
                (Deed::Rebuild, _) => kind == "exists" && message.contains("nothing to rebuild"),
                (Deed::Repair | Deed::GiveUp, 1) => {
                    assert!(started.elapsed() < SETTLE_LIMIT, "{line}: {ended:?}");
                    sleep(LOOK);
                    continue;
                }
                _ => false,
            };
            if over {
                return;
            }
            let tails = || self.fleet.watch.tails();
            assert!(is_legal(&ended) || kind == "exists", "{line}: {ended:?}\n{}", tails());
            assert!(started.elapsed() < SETTLE_LIMIT, "{line}: {ended:?}\n{}", tails());
            sleep(LOOK);
        }
    }

    /// Archives the step until no replica is left.
    fn archive(&self) {
        let line = format!("archive j/{} --json", self.step);
        self.fleet.until("all is archived and dropped", || self.fleet.ask(&line)["undropped"] == 0);
    }

    /// Asserts that a restore yields one of these folders byte for byte. With `or_none` the step
    /// may also be missing.
    fn assert_is(&mut self, any_of: &[&str], or_none: bool) {
        self.outs += 1;
        let out = format!("out-{}-{}", self.step, self.outs);
        let line = format!("restore j/{} --force --out {out} --json", self.step);
        let (fleet, tails) = (self.fleet, || self.fleet.watch.tails());
        let started = Instant::now();
        loop {
            let ended = fleet.run(&line);
            if ended.code == 0 {
                break;
            }
            let kind = kind_of(&ended);
            if kind == "not_found" {
                assert!(or_none, "none of {any_of:?} is there: {ended:?}\n{}", tails());
                return;
            }
            let has_time = started.elapsed() < SETTLE_LIMIT;
            assert!(is_legal(&ended) && has_time, "{line}: {ended:?}\n{}", tails());
            sleep(LOOK);
        }
        let found = tree(&fleet.path(&out));
        let is_one = any_of.iter().any(|folder| tree(&fleet.path(folder)) == found);
        assert!(is_one, "{out} is none of {any_of:?}\n{}", tails());
        std::fs::remove_dir_all(fleet.path(&out)).unwrap();
    }
}

/// Returns whether a command may end like this when a process that it needs dies. It may report
/// that it is not done, but never that the data or the code is wrong.
pub fn is_legal(ended: &Ended) -> bool {
    let kind = kind_of(ended);
    matches!(&*kind, "unavailable" | "timeout" | "busy" | "fenced" | "exists")
}
