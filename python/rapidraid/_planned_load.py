"""Copies the contents of a step into the tensors and values of a state."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from . import _native
from ._device import DeviceTensor, is_on_device, load_to_devices
from ._leaves import FLAG_ARRAY, FLAG_PICKLE, Keys, Leaf, Maker, show
from ._reader import Name, Reader, Target
from .errors import CorruptError, InvalidError, NotFoundError
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
