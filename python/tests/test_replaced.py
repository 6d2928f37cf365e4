"""Objects of a state whose values change their kind or shape, and values without elements."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from held import HeldStep

from rapidraid import _native, errors, replicated

torch = pytest.importorskip("torch")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")


class Best:
    """An object that has no value at first."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Counted(torch.nn.Module):
    """A module whose extra state has a tensor of any length."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = torch.ones(count)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("value", [None, torch.tensor(0.5), torch.ones(3), torch.ones(5), numpy.ones(2), 7])
@pytest.mark.parametrize("into", [None, torch.tensor(0.25), torch.zeros(3), numpy.zeros(4), "text"])
def test_an_object_takes_any_value(value: Any, into: Any) -> None:
    """It receives its state by a call, so the state need not fit into what it has."""
    best = Best(into.clone() if isinstance(into, torch.Tensor) else into)
    HeldStep([{"best": Best(value)}]).load({"best": best})
    assert type(best.value) is type(value)
    if value is not None:
        assert torch.equal(torch.as_tensor(best.value), torch.as_tensor(value))


def test_the_extra_state_of_a_module_may_have_another_length() -> None:
    module = Counted(2)
    HeldStep([{"model": Counted(5)}]).load({"model": module})
    assert module.seen.tolist() == [1.0] * 5


def test_tensors_of_the_caller_keep_their_shapes() -> None:
    """The caller has the tensor, and would not see another one in the dict."""
    with pytest.raises(errors.InvalidError, match=r"w has the shape \[5\]"):
        HeldStep([{"w": torch.ones(5)}]).load({"w": torch.ones(3)})


def test_texts_without_characters_come_back() -> None:
    for value in (numpy.str_(""), numpy.bytes_(b""), numpy.str_("é")):
        content = _native.encode_value(value)
        assert content is not None
        found = _native.decode_value(content)
        assert type(found) is type(value) and found == value


def test_distributed_tensors_without_elements_are_stored_once() -> None:
    """All ranks of the mesh have them, one stores the name, and a load of a step without it is no error."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from rapidraid._plan import make_plan
    from rapidraid.state import flatten

    stored = []
    for rank in range(2):
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            state = {
                f"{at} {shape}": distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)
                for at, placement in enumerate((Shard(0), Replicate()))
                for shape in ((0,), (0, 4), (4, 0))
            }
            plan = make_plan(flatten(state, 2), rank, 2, lambda mine: [mine, mine], False)
            stored += [owned.keys for owned in plan.owned]
            HeldStep([{"other": replicated(1)}]).load({**state, "other": replicated(0)}, rank, 2)
            HeldStep([flatten({**state, "other": replicated(1)}, 2)]).load({**state, "other": replicated(0)}, rank, 2)
        finally:
            dist.destroy_process_group()
    assert len(stored) == len(set(stored)) == 6


def test_distributed_tensors_that_wrap_others_are_refused_by_name() -> None:
    """A copy would read, and a load write, where there is no memory."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.two_tensor import TwoTensor

    from rapidraid.state import flatten
    from rapidraid.tensors import describe

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(TwoTensor(torch.ones(2, 4), torch.zeros(2, 4)), mesh, [Shard(0)], run_check=False)
        with pytest.raises(errors.InvalidError, match="w cannot be stored: it is a DTensor of TwoTensor"):
            describe("w", tensor)
        plain = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
        with pytest.raises(errors.InvalidError, match="w cannot be stored: it is a DTensor of TwoTensor"):
            HeldStep([flatten({"w": plain}, 2)]).load({"w": tensor}, 0, 2)
    finally:
        dist.destroy_process_group()


def test_lightning_compares_weights_by_their_bytes() -> None:
    pytest.importorskip("lightning")
    from rapidraid.lightning import _is_same

    nan = float("nan")
    assert _is_same(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0])) and _is_same({"extra": [1, "a"]}, {"extra": [1, "a"]})
    assert _is_same(torch.ones(2, 3).t(), torch.ones(3, 2)) and _is_same(torch.tensor(1.0), torch.tensor(1.0))
    for one, other in ((torch.ones(2), torch.ones(3)), (torch.ones(2), 1), (1, 2), ([1], (1,)), (torch.zeros(1), -torch.zeros(1))):
        assert not _is_same(one, other)


class Derived(torch.nn.Module):
    """A module that derives a tensor from its weights, and again whenever weights are loaded."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value))
        self.refresh()
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())

    def refresh(self) -> None:
        self.register_buffer("doubled", self.weight.detach() * 2, persistent=False)


class Averaged(torch.nn.Module):
    """A module with an entry of its own in its ``state_dict``, which it takes out again."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.net, self.count = torch.nn.Linear(2, 2), count

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **options), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        self.count = state.pop("count")
        super().load_state_dict(state)


def test_a_module_learns_that_its_weights_were_loaded() -> None:
    model = Derived(0.0)
    HeldStep([{"model": Derived(1.0)}]).load({"model": model})
    assert model.weight.tolist() == [1.0] * 3
    assert model.doubled.tolist() == [2.0] * 3


def test_a_module_loads_the_entries_that_it_adds() -> None:
    saved, model = Averaged(7), Averaged(0)
    HeldStep([{"model": saved}]).load({"model": model})
    assert model.count == 7
    assert torch.equal(model.net.weight, saved.net.weight)


class Frozen(torch.nn.Module):
    """A module that leaves a part out of its ``state_dict``, and has another that acts on loads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict(*args, **options)
        for name in [name for name in state if name.startswith("encoder.")]:
            del state[name]
        return state


def test_a_module_that_leaves_a_part_out_is_loaded() -> None:
    saved, model = Frozen(), Frozen()
    saved.norm(torch.ones(3, 2))
    HeldStep([{"model": saved}]).load({"model": model})
    assert torch.equal(model.norm.running_mean, saved.norm.running_mean)


def test_the_parts_of_a_module_keep_their_versions() -> None:
    versions = []

    class Versioned(torch.nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state: Any, prefix: str, local: dict[str, Any], *rest: Any) -> None:
            versions.append(local.get("version"))
            super()._load_from_state_dict(state, prefix, local, *rest)

    HeldStep([{"model": Versioned(2, 2)}]).load({"model": Versioned(2, 2)})
    assert versions == [3]


def test_an_array_that_is_more_than_its_elements_is_refused() -> None:
    masked = numpy.ma.masked_array([1, 2, 3], mask=[0, 1, 0])
    with pytest.raises(errors.InvalidError, match="masked array"):
        HeldStep([{"a": masked}])
