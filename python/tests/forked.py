"""Starts scripts as forks of one process that has imported torch, which takes a core three seconds in each new process.

A fork has its own memory, can be killed, and runs the handlers of ``atexit`` at its end. Unlike a new process, it finds
modules imported, and all forks have one seed for the hashes of strings.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

#: Maximum size of a request: the arguments and the environment of a script.
MAX_REQUEST = 128 << 10


class Script:
    """A script that runs, with a part of the interface of ``subprocess.Popen``."""

    def __init__(self, stdout: IO[str]) -> None:
        self.stdout = stdout
        self.pid = 0
        self._code = 0
        self._started = threading.Event()
        self._ended = threading.Event()

    def wait(self) -> int:
        """Waits until the process ends. Returns its exit code, or minus the number of the signal that ended it."""
        self._ended.wait()
        return self._code

    def kill(self) -> None:
        """Kills the process unless it has ended."""
        if not self._ended.is_set():
            # It may have ended, and its end may not be reported yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Starter:
    """The process that forks. It imports once, and runs no script itself."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(other.fileno())]
        # Libraries read this variable when they are loaded.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, env=env, pass_fds=[other.fileno()])
        other.close()
        # Guards what follows.
        self._lock = threading.Lock()
        self._starting: list[Script] = []
        self._running: dict[int, Script] = {}
        self._has_ended = False
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, command: Sequence[str], env: dict[str, str]) -> Script:
        """Starts a script (its path and arguments). Its output and its errors go to ``stdout`` of the result."""
        reading, writing = os.pipe()
        script = Script(os.fdopen(reading, "r"))
        request = json.dumps({"command": list(command), "env": env, "cwd": os.getcwd()}).encode()
        assert len(request) <= MAX_REQUEST, "a longer request would be cut"
        try:
            with self._lock:
                if self._has_ended:
                    raise RuntimeError("the process that forks has ended")
                socket.send_fds(self._socket, [request], [writing])
                self._starting.append(script)
        finally:
            os.close(writing)
        script._started.wait()
        if script.pid == 0:
            raise RuntimeError("the process that forks has ended")
        return script

    def _watch(self) -> None:
        """Takes over what the process reports, until it ends."""
        try:
            while report := self._socket.recv(MAX_REQUEST):
                with self._lock:
                    self._take_over(json.loads(report))
        finally:
            with self._lock:
                self._has_ended = True
                for script in [*self._starting, *self._running.values()]:
                    script._code = -signal.SIGKILL
                    script._ended.set()
                    script._started.set()

    def _take_over(self, word: dict[str, int]) -> None:
        if "code" in word:
            script = self._running.pop(word["pid"])
            script._code = word["code"]
            script._ended.set()
        else:
            # Requests are answered in their order.
            script = self._starting.pop(0)
            script.pid = word["pid"]
            self._running[script.pid] = script
            script._started.set()


def fork_scripts(requests: socket.socket) -> str:
    """Forks a process for each request and reports its pid, and later its exit code.

    Returns the path of the script in the new process, which has its arguments, environment and output. Never returns in
    the process that forks: that ends with the socket.
    """
    waking, wake = os.pipe()
    for end in (waking, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            report_ended(requests)
        if requests not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 1)
        if not request:
            sys.exit()
        (output,) = fds
        pid = os.fork()
        if pid:
            os.close(output)
            requests.send(json.dumps({"pid": pid}).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (waking, wake):
            os.close(end)
        requests.close()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        word = json.loads(request)
        os.environ.clear()
        os.environ.update(word["env"])
        os.chdir(word["cwd"])
        sys.argv[:] = word["command"]
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(sys.argv[0])
        return sys.argv[0]


def report_ended(requests: socket.socket) -> None:
    """Reports the exit code of each process that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        requests.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


if __name__ == "__main__":
    # Imported for the scripts, which find them in `sys.modules`.
    import torch.distributed.checkpoint  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401

    import rapidraid  # noqa: F401

    # An older torch has no such DCP.
    with contextlib.suppress(ImportError):
        import rapidraid.torch  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    script = fork_scripts(socket.socket(fileno=int(sys.argv[1])))
    # A crash prints the stacks of all threads. The handler of SIGINT stays Python's.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_path(script, run_name="__main__")
