"""A rank that executes commands line by line and answers in JSON, so that it can be timed and killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_S = 600


class Ranks:
    """The ranks of one launch, as processes of their own, divided evenly over the hosts with these configurations."""

    def __init__(self, world: int, config: Path | list[Path], *, large_bytes: int, port: int = 0) -> None:
        env = {
            **os.environ,
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + (os.getpid() * 2 + port) % 20000),
        }
        configs = config if isinstance(config, list) else [config]
        self.children = []
        for rank in range(world):
            own = str(configs[rank * len(configs) // world])
            command = [sys.executable, "-m", "trainers.trainer", own, str(large_bytes)]
            child = subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.children.append(child)
        self._answers()

    def ask(self, *words: str | int) -> list[dict[str, Any]]:
        """Sends the same command to all ranks. Returns their answers."""
        line = json.dumps(words) + "\n"
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(line)
            child.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for child in self.children:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank ended with {child.wait()}")
            found.append(json.loads(line))
        return found

    def kill(self) -> None:
        """Kills all ranks."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> None:
    """Executes commands until it is killed or the input ends."""
    import torch
    import torch.distributed as dist

    import rapidraid

    from . import state as states
    from .training import Training

    config, large_bytes = Path(sys.argv[1]), int(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo")
    state = {"rank": rapidraid.per_rank(states.make(rank, world, large_bytes=large_bytes))}
    checkpointer: rapidraid.Checkpointer | None = None

    def answer(**fields: object) -> None:
        print(json.dumps(fields), flush=True)

    answer(bytes=states.nbytes(state["rank"].value))
    for line in sys.stdin:
        match json.loads(line):
            case ["open", job]:
                begun = time.perf_counter()
                checkpointer = rapidraid.Checkpointer(job, config=config, timeout=LIMIT_S)
                answer(seconds=time.perf_counter() - begun)
            case ["prepare"]:
                assert checkpointer is not None
                checkpointer.prepare(state)
                plan = checkpointer._saver.plan
                answer(segments=plan.segment_bytes * plan.segments if plan else 0)
            case ["save", step]:
                assert checkpointer is not None
                begun = time.perf_counter()
                checkpointer.save(step, state)
                answer(seconds=time.perf_counter() - begun)
            case ["wait", step]:
                assert checkpointer is not None
                begun = time.perf_counter()
                notes = checkpointer.wait(step, timeout=LIMIT_S)
                answer(seconds=time.perf_counter() - begun, notes=notes)
            case ["load", step]:
                assert checkpointer is not None
                if world > 1:
                    dist.barrier()
                begun = time.perf_counter()
                loaded = checkpointer.load(state, step, timeout=LIMIT_S)
                answer(seconds=time.perf_counter() - begun, step=loaded)
            case ["resume", job]:
                begun = time.perf_counter()
                checkpointer = rapidraid.Checkpointer(job, config=config, timeout=LIMIT_S)
                loaded = checkpointer.load(state)
                answer(seconds=time.perf_counter() - begun, step=loaded)
            case ["train", steps]:
                training = Training()
                begun = time.perf_counter()
                for _ in range(steps):
                    training.step()
                answer(seconds=time.perf_counter() - begun)
            case other:
                raise ValueError(f"not known: {other}")


if __name__ == "__main__":
    main()
