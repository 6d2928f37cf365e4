"""State that only some ranks have: who loads it, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
from held import HeldStep

from rapidraid import errors, per_rank, replicated

torch = pytest.importorskip("torch")


def state_of(rank: int, value: int, *, owners: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Returns a state with shared weights, and a history that only its owners have."""
    state: dict[str, Any] = {"weights": replicated(torch.full((3,), float(value)))}
    if rank in owners:
        state["history"] = [value, rank]
    return state


@pytest.mark.parametrize("owners", [(0,), (2,), (0, 1), (1, 3)])
def test_what_only_some_ranks_have_comes_back_to_them(owners: tuple[int, ...]) -> None:
    """The same job resumes: ranks without an entry of their own load the rest."""
    step = HeldStep([state_of(rank, 7, owners=owners) for rank in range(4)])
    for rank in range(4):
        state = state_of(rank, 0, owners=owners)
        step.load(state, rank, 4)
        assert state["weights"].value.eq(7).all()
        assert state.get("history", [7, rank]) == [7, rank]


def test_a_rank_with_an_entry_that_only_others_have_is_refused() -> None:
    """The ranks that have it are named. A caller may choose for the rank, or leave the entry as it is."""
    step = HeldStep([state_of(rank, 7) for rank in range(4)])
    for rank in (1, 3, 5):
        state = state_of(rank, 0, owners=(rank,))
        with pytest.raises(errors.InvalidError, match=rf"rank {rank} has no source for history: step 1 .* of ranks \[0\]") as raised:
            step.load(state, rank, 6)
        assert "private=" in raised.value.hint and not state["weights"].value.any()
        step.load(state, rank, 6, private="skip")
        assert state["weights"].value.all() and state["history"] == [0, rank]
        step.load(state, rank, 6, private=lambda _: 0)
        assert state["history"] == [7, 0]
        with pytest.raises(errors.InvalidError, match=f"private= gives rank {rank} the private state of rank 9"):
            step.load(state, rank, 6, private=lambda _: 9)
        step.load(state_of(rank, 0, owners=()), rank, 6, private=lambda rank: rank)


def test_a_load_that_is_not_strict_leaves_what_the_step_lacks() -> None:
    """A rank that may have saved had no such entry. A rank beyond those of the step may want that of another rank."""
    step = HeldStep([state_of(rank, 7, owners=(0, 3)) for rank in range(4)])
    state = state_of(1, 0, owners=(1,))
    step.load(state, 1, 4, strict=False)
    assert state["history"] == [0, 1]
    with pytest.raises(errors.InvalidError, match="rank 4 has no source for history"):
        step.load(state_of(4, 0, owners=(4,)), 4, 5, strict=False)


def test_private_state_of_ranks_that_are_no_more() -> None:
    """It is refused unless the caller decides, or does not want it."""
    step = HeldStep([{**state_of(rank, 7), "rng": per_rank(rank)} for rank in range(4)])
    state = {**state_of(0, 0), "rng": per_rank(-1)}
    with pytest.raises(errors.InvalidError, match=r"of 4 ranks, and this launch has 2: the private state of ranks \[2, 3\] has no owner"):
        step.load(state, 0, 2)
    assert state["rng"].value == -1
    step.load(state, 0, 2, include=lambda name: name == "weights")
    assert state["weights"].value.all() and state["rng"].value == -1
    step.load(state, 0, 2, include=lambda name: name == "history")
    assert state["history"] == [7, 0]


def test_include_chooses_before_private_state_is_looked_for() -> None:
    """More ranks than those that saved load what all of them have."""
    step = HeldStep([{**state_of(rank, 7), "rng": per_rank(rank)} for rank in range(2)])
    state = {**state_of(3, 0), "rng": per_rank(-1)}
    with pytest.raises(errors.InvalidError, match="rank 3 has no source for rng"):
        step.load(state, 3, 4)
    step.load(state, 3, 4, include=lambda name: name == "weights")
    assert state["weights"].value.all() and state["rng"].value == -1


def test_a_state_that_is_declared_the_same_takes_what_its_rank_saved() -> None:
    """Undeclared state of one rank, or of each rank, loads after its declaration."""
    step = HeldStep([{"epoch": 7 + rank} for rank in range(2)])
    for rank in range(2):
        state = {"epoch": replicated(0)}
        step.load(state, rank, 2)
        assert state["epoch"].value == 7 + rank
    state = {"epoch": replicated(0)}
    HeldStep([{"epoch": 7}]).load(state)
    assert state["epoch"].value == 7


def test_skipped_entries_of_modules_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Weights that only ranks have saved stay those of a fresh module: a warning says so."""
    step = HeldStep([{"model": torch.nn.Linear(2, 2), "rng": rank} for rank in range(4)])
    with pytest.raises(errors.InvalidError) as raised:
        step.load({"model": torch.nn.Linear(2, 2), "rng": 0}, 0, 2)
    assert "BatchNorm" in raised.value.hint and "RNG" in raised.value.hint
    step.load({"model": torch.nn.Linear(2, 2), "rng": 0}, 0, 2, private="skip")
    (record,) = caplog.records
    assert 'private="skip" leaves model/weight, model/bias as the module has them' in record.getMessage()
