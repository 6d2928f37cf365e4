"""The extension: see the package's modules for how it is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION: str
HEADER_BYTES: int
EXTENT_ALIGN_BYTES: int

_Keys = list[tuple[int, str | int]]
_Name = tuple[int | None, list[tuple[int, Any]], str, str, int, list[int], int]

def encode_value(value: Any) -> bytes | None:
    """Returns a plain value as bytes; ``None`` for what is no plain value."""

def decode_value(content: bytes) -> Any:
    """Returns the plain value of bytes."""

def format_path(keys: _Keys) -> str:
    """Returns a path as people read it."""

def parse_path(text: str) -> _Keys:
    """Returns the path that people write so."""

def boot_ns() -> int:
    """Returns the nanoseconds since the host was booted."""

def staging_place(config: Path) -> tuple[Path, Path | None, str]:
    """Returns the staging folder, the token's file and the cluster of a client's configuration."""

def _sample_hash(ranges: list[tuple[int, int]]) -> bytes: ...

class SegmentBuffer:
    """The data of a segment, as a writable buffer."""

    def __len__(self) -> int: ...
    def _fill(self, sources: list[tuple[int, int, int]], threads: int) -> None:
        """Copies memory into the segment: offset, address and length of each piece."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class TableWriter:
    """Collects what a rank stores, in the order of its segment."""

    def __init__(self) -> None: ...
    def add_extent(self, len_bytes: int) -> int:
        """Adds an extent and returns its number."""

    def set_length(self, extent: int, len_bytes: int) -> None:
        """Sets the length of an extent."""

    def add_tensor(
        self,
        rank: int | None,
        keys: _Keys,
        element: str,
        bits: int,
        shape: list[int],
        extent: int,
        start: list[int] | None = None,
        size: list[int] | None = None,
        flags: int = 0,
    ) -> None:
        """Adds a tensor, or a box of it."""

    def add_bytes(self, rank: int | None, keys: _Keys, is_value: bool, extent: int, flags: int = 0) -> None:
        """Adds a plain value, or opaque bytes."""

    def offsets(self) -> tuple[list[int], int]:
        """Returns where each extent lies, and where the last one ends."""

    def table_bytes(self) -> int:
        """Returns the length of the table."""

_Target = tuple[int, tuple[list[int], list[int]] | None, int, int]

class LoadedStep:
    """A step of which bytes can be read until it is released."""

    @property
    def number(self) -> int:
        """The step."""

    @property
    def is_from_memory(self) -> bool:
        """Whether it is read from the host's memory as its trainers left it."""

    @property
    def newest_committed(self) -> int | None:
        """The newest committed step of the job."""

    def names(self) -> list[_Name]:
        """Returns all names, by row."""

    def find(self, rank: int | None, keys: _Keys) -> int | None:
        """Returns the row of a name."""

    def content(self, row: int) -> bytes:
        """Returns the bytes of a plain value, verified."""

    @property
    def by_ranges(self) -> tuple[bool, str]:
        """Whether extents are read from the cluster window by window, and why, if it is for want of memory."""

    def extents_of(self, targets: list[_Target]) -> list[list[int]]:
        """Returns the rows of the extents of each target."""

    def wanted_bytes(self, targets: list[_Target], names: list[int]) -> tuple[int, int]:
        """Returns the bytes of the step, and how many are read for these targets and names by ranges."""

    def windows(self, targets: list[_Target], names: list[int]) -> list[tuple[list[int], list[int]]]:
        """Cuts the extents of targets and names into windows: extents, and the places of what they belong to, first the targets."""

    def _copy(self, targets: list[_Target], threads: int) -> str | None: ...

class Session:
    """A connection to the staging daemon, and the segments of a rank."""

    def __init__(self, dir: Path, token: Path | None = None, timeout: float = 10.0) -> None: ...
    @property
    def instance(self) -> str:
        """The staging folder's id."""

    @property
    def cluster(self) -> str:
        """The cluster that the daemon saves to."""

    @property
    def daemon_pid(self) -> int:
        """The daemon's process."""

    def prepare(
        self,
        job: str,
        launch: str,
        world: int,
        rank: int,
        *,
        segment_bytes: int,
        launch_bytes: int,
        born_ns: int,
        loaded: int | None = None,
        newest_seen: int | None = None,
        abandon_later: bool = False,
        keep: int = 0,
        timeout: float = 60.0,
    ) -> int:
        """Makes segments and returns how many."""

    def segment(self, at: int) -> SegmentBuffer:
        """Returns the data of a segment."""

    def fill(self, step: int, or_skip: bool, timeout: float) -> tuple[int | None, str, int]:
        """Returns which segment a step is to be written into, the filling's id, and how many segments there are.

        With ``or_skip`` the first may be ``None``: all ranks skip the step, and the second says why.
        """

    def stage(self, step: int, at: int, fill: str, table: TableWriter, samples: list[tuple[str, bytes]], timeout: float) -> int:
        """Says that a step is whole in a segment."""

    def give_up(self, step: int, fill: str, why: str, timeout: float) -> None:
        """Gives up filling a step."""

    def wait(self, step: int, timeout: float) -> tuple[str | None, list[str]]:
        """Waits for the commit of a step."""

    def notices(self, timeout: float) -> list[tuple[int, tuple[int, str, str] | None, str]]:
        """Takes what went wrong since the last call."""

    def load(
        self,
        job: str,
        *,
        step: int | None = None,
        launch: str | None = None,
        number: int = 0,
        offline: bool = False,
        table_first: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        timeout: float = 600.0,
    ) -> LoadedStep | None:
        """Opens a step for loading."""

    def read_extents(self, loaded: LoadedStep, extents: list[int], timeout: float) -> None:
        """Reads the extents of a window of a load by ranges."""

    def release(self, loaded: LoadedStep, damaged: str | None = None, timeout: float = 30.0) -> None:
        """Ends a load."""

    def steps(self, job: str, timeout: float) -> list[tuple[int, bool, bool, int]]:
        """Returns the steps of a job."""

    def remove(self, job: str, step: int, timeout: float) -> None:
        """Removes a committed step."""

    def leave(self, timeout: float) -> None:
        """Ends the session: the memory that this process had is free for others."""

    def leave_to_parent(self) -> None:
        """Ends the session in a forked child, and lets go of all that belongs to the parent."""
