"""Optimizers: the devices of state that a load creates, settings of other releases, groups, and optimizers with their own state."""

from __future__ import annotations

from typing import Any

import pytest
from held import HeldStep

from rapidraid import _optimizers, errors
from rapidraid._leaves import show
from rapidraid._plan import make_plan
from rapidraid.state import flatten

torch = pytest.importorskip("torch")


def trained(make: Any, shape: tuple[int, ...] = (4, 6)) -> tuple[torch.nn.Module, Any]:
    """Returns a module with a matrix and a scalar, and its optimizer after two steps."""
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.ones(shape))
    module.scale = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = make(module.parameters())
    for _ in range(2):
        (module.matrix.square().sum() * module.scale).backward()
        optimizer.step()
    return module, optimizer


def fresh(make: Any, shape: tuple[int, ...] = (4, 6)) -> tuple[torch.nn.Module, Any]:
    """Returns such a module and optimizer before any step."""
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.zeros(shape))
    module.scale = torch.nn.Parameter(torch.tensor(0.0))
    return module, make(module.parameters())


def assert_same_state(one: Any, other: Any) -> None:
    for mine, theirs in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert one.state[mine].keys() == other.state[theirs].keys()
        for key, value in one.state[mine].items():
            assert torch.equal(value, other.state[theirs][key]) if torch.is_tensor(value) else value == other.state[theirs][key], key


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}, {"fused": False, "capturable": None}])
def test_the_device_of_created_state_is_torchs(settings: dict[str, Any]) -> None:
    """The policy is that of ``Optimizer.load_state_dict``: only `step` stays on the CPU, unless it must be on the device."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    group = {**settings, "params": [0]}
    for key in ("step", "exp_avg", "row_var", "mu_product"):
        wanted = torch.optim.Optimizer._process_value_according_to_param_policy(parameter, torch.ones(()), 0, [group], key).device
        assert _optimizers.state_device(key, parameter, settings) == wanted, key


@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_state_is_made_where_its_parameter_is(shape: tuple[int, ...]) -> None:
    """Neither the shape of a moment nor that of the parameter decides."""
    make = _optimizers._maker_for(torch.nn.Parameter(torch.empty(shape, device="meta")))
    below = ((0, "optimizer"), (0, "state"), (0, "w"))
    for key, size in (("exp_avg", shape), ("row_var", (3, 1)), ("eta", ()), ("absmax", (7,))):
        made = make((*below, (0, key)), "bfloat16", list(size))
        assert made.device.type == "meta" and made.dtype == torch.bfloat16 and made.shape == size, key
    assert make((*below, (0, "step")), "float32", []).device.type == "cpu"
    assert make((*below, (0, "old_dirs"), (2, 0)), "float32", [15]).device.type == "meta"


@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}, {}])
def test_a_count_of_steps_follows_the_loaded_settings(settings: dict[str, Any]) -> None:
    """Fused and capturable optimizers want it on the device of its parameter, also if only the step says that they are."""
    optimizer = torch.optim.Adam([torch.empty(2)])
    parameter = torch.empty(2, device="meta")
    optimizer.param_groups[0].update({**settings, "params": [parameter]})
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    _optimizers._place_steps(optimizer)
    step = optimizer.state[parameter]["step"]
    assert step.device.type == ("meta" if settings else "cpu") and step.dtype == torch.float32


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "NAdam", "RAdam", "ASGD", "Rprop", "SGD"])
def test_created_state_is_the_saved_one(name: str) -> None:
    """Moments of any shape, those of scalar parameters, and counts of steps."""
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")

    def make(parameters: Any) -> Any:
        return kind(parameters, lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))

    module, optimizer = trained(make)
    step = HeldStep([{"model": module, "optimizer": optimizer}])
    other, again = fresh(make)
    step.load({"model": other, "optimizer": again})
    assert_same_state(optimizer, again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}, {"foreach": True}])
def test_an_optimizer_on_a_device_goes_on(settings: dict[str, Any]) -> None:
    """The first step after a load works, and does what an undisturbed one does."""

    def make(parameters: Any) -> Any:
        return torch.optim.Adam([p.cuda().detach().requires_grad_() for p in parameters], lr=0.1, **settings)

    def advance(optimizer: Any) -> list[Any]:
        parameters = optimizer.param_groups[0]["params"]
        sum(p.square().sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [p.detach().cpu() for p in parameters]

    optimizer, again = make([torch.ones(4, 6), torch.tensor(2.0)]), make([torch.zeros(4, 6), torch.tensor(0.0)])
    advance(optimizer)
    names = ("matrix", "scale")
    step = HeldStep([{"optimizer": optimizer, **dict(zip(names, optimizer.param_groups[0]["params"], strict=True))}])
    step.load({"optimizer": again, **dict(zip(names, again.param_groups[0]["params"], strict=True))})
    assert all(torch.equal(one, other) for one, other in zip(advance(optimizer), advance(again), strict=True))


def test_state_under_an_integer_key_is_loaded() -> None:
    """Beside a text, and into an optimizer that has made a step."""

    def stepped(value: float) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.state[parameter].update({5: torch.full((2,), value), "momentum_buffer": torch.full((2,), value)})
        return optimizer, optimizer.state[parameter]

    saved, _ = stepped(3.0)
    assert make_plan(flatten({"optimizer": saved}, 1), 0, 1, lambda mine: [mine], False).segment_bytes
    loaded, state = stepped(0.0)
    HeldStep([{"optimizer": saved}]).load({"optimizer": loaded})
    assert state[5].eq(3.0).all() and state["momentum_buffer"].eq(3.0).all()


def test_settings_of_another_release() -> None:
    """Defaults stay for settings that the step lacks, and others are set, without ``strict=False``."""
    module, optimizer = trained(torch.optim.AdamW)
    optimizer.param_groups[0].update({"lr": 0.5, "from_then": (1, 2), "plan": {"kind": "cosine", "knots": [1, 2]}})
    step = HeldStep([{"model": module, "optimizer": optimizer}])
    other, again = fresh(torch.optim.AdamW)
    again.param_groups[0].update({"since_now": "default", "scale": torch.tensor(3.0)})
    step.load({"model": other, "optimizer": again})
    group = again.param_groups[0]
    assert group["lr"] == 0.5 and group["from_then"] == (1, 2) and group["plan"] == {"kind": "cosine", "knots": [1, 2]}
    assert group["since_now"] == "default" and group["scale"] == 3.0
    assert group["params"] == list(other.parameters())
    again.step()


def grouped(*sizes: int) -> tuple[torch.nn.Module, Any]:
    """Returns a module, and an optimizer with groups of its parameters."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.full((2,), float(at))) for at in range(sum(sizes))])
    parameters = list(module)
    groups = [{"params": [parameters.pop(0) for _ in range(size)], "lr": 0.1 * (at + 1)} for at, size in enumerate(sizes)]
    return module, torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("has_module", [True, False])
