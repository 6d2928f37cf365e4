"""``torch.distributed.checkpoint`` over the storage: its Writer, Reader and stager."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ranks import once

import rapidraid
from rapidraid import errors

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
adapter = pytest.importorskip("rapidraid.torch")

from torch.distributed.checkpoint import filesystem  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402

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
    dcp.save(saved, checkpoint_id=f"{job}/1", storage_writer=adapter.Writer(config=cluster.config))
    other = state(2)
    dcp.save(other, checkpoint_id=f"{job}/step-2", storage_writer=adapter.Writer(config=cluster.config))
    loaded = state(3)
    dcp.load(loaded, checkpoint_id=f"{job}/1", storage_reader=adapter.Reader(config=cluster.config))
    assert_equal(saved, loaded)
    assert adapter.Reader(f"{job}/1", config=cluster.config).read_metadata().version == filesystem.CURRENT_DCP_VERSION
    newest = state(3)
    dcp.load(newest, checkpoint_id=job, storage_reader=adapter.Reader(config=cluster.config))
    assert_equal(other, newest)
    again = state(3)
    assert adapter.load(again, f"{job}/1", config=cluster.config) == 1
    assert_equal(saved, again)
    with pytest.raises(errors.NotFoundError, match="does not have more"):
        adapter.load({**again, "more": 1}, job, config=cluster.config)


def test_what_one_door_has_saved_the_other_one_loads(cluster: rapidraid.LocalCluster, job: str) -> None:
    saved = state(1)
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"model": saved["model"], "step": 1, "list": saved["list"]})
        checkpointer.wait()
        loaded = {key: value for key, value in state(2).items() if key != "optimizer"}
        dcp.load(loaded, checkpoint_id=f"{job}/1", storage_reader=adapter.Reader(checkpointer=checkpointer))
        assert_equal({**loaded}, {key: value for key, value in saved.items() if key != "optimizer"})
        other = {key: value for key, value in state(3).items() if key != "optimizer"}
        dcp.save(other, checkpoint_id=f"{job}/2", storage_writer=adapter.Writer(checkpointer=checkpointer))
        into = {key: value for key, value in state(4).items() if key != "optimizer"}
        assert checkpointer.load(into) == 2
        assert_equal(into, other)
        assert checkpointer.read(2, "model/0.weight").equal(other["model"][0].weight)


def test_async_saves_keep_what_was_there_when_they_returned(cluster: rapidraid.LocalCluster, job: str) -> None:
    writer = adapter.Writer(config=cluster.config)
    tensor = torch.zeros(100_000)
    futures = []
    for step in range(1, 5):
        tensor.fill_(step)
        way = dcp.async_save if step % 2 else None
        if way is not None:
            futures.append(way({"a": tensor, "step": step}, checkpoint_id=f"{job}/{step}", storage_writer=writer))
        else:
            futures.append(adapter.async_save({"a": tensor, "step": step}, f"{job}/{step}", writer=writer))
        tensor.fill_(-1)
        futures[-1].result()
    for step in range(1, 5):
        loaded = {"a": torch.empty(100_000), "step": 0}
        dcp.load(loaded, checkpoint_id=f"{job}/{step}", storage_reader=adapter.Reader(config=cluster.config))
        assert loaded["step"] == step and bool((loaded["a"] == step).all())


def test_async_staging_returns_before_the_copy(cluster: rapidraid.LocalCluster, job: str) -> None:
    writer = adapter.Writer(config=cluster.config, async_staging=True)
    tensor = torch.ones(1_000_000)
    for step in (1, 2):
        tensor.fill_(step)
        response = dcp.async_save({"a": tensor}, checkpoint_id=f"{job}/{step}", storage_writer=writer)
        response.staging_completion.result()
        tensor.fill_(-1)
        response.upload_completion.result()
        loaded = {"a": torch.zeros(1_000_000)}
        dcp.load(loaded, checkpoint_id=f"{job}/{step}", storage_reader=adapter.Reader(config=cluster.config))
        assert bool((loaded["a"] == step).all())
    writer.close()


def test_sharded_states_load_on_other_numbers_of_ranks(cluster: rapidraid.LocalCluster, job: str) -> None:
    saved = ""
    for ranks, steps in [(4, 6), (2, 6), (3, 1)]:
        code, lines = once(PROGRAM, ranks, "CONFIG", job, str(steps), configs=[cluster.config])
        assert code == 0, "\n".join(lines)
        loaded = next(line for line in lines if line.startswith("loaded "))
        assert not saved or loaded.split(" ")[1:3] == saved.split(" ")[1:3], (loaded, saved)
        saved = next(line for line in reversed(lines) if line.startswith("saved "))


def test_a_named_step_survives_the_death_of_all_ranks(cluster: rapidraid.LocalCluster, job: str) -> None:
    pids: set[int] = set()

    def kill(line: str) -> None:
        if match := re.fullmatch(r"rank \d pid (\d+) staged 2", line):
            pids.add(int(match[1]))
            if len(pids) == 2:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)

    code, lines = once(PROGRAM, 2, "CONFIG", job, "3", "named", on_line=kill, configs=[cluster.config])
    assert code != 0 and len(pids) == 2, "\n".join(lines)
    code, lines = once(PROGRAM, 2, "CONFIG", job, "1", "process", configs=[cluster.config])
    assert code == 0, "\n".join(lines)
    assert any(line.startswith("loaded 2 ") for line in lines), lines
    saved = next(line for line in lines if line.startswith("saved 3 "))
    code, lines = once(PROGRAM, 1, "CONFIG", job, "0", configs=[cluster.config])
    assert next(line for line in lines if line.startswith("loaded 3 ")).split(" ")[2] == saved.split(" ")[2]


def test_a_process_of_dcp_saves_more_tensors_than_it_can_have_descriptors(cluster: rapidraid.LocalCluster, job: str) -> None:
    program = str(Path(__file__).parent / "programs" / "dcp_process.py")
    code, lines = once(program, 1, "CONFIG", job, "1000", "2", configs=[cluster.config])
    assert code == 0, "\n".join(lines)
    assert [line for line in lines if line.startswith("loaded ")] == ["loaded 1", "loaded 2"]


def test_without_collectives_a_rank_that_fails_does_not_keep_the_others_waiting(cluster: rapidraid.LocalCluster, job: str) -> None:
    program = str(Path(__file__).parent / "programs" / "dcp_refused.py")
    code, lines = once(program, 2, "CONFIG", job, configs=[cluster.config])
    assert code == 0, "\n".join(lines)
    told = {line.split(" ")[1]: line for line in lines if line.startswith("rank ")}
    assert "no such data" in told["1"] and "rank 1" in told["0"].partition(": ")[2], lines
    assert int(told["0"].split(" ")[3]) < 250, "the commit timeout is 300 s here"
    assert adapter.Reader(f"{job}/3", config=cluster.config).read_metadata() is not None


class Halving(DefaultSavePlanner):  # type: ignore[misc]
    """Saves floating-point tensors as float16."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [
            item
            if item.tensor_data is None
            else dataclasses.replace(
                item,
                tensor_data=dataclasses.replace(
                    item.tensor_data, properties=dataclasses.replace(item.tensor_data.properties, dtype=torch.float16)
                ),
            )
            for item in plan.items
        ]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.to(torch.float16) if isinstance(data, torch.Tensor) else data


