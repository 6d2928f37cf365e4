"""Saves on two ranks, while the state of rank 1 has changed without the other rank's knowledge. Prints what each rank was told.

usage: changed.py CONFIG JOB
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import rapidraid


def main() -> None:
    """Saves three steps, of which the second one fails."""
    config, job = sys.argv[1:3]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    checkpointer = rapidraid.Checkpointer(job, config=config, timeout=300)
    state = {"a": torch.ones(10)}
    checkpointer.save(1, state)
    checkpointer.wait()
    begun = time.monotonic()
    try:
        if rank == 1:
            # The other rank has staged the step by then. If not, it waits for ``staging.fill_s``.
            time.sleep(2)
            state["a"] = torch.ones(11)
        checkpointer.save(2, state)
        checkpointer.wait(2)
        told = "saved"
    except rapidraid.RapidraidError as error:
        told = f"{type(error).__name__}: {error}"
    print(f"rank {rank} after {time.monotonic() - begun:.0f} s: {told}\n", end="", flush=True)
    dist.barrier()
    checkpointer.prepare(state)
    while True:
        try:
            checkpointer.save(3, state)
            break
        except rapidraid.errors.UnavailableError as error:
            print(f"rank {rank} again: {error}\n", end="", flush=True)
    checkpointer.wait()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