def test_groups_of_another_size_are_refused(has_module: bool) -> None:
    """Their settings, or state by position, would go to other parameters. Nothing is changed."""

    def state(*sizes: int) -> dict[str, Any]:
        module, optimizer = grouped(*sizes)
        return {"model": module, "optimizer": optimizer} if has_module else {"optimizer": optimizer}

    step = HeldStep([state(2, 1)])
    into = state(1, 2)
    into["optimizer"].param_groups[0]["lr"] = 7.0
    with pytest.raises(errors.InvalidError, match="group 0 of optimizer has 2 parameters in the step, and 1 in the state") as raised:
        step.load(into)
    assert into["optimizer"].param_groups[0]["lr"] == 7.0 and raised.value.hint
    with pytest.raises(errors.NotFoundError, match=r"does not have optimizer/groups\[2\]/params"):
        step.load(state(1, 1, 1))
    with pytest.raises(errors.InvalidError, match=r"has optimizer/groups\[1\]/.*, for which the state has no place"):
        step.load(state(3))
    if has_module:
        step.load(into, strict=False)
        assert into["optimizer"].param_groups[0]["lr"] == 0.1
    else:
        with pytest.raises(errors.InvalidError, match="group 0 of optimizer has 2 parameters"):
            step.load(into, strict=False)
    step.load(state(2, 1))


