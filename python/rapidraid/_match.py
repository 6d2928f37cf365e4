"""Maps the names of a checkpoint to the leaves of a state for a load, and handles those that do not match."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ._leaves import FLAG_ARRAY, WRAPPED, Flat, Keys, Leaf, Maker, is_dtensor, is_tensor, show
from ._planned_load import PlannedLoad
from ._reader import Name, NamePlace, Names, Reader
from .errors import InvalidError, NotFoundError
from .state import flatten
from .tensors import has_elements, new_array, new_tensor

log = logging.getLogger("rapidraid")

#: How a load treats private state of a launch with another number of ranks.
Private = Literal["skip"] | Callable[[int], int]


@dataclass(frozen=True)
class LoadChoices:
    """The arguments of :meth:`Checkpointer.load` that decide how names are matched."""

    strict: bool
    include: Callable[[str], bool] | None
    cast: bool
    private: Private | None
    allow_pickle: bool


class Room:
    """The names that a state has a place for."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._keys = {leaf.keys for leaf in flat.leaves}
        self._full = {leaf.keys for leaf in flat.leaves if not _is_open(leaf)}
        self._above = {keys[:end] for keys in self._full for end in range(1, len(keys))}

    def maker(self, keys: Keys) -> Maker | None:
        """Returns the maker for a name without a leaf in the state, or ``None`` if no object of the state accepts it."""
        # An entry cannot be made where the state has something else: a dict for a value, or the other way round.
        if keys in self._above or any(keys[:end] in self._full for end in range(1, len(keys))):
            return None
        return next((maker for end in range(len(keys)) if (maker := self._flat.creatable.get(keys[:end])) is not None), None)

    def accepts(self, keys: Keys) -> bool:
        """Returns whether the state has a leaf for a name, or would get one."""
        return keys in self._keys or self.maker(keys) is not None


class Stages:
    """The shared names of a step that only other ranks of the launch have a place for, as pipeline stages do.

    The ranks tell each other in one collective for each load. Every rank takes part in it, whatever becomes of its own load.

    Args:
        gather: The collective. It returns the argument of every rank.
        strict: Whether the load of this rank is strict.

    """

    def __init__(self, gather: Callable[[Any], list[Any]], strict: bool = True) -> None:
        self._gather = gather
        self._strict = strict
        self._elsewhere: set[Keys] | None = None

    def elsewhere(self, names: Names, room: Room) -> set[Keys]:
        """Returns the shared names that this rank's state has no place for, and that of another rank has.

        Raises :class:`InvalidError` on all ranks if they load different steps, or some with ``strict`` and others without.
        """
        if self._elsewhere is None:
            # A collective that fails is not tried again.
            self._elsewhere = set()
            # The ranks load one step, so one bit for each name is enough. The bits are in the order of the sorted names.
            shared = sorted(names.shared)
            lacking = "".join("01"[not room.accepts(keys)] for keys in shared)
            told = self._gather((names.step, int(f"0{lacking}", 2), self._strict))
            steps = {other[0]: rank for rank, other in enumerate(told) if other is not None}
            if len(steps) > 1:
                (one, rank), (another, other_rank), *_ = steps.items()
                raise InvalidError(
                    f"rank {rank} loads step {one}, rank {other_rank} step {another}", "pass the same step= on all ranks, or none to resume"
                )
            said = {other[2]: rank for rank, other in enumerate(told) if other is not None}
            if len(said) > 1:
                raise InvalidError(f"rank {said[True]} loads with strict=True, rank {said[False]} with strict=False", "give all ranks one")
            # A rank that failed before it knew its names may have a place for all of them.
            bits = [0 if other is None else other[1] for other in told]
            by_all = f"{functools.reduce(operator.and_, bits):0{len(shared)}b}"
            self._elsewhere = {keys for keys, here, all_ in zip(shared, lacking, by_all, strict=False) if here > all_}
        return self._elsewhere

    def finish(self) -> None:
        """Takes part in the collective if this rank's load has ended before it."""
        if self._elsewhere is None:
            self._elsewhere = set()
            self._gather(None)


