"""Trains with FSDP2 and saves by ``torch.distributed.checkpoint``. Prints a hash of the state at each load and save.

Each step is saved in the next of the ways in which a script can do it.

usage: dcp.py CONFIG JOB STEPS [WAY...]
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rapidraid.torch import Reader, Writer, async_save, load


def say(text: str) -> None:
    """Prints a line in a single write, because the ranks share the output."""
    print(f"{text}\n", end="", flush=True)


def main() -> None:
    """Trains. A process of DCP's imports this file, and must not."""
    config, job, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ways = sys.argv[4:] or ["save", "async", "named", "cached", "cached", "lonely"]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,)) if world < 4 else init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "parts"))
    model = torch.nn.Sequential(torch.nn.Linear(37, 101), torch.nn.ReLU(), torch.nn.Linear(101, 7))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # On two ranks, the rows of each are two runs. On others, they are one.
    flat_mesh = init_device_mesh("cpu", (world,))
    rows = torch.arange(12.0)
    own = torch.cat([half.chunk(2)[rank] for half in rows.chunk(2)]) if world == 2 else rows.chunk(world)[rank]
    placement = _StridedShard(0, split_factor=2) if world == 2 else Shard(0)
    strided = DTensor.from_local(own.clone(), flat_mesh, [placement], run_check=False, shape=rows.shape, stride=(1,))

    class App:
        """The state of the job, as in DCP's tutorial."""

        step = 0

        def state_dict(self) -> dict[str, Any]:
            """Returns the state by names."""
            weights, moments = get_state_dict(model, optimizer)
            return {
                "model": weights,
                "optimizer": moments,
                "step": self.step,
                "history": [torch.full((5,), float(self.step))],
                "rows": strided,
            }

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Takes a state."""
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            self.step = state["step"]
            assert bool((state["history"][0] == self.step).all())
            assert strided.to_local().equal(own + self.step), (strided.to_local(), own)

    def digest() -> str:
        """Returns a hash of all parameters and of the optimizer's state for them."""
        hasher = hashlib.sha256()
        for name, parameter in model.named_parameters():
            hasher.update(name.encode())
            for value in [parameter.detach(), *[entry for _, entry in sorted(optimizer.state.get(parameter, {}).items())]]:
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                hasher.update(whole.numpy().tobytes())
        return hasher.hexdigest()[:16]

    app = App()
    gathered: list[int] = []
    gather_object = dist.gather_object

    def count(*args: Any, **kwargs: Any) -> None:
        """Notes how many bytes a rank sends to the coordinator."""
        gathered.append(len(pickle.dumps(kwargs["obj"])))
        gather_object(*args, **kwargs)

    dist.gather_object = count
    reader = Reader(config=config)
    writer = Writer(config=config)
    # Every load takes the newest step. The first launch of the job has none.
    if reader.newest(job) is not None:
        if world == 3:
            load({"app": app}, job, reader=reader)
        else:
            dcp.load({"app": app}, checkpoint_id=job, storage_reader=reader)
    found = digest()
    if rank == 0:
        say(f"loaded {app.step} {found}")
    for step in range(app.step + 1, app.step + steps + 1):
        generator = torch.Generator().manual_seed(step * 100 + rank)
        loss = model(torch.randn(8, 37, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        app.step = step
        strided.to_local().copy_(own + step)
        found = digest()
        gathered.clear()
        way = ways[step % len(ways)]
        planner = DefaultSavePlanner(enable_plan_caching=way == "cached")
        if way in ("async", "process"):
            where = AsyncCheckpointerType.PROCESS if way == "process" else AsyncCheckpointerType.THREAD
            future = dcp.async_save({"app": app}, checkpoint_id=f"{job}/{step}", storage_writer=writer, async_checkpointer_type=where)
            # The save holds the weights of before: the hash of the next launch shows it.
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2.0)
            future.result()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        elif way == "named":
            saved = async_save({"app": app}, f"{job}/{step}", writer=writer)
            say(f"rank {rank} pid {os.getpid()} staged {step}")
            saved.result()
        else:
            dcp.save({"app": app}, checkpoint_id=f"{job}/{step}", storage_writer=writer, planner=planner, use_collectives=way != "lonely")
        assert all(size <= 1024 for size in gathered), gathered
        if rank == 0:
            say(f"saved {step} {found} {way}, gathered {max(gathered, default=0)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
