"""The examples with several ranks, run as a user runs them, with crashes in between."""

from __future__ import annotations

import os
import re
import signal

import pytest
from ranks import launch

import rapidraid

pytest.importorskip("torch")


def steps_of(lines: list[str]) -> dict[tuple[int, int], str]:
    """Returns each rank's output for each step. If a step ran twice, the later output counts."""
    found = {}
    for line in lines:
        match = re.match(r"rank (\d+) step (\d+) (.*)", line)
        if match:
            found[int(match[1]), int(match[2])] = match[3]
    return found


def test_ddp_goes_on_bit_for_bit_after_a_rank_and_a_node_were_killed(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Losses, positions and running statistics of all ranks equal those of an undisturbed run."""
    config = str(cluster.config)
    code, lines = launch("ddp.py", 4, config, "20", env={"JOB": f"{job}-quiet"})
    assert code == 0
    expected = steps_of(lines)
    assert len(expected) == 80
    pids: dict[int, int] = {}
    killed: list[str] = []

    def disturb(line: str) -> None:
        match = re.match(r"rank (\d+) pid (\d+) start (\d+)", line)
        if match and match[3] == "0":
            pids[int(match[1])] = int(match[2])
        if line.startswith("rank 2 step 13 ") and not killed:
            killed.append(cluster.nodes[-1])
            cluster.kill(killed[0])
            os.kill(pids[2], signal.SIGKILL)

    try:
        code, lines = launch("ddp.py", 4, config, "20", restarts=2, on_line=disturb, env={"JOB": job})
    finally:
        cluster.start(killed[0])
    assert code == 0
    starts = [int(match[1]) for line in lines if (match := re.fullmatch(r"rank \d+ pid \d+ start (\d+)", line))]
    assert sorted(starts) == [0] * 4 + [10] * 4
    assert steps_of(lines) == expected


def test_ddp_ends_at_one_step_after_a_signal_to_one_rank(cluster: rapidraid.LocalCluster, job: str) -> None:
    """All ranks save the same step once more, and end without an error."""
    pids: dict[int, int] = {}

    def interrupt(line: str) -> None:
        match = re.match(r"rank (\d+) pid (\d+) start", line)
        if match:
            pids[int(match[1])] = int(match[2])
        if line.startswith("rank 2 step 7 "):
            os.kill(pids[2], signal.SIGTERM)

    code, lines = launch("ddp.py", 4, str(cluster.config), "100000", on_line=interrupt, env={"JOB": job})
    assert code == 0
    last = [max(step for of, step in steps_of(lines) if of == rank) for rank in range(4)]
    assert 7 <= last[0] < 100000 and last == [last[0]] * 4
    assert rapidraid.Checkpointer(job, config=cluster.config).latest() == last[0]


def test_fsdp_loads_on_any_number_of_ranks(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Launches of 4, 2, 1 and 4 ranks load the saved state: from memory, replicas, and pieces with nodes down."""
    config = cluster.config
    env = {"JOB": job}

    def run(ranks: int, steps: int) -> dict[str, list[str]]:
        code, lines = launch("fsdp.py", ranks, str(config), str(steps), env=env)
        assert code == 0
        return {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("loaded ", "saved "))}

    first = run(4, 3)
    second = run(2, 2)
    assert second["loaded"] == first["saved"] == ["3", first["saved"][1]]
    cluster.forget_memory()
    third = run(1, 2)
    assert third["loaded"] == second["saved"], "from replicas"
    cluster.command("archive", f"{job}/7")
    cluster.forget_memory()
    nodes = cluster.nodes[-2:]
    for node in nodes:
        cluster.kill(node)
    try:
        fourth = run(4, 0)
    finally:
        for node in nodes:
            cluster.start(node)
    assert fourth["loaded"] == third["saved"], "from pieces, with two of six nodes away"


def test_private_state_of_eight_ranks_comes_back_to_its_owners(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Each rank gets what it saved. A launch of six ranks is refused unless it says which private state to use."""
    config, env = str(cluster.config), {"JOB": job}
    code, _ = launch("private.py", 8, config, "save", env=env)
    assert code == 0
    code, lines = launch("private.py", 8, config, "load", env=env)
    assert code == 0
    assert sorted(lines) == [f"rank {rank} has the state of rank {rank} rng True weights True" for rank in range(8)]
    code, lines = launch("private.py", 6, config, "load", env=env)
    assert code != 0
    assert any("the private state of ranks [6, 7] has no owner" in line for line in lines)
    code, lines = launch("private.py", 6, config, "load", "map", env=env)
    assert code == 0
    assert sorted(lines) == [f"rank {rank} has the state of rank {7 - rank} rng True weights True" for rank in range(6)]
    code, lines = launch("private.py", 6, config, "load", "skip", env=env)
    assert code == 0
    assert all("has the state of rank -1 rng False weights True" in line for line in lines)
