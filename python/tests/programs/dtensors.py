"""Four ranks save tensors of many placements and load them again. Then a single rank loads them whole.

usage: dtensors.py CONFIG JOB save|whole|partial|shapes|differ|redistribute
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import rapidraid

SHAPES = {
    "uneven": (5, 3),
    "empty_shards": (2, 7),
    "other_dim": (3, 10),
    "hybrid": (6, 4),
    "both_dims": (7, 5),
    "same_dim_twice": (13, 2),
    "strided": (16, 3),
    "replicated": (4, 4),
    "part_of_the_ranks": (9, 2),
    "scalar": (),
}


def whole(name: str) -> torch.Tensor:
    """Returns the whole tensor, as it is without ranks."""
    shape = SHAPES[name]
    start = 1000.0 * list(SHAPES).index(name)
    return (start + torch.arange(float(torch.Size(shape).numel()))).reshape(shape)


def state_of(fill: Any) -> dict[str, DTensor]:
    """Returns the tensors, each with its placement."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    some = DeviceMesh("cpu", [0, 1, 2])
    layouts: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "uneven": (line, [Shard(0)]),
        "empty_shards": (line, [Shard(0)]),
        "other_dim": (line, [Shard(1)]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "both_dims": (grid, [Shard(0), Shard(1)]),
        "same_dim_twice": (grid, [Shard(0), Shard(0)]),
        "replicated": (grid, [Replicate(), Replicate()]),
        "part_of_the_ranks": (some, [Shard(0)]),
        "scalar": (line, [Replicate()]),
    }
    made = {name: distribute_tensor(fill(name), mesh, placements) for name, (mesh, placements) in layouts.items()}
    # FSDP over tensor parallelism uses this layout: the inner mesh dimension cuts first.
    full, rank = fill("strided"), dist.get_rank()
    inner = full.chunk(2)[rank % 2]
    local = inner.chunk(2)[rank // 2].contiguous()
    made["strided"] = DTensor.from_local(
        local, grid, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return made


def main() -> None:
    """Runs the part of the program that the arguments name."""
    config, job, part = sys.argv[1:4]
    if part == "whole":
        state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        assert rapidraid.Checkpointer(job, config=config).load(state) == 1
        for name, tensor in state.items():
            assert torch.equal(tensor, whole(name)), name
        print("whole")
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    checkpointer = rapidraid.Checkpointer(job, config=config)
    if part == "save":
        checkpointer.save(1, state_of(whole))
        checkpointer.wait()
        loaded = state_of(lambda name: torch.zeros(SHAPES[name]))
        assert checkpointer.load(loaded) == 1
        for name, expected in state_of(whole).items():
            assert torch.equal(loaded[name].to_local(), expected.to_local()), name
        print(f"rank {dist.get_rank()} is equal")
    elif part == "redistribute":
        mesh = init_device_mesh("cpu", (4,))
        spread = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
        checkpointer.prepare({"spread": spread})
        moved = spread.redistribute(mesh, [Shard(1)])
        # The refused save reads no byte of the tensor. A collective that nobody waited for would end the process at its exit.
        moved.to_local().clone()
        try:
            checkpointer.save(1, {"spread": moved})
        except rapidraid.errors.InvalidError as error:
            print(f"rank {dist.get_rank()} refused: {error}")
    elif part == "differ":
        content = torch.full((100_000,), float(dist.get_rank() == 2))
        pairs = init_device_mesh("cpu", (2, 2))
        half = torch.full((50,), float(dist.get_rank() == 3))
        spread = DTensor.from_local(half, pairs, [Replicate(), Shard(0)], run_check=False)
        checkpointer.save(1, {"same": rapidraid.replicated(torch.ones(9)), "bias": rapidraid.replicated(content), "spread": spread})
        for note in checkpointer.wait():
            print(f"rank {dist.get_rank()} note: {note}")
    else:
        mesh = init_device_mesh("cpu", (4,))
        if part == "partial":
            state = {"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
        else:
            state = {"bias": rapidraid.replicated(torch.ones(3 + (dist.get_rank() == 2)))}
        try:
            checkpointer.save(1, state)
        except rapidraid.errors.InvalidError as error:
            print(f"rank {dist.get_rank()} refused: {error}")
    dist.barrier()
    dist.destroy_process_group()


main()
