"""Ranks on two "hosts" that save a sharded tensor twice and end before the second save is committed, or load it.

usage: hosts_moved.py CONFIG JOB save|load
"""

from __future__ import annotations

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rapidraid
from rapidraid import _loads

# The wait for a staged step takes several turns.
_loads.TURN_S = 0.2
logging.basicConfig(stream=sys.stdout, format="%(message)s")
config, job, part = sys.argv[1:4]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
line = init_device_mesh("cpu", (world,))
whole = torch.arange(8.0 * 1024 * 1024)
with rapidraid.Checkpointer(job, config=config) as checkpointer:
    if part == "save":
        checkpointer.save(1, {"weights": distribute_tensor(whole, line, [Shard(0)])})
        checkpointer.wait()
        checkpointer.save(2, {"weights": distribute_tensor(whole + 1, line, [Shard(0)])})
        print(f"rank {rank} staged 2", flush=True)
        dist.barrier()
        # The launch ends before the second step is committed, like one that crashed.
        os._exit(0)
    state = {"weights": distribute_tensor(torch.zeros_like(whole), line, [Shard(0)])}
    print(f"rank {rank} loads", flush=True)
    step = checkpointer.load(state)
    own = (whole + 1 if step == 2 else whole).chunk(world)[rank]
    print(f"rank {rank} loaded {step} equal {torch.equal(state['weights'].to_local(), own)}", flush=True)
dist.barrier()
dist.destroy_process_group()
