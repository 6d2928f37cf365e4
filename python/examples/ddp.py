"""Trains with DDP and resumes after a crash. RNG, data position and running statistics are private to each rank.

usage: torchrun --nproc-per-node 4 --max-restarts 3 ddp.py CONFIG STEPS
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import rapidraid


def say(text: str) -> None:
    """Prints a line in a single write, because the ranks share the output."""
    print(f"{text}\n", end="", flush=True)


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
# With one bucket whose order never changes, sums of gradients are bit-identical after a restart.
# With DDP's own settings the first step after a restart adds in another order than it would without
# one, whatever loaded the state.
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
torch.manual_seed(100 + rank)


def state() -> dict[str, object]:
    """Returns the state from which the job can resume."""
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": rapidraid.per_rank(torch.get_rng_state()),
        "position": rapidraid.per_rank(position),
    }


position = 0
with rapidraid.Checkpointer(os.environ.get("JOB", "ddp"), config=sys.argv[1], save_on=signal.SIGTERM) as checkpointer:
    loaded = state()
    start = checkpointer.load(loaded) or 0
    if start:
        torch.set_rng_state(loaded["rng"].value)
        position = loaded["position"].value
    say(f"rank {rank} pid {os.getpid()} start {start}")
    for step in range(start + 1, int(sys.argv[2]) + 1):
        data = torch.randn(16, 32) + rank
        position += len(data)
        loss = (model(data) - data.mean(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = model.module[1].running_mean.sum().item()
        say(f"rank {rank} step {step} loss {loss.item()!r} position {position} mean {mean!r}")
        is_last = checkpointer.should_stop_together()
        if is_last or step % 5 == 0:
            checkpointer.save(step, state())
        if is_last:
            break
dist.destroy_process_group()
