"""The layout of a state in the segments. It is made once and used for every save."""

from __future__ import annotations

import pickle
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import _native
from ._leaves import FLAG_ARRAY, FLAG_PICKLE, Flat, Keys, Leaf, is_array, is_dtensor, show
from ._owners import Owners, choose_owners, choose_owners_by_placement, declare, digest_of_layout
from ._ranks import raise_together, refusal_of
from .errors import InternalError, InvalidError
from .tensors import Box, Described, Layout, alias_key, copy_all, describe, has_elements, nbytes, register, view_of, volume

#: Spare room for plain values that grow from step to step, in bytes.
SLACK_BYTES = 256 << 10
#: Each rank hashes one part in ``SAMPLE_PARTS * world`` of the replicated content.
SAMPLE_PARTS = 50
#: Average room for the samples of one save in their message, in bytes.
MAX_SAMPLE_BYTES = 64 << 10
#: The length of one sample without its name, in bytes.
SAMPLE_ENTRY_BYTES = 24
#: The hint of the errors for a state that has changed.
_PREPARE = "call prepare(state) again, on all ranks"


@dataclass
class Owned:
    """A part of a tensor that this rank stores."""

    keys: Keys
    is_private: bool
    box: Box | None
    piece: int
    extent: int
    offset: int = 0


@dataclass
class OwnedValue:
    """A plain value that this rank stores."""

    keys: Keys
    is_private: bool
    extent: int
    is_pickled: bool


@dataclass
class Replicated:
    """A part of a tensor that several ranks hold. Each of them hashes the same sample of it."""

    label: str
    keys: Keys
    #: The index of the part among the tensor's pieces on this rank; ``None`` if it is the whole
    #: tensor.
    piece: int | None
    box: Box | None


@dataclass(frozen=True)
class Mapped:
    """A segment in the memory of this process."""

    segment: Any
    buffer: Any
    #: A view for each owned part.
    views: list[Any]
    #: A function that undoes the registration with CUDA, if there is one.
    unregister: Callable[[], None] | None


#: The contents of a save, in the order of its plan: parts of tensors, plain values, and replicated parts of which samples
#: are compared.
Sources = tuple[list[Any], list[bytes], list[Any]]


