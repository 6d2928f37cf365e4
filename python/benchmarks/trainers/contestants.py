"""All ways to save and load the same state: those of rapidraid, and those of other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

import rapidraid
from rapidraid._jobs import forget_checkpointers
from rapidraid.torch import Reader, Writer, async_save
from rapidraid.torch import load as load_by_name

from . import libraries
from .beds import Host, Links
from .libraries import LIMIT_S, Background, Contestant, State


class Plain(Contestant):
    """A ``Checkpointer``; six storage nodes on loopback keep their data in the same tmpfs."""

    verifies = "BLAKE3 of every byte; reads a second source"
    memory, durable = "1 (2 segments)", "2, on two of six nodes"
    stores_files = False
    #: Settings of the staging daemon.
    staging: ClassVar[dict[str, str | int]] = {"memory": "4GiB"}

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        os.environ["TMPDIR"] = str(folder)
        self.bed = self.start_bed()
        self.step = 0
        self.checkpointer = rapidraid.Checkpointer("peers", config=self.bed.config, keep=2, timeout=LIMIT_S)
        self.checkpointer.prepare(self.state)

    def start_bed(self) -> Host:
        """Starts the storage nodes and the staging daemon."""
        return Host(block="4MiB", staging=self.staging)

    @override
    def save(self, step: int) -> None:
        self.step = step
        self.checkpointer.save(step, self.state)

    @override
    def is_committed(self) -> bool:
        try:
            self.checkpointer.wait(self.step, timeout=0.0)
        except rapidraid.errors.DeadlineError:
            return False
        return True

    @override
    def wait(self) -> None:
        self.checkpointer.wait(self.step)

    @override
    def load(self) -> None:
        self.checkpointer.load(self.state, self.step)

    @override
    def forget_memory(self) -> None:
        self.checkpointer.close()
        self.bed.forget_memory()
        self.checkpointer = rapidraid.Checkpointer("peers", config=self.bed.config, keep=2, timeout=LIMIT_S)

    @override
    def close(self) -> None:
        self.checkpointer.close()
        self.bed.stop()


class PlainOverLinks(Plain):
    """A ``Checkpointer``; the storage nodes are behind links."""

    @override
    def start_bed(self) -> Host:
        return Links(staging=self.staging)


class PlainNotNice(Plain):
    """A ``Checkpointer`` whose staging daemon has the trainer's priority."""

    staging: ClassVar[dict[str, str | int]] = {"memory": "4GiB", "nice": 0}


class FromCluster(Plain):
    """A ``Checkpointer`` whose host has nothing in memory."""

    saves = False
    memory = "-"

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self.save(1)
        self.wait()

    @override
    def before_load(self) -> None:
        self.forget_memory()


class ByName(Background):
    """``rapidraid.torch.async_save`` and ``rapidraid.torch.load``."""

    verifies, memory, durable = Plain.verifies, Plain.memory, Plain.durable
    stores_files = False

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        os.environ["TMPDIR"] = str(folder)
        self.bed = self.start_bed()
        self.step = 0
        self.open()

    def start_bed(self) -> Host:
        """Starts the storage nodes and the staging daemon."""
        return Host(block="4MiB", staging=Plain.staging)

    def open(self) -> None:
        """Makes the objects that save and load."""
        self.writer, self.reader = Writer(config=self.bed.config, keep=2), Reader(config=self.bed.config)

    @override
    def save(self, step: int) -> None:
        self.step = step
        self.future = async_save(self.state, f"peers/{step}", writer=self.writer)

    @override
    def load(self) -> None:
        load_by_name(self.state, f"peers/{self.step}", reader=self.reader)

    @override
    def forget_memory(self) -> None:
        self.writer.close()
        forget_checkpointers()
        self.bed.forget_memory()
        self.open()

    @override
    def close(self) -> None:
        self.writer.close()
        self.bed.stop()


class ByNameOverLinks(ByName):
    """The same; the storage nodes are behind links."""

    @override
    def start_bed(self) -> Host:
        return Links(staging=Plain.staging)


#: In the order of the table.
CONTESTANTS: dict[str, Callable[[State, Path], Contestant]] = {
    "Checkpointer": Plain,
    "Checkpointer, staging.nice = 0": PlainNotNice,
    "rapidraid.torch": ByName,
    "Checkpointer, host's memory lost": FromCluster,
    "DCP, thread": libraries.Dcp,
    "DCP, thread, nice": libraries.DcpNice,
    "DCP, process": libraries.DcpProcess,
    "DCP, process, nice": libraries.DcpProcessNice,
    "torch_checkpointing": libraries.TorchCheckpointing,
    "safetensors": libraries.Safetensors,
    "safetensors, pread": libraries.Pread,
    "runai-model-streamer": libraries.Runai,
    "fastsafetensors": libraries.Fastsafetensors,
    "torchft HTTPTransport": libraries.Torchft,
}

#: The others that are measured over links, where their files lie in a mounted SeaweedFS. torchft stores nothing: its copy is
#: in the memory of another rank.
_WITH_FILES = (
    *("DCP, thread, nice", "DCP, process, nice", "torch_checkpointing"),
    *("safetensors", "safetensors, pread", "runai-model-streamer", "fastsafetensors"),
)
CONTESTANTS_OVER_LINKS: dict[str, Callable[[State, Path], Contestant]] = {
    "Checkpointer": PlainOverLinks,
    "rapidraid.torch": ByNameOverLinks,
    **{name: CONTESTANTS[name] for name in _WITH_FILES},
}
