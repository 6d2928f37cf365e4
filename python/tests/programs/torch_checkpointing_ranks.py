"""Saves and loads by torch_checkpointing on several ranks. Prints a hash of what was loaded and of what was saved.

With ``killed`` it kills itself when all its files are written, before they become visible.

usage: torch_checkpointing_ranks.py JOB STEP async|sync|killed
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, DefaultMetadataManager, ItemSpec, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.staging import CheckpointStagerConfig

from rapidraid.torch_checkpointing import RapidraidStorageConfig


def kill(_: Any) -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def gather(_: Any, data: Any, process_group: Any) -> dict[int, Any]:
    """Returns the data of all ranks. That of torch_checkpointing does it on CUDA devices only."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def digest(state: dict[str, Any]) -> str:
    """Returns a hash of whole tensors."""
    hasher = hashlib.sha256()
    for name, value in sorted(state.items()):
        hasher.update(name.encode() + value.full_tensor().numpy().tobytes())
    return hasher.hexdigest()[:16]


def main() -> None:
    """Loads the newest step, changes it, and saves it as a step of its own."""
    DefaultMetadataManager._all_gather_pickled_data = gather
    job, step, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    torch.manual_seed(step)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    shapes = {"a": (37, 5), "b": (12, 12)}
    model: dict[str, DTensor] = {name: distribute_tensor(torch.randn(shape), mesh, [Shard(world % 2)]) for name, shape in shapes.items()}
    storage = RapidraidStorageConfig(keep=2)
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False)
    saver = AsyncCheckpointSaverConfig(staging_config=staging) if way == "async" else SyncCheckpointSaverConfig()
    manager = CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder())},
        save=saver,
        storage_config=storage,
        pre_finalize_callback=kill if way == "killed" else None,
    ).build()
    newest = storage.create_storage().newest(job)
    if newest is not None:
        loaded = manager.load(f"rapidraid://{job}/{newest}", into={"model": model, "step": 0} if rank == 0 else {"model": model})
        assert rank > 0 or loaded["step"] == newest
    found = digest(model)
    if rank == 0:
        print(f"loaded {newest} {found}", flush=True)
    for value in model.values():
        value.mul_(2.0).add_(1.0)
    found = digest(model)
    future = manager.save(f"rapidraid://{job}/{step}", {"model": model, "step": step})
    if future is not None:
        future.result()
    # Rank 0 renames the folder, and the other ranks do not wait for that.
    dist.barrier()
    manager.close()
    if rank == 0:
        print(f"saved {step} {found} {sorted(storage.create_storage().ls(Path(job)))}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
