"""The first example of a new user: a job that saves, is killed, and resumes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import rapidraid

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "python" / "examples" / "resume.py"
LIMIT_S = 120


def run(config: Path, *, kill_after: int | None = None) -> dict[int, str]:
    """Runs the script, and kills it right after it has printed step ``kill_after``. Returns the losses by step."""
    command = [sys.executable, str(SCRIPT), str(config), "60"]
    losses: dict[int, str] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            words = line.split()
            if words[0] == "step":
                losses[int(words[1])] = words[3]
                if int(words[1]) == kill_after:
                    child.send_signal(signal.SIGKILL)
        code = child.wait(LIMIT_S)
    assert code == (0 if kill_after is None else -signal.SIGKILL)
    return losses


def test_a_job_that_is_killed_goes_on_where_it_saved(cluster: rapidraid.LocalCluster) -> None:
    """Every loss after the resume equals that without the kill, from memory and from the cluster."""
    before = run(cluster.config, kill_after=37)
    after = run(cluster.config)
    assert min(after) == 31, "it went on from the newest step that was staged"
    assert all(after[step] == before[step] for step in range(31, 38))
    cluster.forget_memory()
    checkpointer = rapidraid.Checkpointer("example", config=cluster.config)
    assert [info.step for info in checkpointer.steps()] == [10, 20, 30, 40, 50, 60]
    import torch

    weight = torch.zeros(1, 256)
    assert checkpointer.load({"model": {"2.weight": weight}}, strict=False) == 60
    assert weight.abs().sum() > 0


def test_the_lines_of_the_readme_do_what_it_says(tmp_path: Path) -> None:
    """The README's script prints what the README shows.

    Killed with its whole cluster, it resumes after the last save.
    """
    found = re.search(r"```python\n(import torch, rapidraid\n.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    script, printed = found[1], found[2]
    command = [sys.executable, "-u", "-c", script]
    killed = tmp_path / "killed"
    killed.mkdir()
    with subprocess.Popen(command, cwd=killed, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == "saved step 100\n":
                child.send_signal(signal.SIGKILL)
        assert child.wait(LIMIT_S) == -signal.SIGKILL
    again = subprocess.run(command, cwd=killed, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.returncode == 0, again.stderr
    lines = again.stdout.splitlines()
    assert lines[0] in ("start after step 100", "start after step 150") and lines[-1] == "saved step 200"
    undisturbed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert undisturbed.stdout == printed


def test_the_lines_of_the_tutorial_do_what_it_says(cluster: rapidraid.LocalCluster, job: str) -> None:
    """The first script of docs/trainers.md saves, and resumes with the random numbers of the step that it loads."""
    import torch

    found = re.search(r"```python\n(import rapidraid\n\nrng = .*?)```", (ROOT / "docs" / "trainers.md").read_text(), re.DOTALL)
    assert found is not None
    script = found[1].replace('"gpt"', repr(job)).replace('"client/rapidraid.toml"', repr(str(cluster.config)))

    def run(steps: int) -> list[float]:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        drawn: list[float] = []

        def train_one_step() -> None:
            drawn.append(torch.rand(()).item())
            optimizer.zero_grad()
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            scheduler.step()

        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
        names = {"torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        exec(script, {**names, "steps": steps, "train_one_step": train_one_step})  # noqa: S102
        return drawn

    torch.manual_seed(5)
    first = run(250)
    torch.manual_seed(6)
    second = run(250)
    assert len(first) == 250 and second == first[200:]