def test_parameters_of_another_group_are_refused() -> None:
    """Groups of equal sizes with other members, as with and without decay in another order."""
    module, optimizer = grouped(1, 1)
    step = HeldStep([{"model": module, "optimizer": optimizer}])
    module, optimizer = grouped(1, 1)
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    with pytest.raises(errors.InvalidError, match="the parameter 0 is in group 0 of optimizer in the step, and in group 1"):
        step.load({"model": module, "optimizer": optimizer})


class Averaging(torch.optim.SGD):
    """An optimizer that keeps something where torch's own ``state_dict`` does not look."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.averages: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": dict(self.averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages = state.pop("averages")
        super().load_state_dict(state)


def test_an_optimizer_that_says_itself_what_its_state_is() -> None:
    """It is stored by its own ``state_dict``, in a launch of several ranks for each rank unless declared."""

    def make(parameters: Any) -> Any:
        return Averaging(parameters, lr=0.1, momentum=0.9)

    module, optimizer = trained(make)
    optimizer.averages = {"count": 5, "mean": torch.ones(3)}
    step = HeldStep([{"model": module, "optimizer": optimizer}])
    other, again = fresh(make)
    step.load({"model": other, "optimizer": again})
    assert again.averages["count"] == 5 and torch.equal(again.averages["mean"], torch.ones(3))
    assert_same_state(optimizer, again)
    assert not any(leaf.is_private for leaf in flatten({"optimizer": optimizer}, 1).leaves)
    assert all(leaf.is_private for leaf in flatten({"optimizer": optimizer}, 2).leaves)


def test_wrappers_of_frameworks_are_looked_through() -> None:
    """They have a ``state_dict`` of their own, which adds nothing."""
    accelerate = pytest.importorskip("accelerate.optimizer")
    module, optimizer = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    names = {show(leaf.keys) for leaf in flatten({"model": module, "optimizer": optimizer}, 1).leaves}
    # Its constructor wants an Accelerator.
    wrapper = object.__new__(accelerate.AcceleratedOptimizer)
    wrapper.optimizer = optimizer
    assert {show(leaf.keys) for leaf in flatten({"model": module, "optimizer": wrapper}, 1).leaves} == names


def test_an_optimizer_of_which_each_rank_has_a_part_is_refused(tmp_path: Any) -> None:
    """``ZeroRedundancyOptimizer`` shows an empty state, and has one only after a collective call."""
    import torch.distributed as dist

    optim = pytest.importorskip("torch.distributed.optim")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module, optimizer = trained(lambda parameters: optim.ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1))
        with pytest.raises(errors.InvalidError, match="optimizer is a ZeroRedundancyOptimizer") as raised:
            flatten({"model": module, "optimizer": optimizer}, 1)
        assert "FSDP2" in raised.value.hint
    finally:
        dist.destroy_process_group()


def test_state_that_wraps_tensors_is_not_made_by_a_load() -> None:
    """It would come back as plain dicts. Once the optimizer has its state, the load fills it."""
    from torch.testing._internal.two_tensor import TwoTensor

    module, optimizer = trained(torch.optim.Adam)
    optimizer.state[module.matrix]["exp_avg"] = TwoTensor(torch.ones(4, 6), torch.full((4, 6), 2.0))
    step = HeldStep([{"model": module, "optimizer": optimizer}])
    other, again = fresh(torch.optim.Adam)
    with pytest.raises(errors.InvalidError, match="optimizer/state/matrix/exp_avg is a tensor that wraps others") as raised:
        step.load({"model": other, "optimizer": again})
    assert "initialised by a step" in raised.value.hint and not again.state and not other.matrix.any()
    other, again = trained(torch.optim.Adam)
    again.state[other.matrix]["exp_avg"] = TwoTensor(torch.zeros(4, 6), torch.zeros(4, 6))
    step.load({"model": other, "optimizer": again})
    assert again.state[other.matrix]["exp_avg"].b.eq(2).all()
