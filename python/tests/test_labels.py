"""Labels: marks on committed steps, which keep the newest step that has each."""

from __future__ import annotations

import json
import re
import time

import pytest

import rapidraid
from rapidraid import errors

torch = pytest.importorskip("torch")


def test_labels_mark_steps_and_keep_the_newest_one(cluster: rapidraid.LocalCluster, job: str) -> None:
    """``latest`` finds the newest step with a label, which ``keep`` does not remove."""
    state = {"weight": torch.ones(100)}
    with rapidraid.Checkpointer(job, config=cluster.config, keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state)
            checkpointer.wait()
            if step < 3:
                checkpointer.label(step, "trusted")
        until = time.monotonic() + 20
        while [info.step for info in checkpointer.steps()] != [2, 3] and time.monotonic() < until:
            time.sleep(0.05)
        assert [info.step for info in checkpointer.steps()] == [2, 3]
        assert checkpointer.labels() == {2: ["trusted"]}
        assert checkpointer.latest() == 3
        assert checkpointer.latest(label="trusted") == 2
        assert checkpointer.latest(label="other") is None
        with pytest.raises(errors.NotFoundError):
            checkpointer.label(1, "trusted")
        with pytest.raises(errors.InvalidError):
            checkpointer.label(2, "no spaces")
        shown = cluster.command("label", f"{job}/3", "trusted")
        assert shown == f"{job}/3 has the label trusted\n"
        assert checkpointer.latest(label="trusted") == 3
        text = cluster.command("ls", job)
        assert re.search(rf"^{job}/3 .* trusted *$", text, re.MULTILINE), text
        listed = json.loads(cluster.command("ls", job, "--label", "trusted", "--json"))["steps"]
        assert [(step["step"], step["labels"]) for step in listed] == [(2, ["trusted"]), (3, ["trusted"])]
        checkpointer.label(2, "trusted", remove=True)
        assert checkpointer.labels() == {3: ["trusted"]}
