"""Ways to save and load the same state: those of other libraries, with their best settings.

A library is imported when its contestant is made, so that the others are measured where it is not installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

State = dict[str, torch.Tensor]

LIMIT_S = 120.0
#: The nice value of the thread or process that writes; rapidraid's staging daemon has the same one.
NICE = 10
#: The parts in which torchft sends a state; two were the fastest of 1, 2 and 4 on two processors.
CHUNKS = 2


class Contestant:
    """A way to save and load a state. The copies and checks that it makes are words for the table."""

    #: Whether it saves during training; the others only load what they have saved once.
    saves = True
    #: Whether it stores files in the folder.
    stores_files = True
    verifies = "nothing"
    #: Copies in the host's memory that a save makes, and copies afterwards.
    memory, durable = "1", "1"

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder

    def save(self, step: int) -> None:
        """Saves the state; returns when the state may change. Waits for an earlier save if the library needs that."""
        raise NotImplementedError

    def is_committed(self) -> bool:
        """Returns whether the last save is complete."""
        return True

    def wait(self) -> None:
        """Waits until the last save is complete."""

    def before_load(self) -> None:
        """Prepares a load; not measured."""

    def forget_memory(self) -> None:
        """Lets the host forget what it has of the saved steps in memory."""

    def load(self) -> None:
        """Loads the last committed step into the state."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends threads and processes."""


class Background(Contestant):
    """A save whose end is a future."""

    future: Future[Any] | None = None

    @override
    def is_committed(self) -> bool:
        return self.future is None or self.future.done()

    @override
    def wait(self) -> None:
        if self.future is not None:
            self.future.result(LIMIT_S)


class Folders(Background):
    """A save into a folder of its own; a thread removes all but the last two, as trainers do."""

    step = 0

    def place(self, step: int) -> Path:
        """Returns the folder of a step."""
        return self.folder / f"step-{step}"

    @override
    def save(self, step: int) -> None:
        self.wait()
        self.step = step
        self.start(self.place(step))
        threading.Thread(target=shutil.rmtree, args=(self.place(step - 2), True), daemon=True).start()

    def start(self, place: Path) -> None:
        """Starts a save into a folder."""
        raise NotImplementedError


class NiceWriter(FileSystemWriter):
    """A writer of DCP whose writing thread has a low priority, where it runs in the trainer or in a process."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Lowers the priority of this thread, and writes."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        return super().write_data(plan, planner)


class Dcp(Folders):
    """``dcp.async_save`` with a stager that keeps its buffers."""

    kind, writer = AsyncCheckpointerType.THREAD, FileSystemWriter

    def __init__(self, state: State, folder: Path) -> None:
        import torch.distributed as dist

        super().__init__(state, folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self.stager = DefaultStager(self.options())

    def options(self) -> StagingOptions:
        """Returns how the state is copied into the host's memory."""
        is_process = self.kind == AsyncCheckpointerType.PROCESS
        return StagingOptions(use_pinned_memory=False, use_shared_memory=is_process, use_async_staging=False, use_non_blocking_copy=False)

    @override
    def start(self, place: Path) -> None:
        writer = self.writer(place, thread_count=2)
        future = dcp_async_save(self.state, storage_writer=writer, async_checkpointer_type=self.kind, async_stager=self.stager)
        assert not isinstance(future, AsyncSaveResponse)
        self.future = future

    @override
    def load(self) -> None:
        dcp_load(self.state, storage_reader=FileSystemReader(self.place(self.step)), no_dist=True)

    @override
    def close(self) -> None:
        self.stager.close()


class DcpPinned(Dcp):
    """The same from a device, into pinned memory."""

    @override
    def options(self) -> StagingOptions:
        return StagingOptions(use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True)


class DcpNice(Dcp):
    """The same with a low priority."""

    writer = NiceWriter


class DcpProcess(Dcp):
    """``dcp.async_save`` in a process."""

    kind = AsyncCheckpointerType.PROCESS


class DcpProcessNice(DcpProcess):
    """The same with a low priority."""

    writer = NiceWriter


