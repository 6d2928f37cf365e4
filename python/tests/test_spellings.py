"""The names of parameters in an optimizer's state, which depend on the other modules of the state when it was saved."""

from __future__ import annotations

from typing import Any

import pytest
from held import HeldStep

from rapidraid import errors, per_rank, replicated
from rapidraid._leaves import show
from rapidraid.state import flatten

torch = pytest.importorskip("torch")


def module_of(value: float) -> Any:
    """Returns a module with two parameters, all elements of which are ``value``."""
    module = torch.nn.Linear(2, 3)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def optimizer_of(*modules: Any) -> Any:
    """Returns the optimizer of modules, before any step."""
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1, momentum=0.9)


def advanced(*modules: Any) -> Any:
    """Returns the optimizer of modules, with a buffer for each parameter that is twice the parameter."""
    optimizer = optimizer_of(*modules)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach() * 2
    return optimizer


def assert_buffers(optimizer: Any, module: Any, value: float) -> None:
    for parameter in module.parameters():
        assert parameter.eq(value).all() and optimizer.state[parameter]["momentum_buffer"].eq(2 * value).all()


def labels(state: dict[Any, Any]) -> set[str]:
    """Returns the names of the entries of an optimizer's state."""
    names = (show(leaf.keys) for leaf in flatten(state, 1).leaves)
    return {name.split("/")[2] for name in names if name.startswith("optimizer/state/")}


@pytest.mark.parametrize("with_average", [False, True])
def test_an_average_of_the_model_comes_and_goes(with_average: bool) -> None:
    """A module with the same names makes a save write longer names. A load finds either spelling, strictly."""

    def state_of(model: Any, optimizer: Any, with_average: bool) -> dict[str, Any]:
        return {"model": model, "optimizer": optimizer, **({"ema": module_of(5.0)} if with_average else {})}

    saved = module_of(3.0)
    step = HeldStep([state_of(saved, advanced(saved), not with_average)])
    for make in (optimizer_of, advanced):
        model = module_of(0.0)
        optimizer = make(model)
        step.load(state_of(model, optimizer, with_average), include=lambda name: not name.startswith("ema/"))
        assert_buffers(optimizer, model, 3.0)
    stateless = HeldStep([state_of(saved, optimizer_of(saved), not with_average)])
    model = module_of(0.0)
    stateless.load(state_of(model, optimizer_of(model), with_average), include=lambda name: not name.startswith("ema/"))
    assert model.weight.eq(3.0).all()


def test_names_are_those_of_a_save_when_nothing_is_loaded() -> None:
    """The spelling of a save does not depend on earlier loads."""
    model = module_of(1.0)
    state = {"model": model, "optimizer": advanced(model)}
    assert labels(state) == {"weight", "bias"}
    assert labels({**state, "ema": module_of(0.0)}) == {"model.weight", "model.bias"}


def test_a_short_name_of_two_parameters_stands_for_none() -> None:
    """The step has the state of one module only, and its names do not say of which."""
    one, two = module_of(3.0), module_of(0.0)
    step = HeldStep([{"one": one, "optimizer": advanced(one)}])
    again = module_of(0.0)
    optimizer = optimizer_of(again, two)
    with pytest.raises(errors.InvalidError, match="group 0 of optimizer has 2 parameters in the step, and 4 in the state"):
        step.load({"one": again, "two": two, "optimizer": optimizer}, include=lambda name: "state" not in name and "two" not in name)
    step.load({"one": again, "two": two, "optimizer": optimizer}, strict=False)
    assert not optimizer.state and again.weight.eq(3.0).all()


def test_names_that_both_spellings_have_are_not_mixed() -> None:
    """The path of one module is a name within the other one. The parameters of the group say which one it is."""

    def make(value: float, **more: Any) -> dict[str, Any]:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.full((2,), value))
        outer = torch.nn.Module()
        outer.model = torch.nn.Module()
        outer.model.w = torch.nn.Parameter(torch.full((2,), value))
        return {"model": model, "x": outer, "optimizer": optimizer_of(model, outer), **more}

    saved, average = make(3.0), torch.nn.Module()
    average.w = torch.nn.Parameter(torch.ones(2))
    saved["optimizer"].state[saved["x"].model.w]["momentum_buffer"] = torch.ones(2)
    step = HeldStep([saved])
    again = make(0.0)
    step.load(again)
    assert list(again["optimizer"].state) == [again["x"].model.w]
    for strict in (True, False):
        state = make(0.0, ema=average)
        with pytest.raises(errors.InvalidError, match="group 0 of optimizer has other names in the step") as raised:
            step.load(state, strict=strict, include=lambda name: not name.startswith("ema"))
        assert "modules that it was saved with" in raised.value.hint and not state["optimizer"].state


@pytest.mark.parametrize("kind", [list, tuple])
def test_modules_in_lists_are_found(kind: Any) -> None:
    """At any depth. Their optimizer is stored by the names of its parameters."""

    def make(value: float) -> tuple[list[Any], dict[str, Any]]:
        modules = [module_of(value), module_of(value + 1), torch.nn.BatchNorm1d(3)]
        return modules, {"parts": {"inner": kind([modules[0], {"deep": kind([3, "text", modules[1], modules[2]])}])}}

    modules, state = make(3.0)
    step = HeldStep([{**state, "optimizer": advanced(*modules[:2])}])
    assert labels({**state, "optimizer": advanced(*modules[:2])}) == {
        "parts.inner.0.weight", "parts.inner.0.bias", "parts.inner.1.deep.2.weight", "parts.inner.1.deep.2.bias",
    }  # fmt: skip
    modules, state = make(0.0)
    # The order of its parameters does not count.
    optimizer = optimizer_of(modules[1], modules[0])
    step.load({**state, "optimizer": optimizer})
    assert_buffers(optimizer, modules[0], 3.0)
    assert_buffers(optimizer, modules[1], 4.0)


def test_a_step_by_position_loads_into_a_state_with_names() -> None:
    """As one that was saved without the modules, or with modules in a list that were not looked for."""
    modules = [module_of(3.0), module_of(4.0)]
    step = HeldStep([{"optimizer": advanced(*modules)}])
    again = [module_of(0.0), module_of(0.0)]
    optimizer = optimizer_of(*again)
    step.load({"parts": again, "optimizer": optimizer}, include=lambda name: name.startswith("optimizer/"))
    for mine, theirs in zip(modules, again, strict=True):
        assert optimizer.state[theirs.weight]["momentum_buffer"].eq(2 * mine.weight).all()
    fewer = optimizer_of(again[0])
    with pytest.raises(errors.InvalidError, match="group 0 of optimizer has 4 parameters in the step, and 2 in the state"):
        step.load({"parts": again, "optimizer": fewer}, strict=False)


def test_a_mark_around_modules_holds_for_their_optimizer() -> None:
    modules = [module_of(1.0), module_of(2.0)]
    optimizer = advanced(*modules)
    for state in ({"parts": replicated(modules)}, {"parts": per_rank({"inner": [replicated(modules[0]), replicated(modules[1])]})}):
        flat = flatten({**state, "optimizer": optimizer}, 2)
        assert not any(leaf.is_private for leaf in flat.leaves if leaf.keys[0] == (0, "optimizer")) and not flat.warnings
    assert all(leaf.is_private for leaf in flatten({"parts": modules, "optimizer": optimizer}, 2).leaves)
