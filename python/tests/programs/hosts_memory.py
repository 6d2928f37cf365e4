"""Ranks on two "hosts" that save a sharded tensor, or load it and log how much they read from the cluster.

usage: hosts_memory.py CONFIG JOB save|load
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rapidraid

config, job, part = sys.argv[1:4]
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
dist.init_process_group("gloo")
line = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(4.0 * 1024 * 1024)
state = {"weights": distribute_tensor(whole if part == "save" else torch.zeros_like(whole), line, [Shard(0)]), "step": 7}
with rapidraid.Checkpointer(job, config=config) as checkpointer:
    if part == "save":
        checkpointer.save(1, state)
        checkpointer.wait()
    else:
        assert checkpointer.load(state) == 1
        own = whole.chunk(dist.get_world_size())[dist.get_rank()]
        assert torch.equal(state["weights"].to_local(), own)
dist.barrier()
dist.destroy_process_group()
