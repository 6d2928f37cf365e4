"""Faults that a checkpoint meets: a bit that flips, a file that is lost, a kill while a step is saved again, a node that stops.

usage: python -m trainers.faults RESULT [TRIALS]
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import rapidraid

from .record import _about, say

#: Tensors of the state, and elements of each. A flipped bit nearly always lies in one of them.
TENSORS, ELEMENTS = 8, 1 << 17
LIMIT_S = 60.0

State = dict[str, torch.Tensor]


def make() -> State:
    """Returns the state that is saved."""
    generator = torch.Generator().manual_seed(7)
    return {f"layer{at}": torch.randn(ELEMENTS, generator=generator) for at in range(TENSORS)}


class Files:
    """A way to save to files on a file system."""

    def __init__(self, name: str, save: Callable[[State, Path], object], load: Callable[[Path], State]) -> None:
        self.name, self.save, self.load = name, save, load


def _load_dcp(folder: Path) -> State:
    state = {name: torch.zeros_like(tensor) for name, tensor in make().items()}
    dcp_load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def _save_torch(state: State, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "state.pt")


def _save_safetensors(state: State, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "state.safetensors")


def _save_torch_checkpointing(state: State, folder: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # On a busy machine its process needs longer than the default of 30 s to start.
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=int(LIMIT_S))
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager.Config(storage_config=storage, save=AsyncCheckpointSaverConfig(process_config=process)).build()
    future = manager.save(str(folder), {"state": state})
    if future is not None:
        future.result()
    manager.close()


def _load_torch_checkpointing(folder: Path) -> State:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    state = {name: torch.zeros_like(tensor) for name, tensor in make().items()}
    manager = CheckpointManager.Config(storage_config=LocalFileSystemStorageConfig(use_direct_io=False)).build()
    loaded = manager.load(str(folder), into={"state": state})
    manager.close()
    return loaded["state"] if isinstance(loaded, dict) and "state" in loaded else state


PEERS = [
    Files("DCP", lambda state, folder: dcp_save(state, storage_writer=FileSystemWriter(folder), no_dist=True), _load_dcp),
    Files("torch.save", _save_torch, lambda folder: torch.load(folder / "state.pt", weights_only=True)),
    Files("safetensors", _save_safetensors, lambda folder: load_file(folder / "state.safetensors")),
    Files("torch_checkpointing", _save_torch_checkpointing, _load_torch_checkpointing),
]


def outcome(load: Callable[[], State]) -> str:
    """Returns how a load ended: ``right``, ``wrong data``, ``refused``, or ``no answer``."""
    want = make()
    begun = time.monotonic()
    try:
        found = load()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - each library has its own errors
        say(f"refused: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return "refused" if time.monotonic() - begun < LIMIT_S else "no answer"
    return "right" if all(found[name].equal(tensor) for name, tensor in want.items()) else "wrong data"


def flip(path: Path, draw: random.Random) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def with_files(peer: Files, trials: int, draw: random.Random) -> dict[str, Counter[str]]:
    """Measures one way to save to files."""
    seen: dict[str, Counter[str]] = {"bit": Counter(), "file": Counter(), "kill": Counter()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        base = Path(name)
        peer.save(make(), base / "good")
        for trial in range(trials):
            for fault in ("bit", "file"):
                copy = base / f"{fault}-{trial}"
                shutil.copytree(base / "good", copy)
                files = sorted((path for path in copy.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
                if fault == "bit":
                    flip(files[-1], draw)
                else:
                    files[draw.randrange(len(files))].unlink()
                seen[fault][outcome(lambda copy=copy: peer.load(copy))] += 1  # type: ignore[misc]
                shutil.rmtree(copy)
        for trial in range(trials):
            folder = base / f"kill-{trial}"
            shutil.copytree(base / "good", folder)
            _kill_while_saving([peer.name, str(folder)], draw)
            seen["kill"][outcome(lambda folder=folder: peer.load(folder))] += 1  # type: ignore[misc]
            shutil.rmtree(folder)
    return seen


def _kill_while_saving(arguments: list[str], draw: random.Random) -> None:
    """Starts a process that saves again and again, and kills it at a random moment after its first save."""
    child = subprocess.Popen([sys.executable, "-m", "trainers.faults", "--saver", *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("saved"):
            break
    time.sleep(draw.random() * 0.2)
    child.send_signal(signal.SIGKILL)
    child.wait()


def saver(name: str, place: str) -> None:
    """Saves the same state to the same place until it is killed."""
    if name == "rapidraid":
        config, job = place.split("|")
        checkpointer = rapidraid.Checkpointer(job, config=config)
        state = make()
        step = checkpointer.load(state) or 0
        while True:
            step += 1
            checkpointer.save(step, make())
            print("saved", flush=True)
    peer = next(peer for peer in PEERS if peer.name == name)
    state = make()
    while True:
        with contextlib.suppress(FileExistsError):
            peer.save(state, Path(place))
        print("saved", flush=True)


def _replicas(cluster: rapidraid.LocalCluster) -> Iterator[Path]:
    for path in (cluster.folder / "cluster" / "nodes").glob("*/data/**/*"):
        if path.is_file() and path.stat().st_size >= 1 << 18 and "catalog" not in str(path):
            yield path


def with_rapidraid(trials: int, draw: random.Random) -> dict[str, Counter[str]]:
    """Measures rapidraid: replicas on six nodes, read with nothing in memory."""
    seen: dict[str, Counter[str]] = {fault: Counter() for fault in ("bit", "file", "kill", "stop")}
    with rapidraid.local_cluster(6, settings={"policy.archive_all_but": "never"}) as cluster:

        def load(job: str) -> State:
            cluster.forget_memory()
            state = {name: torch.zeros_like(tensor) for name, tensor in make().items()}
            with rapidraid.Checkpointer(job, config=cluster.config, timeout=LIMIT_S / 2) as checkpointer:
                checkpointer.load(state)
            return state

        for trial in range(trials):
            # A save of its own for each fault: two faults may hit both copies of a block.
            for fault, outcomes in seen.items():
                job = f"{fault}-{trial}"
                known = set(_replicas(cluster))
                with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
                    checkpointer.save(1, make())
                    checkpointer.wait()
                chosen, node = draw.choice(sorted(set(_replicas(cluster)) - known)), draw.choice(cluster.nodes)
                if fault == "bit":
                    flip(chosen, draw)
                elif fault == "file":
                    chosen.unlink()
                elif fault == "kill":
                    _kill_while_saving(["rapidraid", f"{cluster.config}|{job}"], draw)
                else:
                    cluster.pause(node)
                outcomes[outcome(lambda job=job: load(job))] += 1  # type: ignore[misc]
                cluster.resume(node)
            say(f"rapidraid: {trial + 1} of {trials}")
    return seen


def main() -> None:
    """Measures all, and writes the record."""
    warnings.filterwarnings("ignore")
    if sys.argv[1] == "--saver":
        saver(*sys.argv[2:])
        return
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    found: dict[str, Any] = {}
    for peer in PEERS:
        with contextlib.suppress(ImportError):
            found[peer.name] = with_files(peer, trials, random.Random(1))
            say(f"{peer.name}: {found[peer.name]}")
    found["rapidraid"] = with_rapidraid(trials, random.Random(1))
    say(f"rapidraid: {found['rapidraid']}")
    record = {"schema": 1, "trials": trials, "outcomes": found, "taken": _about("python -m trainers.faults")}
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
