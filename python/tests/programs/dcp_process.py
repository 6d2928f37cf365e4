"""Saves many tensors from a process of DCP's, with few descriptors. Prints the numbers of the steps that were loaded.

usage: dcp_process.py CONFIG JOB TENSORS STEPS
"""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from rapidraid.torch import Reader, Writer

DESCRIPTORS = 256


def main() -> None:
    """Saves and loads. A process of DCP's imports this file, and must not."""
    config, job, tensors, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    state = {f"layers.{at}": torch.zeros(50, 3) for at in range(tensors)}
    # A view keeps its shape, and shares the memory of its base.
    state["turned"] = state["layers.0"].t()
    writer, reader = Writer(config=config), Reader(config=config)
    for step in range(1, steps + 1):
        for at in range(tensors):
            state[f"layers.{at}"].fill_(at + step / 8)
        future = dcp.async_save(
            state, checkpoint_id=f"{job}/{step}", storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        for tensor in state.values():
            tensor.fill_(-1.0)
        future.result()
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id=f"{job}/{step}", storage_reader=reader)
        assert all(bool((found[f"layers.{at}"] == at + step / 8).all()) for at in range(tensors))
        assert bool((found["turned"] == step / 8).all())
        print(f"loaded {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
