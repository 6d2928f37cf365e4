"""Launches in which a rank crashes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ranks import once

CRASH = str(Path(__file__).parent / "programs" / "crash.py")


def test_a_launch_in_which_gloo_crashed_first_is_repeated(tmp_path: Path) -> None:
    assert once(CRASH, 1, str(tmp_path / "mark"), "pt_gloo_runloop") == (0, ["ended well"])


@pytest.mark.parametrize("arguments", [["python"], ["pt_gloo_runloop", "a line of the program"]])
def test_any_other_crash_fails_and_shows_its_stacks(tmp_path: Path, arguments: list[str]) -> None:
    code, lines = once(CRASH, 1, str(tmp_path / "mark"), *arguments)
    assert code == -signal.SIGSEGV
    assert any("fatalSignalHandler(" in line for line in lines), lines
