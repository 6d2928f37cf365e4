"""The places of a measurement: everything on this machine, or nodes and a training host on links of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import rapidraid

MTU = 9000
#: Bytes that an idle port passes unshaped at once: a segment that the kernel has not cut yet, and a
#: datagram.
BURST_BYTES = 80 << 10
QUEUE_MS = 50
NODE_MBIT, CLIENT_MBIT = 200, 1000
PORT = 7440
NODES = 6


class Host(rapidraid.cluster.LocalCluster):
    """Six nodes and a staging daemon on this machine."""

    def __init__(self, **options: object) -> None:
        folder = Path(tempfile.mkdtemp(prefix="rapidraid-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        settings = {"memory": "256MiB", "policy.archive_all_but": "never"}
        super().__init__(NODES, folder=folder, settings=settings, **options)  # type: ignore[arg-type]

    @property
    def staging_pid(self) -> int:
        """The process id of the staging daemon."""
        return self._children["staging"].pid

    def pin(self, cpus: set[int]) -> None:
        """Pins all daemons to these processors."""
        for child in self._children.values():
            for task in os.listdir(f"/proc/{child.pid}/task"):
                os.sched_setaffinity(int(task), cpus)

    def stop(self) -> None:
        """Ends all daemons and removes everything that was made."""
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Links(Host):
    """Six nodes with links of 200 Mbit/s and training hosts with 1 Gbit/s, as network namespaces. Needs root.

    The ranks are processes outside of the namespaces: they talk to their host's daemon alone, through its socket.
    """

    def __init__(self, hosts: int = 1, **options: object) -> None:
        self._prefix = f"rrb{os.getpid()}-"
        self._made: list[str] = []
        try:
            self._put_up(NODES, hosts)
            super().__init__(block="16MiB", hosts=hosts, **options)
        except BaseException:
            self._take_down()
            raise

    def _put_up(self, nodes: int, hosts: int) -> None:
        hub = f"{self._prefix}hub"
        self._ip("netns", "add", hub)
        self._made.append(hub)
        for line in (f"link add br0 mtu {MTU} type bridge", "link set br0 up", "link set lo up"):
            self._ip("-n", hub, *line.split())
        for host in range(nodes + hosts):
            name = self.namespace(host)
            self._ip("netns", "add", name)
            self._made.append(name)
            self._ip(
                *("-n", hub, "link", "add", f"v{host}", "mtu", str(MTU), "type", "veth"),
                *("peer", "name", "eth0", "mtu", str(MTU), "netns", name),
            )
            for line in (f"link set v{host} master br0", f"link set v{host} up"):
                self._ip("-n", hub, *line.split())
            for line in (f"addr add {self.address(host)}/24 dev eth0", "link set eth0 up", "link set lo up"):
                self._ip("-n", name, *line.split())
            is_node = 1 <= host <= nodes
            rate = f"{NODE_MBIT if is_node else CLIENT_MBIT}mbit"
            for place, device in ((name, "eth0"), (hub, f"v{host}")):
                shape = ("root", "tbf", "rate", rate, "burst", str(BURST_BYTES if is_node else 4 * BURST_BYTES), "latency", f"{QUEUE_MS}ms")
                subprocess.run(["ip", "netns", "exec", place, "tc", "qdisc", "add", "dev", device, *shape], check=True)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def namespace(self, host: int) -> str:
        """Returns the network namespace of the training host (0) or of a node (from 1)."""
        return f"{self._prefix}{host}"

    def address(self, host: int) -> str:
        """Returns the address of the training host (0) or of a node (from 1), without a port."""
        return f"10.78.0.{host + 1}"

    def _addresses(self, nodes: int) -> list[str]:
        return [f"{self.address(node)}:{PORT}" for node in range(1, nodes + 1)]

    def _within(self, name: str) -> list[str]:
        if name.startswith("staging-"):
            host = NODES + int(name.removeprefix("staging-"))
        else:
            host = 0 if name == "staging" else int(name.removeprefix("node-"))
        return ["ip", "netns", "exec", self.namespace(host)]

    def _take_down(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        self._made.clear()

    def stop(self) -> None:
        """Ends all daemons and removes everything that was made."""
        super().stop()
        self._take_down()

    def timed(self, *arguments: str, before: Callable[[], None] | None = None) -> float:
        """Runs a command of the program on the training host, as the staging daemon runs.

        Returns its duration in seconds.
        """
        import time

        command = [*self._within("staging"), rapidraid._program.program(), *arguments, "--config", str(self.config)]
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=_like_the_daemon, start_new_session=True)
        seconds = time.perf_counter() - begun
        if done.returncode != 0:
            raise RuntimeError(f"{arguments}: {done.stderr}")
        return seconds

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _like_the_daemon() -> None:
    """Gives this session the weight of the staging daemon's, and this process the nice value of its heavy threads."""
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        autogroup.write_text("10")
    os.nice(10)
