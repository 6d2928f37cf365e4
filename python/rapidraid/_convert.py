"""The commands ``rapidraid import --dcp`` and ``rapidraid export --dcp``: a folder of DCP to a step, and back.

A folder of DCP is a set of files that somebody else may have written. Its metadata is a pickle; only the classes that DCP
itself writes are made from it, so opening it runs no code.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ._jobs import parse_step_name, shared_checkpointer
from .errors import CorruptError, ExistsError, InvalidError, NotFoundError, RapidraidError

#: The maximum position in a list that a path in the metadata may have. A longer list would only fill memory.
MAX_POSITION = 1 << 20
#: The maximum length of a folder's metadata, in bytes.
MAX_METADATA_BYTES = 1 << 30

_DCP = "torch.distributed.checkpoint"
#: What the metadata of a folder is made of.
_ALLOWED = {
    f"{_DCP}.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only the objects that DCP's metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CorruptError(f"the metadata names {module}.{name}, which is no part of DCP's metadata", "do not open it: it may run code")


def read_dcp_metadata(folder: Path) -> Any:
    """Returns the metadata of a folder of DCP, checked against the files beside it.

    Raises:
        NotFoundError: The folder has no ``.metadata``.
        CorruptError: The metadata is damaged, or names what it should not.

    """
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    file = folder / ".metadata"
    if not file.is_file():
        raise NotFoundError(f"{folder} has no .metadata", "name the folder of one step that DCP has finished")
    if file.stat().st_size > MAX_METADATA_BYTES:
        raise CorruptError(f"{file} is longer than {MAX_METADATA_BYTES} bytes", "see who wrote it")
    try:
        metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
    except RapidraidError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle fails in many ways
        raise CorruptError(f"{file} is damaged: {error}", "import another step") from error
    if (
        not isinstance(metadata, Metadata)
        or not isinstance(metadata.state_dict_metadata, dict)
        or not isinstance(metadata.storage_data, dict)
    ):
        raise CorruptError(f"{file} holds no metadata of DCP", "name the folder of one step")
    lengths: dict[str, int] = {}
    for info in metadata.storage_data.values():
        path = PurePosixPath(str(info.relative_path))
        if path.is_absolute() or ".." in path.parts:
            raise CorruptError(f"{file} names the file {path}, which is outside the folder", "see who wrote it")
        if str(path) not in lengths:
            inside = folder / path
            if not inside.is_file():
                raise CorruptError(f"{folder} lacks the file {path}", "copy the folder again, whole")
            lengths[str(path)] = inside.stat().st_size
        if info.offset < 0 or info.length < 0 or info.offset + info.length > lengths[str(path)]:
            raise CorruptError(f"{file} names bytes beyond the end of {path}", "copy the folder again, whole")
    wanted = 0
    for about in metadata.state_dict_metadata.values():
        if isinstance(about, TensorStorageMetadata):
            elements = 1
            for size in about.size:
                elements *= size
            wanted += elements * about.properties.dtype.itemsize
    if wanted > sum(lengths.values()):
        raise CorruptError(f"{file} has tensors of {wanted} bytes, and the files have {sum(lengths.values())}", "see who wrote it")
    for path_keys in (metadata.planner_data or {}).values():
        if any(isinstance(key, int) and not 0 <= key < MAX_POSITION for key in path_keys):
            raise CorruptError(f"{file} has a list with more than {MAX_POSITION} entries", "see who wrote it")
    return metadata


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
    """Saves a folder of DCP as ``JOB/STEP``, under the names that :class:`rapidraid.torch.Reader` gives it back.

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
    checkpointer._go_on_from(newest, newest)
    async_save(state, step_name, checkpointer=checkpointer).result()
    return name.step


def export_dcp(step_name: str, folder: Path, *, allow_pickle: bool = False, **settings: Any) -> int:
    """Writes a step as a folder that DCP's own ``FileSystemReader`` loads. Returns the step.

    The whole state must fit into this process's memory.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    from .torch import Reader

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExistsError(f"{folder} exists and is not empty", "name a new folder")
    reader = Reader(step_name, alone=True, allow_pickle=allow_pickle, **settings)
    state: dict[str, Any] = {}
    _load_state_dict(state, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())  # type: ignore[no-untyped-call]
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return reader.step


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
    begun = time.perf_counter()
    if sys.stderr.isatty():
        print(f"{options.command}: {options.folder} and {options.step}", file=sys.stderr)
    try:
        if options.command == "import":
            step = import_dcp(options.folder, options.step, allow_pickle=options.allow_pickle, **settings)
        else:
            step = export_dcp(options.step, options.folder, allow_pickle=options.allow_pickle, **settings)
    except Exception as error:  # noqa: BLE001 - a command prints an error instead of a trace
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
