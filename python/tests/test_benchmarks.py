"""The benchmarks of the trainer's side run to their end. Their speed is not checked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_a_short_run_leaves_a_record(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "trainers", "--short", "--only", "stall"]
    command += ["--record", str(tmp_path / "trainers.json"), "--pictures", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "trainers.json").read_text())
    measures = {measure["name"]: measure for measure in record["measures"]}
    assert set(measures) == {"stall", "first"}
    for measure in measures.values():
        assert len(measure["arms"]["save"]) == len(measure["arms"]["memcpy"]) == 2
        assert measure["ratio"] > 0
    split = measures["stall"]["facts"]["split_s"]
    assert set(split) == {"traversal", "waiting", "copy", "socket"}
    assert "| stall of a save |" in done.stdout
