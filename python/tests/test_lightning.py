"""Lightning's Trainer over the storage."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import equal, once, run_and_kill

import rapidraid

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning.pytorch")
adapter = pytest.importorskip("rapidraid.lightning")

sys.path.append(str(Path(__file__).parent / "programs"))
program = pytest.importorskip("lightning_fit")

PROGRAM = str(Path(__file__).parent / "programs" / "lightning_fit.py")
STEPS = 16

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def launch(config: Path, job: str, folder: Path, resume: str, *, kill_after: int | None = None) -> list[str]:
    """Runs the program, and kills it when it has printed a step. Returns its lines about steps."""
    command = [sys.executable, PROGRAM, str(config), job, str(folder), resume, str(STEPS)]
    return [line for line in run_and_kill(command, kill_after=kill_after) if line.startswith("step")]


def steps_of(config: Path, job: str) -> list[int]:
    with rapidraid.Checkpointer(job, config=config) as checkpointer:
        return [info.step for info in checkpointer.steps()]


def test_a_killed_fit_resumes_with_the_losses_of_an_uninterrupted_one(
    cluster: rapidraid.LocalCluster, job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It begins by the name of the job, and goes on by ``last``, which Lightning looks up among the pointers."""
    plain, saver = program.trainer_of("", "", tmp_path / "plain", STEPS, plugins=[])
    torch.manual_seed(1)
    model = program.Model()
    plain.fit(model, program.Data())
    expected = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(expected) == STEPS
    folder = tmp_path / "out"
    killed = launch(cluster.config, job, folder, f"rapidraid://{job}", kill_after=7)
    assert killed == expected[: len(killed)]
    resumed = launch(cluster.config, job, folder, "last")
    first = int(resumed[0].split()[1])
    assert first in (7, 9), "it went on from the newest step that was staged"
    assert resumed == expected[first - 1 :]
    # Lightning has the files, and the job the steps of the same names.
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "plain").iterdir()}
    assert all(path.stat().st_size < 100 for path in folder.iterdir())
    best = {int(path.split("step=")[1].split(".")[0]) for path in saver.best_k_models}
    found = set(steps_of(cluster.config, job))
    assert found >= best | {STEPS} and found - best <= {2, 4, 6, STEPS}, "only the kill may leave steps behind"
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    for name, value in model.state_dict().items():
        assert equal(checkpointer.read(STEPS, f"state_dict/{name}"), value), name


class Both(adapter.RapidraidCheckpointIO):  # type: ignore[misc, name-defined]
    """Writes Lightning's own file next to each pointer."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, f"{path}.file")
        super().save_checkpoint(checkpoint, path, storage_options)


def test_a_checkpoint_comes_back_as_it_was(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    io = Both(job, config=cluster.config)
    trainer, saver = program.trainer_of(cluster.config, job, tmp_path, 4, plugins=[io])
    trainer.fit(program.Model(), program.Data(), ckpt_path=f"rapidraid://{job}")
    for path in (saver.best_model_path, *saver.best_k_models):
        loaded, expected = io.load_checkpoint(path), torch.load(f"{path}.file", weights_only=False)
        assert loaded.keys() == expected.keys()
        for key, value in expected.items():
            assert equal(loaded[key], value), key
    assert isinstance(loaded["lr_schedulers"][0]["milestones"], Counter)
    for name in (f"rapidraid://{job}", saver.last_model_path):
        assert io.load_checkpoint(name)["global_step"] == 4
    moved = io.load_checkpoint(f"rapidraid://{job}/4", map_location=lambda storage, _: storage)
    assert equal(moved["state_dict"], trainer.model.state_dict())
    assert io.load_checkpoint(f"rapidraid://{job}/4", map_location="meta")["state_dict"]["net.0.weight"].is_meta
    # A file of Lightning's own loads too.
    assert io.load_checkpoint(f"{saver.last_model_path}.file", weights_only=False)["global_step"] == 4
    with pytest.raises(rapidraid.errors.NotFoundError, match="there is no"):
        io.load_checkpoint(tmp_path / "absent.ckpt")
    with pytest.raises(rapidraid.errors.InvalidError, match="the plug-in of"):
        io.load_checkpoint("rapidraid://other")


def checkpoint(step: int, **more: Any) -> dict[str, Any]:
    """Returns a checkpoint like Lightning's."""
    state = {"weight": torch.full((4,), float(step))}
    return {"global_step": step, "pytorch-lightning_version": "2.6.6", "state_dict": state} | more


