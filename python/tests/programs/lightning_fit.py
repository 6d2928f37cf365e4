"""Trains with Lightning and saves by its ModelCheckpoint. Prints the loss of each step.

usage: lightning_fit.py CONFIG JOB FOLDER CKPT_PATH STEPS [RANKS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from rapidraid.lightning import RapidraidCheckpointIO


class Model(LightningModule):
    """A small network with running statistics."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))

    def on_train_start(self) -> None:
        """Prints where the training begins."""
        if self.trainer.world_size > 1:
            weights = sum(parameter.sum().item() for parameter in self.parameters())
            print(f"rank {self.global_rank} start {self.global_step} weights {weights!r}", flush=True)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Returns the loss, and prints it."""
        (data,) = batch
        loss = (self.net(data) - data.mean(dim=1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=True)
        print(f"step {self.global_step + 1} loss {loss.item()!r} rate {self.optimizers().param_groups[0]['lr']!r}", flush=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 12], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(config: str | Path, job: str, folder: str | Path, steps: int, **more: Any) -> tuple[Trainer, ModelCheckpoint]:
    """Returns a trainer that saves every two steps and keeps the three steps with the lowest losses."""
    torch.set_num_threads(1)
    saver = ModelCheckpoint(folder, monitor="loss", save_top_k=3, save_last=True, every_n_train_steps=2)
    settings: dict[str, Any] = {
        "callbacks": [saver], "max_steps": steps, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    if "plugins" not in more:
        settings["plugins"] = [RapidraidCheckpointIO(job, config=config)]
    return Trainer(**settings, **more), saver


class Data:
    """Batches that go on where a checkpoint was saved. Lightning finds ``state_dict`` by its name."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while True:
            self.position += 1
            yield [torch.randn(8, 8, generator=torch.Generator().manual_seed(self.position))]

    def state_dict(self) -> dict[str, int]:
        """Returns the number of batches so far."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after as many batches."""
        self.position = state["position"]


if __name__ == "__main__":
    torch.manual_seed(1)
    ranks = int(sys.argv[6]) if len(sys.argv) > 6 else 1
    more = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer, _ = trainer_of(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[5]), **more)
    trainer.fit(Model(), Data(), ckpt_path=sys.argv[4])
