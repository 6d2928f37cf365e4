"""The state that is saved: 64 tensors of 16 MiB and 2,000 of 4 KiB."""

from __future__ import annotations

import torch

LARGE, LARGE_BYTES = 64, 16 << 20
SMALL, SMALL_BYTES = 2000, 4 << 10


def make(part: int = 0, parts: int = 1, *, large_bytes: int = LARGE_BYTES) -> dict[str, torch.Tensor]:
    """Returns a rank's part of the state, float32, filled with numbers of its own."""
    generator = torch.Generator().manual_seed(part)
    state: dict[str, torch.Tensor] = {}
    if large_bytes == 0:
        return state
    for at in range(part, LARGE, parts):
        state[f"large.{at:02}"] = torch.randn(large_bytes // 4, generator=generator)
    for at in range(part, SMALL, parts):
        state[f"small.{at:04}"] = torch.randn(SMALL_BYTES // 4, generator=generator)
    return state


def nbytes(state: dict[str, torch.Tensor]) -> int:
    """Returns the bytes of a state."""
    return sum(tensor.nbytes for tensor in state.values())