class TorchCheckpointing(Folders):
    """torch_checkpointing, in its process with a low priority."""

    def __init__(self, state: State, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(state, folder)
        save = AsyncCheckpointSaverConfig(
            staging_config=CheckpointStagerConfig(use_async_staging=False),
            process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=int(LIMIT_S)),
        )
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager.Config(
            storage_config=storage, save=save, subprocess_init_fn=os.nice, subprocess_init_args=(NICE,)
        ).build()

    @override
    def start(self, place: Path) -> None:
        self.future = self.manager.save(str(place), {"state": self.state})

    @override
    def load(self) -> None:
        loaded = self.manager.load(str(self.place(self.step)), into={"state": self.state})
        _copy(self.state, loaded["state"])

    @override
    def close(self) -> None:
        self.manager.close()


class Safetensors(Folders):
    """safetensors: a save blocks until its file is written."""

    memory = "0"

    @override
    def start(self, place: Path) -> None:
        from safetensors.torch import save_file

        place.mkdir()
        save_file(self.state, place / "state.safetensors")

    @property
    def file(self) -> str:
        """The file of the last step."""
        return str(self.place(self.step) / "state.safetensors")

    @override
    def load(self) -> None:
        from safetensors.torch import load_file

        _copy(self.state, load_file(self.file))


class Loader(Safetensors):
    """A loader of a file that safetensors has saved."""

    saves = False

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self.save(1)


class Pread(Loader):
    """safetensors with ``backend="pread"``, tensor by tensor."""

    @override
    def load(self) -> None:
        from safetensors import safe_open

        with safe_open(self.file, "pt", backend="pread") as file:
            for name, tensor in self.state.items():
                tensor.copy_(file.get_tensor(name))


class Runai(Loader):
    """runai-model-streamer, with views into its buffers."""

    def __init__(self, state: State, folder: Path) -> None:
        os.environ["RUNAI_STREAMER_CONCURRENCY"] = "2"
        from runai_model_streamer import SafetensorsStreamer

        super().__init__(state, folder)
        self.make = SafetensorsStreamer

    @override
    def load(self) -> None:
        with self.make() as streamer:
            streamer.stream_file(self.file, owned=False)
            for name, tensor in streamer.get_tensors():
                self.state[name].copy_(tensor)


class Fastsafetensors(Loader):
    """fastsafetensors, without GPUDirect Storage."""

    def __init__(self, state: State, folder: Path) -> None:
        from fastsafetensors import SafeTensorsFileLoader

        super().__init__(state, folder)
        self.make = SafeTensorsFileLoader

    @override
    def load(self) -> None:
        loader = self.make(None, device="cpu", nogds=True, max_threads=2)
        loader.add_filenames({0: [self.file]})
        buffers = loader.copy_files_to_device()
        for name in loader.get_keys():
            self.state[name].copy_(buffers.get_tensor(name))
        buffers.close()
        loader.close()


class Torchft(Contestant):
    """torchft's ``HTTPTransport``: another rank fetches the state, which must not change before; a load fetches it from there."""

    memory, durable = "0", "0; 1 in another rank's memory"

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self.transport = _transport()
        command = [sys.executable, "-m", "trainers.libraries"]
        self.other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step, self.address = 0, ""

    @override
    def save(self, step: int) -> None:
        self.transport.send_checkpoint([1], step, self.state, timedelta(seconds=LIMIT_S))
        assert self.other.stdin is not None and self.other.stdout is not None
        print(self.transport.metadata(), step, file=self.other.stdin, flush=True)
        self.address, self.step = self.other.stdout.readline().strip(), step
        self.transport.disallow_checkpoint()

    @override
    def load(self) -> None:
        _copy(self.state, self.transport.recv_checkpoint(1, self.address, self.step, timedelta(seconds=LIMIT_S)))

    @override
    def close(self) -> None:
        self.other.kill()
        self.other.wait()


def _transport() -> Any:
    import logging

    from torchft.checkpointing.http_transport import HTTPTransport

    logging.disable(logging.INFO)
    return HTTPTransport(timedelta(seconds=LIMIT_S), CHUNKS)


def _copy(state: State, found: State) -> None:
    for name, tensor in state.items():
        tensor.copy_(found[name])


def replica() -> None:
    """Fetches the states that the trainer announces, and serves them: the other rank of torchft."""
    transport = _transport()
    for line in sys.stdin:
        address, step = line.split()
        transport.disallow_checkpoint()
        state = transport.recv_checkpoint(0, address, int(step), timedelta(seconds=LIMIT_S))
        transport.send_checkpoint([0], int(step), state, timedelta(seconds=LIMIT_S))
        print(transport.metadata(), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        replica()
