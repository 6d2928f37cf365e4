"""The rank that stores each part: from placements alone, against the reference that knows what every rank has."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rapidraid import errors

torch = pytest.importorskip("torch")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from rapidraid._leaves import replicated  # noqa: E402
from rapidraid._owners import _find_overlap, choose_owners, choose_owners_by_placement, declare, digest_of_layout  # noqa: E402
from rapidraid._plan import make_plan  # noqa: E402
from rapidraid._ranks import Group, raise_together, refusal_of  # noqa: E402
from rapidraid.state import flatten  # noqa: E402
from rapidraid.tensors import describe  # noqa: E402

WORLD = 8


@pytest.fixture(params=range(3))
def states(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Returns a function that calls another one with the state of each rank, as this rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [
        [(Shard(0),), (Shard(1),)],
        [(Replicate(), Shard(0)), (Shard(1), Replicate()), (Replicate(), Replicate())],
        [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0))],
    ][request.param]
    shape = (WORLD,) if request.param == 0 else (2, WORLD // 2)

    def each(call: Any) -> list[Any]:
        found = []
        for rank in range(WORLD):
            dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=WORLD)
            try:
                mesh = init_device_mesh("cpu", shape)
                state: dict[str, Any] = {"step": replicated(7), "bias": replicated(torch.ones(33)), "tied": {}}
                for number in range(7):
                    whole = torch.arange(float((5 + number) * 12)).view(5 + number, 12)
                    state[f"weight{number}"] = distribute_tensor(whole, mesh, placements[number % len(placements)])
                state["tied"]["weight"] = state["weight0"]
                found.append(call(rank, state))
            finally:
                dist.destroy_process_group()
        return found

    yield each


def shared_of(state: Any) -> Any:
    flat = flatten(state, WORLD)
    flat.leaves.sort(key=lambda leaf: (leaf.is_private, leaf.keys))
    shared = [leaf for leaf in flat.leaves if not leaf.is_private]
    described = {(False, leaf.keys): describe("x", leaf.value) for leaf in shared if isinstance(leaf.value, torch.Tensor)}
    contents = {(False, leaf.keys): b"x" for leaf in shared if (False, leaf.keys) not in described}
    alias = {(False, ((0, "weight0"),)): ((0, "tied"), (0, "weight"))}
    return shared, described, contents, alias


def test_the_holders_of_a_part_agree_and_each_part_has_one_owner(states: Any) -> None:
    def decide(rank: int, state: Any) -> Any:
        shared, described, contents, alias = shared_of(state)
        owners, replicated_parts = choose_owners_by_placement(shared, described, alias, [0] * WORLD)
        return digest_of_layout(shared, described, contents, alias), owners, replicated_parts, declare(shared, described, contents, alias)

    found = states(decide)
    assert len({digest for digest, *_ in found}) == 1 and found[0][0] is not None
    reference, replicated_parts = choose_owners([declared for *_, declared in found], [0] * WORLD)
    union: dict[Any, int] = {}
    for rank, (_, owners, own_parts, declared) in enumerate(found):
        assert own_parts <= replicated_parts
        for part, owner in owners.items():
            assert union.setdefault(part, owner) == owner, (rank, part)
            keys, box = part
            about = found[owner][3][keys]
            assert len(about) == 2 or box in [held for held, _ in about[3]], "the owner holds the part"
        assert declared.keys() == found[0][3].keys()
    assert union.keys() == reference.keys()
    # The parts that all ranks hold are divided evenly: no rank owns two more of them than another rank.
    whole = [part for part, owner in union.items() if part in replicated_parts and len(found[0][3].get(part[0], ())) > 2]
    for group in {frozenset(rank for rank, (_, owners, _, _) in enumerate(found) if part in owners) for part in whole}:
        sizes = {part: size for part in whole for box, size in found[union[part]][3][part[0]][3] if box == part[1]}
        held = [part for part in whole if frozenset(rank for rank, (_, owners, _, _) in enumerate(found) if part in owners) == group]
        loads = [sum(sizes[part] for part in held if union[part] == rank) for rank in group]
        assert max(loads) - min(loads) <= max(sizes[part] for part in held), (group, loads)


def test_any_difference_between_the_ranks_changes_the_digest(states: Any) -> None:
    def digests(rank: int, state: Any) -> set[bytes | None]:
        shared, described, contents, alias = shared_of(state)
        plain = digest_of_layout(shared, described, contents, alias)
        less = digest_of_layout(shared[1:], described, contents, alias)
        untied = digest_of_layout(shared, described, contents, {})
        (step,) = [leaf for leaf in shared if (False, leaf.keys) not in described]
        later = digest_of_layout(shared, described, {(False, step.keys): b"8"}, alias)
        state["bias"] = replicated(torch.ones(34))
        longer = digest_of_layout(*shared_of(state))
        return {plain, less, untied, later, longer}

    assert all(len(found) == 5 for found in states(digests))


def test_ranks_that_together_store_too_much_or_too_little_are_refused() -> None:
    """The other rank claims the same digest, and stores the same parts."""
    with pytest.raises(errors.InternalError, match="the ranks would store 4800 of 2400 bytes"):
        make_plan(flatten({"a": replicated(torch.ones(600))}, 2), 0, 2, lambda mine: [mine, mine], False)


def test_the_ranks_of_another_group_are_not_those_of_meshes() -> None:
    import torch.distributed as dist

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=1, world_size=4)
    try:
        assert Group(None, False).is_default and Group(None, True).is_default
        assert not Group(dist.new_group([0, 1]), False).is_default
        # Older releases sort the ranks of every group.
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            turned = Group(dist.new_group([3, 2, 1, 0], sort_ranks=False), False)
            assert turned.rank == 2 and not turned.is_default
    finally:
        dist.destroy_process_group()


def test_parts_that_overlap_far_apart_in_order_are_refused() -> None:
    """As many elements are missing as two ranks both have, and the boxes between these two do not overlap."""
    boxes = [((0, 0), (2, 2)), ((0, 2), (1, 2)), ((1, 1), (1, 2))]
    declared: list[Any] = [{((0, "w"),): ("float32", 32, (2, 4), ((box, 4 * box[1][0] * box[1][1]),), None, 0)} for box in boxes]
    with pytest.raises(errors.InvalidError, match=r"w: the parts of ranks \[0\] and \[2\] overlap"):
        choose_owners(declared, [0] * 3)


@pytest.mark.parametrize("seed", range(5))
def test_an_overlap_is_found_wherever_it_is(seed: int) -> None:
    """The search agrees with one that compares all pairs."""
    drawn = random.Random(seed)
    answers = set()
    for _ in range(300):
        dims, side = drawn.randint(1, 3), drawn.randint(2, 12)
        boxes = set()
        for _ in range(drawn.randint(1, 8)):
            start = tuple(drawn.randrange(side) for _ in range(dims))
            boxes.add((start, tuple(drawn.randint(1, max(1, (side - at) // 2)) for at in start)))
        parts = sorted((box, [rank]) for rank, box in enumerate(boxes))
        pairs = [pair for pair in itertools.combinations(parts, 2) if len(cells(pair[0][0]) & cells(pair[1][0]))]
        found = _find_overlap(parts)
        answers.add(found is None)
        assert (found is None) == (not pairs)
        assert found is None or found in pairs or found[::-1] in pairs
    assert answers == {True, False}


def cells(box: Any) -> set[tuple[int, ...]]:
    """Returns the indices of the elements of a box."""
    return set(itertools.product(*(range(start, start + size) for start, size in zip(*box, strict=True))))


def test_the_other_ranks_raise_the_same_kind_of_error() -> None:
    """A job that looks at the kind decides alike on all ranks. The advice is there once."""
    fenced = errors.FencedError("a newer launch writes", "end this process")
    with pytest.raises(errors.FencedError) as raised:
        raise_together(None, 0, [None, refusal_of(fenced)])
    assert str(raised.value) == "rank 1: a newer launch writes (hint: end this process)"
    with pytest.raises(errors.InvalidError, match="rank 0: KeyError: 'lr'"):
        raise_together(fenced, 1, [refusal_of(KeyError("lr")), refusal_of(fenced)])
    with pytest.raises(errors.FencedError) as raised:
        raise_together(fenced, 1, [None, refusal_of(fenced)])
    assert raised.value is fenced
    raise_together(None, 0, [None, None])
