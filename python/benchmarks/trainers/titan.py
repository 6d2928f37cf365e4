"""The measure of what TorchTitan sees, beside a ``Checkpointer`` on the same state."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import rapidraid

from . import state as states
from .beds import Host
from .frameworks import save_in_turn
from .host import seconds
from .record import Measure, say


class _Empty:
    """An optimizer, scheduler or data loader without a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state, of which there is none."""


def through_titan(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures stalls, commits and loads through TorchTitan's checkpoint manager."""
    if importlib.util.find_spec("torchtitan") is None:
        say("titan: skipped, because torchtitan is not installed")
        return
    from torchtitan.components.checkpointer import CheckpointManager

    from rapidraid.torchtitan import RapidraidManager
    from rapidraid.torchtitan import checkpointer as replace_manager

    model = torch.nn.Module()
    for name, tensor in states.make(large_bytes=large_bytes).items():
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    stall = Measure("titan-stall", "stall of `save` of TorchTitan's manager", "TorchTitan", ["Checkpointer"], 1.2)
    commit = Measure("titan-commit", "the same, until committed", "TorchTitan", ["Checkpointer"], 1.2)
    load = Measure("titan-load", "`load` of TorchTitan's manager from the host's memory, verified", "TorchTitan", ["Checkpointer"], 1.2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Host(block="4MiB", staging={"memory": "8GiB"}) as bed,
            rapidraid.Checkpointer("plain", config=bed.config, keep=2) as checkpointer,
        ):
            settings = CheckpointManager.Config(enable=True, interval=1, async_mode="async", keep_latest_k=2)
            config = replace_manager(settings, job="titan", config=str(bed.config))
            no_state = _Empty()
            manager = RapidraidManager(
                config,
                dataloader=no_state,
                model_parts=[model],
                optimizers=no_state,
                lr_schedulers=no_state,
                states={},
                sd_adapter=None,
                base_folder=folder,
            )

            def save_plainly(step: int) -> Callable[[], Any]:
                checkpointer.save(step, {"model": model})
                return checkpointer.wait

            def save_by_manager(step: int) -> Callable[[], Any]:
                manager.save(step)
                wait: Callable[[], Any] = manager.maybe_wait_for_saving
                return wait

            save_in_turn("titan", {"Checkpointer": save_plainly, "TorchTitan": save_by_manager}, repeats, stall, commit)
            yield stall
            yield commit
            for _ in range(repeats):
                load.add("Checkpointer", seconds(lambda: checkpointer.load({"model": model})))
                load.add("TorchTitan", seconds(lambda: manager.load(repeats + 1)))
                say(f"titan: loads {load.arms['TorchTitan'][-1]:.3f} s beside {load.arms['Checkpointer'][-1]:.3f} s")
            yield load
            manager.close()
            # Managers of one process share it, so none of them closes it.
            manager._checkpointer.close()
    finally:
        dist.destroy_process_group()
