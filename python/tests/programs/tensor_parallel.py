"""FSDP2 over tensor parallelism, both on the first dimension of a weight. Prints `right` if the parts are where torch has them.

usage: tensor_parallel.py DP TP
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rapidraid.tensors import describe

dp, tp = (int(text) for text in sys.argv[1:3])
dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
for rows in range(1, 18):
    model = torch.nn.Sequential(torch.nn.Linear(1, rows, bias=False))
    torch.nn.init.zeros_(model[0].weight)
    with torch.no_grad():
        model[0].weight += torch.arange(float(rows)).view(rows, 1)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight
    held = []
    for piece in describe(f"{rows} rows", weight).pieces:
        assert piece.box is not None
        (start, _), (size, _) = piece.box
        assert piece.local.flatten().tolist() == list(range(start, start + size)), (rows, dist.get_rank(), piece)
        held += range(start, start + size)
    assert len(held) == weight.to_local().numel()
    everyone: list[list[int]] = [[] for _ in range(dp * tp)]
    dist.all_gather_object(everyone, held)
    assert sorted(index for one in everyone for index in one) == list(range(rows))
print("right\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
