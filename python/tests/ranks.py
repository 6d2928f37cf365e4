"""Runs an example as a launch of several ranks, and again after a rank has died, like a supervisor."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forked import Script, Starter

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 240
#: A line of a process that torch 2.15 aborts while it ends. Without rapidraid, 5 of 16 launches of FSDP2 that end
#: right after a collective do so on a busy machine.
ABORT_AT_EXIT = "terminate called without an active exception"
#: The first words of the lines that gloo prints in torch 2.9.
OF_GLOO = "[Gloo] "
#: The first words of the stack of each thread that torch prints when a process crashes.
STACK_OF_A_THREAD = "SIGSEGV(11), PID: "
#: The thread that crashed has this function in its stack.
HANDLER_OF_A_CRASH = "c10::FatalSignalHandler::fatalSignalHandler("
#: A thread of gloo has this function in its stack.
LOOP_OF_GLOO = "c10d::ProcessGroupGloo::runLoop("
OF_RAPIDRAID = "/rapidraid/_native"


@functools.cache
def starter() -> Starter:
    """Returns the process that forks the ranks of all launches."""
    return Starter()


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def gloo_crashed_first(lines: Sequence[str]) -> bool:
    """Returns whether a thread of gloo crashed, outside rapidraid's code, before any rank had printed a line."""
    stacks = "\n".join(lines).split(STACK_OF_A_THREAD)
    crashed = [stack for stack in stacks if HANDLER_OF_A_CRASH in stack]
    return not stacks[0] and len(crashed) == 1 and LOOP_OF_GLOO in crashed[0] and OF_RAPIDRAID not in crashed[0]


def once(
    script: str,
    ranks: int,
    *arguments: str,
    on_line: Callable[[str], None] | None = None,
    env: dict[str, str] | None = None,
    configs: Sequence[Path] = (),
) -> tuple[int, list[str]]:
    """Runs one launch; if a rank fails, kills the others. Returns the first nonzero exit code, or 0, and the output.

    With ``configs``, the ranks are divided evenly over as many hosts, and the argument ``CONFIG`` becomes that of the host.
    Runs the launch a second time if a thread of gloo crashed before a rank had printed a line. In torch 2.15, one of
    thousands of launches did so.
    """
    code, lines = _once(script, ranks, *arguments, on_line=on_line, env=env, configs=configs)
    if code == -signal.SIGSEGV and gloo_crashed_first(lines):
        print("\n".join(["gloo crashed; this is the second launch", *lines]))
        code, lines = _once(script, ranks, *arguments, on_line=on_line, env=env, configs=configs)
    return code, lines


def _once(
    script: str,
    ranks: int,
    *arguments: str,
    on_line: Callable[[str], None] | None,
    env: dict[str, str] | None,
    configs: Sequence[Path],
) -> tuple[int, list[str]]:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks // max(1, len(configs))),
        "OMP_NUM_THREADS": "1",
    }
    lines: list[str] = []
    lock = threading.Lock()
    children: list[Script] = []
    codes: list[int] = []

    def watch(child: Script) -> None:
        has_aborted = False
        for line in child.stdout:
            has_aborted |= line.strip() == ABORT_AT_EXIT
            if line.startswith(OF_GLOO):
                continue
            with lock:
                lines.append(line.strip())
                if on_line is not None:
                    on_line(line.strip())
        code = child.wait()
        if code == -signal.SIGABRT and has_aborted:
            code = 0
        with lock:
            codes.append(code)
            if code != 0 and len([bad for bad in codes if bad]) == 1:
                for other in children:
                    other.kill()

    command = [str(EXAMPLES / script), *arguments]  # an absolute path overrides the folder
    threads = []
    try:
        for rank in range(ranks):
            own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
            config = str(configs[rank * len(configs) // ranks]) if configs else ""
            here = [config if configs and word == "CONFIG" else word for word in command]
            children.append(starter().start(here, own))
        threads = [threading.Thread(target=watch, args=(child,)) for child in children]
        killer = threading.Timer(LIMIT_S, lambda: [child.kill() for child in children])
        killer.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        killer.cancel()
    finally:
        for child in children:
            child.kill()
    return next((code for code in codes if code), 0), lines


def launch(
    script: str,
    ranks: int,
    *arguments: str,
    restarts: int = 0,
    on_line: Callable[[str], None] | None = None,
    env: dict[str, str] | None = None,
) -> tuple[int, list[str]]:
    """Runs launches until one succeeds, at most ``restarts`` more. Returns the last exit code and all output."""
    lines: list[str] = []
    code = 1
    for _ in range(1 + restarts):
        code, printed = once(script, ranks, *arguments, on_line=on_line, env=env)
        lines += printed
        if code == 0:
            break
    if code != 0:
        print("\n".join(lines[-60:]))
    return code, lines


def run_and_kill(command: Sequence[str], *, kill_after: int | None = None, limit_s: float = 120) -> list[str]:
    """Runs a program of one process, and kills it as soon as it has printed ``step KILL_AFTER``. Returns its lines."""
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.strip())
            if kill_after is not None and line.startswith(f"step {kill_after} "):
                child.send_signal(signal.SIGKILL)
        code = child.wait(limit_s)
    assert code == (0 if kill_after is None else -signal.SIGKILL), lines
    return lines


def equal(one: Any, other: Any) -> bool:
    """Returns whether two nested states have the same types and are equal, bit for bit."""
    torch = sys.modules["torch"]
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)
