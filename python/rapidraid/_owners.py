"""Which rank stores which part of the content that ranks share.

If all ranks have the same names, shapes, placements and plain values, each of them knows from the placements alone who holds
what. The ranks then exchange only a digest. Otherwise each rank declares its parts to all others, which also finds what
differs.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from typing import Any

from ._leaves import FLAG_PICKLE, Keys, Leaf, is_dtensor, show
from .errors import InvalidError
from .tensors import Box, Described, Parts, nbytes, volume

#: A part of the shared content: its path, and its box. Plain values and whole tensors have no box.
Part = tuple[Keys, Box | None]
#: The rank that stores each part.
Owners = dict[Part, int]

#: The declaration of a tensor that ranks exchange: element type, bits, shape, boxes with lengths in
#: bytes, the name with which it shares its content or ``None``, and flags.
Declared = tuple[str, int, tuple[int, ...], tuple[tuple[Box | None, int], ...], Keys | None, int]

#: The declaration of a plain value: its length in bytes, and the hash of its bytes if all ranks must have the same ones.
DeclaredValue = tuple[int, bytes | None]

#: The hint for a value that differs between ranks.
_OWN_NAME = (
    "if pipeline stages have optimizers or schedulers with different settings, give those of each stage a key of their own in the "
    'state, such as f"optimizer{stage}"; declare other values that differ with rapidraid.per_rank()'
)


def digest_of_layout(
    shared: list[Leaf],
    described: dict[tuple[bool, Keys], Described],
    contents: dict[tuple[bool, Keys], bytes],
    alias: dict[tuple[bool, Keys], Keys],
) -> bytes | None:
    """Returns a hash of the names, types, shapes and placements of the shared leaves, and of the values that must be equal.

    Returns ``None`` if placements do not say which ranks hold the parts of a tensor. The ranks must have the numbers of
    the default group, because meshes use these numbers.
    """
    hasher = hashlib.blake2b(digest_size=16)
    meshes: dict[int, str] = {}
    for leaf in shared:
        key = (False, leaf.keys)
        found = described.get(key)
        placed = ""
        if isinstance(leaf.value, Parts):
            return None
        if is_dtensor(leaf.value):
            if hasattr(leaf.value.to_local(), "__create_chunk_list__"):
                return None
            mesh = leaf.value.device_mesh
            placed = f"{meshes.setdefault(id(mesh), repr(mesh.mesh.tolist()))} {leaf.value.placements!r}"
        about = _declared_value(leaf, contents)[1] if found is None else (found.element, found.bits, found.shape, leaf.flags)
        hasher.update(repr((leaf.keys, about, alias.get(key), placed)).encode())
    return hasher.digest()


def choose_owners_by_placement(
    shared: list[Leaf], described: dict[tuple[bool, Keys], Described], alias: dict[tuple[bool, Keys], Keys], loads: list[int]
) -> tuple[Owners, set[Part]]:
    """Decides as :func:`choose_owners` for layouts of one digest, for the parts that this rank holds.

    The owner of a part is the one of its holders that stores the fewest bytes so far. Only private bytes and the bytes of
    parts with the same holders are counted. So all holders come to the same decision, although each rank sees only its own
    parts. The owner of a plain value follows from the hash of its name.
    """
    owners: Owners = {}
    replicated: set[Part] = set()
    everyone = tuple(range(len(loads)))
    counted: dict[tuple[int, ...], dict[int, int]] = {}
    holders: dict[tuple[int, str], tuple[int, ...]] = {}
    parts: list[tuple[int, Part, tuple[int, ...]]] = []
    for leaf in shared:
        key = (False, leaf.keys)
        found = described.get(key)
        if found is None:
            # The lengths of plain values may differ between the ranks.
            owners[(leaf.keys, None)] = zlib.crc32(repr(leaf.keys).encode()) % len(loads)
            if len(loads) > 1:
                replicated.add((leaf.keys, None))
            continue
        if key in alias or not found.pieces:
            continue
        ranks = everyone
        if is_dtensor(leaf.value):
            # All ranks of the mesh have a tensor without elements.
            is_whole = 0 in found.shape
            about = (id(leaf.value.device_mesh), "" if is_whole else repr(leaf.value.placements))
            ranks = holders.get(about) or holders.setdefault(about, _holders(leaf.value, is_whole))
        parts += [(nbytes(piece.local), (leaf.keys, piece.box), ranks) for piece in found.pieces]
    for size, part, ranks in sorted(parts, key=lambda entry: (-entry[0], entry[1][0], entry[1][1] or ((), ()))):
        bytes_of = counted.setdefault(ranks, {rank: loads[rank] for rank in ranks})
        owner = min(ranks, key=lambda rank: (bytes_of[rank], rank))
        owners[part] = owner
        bytes_of[owner] += size
        if len(ranks) > 1:
            replicated.add(part)
    return owners, replicated


def _holders(tensor: Any, is_whole: bool) -> tuple[int, ...]:
    """Returns the ranks that hold the same parts of a ``DTensor`` as this rank: all of its mesh if each has the whole."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    chosen = mesh.mesh
    # From the last dimension on, so that the earlier ones keep their numbers.
    for at in reversed(range(mesh.ndim)):
        if not is_whole and not tensor.placements[at].is_replicate():
            chosen = chosen.select(at, coordinate[at])
    return tuple(sorted(int(rank) for rank in chosen.flatten().tolist()))


