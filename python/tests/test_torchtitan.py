"""TorchTitan's real ``Trainer`` with checkpoints in the storage, by the option of its command line."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest
from ranks import once

import rapidraid

pytest.importorskip("torchtitan")
pytest.importorskip("tyro")

PROGRAM = str(Path(__file__).parent / "programs" / "titan.py")
OVERRIDE = ["--override.imports", "rapidraid.torchtitan.checkpointer", "--checkpoint.enable"]


def launch(cluster: rapidraid.LocalCluster, job: str, ranks: int, *runs: list[str], code: int = 0) -> list[list[str]]:
    """Runs TorchTitan, with one rank also several times. Returns the lines of each run."""
    words = [word for run in runs for word in ["--", *run]][1:]
    env = {"RAPIDRAID_CONFIG": str(cluster.config), "RAPIDRAID_JOB": job}
    found, lines = once(PROGRAM, ranks, *words, env=env)
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert found == code, "\n".join(plain[-60:])
    split: list[list[str]] = []
    for line in plain:
        if line.startswith("run ") and len(split) < len(runs):
            split.append([])
        if split:
            split[-1].append(line)
    return split


def losses(lines: list[str]) -> dict[int, str]:
    """Returns the loss and the norm of the gradients by step."""
    found = [re.search(r"step: +(\d+) +(loss: +\S+ +grad_norm: +\S+)", line) for line in lines]
    return {int(match[1]): match[2] for match in found if match is not None}


def ends(lines: list[str]) -> list[str]:
    """Returns how each rank ended: its step, and a hash of the model and the optimizer."""
    return sorted(line.partition(" ends at ")[2] for line in lines if " ends at " in line)


def test_a_job_that_is_killed_goes_on_with_equal_losses(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """Every loss after the resume equals that without the kill. Other numbers of ranks load the same state."""
    common = ["--training.steps", "14", "--dump_folder", str(tmp_path)]
    saving = [*common, *OVERRIDE, "--checkpoint.interval", "4", "--checkpoint.keep_latest_k", "2", "--checkpoint.async_mode", "async"]
    (killed,) = launch(cluster, job, 2, ["kill=1:12", *saving], code=-9)
    assert sorted(losses(killed)) == list(range(1, 12)), "rank 1 was killed before step 12"
    (resumed,) = launch(cluster, job, 2, saving)
    found = losses(resumed)
    assert sorted(found) == list(range(9, 15)), "it goes on after step 8, which was staged"
    assert {step: found[step] for step in (9, 10, 11)} == {step: losses(killed)[step] for step in (9, 10, 11)}
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        assert [info.step for info in checkpointer.steps()] == [12, 14]
    looking = [*common, *OVERRIDE, "--checkpoint.load_only"]
    excluded = [*looking, "--checkpoint.exclude_from_loading", "dataloader"]
    older = [*excluded, "--checkpoint.load_step", "12", "--training.steps", "12"]
    single, twelve, refused = launch(cluster, job, 1, excluded, older, ["fails", *looking])
    assert ends(single) == ends(resumed)[:1], "one rank has what two have saved"
    assert ends(twelve)[0].startswith("12, ")
    # TorchTitan does not divide the data anew.
    assert any("failed: " in line and "dp_degree" in line for line in refused), refused


def test_what_the_manager_does_not_do_is_left_to_torchtitan(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """Seeds, exports to Hugging Face, checkpoints in folders, and errors."""
    steps = ["--training.steps", "2", "--checkpoint.interval", "1"]
    files = ["--dump_folder", str(tmp_path / "files"), "--checkpoint.enable"]
    mine = ["--dump_folder", str(tmp_path / "mine"), *OVERRIDE]
    named = OVERRIDE[:1] + ['rapidraid.torchtitan.checkpointer={"job": "JOB"}'.replace("JOB", f"{job}-b")] + OVERRIDE[2:]
    export = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    runs = launch(
        cluster,
        job,
        1,
        [*mine, "--checkpoint.create_seed_checkpoint"],
        [*mine, *steps, *export],
        [*files, *steps],
        ["--training.steps", "3", "--dump_folder", str(tmp_path / "files"), *named],
        ["--training.steps", "3", "--dump_folder", str(tmp_path / "c"), *named[:1], named[1].replace("-b", "-c"), *named[2:],
         "--checkpoint.initial_load_path", f"rapidraid://{job}-b/3", "--checkpoint.no-initial_load_model_only"],
        ["fails", *mine, "--checkpoint.load_step", "7"],
    )  # fmt: skip
    seed, exported, _, continued, initial, absent = runs
    assert ends(seed)[0].startswith("0, ")
    assert any("Training starts at step 1" in line for line in exported)
    assert (tmp_path / "mine" / "checkpoint" / "step-2" / "model-00001-of-00001.safetensors").is_file()
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        assert [info.step for info in checkpointer.steps()] == [0, 1], "the last step is files of Hugging Face"
    assert sorted(losses(continued)) == [3], "it goes on from the files of step 2"
    assert ends(initial) == ends(continued), "the step of another job"
    assert any(f"failed: NotFoundError: the job {job} has no step 7" in line for line in absent)


def test_another_version_or_manager_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

    adapter = importlib.import_module("rapidraid.torchtitan")
    config = CheckpointManager.Config(enable=True, interval=7, async_mode="async")
    derived = adapter.checkpointer(config, job="gpt", abandon_later=True)
    assert (derived.interval, derived.async_mode, derived.job, derived.abandon_later) == (7, "async", "gpt", True)
    with pytest.raises(rapidraid.errors.InvalidError, match="replaces only"):
        adapter.checkpointer(BaseCheckpointManager.Config())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.4.0")
    with pytest.raises(rapidraid.errors.InvalidError, match="torchtitan 0.4.0 is installed.*tested with 0.3.0"):
        adapter.check_version("torchtitan", adapter.TESTED)


def test_a_job_has_the_name_of_its_dump_folder() -> None:
    adapter = importlib.import_module("rapidraid.torchtitan")
    assert adapter.job_of("/runs/gpt/checkpoint") == "gpt"
    assert adapter.job_of("/runs/my gpt/stage2/") == "my-gpt-stage2"
    assert adapter.job_of("gs://bucket/gpt/checkpoint") == "gpt"
    with pytest.raises(rapidraid.errors.InvalidError, match="RAPIDRAID_JOB"):
        adapter.job_of("./outputs/checkpoint")
