"""Two ranks that do not belong together, or do not do the same.

usage: disagree.py CONFIG OTHER_CONFIG JOB hosts|steps
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import rapidraid

config, other, job, part = sys.argv[1:5]
dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    checkpointer = rapidraid.Checkpointer(job, config=other if part == "hosts" and rank == 1 else config, timeout=30)
    state = {"a": torch.full((4,), float(rank))}
    checkpointer.save(1, state)
    checkpointer.wait()
    # Rank 1 leaves a step out.
    step = 2 + rank
    checkpointer.save(step, state)
    dist.barrier()
    checkpointer.wait(step)
    print(f"rank {rank} committed")
except rapidraid.RapidraidError as error:
    print(f"rank {rank} refused: {error}", flush=True)
dist.barrier()
dist.destroy_process_group()
