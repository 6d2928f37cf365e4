"""Runs the program that the wheel contains: ``python -m rapidraid`` and ``rapidraid``."""

from __future__ import annotations

import os
import sys

from ._program import program


def main() -> None:
    """Replaces this process by the program. Only commands that need torch run in this process."""
    if sys.argv[1:2] in (["import"], ["export"]):
        from ._convert import run

        sys.exit(run(sys.argv[1:]))
    path = program()
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
