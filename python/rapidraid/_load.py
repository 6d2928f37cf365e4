"""Loading: maps the names of a checkpoint to the leaves of a state, and handles those that do not match."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import _native
from ._device import DeviceTensor, is_on_device, load_to_devices
from .errors import CorruptError, InvalidError, NotFoundError
from .state import FLAG_ARRAY, FLAG_PICKLE, Flat, Keys, Leaf, Maker, flatten, show
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
    #: Number of processes that load the same at the same time.
    readers: int
    #: The deadline of the load, by the monotonic clock.
    until: float

    def check_wanted(self, targets: list[Target], names: list[int]) -> None:
        """Raises :class:`ReadWholeError` if a load by ranges does not pay off; logs the reason for one otherwise."""
        is_by_ranges, why = self.loaded.by_ranges
        if not is_by_ranges:
            return
        total, wanted = self.loaded.wanted_bytes(targets, names)
        if why:
            log.warning("step %d is read in parts, for want of memory: %s", self.loaded.number, why)
        elif wanted * self.readers >= total * WORTH_RANGES:
            raise ReadWholeError
        else:
            log.info("step %d: only the parts that are wanted are read, %d of %d bytes", self.loaded.number, wanted, total)

    def windows(self, targets: list[Target], names: list[int]) -> Iterator[list[int]]:
        """Reads the targets and names window by window.

        Yields the indexes of those that have bytes in the current window.
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
    """The names of a checkpoint by space and path."""

    def __init__(self, loaded: _native.LoadedStep) -> None:
        self.rows: dict[tuple[int | None, Keys], tuple[int, Name]] = {}
        self.ranks: set[int] = set()
        for row, name in enumerate(loaded.names()):
            self.rows[(name[0], tuple((tag, key) for tag, key in name[1]))] = (row, name)
            if name[0] is not None:
                self.ranks.add(name[0])


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


def load_into(reader: Reader, state: Mapping[Any, Any], rank: int, world: int, choices: LoadChoices) -> str | None:
    """Loads a step into a state, in place. Returns ``None``, or the name of what is damaged.

    Changes nothing until everything is known to match.
    """
    loaded = reader.loaded
    strict, include, private = choices.strict, choices.include, choices.private
    names = Names(loaded)
    flat = flatten(state, world)
    source_rank = _source_rank(names, rank, world, private)
    job = PlannedLoad(loaded, choices.cast, choices.allow_pickle)
    used: set[tuple[int | None, Keys]] = set()
    missing: list[str] = []
    for leaf in flat.leaves:
        if include is not None and not include(show(leaf.keys)):
            continue
        key = _find(names, leaf, source_rank)
        if key is None:
            # An object without entries gets those that the checkpoint has below it.
            is_filled = leaf.keys in flat.creatable and any(
                owner in (None, source_rank) and keys[: len(leaf.keys)] == leaf.keys and (include is None or include(show(keys)))
                for owner, keys in names.rows
            )
            if not is_filled and not (leaf.is_private and private == "skip"):
                missing.append(show(leaf.keys))
            continue
        used.add(key)
        # If the checkpoint has a name in both spaces, ``_find`` chose the nearer one.
        job.add(leaf, *names.rows[key])
    extra = [
        key for key in names.rows
        if key not in used and key[0] in (None, source_rank) and (include is None or include(show(key[1])))
    ]  # fmt: skip
    makers = {key: maker for key in extra if (maker := _maker_of(flat, key[1])) is not None}
    extra = [key for key in extra if key not in makers and (None, key[1]) not in used and (source_rank, key[1]) not in used]
    if private == "skip":
        extra = [key for key in extra if key[0] is None]
    if strict:
        if missing:
            raise NotFoundError(
                f"step {loaded.number} does not have {_few(missing)}",
                "load what it has with strict=False, or pass include= to choose names",
            )
        if extra:
            raise InvalidError(
                f"step {loaded.number} has {_few([show(keys) for _, keys in extra])}, for which the state has no place",
                "add them to the state, pass strict=False, or include= to choose names",
            )
    for key, maker in makers.items():
        job.create(key[1], maker, *names.rows[key])
    damaged = job.run(reader)
    if damaged is None:
        for finish in flat.finish:
            finish(job.created)
    return damaged


def _maker_of(flat: Flat, keys: Keys) -> Maker | None:
    """Returns the maker for a name without a leaf in the state, or ``None`` if no object of the state accepts it."""
    return next((maker for end in range(len(keys) + 1) if (maker := flat.creatable.get(keys[:end])) is not None), None)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _source_rank(names: Names, rank: int, world: int, private: Any) -> int | None:
    """Returns the rank whose private state this rank loads, or ``None`` if it loads none."""
    if not names.ranks or private == "skip":
        return rank if private is None else None
    if callable(private):
        source = private(rank)
        if source not in names.ranks:
            raise InvalidError(
                f"private= gives rank {rank} the private state of rank {source}", f"the step has that of ranks {sorted(names.ranks)}"
            )
        return int(source)
    if names.ranks != set(range(world)):
        ownerless = sorted(names.ranks - set(range(world)))
        sourceless = sorted(set(range(world)) - names.ranks)
        parts = []
        if ownerless:
            parts.append(f"the private state of ranks {ownerless} has no owner")
        if sourceless:
            parts.append(f"ranks {sourceless} have no source for theirs")
        raise InvalidError(
            f"the step was saved by {len(names.ranks)} ranks with private state, and this launch has {world}: {' and '.join(parts)}",
            'pass private="skip" to leave it, or a function that gives for each rank the rank to take it from',
        )
    return rank


def _find(names: Names, leaf: Leaf, source_rank: int | None) -> tuple[int | None, Keys] | None:
    own = (source_rank, leaf.keys)
    shared = (None, leaf.keys)
    order: list[tuple[int | None, Keys]] = [own, shared] if leaf.is_private else [shared]
    if not leaf.is_private and source_rank is not None and len(names.ranks) == 1:
        # The step was saved by a single rank: its undeclared state also serves as shared state.
        order.append(own)
    return next((key for key in order if key[0] is not None or key is shared if key in names.rows), None)


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

    def __init__(self, loaded: _native.LoadedStep, cast: bool, allow_pickle: bool) -> None:
        self.loaded = loaded
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.destinations: list[_Destination] = []
        self.values: list[tuple[Leaf, int, int]] = []
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
        damaged = reader.copy(targets) or load_to_devices(on_devices, reader.copy)
        if damaged is not None:
            return damaged
        for value, loaded in scratch:
            put_scratch(value, loaded)
        for leaf, value in contents:
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
