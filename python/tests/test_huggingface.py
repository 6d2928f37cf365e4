"""``transformers.Trainer`` and Accelerate over the storage."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import equal, once, run_and_kill

import rapidraid

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
adapter = pytest.importorskip("rapidraid.huggingface")

sys.path.append(str(Path(__file__).parent / "programs"))
program = pytest.importorskip("huggingface_train")

PROGRAM = str(Path(__file__).parent / "programs" / "huggingface_train.py")
STEPS = 20


def launch(config: Path, job: str, folder: Path, *, kill_after: int | None = None) -> list[str]:
    """Runs the program, and kills it when it has printed a step. Returns its lines about steps."""
    command = [sys.executable, PROGRAM, str(config), job, str(folder), f"rapidraid://{job}", str(STEPS)]
    return [line for line in run_and_kill(command, kill_after=kill_after) if line.startswith(("step", "history"))]


def kept(checkpointer: rapidraid.Checkpointer, expected: list[int]) -> bool:
    """Returns whether these steps are left. Older ones are removed after the commit of the last one."""
    until = time.monotonic() + 10.0
    while (found := [info.step for info in checkpointer.steps()]) != expected and time.monotonic() < until:
        time.sleep(0.05)
    return found == expected


def test_a_killed_trainer_resumes_with_the_losses_of_an_uninterrupted_one(
    cluster: rapidraid.LocalCluster, job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = program.trainer_of("", "", tmp_path / "plain", STEPS, kind=transformers.Trainer)
    plain.train()
    expected = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    killed = launch(cluster.config, job, tmp_path / "out", kill_after=8)
    resumed = launch(cluster.config, job, tmp_path / "out")
    first = int(resumed[0].split()[1])
    assert first in (7, 10), "it went on from the newest step that was staged"
    assert killed == expected[: len(killed)]
    assert resumed[:-1] == expected[first - 1 :]
    assert resumed[-1] == f"history {len(plain.state.log_history)}"
    assert not list((tmp_path / "out").glob("*")), "there is no local copy"
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    assert kept(checkpointer, [18, 20]), "save_total_limit keeps two"
    for name, value in plain.model.state_dict().items():
        assert equal(checkpointer.read(20, f"model/{name}"), value), name


def test_the_callback_copies_what_the_subclass_resumes_from(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    plain = program.trainer_of("", "", tmp_path / "out", 8, kind=transformers.Trainer)
    plain.add_callback(adapter.RapidraidCallback(job, config=cluster.config))
    plain.train()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-6", "checkpoint-8"}
    rng = torch.get_rng_state()
    trainer = program.trainer_of(cluster.config, job, tmp_path / "other", 8, save_strategy="no")
    trainer.train(resume_from_checkpoint=f"rapidraid://{job}/6")
    assert trainer.state.global_step == 8
    assert trainer.state.log_history[:8] == plain.state.log_history[:8]
    assert equal(trainer.model.state_dict(), plain.model.state_dict())
    local = tmp_path / "out" / "checkpoint-8"
    assert equal(trainer.optimizer.state_dict()["state"], torch.load(local / "optimizer.pt")["state"])
    assert equal(trainer.lr_scheduler.state_dict(), torch.load(local / "scheduler.pt"))
    assert equal(torch.get_rng_state(), rng)
    with pytest.raises(rapidraid.errors.InvalidError, match="the trainer of"):
        trainer.train(resume_from_checkpoint="rapidraid://other/3")
    empty = program.trainer_of(cluster.config, f"{job}-empty", tmp_path, 7)
    with pytest.raises(rapidraid.errors.NotFoundError, match="has no step"):
        empty.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("kind", "version"), [("FSDP", 1), ("FSDP", 2), ("DEEPSPEED", 2), ("MULTI_GPU", 2)])
def test_the_callback_refuses_what_a_checkpointer_cannot_store(kind: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so before the first step, not at the first save."""
    made = SimpleNamespace(distributed_type=accelerate.DistributedType(kind), fsdp_plugin=SimpleNamespace(fsdp_version=version))
    monkeypatch.setattr(adapter, "AcceleratorState", lambda: made)
    callback = adapter.RapidraidCallback("job")
    if kind == "DEEPSPEED" or version == 1:
        with pytest.raises(rapidraid.errors.InvalidError, match="an Accelerator of the kind") as raised:
            callback.on_train_begin(None, None, None)
        assert "FSDP 2" in raised.value.hint
    else:
        callback.on_train_begin(None, None, None)