def declare(
    shared: list[Leaf],
    described: dict[tuple[bool, Keys], Described],
    contents: dict[tuple[bool, Keys], bytes],
    alias: dict[tuple[bool, Keys], Keys],
) -> dict[Keys, Any]:
    """Returns what this rank has of the shared content: a :data:`Declared` for a tensor, a :data:`DeclaredValue` otherwise."""
    declared: dict[Keys, Any] = {}
    for leaf in shared:
        key = (False, leaf.keys)
        found = described.get(key)
        if found is None:
            declared[leaf.keys] = _declared_value(leaf, contents)
        else:
            boxes = tuple((piece.box, nbytes(piece.local)) for piece in found.pieces)
            declared[leaf.keys] = (found.element, found.bits, found.shape, boxes, alias.get(key), leaf.flags)
    return declared


def _declared_value(leaf: Leaf, contents: dict[tuple[bool, Keys], bytes]) -> DeclaredValue:
    content = contents.get((False, leaf.keys), b"")
    # Equal objects may have different pickles.
    is_compared = leaf.must_be_equal and not leaf.flags & FLAG_PICKLE
    return len(content), hashlib.blake2b(content, digest_size=16).digest() if is_compared else None


def choose_owners(declared: list[dict[Keys, Any]], loads: list[int]) -> tuple[Owners, set[Part]]:
    """Decides which rank stores each part of the shared content: the holder with the fewest bytes so far.

    All ranks come to the same decision. Returns the owners, and the parts that several ranks hold.

    Args:
        declared: The result of :func:`declare` of each rank.
        loads: The bytes that each rank stores anyway.

    """
    holders: dict[tuple[Keys, Box | None], list[int]] = {}
    sizes: dict[tuple[Keys, Box | None], int] = {}
    first: dict[Keys, tuple[int, Any]] = {}
    for rank, names in enumerate(declared):
        for keys, about in names.items():
            known = first.setdefault(keys, (rank, about))
            if _is_plain(about):
                if not _is_plain(known[1]):
                    raise _differ(keys, known[0], rank, "a tensor", "a plain value")
                if None not in (about[1], known[1][1]) and about[1] != known[1][1]:
                    raise InvalidError(
                        f"{show(keys)} is said to be the same on all ranks, and differs between the ranks {known[0]} and {rank}", _OWN_NAME
                    )
                holders.setdefault((keys, None), []).append(rank)
                sizes[(keys, None)] = max(sizes.get((keys, None), 0), about[0])
                continue
            if _is_plain(known[1]):
                raise _differ(keys, known[0], rank, "a plain value", "a tensor")
            for what, mine, theirs in zip(("element type", "bits", "shape"), about, known[1], strict=False):
                if mine != theirs:
                    raise _differ(keys, known[0], rank, f"the {what} {theirs}", f"the {what} {mine}")
            if about[4] != known[1][4]:
                raise _differ(keys, known[0], rank, "one way of sharing memory", "another")
            if about[4] is not None:
                continue
            for box, size in about[3]:
                holders.setdefault((keys, box), []).append(rank)
                sizes[(keys, box)] = size
    _check_tiling(first, holders)
    loads = list(loads)
    owners: Owners = {}
    order = sorted(holders, key=lambda part: (len(holders[part]) > 1, -sizes[part], part[0], part[1] or ((), ())))
    for part in order:
        owner = min(holders[part], key=lambda rank: (loads[rank], rank))
        owners[part] = owner
        loads[owner] += sizes[part]
    return owners, {part for part in holders if len(holders[part]) > 1}


