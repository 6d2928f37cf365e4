"""``torch.distributed.checkpoint`` over the storage: its Writer, Reader and stager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import once

import rapidraid

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
door = pytest.importorskip("rapidraid.torch")

PROGRAM = str(Path(__file__).parent / "programs" / "dcp.py")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(seed: int) -> dict[str, Any]:
    """Returns a state of a model, its optimizer and plain values, after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed, "list": [torch.full((3,), float(seed)), {"a": torch.ones(2) * seed}]}


def plain(value: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the tensors and values of a state, by name."""
    flat = {key: item.state_dict() if hasattr(item, "state_dict") else item for key, item in value.items()}
    found, _ = torch.distributed.checkpoint._nested_dict.flatten_state_dict(flat)
    return sorted(found.items())


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = plain(one), plain(other)
    assert [name for name, _ in first] == [name for name, _ in second]
    for (name, a), (_, b) in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


def test_a_script_saves_and_loads_by_one_argument(cluster: rapidraid.LocalCluster, job: str) -> None:
    saved = state(1)
    dcp.save(saved, checkpoint_id=f"{job}/1", storage_writer=door.Writer(config=cluster.config))
    other = state(2)
    dcp.save(other, checkpoint_id=f"{job}/step-2", storage_writer=door.Writer(config=cluster.config))
    loaded = state(3)
    dcp.load(loaded, checkpoint_id=f"{job}/1", storage_reader=door.Reader(config=cluster.config))
    assert_equal(saved, loaded)
    newest = state(3)
    dcp.load(newest, checkpoint_id=job, storage_reader=door.Reader(config=cluster.config))
    assert_equal(other, newest)


def test_what_one_door_has_saved_the_other_one_loads(cluster: rapidraid.LocalCluster, job: str) -> None:
    saved = state(1)
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"model": saved["model"], "step": 1, "list": saved["list"]})
        checkpointer.wait()
        loaded = {key: value for key, value in state(2).items() if key != "optimizer"}
        dcp.load(loaded, checkpoint_id=f"{job}/1", storage_reader=door.Reader(checkpointer=checkpointer))
        assert_equal({**loaded}, {key: value for key, value in saved.items() if key != "optimizer"})
        other = {key: value for key, value in state(3).items() if key != "optimizer"}
        dcp.save(other, checkpoint_id=f"{job}/2", storage_writer=door.Writer(checkpointer=checkpointer))
        into = {key: value for key, value in state(4).items() if key != "optimizer"}
        assert checkpointer.load(into) == 2
        assert_equal(into, other)
        assert checkpointer.read(2, "model/0.weight").equal(other["model"][0].weight)


def test_async_saves_keep_what_was_there_when_they_returned(cluster: rapidraid.LocalCluster, job: str) -> None:
    writer = door.Writer(config=cluster.config)
    tensor = torch.zeros(100_000)
    futures = []
    for step in range(1, 5):
        tensor.fill_(step)
        way = dcp.async_save if step % 2 else None
        if way is not None:
            futures.append(way({"a": tensor, "step": step}, checkpoint_id=f"{job}/{step}", storage_writer=writer))
        else:
            futures.append(door.async_save({"a": tensor, "step": step}, f"{job}/{step}", writer=writer))
        tensor.fill_(-1)
        futures[-1].result()
    for step in range(1, 5):
        loaded = {"a": torch.empty(100_000), "step": 0}
        dcp.load(loaded, checkpoint_id=f"{job}/{step}", storage_reader=door.Reader(config=cluster.config))
        assert loaded["step"] == step and bool((loaded["a"] == step).all())


def test_sharded_states_load_on_other_numbers_of_ranks(cluster: rapidraid.LocalCluster, job: str) -> None:
    saved = ""
    for ranks, steps in [(4, 6), (2, 6), (3, 1)]:
        code, lines = once(PROGRAM, ranks, "CONFIG", job, str(steps), configs=[cluster.config])
        assert code == 0, "\n".join(lines)
        loaded = next(line for line in lines if line.startswith("loaded "))
        assert not saved or loaded.split(" ")[1:3] == saved.split(" ")[1:3], (loaded, saved)
        saved = next(line for line in reversed(lines) if line.startswith("saved "))
