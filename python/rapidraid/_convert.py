"""The commands ``rapidraid import --dcp`` and ``rapidraid export --dcp``: a folder of DCP to a step, and back.

A folder of DCP is a set of files that somebody else may have written. Its metadata is a pickle. Only the classes that DCP
itself writes are made from it, and everything that it names is checked before it is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import math
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ._jobs import parse_step_name, shared_checkpointer
from ._leaves import show
from ._match import few
from ._reader import Names
from .errors import CorruptError, ExistsError, InvalidError, NotFoundError, RapidraidError

if TYPE_CHECKING:
    from .torch import Reader

log = logging.getLogger("rapidraid")

#: The maximum number of keys of a path in the metadata.
MAX_DEPTH = 64
#: The lists of a state may together have this many positions more than twice the number of entries.
SPARE_POSITIONS = 1 << 20
#: The maximum length of a folder's metadata, in bytes.
MAX_METADATA_BYTES = 1 << 30

_DCP = "torch.distributed.checkpoint"
#: The classes of DCP's metadata, by module.
_CLASSES = {
    f"{_DCP}.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
}  # fmt: skip


# The accelerated Unpickler sets attributes of anything, and lets a few bytes reserve any amount of memory.
class MetadataUnpickler(pickle._Unpickler):
    """Makes only the objects that DCP's metadata consists of, and sets only the fields that they declare."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of DCP's metadata, or an element type."""
        import torch

        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            return _join
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CorruptError(f"the metadata names {module}.{name}, which is no part of DCP's metadata", "do not open it: it may run code")

    def load_build(self) -> None:
        """Sets the fields of an object."""
        state = self.stack.pop()
        made = self.stack[-1]
        kind = type(made)
        if not dataclasses.is_dataclass(kind) or kind.__name__ not in _CLASSES.get(kind.__module__, ()):
            raise CorruptError(f"the metadata sets fields of a {kind.__name__}", "do not open it: it may run code")
        if hasattr(kind, "__setstate__"):
            made.__setstate__(state)
            return
        fields = {field.name for field in dataclasses.fields(kind)}
        if not isinstance(state, dict) or not fields.issuperset(state):
            raise CorruptError(f"the metadata sets unknown fields of a {kind.__name__}", "import it with a newer torch")
        made.__dict__.update(state)

    dispatch[pickle.BUILD[0]] = load_build
    del dispatch[pickle.BYTEARRAY8[0]]


def _join(*parts: str) -> str:
    return "/".join(str(part) for part in parts)


def read_dcp_metadata(folder: Path) -> Any:
    """Returns the metadata of a folder of DCP, checked against the files beside it.

    Raises:
        NotFoundError: The folder has no ``.metadata``.
        CorruptError: The metadata is damaged, or names a class, a file or a range of bytes that it may not name.

    """
    from torch.distributed.checkpoint.metadata import Metadata

    file = folder / ".metadata"
    if not file.is_file():
        raise NotFoundError(f"{folder} has no .metadata", "name the folder of one step that DCP has finished")
    if file.stat().st_size > MAX_METADATA_BYTES:
        raise CorruptError(f"{file} is longer than {MAX_METADATA_BYTES} bytes", "see who wrote it")
    try:
        metadata = MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        if type(metadata) is not Metadata:
            raise CorruptError(f"{file} holds no metadata of DCP", "name the folder of one step")
        len_bytes = _check_files(folder, metadata)
        _check_tensors(metadata, len_bytes)
        _check_paths(metadata)
    except RapidraidError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged metadata fails in many ways
        raise CorruptError(f"{file} is damaged: {error}", "import another step") from error
    return metadata


def _wrong(what: str) -> CorruptError:
    return CorruptError(f"the metadata names {what}", "copy the folder again, whole, or see who wrote it")


def _check_files(folder: Path, metadata: Any) -> int:
    """Checks where the entries lie. Returns the length of all files, in bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    inside = folder.resolve()
    lengths: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo or type(info.relative_path) is not str:
            raise _wrong("an entry without a place")
        path = (folder / info.relative_path).resolve()
        if not path.is_relative_to(inside):
            raise _wrong(f"the file {info.relative_path}, which is outside the folder")
        if info.relative_path not in lengths:
            if not path.is_file():
                raise _wrong(f"the file {info.relative_path}, which is missing")
            lengths[info.relative_path] = path.stat().st_size
        if type(info.offset) is not int or type(info.length) is not int or info.offset < 0 or info.length < 0:
            raise _wrong(f"bytes before the start of {info.relative_path}")
        if info.offset + info.length > lengths[info.relative_path]:
            raise _wrong(f"bytes beyond the end of {info.relative_path}")
    return sum(lengths.values())


