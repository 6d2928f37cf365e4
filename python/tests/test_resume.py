"""The thinnest path as a newcomer takes it: saved, killed, resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import rapidraid

SCRIPT = Path(__file__).parent.parent / "examples" / "resume.py"
LIMIT_S = 120


def run(config: Path, *, kill_after: int | None = None) -> dict[int, str]:
    """Runs the script, and kills it right after it has printed a step. Returns the losses by step."""
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


def test_a_job_that_is_killed_goes_on_where_it_saved(cluster: rapidraid.LocalCluster, tmp_path: Path) -> None:
    """Every loss after the resume is what it was without the kill, from memory and from the cluster."""
    before = run(cluster.config, kill_after=37)
    after = run(cluster.config)
    assert min(after) == 31, "it went on from the newest step that was staged"
    assert all(after[step] == before[step] for step in range(31, 38))
    # A host that lost its memory reads the step from the cluster.
    other = cluster.config.with_name("other.toml")
    other.write_text(cluster.config.read_text().replace("-staging", f"-{tmp_path.name}"))
    checkpointer = rapidraid.Checkpointer("example", config=other)
    assert [info.step for info in checkpointer.steps()] == [10, 20, 30, 40, 50, 60]
    import torch

    weight = torch.zeros(1, 256)
    assert checkpointer.load({"model": {"2.weight": weight}}, strict=False) == 60
    assert weight.abs().sum() > 0
