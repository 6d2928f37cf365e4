"""The file objects of the file system of fsspec, and its transaction."""

from __future__ import annotations

import os
from typing import Any

from fsspec.spec import AbstractBufferedFile
from fsspec.transaction import Transaction

from ._places import Place
from ._spool import Folder, SpooledFile

#: The length of the blocks that an open file caches, in bytes.
BLOCK_BYTES = 2 << 20
#: The rest of a file is expected to be read when a further read would take what was fetched beyond 1/READ_ON_PART of
#: the file, or beyond READ_ON_BYTES if that is more.
READ_ON_PART, READ_ON_BYTES = 64, 3 * BLOCK_BYTES


class StepTransaction(Transaction):  # type: ignore[misc]
    """Saves the steps of the files that were written in it, in order, when it ends."""

    def complete(self, commit: bool = True) -> None:
        """Lets all files appear in their folders and saves their steps; or discards the files."""
        fs = self.fs
        steps = {(file.place.job, file.place.step) for file in self.files if file.place.step is not None}
        super().complete(commit)
        if commit:
            for job, step in sorted(steps):
                fs.commit(f"{job}/{step}")


class WrittenFile(SpooledFile):
    """A file that is being written, and its place."""

    def __init__(self, place: Place, folder: Folder, *, is_exclusive: bool, autocommit: bool) -> None:
        self.place = place
        super().__init__(folder, place.path, is_exclusive=is_exclusive, autocommit=autocommit)


class SavedFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of a committed step. Small reads go through a cache, long ones straight into the caller's memory.

    Once a part of the file has been fetched, all of it is expected to be read: a step that only the cluster has is then
    read as a whole if that pays off, from all nodes at once, and not range by range.
    """

    #: The number of bytes that were fetched since the rest was last expected to be read.
    _fetched = 0

    def readinto(self, b: Any) -> int:
        view = memoryview(b).cast("B")
        count: int = min(len(view), max(0, self.size - self.loc))
        if count < self.blocksize:
            return int(super().readinto(view))
        self._fetch(self.loc, self.loc + count, view)
        self.loc += count
        return count

    def read(self, length: int | None = -1) -> bytes:
        left = max(0, self.size - self.loc)
        count = left if length is None or length < 0 else min(length, left)
        if count < self.blocksize or self.closed:
            found: bytes = super().read(count)
            return found
        found = self._fetch_range(self.loc, self.loc + count)
        self.loc += count
        return found

    def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = self._fetch(start, end, None)
        return found

    def _fetch(self, start: int, end: int, into: Any) -> Any:
        # The first read may be the only one, however long it is.
        wanted = self._fetched and self._fetched + end - start
        is_read_on = wanted > max(READ_ON_BYTES, self.size // READ_ON_PART)
        expected = self.size * _ranks_of_host() if is_read_on else 0
        found = self.fs._read([(self.path, start, end, into)], expected)[0]
        # If the step has no room in the host's memory, the next part is read by ranges before it is asked for again.
        self._fetched = 0 if is_read_on else self._fetched + (found if into is not None else len(found))
        return found


def _ranks_of_host() -> int:
    """Returns the number of ranks of this host. Each is expected to read a file of its own."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() else 1