@dataclass
class Plan:
    """The place of each part of a state in the segments."""

    rank: int
    world: int
    owned: list[Owned]
    values: list[OwnedValue]
    writer: _native.TableWriter
    #: The layout of each name, to check that a later state has the same one.
    layout: dict[tuple[bool, Keys], tuple[Any, ...]]
    replicated: list[Replicated]
    segment_bytes: int
    sample_bytes: int
    #: Names whose content is stored under another name, because both were the same memory when the
    #: state was prepared.
    aliases: dict[tuple[bool, Keys], tuple[bool, Keys]]
    #: Each save compares one part in this many of the replicated content between the ranks.
    sample_rounds: int = 1
    #: The length of a segment of each rank of the launch, in bytes.
    rank_bytes: list[int] = field(default_factory=list)
    #: The segments, in the order of the daemon.
    mapped: list[Mapped] = field(default_factory=list)
    #: Shape and type of each owned part.
    layouts: list[Layout] = field(default_factory=list)

    @property
    def shared_bytes(self) -> int:
        """The bytes of the shared tensors that this rank stores."""
        parts = zip(self.owned, self.layouts, strict=True)
        return sum(volume(layout.shape) * layout.dtype.itemsize for owned, layout in parts if not owned.is_private)

    @property
    def segments(self) -> int:
        """The number of segments that have views."""
        return len(self.mapped)

    def release_segments(self) -> None:
        """Releases the segments."""
        unregister = [mapped.unregister for mapped in self.mapped]
        self.mapped = []
        for call in unregister:
            if call is not None:
                call()

    def add_segment(self, segment: Any) -> None:
        """Makes the views of a segment's memory once. Every save into the segment uses them."""
        buffer = memoryview(segment)
        views = [view_of(buffer, owned.offset, layout) for owned, layout in zip(self.owned, self.layouts, strict=True)]
        unregister = register(buffer) if any(layout.is_on_cuda for layout in self.layouts) else None
        # One list for all: with several lists, an exception in the middle would leave the lists out of step.
        self.mapped.append(Mapped(segment, buffer, views, unregister))

    def sources_if_fitting(self, flat: Flat, allow_pickle: bool) -> Sources | None:
        """Returns the contents to copy, or ``None`` if the state needs another plan.

        Its layout may have changed, or its plain values may have grown beyond the segments.
        """
        try:
            found = self.sources(flat, allow_pickle)
        except InvalidError:
            return None
        return found if self.needed_bytes(found) <= self.segment_bytes else None

    def needed_bytes(self, sources: Sources) -> int:
        """Returns the length of a segment in which these contents have room."""
        _, values, _ = sources
        for value, content in zip(self.values, values, strict=True):
            self.writer.set_length(value.extent, len(content))
        _, end = self.writer.offsets()
        return int(_native.HEADER_BYTES + end + self.writer.table_bytes())

    def grow(self, sources: Sources) -> None:
        """Makes the segments long enough for these contents, and for plain values of twice their length.

        The segments have to be made anew. Parts of tensors keep their places, and no other rank has to know.
        """
        slack = SLACK_BYTES + sum(len(content) for content in sources[1])
        self.segment_bytes = -(-(self.needed_bytes(sources) + slack) // 4096) * 4096

    def sources(self, flat: Flat, allow_pickle: bool) -> Sources:
        """Returns the contents to copy, in the order of the plan. Raises if the state's layout has changed."""
        found: dict[tuple[bool, Keys], Any] = {}
        values: dict[tuple[bool, Keys], bytes] = {}
        wanted = {(value.is_private, value.keys): value for value in self.values}
        seen = 0
        for leaf in flat.leaves:
            key = (leaf.is_private, leaf.keys)
            if has_elements(leaf.value):
                found[key] = leaf.value
                expected = self.layout.get(key)
                if expected is None or expected[0] is None or expected[1:] != _kind_of(leaf.value):
                    raise _changed(leaf, expected)
            else:
                if self.layout.get(key, (1,))[0] is not None:
                    raise _changed(leaf, self.layout.get(key))
                if key in wanted:
                    values[key] = encode(leaf, allow_pickle)
                    if bool(leaf.flags & FLAG_PICKLE) != wanted[key].is_pickled:
                        raise _changed(leaf, self.layout.get(key))
            seen += 1
        if seen != len(self.layout):
            missing = next(
                key for key in self.layout if key not in found and not any((leaf.is_private, leaf.keys) == key for leaf in flat.leaves)
            )
            raise InvalidError(f"{show(missing[1])} was in the state when it was prepared, and is not now", _PREPARE)
        for key, home in self.aliases.items():
            if alias_key(found[key]) != alias_key(found[home]):
                raise InvalidError(
                    f"{show(key[1])} shared its memory with {show(home[1])} when the state was prepared, and does not now",
                    _PREPARE,
                )
        described: dict[tuple[bool, Keys], Described] = {}

        def local(key: tuple[bool, Keys], at: int, box: Box | None) -> Any:
            if key not in described:
                described[key] = describe(show(key[1]), found[key])
            parts = described[key].pieces
            if at >= len(parts) or parts[at].box != box:
                raise InvalidError(
                    f"{show(key[1])} is spread over the ranks in another way than when the state was prepared",
                    _PREPARE,
                )
            return parts[at].local

        pieces = []
        for owned in self.owned:
            key = (owned.is_private, owned.keys)
            is_spread = owned.box is not None or is_dtensor(found[key])
            pieces.append(local(key, owned.piece, owned.box) if is_spread else found[key])
        samples = []
        for sampled in self.replicated:
            key = (False, sampled.keys)
            samples.append(found[key] if sampled.piece is None else local(key, sampled.piece, sampled.box))
        return pieces, [values[(value.is_private, value.keys)] for value in self.values], samples

    def copy(self, at: int, sources: Sources, launch: str, step: int) -> list[tuple[str, bytes]]:
        """Copies a state into a segment. Returns the hashes of this rank's samples of the replicated content."""
        pieces, values, samples = sources
        mapped = self.mapped[at]
        copy_all(mapped.segment, [owned.offset for owned in self.owned], mapped.views, pieces)
        for value, content in zip(self.values, values, strict=True):
            self.writer.set_length(value.extent, len(content))
        offsets, end = self.writer.offsets()
        buffer = mapped.buffer
        if end > len(buffer):
            raise InvalidError(f"the plain values of step {step} have grown beyond their segment", _PREPARE)
        for value, content in zip(self.values, values, strict=True):
            start = offsets[value.extent]
            buffer[start : start + len(content)] = content
        return [
            (sampled.label, bytes(_sample(value, self.world, launch, step)))
            for sampled, value in zip(self.replicated, samples, strict=True)
            if nbytes(value) and zlib.crc32(f"{step} {sampled.label}".encode()) % self.sample_rounds == 0
        ]


def _sample(value: Any, world: int, launch: str, step: int) -> Any:
    """Returns the hash of a window of a tensor. All ranks choose the same window, and it moves from step to step."""
    total = nbytes(value)
    length = min(total, max(total // (SAMPLE_PARTS * world), min(total, 64)))
    seed = int(launch[:12], 16) + step * 2654435761
    start = seed % (total - length + 1)
    torch = sys.modules["torch"]
    if not value.is_contiguous():
        row = value.detach().narrow(0, start % value.shape[0], 1).contiguous().cpu().view(-1).view(torch.uint8)
        return _native._sample_hash([(row.data_ptr(), min(length, row.numel()))])
    if value.device.type != "cpu":
        window = value.detach().view(-1).view(torch.uint8)[start : start + length].cpu()
        return _native._sample_hash([(window.data_ptr(), length)])
    return _native._sample_hash([(value.data_ptr() + start, length)])


def _kind_of(value: Any) -> tuple[Any, ...]:
    """Returns what must stay the same of a tensor or array that was prepared: a copy from a meta or sparse one would fail."""
    return tuple(value.shape), value.dtype, getattr(value, "layout", None), getattr(value, "is_meta", False)


def _changed(leaf: Leaf, expected: tuple[Any, ...] | None) -> InvalidError:
    if expected is not None:
        return InvalidError(f"{show(leaf.keys)} has another kind, shape or type than when the state was prepared", _PREPARE)
    return InvalidError(
        f"{show(leaf.keys)} is new since the state was prepared",
        # The list is one entry, whatever its length is.
        f"{_PREPARE} (a fresh optimizer has no state before its first step); or store a dict whose keys come and go as list(d.items())",
    )


def encode(leaf: Leaf, allow_pickle: bool) -> bytes:
    """Returns the encoded bytes of a plain value, as a pickle if it is allowed and needed."""
    found = _native.encode_value(leaf.value)
    if found is not None:
        leaf.flags &= ~FLAG_PICKLE
        return found
    if not allow_pickle:
        raise InvalidError(
            f"{show(leaf.keys)} is of type {type(leaf.value).__name__}, which is no plain value",
            "store its content, give it state_dict and load_state_dict, or pass allow_pickle=True",
        )
    leaf.flags |= FLAG_PICKLE
    return pickle.dumps(leaf.value, protocol=pickle.HIGHEST_PROTOCOL)


def make_plan(
    flat: Flat, rank: int, world: int, gather: Callable[[Any], list[Any]], allow_pickle: bool, are_ranks_default: bool = True
) -> Plan:
    """Describes a state, compares it with those of the other ranks, and decides which parts this rank stores.

    Returns the plan.

    Args:
        flat: The leaves of the state.
        rank: This rank.
        world: The number of ranks.
        gather: A collective that returns the argument of every rank.
        allow_pickle: Whether objects that are not plain values are stored by ``pickle``.
        are_ranks_default: Whether ranks have the numbers of the default group, as in meshes.

    """
    # All ranks process the names in the same order.
    flat.leaves.sort(key=lambda leaf: (leaf.is_private, leaf.keys))
    described: dict[tuple[bool, Keys], Described] = {}
    contents: dict[tuple[bool, Keys], bytes] = {}
    canonical: dict[tuple[Any, ...], Keys] = {}
    alias: dict[tuple[bool, Keys], Keys] = {}
    error: Exception | None = flat.error
    for leaf in flat.leaves:
        key = (leaf.is_private, leaf.keys)
        try:
            if has_elements(leaf.value):
                described[key] = describe(show(leaf.keys), leaf.value)
                shared = alias_key(leaf.value)
                if shared is not None:
                    first = canonical.setdefault((leaf.is_private, *shared), leaf.keys)
                    if first != leaf.keys:
                        alias[key] = first
            else:
                contents[key] = encode(leaf, allow_pickle)
        except Exception as found_wrong:  # noqa: BLE001 - the other ranks wait for this rank, whatever the error
            error = error or found_wrong
    private_bytes = sum(
        (described[key].len_bytes if key in described else len(contents.get(key, b"")))
        for key in ((leaf.is_private, leaf.keys) for leaf in flat.leaves)
        if key[0] and key not in alias
    )
    shared_leaves = [leaf for leaf in flat.leaves if not leaf.is_private]
    digest: bytes | None = None
    if error is None:
        try:
            digest = digest_of_layout(shared_leaves, described, contents, alias) if are_ranks_default else None
        except Exception as found_wrong:  # noqa: BLE001 - as above
            error = found_wrong
    everyone = gather((digest, private_bytes, refusal_of(error)))
    raise_together(error, rank, [refusal for *_, refusal in everyone])
    loads = [private for _, private, _ in everyone]
    digests = {other for other, *_ in everyone}
    is_by_placement = len(digests) == 1 and None not in digests
    if is_by_placement:
        owners, replicated_parts = choose_owners_by_placement(shared_leaves, described, alias, loads)
    else:
        # The layouts differ, or placements do not say who holds what: each rank tells what it has.
        owners, replicated_parts = choose_owners(gather(declare(shared_leaves, described, contents, alias)), loads)
    plan: Plan | None = None
    try:
        plan = _lay_out(flat, rank, world, described, contents, alias, owners, replicated_parts)
    except Exception as found_wrong:  # noqa: BLE001 - as above
        error = found_wrong
    sizes = (plan.segment_bytes, plan.sample_bytes, plan.shared_bytes) if plan is not None else (0, 0, 0)
    laid_out = gather((*sizes, refusal_of(error)))
    raise_together(error, rank, [refusal for *_, refusal in laid_out])
    assert plan is not None
    stored = sum(shared for _, _, shared, _ in laid_out)
    if is_by_placement and stored != (expected := _shared_bytes(shared_leaves, described, alias)):
        raise InternalError(f"the ranks would store {stored} of {expected} bytes of what they share")
    plan.rank_bytes = [segment for segment, *_ in laid_out]
    # All samples of a save are sent in one message, so a state with many names is compared over
    # several saves.
    plan.sample_rounds = max(1, -(-max(samples for _, samples, *_ in laid_out) // MAX_SAMPLE_BYTES))
    return plan


def _shared_bytes(shared: list[Leaf], described: dict[tuple[bool, Keys], Described], alias: dict[tuple[bool, Keys], Keys]) -> int:
    """Returns the bytes of all shared tensors, each counted once."""
    keys = ((False, leaf.keys) for leaf in shared)
    found = (described[key] for key in keys if key in described and key not in alias)
    return sum(volume(tensor.shape) * tensor.bits // 8 for tensor in found)


def _lay_out(
    flat: Flat,
    rank: int,
    world: int,
    described: dict[tuple[bool, Keys], Described],
    contents: dict[tuple[bool, Keys], bytes],
    alias: dict[tuple[bool, Keys], Keys],
    owners: Owners,
    replicated_parts: set[tuple[Keys, Box | None]],
) -> Plan:
    writer = _native.TableWriter()
    owned: list[Owned] = []
    layouts: list[Layout] = []
    extents: dict[tuple[bool, Keys, Box | None], int] = {}
    layout: dict[tuple[bool, Keys], tuple[Any, ...]] = {}
    replicated: list[Replicated] = []
    values: list[OwnedValue] = []
    value_bytes = 0
    # Names that share their content come after the name that stores it.
    leaves = sorted(flat.leaves, key=lambda leaf: (leaf.is_private, leaf.keys) in alias)
    for leaf in leaves:
        key = (leaf.is_private, leaf.keys)
        found = described.get(key)
        if found is None:
            layout[key] = (None,)
            continue
        layout[key] = (found.element, *_kind_of(leaf.value))
        flags = leaf.flags | (FLAG_ARRAY if is_array(leaf.value) else 0)
        source = alias.get(key)
        for at, piece in enumerate(found.pieces):
            if not leaf.is_private and source is None and (leaf.keys, piece.box) in replicated_parts and not is_array(leaf.value):
                label = show(leaf.keys) if piece.box is None else f"{show(leaf.keys)}, the box of {piece.box[1]} at {piece.box[0]},"
                replicated.append(Replicated(label, leaf.keys, None if piece.box is None else at, piece.box))
            home = source if source is not None else leaf.keys
            if not leaf.is_private and owners.get((home, piece.box)) != rank:
                continue
            extent = extents.get((leaf.is_private, home, piece.box))
            if extent is None:
                extent = writer.add_extent(nbytes(piece.local))
                extents[(leaf.is_private, home, piece.box)] = extent
                owned.append(Owned(leaf.keys, leaf.is_private, piece.box, at, extent))
                layouts.append(Layout.of(piece.local))
            start, size = piece.box if piece.box is not None else (None, None)
            if start is not None and tuple(size or ()) == found.shape:
                start = size = None
            writer.add_tensor(
                rank if leaf.is_private else None, list(leaf.keys), found.element, found.bits, list(found.shape), extent,
                list(start) if start is not None else None, list(size) if size is not None else None, flags,
            )  # fmt: skip
    for leaf in flat.leaves:
        key = (leaf.is_private, leaf.keys)
        if key in described or (not leaf.is_private and owners.get((leaf.keys, None)) != rank):
            continue
        extent = writer.add_extent(len(contents[key]))
        value_bytes += len(contents[key]) + 64
        is_value = not leaf.flags & FLAG_PICKLE
        writer.add_bytes(rank if leaf.is_private else None, list(leaf.keys), is_value, extent, leaf.flags)
        values.append(OwnedValue(leaf.keys, leaf.is_private, extent, not is_value))
    offsets, end = writer.offsets()
    for part in owned:
        part.offset = offsets[part.extent]
    segment_bytes = _native.HEADER_BYTES + end + value_bytes + SLACK_BYTES + writer.table_bytes() * 2
    segment_bytes = -(-segment_bytes // 4096) * 4096
    sample_bytes = sum(len(sampled.label.encode()) + SAMPLE_ENTRY_BYTES for sampled in replicated)
    homes = {key: (key[0], home) for key, home in alias.items()}
    plan = Plan(rank, world, owned, values, writer, layout, replicated, segment_bytes, sample_bytes, homes)
    plan.layouts = layouts
    return plan
