"""Checkpoints of TorchTitan 0.3.0.

One option of the command line turns it on:

    torchrun ... -m torchtitan.train --module llama3 --config llama3_8b --checkpoint.enable --dump_folder runs/gpt
        --override.imports rapidraid.torchtitan.checkpointer

The ``[checkpoint]`` settings keep their meaning. Hugging Face exports, and initial checkpoints that are files, are left to
TorchTitan's own manager.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ._jobs import SCHEME, parse_step_name, shared_checkpointer
from ._versions import check_version
from .checkpointer import Checkpointer
from .errors import InvalidError, NotFoundError
from .torch import Reader, Writer, async_save, load

#: The version of TorchTitan that this module is tested with. Its manager is no stable interface.
TESTED = "0.3.0"


check_version("torchtitan", TESTED)

from torchtitan.components.checkpointer import (  # noqa: E402 - another version may not have these names
    MODEL,
    AsyncMode,
    BaseCheckpointManager,
    CheckpointManager,
)
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.observability import structured_logger as sl  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402
from torchtitan.tools.utils import GarbageCollection  # noqa: E402


class RapidraidManager(CheckpointManager):
    """A checkpoint manager of TorchTitan that saves the steps of a job.

    It decides when to save, and what, like ``CheckpointManager``. It does not write to ``checkpoint.folder``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The settings of ``CheckpointManager``, and those of :func:`checkpointer`."""

        job: str | None = None
        client: str | None = None
        abandon_later: bool = False
        timeout: float = 120.0
        commit_timeout: float = 3600.0

    # Set by CheckpointManager.
    enable: bool
    folder: str
    states: dict[str, Any]
    async_mode: Any

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if not self.enable:
            return
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            # The copy in the daemon's memory is complete when a save returns: there is no staging to wait for.
            self.async_mode = AsyncMode.ASYNC
        self._client: dict[str, Any] = {"config": config.client}
        self._checkpointer = self._open(config)
        self._writer = Writer(checkpointer=self._checkpointer, commit_timeout=config.commit_timeout)
        logger.info(f"Checkpoints are loaded from and saved as the steps of the rapidraid job {self._checkpointer.job}")

    def _open(self, config: Config) -> Checkpointer:
        job = config.job or os.environ.get("RAPIDRAID_JOB") or job_of(self.folder)
        settings = {
            **self._client,
            "keep": self.keep_latest_k or None,
            "abandon_later": config.abandon_later,
            "timeout": config.timeout,
        }
        return shared_checkpointer(job, settings)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | None:
        """Stages a state before it returns, and waits for its commit if ``async_mode`` is ``DISABLED``.

        Returns a future that is done when the step is committed, or ``None`` if it is committed already. Hugging Face files are written by
        TorchTitan.
        """
        if to_hf:
            super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
            return None
        future = async_save(state_dict, f"{self._checkpointer.job}/{posixpath.basename(checkpoint_id)}", writer=self._writer)
        if async_mode == AsyncMode.DISABLED:
            future.result()
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None if async_mode == AsyncMode.DISABLED else future

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Loads a step of the job, or by ``CheckpointManager`` if the job has none. Returns whether one was loaded."""
        job = self._checkpointer.job
        name = job if step == -1 else f"{job}/{step}"
        found = self._find(name)
        if found is not None:
            self._load_step(name, model_only=found == 0)
            return True
        if step == -1 and self.initial_load_path and self.initial_load_path.startswith(SCHEME) and not self._has_files():
            self._load_step(self.initial_load_path, model_only=self.initial_load_model_only)
            return True
        if step != -1 and not filesystem.isdir(self._create_checkpoint_id(step)):
            raise NotFoundError(f"the job {job} has no step {step}", f"`rapidraid ls {job}` lists its steps; see checkpoint.load_step")
        return bool(super()._load(step))

    def _find(self, name: str) -> int | None:
        """Returns the step of the job that ``name`` stands for, or ``None`` if there is none. All ranks must call it."""
        wanted = parse_step_name(name).step
        try:
            found = self._checkpointer.look_into(wanted, lambda reader: (reader.loaded.number, None))
        except NotFoundError:
            return None
        if found is not None and wanted is None and self._has_files() and (files := self._find_load_step()) > found[0]:
            logger.warning(f"{self.folder} has step {files}. It is not loaded: step {found[0]} of the job {name} is")
        return None if found is None else found[0]

    def _has_files(self) -> bool:
        """Returns whether ``checkpoint.folder`` has checkpoints, which were saved without rapidraid."""
        return bool(filesystem.exists(self.folder)) and self._find_load_step() != -1

    @sl.log_trace_span("checkpoint_load")
    def _load_step(self, name: str, *, model_only: bool) -> None:
        logger.info(f"Loading the checkpoint from rapidraid job {name}.")
        begin = time.monotonic()
        states = self._states_to_load(model_only)
        is_own = parse_step_name(name).job == self._checkpointer.job
        # Other element types are converted, as DCP does.
        reader = Reader(checkpointer=self._checkpointer, cast=True) if is_own else Reader(cast=True, **self._client)
        load(states, name, reader=reader)
        # The parameters are at the top of the state, and belong to no object that DCP gives them to.
        self.states[MODEL].load_state_dict(states)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        logger.info(f"Finished loading the checkpoint in {time.monotonic() - begin:.2f} seconds.")

    def _purge_stale_checkpoints(self) -> None:
        """Does nothing: the daemon removes older steps after each commit."""


