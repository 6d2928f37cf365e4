"""Two ranks on two "hosts" that ask for what a launch of several hosts cannot do.

usage: hosts_refused.py CONFIG JOB
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


def is_refused(call: Callable[[], object]) -> None:
    """Prints the error of a call that must be refused."""
    try:
        call()
    except rapidraid.RapidraidError as error:
        print(f"rank {rank} refused: {error}", flush=True)


is_refused(lambda: rapidraid.Checkpointer(job, config=config, when_full="skip"))
state = {"weight": torch.ones(8)}
with rapidraid.Checkpointer(job, config=config) as checkpointer:
    is_refused(lambda: checkpointer.load(state, offline=True))
    checkpointer.save(1, state)
    checkpointer.wait()
    is_refused(lambda: checkpointer.load(state))
dist.barrier()
dist.destroy_process_group()
