"""The results of measurements, as data."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Measure:
    """Times of a subject and its references, measured in turn."""

    name: str
    #: The title of the measure on the page.
    title: str
    #: The arm that is compared with the references.
    subject: str
    #: The reference arms; the fastest one counts.
    references: list[str]
    #: The maximum ratio, and the seconds that are allowed beyond it.
    limit: float | None = None
    allowance_s: float = 0.0
    #: The times of each arm in seconds, in the order of measurement.
    arms: dict[str, list[float]] = field(default_factory=dict)
    #: Additional numbers, such as splits.
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, arm: str, seconds: float) -> None:
        """Adds a time."""
        self.arms.setdefault(arm, []).append(seconds)

    def median(self, arm: str) -> float:
        """Returns the median of an arm."""
        return statistics.median(self.arms[arm])

    @property
    def best(self) -> str | None:
        """The fastest reference."""
        return min((arm for arm in self.references if self.arms.get(arm)), key=self.median, default=None)

    @property
    def ratio(self) -> float | None:
        """The subject's median divided by that of the fastest reference."""
        return self.median(self.subject) / self.median(self.best) if self.best else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The smallest and the largest ratio of times that were measured one after the other."""
        if self.best is None:
            return None
        reference, subject = self.arms[self.best], self.arms[self.subject]
        if len(reference) != len(subject):
            middle = self.median(self.best)
            reference = [middle] * len(subject)
        ratios = [mine / theirs for mine, theirs in zip(subject, reference, strict=True)]
        return min(ratios), max(ratios)

    @property
    def is_met(self) -> bool | None:
        """Whether the limit is met; ``None`` if there is none."""
        if self.limit is None or self.best is None:
            return None
        return self.median(self.subject) <= self.limit * self.median(self.best) + self.allowance_s


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=__import__("sys").stderr, flush=True)


def keep(measures: list[Measure], file: Path, command: str, settings: dict[str, Any]) -> None:
    """Writes measures into a record, replacing those of the same names."""
    known = json.loads(file.read_text()) if file.is_file() else {}
    merged = {measure["name"]: measure for measure in known.get("measures", [])}
    about = _about(command)
    for measure in measures:
        merged[measure.name] = {
            **asdict(measure),
            "ratio": measure.ratio,
            "spread": measure.spread,
            "is_met": measure.is_met,
            "taken": about,
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": 1, "settings": settings, "measures": list(merged.values())}
    file.write_text(json.dumps(_rounded(record), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def _about(command: str) -> dict[str, Any]:
    root = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "command": command,
        "commit": commit.stdout.strip(),
        "date": f"{datetime.date.today()}",
        "machine": {
            "kernel": platform.release(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "processor": cpu,
            "processors": os.cpu_count(),
        },
    }
