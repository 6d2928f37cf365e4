"""Python's signal handlers, which wait until a call that uses a session has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

#: Signals whose handlers may wait. Ctrl-C ends a call at once.
_SIGNALS: list[int] = sorted(signal.valid_signals() - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP})


#: What ends the blocks that this process is in.
_endings: list[contextlib.ExitStack] = []


@contextlib.contextmanager
def handlers_deferred() -> Iterator[None]:
    """Lets Python's signal handlers wait until the end of the block. Handlers of Ctrl-C do not wait.

    A handler may save, as that of Lightning does before a job of SLURM is queued again. In the middle of another save it
    would find the session in use, or be given the segment that is being filled.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python runs handlers in the main thread alone.
        yield
        return
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    for number in _SIGNALS:
        if callable(handler := signal.getsignal(number)):
            handlers[number] = handler
    arrived: dict[int, None] = {}
    is_over = False

    def defer(number: int, frame: FrameType | None) -> None:
        if is_over:
            handlers[number](number, frame)
        else:
            arrived[number] = None

    def restore(number: int) -> None:
        # Another handler may have been set since.
        if signal.getsignal(number) is defer:
            signal.signal(number, handlers[number])

    process = os.getpid()

    def handle_arrived() -> None:
        if os.getpid() != process:
            # The signals were the parent's.
            return
        with contextlib.ExitStack() as calls:
            # All of them run, also if one raises.
            for number in reversed(arrived):
                calls.callback(handlers[number], number, sys._getframe())

    def end() -> None:
        nonlocal is_over
        is_over = True

    with contextlib.ExitStack() as ending:
        ending.callback(handle_arrived)
        for number in handlers:
            ending.callback(restore, number)
        ending.callback(end)
        _endings.append(ending)
        ending.callback(_endings.remove, ending)
        for number in handlers:
            signal.signal(number, defer)
        yield


def _after_fork() -> None:
    """Ends the blocks of the parent, which a child that another thread has forked would never leave."""
    while _endings:
        _endings[-1].close()


os.register_at_fork(after_in_child=_after_fork)
