"""Saves on two ranks by DCP without collectives, while the planner of rank 1 fails. Prints what each rank was told.

usage: dcp_refused.py CONFIG JOB
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from rapidraid.torch import Writer


class Faulty(DefaultSavePlanner):  # type: ignore[misc]
    """A planner that cannot give the data of its items."""

    def resolve_data(self, write_item: Any) -> Any:
        # The other rank has staged the step by then. If not, it waits for ``staging.fill_s``.
        time.sleep(2)
        raise ValueError("no such data")


def main() -> None:
    """Saves three steps, of which the second one fails."""
    config, job = sys.argv[1:3]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    writer = Writer(config=config, commit_timeout=300)
    state = {"a": torch.ones(10)}
    dcp.save(state, checkpoint_id=f"{job}/1", storage_writer=writer)
    planner = Faulty() if rank == 1 else DefaultSavePlanner()
    begun = time.monotonic()
    try:
        dcp.save(state, checkpoint_id=f"{job}/2", storage_writer=writer, planner=planner, use_collectives=False)
        told = "saved"
    except Exception as error:  # noqa: BLE001 - printed
        told = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"rank {rank} after {time.monotonic() - begun:.0f} s: {told}\n", end="", flush=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=f"{job}/3", storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