def load_into(
    reader: Reader,
    state: Mapping[Any, Any],
    rank: int,
    world: int,
    choices: LoadChoices,
    *,
    ranks: Sequence[int] | None = None,
    stages: Stages | None = None,
) -> str | None:
    """Loads a step into a state, in place. Returns ``None``, or the name of what is damaged.

    Changes nothing until everything is known to match.

    Args:
        reader: The step.
        state: The state.
        rank: This rank.
        world: The number of ranks of the launch.
        choices: How names are matched.
        ranks: The numbers of the ranks in the default group. Default: all ranks of that group.
        stages: Finds the names that other ranks of the launch load. Default: no other rank does.

    """
    loaded = reader.loaded
    names = Names(loaded, choices.include)
    flat = flatten(state, world, ranks, [keys for _, keys in names.rows])
    room = Room(flat)
    elsewhere = set() if stages is None else stages.elsewhere(names, room)
    source = _source_rank(names, rank, world, choices.private, loaded.number)
    matched = _match(names, flat, room, source, choices)
    if choices.private == "skip":
        _warn_of_skipped(names, matched, loaded.number)
    else:
        _check_sources(names, matched, rank, source, choices, loaded.number)
    if choices.strict:
        _check_names(matched, elsewhere, loaded.number)
    job = PlannedLoad(loaded, choices.cast, choices.allow_pickle, choices.strict)
    for leaf, key in matched.found:
        job.add(_replaced(leaf, names.rows[key][1]), *names.rows[key])
    for key, maker in matched.created.items():
        job.create(key[1], maker, *names.rows[key])
    damaged = job.run(reader)
    if damaged is None:
        for finish in flat.finish:
            finish(job.created)
    return damaged


def _replaced(leaf: Leaf, name: Name) -> Leaf:
    """Returns a leaf, or one that receives a value of another kind or shape if the leaf's object takes such a value."""
    _, _, kind, element, _, shape, flags = name
    if not leaf.is_replaceable or leaf.put is None:
        return leaf
    if kind != "tensor":
        return replace(leaf, value=None) if has_elements(leaf.value) else leaf
    if has_elements(leaf.value) and list(leaf.value.shape) == list(shape):
        return leaf
    if flags & FLAG_ARRAY:
        made = new_array(element, shape)
    elif is_tensor(leaf.value):
        made = leaf.value.new_empty(shape)
    else:
        made = new_tensor(element, shape)
    return replace(leaf, value=made, is_made=True)


@dataclass
class _Matched:
    """The names of a step and the leaves of a state, as they belong together."""

    #: The leaves, each with the name that it receives.
    found: list[tuple[Leaf, NamePlace]]
    #: The leaves for which the step has no name, and which are needed.
    missing: list[Leaf]
    #: The leaves that ``private="skip"`` leaves as they are.
    skipped: list[Leaf]
    #: The names without a leaf that an object of the state accepts, with the maker of each tensor.
    created: dict[NamePlace, Maker]
    #: The other names without a leaf.
    extra: list[NamePlace]


def _match(names: Names, flat: Flat, room: Room, source: int | None, choices: LoadChoices) -> _Matched:
    """Matches the names of a step to a state. ``source`` is the rank whose private names are loaded."""
    found: list[tuple[Leaf, NamePlace]] = []
    unmatched: list[Leaf] = []
    for leaf in flat.leaves:
        if choices.include is None or choices.include(show(leaf.keys)):
            place = _find(names, leaf, source)
            if place is None:
                unmatched.append(leaf)
            else:
                found.append((leaf, place))
    created, extra = _match_rest(names, room, source, {keys for _, (_, keys) in found})
    # ``None`` and an empty dict give place to the entries that the checkpoint has below them.
    filled = {keys[:end] for _, keys in created for end in range(1, len(keys))}
    lacking = [leaf for leaf in unmatched if not (_is_open(leaf) and leaf.keys in filled) and not leaf.is_optional]
    is_skipped = choices.private == "skip"
    # Earlier releases did not store distributed tensors without elements.
    missing = [leaf for leaf in lacking if not (is_skipped and leaf.is_private) and not (is_dtensor(leaf.value) and not leaf.value.numel())]
    skipped = [leaf for leaf in lacking if is_skipped and leaf.is_private]
    return _Matched(found, missing, skipped, created, extra)


def _is_open(leaf: Leaf) -> bool:
    """Returns whether an object of the state may make entries in place of a leaf: it is ``None`` or an empty dict."""
    return leaf.value is None or (type(leaf.value) is dict and not leaf.value)


