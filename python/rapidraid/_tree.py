"""Nested dicts of tensors and plain values, as frameworks pass them to be saved, and as they want them back.

A framework of this kind has no state to load into, so a load builds the dict from the names of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import _native
from ._found import new_on_host, with_found
from ._leaves import SEQUENCE, WRAPPED, Flat, Key, Keys, Leaf, is_array, is_dtensor, is_tensor, key_of, show
from ._planned_load import PlannedLoad
from ._reader import Names, Reader
from .checkpointer import Checkpointer
from .errors import CorruptError, InvalidError
from .state import flatten

#: The key of the small files of a step: a dict of bytes by name.
FILES: Key = (0, "files")


def flatten_tree(tree: Mapping[Any, Any], whole: tuple[str, ...] = ()) -> Flat:
    """Returns the leaves of a nested dict. All of them are shared, so any number of ranks can load them.

    A part without tensors is one plain value, whatever its keys are. A part whose tensors are all zero-dimensional counts as
    one without tensors, except below the keys in ``whole``: such tensors come and go from step to step, and would change the
    layout each time.

    Args:
        tree: The dict.
        whole: The keys of the parts that a Checkpointer or DCP should find name by name.

    """
    flat = Flat()
    for key, value in tree.items():
        _walk(flat, (key_of(key, ()),), value, key in whole)
    return flat


def _walk(flat: Flat, keys: Keys, value: Any, is_whole: bool) -> None:
    if isinstance(value, (dict, list, tuple)) and _has_tensors(value, is_whole):
        if isinstance(value, dict):
            for key, item in value.items():
                _walk(flat, (*keys, key_of(key, keys)), item, is_whole)
            return
        flat.leaves.append(Leaf((*keys, SEQUENCE), [type(value).__name__, len(value)], False))
        for at, item in enumerate(value):
            place: Key = (2, at)
            _walk(flat, (*keys, place), item, is_whole)
        return
    if is_tensor(value) and hasattr(value, "__tensor_flatten__") and not is_dtensor(value):
        raise InvalidError(f"{show(keys)} is a {type(value).__name__}, which wraps other tensors", "save its model with a Checkpointer")
    flat.leaves.append(Leaf(keys, value, False))


def _has_tensors(value: Any, is_whole: bool) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(_has_tensors(item, is_whole) for item in (value.values() if isinstance(value, dict) else value))
    return is_array(value) or (is_tensor(value) and (is_whole or value.dim() > 0))


def with_files(flat: Flat, files: Mapping[str, bytes]) -> Flat:
    """Adds small files to the leaves of a state. Returns the leaves."""
    flat.leaves += [Leaf((FILES, (0, name)), content, False) for name, content in files.items()]
    return flat


def load_tree(checkpointer: Checkpointer, step: int | None, *, allow_pickle: bool | None = None) -> tuple[int, dict[Any, Any]] | None:
    """Returns a step, by default the one to resume from, as its number and a nested dict. Returns ``None`` if there is none.

    The launch continues from the step, unless it has saved already.

    Args:
        checkpointer: The Checkpointer to load with.
        step: The step.
        allow_pickle: Whether pickles are opened. Default: as the Checkpointer says.

    """
    found: dict[Any, Any] = {}
    may_open = checkpointer.allow_pickle if allow_pickle is None else allow_pickle

    def read(reader: Reader) -> str | None:
        found.clear()
        tree, damaged = read_tree(reader, checkpointer.rank, may_open)
        found.update(tree)
        return damaged

    if not checkpointer.has_saved():
        number = checkpointer.load_with(step, read)
        return None if number is None else (number, found)
    looked = checkpointer.look_into(step, lambda reader: (reader.loaded.number, read(reader)))
    if looked is None:
        return None
    if looked[1] is not None:
        raise CorruptError(f"{looked[1]} is damaged", "load an older step")
    return looked[0], found


def read_tree(reader: Reader, rank: int, allow_pickle: bool) -> tuple[dict[Any, Any], str | None]:
    """Returns a step as a nested dict, and ``None`` or the name of a damaged entry."""
    names = Names(reader.loaded)
    load = PlannedLoad(reader.loaded, False, allow_pickle)
    rows = {keys: row for (owner, keys), row in sorted(names.rows.items(), key=lambda item: item[0][0] is None) if owner in (None, rank)}
    for keys, (row, name) in rows.items():
        if keys and keys[-1] == WRAPPED:
            raise InvalidError(f"{show(keys[:-1])} is a tensor that wraps others", "load the step with a Checkpointer, into its model")
        load.create(keys, new_on_host, row, name)
    damaged = load.run(reader)
    if damaged is not None:
        return {}, damaged
    return with_found({}, (), load.created), None


def read_files(checkpointer: Checkpointer, step: int | None) -> tuple[int, dict[str, bytes], set[str]] | None:
    """Returns the number of a step, by default of the one to resume from, its small files, and its top-level names.

    Returns ``None`` if the job has no step. All ranks must call it, and an error of one of them is raised on all.
    """

    def read(reader: Reader) -> tuple[int, dict[str, bytes], set[str], str | None]:
        names = {keys: found for (owner, keys), found in Names(reader.loaded).rows.items() if owner is None}
        # The files of a step that was saved by URL are tensors.
        rows = {keys: row for keys, (row, name) in names.items() if keys[0] == FILES and name[2] != "tensor"}
        files: dict[str, bytes] = {}
        reader.check_wanted([], list(rows.values()))
        for keys, row in rows.items():
            try:
                files[str(keys[1][1])] = _native.decode_value(reader.content(row))
            except CorruptError:
                return reader.loaded.number, {}, set(), show(keys)
        return reader.loaded.number, files, {str(keys[0][1]) for keys in names}, None

    with checkpointer.together():
        found = checkpointer.look_into(step, read)
        if found is not None and found[3] is not None:
            raise CorruptError(f"{found[3]} of step {found[0]} is damaged", "load an older step")
    return None if found is None else found[:3]


def flatten_first(state: Mapping[Any, Any], rank: int, world: int) -> Flat:
    """Returns the leaves of a state. Rank 0 alone stores what is not declared, as frameworks do that save on rank 0.

    Raises :class:`InvalidError` for a module that DDP keeps equal only on some ranks: rank 0 does not have the other ranks' module.
    """
    flat = flatten(state, world)
    if flat.partial:
        raise InvalidError(f"{show(flat.partial[0])} is under DDP over some of the ranks", "save it with a Checkpointer")
    flat.warnings.clear()
    # The ranks may differ in what a framework takes from one of them.
    flat.leaves = [replace(leaf, is_private=False, must_be_equal=False) for leaf in flat.leaves if rank == 0 or not leaf.is_private]
    return flat


__all__ = ["FILES", "flatten_first", "flatten_tree", "load_tree", "read_files", "read_tree", "with_files"]
