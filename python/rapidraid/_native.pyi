"""The extension. The package's modules show how it is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION: str
HEADER_BYTES: int
EXTENT_ALIGN_BYTES: int

_Keys = list[tuple[int, str | int]]
_Name = tuple[int | None, list[tuple[int, Any]], str, str, int, list[int], int]

def encode_value(value: Any) -> bytes | None:
    """Returns the bytes of a plain value, or ``None`` if the object is not a plain value."""

def decode_value(content: bytes) -> Any:
    """Returns the plain value that the bytes encode."""

def format_path(keys: _Keys) -> str:
    """Returns the text form of a path."""

def parse_path(text: str) -> _Keys:
    """Returns the keys of a path in text form."""

def boot_ns() -> int:
    """Returns the nanoseconds since the host's boot."""

def staging_place(config: Path) -> tuple[Path, Path | None, str]:
    """Returns the staging folder, the token's file and the cluster of a client's configuration."""

def _sample_hash(ranges: list[tuple[int, int]]) -> bytes: ...

class SegmentBuffer:
    """The data of a segment, as a writable buffer."""

    def __len__(self) -> int: ...
    def _fill(self, sources: list[tuple[int, int, int]], threads: int) -> None:
        """Copies memory into the segment: offset, address and length in bytes of each piece."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class TableWriter:
    """Collects the entries that a rank stores, in the order of its segment."""

    def __init__(self) -> None: ...
    def add_extent(self, len_bytes: int) -> int:
        """Adds an extent. Returns its number."""

    def set_length(self, extent: int, len_bytes: int) -> None:
        """Sets the length of an extent, in bytes."""

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
        """Returns the offset of each extent, and the offset at which the data ends, in bytes."""

    def table_bytes(self) -> int:
        """Returns the length of the table in bytes."""

_Target = tuple[int, tuple[list[int], list[int]] | None, int, int]

class LoadedStep:
    """An open step, whose bytes can be read until it is released."""

    @property
    def number(self) -> int:
        """The number of the step."""

    @property
    def is_from_memory(self) -> bool:
        """Whether the step is read from the host's memory as its trainers left it."""

    @property
    def newest_committed(self) -> int | None:
        """The newest committed step of the job."""

    def names(self) -> list[_Name]:
        """Returns all names, by row."""

    def find(self, rank: int | None, keys: _Keys) -> int | None:
        """Returns the row of a name, or ``None`` if there is none."""

    def content(self, row: int) -> bytes:
        """Returns the bytes of a plain value or of opaque bytes, verified."""

    @property
    def by_ranges(self) -> tuple[bool, str]:
        """Whether extents are read from the cluster window by window, and the reason.

        The reason is empty unless memory does not suffice for the whole step.
        """

    def extents_of(self, targets: list[_Target]) -> list[list[int]]:
        """Returns the rows of the extents of each target."""

    def wanted_bytes(self, targets: list[_Target], names: list[int]) -> tuple[int, int]:
        """Returns the length of the step, and how many bytes a load by ranges reads for these targets and names."""

    def windows(self, targets: list[_Target], names: list[int]) -> list[tuple[list[int], list[int]]]:
        """Divides the extents of targets and names into windows.

        Returns for each window its extents, and the indexes of the targets and names that need
        them; names are numbered after the targets. A window without extents is the part of the step in
        this host's memory, or the whole step if it is not loaded by ranges.
        """

    def _copy(self, targets: list[_Target], threads: int) -> str | None: ...

class Session:
    """A connection to the staging daemon, and the segments of a rank."""

    def __init__(self, dir: Path, token: Path | None = None, timeout: float = 10.0) -> None: ...
    @property
    def instance(self) -> str:
        """The id of the staging folder."""

    @property
    def cluster(self) -> str:
        """The id of the cluster that the daemon saves to."""

    @property
    def daemon_pid(self) -> int:
        """The process id of the daemon."""

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
        hosts: tuple[int, list[str]] | None = None,
        timeout: float = 60.0,
    ) -> int:
        """Makes the first segment for a rank of a launch. Returns the number of segments.

        ``hosts`` has the number of this host and the names of all, if the launch runs on several. ``world`` and ``rank``
        count the ranks of this host then.
        """

    def make_ordered_segments(self, timeout: float) -> int:
        """Makes the segments that are ordered and not made yet. Returns the number of segments now.

        Without memory for another one, the rank makes do with those that it has.
        """

    def segment(self, at: int) -> SegmentBuffer:
        """Returns the data of a segment."""

    def fill(self, step: int, or_skip: bool, timeout: float) -> tuple[int | None, str, int]:
        """Returns the index of the segment to write a step into, the filling's id, and the number of segments.

        If all ranks skip the step, which happens only with ``or_skip``, the first is ``None`` and the second is the reason.
        """

    def stage(self, step: int, at: int, fill: str, table: TableWriter, samples: list[tuple[str, bytes]], timeout: float) -> int:
        """Writes the table and reports that a step is staged in a segment. Returns the length of the table in bytes."""

    def give_up(self, step: int, fill: str, why: str, timeout: float) -> None:
        """Abandons the filling of a step."""

    def wait(self, step: int, timeout: float) -> tuple[str | None, list[str]]:
        """Waits for the commit of a step.

        Returns the save's id and remarks; or ``None`` and the progress if it is not committed
        before the timeout.
        """

    def notices(self, timeout: float) -> list[tuple[int, tuple[int, str, str] | None, str]]:
        """Returns the failures and warnings that arose since the last call."""

    def load(
        self,
        job: str,
        *,
        step: int | None = None,
        launch: str | None = None,
        number: int = 0,
        offline: bool = False,
        table_first: bool = False,
        from_cluster: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        timeout: float = 600.0,
    ) -> LoadedStep | None:
        """Opens a step for loading, by default the resume point. Returns ``None`` if the job has no step."""

    def read_extents(self, loaded: LoadedStep, extents: list[int], timeout: float) -> None:
        """Reads the extents of one window of a load by ranges. The extents of the previous window become unreadable."""

    def release(self, loaded: LoadedStep, damaged: str | None = None, timeout: float = 30.0) -> None:
        """Ends a load. ``damaged`` is the name of a tensor or value that did not match its hash."""

    def steps(self, job: str, timeout: float) -> list[tuple[int, bool, bool, int]]:
        """Returns the steps of a job: number, whether it is committed, whether it is in memory, and length in bytes."""

    def remove(self, job: str, step: int, timeout: float) -> None:
        """Removes a committed step."""

    def label(self, job: str, step: int, label: str, is_removed: bool, timeout: float) -> None:
        """Adds a label to a committed step, or removes one."""

    def labels(self, job: str, timeout: float) -> list[tuple[int, list[str]]]:
        """Returns the labelled steps of a job, in order, with their labels."""

    def leave(self, timeout: float) -> None:
        """Ends the session. Segments of this process that hold no staged step become free for others."""

    def leave_to_parent(self) -> None:
        """Ends the session in a forked child, and releases its copies of everything that belongs to the parent."""
