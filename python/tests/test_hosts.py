"""Jobs of several hosts. Each "host" is a staging daemon with a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import once

import rapidraid

pytest.importorskip("torch")

PROGRAM = str(Path(__file__).parent / "programs" / "hosts.py")
MEMORY = str(Path(__file__).parent / "programs" / "hosts_memory.py")
MOVED = str(Path(__file__).parent / "programs" / "hosts_moved.py")
REFUSED = str(Path(__file__).parent / "programs" / "hosts_refused.py")
RANKS = 4
#: Number of kills of the random test, and its seed.
KILLS = int(os.environ.get("RAPIDRAID_KILLS_HOSTS", "2"))
SEED = int(os.environ.get("RAPIDRAID_KILLS_SEED", "0"))
#: How long a save waits for a host that makes no progress, in seconds.
STALL_S = 120


@pytest.fixture(scope="module")
def hosts() -> Iterator[rapidraid.LocalCluster]:
    """Six storage nodes and two training hosts."""
    with rapidraid.local_cluster(hosts=2, staging={"stall_s": STALL_S}) as running:
        yield running


class Run:
    """A launch, and what its ranks have printed."""

    def __init__(
        self, hosts: rapidraid.LocalCluster, job: str, steps: int, *more: str, ranks: int = RANKS, on: tuple[int, ...] = (0, 1)
    ) -> None:
        self.pids: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.totals: dict[tuple[int, int], str] = {}
        self.losses: dict[tuple[int, int], str] = {}
        self.hosts = hosts
        self.configs = [hosts.configs[host] for host in on]
        self.arguments = ("CONFIG", job, str(steps), *more)
        self.ranks = ranks
        self.kill_at: str | None = None
        self.is_killed = False
        self.lines: list[str] = []

    def play(self) -> int:
        """Runs the launch. Returns its exit code."""
        code, self.lines = once(PROGRAM, self.ranks, *self.arguments, on_line=self.hear, configs=self.configs)
        return code

    def hear(self, line: str) -> None:
        """Parses a line of a rank, and loses the second host when its moment has come."""
        if match := re.fullmatch(r"rank (\d+) pid (\d+) start (\d+) total (.*)", line):
            rank, start = int(match[1]), int(match[3])
            self.pids[rank], self.starts[rank] = int(match[2]), start
            self.totals[rank, start] = match[4]
        elif match := re.fullmatch(r"rank (\d+) step (\d+) loss (.*) total (.*)", line):
            self.losses[int(match[1]), int(match[2])] = match[3]
            self.totals[int(match[1]), int(match[2])] = match[4]
        if line == self.kill_at and not self.is_killed:
            self.is_killed = True
            self.hosts.kill("staging-1")
            for rank in range(self.ranks // 2, self.ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)


def committed(hosts: rapidraid.LocalCluster, job: str) -> list[int]:
    """Returns the committed steps of a job."""
    return [step["step"] for step in json.loads(hosts.command("ls", job, "--json"))["steps"]]


def test_two_hosts_save_one_checkpoint_and_resume_from_it(hosts: rapidraid.LocalCluster, job: str) -> None:
    """Each step is whole: a launch on two hosts, and one on a single host, load what both had saved."""
    first = Run(hosts, job, 3)
    assert first.play() == 0, first.lines
    assert committed(hosts, job) == [1, 2, 3]
    shown = json.loads(hosts.command("show", f"{job}/3", "--tensors", "--json"))
    names = {name["name"] for name in shown["names"]}
    assert {f"rank {rank}: rng" for rank in range(RANKS)} <= names, names
    for name in shown["names"]:
        elements = 1
        for size in name["shape"]:
            elements *= size
        assert sum(region["bytes"] for region in name["regions"]) % elements == 0, name["name"]
    again = Run(hosts, job, 5)
    assert again.play() == 0, again.lines
    assert set(again.starts.values()) == {3} and len(again.starts) == RANKS
    assert all(again.totals[rank, 3] == first.totals[rank, 3] for rank in range(RANKS))
    whole = Run(hosts, f"{job}-whole", 5)
    assert whole.play() == 0
    assert all(whole.losses[rank, step] == again.losses[rank, step] for rank in range(RANKS) for step in (4, 5))
    alone = Run(hosts, job, 6, ranks=2, on=(0,))
    assert alone.play() == 0, alone.lines
    assert set(alone.starts.values()) == {5}
    assert alone.totals[0, 5] == again.totals[0, 5]


def test_each_host_resumes_from_its_memory(hosts: rapidraid.LocalCluster, job: str) -> None:
    """Ranks that come back with the same layout read next to nothing from the cluster; on other hosts they read all."""

    def read(*on: int) -> list[float]:
        code, lines = once(MEMORY, 4, "CONFIG", job, "load", configs=[hosts.configs[host] for host in on])
        assert code == 0, lines
        found = [re.fullmatch(r"step 1: only the parts that are wanted are read, (\d+) of (\d+) bytes", line) for line in lines]
        return [int(match[1]) / int(match[2]) for match in found if match]

    code, lines = once(MEMORY, 4, "CONFIG", job, "save", configs=hosts.configs)
    assert code == 0, lines
    shares = read(0, 1)
    assert len(shares) == 4 and max(shares) < 0.02, shares
    # The other way round, each host has the part of the other one, and the whole step is read.
    assert read(1, 0) == []


def test_a_launch_that_another_host_has_replaced_saves_nothing_more(hosts: rapidraid.LocalCluster, job: str) -> None:
    """Two people start one job name on two hosts. The first launch is refused, and is told who has taken over."""
    import torch

    def launches() -> dict[str, object]:
        (newest,) = json.loads(hosts.command("ls", job, "--json"))["launches"]
        return {"number": newest["number"], "resumed": newest["resumed"]}

    state = {"weight": torch.ones(1000)}
    old = rapidraid.Checkpointer(job, config=hosts.configs[0])
    with rapidraid.Checkpointer(job, config=hosts.configs[1]) as new:
        assert old.load(state) is None
        old.save(1, state)
        old.wait()
        assert launches() == {"number": 1, "resumed": None}
        assert new.load(state) == 1
        assert launches()["number"] == 1, "a load takes over nothing"
        new.save(2, state)
        new.wait()
        assert launches() == {"number": 2, "resumed": 1}
        with pytest.raises(rapidraid.errors.FencedError, match=r"launch 2 \([0-9a-f]+\) has been saving for the job since 20"):
            old.save(3, state)
            old.wait()
        with pytest.raises(rapidraid.errors.FencedError, match="has been saving for the job since"):
            old.save(4, state)
        with pytest.raises(rapidraid.errors.FencedError):
            old.close()
        new.save(3, state)
        new.wait()
        assert committed(hosts, job) == [1, 2, 3]
    text = hosts.command("ls", job)
    assert re.search(rf"^job {job}: launch 2, registered 20.*, resumed from step 1$", text, re.MULTILINE), text
    # Going back to an older step ends the launch on the other host too.
    with (
        rapidraid.Checkpointer(job, config=hosts.configs[1]) as late,
        rapidraid.Checkpointer(job, config=hosts.configs[0], abandon_later=True) as back,
    ):
        assert late.load(state) == 3
        assert back.load(state, step=1) == 1
        back.save(2, state)
        back.wait()
        assert committed(hosts, job) == [1, 2]
        # It began before the other one has registered, and loaded a step that is gone.
        with pytest.raises(rapidraid.errors.FencedError):
            late.save(4, state)
        assert committed(hosts, job) == [1, 2]


def test_what_several_hosts_cannot_do_is_refused_on_all_ranks(hosts: rapidraid.LocalCluster, job: str) -> None:
    """Every rank gets the error: skipping steps, a load without the cluster, and a load after a save."""
    code, lines = once(REFUSED, 2, "CONFIG", job, configs=hosts.configs)
    assert code == 0, lines
    for why in (
        "a launch of several hosts saves every step",
        "offline=True with several hosts",
        "this launch has saved, and cannot go back",
    ):
        assert len([line for line in lines if why in line]) == 2, (why, lines)


@pytest.mark.parametrize("at", ["rank 0 staged 4", "rank 2 staged 4", "rank 3 step 5 .*"])
def test_a_host_is_lost_and_the_job_goes_on_without_it(hosts: rapidraid.LocalCluster, job: str, at: str) -> None:
    """No half of a step is ever visible, and the other host resumes from the newest whole one."""
    run = Run(hosts, job, 8)
    pattern = re.compile(at)
    heard = run.hear

    def hear(line: str) -> None:
        if pattern.fullmatch(line):
            run.kill_at = line
        heard(line)

    run.hear = hear  # type: ignore[method-assign]
    try:
        assert run.play() != 0
        assert run.is_killed
        # The host does not come back: its memory is lost.
        alone = Run(hosts, job, 8, ranks=2, on=(0,))
        assert alone.play() == 0, alone.lines
        (start,) = set(alone.starts.values())
        assert 2 <= start <= 5, (start, run.lines)
        assert alone.totals[0, start] == run.totals[0, start]
        steps = committed(hosts, job)
        assert steps[-1] == 8 and start in [*steps, *range(steps[0])]
    finally:
        hosts.forget_memory(1)


@pytest.fixture(scope="module")
def four() -> Iterator[rapidraid.LocalCluster]:
    """Six storage nodes and four training hosts."""
    with rapidraid.local_cluster(hosts=4, staging={"memory": "256MiB", "stall_s": STALL_S}) as running:
        yield running


def test_a_load_waits_for_a_step_that_only_other_hosts_have_staged(four: rapidraid.LocalCluster, job: str) -> None:
    """The first rank is on a new host, whose daemon has no part of the step that the others are still saving."""

    def stop_second(line: str) -> None:
        if line == "rank 1 staged 2":
            four.pause("staging-1")

    waits: list[str] = []

    def resume_after_two_turns(line: str) -> None:
        if line.startswith("waiting for the staged steps of older launches"):
            waits.append(line)
        if len(waits) == 2 or (is_committed and line == "rank 1 loads"):
            four.resume("staging-1")

    try:
        code, lines = once(MOVED, 2, "CONFIG", job, "save", on_line=stop_second, configs=[four.configs[host] for host in (0, 1)])
        assert code == 0, lines
        # The second step is committed already only if its save was faster than the pause.
        is_committed = 2 in committed(four, job)
        code, lines = once(MOVED, 2, "CONFIG", job, "load", on_line=resume_after_two_turns, configs=[four.configs[host] for host in (2, 0)])
        assert code == 0, lines
    finally:
        four.resume("staging-1")
    assert {f"rank {rank} loaded 2 equal True" for rank in (0, 1)} <= set(lines), lines
    assert is_committed or len(waits) >= 2, lines


def test_ddp_goes_on_with_three_of_four_hosts_as_from_torch_save(four: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """A host is lost for good. The losses on the other three are those of a run that is resumed by ``torch.load``."""
    whole = Run(four, job, 3, str(tmp_path), on=(0, 1, 2, 3))
    assert whole.play() == 0, whole.lines
    four.kill("staging-3")
    ours = Run(four, job, 6, ranks=3, on=(0, 1, 2))
    assert ours.play() == 0, ours.lines
    theirs = Run(four, f"{job}-torch", 6, str(tmp_path), "torch", ranks=3, on=(0, 1, 2))
    assert theirs.play() == 0, theirs.lines
    assert set(ours.starts.values()) == set(theirs.starts.values()) == {3}
    assert len(ours.losses) == 9 and ours.losses == theirs.losses
    four.forget_memory(3)


def test_fsdp_state_is_equal_on_three_of_four_hosts(four: rapidraid.LocalCluster, job: str) -> None:
    """Sharded tensors, saved by four hosts, are bit-equal on three, and what these save is so on one."""
    env = {"JOB": job}
    saved = ""
    for hosts, ranks, steps in [((0, 1, 2, 3), 4, 3), ((0, 1, 2), 3, 2), ((2,), 2, 0)]:
        configs = [four.configs[host] for host in hosts]
        code, lines = once("fsdp.py", ranks, "CONFIG", str(steps), env=env, configs=configs)
        assert code == 0, lines
        loaded = next(line for line in lines if line.startswith("loaded "))
        assert not saved or loaded.split(" ")[1:] == saved.split(" ")[1:], (loaded, saved)
        saved = next((line for line in lines if line.startswith("saved ")), saved)


class Storm(Run):
    """A launch of four ranks on two hosts, in which things are killed at random moments, ``left`` at most."""

    def __init__(self, hosts: rapidraid.LocalCluster, job: str, steps: int, draw: random.Random, left: int) -> None:
        super().__init__(hosts, job, steps)
        self.draw = draw
        self.left = left
        self.killed: list[str] = []
        self.arm()

    def arm(self) -> None:
        """Draws the next victim, and the moment of its kill."""
        self.victim = self.draw.choice(["rank 0", "rank 3", "all ranks", "daemon 0", "daemon 1", "host 1"])
        self.at = f"rank {self.draw.randrange(RANKS)} {self.draw.choice(['step', 'staged'])} "
        self.after = self.draw.randint(1, 3)
        self.delay_s = self.draw.choice([0.0, 0.01, 0.1, 0.4])
        self.base: int | None = None

    def hear(self, line: str) -> None:
        """Parses a line of a rank, and starts the kill when its moment has come."""
        super().hear(line)
        if self.left == 0 or len(self.pids) < RANKS or not line.startswith(self.at):
            return
        step = int(line.removeprefix(self.at).split(" ")[0])
        self.base = step if self.base is None else self.base
        if step >= self.base + self.after:
            self.left -= 1
            self.killed.append(f"{self.victim}, {self.delay_s} s after {line.split(' loss')[0]}")
            threading.Timer(self.delay_s, self.kill, [self.victim]).start()
            self.arm()

    def kill(self, victim: str) -> None:
        """Kills a victim."""
        pids = [pid for rank, pid in self.pids.items() if victim in (f"rank {rank}", "all ranks", f"host {rank * 2 // RANKS}")]
        for host in (0, 1):
            if victim in (f"daemon {host}", f"host {host}"):
                # A rank may be starting another daemon just now.
                with contextlib.suppress(rapidraid.RapidraidError):
                    pids.append(self.hosts.daemon_pid(host))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_whoever_is_killed_the_job_goes_on_from_whole_steps(hosts: rapidraid.LocalCluster, job: str) -> None:
    """All hosts stay: no committed step is lost, all ranks resume from one step, and every loss is that of a quiet run."""
    steps = (KILLS + 1) * 4
    quiet = Run(hosts, f"{job}-quiet", steps)
    assert quiet.play() == 0, quiet.lines
    draw = random.Random(SEED)
    losses: dict[tuple[int, int], str] = {}
    left, newest = KILLS, 0
    try:
        for launch in range(KILLS + 2):
            storm = Storm(hosts, job, steps, draw, left)
            code = storm.play()
            left = storm.left
            shown = "\n".join([*storm.killed, *storm.lines[-40:]])
            print(f"launch {launch}: code {code}, started at {storm.starts}, killed: {'; '.join(storm.killed)}")
            assert len(set(storm.starts.values())) == 1 and len(storm.starts) == RANKS, shown
            assert newest <= storm.starts[0], f"committed step {newest} is lost\n{shown}"
            losses.update(storm.losses)
            newest = max(committed(hosts, job), default=0)
            if newest == steps:
                break
    finally:
        for host in (0, 1):
            hosts.kill("staging-1" if host else "staging")
            hosts.start_staging(host)
    assert newest == steps and losses == quiet.losses
