"""Two ranks that ask each other whether to end while threads of ``dcp.async_save`` upload.

usage: aside.py JOB CONFIG
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rapidraid
from rapidraid.torch import Writer

job, config = sys.argv[1:3]
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    # Groups that only some ranks have must not matter.
    dist.new_group([0], use_local_synchronization=True)
checkpointer = rapidraid.Checkpointer(job, config=config)
for step in range(1, 6):
    state = {"weight": torch.full((4,), float(step))}
    saving = dcp.async_save(state, checkpoint_id=f"{job}/{step}", storage_writer=Writer(checkpointer=checkpointer))
    for turn in range(20):
        # The thread comes first on one rank, and the loop on the other one.
        time.sleep(0.002 * ((rank + step + turn) % 2))
        assert not checkpointer.should_stop_together(), "nobody has asked to stop"
    saving.result()
checkpointer.should_stop = rank == 1
assert checkpointer.should_stop_together()
checkpointer.close()
print("went on", flush=True)
dist.barrier()
dist.destroy_process_group()
