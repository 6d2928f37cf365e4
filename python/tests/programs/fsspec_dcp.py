"""Saves and loads a sharded state by URLs, on each rank. Rank 0 prints what it sees.

usage: fsspec_dcp.py JOB
"""

from __future__ import annotations

import sys
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

job = sys.argv[1]
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
fs = fsspec.filesystem("rapidraid")


def state(step: int) -> dict[str, Any]:
    """Returns a state that is sharded over the ranks."""
    whole = torch.arange(30 * 7, dtype=torch.float32).reshape(30, 7) * step
    return {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": step}


def load(step: int, folder: str) -> dict[str, Any]:
    """Loads a step into a state of zeros."""
    into = state(0)
    into["step"] = -1
    dcp.load(into, checkpoint_id=folder)
    weight = into["weight"]
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.full_tensor(), state(step)["weight"].full_tensor()) and into["step"] == step
    return into


for step in (1, 2):
    dcp.save(state(step), checkpoint_id=f"rapidraid://{job}/step-{step}")
future = dcp.async_save(state(3), checkpoint_id=f"rapidraid://{job}/3")
future.result()
dist.barrier()
for step in (1, 2, 3):
    load(step, f"rapidraid://{job}/{step}")
if rank == 0:
    names = sorted(name.rsplit("/", 1)[1] for name in fs.ls(f"rapidraid://{job}/2", detail=False))
    print("files", *names, flush=True)
    print("steps", *fs.ls(f"rapidraid://{job}", detail=False), flush=True)
dist.barrier()
dist.destroy_process_group()
