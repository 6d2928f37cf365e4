"""The spool: files of steps that are not saved yet, in a folder of the host's staging folder.

``spool/JOB/NAME`` has the files of one step, or of a temporary folder that will be renamed to one:

- ``owner`` says who writes it. Each process of the owner holds a shared lock (``flock``) on it while it lives;
- ``files`` has the complete files;
- ``parts`` has the files that are being written, under random names.

A folder whose owner has no living process is emptied by the next process that opens or sweeps it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import BusyError, ExistsError, InvalidError, NoFileError

log = logging.getLogger("rapidraid")

#: How long a process waits while another one takes or empties a folder, in seconds.
TURN_S = 10.0
#: The size of the buffer of a file that is being written, in bytes.
BUFFER_BYTES = 1 << 20
#: The maximum length of an owner's record, in bytes.
OWNER_BYTES = 1 << 16


@dataclass(frozen=True)
class Folder:
    """A folder of the spool that this process holds."""

    path: Path
    descriptor: int

    @property
    def files(self) -> Path:
        """The folder of the complete files."""
        return self.path / "files"

    @property
    def is_current(self) -> bool:
        """Whether the folder has not been removed since this process has opened it."""
        return _is_current(self.path, self.descriptor)

    def list(self) -> dict[str, Path]:
        """Returns the complete files by their paths in the folder."""
        found = {}
        for parent, _, names in os.walk(self.files):
            for name in names:
                path = Path(parent, name)
                found[path.relative_to(self.files).as_posix()] = path
        return dict(sorted(found.items()))

    def rename(self, source: str, into: Folder, target: str) -> None:
        """Renames a file or a folder, also into another folder of the spool."""
        to = into.files / target
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(self.files / source, to)
        except FileNotFoundError:
            raise NoFileError(f"there is no {source}", "it was removed or renamed") from None

    def remove(self, name: str, recursive: bool) -> None:
        """Removes a file or a folder. Without ``recursive`` a folder must be empty."""
        path = self.files / name
        if not path.is_dir():
            path.unlink()
        elif recursive:
            shutil.rmtree(path)
        else:
            path.rmdir()


class SpooledFile(io.BufferedWriter):
    """A file that is being written. It appears in its folder when it is complete."""

    def __init__(self, folder: Folder, name: str, *, is_exclusive: bool, autocommit: bool) -> None:
        self.folder = folder
        self._target = folder.files / name
        self._part = folder.path / "parts" / secrets.token_hex(16)
        self._is_exclusive = is_exclusive
        self._autocommit = autocommit
        self._part.parent.mkdir(exist_ok=True)
        super().__init__(io.FileIO(self._part, "xb"), BUFFER_BYTES)

    def close(self) -> None:
        """Closes the file. Without a transaction it then appears in its folder."""
        if self.closed:
            return
        super().close()
        if self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Lets the file appear in its folder."""
        super().close()
        self._target.parent.mkdir(parents=True, exist_ok=True)
        if self._is_exclusive:
            os.link(self._part, self._target)
            self._part.unlink()
        else:
            os.replace(self._part, self._target)

    def discard(self) -> None:
        """Removes the file without letting it appear."""
        super().close()
        self._part.unlink(missing_ok=True)


class Spool:
    """The spool in a staging folder."""

    def __init__(self, staging: Path) -> None:
        self.path = staging / "spool"

    def find(self, job: str, name: str) -> Folder | None:
        """Returns a folder that this launch writes. Returns ``None`` if there is none, or if it is another launch's."""
        path = self.path / job / name
        try:
            # A lock of this process, even for a moment, would make a dead owner look alive to others.
            return _take(path, False) if _read_owner((path / "owner").read_bytes())[0] in (owner(), None) else None
        except (FileNotFoundError, NotADirectoryError, ExistsError):
            return None

    def open(self, job: str, name: str) -> Folder:
        """Returns a folder to write into. Makes it if there is none.

        Raises:
            ExistsError: Another launch writes it, and lives.
            InvalidError: The launch runs on several hosts.

        """
        check_one_host()
        self.path.mkdir(mode=0o700, exist_ok=True)
        folder = _take(self.path / job / name, True)
        assert folder is not None
        folder.files.mkdir(exist_ok=True)
        return folder

    def drop(self, folder: Folder) -> None:
        """Removes a folder and all that is in it."""
        with _lock:
            _empty(folder.path)
            _let_go(folder)

    def drop_until(self, job: str, step: int) -> None:
        """Removes the folders of this launch's steps up to ``step``: these cannot be saved any more, as steps are saved in order."""
        for name in self._names(job):
            number = name.removeprefix("step-")
            if number.isdecimal() and int(number) <= step:
                folder = self.find(job, name)
                if folder is not None:
                    self.drop(folder)

    def sweep(self) -> None:
        """Removes all folders whose owners have no living process. Closes the folders of this process that another rank has removed."""
        with _lock:
            for folder in [folder for folder in _held.values() if not folder.is_current]:
                _let_go(folder)
        with contextlib.suppress(FileNotFoundError):
            for job in os.listdir(self.path):
                for name in self._names(job):
                    _remove_if_dead(self.path / job / name)

    def _names(self, job: str) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            yield from os.listdir(self.path / job)


