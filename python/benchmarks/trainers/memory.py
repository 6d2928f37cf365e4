"""Memory of processes: proportional set sizes, sampled, and the peak of a control group."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


def pss_bytes(pid: int) -> int:
    """Returns the proportional set size of a process: shared pages count by their share."""
    return _rollup(pid, "Pss")


def _rollup(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


class Peak:
    """Samples the private memory of a process, without shared memory, until the context ends."""

    def __init__(self, pid: int, period_s: float = 0.05) -> None:
        self.pid, self.period_s = pid, period_s
        self.first_bytes = self.bytes = _rollup(pid, "Pss_Anon")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._over.wait(self.period_s):
            self.bytes = max(self.bytes, _rollup(self.pid, "Pss_Anon"))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class GroupPeak:
    """Puts a process into a control group of its own and records the peak of its memory, if that is possible.

    A group also counts page cache, sockets, and shared memory that the process touches first.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.bytes: int | None = None
        first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self._parent = first if first.is_dir() else second
        self._group = self._parent / f"rapidraid-bench-{pid}"
        self._peak = self._group / ("memory.max_usage_in_bytes" if first.is_dir() else "memory.peak")
        # Memory that the process already has stays charged to its old group.
        self._before = _rollup(pid, "Pss_Anon")
        self._is_made = False
        self._home: Path | None = None

    def __enter__(self) -> GroupPeak:
        try:
            self._home = self._group_of_process()
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(self.pid))
            self._is_made = self._peak.is_file()
        except OSError:
            self._is_made = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_made:
            self.bytes = self._before + int(self._peak.read_text())
        with contextlib.suppress(OSError):
            if self._is_made and self._home is not None:
                (self._home / "cgroup.procs").write_text(str(self.pid))
            self._group.rmdir()

    def _group_of_process(self) -> Path:
        """Returns the folder of the group that the process is in before the measurement."""
        for line in Path(f"/proc/{self.pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if ("memory" in controllers.split(",")) if self._parent.name == "memory" else not controllers:
                return self._parent / path.lstrip("/")
        return self._parent