def _is_plain(about: Any) -> bool:
    """Returns whether a declaration is a :data:`DeclaredValue`."""
    return len(about) == 2


def _differ(keys: Keys, first: int, second: int, one: str, other: str) -> InvalidError:
    return InvalidError(f"{show(keys)}: rank {first} has {one}, rank {second} {other}", "all ranks must save the same state")


def _check_tiling(first: dict[Keys, tuple[int, Any]], holders: dict[tuple[Keys, Box | None], list[int]]) -> None:
    """Raises :class:`InvalidError` for a tensor whose parts overlap or leave a gap, with its name and the ranks."""
    boxes: dict[Keys, list[tuple[Box, list[int]]]] = {}
    for (keys, box), ranks in holders.items():
        if box is not None:
            boxes.setdefault(keys, []).append((box, ranks))
    for keys, parts in boxes.items():
        shape = first[keys][1][2]
        covered = sum(volume(box[1]) for box, _ in parts)
        if (overlap := _find_overlap(sorted(part for part in parts if volume(part[0][1])))) is not None:
            (one, ranks), (other, others) = overlap
            raise InvalidError(
                f"{show(keys)}: the parts of ranks {ranks} and {others} overlap: {one} and {other}",
                "parts of a tensor must be the same or apart",
            )
        if covered != volume(shape):
            raise InvalidError(
                f"{show(keys)}: its parts have {covered} of {volume(shape)} elements (ranks {sorted({r for _, rs in parts for r in rs})})",
                "the parts of all ranks together must be the whole tensor",
            )


#: A box, and the ranks that hold it.
_Held = tuple[Box, list[int]]


def _find_overlap(parts: list[_Held]) -> tuple[_Held, _Held] | None:
    """Returns two boxes that overlap, or ``None``.

    Boxes that a cut along a dimension separates cannot overlap, so each side of the cut is searched alone. The parts of a
    usual sharding are separated by such cuts down to single boxes. Only the boxes that no cut separates are compared pair by
    pair.
    """
    if len(parts) < 2:
        return None
    for dim in range(len(parts[0][0][0])):
        groups = _cut(parts, dim)
        if len(groups) > 1:
            return next((found for group in groups if (found := _find_overlap(group)) is not None), None)
    for one, other in itertools.combinations(parts, 2):
        if all(a < b + m and b < a + n for a, n, b, m in zip(*one[0], *other[0], strict=True)):
            return one, other
    return None


def _cut(parts: list[_Held], dim: int) -> list[list[_Held]]:
    """Returns groups of boxes, such that boxes of different groups have no index of the dimension in common."""
    groups: list[list[_Held]] = []
    end = 0
    for part in sorted(parts, key=lambda part: part[0][0][dim]):
        start, size = part[0][0][dim], part[0][1][dim]
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(part)
        end = max(end, start + size)
    return groups
