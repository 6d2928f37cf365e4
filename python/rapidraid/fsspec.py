"""A file system for ``fsspec``: ``rapidraid://JOB/STEP/FILE``.

Whatever takes a URL of fsspec saves and loads through it, for example DCP without another argument:

    >>> import torch.distributed.checkpoint as dcp
    >>> dcp.save(state, checkpoint_id="rapidraid://gpt/100")
    >>> dcp.load(state, checkpoint_id="rapidraid://gpt/100")

All files below a step are one save. Until it is complete they lie in the spool of the host, and only the launch that
writes them sees them. They become visible at once when ``.metadata`` is renamed into place, when a temporary folder is
renamed to the step, when a transaction ends, or by :meth:`RapidraidFileSystem.commit`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsspec.spec import AbstractFileSystem

from . import _native
from ._files import METADATA, check_committed, check_new, length_of, read_ranges, save_files, sizes_of
from ._jobs import SCHEME, shared_checkpointer
from ._open_files import BLOCK_BYTES, SavedFile, StepTransaction, WrittenFile
from ._places import FORM, Place, describe, describe_folder, list_all, parse_place
from ._program import find_config, start_daemon
from ._reader import Reader
from ._spool import Folder, Spool
from .checkpointer import Checkpointer
from .errors import CorruptError, InvalidError, NoDaemonError, NoFileError, NotFoundError, UnavailableError

log = logging.getLogger("rapidraid")

_T = TypeVar("_T")


class RapidraidFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files as parts of steps.

    Args:
        config: The client's configuration file. Default: as for a :class:`Checkpointer`.
        timeout: The maximum time that a call waits for the daemon, in seconds.
        keep: The number of committed steps to keep. Older ones are removed after each save. Default: all.
        commit_timeout: The maximum time for a commit, in seconds.
        options: Options of fsspec.

    """

    protocol = "rapidraid"
    transaction_type = StepTransaction
    blocksize = BLOCK_BYTES

    def __init__(
        self,
        config: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        keep: int | None = None,
        commit_timeout: float = 3600.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.config = config
        self.timeout = timeout
        self.keep = keep
        self.commit_timeout = commit_timeout

    # Places

    @property
    def _settings(self) -> dict[str, Any]:
        return {"config": find_config(self.config), **({} if self.timeout is None else {"timeout": self.timeout})}

    @property
    def _spool(self) -> Spool:
        staging, _, _ = _native.staging_place(find_config(self.config))
        return Spool(staging)

    def _checkpointer(self, job: str) -> Checkpointer:
        # Ranks read and write files one by one, so no call may wait for the others.
        return shared_checkpointer(job, {**self._settings, "alone": True})

    def _place(self, path: str | os.PathLike[str]) -> Place:
        return parse_place(self._strip_protocol(path))

    def _spooled(self, place: Place) -> Path | None:
        """Returns the path of a file or folder in the spool, or ``None`` if this launch has not written it."""
        folder = self._spool.find(place.job, place.folder) if place.folder else None
        path = None if folder is None else folder.files / place.path
        return path if path is not None and path.exists() else None

    def _spool_to_write(self, place: Place) -> Folder:
        """Returns the folder of the spool for a file that is to be written."""
        spool = self._spool
        folder = spool.find(place.job, place.folder)
        if folder is None:
            if place.step is not None:
                check_new(place.job, place.step, self._committed(place.job))
            spool.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            spool.sweep()
            folder = spool.open(place.job, place.folder)
        return folder

    # Reading

    def look_into(self, place: Place, look: Callable[[Reader], tuple[_T, str | None]]) -> _T:
        """Opens the committed step of a place. Returns the first element that ``look`` returns."""
        if place.step is None:
            raise NoFileError(f"there is no {place}", FORM)

        step = place.step

        def checked(reader: Reader) -> tuple[_T, str | None]:
            check_committed(reader, place.job)
            return look(reader)

        try:
            done = self._ask(place.job, lambda checkpointer: checkpointer.look_into(step, checked))
        except NoFileError:
            raise
        except NotFoundError as error:
            raise NoFileError(error.message, error.hint) from None
        assert done is not None
        found, damaged = done
        if damaged is not None:
            raise CorruptError(f"{damaged} is damaged", "read another step")
        return found

    def _ask(self, job: str, question: Callable[[Checkpointer], _T]) -> _T:
        """Asks the daemon. Asks again if it is gone, or if a step was replaced in memory meanwhile."""
        checkpointer = self._checkpointer(job)
        for _ in range(2):
            try:
                return question(checkpointer)
            except NoDaemonError:
                # Files may be read long after the daemon has ended for want of work.
                start_daemon(find_config(self.config), checkpointer.timeout)
            except UnavailableError as error:
                log.info("%s", error.message)
        return question(checkpointer)

    def _sizes(self, place: Place) -> dict[str, int]:
        return self.look_into(place, lambda reader: (sizes_of(reader), None))

    def _read(self, wanted: Sequence[tuple[str, int | None, int | None, Any]], expected: int = 0) -> list[Any]:
        """Reads ranges of files of one step, each into a buffer or into new bytes.

        ``expected`` is the number of bytes that this host is expected to read of the step in all.
        """
        places = [(self._place(path), *rest) for path, *rest in wanted]
        job = places[0][0].job
        ranges = [(place.path, *rest) for place, *rest in places]
        return self.look_into(places[0][0], lambda reader: read_ranges(reader, job, ranges, expected))

    def _committed(self, job: str) -> list[int]:
        return [info.step for info in self._ask(job, Checkpointer.steps) if info.is_committed]

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Lists a folder. The steps of a job are listed as ``step-N``."""
        name = self._strip_protocol(path).strip("/")
        place = parse_place(name)
        spooled = self._spooled(place)
        found: list[dict[str, Any]]
        if not place.folder:
            found = [describe_folder(f"{name}/step-{step}") for step in self._committed(place.job)]
            if not found:
                raise NoFileError(f"{place.job} has no step", "save one first")
        elif spooled is not None:
            below = sorted(spooled.iterdir()) if spooled.is_dir() else []
            found = [describe(f"{name}/{entry.name}", entry) for entry in below] if spooled.is_dir() else [describe(name, spooled)]
        else:
            entries = list_all(name, place, self._sizes(place))
            is_file = place.path != "" and entries[name]["type"] == "file"
            found = [about for entry, about in sorted(entries.items()) if is_file or entry.rpartition("/")[0] == name]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Returns the name, size and type of a file or folder."""
        name = self._strip_protocol(path).strip("/")
        place = parse_place(name)
        spooled = self._spooled(place)
        if spooled is not None:
            return describe(name, spooled)
        if not place.path:
            committed = self._committed(place.job)
            if place.step in committed or (not place.folder and committed):
                return describe_folder(name)
            raise NoFileError(f"there is no {place}", "save it first")
        return list_all(name, place, self._sizes(place))[name]

    def _type(self, path: str) -> str | None:
        """Returns the type of a file or folder, or ``None`` if there is none. Any other error is raised."""
        try:
            return str(self.info(path)["type"])
        except (NoFileError, InvalidError):
            return None

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Returns whether there is a file or folder. Any other error is raised."""
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        """Returns whether a path is a folder."""
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Returns whether a path is a file."""
        return self._type(path) == "file"

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any) -> Any:
        """Lists all files below a folder. Opens a committed step once."""
        name = self._strip_protocol(path).strip("/")
        try:
            place = parse_place(name)
            is_saved = place.folder != "" and self._spooled(place) is None
            entries = list_all(name, place, self._sizes(place)) if is_saved else {}
        except NoFileError:
            is_saved, entries = True, {}
        if not is_saved:
            return super().find(path, maxdepth, withdirs, detail, **kwargs)
        deepest = name.count("/") + 1 + (sys.maxsize if maxdepth is None else maxdepth)
        chosen = {
            entry: about for entry, about in sorted(entries.items()) if entry.count("/") < deepest and (withdirs or about["type"] == "file")
        }
        return chosen if detail else list(chosen)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Returns the bytes of a file, or of a range of it. Only the pieces that contain them are read."""
        spooled = self._spooled(self._place(path))
        if spooled is not None:
            with open(spooled, "rb") as file:
                first, last, _ = slice(start, end).indices(spooled.stat().st_size)
                file.seek(first)
                return file.read(max(0, last - first))
        found: bytes = self._read([(path, start, end, None)])[0]
        return found

    def cat_ranges(
        self, paths: list[str], starts: Any, ends: Any, max_gap: int | None = None, on_error: str = "return", **kwargs: Any
    ) -> list[Any]:
        """Returns the bytes of ranges. Ranges of one step are read together."""
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise InvalidError(f"{len(paths)} paths, {len(starts)} starts and {len(ends)} ends", "give as many of each")
        places = [self._place(path) for path in paths]
        found: list[Any] = [None] * len(paths)
        for folder in dict.fromkeys((place.job, place.folder) for place in places):
            rows = [row for row, place in enumerate(places) if (place.job, place.folder) == folder]
            try:
                if any(self._spooled(places[row]) for row in rows):
                    raise NoFileError(f"{folder} is not saved", "read its files one by one")
                got = self._read([(paths[row], starts[row], ends[row], None) for row in rows])
            except NoFileError:
                # At least one of them is not in the step.
                chosen = [[one[row] for row in rows] for one in (paths, starts, ends)]
                got = super().cat_ranges(*chosen, on_error=on_error)
            for row, content in zip(rows, got, strict=True):
                found[row] = content
        return found

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        place = self._place(path)
        if not place.path:
            raise InvalidError(f"{path!r} names no file", FORM)
        if mode == "rb":
            spooled = self._spooled(place)
            if spooled is not None:
                return open(spooled, "rb")  # noqa: SIM115 - the caller closes it
            kwargs.setdefault("cache_type", "blockcache")
            size = kwargs.pop("size", None)
            if size is None:
                size = self.look_into(place, lambda reader: (length_of(reader, place.job, place.path), None))
            return SavedFile(self, path, mode, block_size or BLOCK_BYTES, cache_options=cache_options, size=size, **kwargs)
        if mode not in ("wb", "xb"):
            raise InvalidError(f"{path} cannot be opened in mode {mode!r}", "files are written as wholes: it is rb, wb or xb")
        folder = self._spool_to_write(place)
        if mode == "xb" and (folder.files / place.path).exists():
            raise FileExistsError(f"{path} exists")
        return WrittenFile(place, folder, is_exclusive=mode == "xb", autocommit=autocommit)

    # Writing

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Makes a folder of the spool. A folder without files is not saved."""
        self.makedirs(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder of the spool. A folder without files is not saved."""
        place = self._place(path)
        if not place.folder or (exist_ok and self.exists(path)):
            return
        folder = self._spool_to_write(place)
        (folder.files / place.path).mkdir(parents=True, exist_ok=exist_ok or not place.path)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copies a file into the spool."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target, BLOCK_BYTES)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Renames a file or folder of the spool.

        Saves the step if a file is renamed to ``.metadata``, or a temporary folder to the step. If the save fails, nothing
        is renamed, and the rename can be tried again.
        """
        source, target = self._place(path1), self._place(path2)
        if source == target:
            return
        if self._spooled(source) is None:
            if self.exists(path1):
                raise InvalidError(f"{path1} is saved, and a step does not change", "copy it, or save another step")
            raise NoFileError(f"there is no {path1}", "it was not written by this launch, or renamed already")
        if bool(source.path) != bool(target.path):
            raise InvalidError(f"{path1} cannot become {path2}", "rename a file to a file, and a folder to a step")
        folder = self._spool.find(source.job, source.folder)
        assert folder is not None
        if target.step is not None and not target.path:
            self._save(target, folder, {})
        elif target.step is not None and target.path == METADATA and (source.job, source.folder) == (target.job, target.folder):
            self._save(target, folder, {source.path: target.path})
        elif target.step is not None and "/" not in target.path and target.path.endswith(METADATA) and target.path.startswith("__"):
            raise InvalidError(f"{path2} is the metadata of one rank: none of them is the last", "save with use_collectives=True")
        elif target.path:
            if target.step is not None and target.path.endswith(f"/{METADATA}"):
                log.warning("%s is below its step: the step is saved by commit(%r)", target, f"{target.job}/{target.folder}")
            folder.rename(source.path, self._spool_to_write(target), target.path)
        else:
            into = self._spool_to_write(target)
            for name in folder.list():
                folder.rename(name, into, name)
            self._spool.drop(folder)

    def commit(self, path: str) -> None:
        """Saves the files that this launch has written below a step. Returns when the step is committed.

        Args:
            path: ``JOB/STEP``, or its URL.

        Raises:
            NoFileError: This launch has written no file there.
            ExistsError: The step is committed already.

        """
        place = self._place(path)
        if place.step is None or place.path:
            raise InvalidError(f"{path!r} names no step", f'write "{SCHEME}JOB/STEP"')
        folder = self._spool.find(place.job, place.folder)
        if folder is None:
            raise NoFileError(f"this launch has written nothing to {place}", "write its files first")
        self._save(place, folder, {})

    def _save(self, place: Place, folder: Folder, renamed: dict[str, str]) -> None:
        assert place.step is not None
        files = {renamed.get(name, name): path for name, path in folder.list().items()}
        settings = {**self._settings, "keep": self.keep}
        save_files(place.job, place.step, files, settings, self.commit_timeout)
        spool = self._spool
        spool.drop(folder)
        spool.drop_until(place.job, place.step)

    # Removing

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Removes a step, or files and folders of the spool. A file of a committed step cannot be removed."""
        if maxdepth is not None:
            raise InvalidError("rm with maxdepth", "remove a step or a folder as a whole")
        for one in reversed(self.expand_path(path)):
            self._remove(one, recursive)

    def rm_file(self, path: str) -> None:
        """Removes a file of the spool."""
        self._remove(path, False)

    def rmdir(self, path: str) -> None:
        """Removes an empty folder of the spool."""
        self._remove(path, False)

    def _remove(self, path: str, recursive: bool) -> None:
        place = self._place(path)
        if not place.folder:
            raise InvalidError(f"{path} is a job", "remove its steps one by one")
        spool = self._spool
        folder = spool.find(place.job, place.folder)
        if folder is not None and self._spooled(place) is not None:
            if place.path:
                folder.remove(place.path, recursive)
            elif not recursive and folder.list():
                raise InvalidError(f"{path} has files", "pass recursive=True")
            else:
                spool.drop(folder)
            return
        kind = self.info(path)["type"]
        if place.path:
            raise InvalidError(f"{path} is saved, and a step does not change", f"remove {place.job}/{place.folder} as a whole")
        if not recursive:
            raise InvalidError(f"{path} is a {kind}", "pass recursive=True")
        assert place.step is not None
        step = place.step
        self._ask(place.job, lambda checkpointer: checkpointer.remove(step))


__all__ = ["RapidraidFileSystem"]
