"""Plain dicts whose keys come and go: what a load puts into them, and what a save does when they have changed."""

from __future__ import annotations

from typing import Any

import pytest
from held import HeldStep
from ranks import equal

import rapidraid
from rapidraid import errors, per_rank
from rapidraid._plan import make_plan
from rapidraid.state import flatten

torch = pytest.importorskip("torch")

SAVED: dict[str, Any] = {"loss": 1.5, "best": {"step": 3, "by": {"rouge": (1, 2)}}, 7: "seven", "none": {}, "curve": [1, {"a": 2}]}


@pytest.mark.parametrize("before", [{}, {"loss": 0.0}, {"loss": 0.0, "best": {}}, {"best": {"by": {}}}])
def test_a_dict_gets_the_keys_that_it_does_not_have(before: dict[str, Any]) -> None:
    """The dict of the state is filled in place, at any depth."""
    step = HeldStep([{"weights": torch.ones(2), "metrics": SAVED}])
    metrics = before
    state = {"weights": torch.zeros(2), "metrics": metrics}
    step.load(state)
    assert state["metrics"] is metrics and metrics == SAVED and state["weights"].all()


def test_a_dict_of_a_rank_gets_its_keys() -> None:
    """Each rank gets those that it saved."""
    step = HeldStep([{"metrics": per_rank({"rank": rank, "tensors": [torch.full((2,), rank)]})} for rank in range(3)])
    for rank in range(3):
        metrics: dict[str, Any] = {}
        step.load({"metrics": per_rank(metrics)}, rank, 3)
        assert metrics["rank"] == rank and torch.equal(metrics["tensors"][0], torch.full((2,), rank))


