"""The training that runs while a save is uploaded."""

from __future__ import annotations

import time

import torch


class Training:
    """Steps of a small network on one thread."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(64, 512)

    def step(self) -> float:
        """Returns the seconds of a step."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        (self.model(self.data) - self.data).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun
