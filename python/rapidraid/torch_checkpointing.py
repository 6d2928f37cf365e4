"""Storage for ``torch_checkpointing`` 0.1.1.

One argument turns it on:

    >>> from torch_checkpointing import CheckpointManager
    >>> from rapidraid.torch_checkpointing import RapidraidStorageConfig
    >>> manager = CheckpointManager.Config(storage_config=RapidraidStorageConfig()).build()
    >>> manager.save("gpt/100", {"model": model.state_dict()})
    >>> manager.load("gpt/100", into={"model": model.state_dict()})

A checkpoint is written below a temporary folder, and saved as one step when the folder is renamed.
"""

from __future__ import annotations

import io
import os
import posixpath
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from ._jobs import SCHEME
from ._places import TEMPORARY, parse_place
from ._versions import check_version
from .errors import ExistsError, InvalidError, NoFileError, UnavailableError
from .fsspec import RapidraidFileSystem

#: The version of torch_checkpointing that this module is tested with. Its interfaces may still change.
TESTED = "0.1.1"


check_version("torch_checkpointing", TESTED)

from torch_checkpointing.storage.base_storage import (  # noqa: E402 - another version may not have these names
    ReadArgs,
    Storage,
    StorageConfig,
)


@dataclass
class RapidraidStorageConfig(StorageConfig):
    """The configuration of the storage. It goes to the process that writes, so it has plain values only.

    Args:
        config: The client's configuration file. Default: ``RAPIDRAID_CONFIG``, ``./rapidraid.toml``, or the user's.
        timeout: The maximum time that a call waits for the daemon, in seconds.
        keep: The number of committed steps to keep. Older ones are removed after each save. Default: all.
        commit_timeout: The maximum time for a commit, in seconds.

    """

    config: str | None = None
    timeout: float | None = None
    keep: int | None = None
    commit_timeout: float = 3600.0
    #: The number of ranks. The process that writes may have no process group.
    ranks: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        self._count_ranks()

    def _count_ranks(self) -> None:
        if torch.distributed.is_initialized():
            self.ranks = torch.distributed.get_world_size()
        else:
            self.ranks = max(self.ranks, int(os.environ.get("WORLD_SIZE") or 1))

    def create_storage(self) -> RapidraidStorage:
        """Returns the storage."""
        self._count_ranks()
        return RapidraidStorage(self)


class RapidraidStorage(Storage):
    """Files of checkpoints as parts of steps: ``JOB/STEP/FILE``, or ``rapidraid://JOB/STEP/FILE``."""

    def __init__(self, config: RapidraidStorageConfig) -> None:
        self._ranks = config.ranks
        self._fs = RapidraidFileSystem(config=config.config, timeout=config.timeout, keep=config.keep, commit_timeout=config.commit_timeout)

    @property
    def mmap_fill_workers(self) -> int | None:
        """One read: the daemon reads a file from several nodes at a time by itself."""
        return 1

    def newest(self, job: str) -> int | None:
        """Returns the step from which a job resumes, or ``None`` if it has none.

        The step may be staged and not committed yet; it can be loaded when it is committed. Ask on rank 0 and send the
        answer to the others: a step may be committed between two questions.
        """
        found = self._fs._checkpointer(job).look_into(None, lambda reader: (reader.loaded.number, None))
        return None if found is None else int(found[0])

    def _names(self, path: str) -> list[str]:
        try:
            return [str(name) for name in self._fs.ls(path, detail=False)]
        except NoFileError:
            return []

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Returns a file to read from. By default the whole file is read into memory first."""
        url = self.remap_path(path)
        if read_args is None or read_args.pre_read_full_file:
            return cast("io.RawIOBase", io.BytesIO(self._fs.cat_file(url)))
        opened = self._fs.open(url, "rb")
        expected = read_args.known_size_bytes
        found = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        if expected is not None and found != expected:
            opened.close()
            raise UnavailableError(f"{url} has {found} bytes, and {expected} were expected", "it is being written: load again")
        return cast("io.RawIOBase", opened)

    def stream_write(self, path: Path) -> io.IOBase:
        """Returns a file to write to."""
        url = self._check_temporary(path)
        return cast("io.IOBase", self._fs.open(url, "wb"))

    def write(self, path: Path, data: Any) -> None:
        """Writes a file."""
        with self.stream_write(path) as stream:
            cast("io.BufferedWriter", stream).write(data)

    def delete(self, path: Path) -> None:
        """Removes a file that is not saved yet."""
        self._fs.rm_file(self.remap_path(path))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Makes a folder. A folder without files is not saved."""
        self._fs.makedirs(self._check_temporary(path), exist_ok=recursive)

    def rmdir(self, path: Path) -> None:
        """Removes a folder and what is in it, or a step."""
        self._fs.rm(self.remap_path(path), recursive=True)

    def rename(self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False) -> None:
        """Renames a file or folder. If a temporary folder is renamed to a step, saves the step and returns when it is committed.

        Raises:
            ExistsError: The step is saved already.

        """
        try:
            self._fs.mv(self.remap_path(src_path), self.remap_path(dst_path))
        except (ExistsError, InvalidError):
            # The step can never be saved, and its files hold memory.
            if is_directory and self._fs.isdir(self.remap_path(src_path)):
                self._fs.rm(self.remap_path(src_path), recursive=True)
            raise

    def ls(self, path: Path) -> list[str]:
        """Returns the names in a folder. The steps of a job are listed as ``step-N``."""
        return [posixpath.basename(name) for name in self._fs.ls(self.remap_path(path), detail=False)]

    def exists(self, path: Path) -> bool:
        """Returns whether there is a file or folder."""
        return self._fs.exists(self.remap_path(path))

    def getsize(self, path: Path) -> int:
        """Returns the length of a file, in bytes."""
        return int(self._fs.info(self.remap_path(path))["size"])

    def isdir(self, path: Path) -> bool:
        """Returns whether there is a folder."""
        return self._fs.isdir(self.remap_path(path))

    def remap_path(self, path: Path) -> str:
        """Returns the URL of a path. A ``Path`` of a URL has lost one of its slashes."""
        name = os.fspath(path).removeprefix(SCHEME.rstrip("/"))
        return SCHEME + name.strip("/")

    def _check_temporary(self, path: Path) -> str:
        """Returns the URL of a path that may be written. What is written elsewhere would never be saved."""
        url = self.remap_path(path)
        place = parse_place(url.removeprefix(SCHEME))
        if place.step is not None or not place.folder:
            raise InvalidError(
                f"{url} is written without a temporary folder, so no rename would save it",
                f'the checkpoint_id is "JOB/STEP"; set write_to_temp_dir=True and a temp_dir_prefix with {TEMPORARY!r} in it',
            )
        if self._ranks > 1 and os.environ.get("LOCAL_WORLD_SIZE") != str(self._ranks):
            # On several hosts, the rename would save the files of one host as the whole step.
            raise InvalidError(
                f"{url} is written by one of {self._ranks} ranks, and LOCAL_WORLD_SIZE does not say that all of them are on this host",
                "on one host: launch with torchrun or set LOCAL_WORLD_SIZE; on several, save with rapidraid.torch",
            )
        return url


__all__ = ["RapidraidStorage", "RapidraidStorageConfig"]
