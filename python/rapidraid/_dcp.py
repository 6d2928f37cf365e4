"""Translates between plans of ``torch.distributed.checkpoint`` (DCP) and the leaves of a state.

DCP names an entry by the keys of its path, joined by dots. The entry is stored under the path itself. So a
:class:`~rapidraid.Checkpointer` loads what DCP has saved from a state of the same structure, and DCP loads what a
Checkpointer has saved.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem, SavePlanner, WriteItem, WriteItemType

from ._leaves import FLAG_ARRAY, SEQUENCE, Flat, Key, Keys, Leaf, is_dtensor, show
from ._planned_load import PlannedLoad
from ._reader import Name, Names, Reader
from .errors import InvalidError, NotFoundError
from .tensors import Parts, Piece, new_tensor

#: The version of DCP's metadata, if this version of torch has one.
_VERSION = {"version": filesystem.CURRENT_DCP_VERSION} if hasattr(filesystem, "CURRENT_DCP_VERSION") else {}
#: The path of each entry, by DCP's name of it.
Mappings = Mapping[str, tuple[str | int, ...]]


def _keys_of(path: tuple[str | int, ...]) -> Keys:
    # A text is the key of a dict, and an integer a position in a list: DCP turns integer keys into texts.
    return tuple((0, key) if isinstance(key, str) else (2, key) for key in path)


def name_of(keys: Keys) -> str:
    """Returns DCP's name of a path."""
    return ".".join(str(key) for _, key in keys)


def _is_whole(value: Any) -> bool:
    """Returns whether a value is a plain tensor that is all of its entry.

    The attributes of DCP's ``CheckpointableTensor`` make a plain tensor a part of a larger one.
    """
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not hasattr(value, "global_offsets")


def flatten_objects(planner: DefaultSavePlanner) -> Flat | None:
    """Returns the leaves that the default planner would plan, without the cost of a plan.

    Returns ``None`` if the state has tensors whose parts only a plan tells.
    """
    flat = Flat()
    lengths: dict[tuple[str | int, ...], int] = {}
    for name, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor) and not _is_whole(value) and not is_dtensor(value):
            return None
        flat.leaves.append(Leaf(_keys_at(planner.mappings.get(name, (name,)), lengths), value, False))
    flat.leaves += _markers(lengths)
    return flat


def _keys_at(path: tuple[str | int, ...], lengths: dict[tuple[str | int, ...], int]) -> Keys:
    """Returns the keys of a path, and notes the lengths of the lists that it goes through."""
    for depth, key in enumerate(path):
        if isinstance(key, int):
            lengths[path[:depth]] = max(lengths.get(path[:depth], 0), key + 1)
    return _keys_of(path)


def _markers(lengths: dict[tuple[str | int, ...], int]) -> list[Leaf]:
    """Returns the entries with the lengths of lists, which a load into a state with lists needs."""
    return [Leaf((*_keys_of(path), SEQUENCE), ["list", length], False) for path, length in lengths.items()]


def _is_plain(planner: SavePlanner) -> bool:
    """Returns whether a planner saves the objects of the state as they are."""
    kind = type(planner)
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(kind, name) is getattr(DefaultSavePlanner, name) for name in ("resolve_data", "lookup_object", "transform_object")
    )


