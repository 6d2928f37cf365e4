"""Measures with a model on a CUDA device: the stall of a save, steps during an upload, and loads.

The state is that of a transformer and its optimiser, on the device. Data moves over the bus, whose speed the references
show: one copy between the device and pinned memory.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

import rapidraid

from .beds import Host
from .host import TMPFS, seconds
from .libraries import DcpPinned
from .memory import Peak
from .record import Measure, say

State = dict[str, torch.Tensor]

#: Width, layers, words, and batch of the model, large and for a short run.
LARGE, SHORT = (1024, 24, 50_304, 8), (256, 2, 1024, 2)
TOKENS = 512


class Model(torch.nn.Module):
    """A transformer that predicts the next word."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
        self.words = torch.nn.Embedding(words, width)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1, device=tokens.device)
        out = self.head(self.layers(self.words(tokens[:, :-1]), mask, is_causal=True))
        return torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """Steps of the model on the device, in mixed precision."""

    def __init__(self, size: tuple[int, int, int, int]) -> None:
        width, layers, words, batch = size
        torch.manual_seed(1)
        self.model = Model(width, layers, words).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(words, (batch, TOKENS), device="cuda")
        self.step()

    def step(self) -> float:
        """Returns the seconds of a step."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def state(self) -> State:
        """Returns all tensors of the model and the optimizer."""
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for at, slots in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{at}.{name}": tensor for name, tensor in slots.items() if tensor.dim()}
        return state


class Bus:
    """The references: the same bytes between the device and pinned memory, as one copy and tensor by tensor."""

    def __init__(self, state: State) -> None:
        self.tensors = list(state.values())
        self.pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in self.tensors]
        self.flat = torch.empty(sum(tensor.nbytes for tensor in self.tensors), dtype=torch.uint8, device="cuda").fill_(1)
        self.flat_pinned = torch.empty(self.flat.shape, dtype=torch.uint8, pin_memory=True)

    def save(self) -> None:
        """Copies one buffer from the device."""
        self.flat_pinned.copy_(self.flat, non_blocking=True)
        torch.cuda.synchronize()

    def save_each(self) -> None:
        """Copies each tensor from the device."""
        torch._foreach_copy_(self.pinned, self.tensors, non_blocking=True)
        torch.cuda.synchronize()

    def load(self) -> None:
        """Copies one buffer to the device."""
        self.flat.copy_(self.flat_pinned, non_blocking=True)
        torch.cuda.synchronize()


def _bed(state: State) -> Host:
    memory = 4 * sum(tensor.nbytes for tensor in state.values()) + (1 << 30)
    return Host(block="16MiB", staging={"memory": f"{memory >> 20}MiB"})


def _facts(state: State) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bytes": sum(tensor.nbytes for tensor in state.values()),
        "tensors": len(state),
        "processors": os.cpu_count(),
    }


def device(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures saves, steps and loads of a state on a CUDA device."""
    if not torch.cuda.is_available():
        say("there is no CUDA device")
        return
    training = Training(LARGE if large_bytes > 1 << 20 else SHORT)
    state = training.state()
    stall = Measure("device-stall", "stall of a save from a GPU", "save", ["bus", "bus, each tensor"], 1.1)
    step = Measure("device-step", "training step on a GPU during an upload", "during", ["alone"], 1.1)
    load = Measure("device-load", "load to a GPU from the host's memory, verified", "load", ["bus"])
    first = seconds(Bus, state)
    bus = Bus(state)
    for measure in (stall, step, load):
        measure.facts |= _facts(state)
    folder = TMPFS / f"rapidraid-bench-{os.getpid()}"
    folder.mkdir()
    dcp = DcpPinned(state, folder)
    try:
        with _bed(state) as bed, rapidraid.Checkpointer("device", config=bed.config, keep=1) as checkpointer:
            stall.facts["prepare_s"] = seconds(checkpointer.prepare, state)
            stall.facts["pin_s"] = first
            for number in range(1, repeats + 3):
                _save_once(stall, number, bus, dcp, checkpointer, state)
                load.facts |= {name: fact for name, fact in stall.facts.items() if name == "dcp fails"}
                saved = {name: tensor.clone() for name, tensor in state.items()}
                _steps(step, training, checkpointer, number)
                _load_once(load, bus, dcp, checkpointer, state, folder)
                assert all(torch.equal(state[name], tensor) for name, tensor in saved.items()), "the load differs from the save"
                del saved
                say(f"device: round {number} of {repeats + 2}")
    finally:
        dcp.close()
        shutil.rmtree(folder, ignore_errors=True)
    for measure in (stall, load):
        # The first two rounds fill the segments for the first time.
        measure.arms = {arm: times[2:] for arm, times in measure.arms.items() if len(times) > 2}
    yield from (stall, step, load)


def _save_once(measure: Measure, step: int, bus: Bus, dcp: DcpPinned, checkpointer: rapidraid.Checkpointer, state: State) -> None:
    torch.cuda.synchronize()
    measure.add("bus", seconds(bus.save))
    measure.add("bus, each tensor", seconds(bus.save_each))
    _through_dcp(measure, "dcp.async_save, pinned", lambda: dcp.save(step))
    _through_dcp(measure, "dcp, until written", dcp.wait)
    measure.add("save", seconds(checkpointer.save, step, state))
    measure.facts.setdefault("split_s", []).append(vars(checkpointer.last_stall).copy())


def _through_dcp(measure: Measure, arm: str, work: Callable[[], object]) -> None:
    """Measures DCP, unless it has failed: with torch 2.11 its stager and its reader do so on some states."""
    if "dcp fails" in measure.facts:
        return
    try:
        measure.add(arm, seconds(_synchronized, work))
    except (Exception, CheckpointException) as error:
        measure.facts["dcp fails"] = repr(error)
        measure.arms = {name: times for name, times in measure.arms.items() if not name.startswith("dcp")}


def _steps(measure: Measure, training: Training, checkpointer: rapidraid.Checkpointer, number: int) -> None:
    """Runs steps until the step is committed, then as many without a save."""
    during = 0
    while during < 1000:
        measure.add("during", training.step())
        during += 1
        try:
            checkpointer.wait(number, timeout=0.0)
            break
        except rapidraid.errors.DeadlineError:
            continue
    for _ in range(during):
        measure.add("alone", training.step())


def _load_once(measure: Measure, bus: Bus, dcp: DcpPinned, checkpointer: rapidraid.Checkpointer, state: State, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "state.safetensors"
    if not file.exists():
        save_file(state, file)
        torch.save(state, folder / "state.pt")
    measure.add("bus", seconds(bus.load))
    _through_dcp(measure, "dcp.load", dcp.load)
    measure.add("safetensors", seconds(_synchronized, lambda: _into(state, load_file(file, device="cuda"))))
    measure.add("torch.load", seconds(_synchronized, lambda: _into(state, torch.load(folder / "state.pt", mmap=True, map_location="cpu"))))
    for tensor in state.values():
        tensor.zero_()
    with Peak(os.getpid(), 0.002) as own:
        measure.add("load", seconds(_synchronized, lambda: checkpointer.load(state)))
    measure.facts["load_peak_bytes"] = max(measure.facts.get("load_peak_bytes", 0), own.bytes - own.first_bytes)


def _synchronized(work: Callable[[], object]) -> None:
    work()
    torch.cuda.synchronize()


def _into(state: State, found: State) -> None:
    for name, tensor in state.items():
        tensor.copy_(found[name])
