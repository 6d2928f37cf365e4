"""Loads of parts of a step, loads that do not fit into memory, and destinations that share memory or are read-only."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy
import pytest

import rapidraid
from rapidraid import errors

torch = pytest.importorskip("torch")


def staged(cluster: rapidraid.LocalCluster, job: str, state: dict[str, Any]) -> rapidraid.Checkpointer:
    """Saves a state and destroys the host's copy. Returns a checkpointer of another launch."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, state)
    checkpointer.wait()
    checkpointer.close()
    cluster.forget_memory()
    return rapidraid.Checkpointer(job, config=cluster.config)


def layers(value: float) -> dict[str, Any]:
    """Returns thirty-two tensors of 256 KiB, one of 4 MiB, and a plain value."""
    state: dict[str, Any] = {str(at): torch.full((256, 256), value + at) for at in range(32)}
    return {"layers": state, "long": torch.arange(1 << 20, dtype=torch.float32) * value, "epoch": int(value)}


def test_only_what_is_wanted_is_read(cluster: rapidraid.LocalCluster, job: str, caplog: pytest.LogCaptureFixture) -> None:
    """A part below a quarter of a step is read by ranges, and a log line says so; else the whole step is read."""
    saved = layers(3.0)
    checkpointer = staged(cluster, job, saved)
    into = layers(0.0)
    caplog.clear()
    assert checkpointer.load(into, include=lambda name: name in ("layers/7", "epoch")) == 1
    assert torch.equal(into["layers"]["7"], saved["layers"]["7"])
    assert into["epoch"] == 3
    assert torch.equal(into["layers"]["8"], layers(0.0)["layers"]["8"])
    assert "only the parts that are wanted are read" in caplog.text
    assert json.loads(cluster.command("stage", "--status", "--json"))["used_bytes"] == 0
    assert torch.equal(checkpointer.read(1, "layers/31"), saved["layers"]["31"])
    assert checkpointer.read(1, "epoch") == 3
    caplog.clear()
    assert checkpointer.load(into, include=lambda name: name.startswith("layers/")) == 1
    assert "only the parts that are wanted are read" not in caplog.text
    assert all(torch.equal(into["layers"][name], saved["layers"][name]) for name in saved["layers"])


def test_a_step_that_does_not_fit_is_loaded_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    """The staging memory has no room for the step beside the segments of the launch that loads it."""
    with rapidraid.local_cluster(6, settings={"code.list": "6,4"}, staging={"memory": "24MiB"}) as cluster:
        saved = layers(2.0)
        checkpointer = staged(cluster, "large", saved)
        into = layers(0.0)
        checkpointer.prepare(into)
        caplog.clear()
        assert checkpointer.load(into) == 1
        assert "is read in parts" in caplog.text
        assert "do not fit" in caplog.text
        assert torch.equal(into["long"], saved["long"])
        assert all(torch.equal(into["layers"][name], saved["layers"][name]) for name in saved["layers"])
        assert checkpointer.save(2, into)
        checkpointer.wait()


def test_destinations_that_share_memory(cluster: rapidraid.LocalCluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the step has two contents for one memory, the last one wins, as with a plain load."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, {"a": torch.full((64,), 1.0), "b": torch.full((64,), 2.0), "c": torch.full((32,), 3.0)})
    tied = torch.full((64,), 5.0)
    checkpointer.wait()
    both = torch.zeros(64)
    checkpointer.load({"a": both, "b": both, "c": torch.zeros(32)})
    assert torch.equal(both, torch.full((64,), 2.0))
    base = torch.zeros(96)
    checkpointer.load({"a": base[:64], "b": torch.zeros(64), "c": base[32:64]})
    assert torch.equal(base, torch.cat([torch.full((32,), 1.0), torch.full((32,), 3.0), torch.zeros(32)]))
    second = rapidraid.Checkpointer(f"{job}-tied", config=cluster.config)
    second.save(1, {"a": tied, "b": tied})
    second.wait()
    both = torch.zeros(64)
    with monkeypatch.context() as patched:
        # Weights that are tied in the state and in the step are loaded once, directly into place.
        patched.setattr("rapidraid._planned_load.put_scratch", lambda *_: pytest.fail("it was loaded beside its place"))
        second.load({"a": both, "b": both})
    assert torch.equal(both, tied)


@pytest.mark.parametrize("what", ["expanded", "read-only"])
def test_destinations_that_cannot_be_written(cluster: rapidraid.LocalCluster, job: str, what: str) -> None:
    """Such destinations are refused by name before anything is changed."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, {"a": torch.ones(4, 6), "b": numpy.ones((4, 6))})
    checkpointer.wait()
    into: dict[str, Any] = {"a": torch.zeros(4, 6), "b": numpy.zeros((4, 6))}
    if what == "expanded":
        into["a"] = torch.zeros(4, 1).expand(4, 6)
    else:
        into["b"].flags.writeable = False
    with pytest.raises(errors.InvalidError, match=what):
        checkpointer.load(into)
    assert into["a"].sum() == 0 and into["b"].sum() == 0


def test_names_that_no_parameter_takes_are_named(cluster: rapidraid.LocalCluster, job: str) -> None:
    """An optimizer's state for a parameter that the model does not have is refused by name."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, {"optimizer": optimizer})
    checkpointer.wait()
    fewer = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(errors.InvalidError, match="for which the state has no place"):
        checkpointer.load({"optimizer": fewer})


def test_one_thread_saves_while_another_one_waits(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A thread that waits for a commit does not prevent others from saving."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    state = {"a": torch.ones(1000)}
    checkpointer.prepare(state)
    for node in cluster.nodes[3:]:
        cluster.pause(node)
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            checkpointer.wait(1, timeout=60)
            ended.append(None)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            ended.append(error)

    try:
        assert checkpointer.save(1, state)
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert checkpointer.save(2, state)
        assert not ended, ended
        with pytest.raises(errors.DeadlineError, match=r"the commit took longer than 0\.2 s: step 2 is "):
            checkpointer.wait(2, timeout=0.2)
    finally:
        for node in cluster.nodes[3:]:
            cluster.resume(node)
    waiting.join()
    assert ended == [None]
    checkpointer.wait(2)
