"""Measures over links: six nodes at 200 Mbit/s, the training host at 1 Gbit/s."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from . import state as states
from .beds import Links
from .host import TMPFS
from .record import Measure, say
from .trainer import Ranks

#: Training hosts of the joint measure.
HOSTS = 8


class Files:
    """The same bytes as files in memory, for the references."""

    def __init__(self, large_bytes: int) -> None:
        self.folder = TMPFS / f"rapidraid-bench-files-{os.getpid()}"
        self.folder.mkdir()
        data = b"".join(tensor.numpy().tobytes() for tensor in states.make(large_bytes=large_bytes).values())
        self.one = [self.folder / "one"]
        self.one[0].write_bytes(data)
        part = -(-len(data) // 8)
        self.eight = [self.folder / f"part-{at}" for at in range(8)]
        for at, file in enumerate(self.eight):
            file.write_bytes(data[at * part : (at + 1) * part])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _save_files(bed: Links, step: int, files: list[Path]) -> float:
    took = bed.timed("save", f"files/{step}", *(str(file) for file in files))
    bed.command("rm", f"files/{step}")
    return took


def commit(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures the time from staged to committed."""
    measure = Measure("commit", "staged until committed", "staged", ["one file", "eight files"], 1.1)
    with Links() as bed, Files(large_bytes) as files, Ranks(1, bed.config, large_bytes=large_bytes) as ranks:
        ranks.ask("open", "commit")
        ranks.ask("prepare")
        for step in range(1, repeats + 1):
            ranks.ask("save", step)
            measure.add("staged", ranks.ask("wait", step)[0]["seconds"])
            bed.command("rm", f"commit/{step}")
            measure.add("one file", _save_files(bed, step, files.one))
            measure.add("eight files", _save_files(bed, step, files.eight))
            say("commit: " + ", ".join(f"{arm} {times[-1]:.2f} s" for arm, times in measure.arms.items()))
    yield measure


def joint(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures the time from staged to committed on eight hosts that save one step together."""
    measure = Measure("joint", "staged on eight hosts until committed", "staged", ["eight files"], 1.1)
    with Links(hosts=HOSTS) as bed, Files(large_bytes) as files, Ranks(HOSTS, bed.configs, large_bytes=large_bytes) as ranks:
        ranks.ask("open", "joint")
        ranks.ask("prepare")
        for step in range(1, repeats + 1):
            begun = time.perf_counter()
            ranks.ask("save", step)
            staged = time.perf_counter()
            ranks.ask("wait", step)
            measure.add("staged", time.perf_counter() - staged)
            measure.facts["saves_took_s"] = staged - begun
            bed.command("rm", f"joint/{step}")
            measure.add("eight files", _save_files(bed, step, files.eight))
            say("joint: " + ", ".join(f"{arm} {times[-1]:.2f} s" for arm, times in measure.arms.items()))
    yield measure


def load(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures loads from the cluster into a host with nothing in memory."""
    measures = {
        world: Measure(f"cluster-{world}", f"load from the cluster, {world} rank{'s' * (world > 1)}", "load", ["restore"], 1.15)
        for world in (1, 4)
    }
    with Links() as bed, Files(large_bytes) as files:
        bed.timed("save", "files/1", str(files.one[0]))
        for world, measure in measures.items():
            with Ranks(world, bed.config, large_bytes=large_bytes) as ranks:
                ranks.ask("open", f"load-{world}")
                ranks.ask("save", 1)
                ranks.ask("wait", 1)
                for _ in range(repeats):
                    bed.forget_memory()
                    ranks.ask("open", f"load-{world}")
                    measure.add("load", max(answer["seconds"] for answer in ranks.ask("load", 1)))
                    out = files.folder / "restored"
                    measure.add("restore", bed.timed("restore", "files/1", "--out", str(out)))
                    shutil.rmtree(out)
                    say(f"load by {world}: {measure.arms['load'][-1]:.2f} s beside {measure.arms['restore'][-1]:.2f} s")
            yield measure


def share(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures the share of two busy processors that training keeps during an upload."""
    measure = Measure("share", "training that keeps both processors busy, during an upload over links", "during", ["alone"])
    for nice, arm in ((10, "during"), (0, "during, staging.nice = 0")):
        with (
            Links(staging={"nice": nice}) as bed,
            Ranks(1, bed.config, large_bytes=large_bytes) as ranks,
            Ranks(2, bed.config, large_bytes=0, port=1) as trainers,
        ):
            ranks.ask("open", "share")
            ranks.ask("prepare")
            for step in range(1, max(2, repeats // 3) + 1):
                measure.add("alone", max(answer["seconds"] for answer in trainers.ask("train", 300)))
                ranks.ask("save", step)
                measure.add(arm, max(answer["seconds"] for answer in trainers.ask("train", 300)))
                waited = ranks.ask("wait", step)[0]["seconds"]
                say(f"share: {measure.arms[arm][-1]:.2f} s beside {measure.arms['alone'][-1]:.2f} s; the commit came {waited:.1f} s later")
                bed.command("rm", f"share/{step}")
    yield measure


def _is_committed(bed: Links, job: str, step: int) -> bool:
    found = json.loads(bed.command("ls", job, "--json"))["steps"]
    return any(checkpoint["step"] == step for checkpoint in found)


def preempt(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures commits of steps whose trainers are all killed as soon as they have staged them."""
    measure = Measure("preempt", "all trainers killed right after *staged*: until committed", "committed", ["files"], 1.1, 2.0)
    times = 50 if repeats >= 7 else 2
    with Links() as bed, Files(large_bytes) as files:
        for step in range(1, times + 1):
            with Ranks(2, bed.config, large_bytes=large_bytes) as ranks:
                ranks.ask("resume", "preempt")
                ranks.ask("prepare")
                ranks.ask("save", step)
                ranks.kill()
            begun = time.perf_counter()
            while not _is_committed(bed, "preempt", step):
                time.sleep(0.1)
                if time.perf_counter() - begun > 600:
                    raise RuntimeError(f"step {step} is not committed")
            measure.add("committed", time.perf_counter() - begun)
            if step % 7 == 1 or times < 7:
                measure.add("files", _save_files(bed, step, files.one))
            if step > 1:
                bed.command("rm", f"preempt/{step - 1}")
            say(f"preempt {step} of {times}: {measure.arms['committed'][-1]:.2f} s beside {measure.arms['files'][-1]:.2f} s")
        measure.facts["slowest_s"] = max(measure.arms["committed"])
        measure.facts["allowed_s"] = measure.median("files") * 1.1 + 2.0
    yield measure
