"""Loads tensors to a device: through two pinned buffers, of which one is filled while the other one is copied."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ._leaves import is_array

#: The length of a buffer in bytes. A longer tensor gets a buffer of its own length. Pinning a
#: gigabyte takes about half a second, so the buffers are short.
BUFFER_BYTES = 128 << 20
#: The alignment of a tensor in a buffer, in bytes.
ALIGN_BYTES = 64


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor on a device, and the content that it receives."""

    row: int
    part: tuple[list[int], list[int]] | None
    value: Any
    #: The element type of the content. ``value`` may have another one.
    dtype: Any

    @property
    def nbytes(self) -> int:
        """The bytes of the content."""
        return int(math.prod(self.value.shape) * self.dtype.itemsize)


def is_on_device(value: Any) -> bool:
    """Returns whether a tensor is in the memory of a CUDA device."""
    return bool(not is_array(value) and value.device.type == "cuda")


def load_to_devices(tensors: list[DeviceTensor], copy: Callable[[list[Any]], str | None]) -> str | None:
    """Loads all tensors. ``copy`` fills targets in the host's memory and verifies them.

    Returns ``None``, or the name of a damaged tensor. All copies are complete by then.
    """
    if not tensors:
        # The process may have no torch.
        return None
    torch = sys.modules["torch"]
    buffers: list[Any] = [None, None]
    copied: list[list[Any]] = [[], []]
    try:
        for at, (length, batch) in enumerate(_batches(tensors)):
            turn = at % 2
            _wait(copied[turn])
            if buffers[turn] is None or buffers[turn].numel() < length:
                buffers[turn] = None
                pinned = torch.cuda.is_available()
                buffers[turn] = torch.empty(max(length, BUFFER_BYTES), dtype=torch.uint8, device="cpu", pin_memory=pinned)
            views = [buffers[turn][offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.value.shape) for offset, tensor in batch]
            targets = [
                (tensor.row, tensor.part, int(view.data_ptr()), tensor.nbytes) for (_, tensor), view in zip(batch, views, strict=True)
            ]
            damaged = copy(targets)
            if damaged is not None:
                return damaged
            with torch.no_grad():
                for (_, tensor), view in zip(batch, views, strict=True):
                    tensor.value.copy_(view, non_blocking=True)
            copied[turn] = _events({tensor.value.device for _, tensor in batch})
    finally:
        for events in copied:
            _wait(events)
    return None


def _batches(tensors: list[DeviceTensor]) -> Iterator[tuple[int, list[tuple[int, DeviceTensor]]]]:
    """Yields batches that fit into a buffer: the length, and the offset of each tensor."""
    batch: list[tuple[int, DeviceTensor]] = []
    end = 0
    for tensor in tensors:
        if batch and end + tensor.nbytes > BUFFER_BYTES:
            yield end, batch
            batch, end = [], 0
        batch.append((end, tensor))
        end += -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    if batch:
        yield end, batch


def _events(devices: set[Any]) -> list[Any]:
    """Returns an event for each device that occurs when the copies so far are complete."""
    torch = sys.modules["torch"]
    return [torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"]


def _wait(events: list[Any]) -> None:
    for event in events:
        event.synchronize()
