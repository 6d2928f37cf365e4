"""The configuration of a client, the path of the program, and the start of a staging daemon."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from . import _native
from .errors import DeadlineError, NoDaemonError, NotFoundError


def find_config(config: str | os.PathLike[str] | None) -> Path:
    """Returns the client's configuration file.

    The candidates are, in this order: the argument, ``RAPIDRAID_CONFIG``, ``./rapidraid.toml``, and
    ``rapidraid/rapidraid.toml`` in the user's configuration folder.
    """
    if config is None:
        config = os.environ.get("RAPIDRAID_CONFIG") or None
    if config is not None:
        return Path(config).absolute()
    base = os.environ.get("XDG_CONFIG_HOME", "")
    user = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    candidates = [Path("rapidraid.toml"), user / "rapidraid" / "rapidraid.toml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    tried = ", ".join(str(candidate) for candidate in candidates)
    raise NotFoundError(f"there is no configuration of a client: looked for {tried}", "pass config=, or use rapidraid.local_cluster()")


def program() -> str:
    """Returns the path of the program.

    ``RAPIDRAID_PROGRAM`` overrides the program in the wheel.
    """
    named = os.environ.get("RAPIDRAID_PROGRAM")
    if named:
        return named
    inside = Path(__file__).parent / "_bin" / "rapidraid"
    if inside.is_file():
        return str(inside)
    raise NotFoundError(
        "this installation has no program `rapidraid`",
        "install the wheel, or name a program by RAPIDRAID_PROGRAM",
    )


def connect(config: Path, timeout: float, start: bool) -> _native.Session:
    """Connects to the staging daemon of a client's configuration. Starts one if none answers and ``start`` is set."""
    directory, token, _ = _native.staging_place(config)
    until = time.monotonic() + timeout
    try:
        return _native.Session(directory, token, timeout)
    except NoDaemonError:
        if not start:
            raise
    start_daemon(config, max(until - time.monotonic(), 1.0))
    return _native.Session(directory, token, max(until - time.monotonic(), 1.0))


def start_daemon(config: Path, timeout: float) -> None:
    """Starts a daemon that outlives this process. If several ranks do so at once, one daemon remains."""
    command = [program(), "stage", "--detach", "--config", str(config.resolve())]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, close_fds=True)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"the staging daemon is not ready after {timeout:.0f} s", "`rapidraid stage` in a terminal shows why") from None
    if done.returncode != 0:
        raise NoDaemonError(f"the staging daemon did not start: {done.stderr.strip()}")


if sys.platform != "linux":
    raise ImportError("rapidraid needs Linux")