def test_planners_that_change_data_are_honoured(cluster: rapidraid.LocalCluster, job: str) -> None:
    saved = {"weight": torch.randn(64, 3), "nested": {"number": 3, "text": "x"}}
    dcp.save(saved, checkpoint_id=f"{job}/1", storage_writer=adapter.Writer(config=cluster.config), planner=Halving())
    loaded = {"weight": torch.zeros(64, 3), "nested": {"number": 0, "text": ""}}
    reader = adapter.Reader(config=cluster.config)
    with pytest.raises(dcp.api.CheckpointException, match="cast=True"):
        dcp.load(loaded, checkpoint_id=f"{job}/1", storage_reader=reader)
    dcp.load(loaded, checkpoint_id=f"{job}/1", storage_reader=adapter.Reader(config=cluster.config, cast=True))
    assert loaded["weight"].equal(saved["weight"].half().float()) and loaded["nested"] == saved["nested"]
    whole = torch.distributed.checkpoint.state_dict_loader._load_state_dict_from_keys(
        {"nested"}, checkpoint_id=f"{job}/1", storage_reader=reader
    )
    assert whole == {"nested": {"number": 3, "text": "x"}}


def test_bad_input_is_refused_by_name(cluster: rapidraid.LocalCluster, job: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = adapter.Writer(config=cluster.config)
    one = {"a": torch.ones(3)}
    for wrong in ("", "a b/1", f"{job}/one", f"{job}/1/2", "/checkpoints/gpt/100", f"{job}/1-2"):
        with pytest.raises(errors.InvalidError, match="names no step"):
            dcp.save(one, checkpoint_id=wrong, storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="has no step"):
        dcp.save(one, checkpoint_id=job, storage_writer=writer)
    dcp.save(one, checkpoint_id=f"rapidraid://{job}/1", storage_writer=writer)
    for state, why in [
        ({"a": torch.ones(3, device="meta")}, "meta device"),
        ({"a": torch.ones(3).to_sparse()}, "layout"),
        ({"a": object()}, "allow_pickle=True"),
    ]:
        with pytest.raises(dcp.api.CheckpointException, match=why):
            dcp.save(state, checkpoint_id=f"{job}/2", storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="is saved already"):
        dcp.save(one, checkpoint_id=f"{job}/1", storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="allow_pickle=True"):
        dcp.save(one, checkpoint_id=f"{job}/2", storage_writer=adapter.Writer(config=cluster.config, allow_pickle=True))
    with pytest.raises(dcp.api.CheckpointException, match="keep=3"):
        dcp.save(one, checkpoint_id=f"{job}/2", storage_writer=adapter.Writer(config=cluster.config, keep=3))
    with pytest.raises(errors.InvalidError, match="skip"):
        adapter.Writer(when_full="skip")
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch|Missing key"):
        dcp.load({"b": torch.ones(3)}, checkpoint_id=f"{job}/1", storage_reader=adapter.Reader(config=cluster.config))
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(one, checkpoint_id=f"{job}/7", storage_reader=adapter.Reader(config=cluster.config))
    assert f"a load fails: {job}/7 is not committed" in caplog.text
    # The launch goes on.
    dcp.save(one, checkpoint_id=f"{job}/2", storage_writer=writer)


def test_a_planner_that_caches_its_plan_saves_all_of_it(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Also with a new Writer for each step, and after a plan of another state."""
    full = {"a": torch.ones(10), "b": torch.zeros(10)}
    for step in range(1, 5):
        full["a"].fill_(step)
        cached = step != 3
        saved = full if cached else {"a": full["a"]}
        planner = DefaultSavePlanner(enable_plan_caching=cached)
        planner._cached_plans_key = job
        dcp.save(saved, checkpoint_id=f"{job}/{step}", storage_writer=adapter.Writer(config=cluster.config), planner=planner)
        loaded = {name: torch.full((10,), -1.0) for name in saved}
        dcp.load(loaded, checkpoint_id=f"{job}/{step}", storage_reader=adapter.Reader(config=cluster.config))
        assert all(loaded[name].equal(saved[name]) for name in saved)


class Slow(DefaultSavePlanner):  # type: ignore[misc]
    """Waits in the middle of a save."""

    def __init__(self, begun: threading.Event, go_on: threading.Event) -> None:
        super().__init__()
        self.begun, self.go_on = begun, go_on

    def finish_plan(self, new_plan: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(60)
        return super().finish_plan(new_plan)


def test_two_saves_at_once_by_one_writer_keep_apart(cluster: rapidraid.LocalCluster, job: str) -> None:
    writer = adapter.Writer(config=cluster.config)
    dcp.save({"a": torch.zeros(10)}, checkpoint_id=f"{job}/1", storage_writer=writer)
    begun, go_on = threading.Event(), threading.Event()
    slow = dcp.async_save({"a": torch.full((10,), 2.0)}, checkpoint_id=f"{job}/2", storage_writer=writer, planner=Slow(begun, go_on))
    assert begun.wait(60)
    third = dcp.async_save({"a": torch.full((10,), 4.0)}, checkpoint_id=f"{job}/4", storage_writer=writer, planner=Slow(begun, go_on))
    go_on.set()
    slow.result()
    third.result()
    dcp.save({"a": torch.full((10,), 5.0)}, checkpoint_id=f"{job}/5", storage_writer=writer)
    for step in (2, 4, 5):
        loaded = {"a": torch.zeros(10)}
        dcp.load(loaded, checkpoint_id=f"{job}/{step}", storage_reader=adapter.Reader(config=cluster.config))
        assert bool((loaded["a"] == step).all()), step


def test_a_step_that_fails_costs_no_other_one(cluster: rapidraid.LocalCluster, job: str) -> None:
    writer = adapter.Writer(config=cluster.config)
    one = {"a": torch.ones(10)}
    dcp.save(one, checkpoint_id=f"{job}/1", storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="is saved already"):
        dcp.async_save(one, checkpoint_id=f"{job}/1", storage_writer=writer).result()
    with pytest.raises(errors.InvalidError):
        dcp.async_save(one, checkpoint_id="no step", storage_writer=writer).result()
    dcp.async_save(one, checkpoint_id=f"{job}/2", storage_writer=writer).result()
    adapter.async_save(one, f"{job}/3", writer=writer).result()
    assert adapter.Reader(config=cluster.config).newest(job) == 3


def test_a_wait_goes_on_when_the_daemon_has_died(job: str) -> None:
    with rapidraid.local_cluster() as running:
        writer = adapter.Writer(config=running.config)
        for node in running.nodes[3:]:
            running.pause(node)
        future = adapter.async_save({"a": torch.ones(10)}, f"{job}/1", writer=writer)
        running.kill("staging")
        for node in running.nodes[3:]:
            running.resume(node)
        future.result(60)
        assert writer.checkpointer.latest() == 1
        writer.checkpointer.leave()


def test_states_that_change_their_layout_are_saved_all_the_same(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Values grow, tensors are untied, arrays come and go."""
    writer = adapter.Writer(config=cluster.config)
    weight = torch.ones(10)
    states: list[dict[str, Any]] = [
        {"w": weight, "ema": weight, "losses": [0.5]},
        {"w": weight, "ema": weight, "losses": [0.25] * 200_000},
        {"w": weight, "ema": torch.zeros(10), "losses": []},
        {"w": weight, "ema": weight, "losses": [], "array": np.arange(4.0), "single": np.float32(3.5)},
    ]
    for step, saved in enumerate(states, 1):
        dcp.save(saved, checkpoint_id=f"{job}/{step}", storage_writer=writer)
        loaded = {"w": torch.zeros(10), "ema": torch.zeros(10), "losses": None}
        if "array" in saved:
            loaded.update(array=np.zeros(4), single=None)
        dcp.load(loaded, checkpoint_id=f"{job}/{step}", storage_reader=adapter.Reader(config=cluster.config))
        assert all(loaded[name].equal(saved[name]) for name in ("w", "ema")) and loaded["losses"] == saved["losses"]
        if "array" in saved:
            assert np.array_equal(loaded["array"], saved["array"]) and loaded["single"] == 3.5


def test_an_older_torch_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint._state_dict_stager", None)
    monkeypatch.delitem(sys.modules, "rapidraid._shared_copies")
    spec = importlib.util.spec_from_file_location("rapidraid.older", adapter.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=f"needs torch 2.9 or later.*this is torch {torch.__version__}".replace("+", "[+]")):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_part_of_a_larger_tensor_is_saved_by_its_plan_and_refused_elsewhere(cluster: rapidraid.LocalCluster, job: str) -> None:
    """DCP's ``CheckpointableTensor`` is a plain tensor with attributes: a rank's part would be taken for the whole."""

    def halves(fill: float) -> dict[str, torch.Tensor]:
        part = torch.full((4, 2), fill)
        vars(part).update(
            global_shape=(4, 2), global_offsets=((0, 0), (2, 0)), local_offsets=((0, 0), (2, 0)), local_sizes=((2, 2), (2, 2))
        )
        return {"a": part}

    if not hasattr(dcp, "CheckpointableTensor"):
        pytest.skip("this torch has no CheckpointableTensor")
    adapter.async_save(halves(3.0), f"{job}/1", config=cluster.config).result()
    into = halves(0.0)
    dcp.load(into, checkpoint_id=f"{job}/1", storage_reader=adapter.Reader(config=cluster.config))
    assert torch.equal(into["a"], torch.full((4, 2), 3.0))
    with pytest.raises(errors.InvalidError, match="load it by dcp.load"):
        adapter.load(halves(0.0), f"{job}/1", config=cluster.config)
    with (
        rapidraid.Checkpointer(f"{job}-own", config=cluster.config) as checkpointer,
        pytest.raises(errors.InvalidError, match="a part of a tensor"),
    ):
        checkpointer.save(1, halves(1.0))