def test_a_dict_with_tensors_has_fixed_keys() -> None:
    """Weights for which the state has no place are refused, as before. So are keys that the step lacks."""
    step = HeldStep([{"model": {"a": torch.ones(2), "b": torch.ones(2), "note": 1}, "metrics": {"loss": 1.0}}])
    with pytest.raises(errors.InvalidError, match="has model/b, for which the state has no place"):
        step.load({"model": {"a": torch.zeros(2), "note": 0}, "metrics": {}})
    with pytest.raises(errors.InvalidError, match="has model/note, for which the state has no place"):
        step.load({"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "metrics": {}})
    with pytest.raises(errors.InvalidError, match="has metrics/loss, for which the state has no place"):
        step.load({"model": {"a": torch.zeros(2), "b": torch.zeros(2), "note": 0}})
    for metrics in ({"accuracy": 0.0}, {"loss": {"train": 0.0}}):
        with pytest.raises(errors.NotFoundError, match="does not have metrics/"):
            step.load({"model": {"a": torch.zeros(2), "b": torch.zeros(2), "note": 0}, "metrics": metrics})


def test_a_load_that_is_not_strict_replaces_nothing_by_something_else() -> None:
    """A value of the step does not take the place of a dict of the state, nor the other way round."""
    metrics: dict[str, Any] = {"loss": {"train": 0.5}, "best": 0, "lost": {}}
    HeldStep([{"metrics": {"loss": 1.0, "best": {"step": 3}, "more": 4}}]).load({"metrics": metrics}, strict=False)
    assert metrics == {"loss": {"train": 0.5}, "best": 0, "lost": {}, "more": 4}
    HeldStep([{"metrics": {}}]).load({"metrics": metrics}, strict=False)
    assert metrics == {"loss": {"train": 0.5}, "best": 0, "lost": {}, "more": 4}


def test_a_load_that_is_not_strict_makes_what_is_none_so_far() -> None:
    """``None`` stands for something that an object makes later."""
    nested = Nested({"history": None, "more": 1})
    HeldStep([{"object": Nested({"history": {"old": (torch.ones(2), 1)}})}]).load({"object": nested}, strict=False)
    assert nested.entries["history"]["old"][1] == 1 and nested.entries["history"]["old"][0].all() and nested.entries["more"] == 1


CONTAINERS: list[Any] = [{"old": torch.ones(2)}, {"old": {"older": 1}}, [torch.ones(2), 1], (torch.ones(2), {"a": [torch.ones(1)]})]


@pytest.mark.parametrize("saved", CONTAINERS)
def test_an_object_receives_a_container_where_it_has_none(saved: Any) -> None:
    """A strict load does not miss the ``None`` that the entries replace."""
    nested = Nested({"history": None, "more": 0})
    HeldStep([{"object": Nested({"history": saved, "more": 1})}]).load({"object": nested})
    assert equal(nested.entries, {"history": saved, "more": 1})
    with pytest.raises(errors.NotFoundError, match="does not have object/history"):
        HeldStep([{"object": Nested({"more": 1})}]).load({"object": Nested({"history": None, "more": 0})})


class WithSettings(torch.nn.Module):
    """A module with settings in its extra state."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.settings)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.settings = dict(state)


class Nested:
    """An object whose state has dicts in it."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        return dict(self.entries)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = state


def test_dicts_that_an_object_makes_are_given_back_to_it() -> None:
    """The object receives a dict with all keys of the step."""
    step = HeldStep([{"module": WithSettings({"scale": 2, "history": {"max": (1, 2)}}), "object": Nested({"inner": {"pair": (1, [2])}})}])
    module, nested = WithSettings({}), Nested({"inner": {}})
    step.load({"module": module, "object": nested})
    assert module.settings == {"scale": 2, "history": {"max": (1, 2)}}
    assert nested.entries == {"inner": {"pair": (1, [2])}}


def test_a_launch_of_one_rank_saves_a_state_that_has_changed(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Keys that come and go, other shapes, memory that is shared no more, and longer values: each step is as it was saved."""
    tied = torch.ones(8)
    states: list[dict[str, Any]] = [
        {"metrics": {}, "a": tied, "b": tied},
        {"metrics": {"loss": 1.0}, "a": tied, "b": tied},
        {"metrics": {"loss": 1.0, "note": "x" * (1 << 20)}, "a": tied, "b": tied.clone() + 1},
        {"metrics": {"accuracy": 0.5}, "a": torch.full((3,), 2.0), "b": tied},
    ]
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        for number, state in enumerate(states, 1):
            assert checkpointer.save(number, state)
        with pytest.raises(errors.InvalidError, match="bad is of type object"):
            checkpointer.save(5, {**states[-1], "bad": object()})
        assert checkpointer.save(5, states[-1])
    for number, state in enumerate([*states, states[-1]], 1):
        metrics: dict[str, Any] = {}
        loaded = {"metrics": metrics, "a": torch.zeros_like(state["a"]), "b": torch.zeros_like(state["b"])}
        assert rapidraid.Checkpointer(job, config=cluster.config).load(loaded, step=number) == number
        assert metrics == state["metrics"]
        assert torch.equal(loaded["a"], state["a"]) and torch.equal(loaded["b"], state["b"])


def test_several_ranks_are_told_what_to_do() -> None:
    """One rank cannot prepare for the others: the error names the entry."""
    tied = torch.ones(8)
    state: dict[str, Any] = {"a": tied, "b": tied, "metrics": {"loss": 1.0}}
    plan = make_plan(flatten(state, 2), 0, 2, lambda mine: [mine, mine], False)
    plan.sources(flatten(state, 2), False)
    for changed, message in [
        ({**state, "metrics": {"loss": 1.0, "new": 2}}, "metrics/new is new"),
        ({**state, "metrics": {}}, "metrics is new"),
        ({"a": tied, "b": tied}, "metrics/loss was in the state"),
        ({**state, "a": torch.ones(5)}, "a has another kind, shape or type"),
        ({**state, "metrics": {"loss": torch.ones(1)}}, "metrics/loss has another kind"),
        ({**state, "b": tied.clone()}, "b shared its memory with a"),
    ]:
        with pytest.raises(errors.InvalidError, match=message) as raised:
            plan.sources(flatten(changed, 2), False)
        assert "prepare(state) again, on all ranks" in raised.value.hint
