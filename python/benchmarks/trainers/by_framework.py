"""The frameworks that the integrations serve: each saves and loads the same state, by rapidraid or into files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

State = dict[str, torch.Tensor]
LIMIT_S = 300.0


class Framework:
    """A framework that saves a state by rapidraid, or into the files of a folder.

    Args:
        state: The tensors.
        job: The name of the job and of the folder.
        folder: The folder of the files; ``None`` for rapidraid.
        local: A folder on the training host for what is no checkpoint.

    """

    def __init__(self, state: State, job: str, folder: Path | None, local: Path) -> None:
        self.state, self.job = state, job
        self.folder = folder and folder / job
        #: Where the framework keeps what a job has on the training host.
        self.local = local / job
        self.local.mkdir(exist_ok=True)
        self.open()

    def open(self) -> None:
        """Makes the objects of the framework."""

    def close(self) -> None:
        """Ends the threads and processes of the framework."""

    def url(self, step: int) -> str:
        """Returns the URL or the folder of a step."""
        return f"rapidraid://{self.job}/{step}" if self.folder is None else str(self.folder / str(step))

    def save(self, step: int) -> tuple[float, float]:
        """Saves a step. Returns the stall, and the time until the step is complete."""
        begun = time.perf_counter()
        wait = self.start(step)
        stall = time.perf_counter() - begun
        wait()
        return stall, time.perf_counter() - begun

    def start(self, step: int) -> Callable[[], Any]:
        """Saves a step until training can go on. Returns a function that waits until the step is complete."""
        raise NotImplementedError

    def load(self, step: int) -> float:
        """Loads a step into the state. Returns the seconds that it takes."""
        begun = time.perf_counter()
        self.read(step)
        return time.perf_counter() - begun

    def read(self, step: int) -> None:
        """Loads a step into the state."""
        raise NotImplementedError

    def remove(self, step: int) -> None:
        """Removes the files of a step."""
        shutil.rmtree(self.url(step), ignore_errors=True)

    def copy(self, found: State) -> None:
        """Copies loaded tensors into the state."""
        for name, tensor in self.state.items():
            tensor.copy_(found[name])


def _nothing() -> None:
    """Waits for nothing: the step is complete."""


class Dcp(Framework):
    """``dcp.save`` and ``dcp.load`` by URL."""

    @override
    def start(self, step: int) -> Callable[[], Any]:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.state, checkpoint_id=self.url(step), no_dist=True)
        return _nothing

    @override
    def read(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.state, checkpoint_id=self.url(step), no_dist=True)


class Lightning(Framework):
    """A ``CheckpointIO`` of Lightning, as its ``Trainer`` calls it."""

    @override
    def open(self) -> None:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

        from rapidraid.lightning import RapidraidCheckpointIO

        self.io = RapidraidCheckpointIO(self.job, keep=2) if self.folder is None else TorchCheckpointIO()

    def _path(self, step: int) -> str:
        return str((self.folder or self.local) / f"{step}.ckpt")

    @override
    def start(self, step: int) -> Callable[[], Any]:
        self.io.save_checkpoint({"state_dict": self.state, "global_step": step, "pytorch-lightning_version": "2.6.6"}, self._path(step))
        return self.io.teardown

    @override
    def read(self, step: int) -> None:
        self.copy(self.io.load_checkpoint(self._path(step), weights_only=True)["state_dict"])

    @override
    def remove(self, step: int) -> None:
        os.unlink(self._path(step))


class TorchCheckpointing(Framework):
    """The ``CheckpointManager`` of torch_checkpointing, which writes in a process."""

    @override
    def open(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        from rapidraid.torch_checkpointing import RapidraidStorageConfig

        save = AsyncCheckpointSaverConfig(
            staging_config=CheckpointStagerConfig(use_async_staging=False),
            process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=int(LIMIT_S)),
        )
        storage = RapidraidStorageConfig(keep=2) if self.folder is None else LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager.Config(storage_config=storage, save=save).build()

    @override
    def close(self) -> None:
        self.manager.close()

    @override
    def start(self, step: int) -> Callable[[], Any]:
        future = self.manager.save(self.url(step), {"state": self.state})
        return lambda: future.result(LIMIT_S)

    @override
    def read(self, step: int) -> None:
        self.copy(self.manager.load(self.url(step), into={"state": self.state})["state"])


class Model(torch.nn.Module):
    """A model whose parameters are the tensors of the state."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))

    @override
    def forward(self, data: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a loss that one parameter has a part in."""
        found = next(self.parameters()).flatten()[0] * data
        return {"loss": (found - labels).square().mean(), "logits": found}


class HuggingFace(Framework):
    """``transformers.Trainer``. A new one resumes for each save and each load, and trains one step."""

    def _train(self, resumed: int, saves: bool) -> tuple[float, float, float]:
        """Trains one step after the one that is resumed, if that is not 0.

        Returns the times of the load and of the save, and the time until the step is complete.
        """
        from transformers import Trainer, TrainerCallback, TrainingArguments

        from rapidraid.huggingface import RapidraidTrainer

        at: dict[str, float] = {}

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                at["loaded"] = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                at["save"] = time.perf_counter()

            def on_save(self, *_: Any, **__: Any) -> None:
                at["saved"] = time.perf_counter()

        output = self.folder or self.local
        model = Model(self.state)
        optimizer = torch.optim.SGD([next(model.parameters())], lr=1e-9)
        args = TrainingArguments(
            str(output), max_steps=resumed + 1, save_strategy="steps" if saves else "no", save_steps=1, save_total_limit=2, use_cpu=True,
            logging_strategy="no", report_to=[], disable_tqdm=True, per_device_train_batch_size=4,
        )  # fmt: skip
        common: dict[str, Any] = {
            "model": model,
            "args": args,
            "train_dataset": [{"data": torch.ones(1), "labels": torch.ones(1)} for _ in range(64)],
            "callbacks": [Clock()],
            "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        }
        trainer = Trainer(**common) if self.folder is not None else RapidraidTrainer(job=self.job, **common)
        begun = time.perf_counter()
        trainer.train(resume_from_checkpoint=self._checkpoint(resumed) if resumed else None)
        ended = time.perf_counter()
        save = at.get("save", ended)
        return at["loaded"] - begun, at.get("saved", ended) - save, ended - save

    def _checkpoint(self, step: int) -> str:
        return f"rapidraid://{self.job}/{step}" if self.folder is None else str(self.folder / f"checkpoint-{step}")

    @override
    def save(self, step: int) -> tuple[float, float]:
        _, stall, committed = self._train(step - 1, saves=True)
        return stall, committed

    @override
    def load(self, step: int) -> float:
        return self._train(step, saves=False)[0]

    @override
    def remove(self, step: int) -> None:
        shutil.rmtree(self._checkpoint(step), ignore_errors=True)


class Accelerate(Framework):
    """The functions of Accelerate, with one model."""

    @override
    def open(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.accelerator.prepare(Model(self.state))

    @override
    def start(self, step: int) -> Callable[[], Any]:
        if self.folder is not None:
            self.accelerator.save_state(self.url(step))
            return _nothing
        from rapidraid.accelerate import save_state

        return save_state(self.accelerator, f"{self.job}/{step}", keep=2).wait

    @override
    def read(self, step: int) -> None:
        if self.folder is not None:
            self.accelerator.load_state(self.url(step))
            return
        from rapidraid.accelerate import load_state

        load_state(self.accelerator, f"{self.job}/{step}", keep=2)


#: In the order of the table: the name on the page, the class, and the package that it needs.
FRAMEWORKS: dict[str, tuple[type[Framework], str]] = {
    "`dcp.save(URL)`": (Dcp, "fsspec"),
    "Lightning": (Lightning, "lightning"),
    "Hugging Face `Trainer`": (HuggingFace, "transformers"),
    "Accelerate": (Accelerate, "accelerate"),
    "torch_checkpointing": (TorchCheckpointing, "torch_checkpointing"),
}
