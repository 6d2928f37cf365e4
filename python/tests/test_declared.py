"""Which ranks share what: the kinds of modules and tensors, and the ranks of a launch."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from held import HeldStep

from rapidraid import errors, per_rank, replicated
from rapidraid._leaves import is_dtensor, show
from rapidraid._ranks import Group
from rapidraid.state import flatten

torch = pytest.importorskip("torch")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    """Returns torch.distributed with a process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def make() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def shared_of(state: dict[str, Any]) -> dict[str, bool]:
    """Returns for each name of a rank of two whether it is shared."""
    return {show(leaf.keys): not leaf.is_private for leaf in flatten(state, 2).leaves}


def test_a_compiled_ddp_module_is_one_of_ddp(one_rank: Any) -> None:
    """Its parameters are the same on all ranks, its buffers are not, and its optimizer follows the parameters."""
    module = make()
    parallel = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    plain = shared_of({"model": parallel, "optimizer": optimizer})
    compiled = {"model": torch.compile(parallel), "optimizer": optimizer}
    assert not flatten(compiled, 2).warnings
    assert {name.replace("_orig_mod.module.", ""): is_shared for name, is_shared in shared_of(compiled).items()} == plain
    assert plain["model/0.weight"] and not plain["model/1.running_mean"] and plain["optimizer/groups[0]/lr"]


def test_a_compiled_module_ignores_what_ddp_ignores(one_rank: Any) -> None:
    """A parameter that DDP was told to ignore is each rank's own."""
    module = make()
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias"])
    found = shared_of({"model": torch.compile(torch.nn.parallel.DistributedDataParallel(module))})
    assert found["model/_orig_mod.module.0.weight"] and not found["model/_orig_mod.module.0.bias"]


def test_what_was_saved_as_private_to_ranks_loads_into_a_compiled_ddp_module(one_rank: Any) -> None:
    """Each rank takes its own copy."""

    def compiled(value: float) -> dict[str, Any]:
        module = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(module.weight, value)
        return {"model": torch.compile(torch.nn.parallel.DistributedDataParallel(module))}

    # A plain module of the same names is each rank's own.
    plain = torch.nn.ModuleDict({"_orig_mod": torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})})
    torch.nn.init.constant_(plain["_orig_mod"]["module"].weight, 3.0)
    into = compiled(0.0)
    HeldStep([{"model": plain}, {"model": plain}]).load(into, 1, 2)
    assert all(value.eq(3.0).all() for name, value in into["model"].named_parameters() if name.endswith("weight"))


def test_a_compiled_module_keeps_its_names() -> None:
    """Steps of compiled modules without DDP load as before."""
    found = shared_of({"model": torch.compile(make())})
    assert "model/_orig_mod.0.weight" in found and not any(found.values())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_refused(one_rank: Any, use_orig_params: bool) -> None:
    """The module, a module around it, and its optimizer are refused by name, whatever is declared."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(make(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    around = torch.nn.ModuleDict({"inner": module})
    for state, what in (
        ({"model": module, "optimizer": optimizer}, "model is a FullyShardedDataParallel module"),
        ({"parts": [replicated(around)]}, r"parts\[0\] is a FullyShardedDataParallel module"),
        ({"model": torch.compile(module)}, "model is a FullyShardedDataParallel module"),
        ({"optimizer": per_rank(optimizer)}, "optimizer is an optimizer of a FullyShardedDataParallel module"),
        ({"optimizer": optimizer, "model": module}, "optimizer is an optimizer of a FullyShardedDataParallel module"),
    ):
        for world in (1, 2):
            with pytest.raises(errors.InvalidError, match=what) as raised:
                flatten(state, world)
            assert "fully_shard" in raised.value.hint


def test_dtensors_of_torch_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """That release has ``torch.distributed.tensor`` without ``DTensor``, which is in a module of another name."""

    class Spread(torch.Tensor):
        pass

    public, private = types.ModuleType("torch.distributed.tensor"), types.ModuleType("torch.distributed._tensor")
    monkeypatch.setitem(sys.modules, public.__name__, public)
    monkeypatch.delitem(sys.modules, private.__name__, raising=False)
    assert not is_dtensor(torch.ones(1)) and not is_dtensor(torch.ones(1).as_subclass(Spread))
    private.DTensor = Spread  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, private.__name__, private)
    assert not is_dtensor(torch.ones(1)) and is_dtensor(torch.ones(1).as_subclass(Spread))


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a launch of its own, and the launches would end each other."""
    for world in ("", "1", "x"):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert (Group(None, False).rank, Group(None, False).world) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(errors.InvalidError, match="WORLD_SIZE is 4, and there is no process group") as raised:
        Group(None, False)
    assert "init_process_group" in raised.value.hint and "alone=True" in raised.value.hint
    assert Group(None, True).world == 1
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(errors.InvalidError, match="group= is given, and there is no process group"):
        Group(object(), False)


def test_a_process_group_counts_more_than_the_environment(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (Group(None, False).rank, Group(None, False).world) == (0, 1)


def test_a_rank_outside_the_group_is_refused() -> None:
    """The group of other ranks cannot carry the launch of this one."""
    import torch.distributed as dist

    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=2, world_size=4)
    try:
        group = dist.new_group([0, 1])
        with pytest.raises(errors.InvalidError, match="rank 2 is not in the process group that group= names"):
            Group(group, False)
        assert Group(group, True).world == 1
        assert Group(dist.new_group([2, 3]), False).rank == 0
    finally:
        dist.destroy_process_group()
