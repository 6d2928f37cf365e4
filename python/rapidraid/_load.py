"""Loading: maps the names of a checkpoint to the leaves of a state, and handles those that do not match."""

from __future__ import annotations

import functools
import logging
import operator
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from . import _native
from ._device import DeviceTensor, is_on_device, load_to_devices
from .errors import CorruptError, InvalidError, NotFoundError
from .state import FLAG_ARRAY, FLAG_PICKLE, WRAPPED, Flat, Keys, Leaf, Maker, flatten, is_dtensor, is_tensor, show
from .tensors import (
    address,
    alias_key,
    check_writable,
    describe,
    dtype_of,
    has_elements,
    is_fillable,
    memory_span,
    nbytes,
    new_array,
    new_tensor,
    put_scratch,
    scratch_like,
)

log = logging.getLogger("rapidraid")

#: A name of a checkpoint: rank or ``None``, keys, kind, element type, bits, shape, flags.
Name = tuple[int | None, list[tuple[int, Any]], str, str, int, list[int], int]

#: The place of a name in a checkpoint: its space, a rank or ``None``, and its path.
_Place = tuple[int | None, Keys]
#: A target: row of the name, box or ``None`` for the whole, address, and length in bytes.
Target = tuple[int, tuple[list[int], list[int]] | None, int, int]
#: A load by ranges is used while all readers together want less than this fraction of a step.
#: Otherwise the whole step is read once, in order.
WORTH_RANGES = 0.25


class ReadWholeError(Exception):
    """Raised if so much of the step is wanted that the whole step should be read."""


@dataclass
class Reader:
    """A step that is being loaded, and the way in which its bytes are read."""

    session: _native.Session
    loaded: _native.LoadedStep
    #: Number of processes that load the same step at the same time.
    readers: int
    #: The deadline of the load, by the monotonic clock.
    until: float

    def check_wanted(self, targets: list[Target], names: list[int], expected: int = 0) -> None:
        """Raises :class:`ReadWholeError` if a load by ranges does not pay off; logs the reason for one otherwise.

        ``expected`` is the number of bytes that this load and later ones of the same host are expected to read.
        """
        is_by_ranges, why = self.loaded.by_ranges
        if not is_by_ranges:
            return
        total, wanted = self.loaded.wanted_bytes(targets, names)
        wanted = max(wanted, expected)
        if why:
            log.warning("step %d is read in parts, for want of memory: %s", self.loaded.number, why)
        elif wanted * self.readers >= total * WORTH_RANGES:
            raise ReadWholeError
        else:
            log.info("step %d: only the parts that are wanted are read, %d of %d bytes", self.loaded.number, wanted, total)

    def windows(self, targets: list[Target], names: list[int]) -> Iterator[list[int]]:
        """Reads the targets and names window by window.

        Yields for each window the indexes of the targets and names that have bytes in it.
        """
        for extents, places in self.loaded.windows(targets, names):
            if self.loaded.by_ranges[0]:
                self.session.read_extents(self.loaded, extents, max(0.0, self.until - time.monotonic()))
            yield places

    def copy(self, targets: list[Target]) -> str | None:
        """Copies to all targets. Returns ``None``, or the name of a damaged tensor."""
        for places in self.windows(targets, []):
            damaged = self.loaded._copy([targets[at] for at in places], _threads())
            if damaged is not None:
                return damaged
        return None

    def content(self, row: int) -> bytes:
        """Returns the bytes of a plain value."""
        next(self.windows([], [row]))
        return self.loaded.content(row)


def _threads() -> int:
    return max(1, min(16, len(os.sched_getaffinity(0))))


