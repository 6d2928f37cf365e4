"""Trains with DDP and saves every step until it is killed. Prints which steps it staged.

usage: storm.py CONFIG JOB STEPS
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import rapidraid


def say(text: str) -> None:
    """Prints a line in a single write, because the ranks share the output."""
    print(f"{text}\n", end="", flush=True)


config, job, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
rank = dist.get_rank()
# With one bucket whose order never changes, sums of gradients are bit-identical after a restart.
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=100, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)


def state() -> dict[str, object]:
    """Returns the state from which the job can resume."""
    return {"model": model, "optimizer": optimizer, "rng": rapidraid.per_rank(torch.get_rng_state())}


with rapidraid.Checkpointer(job, config=config, keep=2) as checkpointer:
    loaded = state()
    start = checkpointer.load(loaded) or 0
    if start:
        rng = loaded["rng"]
        assert isinstance(rng, rapidraid.state.Marked)
        torch.set_rng_state(rng.value)
    say(f"rank {rank} pid {os.getpid()} daemon {checkpointer._launch.session.daemon_pid} start {start}")
    for step in range(start + 1, steps + 1):
        loss = (model(torch.randn(16, 64)) - rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"rank {rank} step {step} loss {loss.item()!r}")
        checkpointer.save(step, state())
        say(f"rank {rank} staged {step}")
dist.destroy_process_group()
