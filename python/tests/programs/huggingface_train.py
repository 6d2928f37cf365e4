"""Trains with ``transformers.Trainer``. Prints the loss of each step.

usage: huggingface_train.py CONFIG JOB FOLDER RESUME STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from rapidraid.huggingface import RapidraidTrainer


class Model(torch.nn.Module):
    """A small network with dropout, so that its losses depend on the state of the random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

    def forward(self, data: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the loss and the prediction."""
        found = self.net(data).squeeze(1)
        return {"loss": (found - labels).square().mean(), "logits": found}


class Say(TrainerCallback):
    """Prints each loss, and where a launch of several ranks begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the step and the weights."""
        if args.world_size > 1:
            weights = sum(parameter.sum().item() for parameter in kwargs["model"].parameters())
            print(f"rank {args.process_index} start {state.global_step} weights {weights!r}\n", end="", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the step and its logs."""
        logs = kwargs["logs"]
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r} rate {logs['learning_rate']!r}\n", end="", flush=True)


def trainer_of(config: str | Path, job: str, folder: str | Path, steps: int, kind: Any = RapidraidTrainer, **more: Any) -> Any:
    """Returns a trainer that saves every third step."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    settings = {
        "max_steps": steps, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "save_total_limit": 2, "lr_scheduler_type": "cosine_with_restarts",
    }  # fmt: skip
    more_args = {"job": job, "settings": {"config": config}} if issubclass(kind, RapidraidTrainer) else {}
    return kind(
        model=Model(),
        args=TrainingArguments(output_dir=str(folder), **{**settings, **more}),
        train_dataset=[{"data": row, "labels": row.mean()} for row in data],
        eval_dataset=[{"data": row, "labels": row.mean()} for row in data[:16]],
        callbacks=[Say()],
        **more_args,
    )


if __name__ == "__main__":
    trainer = trainer_of(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[5]))
    trainer.train(sys.argv[4])
    print("history", len(trainer.state.log_history), flush=True)
