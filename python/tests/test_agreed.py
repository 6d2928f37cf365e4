"""What the ranks of a launch have to agree on: settings of optimizers, names, and segments of growing values."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held import HeldRanks
from ranks import launch
from test_stages import named_stage

import rapidraid
from rapidraid import _native, errors, per_rank, replicated
from rapidraid import _plan as plans
from rapidraid._leaves import is_dtensor, key_of, show
from rapidraid._modules import reshard
from rapidraid._plan import Plan, make_plan
from rapidraid._ranks import Group
from rapidraid.state import flatten

torch = pytest.importorskip("torch")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")


@pytest.fixture
def rank_of() -> Iterator[Callable[[int, int], None]]:
    """Returns a function that makes this process a rank of a launch, by the rank and the number of ranks."""
    import torch.distributed as dist

    yield lambda rank, world: dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world)
    dist.destroy_process_group()


def prepare(states: list[dict[str, Any]]) -> list[Any]:
    """Returns the plan or the error of each rank."""
    ranks = HeldRanks(len(states))

    def one(rank: int) -> Plan:
        return make_plan(flatten(states[rank], len(states)), rank, len(states), lambda mine: ranks.gather(rank, mine), False)

    return ranks.run(one)


def test_settings_that_differ_between_stages_are_refused() -> None:
    """The optimizers have one name: the stages would get each other's rates. Names of their own are the remedy."""
    states = [named_stage(rank, 1.0) for rank in range(4)]
    assert all(isinstance(plan, Plan) for plan in prepare(states)), "equal settings are shared"
    for state in states[2:]:
        state["optimizer"].param_groups[0]["lr"] = 0.3
    for error in prepare(states):
        assert isinstance(error, errors.InvalidError)
        assert "optimizer/groups[0]/lr is said to be the same on all ranks, and differs between the ranks 0 and 2" in str(error)
        assert 'f"optimizer{stage}"' in error.hint
    named = [{f"optimizer{rank // 2}" if key == "optimizer" else key: value for key, value in states[rank].items()} for rank in range(4)]
    assert all(isinstance(plan, Plan) for plan in prepare(named))


def test_a_scheduler_that_differs_between_stages_is_refused() -> None:
    """Its rates at the start, too, are of one optimizer."""
    states = [named_stage(rank, 1.0) for rank in range(4)]
    for rank, state in enumerate(states):
        state["scheduler"] = torch.optim.lr_scheduler.ConstantLR(state.pop("optimizer"), factor=0.5 + rank // 2 / 10)
    assert all("scheduler/" in str(error) and "is said to be the same" in str(error) for error in prepare(states))
    states = [{**named_stage(rank, 1.0), "loss": per_rank(float(rank))} for rank in range(4)]
    assert all(isinstance(plan, Plan) for plan in prepare(states))


def test_values_that_differ_between_equal_layouts_are_refused() -> None:
    """One rank would store its value for all."""
    for differing in ([1, 1, 2, 2], [{"a": 0.5}] * 3 + [{"a": 0.25}]):
        for error in prepare([{"weight": replicated(torch.ones(4)), "counters": replicated(value)} for value in differing]):
            assert isinstance(error, errors.InvalidError) and "counters" in str(error)
            assert "is said to be the same on all ranks, and differs between the ranks 0 and" in str(error)
    states = [named_stage(0, 1.0) for _ in range(4)]
    for rank, state in enumerate(states):
        state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 10 + rank // 2)
    assert all("scheduler/step_size is said to be the same" in str(error) for error in prepare(states))
    assert all(isinstance(plan, Plan) for plan in prepare([named_stage(0, 1.0) for _ in range(4)]))


def test_a_stage_by_position_is_refused(rank_of: Callable[[int, int], None]) -> None:
    """The first parameter of each stage would have one name, and one stage's moments would be lost."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank_of(2, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model = torch.nn.Sequential(OrderedDict(layer1=torch.nn.Linear(4, 4, bias=False)))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(errors.InvalidError, match=r"optimizer knows its parameters only by position, and ranks \[0, 1\]") as raised:
        flatten({"model": model.state_dict(), "optimizer": optimizer}, 4)
    assert "the module itself" in raised.value.hint
    assert flatten({"model": model, "optimizer": optimizer}, 4).leaves
    assert flatten({"optimizer": optimizer}, 2, [2, 3]).leaves, "the mesh has all ranks of this launch"


def test_torch_before_2_8_wants_a_group(rank_of: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function for the ranks of a group looks the group up in a dict."""
    import torch.distributed as dist

    rank_of(0, 2)
    known = {dist.group.WORLD: [0, 1]}
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(known[group]))
    assert Group(None, False).ranks == [0, 1]
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert not any(leaf.is_private for leaf in flatten({"model": module}, 2).leaves)


