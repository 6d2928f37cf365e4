"""Tensors that are distributed over ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import launch

import rapidraid

pytest.importorskip("torch")
PROGRAM = str(Path(__file__).parent / "programs" / "dtensors.py")
DISAGREE = str(Path(__file__).parent / "programs" / "disagree.py")


def test_placements_of_every_kind(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Four ranks load what they saved, and one rank loads every tensor whole. No element is stored twice."""
    code, lines = launch(PROGRAM, 4, str(cluster.config), job, "save")
    assert code == 0
    assert sorted(line for line in lines if "is equal" in line) == [f"rank {rank} is equal" for rank in range(4)]
    code, lines = launch(PROGRAM, 1, str(cluster.config), job, "whole")
    assert code == 0 and "whole" in lines
    shown = json.loads(cluster.command("show", f"{job}/1", "--tensors", "--json"))
    for name in shown["names"]:
        elements = 1
        for size in name["shape"]:
            elements *= size
        assert sum(region["bytes"] for region in name["regions"]) == 4 * elements, name["name"]


@pytest.mark.parametrize(
    ("part", "why"),
    [("partial", "Partial placement"), ("shapes", "rank 2 the shape (4,)"), ("redistribute", "spread over the ranks in another way")],
)
def test_what_ranks_cannot_store_together_is_refused_on_all(cluster: rapidraid.LocalCluster, job: str, part: str, why: str) -> None:
    """Every rank gets an error that names the tensor."""
    code, lines = launch(PROGRAM, 4, str(cluster.config), job, part)
    assert code == 0
    refused = [line for line in lines if " refused: " in line]
    assert len(refused) == 4 and all(why in line for line in refused), lines


def test_ranks_whose_copies_differ_are_named(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Differing copies cause a warning, and the save continues."""
    code, lines = launch(PROGRAM, 4, str(cluster.config), job, "differ")
    assert code == 0
    notes = {line.split("note: ")[1] for line in lines if "rank 0 note: " in line}
    assert notes == {
        "bias differs between ranks 0 and 2, though it is declared replicated: the owner's copy is saved",
        "spread, the box of (50,) at (50,), differs between ranks 1 and 3, though it is declared replicated: the owner's copy is saved",
    }


def test_ranks_that_save_different_steps_are_told(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A step that one rank does not save is dropped with an error that names the rank, and is no resume point."""
    code, lines = launch(DISAGREE, 2, str(cluster.config), job)
    assert code == 0
    told = [line for line in lines if line.startswith("rank 0 refused: ")]
    assert len(told) == 1 and "rank 1" in told[0] and "step 2" in told[0], lines
    assert not [line for line in lines if line.endswith(" committed")], lines
    assert rapidraid.Checkpointer(job, config=cluster.config).latest() == 1
