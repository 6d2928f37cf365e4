"""Files as entries of a step: each is a tensor of bytes below ``files``.

A file is cut into pieces, because a load by ranges reads and verifies whole extents.
"""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ._convert import MetadataUnpickler
from ._leaves import Flat, Keys, Leaf
from ._reader import Reader, Target
from .checkpointer import Checkpointer
from .errors import ExistsError, InvalidError, NoFileError
from .tensors import Parts, Piece

#: The top key of the paths under which the files of a step are stored.
FILES = "files"
#: The length of the pieces of a file, in bytes. A read of a longer file reads whole pieces from the cluster.
PIECE_BYTES = 1 << 20
#: The file that DCP writes last.
METADATA = ".metadata"


def _keys_of(path: str) -> Keys:
    return ((0, FILES), (0, path))


def save_files(job: str, step: int, files: Mapping[str, Path], settings: Mapping[str, Any], commit_timeout: float) -> None:
    """Saves files as a step, by a launch of its own. Returns when the step is committed.

    Raises:
        ExistsError: The step is committed already, or this host's memory has the step or a later one that is to be committed.
        InvalidError: There are no files, the job has a later step, or a file is missing that the metadata of DCP names.

    """
    if not files:
        raise InvalidError(f"{job}/{step} has no files", "write some first")
    _check_complete(job, step, files)
    with_pieces = {path: _map(file) for path, file in files.items()}
    checkpointer = Checkpointer(job, alone=True, **settings)
    try:
        check_new(job, step, [info.step for info in checkpointer.steps() if info.is_committed])
        # The daemon refuses a save if the job has later steps than the one that the launch loaded.
        newest = checkpointer.load_with(None, lambda _: None, table_first=True)
        if newest is not None and newest >= step:
            raise ExistsError(f"{job} has step {newest} in the memory of this host, to be committed", "save a later step")
        checkpointer.save_flat(step, lambda: Flat([Leaf(_keys_of(path), value, False) for path, value in with_pieces.items()]))
        checkpointer.wait(step, commit_timeout)
    finally:
        checkpointer.leave()


def check_new(job: str, step: int, committed: list[int]) -> None:
    """Raises an error unless a step is later than all committed ones of its job."""
    if step in committed:
        raise ExistsError(f"{job}/{step} is saved already", "save a later step, or remove this one first")
    if committed and committed[-1] > step:
        raise InvalidError(
            f"{job} has step {committed[-1]}, and a launch that resumes would ignore step {step}",
            "save a later step, or remove the later ones first",
        )


def _map(path: Path) -> Any:
    """Returns a file as a tensor over its pages, in pieces if it is long."""
    import torch

    size = path.stat().st_size
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    whole = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8, device="cpu")
    if size <= PIECE_BYTES:
        return whole
    starts = range(0, size, PIECE_BYTES)
    pieces = [Piece(((start,), (min(PIECE_BYTES, size - start),)), whole[start : start + PIECE_BYTES]) for start in starts]
    return Parts((size,), torch.uint8, tuple(pieces))


def _check_complete(job: str, step: int, files: Mapping[str, Path]) -> None:
    """Raises :class:`InvalidError` if the metadata of DCP names a file that is missing or too short.

    This happens if ranks on other hosts have written files: those are in the spools of these hosts.
    """
    if METADATA not in files:
        return
    try:
        # The file may have been copied from anywhere, so nothing but metadata is made from it.
        named = MetadataUnpickler(io.BytesIO(files[METADATA].read_bytes())).load().storage_data.values()
        ends = [(info.relative_path, info.offset + info.length) for info in named]
    except Exception:  # noqa: BLE001 - the file may be something else than the metadata of DCP
        return
    for path, end in ends:
        if path not in files or files[path].stat().st_size < end:
            raise InvalidError(
                f"{job}/{step} is incomplete: {path} is not on this host, or shorter than {end} bytes",
                "save from several hosts with storage_writer=rapidraid.torch.Writer()",
            )


def check_committed(reader: Reader, job: str) -> None:
    """Raises :class:`NoFileError` for a step that is in the memory of this host only."""
    newest = reader.loaded.newest_committed
    if newest is None or reader.loaded.number > newest:
        raise NoFileError(f"{job}/{reader.loaded.number} is not committed yet", "wait for its commit")


def sizes_of(reader: Reader) -> dict[str, int]:
    """Returns the lengths of a step's files, in bytes, by their paths."""
    found = {}
    for rank, keys, kind, _, _, shape, _ in reader.loaded.names():
        if rank is None and len(keys) == 2 and keys[0] == (0, FILES) and kind == "tensor" and len(shape) == 1:
            found[str(keys[1][1])] = shape[0]
    return found


def read_ranges(
    reader: Reader, job: str, wanted: Iterable[tuple[str, int | None, int | None, Any]], expected: int = 0
) -> tuple[list[Any], str | None]:
    """Reads ranges of files. Each has a path, a start and an end as of a slice, and a buffer to read into, or ``None``.

    ``expected`` is the number of bytes that this call and later ones of the same host are expected to read.

    Returns the bytes of each, or their number if there is a buffer; and the name of a damaged file, or ``None``.
    """
    sizes = sizes_of(reader)
    targets: list[Target] = []
    buffers: list[tuple[bytearray | None, int]] = []
    for path, start, end, into in wanted:
        size = _length_in(sizes, f"{job}/{reader.loaded.number}", path)
        first, last, _ = slice(start, end).indices(size)
        count = max(0, last - first)
        made = bytearray(count) if into is None else None
        view = memoryview(into if made is None else made).cast("B")[:count]
        count = len(view)
        buffers.append((made, count))
        if count:
            row = reader.loaded.find(None, list(_keys_of(path)))
            assert row is not None
            part = None if count == size else ([first], [count])
            targets.append((row, part, ctypes.addressof(ctypes.c_char.from_buffer(view)), count))
    reader.check_wanted(targets, [], expected)
    damaged = reader.copy(targets)
    return [count if made is None else bytes(made) for made, count in buffers], damaged


def length_of(reader: Reader, job: str, path: str) -> int:
    """Returns the length of a file, in bytes. Raises :class:`NoFileError` if there is none."""
    return _length_in(sizes_of(reader), f"{job}/{reader.loaded.number}", path)


def _length_in(sizes: Mapping[str, int], step: str, path: str) -> int:
    if path in sizes:
        return sizes[path]
    if sizes:
        raise NoFileError(f"{step} has no file {path}", "`ls` lists the files of a step")
    raise NoFileError(
        f"{step} has no files: another integration has saved it", "load it by dcp.load with storage_reader=rapidraid.torch.Reader()"
    )
