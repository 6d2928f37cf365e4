"""Measures on one machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import rapidraid

from . import state as states
from .beds import Host
from .memory import GroupPeak, Peak, pss_bytes
from .record import Measure, say
from .trainer import Ranks
from .training import Training

#: The folder for the files of references: the memory that also contains the segments.
TMPFS = Path("/dev/shm")


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Returns the duration of a call in seconds."""
    begun = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begun


class Copies:
    """The references of a stall: copies of the same bytes into memory that is already allocated."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.sources = list(state.values())
        self.buffers = [torch.empty_like(tensor).fill_(1) for tensor in self.sources]
        self.flat = torch.cat(self.sources)
        self.into = torch.empty_like(self.flat).fill_(1)

    def add_to(self, measure: Measure) -> None:
        """Measures both references once."""
        measure.add("foreach", seconds(torch._foreach_copy_, self.buffers, self.sources))
        measure.add("memcpy", seconds(self.into.copy_, self.flat))


def stall(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures how long a save blocks the trainer, the first time and later."""
    state = states.make(large_bytes=large_bytes)
    copies = Copies(state)
    later = Measure("stall", "stall of a save", "save", ["foreach", "memcpy"], 1.1)
    first = Measure("first", "first save after `prepare`", "save", ["foreach", "memcpy"], 2.0)
    splits = []
    with Host(block="4MiB") as bed:
        for at in range(repeats):
            job = f"first-{at}"
            with rapidraid.Checkpointer(job, config=bed.config) as checkpointer:
                checkpointer.prepare(state)
                copies.add_to(first)
                first.add("save", seconds(checkpointer.save, 1, state))
            bed.command("stage", "--free", job)
            bed.command("rm", f"{job}/1")
            time.sleep(2)
        with rapidraid.Checkpointer("stall", config=bed.config, keep=2) as checkpointer:
            for step in range(1, repeats + 3):
                is_counted = step > 2
                if is_counted:
                    copies.add_to(later)
                took = seconds(checkpointer.save, step, state)
                if is_counted:
                    later.add("save", took)
                    splits.append(vars(checkpointer.last_stall).copy())
                checkpointer.wait()
                # The kernel still frees the removed memory, on both processors.
                time.sleep(2)
                say(f"stall: step {step} took {took:.3f} s")
    parts = ("traversal", "waiting", "copy", "socket")
    later.facts["split_s"] = {part: sorted(split[part] for split in splits)[len(splits) // 2] for part in parts}
    later.facts["bytes"] = states.nbytes(state)
    yield later
    yield first


def _is_committed(checkpointer: rapidraid.Checkpointer, step: int) -> bool:
    try:
        checkpointer.wait(step, timeout=0.0)
    except rapidraid.errors.DeadlineError:
        return False
    return True


def _steps_during_upload(bed: Host, measure: Measure, steps: int, large_bytes: int, job: str) -> None:
    """Alternates steps without a save and steps during an upload, until there are enough of both."""
    state = states.make(large_bytes=large_bytes)
    training = Training()
    for _ in range(50):
        training.step()
    with rapidraid.Checkpointer(job, config=bed.config, keep=1) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        number = 1
        while len(measure.arms.get("during", [])) < steps:
            number += 1
            checkpointer.save(number, state)
            during = 0
            while True:
                for _ in range(10):
                    measure.add("during", training.step())
                during += 10
                if _is_committed(checkpointer, number):
                    break
            for _ in range(during):
                measure.add("alone", training.step())
            say(f"{measure.name}: {len(measure.arms['during'])} steps during uploads")


def _add_tail(measure: Measure) -> None:
    for arm, times in measure.arms.items():
        times.sort()
        measure.facts[f"p99_{arm}_s"] = times[int(len(times) * 0.99)]
    measure.facts["p99_ratio"] = measure.facts["p99_during_s"] / measure.facts[f"p99_{measure.references[0]}_s"]
    measure.facts["steps"] = len(measure.arms["during"])
    # A hundred points of the distribution are as informative as thousands of steps.
    measure.arms = {arm: [times[len(times) * at // 100] for at in range(100)] for arm, times in measure.arms.items()}


def upload(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures steps during an upload: the trainer has one processor, everything else the other one."""
    steps = 1000 if repeats >= 7 else 100
    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    pinned = Measure("upload", "training step during an upload, on a processor of its own", "during", ["alone"], 1.1)
    beside = Measure("beside", "the same without pinning, six storage nodes beside", "during", ["spinner"])
    try:
        with Host(block="4MiB") as bed:
            first, second = (sorted(cpus) * 2)[:2]
            bed.pin({second})
            for task in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(task), {first})
            _steps_during_upload(bed, pinned, steps, large_bytes, "pinned")
            for task in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task), cpus)
            bed.pin(cpus)
            _steps_during_upload(bed, beside, steps, large_bytes, "beside")
        spin = [sys.executable, "-c", "while True: pass"]
        training = Training()
        spinners = [subprocess.Popen(spin, start_new_session=True) for _ in range(1)]
        try:
            for _ in range(len(beside.arms["during"])):
                beside.add("spinner", training.step())
        finally:
            for spinner in spinners:
                spinner.kill()
                spinner.wait()
    finally:
        torch.set_num_threads(threads)
    for measure in (pinned, beside):
        _add_tail(measure)
        yield measure


def memory(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures loads from the host's memory, each of a step that was not read before, and the memory of processes."""
    import blake3
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file

    state = states.make(large_bytes=large_bytes)
    copies = Copies(state)
    load = Measure("load", "load from the host's memory, verified", "load", ["memcpy+blake3"], 1.2)
    folder = TMPFS / f"rapidraid-bench-{os.getpid()}"
    folder.mkdir()
    data = memoryview(copies.flat.numpy()).cast("B")  # type: ignore[arg-type]
    try:
        save_file(state, folder / "state.safetensors")
        dcp.save(state, checkpoint_id=folder / "dcp")  # type: ignore[attr-defined]
        with Host(block="4MiB") as bed:
            before = pss_bytes(os.getpid())
            with (
                GroupPeak(bed.staging_pid) as group,
                Peak(bed.staging_pid) as peak,
                rapidraid.Checkpointer("load", config=bed.config, keep=1) as checkpointer,
            ):
                checkpointer.prepare(state)
                plan = checkpointer._saver.plan
                assert plan is not None
                segments = plan.segment_bytes * plan.segments
                for step in range(1, repeats + 1):
                    checkpointer.save(step, state)
                    checkpointer.wait()
                    time.sleep(2)
                    copy = seconds(copies.into.copy_, copies.flat)
                    hashing = seconds(lambda: blake3.blake3(data, max_threads=blake3.blake3.AUTO).digest())
                    load.add("memcpy+blake3", copy + hashing)
                    load.add("load", seconds(checkpointer.load, state, step))
                    load.add("load again", seconds(checkpointer.load, state, step))
                    load.add("safetensors", seconds(lambda: _into(state, load_file(folder / "state.safetensors"))))
                    load.add("dcp", seconds(lambda: dcp.load(state, checkpoint_id=folder / "dcp")))  # type: ignore[attr-defined]
                    with Peak(os.getpid(), 0.002) as own:
                        checkpointer.load(state, step)
                    load.facts["load_peak_bytes"] = max(load.facts.get("load_peak_bytes", 0), own.bytes - own.first_bytes)
                    if step == 1:
                        load.facts["trainer_beyond_segments_bytes"] = pss_bytes(os.getpid()) - before - segments
                    say(f"load: {load.arms['load'][-1]:.3f} s beside {load.arms['memcpy+blake3'][-1]:.3f} s")
            load.facts["daemon_peak_beyond_segments_bytes"] = peak.bytes
            load.facts["daemon_group_peak_bytes"] = group.bytes
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    yield load


def _into(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        tensor.copy_(found[name])


def resume(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures a resume: all trainers are killed, and new ones load from the host's memory."""
    measure = Measure("resume", "all trainers killed: from the new `Checkpointer` to the loaded state", "resume", ["load"], 1.5, 1.0)
    with Host(block="4MiB") as bed:
        for at in range(repeats):
            with Ranks(4, bed.config, large_bytes=large_bytes) as ranks:
                ranks.ask("resume", "resume")
                ranks.ask("prepare")
                ranks.ask("save", at * 2 + 1)
                ranks.ask("wait", at * 2 + 1)
                measure.add("load", max(answer["seconds"] for answer in ranks.ask("load", at * 2 + 1)))
                ranks.ask("save", at * 2 + 2)
                ranks.ask("wait", at * 2 + 2)
            with Ranks(4, bed.config, large_bytes=large_bytes) as ranks:
                answers = ranks.ask("resume", "resume")
                assert all(answer["step"] == at * 2 + 2 for answer in answers), answers
                measure.add("resume", max(answer["seconds"] for answer in answers))
            say(f"resume: {measure.arms['resume'][-1]:.3f} s beside {measure.arms['load'][-1]:.3f} s")
            # A small disk has room for few steps.
            for step in (at * 2, at * 2 + 1)[0 if at else 1 :]:
                bed.command("rm", f"resume/{step}")
    yield measure
