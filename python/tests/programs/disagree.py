"""Two ranks that save different steps.

usage: disagree.py CONFIG JOB
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import rapidraid

config, job = sys.argv[1:3]
dist.init_process_group("gloo")
rank = dist.get_rank()


def is_refused(call: Callable[[], object]) -> bool:
    """Returns whether a call is refused. Prints the error if so."""
    try:
        call()
    except rapidraid.RapidraidError as error:
        print(f"rank {rank} refused: {error}", flush=True)
        return True
    return False


def save() -> None:
    """Saves step 1 on both ranks, then step 2 on rank 0 and step 3 on rank 1, without synchronisation."""
    checkpointer = rapidraid.Checkpointer(job, config=config, timeout=30)
    state = {"a": torch.full((4,), float(rank))}
    checkpointer.save(1, state)
    checkpointer.wait()
    refused = is_refused(lambda: checkpointer.save(2 + rank, state))
    dist.barrier()
    if not refused and not is_refused(lambda: checkpointer.wait(2 + rank)):
        print(f"rank {rank} committed")


is_refused(save)
dist.barrier()
dist.destroy_process_group()
