"""A step that is being loaded: its names, and the way in which its bytes are read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import _native
from ._leaves import Keys, show

log = logging.getLogger("rapidraid")

#: A name of a checkpoint: rank or ``None``, keys, kind, element type, bits, shape, flags.
Name = tuple[int | None, list[tuple[int, Any]], str, str, int, list[int], int]

#: The place of a name in a checkpoint: its space, a rank or ``None``, and its path.
NamePlace = tuple[int | None, Keys]
#: A target: row of the name, box or ``None`` for the whole, address, and length in bytes.
Target = tuple[int, tuple[list[int], list[int]] | None, int, int]
#: A load by ranges is used while all readers together want less than this fraction of a step.
#: Otherwise the whole step is read once, in order.
WORTH_RANGES = 0.25


class ReadWholeError(Exception):
    """Raised if so much of the step is wanted that the whole step should be read."""


@dataclass
class Reader:
    """A step that is being loaded, and the way in which its bytes are read."""

    session: _native.Session
    loaded: _native.LoadedStep
    #: Number of processes that load the same step at the same time.
    readers: int
    #: The deadline of the load, by the monotonic clock.
    until: float

    def check_wanted(self, targets: list[Target], names: list[int], expected: int = 0) -> None:
        """Raises :class:`ReadWholeError` if a load by ranges does not pay off; logs the reason for one otherwise.

        ``expected`` is the number of bytes that this load and later ones of the same host are expected to read.
        """
        is_by_ranges, why = self.loaded.by_ranges
        if not is_by_ranges:
            return
        total, wanted = self.loaded.wanted_bytes(targets, names)
        if why:
            log.warning("step %d is read in parts, for want of memory: %s", self.loaded.number, why)
        elif max(wanted, expected) * self.readers >= total * WORTH_RANGES:
            raise ReadWholeError
        else:
            log.info("step %d: only the parts that are wanted are read, %d of %d bytes", self.loaded.number, wanted, total)

    def windows(self, targets: list[Target], names: list[int]) -> Iterator[list[int]]:
        """Reads the targets and names window by window.

        Yields for each window the indexes of the targets and names that have bytes in it.
        """
        for extents, places in self.loaded.windows(targets, names):
            if self.loaded.by_ranges[0]:
                self.session.read_extents(self.loaded, extents, max(0.0, self.until - time.monotonic()))
            yield places

    def copy(self, targets: list[Target]) -> str | None:
        """Copies to all targets. Returns ``None``, or the name of a damaged tensor."""
        for places in self.windows(targets, []):
            damaged = self.loaded._copy([targets[at] for at in places], _threads())
            if damaged is not None:
                return damaged
        return None

    def content(self, row: int) -> bytes:
        """Returns the bytes of a plain value."""
        next(self.windows([], [row]))
        return self.loaded.content(row)


def _threads() -> int:
    return max(1, min(16, len(os.sched_getaffinity(0))))


class Names:
    """The names of a checkpoint by space and path. With ``include``, only those for which it returns true."""

    def __init__(self, loaded: _native.LoadedStep, include: Callable[[str], bool] | None = None) -> None:
        self.step = loaded.number
        self.rows: dict[tuple[int | None, Keys], tuple[int, Name]] = {}
        #: The shared names, whatever ``include`` chooses.
        self.shared: list[Keys] = []
        #: The ranks that have private state. Other ranks may have saved too.
        self.ranks: set[int] = set()
        for row, name in enumerate(loaded.names()):
            keys = tuple((tag, key) for tag, key in name[1])
            if name[0] is None:
                self.shared.append(keys)
            if include is not None and not include(show(keys)):
                continue
            self.rows[(name[0], keys)] = (row, name)
            if name[0] is not None:
                self.ranks.add(name[0])

    def owners(self, keys: Keys) -> list[int]:
        """Returns the ranks that have a name as private state."""
        return [rank for rank in sorted(self.ranks) if (rank, keys) in self.rows]