def flatten_plan(items: list[WriteItem], mappings: Mappings, planner: SavePlanner) -> Flat:
    """Returns the leaves that a plan of this rank saves.

    DCP takes everything that it does not shard to be the same on all ranks, so one rank stores it.
    """
    flat = Flat()
    is_plain = _is_plain(planner)
    parts: dict[str, list[Piece]] = {}
    lengths: dict[tuple[str | int, ...], int] = {}
    for item in items:
        name = item.index.fqn
        keys = _keys_at(mappings.get(name, (name,)), lengths)
        if item.type == WriteItemType.BYTE_IO:
            flat.leaves.append(Leaf(keys, _value_of(item, planner, is_plain), False))
            continue
        about = item.tensor_data
        if about is None or about.chunk is None:
            raise InvalidError(f"the planner does not say which part of {name} it saves", "give its item tensor_data with a chunk")
        if is_plain and isinstance(planner, DefaultSavePlanner) and is_dtensor(planner.state_dict.get(name)):
            # DCP's box of a strided shard is wrong: its rows are not one run. The placements say which they are.
            if name not in parts:
                parts[name] = []
                flat.leaves.append(Leaf(keys, planner.state_dict[name], False))
            continue
        data = planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            raise InvalidError(f"the planner gives no tensor for {name}", "return one from resolve_data")
        data = data.detach()
        if item.type == WriteItemType.TENSOR:
            flat.leaves.append(Leaf(keys, data, False))
            continue
        first = name not in parts
        parts.setdefault(name, []).append(Piece((tuple(about.chunk.offsets), tuple(about.chunk.sizes)), data))
        if first:
            flat.leaves.append(Leaf(keys, Parts(tuple(about.size), data.dtype, ()), False))
    for at, leaf in enumerate(flat.leaves):
        if isinstance(leaf.value, Parts):
            found = parts[name_of(leaf.keys)]
            flat.leaves[at] = Leaf(leaf.keys, Parts(leaf.value.shape, leaf.value.dtype, tuple(found)), False)
    flat.leaves += _markers(lengths)
    return flat


def _value_of(item: WriteItem, planner: SavePlanner, is_plain: bool) -> Any:
    if is_plain and isinstance(planner, DefaultSavePlanner):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise InvalidError(f"the planner gives no bytes for {item.index.fqn}", "return io.BytesIO from resolve_data")
    data.seek(0)
    # The planner of this process has made the pickle just now.
    return torch.load(data, weights_only=False)


class _Entries(Mapping[str, Any]):
    """The metadata of a step's entries. Each is made when it is asked for."""

    def __init__(self, rows: dict[str, Name]) -> None:
        self.rows = rows

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        _, _, kind, element, _, shape, flags = self.rows[name]
        # For DCP an array is an object like others.
        if kind != "tensor" or flags & FLAG_ARRAY:
            return BytesStorageMetadata()
        dtype = getattr(torch, element, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidError(f"torch has no dtype {element!r}", "load with a newer torch")
        size = torch.Size(shape)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(shape)), size)])

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def _named(names: Names, rank: int) -> dict[str, tuple[int, Name]]:
    """Returns the rows that a rank sees by DCP's names: the shared ones, and its private ones where none is shared."""
    found: dict[str, tuple[int, Name]] = {}
    owners: dict[str, tuple[int | None, Keys]] = {}
    for (owner, keys), (row, name) in names.rows.items():
        if owner not in (None, rank) or (keys and keys[-1] == SEQUENCE):
            continue
        text = name_of(keys)
        if text in owners and owners[text][1] != keys:
            raise InvalidError(f"{show(owners[text][1])} and {show(keys)} are both {text} for DCP", "load the step with a Checkpointer")
        if text not in owners or owner is None:
            owners[text] = (owner, keys)
            found[text] = (row, name)
    return found


def left_out(names: Names, rank: int) -> list[tuple[int, Keys]]:
    """Returns the private entries that a rank does not see by DCP's names: their ranks and paths."""
    seen = {row for row, _ in _named(names, rank).values()}
    rows = ((owner, keys) for (owner, keys), (row, _) in names.rows.items() if row not in seen and keys[-1:] != (SEQUENCE,))
    return [(owner, keys) for owner, keys in rows if owner is not None]


def metadata_of(names: Names, rank: int, meta: StorageMeta) -> Metadata:
    """Returns DCP's metadata of a step. Its size depends on the number of tensors, not on the number of ranks that saved the step."""
    rows = {text: name for text, (_, name) in _named(names, rank).items()}
    paths = {text: tuple(key if tag == 2 else str(key) for tag, key in name[1]) for text, name in rows.items()}
    return Metadata(_Entries(rows), planner_data=paths, storage_meta=meta, **_VERSION)  # type: ignore[arg-type]


