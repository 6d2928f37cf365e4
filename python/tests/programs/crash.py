"""Crashes in a thread that has the given name, when it is launched for the first time. Later launches succeed.

usage: crash.py MARK THREAD [LINE]
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

LIMIT_S = 60

mark, thread = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
print("\n".join(sys.argv[3:]), end="", flush=True)
if not mark.exists():
    mark.touch()
    until = time.monotonic() + LIMIT_S
    # A thread that has just begun may not have its name yet.
    while time.monotonic() < until:
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().strip() == thread:
                ctypes.CDLL(None).tgkill(os.getpid(), int(task.name), signal.SIGSEGV)
                time.sleep(LIMIT_S)
        time.sleep(0.01)
    raise SystemExit("there is no such thread")
print("ended well", flush=True)
dist.destroy_process_group()
