"""Trains TorchTitan's debug model on the CPU by its real ``Trainer``, with the options of its command line.

Prints at the end of each run its step, and a hash of the model and the optimizer. With
``kill=RANK:BATCH`` before the options a rank kills itself when it asks for that batch, with ``fails`` an error is printed.

usage: titan.py [OPTIONS OF A RUN] [-- OPTIONS OF THE NEXT RUN]...
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

# TorchTitan imports the configuration, this file, by its name.
sys.path.insert(0, str(Path(__file__).parent))
# TorchTitan takes the accelerator that torch finds. torch.cpu has no memory statistics, for which its Trainer asks.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = lambda: None
torch.cpu.empty_cache = lambda: None
torch.cpu.current_device = lambda: 0
torch.cpu.memory_stats = lambda device=None: {}
# The kernels of experts need triton, which torch for the CPU does not have. The debug model has no experts.
import torch.distributed.pipelining  # noqa: E402 - it looks for triton too, and must not find it

kernels = {name: MagicMock() for name in ("triton", "triton.language")}
sys.modules.update(kernels)
import torchtitan.distributed.minimal_async_ep  # noqa: E402, F401

for kernel in kernels:
    del sys.modules[kernel]

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

# Rank 0 sleeps two seconds at the end of a run.
sys.modules["torchtitan.trainer"].time = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})


class Numbers(IterableDataset):
    """Batches of each rank, drawn from a generator whose state is part of the checkpoint."""

    def __init__(self, rank: int, seq_len: int) -> None:
        self.rank, self.seq_len, self.at = rank, seq_len, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.at += 1
            if f"{os.environ['RANK']}:{self.at}" == os.environ.get("KILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            drawn = torch.randint(0, 2048, (self.seq_len + 1,), generator=torch.Generator().manual_seed(self.at * 100 + self.rank))
            yield {"input": drawn[:-1], "positions": torch.arange(self.seq_len)}, drawn[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class NumbersLoader(ParallelAwareDataloader):
    """TorchTitan's dataloader over :class:`Numbers`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing to set."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **more: Any) -> None:
        super().__init__(Numbers(dp_rank, seq_len), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    """No tokenizer: the data are numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **more: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def small() -> Trainer.Config:
    """Returns TorchTitan's debug configuration with short sequences, for the CPU."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        # FlexAttention has no backward pass on the CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), NumbersLoader.Config()
    config.validator.enable = False
    config.training.seq_len, config.training.local_batch_size = 32, 1
    config.training.disable_cuda_graphs = True
    config.debug.seed, config.debug.deterministic = 1, True
    config.activation_checkpoint = None
    return config


def digest(trainer: Trainer) -> str:
    """Returns a hash of what a run must restore."""
    hasher = hashlib.sha256()
    for states in (trainer.model_parts[0].state_dict(), trainer.optimizers.state_dict()):
        for name, value in sorted(states.items()):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            hasher.update(name.encode() + (value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()))
    hasher.update(repr(trainer.lr_schedulers.state_dict()).encode())
    return hasher.hexdigest()[:16]


def run(options: list[str]) -> None:
    """Trains once."""
    trainer = ConfigManager().parse_args(["--module", "titan", "--config", "small", *options]).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM.
            module.set_force_sum_reduction_for_comms(True)
    try:
        if trainer.config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
        print(f"rank {os.environ['RANK']} ends at {trainer.step}, {digest(trainer)}", flush=True)
    finally:
        trainer.close()


if __name__ == "__main__":
    init_logger()
    torch.set_num_threads(1)
    words = sys.argv[1:]
    while words:
        at = words.index("--") if "--" in words else len(words)
        options, words = words[:at], words[at + 1 :]
        print(f"run {' '.join(options)}", flush=True)
        if options and options[0].startswith("kill="):
            os.environ["KILL"] = options.pop(0).removeprefix("kill=")
        if options and options[0] == "fails":
            try:
                run(options[1:])
            except Exception as error:  # noqa: BLE001 - printed
                print(f"failed: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            run(options)
    torch.distributed.destroy_process_group()