def read_plan(reader: Reader, items: list[ReadItem], planner: LoadPlanner, rank: int, *, cast: bool, allow_pickle: bool) -> str | None:
    """Reads the items of a plan into the tensors of the planner. Returns ``None``, or the name of a damaged entry."""
    named = _named(Names(reader.loaded), rank)
    load = PlannedLoad(reader.loaded, cast, allow_pickle)
    tensors: list[tuple[ReadItem, torch.Tensor]] = []
    arrays: list[tuple[ReadItem, torch.Tensor]] = []
    state = planner.state_dict if _loads_in_place(planner) and isinstance(planner, DefaultLoadPlanner) else {}
    whole: set[str] = set()
    for item in items:
        row, name = named[item.storage_index.fqn]
        keys: tuple[Key, ...] = tuple((tag, key) for tag, key in name[1])
        own = state.get(item.dest_index.fqn)
        if item.type == LoadItemType.BYTE_IO and name[2] == "tensor":
            array = new_tensor(name[3], name[5])
            load.add(Leaf(keys, array, False), row, name)
            arrays.append((item, array))
        elif item.type == LoadItemType.BYTE_IO:

            def put(value: Any, item: ReadItem = item) -> None:
                planner.load_bytes(item, _as_stream(value))

            load.add(Leaf(keys, None, False, put), row, name)
        elif is_dtensor(own) or _is_whole(own):
            # DCP's box of a strided shard is wrong, so the placements say what this rank reads.
            if item.dest_index.fqn not in whole:
                whole.add(item.dest_index.fqn)
                load.add(Leaf(keys, own, False), row, name)
        else:
            into = planner.resolve_tensor(item)
            if tuple(into.shape) != tuple(item.lengths):
                raise InvalidError(
                    f"the planner gives a tensor of {list(into.shape)} for {list(item.lengths)} of {show(keys)}", "see its resolve_tensor"
                )
            box = (tuple(item.storage_offsets), tuple(item.lengths))
            load.add(Leaf(keys, Parts(tuple(name[5]), into.dtype, (Piece(box, into.detach()),)), False), row, name)
            tensors.append((item, into))
    damaged = load.run(reader)
    if damaged is None:
        for item, into in tensors:
            planner.commit_tensor(item, into)
        for item, array in arrays:
            planner.load_bytes(item, _as_stream(array.numpy()))
    return damaged


def read_objects(reader: Reader, planner: DefaultLoadPlanner, rank: int, *, cast: bool, allow_pickle: bool) -> str | None:
    """Reads what a planner has flattened, without the cost of a plan. Returns ``None``, or the name of a damaged entry."""
    named = _named(Names(reader.loaded), rank)
    load = PlannedLoad(reader.loaded, cast, allow_pickle)
    arrays: list[tuple[str, torch.Tensor]] = []
    for text, value in planner.state_dict.items():
        if text not in named:
            raise NotFoundError(f"step {reader.loaded.number} does not have {text}", "load a state of the same structure")
        row, name = named[text]
        keys: Keys = tuple((tag, key) for tag, key in name[1])
        path = planner.mappings[text]
        # As in DCP, a value that was stored as no tensor takes the place of a tensor.
        if isinstance(value, torch.Tensor) and name[2] == "tensor":
            if not _is_whole(value) and not is_dtensor(value):
                raise InvalidError(f"{text} is a {type(value).__name__}, of which only a plan tells the parts", "load it by dcp.load")
            load.add(Leaf(keys, value, False), row, name)
        elif name[2] == "tensor" and name[6] & FLAG_ARRAY:
            array = new_tensor(name[3], name[5])
            load.add(Leaf(keys, array, False), row, name)
            arrays.append((text, array))
        else:

            def put(loaded: Any, path: tuple[str | int, ...] = path) -> None:
                set_element(planner.original_state_dict, path, loaded)

            load.add(Leaf(keys, None, False, put), row, name)
    damaged = load.run(reader)
    if damaged is None:
        for text, array in arrays:
            set_element(planner.original_state_dict, planner.mappings[text], array.numpy())
    return damaged


def _loads_in_place(planner: LoadPlanner) -> bool:
    """Returns whether a planner loads tensors straight into those of the state."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        for name in ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
    )


def _as_stream(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