def job_of(folder: str) -> str:
    """Returns the name of the job for a checkpoint folder: ``runs/gpt/checkpoint`` is the job ``gpt``.

    Raises:
        InvalidError: The folder is that of a job without a name of its own.

    """
    where = folder if filesystem.is_remote(folder) else os.path.abspath(folder)
    parent, _, last = where.rstrip("/").rpartition("/")
    dump = posixpath.basename(parent)
    job = re.sub(r"[^A-Za-z0-9._-]+", "-", dump if last == "checkpoint" else f"{dump}-{last}").strip("-")[:128]
    if not job or dump == "outputs":
        raise InvalidError(
            f"the checkpoint folder {folder} gives the job no name of its own",
            "set RAPIDRAID_JOB, or a --dump_folder that is not TorchTitan's default",
        )
    return job


@override(target=BaseCheckpointManager.Config, description="checkpoints are steps of a rapidraid job")
def checkpointer(
    cfg: BaseCheckpointManager.Config,
    *,
    job: str | None = None,
    config: str | None = None,
    abandon_later: bool = False,
    timeout: float = 120.0,
    commit_timeout: float = 3600.0,
) -> RapidraidManager.Config:
    """Returns the configuration of TorchTitan's checkpoint manager as one of :class:`RapidraidManager`.

    Args:
        cfg: The configuration of ``CheckpointManager``.
        job: The job. Default: ``RAPIDRAID_JOB``, then the name of the dump folder.
        config: The client's configuration file. Default: ``RAPIDRAID_CONFIG``, ``./rapidraid.toml``, or the user's.
        abandon_later: Whether the first save removes committed steps that are later than the loaded one.
        timeout: The maximum time that a call waits for the daemon, in seconds.
        commit_timeout: The maximum time for a commit, in seconds.

    Raises:
        InvalidError: The configuration is that of another manager, whose behaviour would be lost.

    """
    if type(cfg) is not CheckpointManager.Config:
        raise InvalidError(
            f"the checkpoint manager is configured by {type(cfg).__module__}.{type(cfg).__qualname__}",
            "rapidraid.torchtitan replaces only torchtitan.components.checkpointer.CheckpointManager: use its Config",
        )
    more = {"job": job, "client": config, "abandon_later": abandon_later, "timeout": timeout, "commit_timeout": commit_timeout}
    derived: RapidraidManager.Config = derive(cfg, RapidraidManager.Config, **more)
    return derived


__all__ = ["RapidraidManager", "checkpointer", "job_of"]
