"""The measure of what TorchTitan sees, beside a ``Checkpointer`` on the same state."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import rapidraid

from . import state as states
from .beds import Host
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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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
            for step in range(1, repeats + 2):
                for arm in ("Checkpointer", "TorchTitan"):
                    begun = time.perf_counter()
                    if arm == "Checkpointer":
                        checkpointer.save(step, {"model": model})
                        stalled = time.perf_counter() - begun
                        checkpointer.wait()
                    else:
                        manager.save(step)
                        stalled = time.perf_counter() - begun
                        manager.maybe_wait_for_saving()
                    # The first save prepares the memory.
                    if step > 1:
                        stall.add(arm, stalled)
                        commit.add(arm, time.perf_counter() - begun)
                    # The kernel still frees the removed memory, on both processors.
                    time.sleep(2)
                say(f"titan: step {step}, " + ", ".join(f"{arm} {times[-1]:.3f} s" for arm, times in stall.arms.items()))
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
