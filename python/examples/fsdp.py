"""Trains with FSDP2, saves, and loads on another number of ranks. Prints a hash of the state at each save and load.

usage: torchrun --nproc-per-node N fsdp.py CONFIG STEPS
"""

import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rapidraid


def say(text: str) -> None:
    """Prints a line in a single write, because the ranks share the output."""
    print(f"{text}\n", end="", flush=True)


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(37, 101), torch.nn.ReLU(), torch.nn.Linear(101, 7))
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor, as one rank alone would have it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest() -> str:
    """Returns a hash of all parameters and of the optimizer's state for them."""
    hasher = hashlib.sha256()
    for name, parameter in model.named_parameters():
        hasher.update(name.encode())
        hasher.update(whole(parameter.detach()).numpy().tobytes())
        for key in sorted(optimizer.state.get(parameter, {})):
            hasher.update(whole(optimizer.state[parameter][key]).numpy().tobytes())
    return hasher.hexdigest()[:16]


with rapidraid.Checkpointer(os.environ.get("JOB", "fsdp"), config=sys.argv[1], save_on=signal.SIGTERM) as checkpointer:
    start = checkpointer.load(state) or 0
    found = digest()
    if dist.get_rank() == 0:
        say(f"loaded {start} {found}")
    for step in range(start + 1, start + int(sys.argv[2]) + 1):
        generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
        loss = model(torch.randn(8, 37, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if checkpointer.should_stop_together():
            break
    if int(sys.argv[2]):
        checkpointer.save(step, state)
        found = digest()
        if dist.get_rank() == 0:
            say(f"saved {step} {found}")
dist.destroy_process_group()
