"""Runs the program that the wheel contains: ``python -m rapidraid`` and ``rapidraid``."""

from __future__ import annotations

import os
import sys

from ._program import program


def main() -> None:
    """Replaces this process by the program."""
    path = program()
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
