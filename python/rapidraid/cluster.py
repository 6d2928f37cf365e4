"""A cluster on this machine, for trying things out and for tests: real daemons, gone with the process that started them."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from ._program import program
from .errors import DeadlineError, UnavailableError

#: How long all daemons together may take to be ready.
READY_S = 60.0


class LocalCluster:
    """Storage nodes and a staging daemon as children of this process.

    They end with the process, also when it is killed: each watches a pipe that ends with it. ``config`` is the client's configuration.
    """

    def __init__(
        self, nodes: int = 6, *, block: str = "1MiB", folder: str | os.PathLike[str] | None = None, settings: dict[str, str] | None = None
    ) -> None:
        self._own = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="rapidraid-")) if folder is None else Path(folder)
        self.config = self.folder / "cluster" / "client" / "rapidraid.toml"
        staging = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else self.folder
        # Named after the folder as a whole, so that it is found again and no other cluster's.
        self._staging = staging / f"rapidraid-{hashlib.sha256(str(self.folder.absolute()).encode()).hexdigest()[:12]}"
        self._children: dict[str, subprocess.Popen[str]] = {}
        try:
            if not self.config.is_file():
                self._make(nodes, block, settings or {})
            for node in sorted((self.folder / "cluster" / "nodes").iterdir()):
                self.start(node.name)
            self.start_staging()
            self._until_live()
        except BaseException:
            self.stop()
            raise

    def _make(self, nodes: int, block: str, settings: dict[str, str]) -> None:
        ports = _free_ports(nodes)
        command = [program(), "cluster", "init", str(self.folder / "cluster"), "--set", f"code.block={block}", "--set", "memory=64MiB"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        for at, port in enumerate(ports, 1):
            command += ["--node", f"node-{at:02}=127.0.0.1:{port}"]
        _run(command)
        with self.config.open("a") as file:
            file.write(f'\n[staging]\ndir = "{self._staging}"\nmemory = "4GiB"\n')

    def start(self, node: str) -> None:
        """Starts the daemon of a node, which may have been killed before."""
        config = self.folder / "cluster" / "nodes" / node / "rapidraid.toml"
        self._spawn(node, ["node", "--config", str(config), "--stop-at-eof"])

    def start_staging(self) -> None:
        """Starts the staging daemon."""
        self._spawn("staging", ["stage", "--config", str(self.config), "--stop-at-eof"])

    def _spawn(self, name: str, arguments: list[str]) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAPIDRAID_")}
        child = subprocess.Popen(
            [program(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            close_fds=True,
            start_new_session=True,
        )
        self._children[name] = child
        ready = threading.Event()
        lines: list[str] = []
        thread = threading.Thread(target=_watch, args=(child, self.folder / f"{name}.log", ready, lines), daemon=True)
        thread.start()
        if not ready.wait(READY_S) or child.poll() is not None:
            raise UnavailableError(f"{name} is not ready: {' '.join(lines[-3:])}", f"its log is {self.folder / name}.log")

    def _until_live(self) -> None:
        until = time.monotonic() + READY_S
        wanted = len([name for name in self._children if name != "staging"])
        while True:
            text = _run([program(), "status", "--json", "--config", str(self.config)])
            if text.count('"live":true') >= wanted:
                return
            if time.monotonic() > until:
                raise DeadlineError(f"not all of {wanted} nodes are live after {READY_S:.0f} s")
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """Kills a node, or the staging daemon (``"staging"``), with SIGKILL."""
        child = self._children.pop(name)
        child.kill()
        child.wait()

    def forget_memory(self) -> None:
        """Loses the host's memory: the staging daemon and all that it holds, as when the host is replaced."""
        if "staging" in self._children:
            self.kill("staging")
        shutil.rmtree(self._staging, ignore_errors=True)
        self.start_staging()

    def command(self, *arguments: str) -> str:
        """Runs a command of the program, such as ``archive job/7``, and returns what it prints."""
        return _run([program(), *arguments, "--config", str(self.config)])

    def pause(self, name: str) -> None:
        """Stops a node where it stands, as a machine that hangs."""
        self._children[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Lets a paused node go on."""
        self._children[name].send_signal(signal.SIGCONT)

    @property
    def staging(self) -> Path:
        """The staging folder."""
        return self._staging

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that run."""
        return sorted(name for name in self._children if name != "staging")

    def stop(self) -> None:
        """Ends everything and removes what was made."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
        self._children.clear()
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def local_cluster(nodes: int = 6, **options: object) -> LocalCluster:
    """Starts a cluster of ``nodes`` storage nodes and a staging daemon on this machine.

    >>> with rapidraid.local_cluster() as cluster:
    ...     checkpointer = rapidraid.Checkpointer("demo", config=cluster.config)
    """
    return LocalCluster(nodes, **options)  # type: ignore[arg-type]


def _watch(child: subprocess.Popen[str], log: Path, ready: threading.Event, lines: list[str]) -> None:
    assert child.stderr is not None
    with log.open("a") as file:
        for line in child.stderr:
            file.write(line)
            file.flush()
            if not ready.is_set():
                lines.append(line.strip())
                if line.startswith("ready: "):
                    ready.set()
    ready.set()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
    if done.returncode != 0:
        raise UnavailableError(f"{' '.join(command[1:3])} failed: {done.stderr.strip()}")
    return done.stdout


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [int(opened.getsockname()[1]) for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()
