"""Every rank has private state under names that all ranks use. A load returns it to the rank that saved it.

usage: torchrun --nproc-per-node N private.py CONFIG save|load [skip|map]
"""

import os
import sys

import torch
import torch.distributed as dist

import rapidraid


def say(text: str) -> None:
    """Prints a line in a single write, because the ranks share the output."""
    print(f"{text}\n", end="", flush=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(1000 + rank)
torch.randn(10 + rank, generator=generator)
state = {
    "rng": rapidraid.per_rank(generator.get_state()),
    "data": rapidraid.per_rank({"position": 100 * rank, "shuffle": [rank, rank + 1]}),
    "weights": rapidraid.replicated(torch.arange(1000.0)),
}
checkpointer = rapidraid.Checkpointer(os.environ.get("JOB", "private"), config=sys.argv[1])
if sys.argv[2] == "save":
    checkpointer.save(1, state)
    checkpointer.wait()
    say(f"rank {rank} saved")
else:
    choice = {"skip": "skip", "map": lambda rank: 7 - rank}.get(sys.argv[3] if len(sys.argv) > 3 else "")
    mine = {
        "rng": rapidraid.per_rank(torch.zeros_like(generator.get_state())),
        "data": rapidraid.per_rank({"position": -1, "shuffle": []}),
        "weights": rapidraid.replicated(torch.zeros(1000)),
    }
    try:
        checkpointer.load(mine, private=choice)
    except rapidraid.errors.InvalidError as error:
        say(f"rank {rank} refused: {error}")
        dist.destroy_process_group()
        sys.exit(3)
    owner = mine["data"].value["position"] // 100
    expected = torch.Generator().manual_seed(1000 + owner)
    torch.randn(10 + owner, generator=expected)
    is_own = owner >= 0 and torch.equal(mine["rng"].value, expected.get_state())
    is_whole = torch.equal(mine["weights"].value, torch.arange(1000.0))
    say(f"rank {rank} has the state of rank {owner} rng {is_own} weights {is_whole}")
dist.destroy_process_group()