class Names:
    """The names of a checkpoint by space and path. With ``include``, only those for which it returns true."""

    def __init__(self, loaded: _native.LoadedStep, include: Callable[[str], bool] | None = None) -> None:
        self.step = loaded.number
        self.rows: dict[tuple[int | None, Keys], tuple[int, Name]] = {}
        #: The shared names, whatever ``include`` chooses.
        self.shared: list[Keys] = []
        #: The ranks that have private state. Other ranks may have saved too.
        self.ranks: set[int] = set()
        for row, name in enumerate(loaded.names()):
            keys = tuple((tag, key) for tag, key in name[1])
            if name[0] is None:
                self.shared.append(keys)
            if include is not None and not include(show(keys)):
                continue
            self.rows[(name[0], keys)] = (row, name)
            if name[0] is not None:
                self.ranks.add(name[0])

    def owners(self, keys: Keys) -> list[int]:
        """Returns the ranks that have a name as private state."""
        return [rank for rank in sorted(self.ranks) if (rank, keys) in self.rows]


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

        Raises :class:`InvalidError` on all ranks if some ranks load with ``strict`` and others without.
        """
        if self._elsewhere is None:
            # A collective that fails is not tried again.
            self._elsewhere = set()
            # The ranks load one step, so one bit for each name is enough. The bits are in the order of the sorted names.
            shared = sorted(names.shared)
            lacking = "".join("01"[not room.accepts(keys)] for keys in shared)
            step = (names.step, len(shared))
            told = self._gather((step, int(f"0{lacking}", 2), self._strict))
            said = {other[2]: rank for rank, other in enumerate(told) if other is not None}
            if len(said) > 1:
                raise InvalidError(f"rank {said[True]} loads with strict=True, rank {said[False]} with strict=False", "give all ranks one")
            # A rank that failed before it knew its names may have a place for all of them. A rank that loads another step is left out.
            bits = [0 if other is None else other[1] for other in told if other is None or other[0] == step]
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
    found: list[tuple[Leaf, _Place]]
    #: The leaves for which the step has no name, and which are needed.
    missing: list[Leaf]
    #: The leaves that ``private="skip"`` leaves as they are.
    skipped: list[Leaf]
    #: The names without a leaf that an object of the state accepts, with the maker of each tensor.
    created: dict[_Place, Maker]
    #: The other names without a leaf.
    extra: list[_Place]


def _match(names: Names, flat: Flat, room: Room, source: int | None, choices: LoadChoices) -> _Matched:
    """Matches the names of a step to a state. ``source`` is the rank whose private names are loaded."""
    found: list[tuple[Leaf, _Place]] = []
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


def _match_rest(names: Names, room: Room, source: int | None, taken: set[Keys]) -> tuple[dict[_Place, Maker], list[_Place]]:
    """Returns the names without a leaf that an object of the state accepts, with their makers, and the other ones.

    ``taken`` has the paths that leaves receive, from either space.
    """
    rest = [place for place in names.rows if place[0] in (None, source) and place[1] not in taken]
    # If a name is in both spaces, this rank loads its private value.
    nearest = {keys: (space, keys) for space, keys in sorted(rest, key=lambda place: place[0] is not None)}
    created: dict[_Place, Maker] = {}
    extra: list[_Place] = []
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


def _find(names: Names, leaf: Leaf, source: int | None) -> _Place | None:
    """Returns the name that a leaf receives: from the space in which the state has it, otherwise from the other one."""
    spaces = (source, None) if leaf.is_private else (None, source)
    return next(((space, leaf.keys) for space in spaces if (space, leaf.keys) in names.rows), None)


@dataclass
class _Destination:
    """A part of a tensor of the step, and the tensor or array of this process that receives it."""

    row: int
    part: tuple[list[int], list[int]] | None
    value: Any
    #: The element type in the step if it differs; otherwise ``None``.
    cast_from: str | None


class PlannedLoad:
    """The plan of a load, decided before anything is changed."""

    def __init__(self, loaded: _native.LoadedStep, cast: bool, allow_pickle: bool, is_strict: bool = True) -> None:
        self.loaded = loaded
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.is_strict = is_strict
        self.destinations: list[_Destination] = []
        self.values: list[tuple[Leaf, int, int]] = []
        #: The leaves whose tensors were made for this load, to be put in place.
        self.made: list[Leaf] = []
        self.created: dict[Keys, Any] = {}

    def add(self, leaf: Leaf, row: int, name: Name) -> None:
        """Adds one leaf to the plan."""
        _, _, kind, element, bits, shape, flags = name
        where = show(leaf.keys)
        if not has_elements(leaf.value):
            if kind == "tensor":
                raise InvalidError(
                    f"{where} is a tensor in step {self.loaded.number}, and a {type(leaf.value).__name__} in the state", "give it a tensor"
                )
            self._check_pickle(where, flags)
            self.values.append((leaf, row, flags))
            return
        if kind != "tensor":
            raise InvalidError(f"{where} is a plain value in step {self.loaded.number}, and a tensor in the state", "give it a plain value")
        found = describe(where, leaf.value)
        if list(found.shape) != list(shape):
            raise InvalidError(
                f"{where} has the shape {list(shape)} in step {self.loaded.number}, and {list(found.shape)} in the state",
                "load it into a tensor of that shape",
            )
        differs = (found.element, found.bits) != (element, bits)
        if differs and not self.cast:
            raise InvalidError(
                f"{where} is {element} in step {self.loaded.number}, and {found.element} in the state", "pass cast=True to convert it"
            )
        for piece in found.pieces:
            check_writable(where, piece.local)
            box = None if piece.box is None or tuple(piece.box[1]) == found.shape else piece.box
            part = None if box is None else (list(box[0]), list(box[1]))
            self.destinations.append(_Destination(row, part, piece.local, element if differs else None))
        if leaf.is_made:
            self.made.append(leaf)

    def create(self, keys: Keys, maker: Maker, row: int, name: Name) -> None:
        """Adds a name without a leaf in the state to the plan.

        An object of the state will receive the tensor or value made here.
        """
        _, _, kind, element, _, shape, flags = name
        if kind == "tensor":
            made = new_array(element, shape) if flags & FLAG_ARRAY else maker(keys, element, shape)
            self.add(Leaf(keys, made, False), row, name)
            self.created[keys] = made
            return
        self._check_pickle(show(keys), flags)
        self.values.append((Leaf(keys, None, False, lambda value: self.created.__setitem__(keys, value)), row, flags))

    def _check_pickle(self, where: str, flags: int) -> None:
        if flags & FLAG_PICKLE and not self.allow_pickle:
            raise InvalidError(
                f"{where} was stored by pickle, and opening a pickle runs code that it names",
                "pass allow_pickle=True if you trust who saved it",
            )

    def run(self, reader: Reader) -> str | None:
        """Copies and verifies all tensors, then puts the plain values in place.

        Returns ``None``, or the name of a damaged entry.
        """
        rows = [row for _, row, _ in self.values]
        reader.check_wanted([(destination.row, destination.part, 0, 0) for destination in self.destinations], rows)
        targets, on_devices, scratch = self._targets()
        contents = []
        for places in reader.windows([], rows):
            for leaf, row, flags in (self.values[at] for at in places):
                try:
                    content = self.loaded.content(row)
                except CorruptError:
                    return show(leaf.keys)
                contents.append((leaf, pickle.loads(content) if flags & FLAG_PICKLE else _native.decode_value(content)))
        for leaf, value in contents:
            if leaf.check is not None:
                leaf.check(value, self.is_strict)
        damaged = reader.copy(targets) or load_to_devices(on_devices, reader.copy)
        if damaged is not None:
            return damaged
        for value, loaded in scratch:
            put_scratch(value, loaded)
        for leaf, value in [*contents, *((leaf, leaf.value) for leaf in self.made)]:
            if leaf.put is not None:
                leaf.put(value)
        return None

    def _targets(self) -> tuple[list[Target], list[DeviceTensor], list[tuple[Any, Any]]]:
        """Returns the targets of the copy, the tensors on devices, and the pairs of a destination and its scratch memory.

        The scratch memory is put into the destination later. All three are in the order of the state. No two targets
        share memory. Weights that are tied in the state and in the step have one target. If destinations share memory
        and the step has several contents for them, each content is loaded into scratch memory and the last one wins, as
        with a plain load.
        """
        dropped, shared = self._overlaps()
        targets: list[Target] = []
        on_devices: list[DeviceTensor] = []
        scratch: list[tuple[Any, Any]] = []
        for at, destination in enumerate(self.destinations):
            if at in dropped:
                continue
            into = destination.value
            if at not in shared and is_on_device(into):
                dtype = into.dtype if destination.cast_from is None else dtype_of(destination.cast_from)
                on_devices.append(DeviceTensor(destination.row, destination.part, into, dtype))
                continue
            if destination.cast_from is not None:
                into = new_tensor(destination.cast_from, list(into.shape))
            elif at in shared or not is_fillable(into):
                into = scratch_like(into)
            if into is not destination.value:
                scratch.append((destination.value, into))
            targets.append((destination.row, destination.part, address(into), nbytes(into)))
        return targets, on_devices, scratch

    def _overlaps(self) -> tuple[set[int], set[int]]:
        """Returns the indexes of destinations that equal an earlier one, and of unequal ones that share memory."""
        groups: list[list[int]] = []
        end = 0
        spans = {at: span for at, destination in enumerate(self.destinations) if (span := memory_span(destination.value)) is not None}
        for at in sorted(spans, key=lambda at: spans[at]):
            if groups and spans[at][0] < end:
                groups[-1].append(at)
            else:
                groups.append([at])
            end = max(end, spans[at][1])
        dropped: set[int] = set()
        shared: set[int] = set()
        for group in (sorted(group) for group in groups if len(group) > 1):
            members = [self.destinations[at] for at in group]
            extents = self.loaded.extents_of([(member.row, member.part, 0, 0) for member in members])
            first_of: dict[Any, int] = {}
            for at, member, found in zip(group, members, extents, strict=True):
                key = (tuple(found), repr(member.part), member.cast_from, alias_key(member.value))
                if first_of.setdefault(key, at) != at:
                    dropped.add(at)
            if len(first_of) > 1:
                shared.update(first_of.values())
        return dropped, shared


def read_one(reader: Reader, name: str, allow_pickle: bool) -> Any:
    """Returns one entry of a step by its name in text form."""
    loaded = reader.loaded
    rank: int | None = None
    path = name
    if name.startswith("rank ") and ": " in name:
        number, path = name.removeprefix("rank ").split(": ", 1)
        if not number.isdecimal():
            raise InvalidError(f"{name} names no rank", "private entries are named like `rank 3: rng/torch`")
        rank = int(number)
    keys = _native.parse_path(path)
    row = loaded.find(rank, keys)
    if row is None and rank is None:
        ranks = sorted({name[0] for name in loaded.names() if name[0] is not None and name[1] == list(keys)})
        if len(ranks) > 1:
            raise InvalidError(f"{path} is private to each of the ranks {ranks}", f"ask for `rank {ranks[0]}: {path}`")
        row = loaded.find(ranks[0], keys) if ranks else None
    if row is None:
        raise NotFoundError(f"step {loaded.number} has no {name}", "`rapidraid show JOB/STEP --tensors` lists its names")
    _, _, kind, element, _, shape, flags = loaded.names()[row]
    if kind == "tensor":
        into = new_array(element, shape) if flags & FLAG_ARRAY else new_tensor(element, shape)
        targets: list[Target] = [(row, None, address(into), nbytes(into))]
        reader.check_wanted(targets, [])
        damaged = reader.copy(targets)
        if damaged is not None:
            raise CorruptError(f"{damaged} is damaged", "read another step")
        return into
    if flags & FLAG_PICKLE and not allow_pickle:
        raise InvalidError(f"{name} was stored by pickle", "pass allow_pickle=True if you trust who saved it")
    reader.check_wanted([], [row])
    content = reader.content(row)
    return pickle.loads(content) if flags & FLAG_PICKLE else _native.decode_value(content)
