"""Storage for Accelerate.

Two functions stand in for ``Accelerator.save_state`` and ``load_state``:

    >>> from rapidraid.accelerate import load_state, save_state
    >>> start = load_state(accelerator, "gpt") or 0
    >>> save_state(accelerator, "gpt/100")
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state, save_custom_state
from accelerate.utils import DistributedType

from ._jobs import parse_step_name, refuse_skip, shared_checkpointer
from ._leaves import Flat
from ._tree import flatten_first, read_files, with_files
from .checkpointer import Checkpointer
from .errors import InvalidError

_CLOSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_NUMBER = re.compile(r"[^0-9]*([0-9]+)")


def check_kind(state: Any) -> None:
    """Raises :class:`InvalidError` for DeepSpeed, Megatron, XLA and FSDP 1, whose models and optimizers do not show their tensors.

    Args:
        state: The ``AcceleratorState``.

    """
    is_fsdp1 = state.distributed_type == DistributedType.FSDP and getattr(getattr(state, "fsdp_plugin", None), "fsdp_version", 2) != 2
    if is_fsdp1 or state.distributed_type in _CLOSED:
        kind = "FSDP 1" if is_fsdp1 else state.distributed_type
        raise InvalidError(f"an Accelerator of the kind {kind}", "use DDP or FSDP 2 (fsdp_version 2), or its own files")


def _objects(accelerator: Any) -> dict[str, Any]:
    check_kind(accelerator.state)
    return {
        "models": dict(enumerate(accelerator._models)),
        "optimizers": {at: getattr(optimizer, "optimizer", optimizer) for at, optimizer in enumerate(accelerator._optimizers)},
    }


def save_state(accelerator: Any, name: str, **settings: Any) -> Checkpointer:
    """Stages the whole state of an Accelerator as ``JOB/STEP``, instead of ``Accelerator.save_state``.

    Models and optimizers are stored by name. Schedulers, random generators, samplers, the scaler and registered objects
    are stored as the small files that Accelerate writes. Returns the Checkpointer, whose ``wait`` waits for the commit.

    Args:
        accelerator: The Accelerator. All ranks must call this function.
        name: ``JOB/STEP``.
        settings: Arguments of :class:`Checkpointer`.

    """
    found = parse_step_name(name)
    if found.step is None:
        raise InvalidError(f"{name} has no step", 'write "JOB/STEP"')
    refuse_skip(settings)
    checkpointer = shared_checkpointer(found.job, settings)

    def flat() -> Flat:
        with tempfile.TemporaryDirectory(prefix="rapidraid-") as folder:
            save_accelerator_state(
                folder, [], [], accelerator._schedulers, accelerator._dataloaders, accelerator.process_index, accelerator.step,
                accelerator.scaler, save_on_each_node=False,
            )  # fmt: skip
            for at, one in enumerate(accelerator._custom_objects):
                save_custom_state(one, folder, at)
            # Files without the number of a rank are those of rank 0.
            own = f"_{accelerator.process_index}.pkl"
            files = {
                file.name: file.read_bytes()
                for file in Path(folder).iterdir()
                if checkpointer.rank == 0 or (file.name.startswith("random_states") and file.name.endswith(own))
            }
        return with_files(flatten_first(_objects(accelerator), checkpointer.rank, checkpointer.world), files)

    checkpointer.save_flat(found.step, flat, raise_earlier=True)
    return checkpointer


def load_state(accelerator: Any, name: str, **settings: Any) -> int | None:
    """Loads ``JOB/STEP``, or the newest step of ``JOB``, into an Accelerator, instead of ``Accelerator.load_state``.

    Returns the step, or ``None`` if the job has none.

    Args:
        accelerator: The Accelerator, with the same objects prepared and registered. All ranks must call this function.
        name: ``JOB`` or ``JOB/STEP``.
        settings: Arguments of :class:`Checkpointer`.

    """
    named = parse_step_name(name)
    checkpointer = shared_checkpointer(named.job, settings)
    found = read_files(checkpointer, named.step)
    if found is None:
        return None
    step, files, _ = found
    checkpointer.load(_objects(accelerator), step, include=lambda text: not text.startswith("files/"))
    with tempfile.TemporaryDirectory(prefix="rapidraid-") as folder:
        for file, content in files.items():
            (Path(folder) / os.path.basename(file)).write_bytes(content)
        changed = load_accelerator_state(
            folder, [], [], accelerator._schedulers, accelerator._dataloaders, accelerator.process_index, accelerator.scaler
        )
        accelerator.step = changed.get("step", accelerator.step)
        for at, one in enumerate(accelerator._custom_objects):
            # Accelerate's own function opens pickles of any kind.
            path = Path(folder) / f"custom_checkpoint_{at}.pkl"
            try:
                one.load_state_dict(torch.load(path, map_location="cpu", weights_only=not checkpointer.allow_pickle))
            except pickle.UnpicklingError as error:
                raise InvalidError(
                    f"registered object {at} was stored by pickle: {error}"[:300], "pass allow_pickle=True if you trust who saved it"
                ) from None
    return step


def register(accelerator: Any, job: str, *, commit_timeout: float = 3600.0, **settings: Any) -> None:
    """Lets ``Accelerator.save_state`` and ``load_state`` keep the models' weights in a job instead of the folder.

    The step is the number at the end of the folder's name. All else stays in the folder: Accelerate shows its hooks
    nothing but the models. ``save_state`` returns when the step is committed, because the folder is of no use without it.

    Args:
        accelerator: The Accelerator.
        job: The job.
        commit_timeout: The maximum time for a commit, in seconds.
        settings: Arguments of :class:`Checkpointer`.

    """
    check_kind(accelerator.state)
    refuse_skip(settings)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise InvalidError("FSDP saves before the hooks of Accelerate", "call rapidraid.accelerate.save_state instead")

    def step_of(folder: str) -> int:
        found = _NUMBER.fullmatch(os.path.basename(os.path.normpath(folder)))
        if found is None:
            raise InvalidError(f"the folder {folder} has no number", 'end its name in the step, as in "checkpoint_100"')
        return int(found[1])

    def state_of(models: list[Any]) -> Mapping[str, Any]:
        return {"models": dict(enumerate(models))}

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        checkpointer = shared_checkpointer(job, settings)
        step = step_of(folder)
        checkpointer.save_flat(step, lambda: flatten_first(state_of(models), checkpointer.rank, checkpointer.world), raise_earlier=True)
        checkpointer.wait_for(step, commit_timeout)
        weights.clear()

    def load(models: list[Any], folder: str) -> None:
        shared_checkpointer(job, settings).load(state_of(models), step_of(folder))
        models.clear()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


__all__ = ["load_state", "register", "save_state"]
