"""Memory of processes: proportional set sizes, sampled."""

from __future__ import annotations

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
    """Samples what a process holds beside shared memory until it is left."""

    def __init__(self, pid: int, period_s: float = 0.05) -> None:
        self.pid, self.period_s, self.bytes = pid, period_s, 0
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
