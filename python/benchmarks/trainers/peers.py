"""Measures of rapidraid beside other libraries: each saves and loads the same state in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .contestants import CONTESTANTS
from .host import TMPFS, seconds
from .libraries import Contestant, State
from .record import Measure, say
from .training import Training

#: Large and small tensors of the state. The large ones have a quarter of the bytes of the other measures'.
LARGE, SMALL, SMALL_BYTES = 128, 256, 4 << 10
#: Small batches in a step of training, which takes 100 to 200 ms.
BATCHES = 20
#: Saves that are measured alone, after two that make all buffers, and saves after each step.
SAVES, EVERY_STEP = 2, 6
#: Seconds in which the kernel frees what a save has removed.
SETTLE_S = 1.0
LIMIT_S = 600
#: A round begins when other programs use less than this share of the processors, or after this many seconds.
QUIET, QUIET_LIMIT_S = 0.25, 60

#: How the names of these measures begin, and those of rapidraid's contestants.
PREFIX, OURS = "peers-", ("Checkpointer", "rapidraid")
#: The columns of the table: the measure's name, its title, and whether it counts in times of a step alone.
COLUMNS = {
    "stall": ("stall", False),
    "during": ("step during the save", True),
    "committed": ("until committed", False),
    "lost": ("training time lost per save", False),
    "load": ("load", False),
    "every-step": ("a save at every step", True),
}


def make(large_bytes: int) -> State:
    """Returns the state, float32."""
    generator = torch.Generator().manual_seed(1)
    state = {f"large.{at:03}": torch.randn(large_bytes // 16, generator=generator) for at in range(LARGE)}
    return state | {f"small.{at:03}": torch.randn(SMALL_BYTES // 4, generator=generator) for at in range(SMALL)}


def peers(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures rapidraid beside DCP, torch_checkpointing, safetensors and loaders of its files, and torchft, all on tmpfs."""
    arms = list(CONTESTANTS)
    others = [arm for arm in arms if not arm.startswith(OURS)]
    measures = {}
    for column, (title, is_ratio) in COLUMNS.items():
        measures[column] = Measure(f"{PREFIX}{column}", f"peers: {title}", arms[0], others)
        measures[column].facts["unit"] = "times a step alone" if is_ratio else "seconds"
    about: dict[str, Any] = {"bytes": sum(tensor.nbytes for tensor in make(large_bytes).values()), "tensors": LARGE + SMALL}
    about["contestants"] = {name: _words(contestant) for name, contestant in CONTESTANTS.items()}
    measures["stall"].facts |= about
    missing: dict[str, str] = {}
    busy: dict[str, list[float]] = {}
    for turn in range(repeats):
        # Another one begins in each turn.
        for name in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            if name in missing:
                continue
            busy.setdefault(name, []).append(_until_quiet())
            found = _in_a_process(name, large_bytes)
            if "missing" in found:
                missing[name] = found["missing"]
            for column, measure in measures.items():
                if found.get(column):
                    measure.add(name, statistics.median(found[column]))
            say(f"peers: turn {turn + 1}, {name}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
        measures["stall"].facts |= {"not to be had": missing, "busy_before": busy}
        # The record has what is measured so far, should a long run be ended.
        yield from (measure for measure in measures.values() if measure.arms.get(arms[0]))


def _until_quiet() -> float:
    """Waits for other programs. Returns the share of the processors that they use."""
    until = time.monotonic() + QUIET_LIMIT_S
    while True:
        before = _ticks()
        time.sleep(2)
        idle, total = (now - then for now, then in zip(_ticks(), before, strict=True))
        share = 1 - idle / total
        if share < QUIET or time.monotonic() > until:
            return share


def _ticks() -> tuple[int, int]:
    """Returns how long the processors were idle, and how long they have run, in clock ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def _words(contestant: Any) -> dict[str, str]:
    return {"verifies": contestant.verifies, "memory": contestant.memory, "durable": contestant.durable}


def _in_a_process(name: str, large_bytes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "trainers.peers", name, str(large_bytes)]
    # Files instead of pipes: daemons that outlive the process keep no reader waiting.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        code = subprocess.run(command, stdout=out, stderr=errors, text=True, timeout=LIMIT_S, start_new_session=True).returncode
        out.seek(0)
        errors.seek(0)
        answers = [line for line in out.read().splitlines() if line.startswith("{")]
        if code != 0 or not answers:
            raise RuntimeError(f"{name} ended with {code}: {errors.read()[-2000:]}")
        found: dict[str, Any] = json.loads(answers[-1])
        return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Trains on one thread: the other processor is free for what saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Round:
    """A round of one contestant: saves beside training, loads, and a save at every step."""

    def __init__(self, contestant: Contestant, state: State) -> None:
        self.contestant, self.state = contestant, state
        self.training = Training()
        self.found: dict[str, list[float]] = {column: [] for column in COLUMNS}
        self.alone: list[float] = []
        self.first = {name: tensor[:16].clone() for name, tensor in state.items()}
        self.step = 0

    def run(self) -> dict[str, list[float]]:
        """Returns the times of each column."""
        self._train(50)
        if self.contestant.saves:
            for _ in range(2):
                self._save()
                self.contestant.wait()
        self._load()
        self.found["load"].clear()
        for _ in range(SAVES):
            time.sleep(SETTLE_S)
            if self.contestant.saves:
                self._save_and_train()
            self._load()
        if self.contestant.saves:
            time.sleep(SETTLE_S)
            self._save_at_every_step()
        return self.found

    def _train(self, batches: int) -> list[float]:
        with _one_thread():
            return [self.training.step() for _ in range(batches)]

    def _save(self) -> float:
        self.step += 1
        return seconds(self.contestant.save, self.step)

    def _save_and_train(self) -> None:
        alone = statistics.fmean(self._train(3 * BATCHES))
        self.alone.append(alone)
        begun = time.perf_counter()
        stall = self._save()
        during = []
        with _one_thread():
            while not self.contestant.is_committed():
                during.append(self.training.step())
        self.found["stall"].append(stall)
        self.found["committed"].append(time.perf_counter() - begun)
        self.found["lost"].append(stall + sum(during) - alone * len(during))
        if during:
            self.found["during"].append(statistics.fmean(during) / alone)
        self.contestant.wait()

    def _load(self) -> None:
        for tensor in self.state.values():
            tensor.zero_()
        self.contestant.before_load()
        self.found["load"].append(seconds(self.contestant.load))
        for name, tensor in self.first.items():
            assert self.state[name][:16].equal(tensor), f"{name} is not what was saved"

    def _save_at_every_step(self) -> None:
        """Trains and saves in turn, until the last save is committed."""
        begun = time.perf_counter()
        for _ in range(EVERY_STEP):
            self._train(BATCHES)
            self._save()
        self.contestant.wait()
        took = (time.perf_counter() - begun) / EVERY_STEP
        self.found["every-step"].append(took / (statistics.fmean(self.alone) * BATCHES))


def main() -> None:
    """Measures one round of a contestant."""
    warnings.filterwarnings("ignore")
    name, large_bytes = sys.argv[1], int(sys.argv[2])
    state = make(large_bytes)
    folder = Path(tempfile.mkdtemp(prefix="rapidraid-bench-", dir=TMPFS))
    try:
        try:
            contestant = CONTESTANTS[name](state, folder)
        except (ImportError, OSError) as error:
            print(json.dumps({"missing": str(error).splitlines()[0]}), flush=True)
            return
        try:
            found = Round(contestant, state).run()
        finally:
            contestant.close()
        print(json.dumps(found), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Threads of a library may wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
