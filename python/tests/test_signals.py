"""Signal handlers that use a Checkpointer run when no call of the main thread uses its session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import rapidraid
from rapidraid._signals import handlers_deferred

torch = pytest.importorskip("torch")
PROGRAM = str(Path(__file__).parent / "programs" / "aside.py")


@pytest.fixture
def arrived() -> Iterator[list[int]]:
    """Sets handlers of two signals. Returns the signals that they have seen."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_run_at_the_end_of_the_block(arrived: list[int]) -> None:
    """Each runs once, in the order of the arrival, and is in place again. A block in a block changes nothing."""
    handler = signal.getsignal(signal.SIGUSR1)
    with handlers_deferred():
        signal.raise_signal(signal.SIGUSR2)
        with handlers_deferred():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
        assert arrived == []
    assert arrived == [signal.SIGUSR2, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.raise_signal(signal.SIGUSR1)
    assert len(arrived) == 3


def test_handlers_run_after_an_error_and_a_handler_that_raises(arrived: list[int]) -> None:
    def refuse(_number: int, _frame: FrameType | None) -> None:
        raise KeyError("from the handler")

    signal.signal(signal.SIGUSR1, refuse)
    with pytest.raises(KeyError, match="from the handler"), handlers_deferred():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        raise ValueError("from the block")
    assert arrived == [signal.SIGUSR2]


def test_a_handler_that_is_set_in_the_block_stays(arrived: list[int]) -> None:
    later: list[int] = []
    with handlers_deferred():
        signal.signal(signal.SIGUSR1, lambda number, _frame: later.append(number))
    signal.raise_signal(signal.SIGUSR1)
    assert later == [signal.SIGUSR1] and arrived == []


def test_a_child_that_another_thread_forks_has_the_handlers(arrived: list[int]) -> None:
    """It is in no block, and what arrived before the fork was for its parent."""
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR2)
            os._exit(len(arrived) * 10 + (arrived == [signal.SIGUSR2]))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with handlers_deferred():
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert arrived == []
    assert codes == [11] and arrived == [signal.SIGUSR1]


def test_interrupts_do_not_wait() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), handlers_deferred():
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the interrupt waits")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", ["save", "copy", "wait"])
def test_a_handler_saves_while_a_save_is_under_way(
    cluster: rapidraid.LocalCluster, job: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the handler of Lightning does before a job of SLURM is queued again. Both steps are saved."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    done = threading.Event()

    def save_more(_number: int, _frame: FrameType | None) -> None:
        assert checkpointer.save(50, {"a": torch.full((4,), 50.0)})
        done.set()

    before = signal.signal(signal.SIGUSR1, save_more)
    paused = cluster.nodes[3:] if when != "copy" else []
    try:
        checkpointer.prepare({"a": torch.zeros(4)})
        for node in paused:
            cluster.pause(node)
        if when == "copy":
            plan = checkpointer._saver.plan
            assert plan is not None
            copy = plan.copy

            def raise_and_copy(*arguments: object) -> object:
                monkeypatch.undo()
                signal.raise_signal(signal.SIGUSR1)
                return copy(*arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(plan, "copy", raise_and_copy)
            checkpointer.save(1, {"a": torch.full((4,), 1.0)})
        else:
            # Both segments hold steps that no node takes, so the third save waits.
            steps = (1, 2, 3) if when == "save" else (1,)
            begun = time.monotonic()

            def signal_and_resume() -> None:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.5)
                for node in paused:
                    cluster.resume(node)

            thread = threading.Thread(target=signal_and_resume)
            thread.start()
            for step in steps:
                checkpointer.save(step, {"a": torch.full((4,), float(step))})
            checkpointer.wait(steps[-1])
            thread.join()
            assert time.monotonic() - begun > 0.5
    finally:
        for node in paused:
            cluster.resume(node)
        signal.signal(signal.SIGUSR1, before)
    assert done.is_set()
    checkpointer.close()
    with rapidraid.Checkpointer(job, config=cluster.config) as reader:
        for info in reader.steps():
            state = {"a": torch.zeros(4)}
            reader.load(state, step=info.step)
            assert state["a"].eq(float(info.step)).all(), "each step has its own bytes"
        assert {1, 50} <= {info.step for info in reader.steps()}


def test_ranks_ask_each_other_while_threads_save(cluster: rapidraid.LocalCluster, job: str) -> None:
    """``dcp.async_save`` has a thread in collectives of the launch while the loop asks whether to end."""
    from ranks import once

    code, lines = once(PROGRAM, 2, job, str(cluster.config))
    assert code == 0 and lines.count("went on") == 2, lines


def test_a_process_without_python_handlers_is_left_alone() -> None:
    """Handlers of C code and defaults stay as they are."""
    code = (
        "import faulthandler, signal\n"
        "from rapidraid._signals import handlers_deferred\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        "with handlers_deferred():\n"
        "    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "    signal.raise_signal(signal.SIGUSR1)\n"
        "print('left alone')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "left alone" in done.stdout and "most recent call first" in done.stderr, done.stderr