def _match_rest(names: Names, room: Room, source: int | None, taken: set[Keys]) -> tuple[dict[NamePlace, Maker], list[NamePlace]]:
    """Returns the names without a leaf that an object of the state accepts, with their makers, and the other ones.

    ``taken`` has the paths that leaves receive, from either space.
    """
    rest = [place for place in names.rows if place[0] in (None, source) and place[1] not in taken]
    # If a name is in both spaces, this rank loads its private value.
    nearest = {keys: (space, keys) for space, keys in sorted(rest, key=lambda place: place[0] is not None)}
    created: dict[NamePlace, Maker] = {}
    extra: list[NamePlace] = []
    for keys, place in nearest.items():
        maker = room.maker(keys)
        if maker is None:
            extra.append(place)
        elif WRAPPED in keys:
            raise InvalidError(
                f"{show(keys[: keys.index(WRAPPED)])} is a tensor that wraps others, and the state does not have it yet",
                "make it before the load: the state of an optimizer is initialised by a step, for example with gradients of zero",
            )
        else:
            created[place] = maker
    return created, extra


def few(names: list[str]) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _warn_of_skipped(names: Names, matched: _Matched, number: int) -> None:
    """Warns of entries of modules that ``private="skip"`` leaves as they are although ranks have saved them."""
    left = [show(leaf.keys) for leaf in matched.skipped if leaf.is_of_module and names.owners(leaf.keys)]
    if left:
        log.warning(
            'private="skip" leaves %s as the module has them: step %d has them as private state of ranks only. '
            "private= with a function loads them from a rank",
            few(left),
            number,
        )


def _check_names(matched: _Matched, elsewhere: set[Keys], number: int) -> None:
    """Raises an error if the step lacks names of the state, or has others that are not ``elsewhere`` in the launch."""
    if matched.missing:
        raise NotFoundError(
            f"step {number} does not have {few([show(leaf.keys) for leaf in matched.missing])}",
            "load what it has with strict=False, or pass include= to choose names",
        )
    extra = [keys for space, keys in matched.extra if space is not None or keys not in elsewhere]
    if extra:
        raise InvalidError(
            f"step {number} has {few([show(keys) for keys in extra])}, for which the state has no place",
            "add them to the state, pass strict=False, or include= to choose names",
        )


_DECIDE = (
    'pass private="skip" to leave it as it is (such as RNG states; BatchNorm statistics would be those of a fresh module), '
    "or a function that gives for each rank the rank to take it from"
)


def _source_rank(names: Names, rank: int, world: int, private: Private | None, number: int) -> int | None:
    """Returns the rank whose private state this rank loads, or ``None`` if it loads none.

    Raises :class:`InvalidError` if the state of a rank that this launch does not have would be left out.
    """
    if not names.ranks or private == "skip":
        return rank if private is None else None
    if callable(private):
        return int(private(rank))
    ownerless = sorted(other for other in names.ranks if other >= world)
    if ownerless:
        raise InvalidError(
            f"step {number} has private state of {len(names.ranks)} ranks, and this launch has {world}: "
            f"the private state of ranks {ownerless} has no owner",
            _DECIDE,
        )
    return rank


def _check_sources(names: Names, matched: _Matched, rank: int, source: int | None, choices: LoadChoices, number: int) -> None:
    """Raises :class:`InvalidError` if this rank has entries that only other ranks have saved.

    If this rank may have saved too, such an entry is one that the step does not have, and a load that is not strict leaves
    it as it is.
    """
    owners = [(show(leaf.keys), found) for leaf in matched.missing if (found := names.owners(leaf.keys))]
    if not owners:
        return
    where = sorted({owner for _, found in owners for owner in found})
    lacking = few([name for name, _ in owners])
    if callable(choices.private):
        if choices.strict or source not in names.ranks:
            raise InvalidError(
                f"private= gives rank {rank} the private state of rank {source}, which has no {lacking}",
                f"step {number} has that of ranks {where}",
            )
    elif choices.strict or rank > max(names.ranks):
        raise InvalidError(f"rank {rank} has no source for {lacking}: step {number} has it as private state of ranks {where}", _DECIDE)


def _find(names: Names, leaf: Leaf, source: int | None) -> NamePlace | None:
    """Returns the name that a leaf receives: from the space in which the state has it, otherwise from the other one."""
    spaces = (source, None) if leaf.is_private else (None, source)
    return next(((space, leaf.keys) for space in spaces if (space, leaf.keys) in names.rows), None)