def _check_tensors(metadata: Any, len_bytes: int) -> None:
    """Checks that the chunks of a tensor together are the tensor, that each chunk is stored, and that all tensors fit into the files."""
    import torch
    from torch.distributed.checkpoint.default_planner import _validate_global_plan
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan

    def are_sizes(value: Any) -> bool:
        return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)

    wanted = 0
    for name, about in metadata.state_dict_metadata.items():
        if type(about) is BytesStorageMetadata:
            if MetadataIndex(name) not in metadata.storage_data:
                raise _wrong(f"{name}, which is not stored")
            continue
        if type(about) is not TensorStorageMetadata or not are_sizes(about.size) or type(about.properties.dtype) is not torch.dtype:
            raise _wrong(f"{name}, which is no tensor and no object")
        wanted += math.prod(about.size) * about.properties.dtype.itemsize
        for chunk in about.chunks:
            if type(chunk) is not ChunkStorageMetadata or not are_sizes(chunk.offsets) or not are_sizes(chunk.sizes):
                raise _wrong(f"a part of {name} without a place")
            if not len(chunk.offsets) == len(chunk.sizes) == len(about.size):
                raise _wrong(f"a part of {name} of other dimensions")
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise _wrong(f"a part of {name}, which is not stored")
        if not about.chunks and math.prod(about.size) > 0:
            raise _wrong(f"{name}, of which no part is stored")
    if wanted > len_bytes:
        raise _wrong(f"tensors of {wanted} bytes, and the files have {len_bytes}")
    # Two plans: for one alone, torch does not check that the chunks are the whole tensor.
    found: Any = _validate_global_plan([SavePlan([])] * 2, metadata)
    if found is False:
        # So say older releases, which log the parts.
        raise _wrong("parts that are not their tensors; the log names them")
    if found is not True and found:
        raise _wrong(f"parts that are not their tensors: {found[0][:200]}")


def _check_paths(metadata: Any) -> None:
    """Checks that the lists of the state are not much longer than their entries."""
    lengths: dict[tuple[str | int, ...], int] = {}
    paths = metadata.planner_data or {}
    for path in paths.values():
        if not isinstance(path, tuple) or len(path) > MAX_DEPTH or not all(type(key) in (str, int) for key in path):
            raise _wrong(f"a path of {len(path)} keys, or of keys of another kind")
        for depth, key in enumerate(path):
            if isinstance(key, int):
                lengths[path[:depth]] = max(lengths.get(path[:depth], 0), key + 1)
                if key < 0:
                    raise _wrong("a position before the start of a list")
    if sum(lengths.values()) > 2 * len(paths) + SPARE_POSITIONS:
        raise _wrong("lists with many more positions than entries")