def test_the_callback_asks_the_accelerator_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = program.trainer_of("", "", tmp_path, 8, kind=transformers.Trainer)
    trainer.add_callback(adapter.RapidraidCallback("job"))
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    monkeypatch.setitem(accelerate.PartialState._shared_state, "distributed_type", accelerate.DistributedType.MEGATRON_LM)
    with pytest.raises(rapidraid.errors.InvalidError, match="MEGATRON_LM"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_the_best_step_stays_and_is_loaded_at_the_end(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    scores = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    more = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "score"}
    trainer = program.trainer_of(cluster.config, job, tmp_path, 12, **{**more, "save_total_limit": 1, "greater_is_better": False})
    trainer.compute_metrics = lambda _: {"score": next(scores)}
    trainer.train()
    checkpointer = trainer.checkpointer
    assert trainer.state.best_model_checkpoint == f"rapidraid://{job}/6"
    assert kept(checkpointer, [6, 12])
    for name, value in trainer.model.state_dict().items():
        assert equal(checkpointer.read(6, f"model/{name}"), value), name
    assert not equal(checkpointer.read(12, "model/net.0.weight"), trainer.model.net[0].weight.detach())


def accelerated() -> tuple[Any, Any, Any, Any, Any]:
    """Returns an Accelerator with all that it saves."""
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True)
    model = program.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    counter = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 3)
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, schedule, counter


def train(parts: tuple[Any, Any, Any, Any, Any], steps: int) -> list[float]:
    """Returns the losses of some steps."""
    accelerator, model, optimizer, schedule, counter = parts
    losses = []
    for _ in range(steps):
        data = torch.randn(16, 8)
        loss = model(data, data.mean(dim=1))["loss"]
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        counter.step()
        losses.append(loss.item())
    return losses


def test_accelerate_saves_all_or_only_the_weights(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    parts = accelerated()
    assert adapter.load_state(parts[0], job, config=cluster.config) is None
    train(parts, 3)
    adapter.save_state(parts[0], f"{job}/3", config=cluster.config).wait()
    expected = train(parts, 3)
    weights = {name: value.clone() for name, value in parts[1].state_dict().items()}
    epoch = parts[4].last_epoch
    other = accelerated()
    train(other, 1)
    assert adapter.load_state(other[0], job, config=cluster.config) == 3
    assert train(other, 3) == expected
    assert other[4].last_epoch == epoch
    assert equal(other[1].state_dict(), weights)
    # A script that keeps its calls.
    hooked = f"{job}-hooked"
    adapter.register(parts[0], hooked, config=cluster.config)
    parts[0].save_state(tmp_path / "checkpoint_6")
    assert {file.name for file in (tmp_path / "checkpoint_6").iterdir()} == {
        "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl",
    }  # fmt: skip
    expected = train(parts, 2)
    adapter.register(other[0], hooked, config=cluster.config)
    train(other, 1)
    other[0].load_state(str(tmp_path / "checkpoint_6"))
    assert train(other, 2) == expected
    with pytest.raises(rapidraid.errors.InvalidError, match="has no number"):
        parts[0].save_state(tmp_path / "newest")


def test_another_number_of_ranks_resumes(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """One rank saves, two resume, and both have its weights. What is not declared comes from rank 0."""
    trainer = program.trainer_of(cluster.config, job, tmp_path, 6)
    trainer.train(resume_from_checkpoint=f"rapidraid://{job}")
    weights = sum(parameter.sum().item() for parameter in trainer.model.parameters())
    code, lines = once(PROGRAM, 2, str(cluster.config), job, str(tmp_path), f"rapidraid://{job}", "9")
    assert code == 0, "\n".join(lines)
    starts = sorted(line for line in lines if line.startswith("rank"))
    assert starts == [f"rank {rank} start 6 weights {weights!r}" for rank in (0, 1)]
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    assert kept(checkpointer, [6, 9])
    shown = cluster.command("show", f"{job}/9", "--tensors")
    assert "rng_state_1.pth" in shown and "rank 1:" not in shown


class Registered:
    """A registered object whose state is of a given kind."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Custom:
    """No plain data."""


def test_registered_objects_are_opened_as_pickles_only_by_permission(cluster: rapidraid.LocalCluster, job: str) -> None:
    parts = accelerated()
    parts[0].register_for_checkpointing(Registered({"a": Custom()}))
    adapter.save_state(parts[0], f"{job}/1", config=cluster.config).wait()
    with pytest.raises(rapidraid.errors.InvalidError, match="stored by pickle"):
        adapter.load_state(parts[0], job, config=cluster.config)
