"""Saves a history that grows on one rank beyond the length of its segments, and loads it. Prints `right` on each rank.

usage: growing.py CONFIG JOB
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import rapidraid

config, job = sys.argv[1:3]
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
state = {"weight": rapidraid.replicated(torch.arange(1000.0)), "own": torch.full((1000,), float(rank)), "history": [0.5]}
with rapidraid.Checkpointer(job, config=config) as checkpointer:
    for step in range(1, 7):
        if rank == 1:
            state["history"] = [float(step)] * (step * 60_000)
        checkpointer.save(step, state)
    checkpointer.wait()
    checkpointer.close()
into = {"weight": rapidraid.replicated(torch.zeros(1000)), "own": torch.zeros(1000), "history": [0.0]}
with rapidraid.Checkpointer(job, config=config) as checkpointer:
    assert checkpointer.load(into) == 6
assert into["history"] == state["history"] and into["own"].eq(rank).all()
assert into["weight"].value.equal(state["weight"].value)
print("right\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