def load_dcp_folder(folder: Path, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Returns the whole state of a folder of DCP.

    Args:
        folder: The folder of one step.
        allow_pickle: Whether to open entries that are no tensors and no plain values. Opening them runs code that they name.

    """
    import torch
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    metadata = read_dcp_metadata(folder)

    class Checked(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    class Planner(_EmptyStateDictLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            name = read_item.dest_index.fqn
            try:
                content = torch.load(value, weights_only=not allow_pickle)
            except pickle.UnpicklingError as error:
                raise InvalidError(
                    f"{name} is an object that only opening a pickle gives back: {error}"[:300],
                    "pass --allow-pickle if you trust who saved it",
                ) from None
            safe = io.BytesIO()
            torch.save(content, safe)
            safe.seek(0)
            super().load_bytes(read_item, safe)

    state: dict[str, Any] = {}
    _load_state_dict(state, Checked(folder), no_dist=True, planner=Planner())  # type: ignore[no-untyped-call]
    return state


def import_dcp(folder: Path, step_name: str, *, allow_pickle: bool = False, **settings: Any) -> int:
    """Saves a folder of DCP as ``JOB/STEP``, under the names by which :class:`rapidraid.torch.Reader` finds its entries.

    Returns the step, once it is committed. The whole state must fit into this process's memory.
    """
    from .torch import async_save

    name = parse_step_name(step_name)
    if name.step is None:
        raise InvalidError(f"{step_name!r} has no step", 'write "JOB/STEP"')
    checkpointer = shared_checkpointer(name.job, {**settings, "alone": True, "allow_pickle": allow_pickle})
    newest = checkpointer.latest()
    if newest is not None and newest >= name.step:
        raise ExistsError(f"{name.job} has step {newest} already", "import into a new job, or as a later step")
    state = load_dcp_folder(folder, allow_pickle=allow_pickle)
    checkpointer.go_on_from(newest, newest)
    async_save(state, step_name, checkpointer=checkpointer).result()
    return name.step


def export_dcp(step_name: str, folder: Path, *, allow_pickle: bool = False, **settings: Any) -> int:
    """Writes a step as a folder that DCP's own ``FileSystemReader`` loads. Returns the step.

    The folder has one value for each name: the shared one, otherwise that of rank 0. A warning names what is left out. The
    whole state must fit into this process's memory.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    from .torch import Reader

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExistsError(f"{folder} exists and is not empty", "name a new folder")
    reader = Reader(step_name, alone=True, allow_pickle=allow_pickle, **settings)
    # DCP would wrap the error of a step that is not there, and log its trace.
    reader.read_metadata()
    state: dict[str, Any] = {}
    _load_state_dict(state, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())  # type: ignore[no-untyped-call]
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    _warn_of_left_out(reader)
    return reader.step


def _warn_of_left_out(reader: Reader) -> None:
    """Warns of the private state that the folder of a step does not have."""
    from ._dcp import left_out

    found = reader.checkpointer.look_into(reader.step, lambda opened: (left_out(Names(opened.loaded), reader.checkpointer.rank), None))
    places = [] if found is None else found[0]
    if places:
        log.warning(
            "a folder of DCP has one value for each name: the export of %s/%d leaves out private state of the ranks %s: %s",
            reader.name.job,
            reader.step,
            few([str(rank) for rank in sorted({rank for rank, _ in places})]),
            few(list(dict.fromkeys(show(keys) for _, keys in places))),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rapidraid", description="Imports and exports folders of torch.distributed.checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (("import", "save a folder of DCP as a step"), ("export", "write a step as a folder of DCP")):
        one = commands.add_parser(command, help=text, description=f"{text[0].upper()}{text[1:]}.")
        one.add_argument("--dcp", action="store_true", required=True, help="the folder is one of torch.distributed.checkpoint")
        if command == "import":
            one.add_argument("folder", type=Path)
        one.add_argument("step", metavar="JOB/STEP")
        if command == "export":
            one.add_argument("folder", type=Path)
        one.add_argument("--config", help="the client's configuration")
        one.add_argument("--allow-pickle", action="store_true", help="open objects that are no tensors and no plain values: runs code")
        one.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Runs ``import`` or ``export``. Returns the exit code."""
    options = _parser().parse_args(arguments)
    settings = {"config": options.config} if options.config else {}
    try:
        from torch.distributed.checkpoint.api import CheckpointException
    except ImportError:
        print(f"rapidraid {options.command}: torch is not installed (hint: pip install torch)", file=sys.stderr)
        return 1
    begun = time.perf_counter()
    if sys.stderr.isatty():
        print(f"{options.command}: {options.folder} and {options.step}", file=sys.stderr)
    try:
        if options.command == "import":
            step = import_dcp(options.folder, options.step, allow_pickle=options.allow_pickle, **settings)
        else:
            step = export_dcp(options.step, options.folder, allow_pickle=options.allow_pickle, **settings)
    # DCP's own exception is no Exception.
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - a command prints an error instead of a trace
        print(f"rapidraid {options.command}: {_root(error)}", file=sys.stderr)
        return 1
    done = {"folder": str(options.folder), "job": parse_step_name(options.step).job, "step": step, "seconds": time.perf_counter() - begun}
    if options.json:
        print(json.dumps(done))
    elif options.command == "import":
        print(f"{done['folder']} is committed as {done['job']}/{step}")
    else:
        print(f"{done['job']}/{step} is written to {done['folder']}")
    return 0


def _root(error: BaseException) -> str:
    """Returns the message of the error that DCP has wrapped, or of the error itself."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return str(error) or type(error).__name__