def test_paths_name_steps(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """A step goes when its last path goes, and never before the step that replaces it is committed."""
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    assert not io.load_checkpoint(f"rapidraid://{job}"), "an empty checkpoint is false, so Lightning restores nothing"
    one, two, again, last = (str(tmp_path / f"{name}.ckpt") for name in ("one", "two", "again", "last"))
    io.save_checkpoint(checkpoint(1, optimizer_states=[]), one)
    io.save_checkpoint(checkpoint(1), last)
    with pytest.raises(rapidraid.errors.InvalidError, match="is saved without extra"):
        io.save_checkpoint(checkpoint(1, extra=1), two)
    io.remove_checkpoint(one)
    io.teardown()
    assert steps_of(cluster.config, job) == [1]
    io.save_checkpoint(checkpoint(2), two)
    io.save_checkpoint(checkpoint(2), last)
    io.teardown()
    assert steps_of(cluster.config, job) == [2]
    # Another process knows the paths by their pointers.
    rapidraid._jobs.forget_checkpointers()
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    assert io.load_checkpoint(two)["state_dict"]["weight"][0] == 2
    io.save_checkpoint(checkpoint(2), again)
    io.remove_checkpoint(again)
    io.save_checkpoint(checkpoint(3), last)
    io.teardown()
    assert steps_of(cluster.config, job) == [2, 3]
    io.remove_checkpoint(two)
    io.teardown()
    assert steps_of(cluster.config, job) == [3]
    assert io.load_checkpoint(last)["global_step"] == 3


def test_a_name_that_begins_with_last_is_no_other_than_its_step(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """Only ``last.ckpt`` and its versions are the step to resume from."""
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    for name in ("last_layer-step=1", "last-epoch=1", "last", "last-v1"):
        io.save_checkpoint(checkpoint(1), tmp_path / f"{name}.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
    io.teardown()
    for name, step in (("last_layer-step=1", 1), ("last-epoch=1", 1), ("last", 2), ("last-v1", 2)):
        assert io.load_checkpoint(tmp_path / f"{name}.ckpt")["global_step"] == step, name


def test_a_step_that_another_folder_names_stays(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """A process that resumes finds the folders of all ModelCheckpoints in the first checkpoint that it saves."""
    folders = [tmp_path / "newest", tmp_path / "best"]
    callbacks = {f"ModelCheckpoint{at}": {"dirpath": str(folder)} for at, folder in enumerate([*folders, tmp_path / "absent"])}
    callbacks["other"] = {"dirpath": None}
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    for folder in folders:
        io.save_checkpoint(checkpoint(1, callbacks=callbacks), folder / "1.ckpt")
    io.teardown()
    rapidraid._jobs.forget_checkpointers()
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    assert io.load_checkpoint(folders[0] / "1.ckpt")["global_step"] == 1
    io.save_checkpoint(checkpoint(2, callbacks=callbacks), folders[0] / "2.ckpt")
    io.remove_checkpoint(folders[0] / "1.ckpt")
    io.teardown()
    assert steps_of(cluster.config, job) == [1, 2]
    io.remove_checkpoint(folders[1] / "1.ckpt")
    io.teardown()
    assert steps_of(cluster.config, job) == [2]


def test_a_step_stays_until_the_next_one_is_committed(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.teardown()
    io.save_checkpoint({**checkpoint(2), "state_dict": {"weight": torch.ones(30_000_000)}}, tmp_path / "2.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    seen = set()
    with rapidraid.Checkpointer(job, config=cluster.config, alone=True) as other:
        until = time.monotonic() + 60.0
        while (found := tuple(info.step for info in other.steps())) != (2,) and time.monotonic() < until:
            seen.add(found)
    assert found == (2,) and () not in seen
    io.teardown()


def test_what_is_no_plain_value_needs_a_pickle(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    odd = {("a", 1): 2, None: torch.tensor(3.5), 2.5: Counter({"b": 1})}
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    io.save_checkpoint(checkpoint(1, callbacks={"odd": odd}), tmp_path / "1.ckpt")
    assert equal(io.load_checkpoint(tmp_path / "1.ckpt")["callbacks"]["odd"], odd)
    with pytest.raises(rapidraid.errors.InvalidError, match="hyper_parameters"):
        io.save_checkpoint(checkpoint(2, hyper_parameters={"where": Path("/a")}), tmp_path / "2.ckpt")
    assert not (tmp_path / "2.ckpt").exists()
    io.teardown()
    rapidraid._jobs.forget_checkpointers()
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config, allow_pickle=True)
    io.load_checkpoint(tmp_path / "1.ckpt")
    io.save_checkpoint(checkpoint(2, hyper_parameters={"where": Path("/a")}), tmp_path / "2.ckpt")
    assert io.load_checkpoint(tmp_path / "2.ckpt")["hyper_parameters"]["where"] == Path("/a")
    with pytest.raises(rapidraid.errors.InvalidError, match="by pickle"):
        io.load_checkpoint(tmp_path / "2.ckpt", weights_only=True)


def test_values_may_grow_and_tensors_part(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """Up to step 5 the values grow. From then on two tensors are one object in every second step."""
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    for step in range(1, 9):
        mean = torch.ones(3) * step
        grown = {"text": "x" * 140_000 * min(step, 5), "scores": {f"{at}.ckpt": torch.tensor(float(at)) for at in range(step)}}
        callbacks = {**grown, "mean": {"now": mean, "then": mean if step in (5, 7) else mean.clone()}}
        io.save_checkpoint(checkpoint(step, callbacks=callbacks), tmp_path / f"{step}.ckpt")
    for step in range(1, 9):
        callbacks = io.load_checkpoint(tmp_path / f"{step}.ckpt")["callbacks"]
        assert equal(callbacks["mean"], {"now": torch.ones(3) * step, "then": torch.ones(3) * step})
        assert len(callbacks["text"]) == 140_000 * min(step, 5) and len(callbacks["scores"]) == step


def test_two_ranks_resume_from_one_step(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    trainer, _ = program.trainer_of(cluster.config, job, tmp_path, 4)
    trainer.fit(program.Model(), program.Data(), ckpt_path=f"rapidraid://{job}")
    weights = sum(parameter.sum().item() for parameter in trainer.model.parameters())
    code, lines = once(PROGRAM, 2, str(cluster.config), job, str(tmp_path), f"rapidraid://{job}", "8", "2")
    assert code == 0, "\n".join(lines)
    starts = sorted(line for line in lines if line.startswith("rank"))
    assert starts == [f"rank {rank} start 4 weights {weights!r}" for rank in (0, 1)]
    assert steps_of(cluster.config, job)[-1] == 8


def test_other_weights_are_not_passed_for_a_step_that_was_loaded(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    io = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    io.save_checkpoint({"global_step": 100, "state_dict": {"w": torch.ones(4)}}, tmp_path / "a.ckpt")
    io.teardown()
    io.checkpointer.leave()
    again = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    assert again.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["w"].equal(torch.ones(4))
    again.save_checkpoint({"global_step": 100, "state_dict": {"w": torch.ones(4)}}, tmp_path / "b.ckpt")
    other = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    with pytest.raises(rapidraid.errors.ExistsError, match="with other weights"):
        other.save_checkpoint({"global_step": 100, "state_dict": {"w": torch.zeros(4)}}, tmp_path / "c.ckpt")


class Averaged:
    """Weights that are replaced in place between two checkpoints of one step."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1000))

    def checkpoint(self, step: int) -> dict[str, Any]:
        return checkpoint(step, state_dict={"weight": self.weight.detach()})


def test_weights_that_changed_since_the_step_was_saved_are_kept_in_a_file(
    cluster: rapidraid.LocalCluster, job: str, tmp_path: Path
) -> None:
    io, model = adapter.RapidraidCheckpointIO(job, config=cluster.config), Averaged()
    paths = [tmp_path / f"{name}.ckpt" for name in ("step", "same", "changed", "unseen", "again")]
    io.save_checkpoint(model.checkpoint(1), paths[0])
    io.save_checkpoint(model.checkpoint(1), paths[1])
    with torch.no_grad():
        model.weight.detach().copy_(torch.full((1000,), 2.0))
    io.save_checkpoint(model.checkpoint(1), paths[2])
    model.weight.data.copy_(torch.full((1000,), 3.0))
    assert model.weight._version == 1, "torch counts no change through .data"
    io.save_checkpoint(model.checkpoint(1), paths[3])
    model.weight.data.copy_(torch.ones(1000))
    io.save_checkpoint(model.checkpoint(1), paths[4])
    io.teardown()
    found = [float(io.load_checkpoint(path)["state_dict"]["weight"][7]) for path in paths]
    assert found == [1, 1, 2, 3, 1]
    assert [path.stat().st_size < 100 for path in paths] == [True, True, False, False, True]
    # A change of the weights comes before a refusal of more parts, and a path that becomes a file names no step.
    model.weight.data[496] = 4
    io.save_checkpoint(model.checkpoint(1) | {"optimizer_states": []}, paths[1])
    assert [float(io.load_checkpoint(path)["state_dict"]["weight"][496]) for path in paths[:2]] == [1, 4]
    # The job goes on from a file.
    rapidraid._jobs.forget_checkpointers()
    again = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    assert again.load_checkpoint(paths[3])["global_step"] == 1
    again.save_checkpoint(model.checkpoint(2), paths[4])
    again.teardown()
    assert steps_of(cluster.config, job) == [1, 2]
    # It goes on from the checkpoint that was loaded last. An earlier load may have been for `validate`.
    for earlier, later, saved in ((paths[3], paths[4], paths[0]), (paths[4], paths[2], paths[4])):
        rapidraid._jobs.forget_checkpointers()
        last = adapter.RapidraidCheckpointIO(job, config=cluster.config)
        steps = [last.load_checkpoint(path)["global_step"] for path in (earlier, later)]
        assert steps[0] == steps[1] - 1
        last.save_checkpoint(model.checkpoint(steps[1] + 1), saved)
        model.weight.data.add_(1)
        last.save_checkpoint(model.checkpoint(steps[1] + 1), paths[2])
        last.teardown()
    assert steps_of(cluster.config, job) == [3, 4]


def test_a_step_that_cannot_be_compared_does_not_lose_the_checkpoint(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    io, model = adapter.RapidraidCheckpointIO(job, config=cluster.config), Averaged()
    io.save_checkpoint(model.checkpoint(1), tmp_path / "one.ckpt")
    io.teardown()
    io.checkpointer.remove(1)
    io.save_checkpoint({**model.checkpoint(1), "state_dict": {"weight": torch.ones(1000)}}, tmp_path / "two.ckpt")
    assert io.load_checkpoint(tmp_path / "two.ckpt")["state_dict"]["weight"].equal(torch.ones(1000))


def test_the_newest_step_stays_until_another_one_is_staged(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """AsyncCheckpointIO removes a path before the save that replaces it has begun, and a new launch may know no other path."""
    io, model = adapter.RapidraidCheckpointIO(job, config=cluster.config), Averaged()
    io.save_checkpoint(model.checkpoint(1), tmp_path / "one.ckpt")
    io.checkpointer.wait()
    io.remove_checkpoint(tmp_path / "one.ckpt")
    assert not io._removals and steps_of(cluster.config, job) == [1]
    io.save_checkpoint(model.checkpoint(2), tmp_path / "two.ckpt")
    io.teardown()
    assert steps_of(cluster.config, job) == [2]
    io.checkpointer.leave()
    rapidraid._jobs.forget_checkpointers()
    again = adapter.RapidraidCheckpointIO(job, config=cluster.config)
    assert again.load_checkpoint(f"rapidraid://{job}")["global_step"] == 2
    for _ in range(2):
        again.save_checkpoint(model.checkpoint(2), tmp_path / "version_1" / "tuner.ckpt")
        again.remove_checkpoint(tmp_path / "version_1" / "tuner.ckpt")
    again.teardown()
    assert steps_of(cluster.config, job) == [2], "this launch has only loaded the step"
    again.save_checkpoint(model.checkpoint(3), tmp_path / "version_1" / "three.ckpt")
    again.teardown()
    assert steps_of(cluster.config, job) == [3]


def test_a_step_without_a_path_can_be_named_again(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """Lightning's Tuner saves, loads and removes a checkpoint of one step several times."""
    io, model = adapter.RapidraidCheckpointIO(job, config=cluster.config), Averaged()
    for _ in range(2):
        io.save_checkpoint(model.checkpoint(0), tmp_path / "tuner.ckpt")
        io.teardown()
        assert io.load_checkpoint(tmp_path / "tuner.ckpt")["state_dict"]["weight"].equal(torch.ones(1000))
        io.remove_checkpoint(tmp_path / "tuner.ckpt")
    io.teardown()
    assert not io.load_checkpoint(f"rapidraid://{job}"), "a fit after the Tuner begins anew"
    io.save_checkpoint(model.checkpoint(1), tmp_path / "one.ckpt")
    io.teardown()
    assert steps_of(cluster.config, job) == [1]
