"""Saves a step with private state: each rank has a number, and rank 2 has more entries.

usage: private_state.py CONFIG JOB
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

import rapidraid

config, job = sys.argv[1:3]
dist.init_process_group("gloo")
rank = dist.get_rank()
state: dict[str, Any] = {"shared": rapidraid.replicated(7), "rng": rapidraid.per_rank(rank)}
if rank == 2:
    state["more"] = rapidraid.per_rank({str(at): at for at in range(7)})
with rapidraid.Checkpointer(job, config=config) as checkpointer:
    checkpointer.save(1, state)
dist.barrier()
dist.destroy_process_group()
