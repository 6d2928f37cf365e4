"""A cluster on this machine, for experiments and tests.

Its daemons are real and end with the process that started them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from . import _native
from ._program import program
from .errors import DeadlineError, NoDaemonError, RapidraidError, UnavailableError

#: Maximum time of each wait for a daemon, and of each command of the program, in seconds.
READY_S = 60.0
#: The number of nodes that the smallest default code needs.
NODES_OF_DEFAULT_CODES = 6
#: The line between the configuration of a client and the staging settings of a training host.
_STAGING_TABLE = "\n[staging]\n"


class LocalCluster:
    """Storage nodes and a staging daemon as children of this process.

    They end with the process, even if it is killed: each of them watches a pipe that closes with the process. ``config``
    is the path of the client's configuration. The nodes accept data until their disk is 99 % full.

    Args:
        nodes: The number of storage nodes, at least 4 to save. A cluster of four or five uses the code (4,2).
        block: The size of a block.
        folder: The folder of the cluster, which a later run can use again. Default: a temporary one, removed at the end.
        settings: More settings of the cluster and its nodes, such as ``{"memory": "256MiB"}`` (docs/configuration.md).
        staging: More settings of the staging daemons, such as ``{"memory": "16GiB"}``.
        hosts: The number of training hosts, each with a staging daemon of its own. ``configs`` has the path of each
            host's configuration; the first one is ``config``.

    """

    def __init__(
        self,
        nodes: int = 6,
        *,
        block: str = "1MiB",
        folder: str | os.PathLike[str] | None = None,
        settings: dict[str, str] | None = None,
        staging: dict[str, str | int] | None = None,
        hosts: int = 1,
    ) -> None:
        self._own = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="rapidraid-")) if folder is None else Path(folder)
        self.config = self.folder / "cluster" / "client" / "rapidraid.toml"
        memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else self.folder
        self.configs = [self.config, *(self.config.with_name(f"host-{host}.toml") for host in range(1, hosts))]
        # The name follows from the folder's full path, so that the next run finds it again and no
        # other cluster uses it.
        self._staging = memory / f"rapidraid-{hashlib.sha256(str(self.folder.absolute()).encode()).hexdigest()[:12]}"
        self._children: dict[str, subprocess.Popen[str]] = {}
        try:
            if not self.config.is_file():
                code = {"code.list": "4,2"} if nodes < NODES_OF_DEFAULT_CODES else {}
                self._make(nodes, {"code.block": block, "memory": "64MiB", "disk.high_water": "99", **code, **(settings or {})})
                self._configure_host(0, self.config.read_text(), staging or {})
            for host in range(1, hosts):
                # A folder that is used again may be of a cluster with fewer hosts.
                if not self.configs[host].is_file():
                    self._configure_host(host, self.config.read_text().split(_STAGING_TABLE)[0], staging or {})
            for node in sorted((self.folder / "cluster" / "nodes").iterdir()):
                self.start(node.name)
            for host in range(hosts):
                self.start_staging(host)
            self._until_live()
        except BaseException:
            self.stop()
            raise

    def _make(self, nodes: int, settings: dict[str, str]) -> None:
        command = [program(), "cluster", "init", str(self.folder / "cluster")]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        for at, address in enumerate(self._addresses(nodes), 1):
            command += ["--node", f"node-{at:02}={address}"]
        _run(command)

    def _configure_host(self, host: int, client: str, staging: dict[str, str | int]) -> None:
        """Writes the configuration of a training host: the one of a client, and a table of staging settings."""
        settings = {"dir": str(self._staging_of(host)), "memory": "4GiB", **staging}
        lines = [f"{name} = {json.dumps(setting)}\n" for name, setting in settings.items()]
        self.configs[host].write_text(client + _STAGING_TABLE + "".join(lines))

    def _staging_of(self, host: int) -> Path:
        return self._staging.with_name(f"{self._staging.name}-{host}") if host else self._staging

    def _addresses(self, nodes: int) -> list[str]:
        return [f"127.0.0.1:{port}" for port in _free_ports(nodes)]

    def _within(self, name: str) -> list[str]:
        """Returns the prefix of a command that is to run as on a node or, for ``staging``, as on the training host."""
        return []

    def start(self, node: str) -> None:
        """Starts the daemon of a node, which may have been killed before."""
        config = self.folder / "cluster" / "nodes" / node / "rapidraid.toml"
        self._spawn(node, ["node", "--config", str(config), "--stop-at-eof"])

    def start_staging(self, host: int = 0) -> None:
        """Starts the staging daemon of a training host."""
        self._spawn(_staging_name(host), ["stage", "--config", str(self.configs[host]), "--stop-at-eof"])

    def _spawn(self, name: str, arguments: list[str]) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAPIDRAID_")}
        child = subprocess.Popen(
            [*self._within(name), program(), *arguments],
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
        wanted = len(self.nodes)
        while True:
            text = _run([*self._within("staging"), program(), "status", "--json", "--config", str(self.config)])
            if text.count('"live":true') >= wanted:
                return
            if time.monotonic() > until:
                raise DeadlineError(f"not all of {wanted} nodes are live after {READY_S:.0f} s")
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """Kills a node, or a staging daemon (``"staging"``, ``"staging-1"`` and so on), with SIGKILL.

        A staging daemon that a rank has started in the meantime is killed as well.
        """
        child = self._children.pop(name)
        child.kill()
        child.wait()
        for host in range(len(self.configs)):
            if name == _staging_name(host):
                self._kill_started_by_rank(host)

    def daemon_pid(self, host: int = 0) -> int:
        """Returns the process id of the daemon that serves the staging folder of a training host."""
        directory, token, _ = _native.staging_place(self.configs[host])
        return _native.Session(directory, token, READY_S).daemon_pid

    def _kill_started_by_rank(self, host: int) -> None:
        try:
            pid = self.daemon_pid(host)
            process = os.pidfd_open(pid)
        except (NoDaemonError, ProcessLookupError):
            return
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            # The descriptor of a process becomes readable when the process ends.
            if not select.select([process], [], [], READY_S)[0]:
                raise DeadlineError(f"the staging daemon {pid} has not ended {READY_S:.0f} s after SIGKILL")
        except ProcessLookupError:
            pass
        finally:
            os.close(process)

    def forget_memory(self, host: int = 0) -> None:
        """Destroys a training host's memory: its staging daemon and all that it holds, as if the host were replaced."""
        if _staging_name(host) in self._children:
            self.kill(_staging_name(host))
        shutil.rmtree(self._staging_of(host), ignore_errors=True)
        self.start_staging(host)

    def command(self, *arguments: str) -> str:
        """Runs a command of the program, such as ``archive job/7``. Returns its output."""
        return _run([*self._within("staging"), program(), *arguments, "--config", str(self.config)])

    def pause(self, name: str) -> None:
        """Suspends a node, like a machine that hangs."""
        self._children[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Resumes a paused node."""
        self._children[name].send_signal(signal.SIGCONT)

    @property
    def staging(self) -> Path:
        """The staging folder of the first training host."""
        return self._staging

    @property
    def nodes(self) -> list[str]:
        """The names of the running nodes."""
        return sorted(name for name in self._children if not name.startswith("staging"))

    def stop(self) -> None:
        """Ends all daemons, also those that ranks have started, and removes their memory, and the folder if it is temporary."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
        self._children.clear()
        for host in range(len(self.configs)):
            with contextlib.suppress(RapidraidError):
                self._kill_started_by_rank(host)
            shutil.rmtree(self._staging_of(host), ignore_errors=True)
            self._staging_of(host).with_suffix(".log").unlink(missing_ok=True)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _staging_name(host: int) -> str:
    return f"staging-{host}" if host else "staging"


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