def test_a_forked_child_enters_no_collective(rank_of: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    rank_of(1, 2)
    group = Group(None, False)
    monkeypatch.setattr("rapidraid._ranks.os.getpid", lambda: -1)
    with pytest.raises(errors.ForkedError, match="was forked from rank 1"):
        group.gather(1)


def test_keys_of_more_than_64_bits_are_refused_by_name() -> None:
    assert key_of(-(1 << 63), ()) == (1, -(1 << 63))
    for key in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(errors.InvalidError, match=f"the dict at seen has the key {key}"):
            key_of(key, ((0, "seen"),))


class Segment(bytearray):
    """A segment in the memory of this process."""

    def _fill(self, direct: list[tuple[int, int, int]], _threads: int) -> None:
        for offset, address, length in direct:
            self[offset : offset + length] = ctypes.string_at(address, length)


def alone(state: dict[str, Any]) -> Plan:
    return make_plan(flatten(state, 1), 0, 1, lambda mine: [mine], False)


def test_an_interrupt_between_segments_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt adds the segment again, and each save copies into its own."""
    state = {"weight": torch.arange(4.0) + 1}
    plan = alone(state)
    segments = [Segment(plan.segment_bytes - _native.HEADER_BYTES) for _ in range(2)]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("view_of", "Mapped"):
        with monkeypatch.context() as patched:
            patched.setattr(plans, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                plan.add_segment(segments[0])
        assert plan.segments == 0
    for segment in segments:
        plan.add_segment(segment)
    plan.copy(1, plan.sources(flatten(state, 1), False), "ab" * 16, 1)
    offset = plan.owned[0].offset
    assert torch.frombuffer(segments[1], dtype=torch.float32, count=4, offset=offset).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert not any(segments[0])


def test_values_that_grow_get_longer_segments() -> None:
    """The parts of tensors stay where they are, so only this rank has to make its segments anew."""
    state: dict[str, Any] = {"weight": torch.arange(4.0), "history": [0.5]}
    plan = alone(state)
    before, offset = plan.segment_bytes, plan.owned[0].offset
    state["history"] = [0.5] * 300_000
    sources = plan.sources(flatten(state, 1), False)
    assert plan.needed_bytes(sources) > before and plan.sources_if_fitting(flatten(state, 1), False) is None
    plan.grow(sources)
    assert plan.needed_bytes(sources) <= plan.segment_bytes and plan.owned[0].offset == offset
    plan.add_segment(Segment(plan.segment_bytes - _native.HEADER_BYTES))
    plan.copy(0, sources, "ab" * 16, 1)


def test_the_error_for_a_new_entry_speaks_of_the_first_step() -> None:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    state = {"model": replicated(module), "optimizer": optimizer}
    plan = alone(state)
    module(torch.ones(1)).backward()
    optimizer.step()
    with pytest.raises(errors.InvalidError, match="is new since the state was prepared") as raised:
        plan.sources(flatten(state, 1), False)
    assert "a fresh optimizer has no state before its first step" in raised.value.hint


def test_a_module_after_an_evaluation_is_sharded_again(rank_of: Callable[[int, int], None]) -> None:
    """FSDP2 leaves the root's parameters whole after a forward without gradients. A forward under way keeps them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank_of(0, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def train() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def names() -> set[str]:
        return {show(leaf.keys) for leaf in flatten(state, 1).leaves}

    train()
    expected = names()
    assert "optimizer/state/0.weight/exp_avg" in expected
    found: list[bool] = []

    def during(*_: Any) -> None:
        reshard(model)
        found.append(is_dtensor(model[0].weight))

    hook = model[1].register_forward_pre_hook(during)
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert not is_dtensor(model[0].weight)
        assert names() == expected
    assert found == [False, False]
    hook.remove()
    train()
    assert names() == expected


def test_a_hook_may_put_other_tensors_into_a_state_dict(rank_of: Callable[[int, int], None]) -> None:
    """A module under FSDP2 whose hook returns tensors of its own gets what was loaded, by its ``load_state_dict``."""
    from held import HeldStep
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank_of(0, 1)

    def make(value: float) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        return model

    def clone(_module: Any, entries: dict[str, Any], *_: Any) -> None:
        entries["0.weight"] = entries["0.weight"].clone()

    saved = HeldStep([{"model": make(7.0)}])
    model = make(0.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.register_state_dict_post_hook(clone)
    saved.load({"model": model})
    assert all(parameter.to_local().eq(7.0).all() for parameter in model.parameters())
    (cloned,) = [leaf for leaf in flatten({"model": model}, 2).leaves if show(leaf.keys) == "model/0.weight"]
    assert not cloned.is_private and is_dtensor(cloned.value), "its placements say what this rank has"


def test_a_checkpoint_wrapper_changes_no_name(rank_of: Callable[[int, int], None]) -> None:
    """The names are those of the state_dict, and what DDP keeps equal is shared. Names of earlier steps are found."""
    from held import HeldStep
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def make(value: float, wrap: Callable[[Any], Any] = checkpoint_wrapper) -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), wrap(torch.nn.Linear(2, 2, bias=False)))
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        return {"model": parallel, "optimizer": optimizer}

    rank_of(0, 2)
    flat = flatten(make(7.0), 2)
    plain = flatten(make(7.0, lambda module: module), 2)
    assert {show(leaf.keys): leaf.is_private for leaf in flat.leaves} == {show(leaf.keys): leaf.is_private for leaf in plain.leaves}
    assert not any(leaf.is_private for leaf in flat.leaves) and not flat.warnings
    # An earlier release stored the weights as private, and the momentum under the name with the prefix.
    earlier = flatten(make(7.0), 2)
    for leaf in earlier.leaves:
        leaf.keys = tuple((kind, "1._checkpoint_wrapped_module.weight") if key == "1.weight" else (kind, key) for kind, key in leaf.keys)
        if leaf.keys[0] == (0, "model") and "wrapped" in str(leaf.keys):
            leaf.keys, leaf.is_private = (*leaf.keys[:-1], (0, "1.weight")), True
        if leaf.keys[-1] == (0, "params"):
            leaf.value = ["0.weight", "1._checkpoint_wrapped_module.weight"]
    for saved in (flat, earlier):
        state = make(0.0)
        HeldStep([saved]).load(state, 0, 2)
        for parameter in state["model"].parameters():
            assert parameter.eq(7.0).all() and state["optimizer"].state[parameter]["momentum_buffer"].eq(7.0).all()


def test_a_history_of_one_rank_grows_beyond_its_segments(cluster: rapidraid.LocalCluster, job: str) -> None:
    """The other rank goes on as before, and no rank prepares again with it."""
    assert launch(str(Path(__file__).parent / "programs" / "growing.py"), 2, str(cluster.config), job) == (0, ["right"] * 2)