def check_one_host() -> None:
    """Raises :class:`InvalidError` if the launch runs on several hosts, each of which has a spool of its own."""
    world, local = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if world and local and world != local:
        raise InvalidError(
            f"this launch has {world} ranks, {local} of them on this host: files of a step are collected on one host",
            "save with storage_writer=rapidraid.torch.Writer(), which saves from any number of hosts",
        )


def owner() -> list[str]:
    """Returns the identity of this launch: the launch of torchrun if there is one, otherwise this process."""
    env = os.environ
    if all(name in env for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
        names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        return ["launch", *(env.get(name, "") for name in names)]
    # The name of the program in the second field may contain spaces and parentheses.
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return ["process", str(os.getpid()), started]


_held: dict[Path, Folder] = {}
_lock = threading.RLock()


def _take(path: Path, create: bool) -> Folder | None:
    """Returns a folder of which this process holds the lock from now on, or ``None`` if there is none."""
    until = time.monotonic() + TURN_S
    with _lock:
        while True:
            folder = _held.get(path)
            if folder is not None:
                if folder.is_current:
                    return folder
                _let_go(folder)
            try:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
                descriptor = os.open(path / "owner", flags, 0o600)
            except (FileNotFoundError, NotADirectoryError):
                if not create:
                    return None
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            folder = Folder(path, descriptor)
            try:
                if _is_taken(folder, create):
                    _held[path] = folder
                    return folder
            finally:
                if path not in _held:
                    os.close(descriptor)
            if time.monotonic() > until:
                raise BusyError(f"{path} is being taken by another process for {TURN_S:.0f} s", "try again")
            time.sleep(0.002)


def _is_taken(folder: Folder, create: bool) -> bool:
    """Tries once to take the lock of a folder. Empties the folder if its owner has no living process.

    Returns whether this process has the lock now. Raises :class:`ExistsError` if another launch writes the folder.
    """
    mine = owner()
    if _try_lock(folder.descriptor, fcntl.LOCK_EX):
        if not folder.is_current:
            return False
        _empty(folder.path)
        if not create:
            _unlink(folder.path)
            return False
        os.ftruncate(folder.descriptor, 0)
        os.pwrite(folder.descriptor, json.dumps({"owner": mine, "pid": os.getpid()}).encode(), 0)
    # Another process may get the lock while the kernel turns it from exclusive to shared, so the record is read again.
    if not _try_lock(folder.descriptor, fcntl.LOCK_SH) or not folder.is_current:
        return False
    found, process = _read_owner(os.pread(folder.descriptor, OWNER_BYTES, 0))
    if found is not None and found != mine:
        raise ExistsError(
            f"{folder.path.parent.name}/{folder.path.name} is being written by process {process} of another launch",
            "write another step, or wait until that launch has ended",
        )
    return found is not None


def _read_owner(content: bytes) -> tuple[list[str] | None, int]:
    """Returns the owner that a record names, and one of its processes. The owner is ``None`` if nobody has written the record yet."""
    if not content:
        return None, 0
    record = json.loads(content)
    return record["owner"], record["pid"]


def _remove_if_dead(path: Path) -> None:
    try:
        descriptor = os.open(path / "owner", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if _try_lock(descriptor, fcntl.LOCK_EX) and _is_current(path, descriptor):
            _empty(path)
            _unlink(path)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_current(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path / "owner"), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _empty(path: Path) -> None:
    for below in ("files", "parts"):
        shutil.rmtree(path / below, ignore_errors=True)


def _unlink(path: Path) -> None:
    """Removes an emptied folder. Another process may make it again at the same moment."""
    (path / "owner").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def _let_go(folder: Folder) -> None:
    if folder.is_current:
        _unlink(folder.path)
    _held.pop(folder.path, None)
    os.close(folder.descriptor)


def _after_fork() -> None:
    # The lock stays with the parent: only closing all descriptors of an open file releases it.
    global _lock
    _lock = threading.RLock()
    for folder in _held.values():
        os.close(folder.descriptor)
    _held.clear()


def _at_exit() -> None:
    """Removes the folders of this process that no other rank holds. Their files were not saved."""
    with _lock:
        for folder in list(_held.values()):
            if folder.is_current and _try_lock(folder.descriptor, fcntl.LOCK_EX):
                if folder.list():
                    log.warning("%s/%s was written, but not saved: it is removed", folder.path.parent.name, folder.path.name)
                _empty(folder.path)
                _let_go(folder)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
