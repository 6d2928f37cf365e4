"""Trains with DDP on several "hosts", each with a staging daemon of its own, and saves every step.

With ``FOLDER``, rank 0 also writes each step with ``torch.save``. With ``torch`` after it, the job resumes from there.

usage: hosts.py CONFIG JOB STEPS [FOLDER [torch]]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import rapidraid


def say(text: str) -> None:
    """Prints a line in a single write, because the ranks share the output."""
    print(f"{text}\n", end="", flush=True)


config, job, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
folder = Path(sys.argv[4]) if len(sys.argv) > 4 else None
is_from_torch = "torch" in sys.argv[5:]
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
rank, world = dist.get_rank(), dist.get_world_size()
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=100, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)


def state() -> dict[str, object]:
    """Returns the state from which the job can resume."""
    return {"model": model, "optimizer": optimizer, "rng": rapidraid.per_rank(torch.get_rng_state())}


with rapidraid.Checkpointer(job, config=config, keep=4) as checkpointer:
    loaded = state()
    # With fewer ranks than before, each keeps its own random numbers.
    is_smaller = world < 4
    if folder is not None and is_from_torch:
        start = max(int(path.stem) for path in folder.iterdir())
        found = torch.load(folder / f"{start}.pt")
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    else:
        start = checkpointer.load(loaded, private="skip" if is_smaller else None) or 0
    if start and not is_smaller:
        rng = loaded["rng"]
        assert isinstance(rng, rapidraid.state.Marked)
        torch.set_rng_state(rng.value)
    total = sum(float(parameter.double().sum()) for parameter in model.parameters())
    say(f"rank {rank} pid {os.getpid()} start {start} total {total!r}")
    for step in range(start + 1, steps + 1):
        loss = (model(torch.randn(16, 64)) - rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = sum(float(parameter.double().sum()) for parameter in model.parameters())
        say(f"rank {rank} step {step} loss {loss.item()!r} total {total!r}")
        checkpointer.save(step, state())
        say(f"rank {rank} staged {step}")
        if folder is not None and rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step}.pt")
    checkpointer.wait()
    say(f"rank {rank} committed {steps}")
    dist.barrier()
dist.destroy_process_group()
