"""Trainers and the staging daemon are killed at random moments, ``RAPIDRAID_KILLS_TORCH`` times."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import signal
import threading
from pathlib import Path

import pytest
from ranks import once

import rapidraid

torch = pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "storm.py"
KILLS = int(os.environ.get("RAPIDRAID_KILLS_TORCH", "3"))
SEED = int(os.environ.get("RAPIDRAID_KILLS_SEED", "0"))
RANKS = 2
#: Maximum number of steps of a launch before the kill, and after it.
MAX_STEPS = 4


class Storm:
    """Kills a process once in each launch, a few steps after its start, and records what all ranks had staged."""

    def __init__(self, cluster: rapidraid.LocalCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.kills = 0
        self.daemon = 0
        self.steps: dict[tuple[int, int], str] = {}
        self.begin()

    def begin(self) -> None:
        """Draws the victim and the moment of the next launch's kill."""
        self.victim = self.random.choice(["rank 0", "rank 1", "all ranks", "the daemon", "everybody"])
        self.after = self.random.randint(1, MAX_STEPS)
        self.at = self.random.choice(["step", "staged"])
        self.delay_s = self.random.choice([0.0, 0.002, 0.01, 0.05, 0.2])
        self.pids: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.staged: dict[int, int] = {}
        self.is_armed = self.kills < KILLS

    def hear(self, line: str) -> None:
        """Parses an output line of a rank, and starts the kill when its moment has come."""
        if match := re.fullmatch(r"rank (\d+) pid (\d+) daemon (\d+) start (\d+)", line):
            rank = int(match[1])
            self.pids[rank], self.daemon, self.starts[rank] = int(match[2]), int(match[3]), int(match[4])
        elif match := re.fullmatch(r"rank (\d+) staged (\d+)", line):
            self.staged[int(match[1])] = int(match[2])
        elif match := re.fullmatch(r"rank (\d+) step (\d+) (.*)", line):
            self.steps[int(match[1]), int(match[2])] = match[3]
        is_time = re.match(rf"rank 0 {self.at} {self.starts.get(0, 0) + self.after}\b", line)
        if self.is_armed and is_time and len(self.pids) == RANKS:
            self.is_armed = False
            threading.Timer(self.delay_s, self.kill).start()

    def kill(self) -> None:
        """Kills the victim of this launch."""
        self.kills += 1
        if self.victim in ("the daemon", "everybody"):
            kill(self.daemon)
        for rank, pid in self.pids.items():
            if self.victim in (f"rank {rank}", "all ranks", "everybody"):
                kill(pid)


def kill(pid: int) -> None:
    """Kills a process unless it has already ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_whoever_is_killed_the_job_goes_on_bit_for_bit(cluster: rapidraid.LocalCluster, job: str) -> None:
    """No step that all ranks had staged is lost, and every loss equals that of an undisturbed run."""
    steps = str((KILLS + 1) * 2 * MAX_STEPS)
    quiet = Storm(cluster, SEED)
    quiet.is_armed = False
    code, lines = once(str(PROGRAM), RANKS, str(cluster.config), f"{job}-quiet", steps, on_line=quiet.hear)
    assert code == 0, "\n".join(lines[-40:])
    assert len(quiet.steps) == RANKS * int(steps)
    storm = Storm(cluster, SEED)
    whole = 0
    played = []
    try:
        for launch in range(2 * KILLS + 2):
            kill_of = f"{storm.victim} killed {storm.delay_s} s after {storm.at} {storm.after} of it"
            what = f"launch {launch}: {kill_of if storm.is_armed else 'nobody killed'}"
            # A launch survives the death of its daemon. It must not run to the end of the job before all kills have come.
            last = min(int(steps), whole + 2 * MAX_STEPS) if storm.is_armed else int(steps)
            code, lines = once(str(PROGRAM), RANKS, str(cluster.config), job, str(last), on_line=storm.hear)
            shown = "\n".join([what, *lines[-40:]])
            played.append({"what": what, "code": code, "started_at": storm.starts, "staged": storm.staged})
            print(f"{what}: code {code}, started at {storm.starts}, staged {storm.staged}")
            assert len(set(storm.starts.values())) == 1 and len(storm.starts) == RANKS, shown
            assert storm.starts[0] >= whole, f"step {whole} is lost\n{shown}"
            if code == 0 and last == int(steps):
                break
            whole = max([whole, storm.starts[0], *([min(storm.staged.values())] if len(storm.staged) == RANKS else [])])
            storm.begin()
        else:
            pytest.fail(f"the job does not end\n{shown}")
    finally:
        cluster.kill("staging")
        cluster.start_staging()
    assert storm.steps == quiet.steps
    if result := os.environ.get("RAPIDRAID_KILLS_RESULT"):
        record = {"kills": storm.kills, "seed": SEED, "steps": int(steps), "ranks": RANKS, "launches": played}
        Path(result).write_text(json.dumps(record, indent=1) + "\n")


def test_daemons_that_ranks_started_end_with_the_memory_and_with_the_cluster(job: str) -> None:
    """The host loses its memory although its staging daemon is no longer the one that the cluster started."""
    with rapidraid.local_cluster() as cluster:
        for is_last in (False, True):
            kill(cluster.daemon_pid())
            with rapidraid.Checkpointer(f"{job}-{is_last}", config=cluster.config) as checkpointer:
                assert checkpointer.save(1, {"weight": torch.ones(8)})
            started = os.pidfd_open(cluster.daemon_pid())
            if not is_last:
                cluster.forget_memory()
                assert has_ended(started)
    assert has_ended(started)
    assert not list(cluster.staging.parent.glob(f"{cluster.staging.name}*"))


def has_ended(process: int) -> bool:
    """Returns whether the process of a descriptor has ended, and closes the descriptor."""
    ended = bool(select.select([process], [], [], 0)[0])
    os.close(process)
    return ended
