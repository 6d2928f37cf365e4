"""Crashes in one of its threads, which is named, the first time that it is launched. Then ends well.

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

SYS_TGKILL = 234

mark, thread = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
print("\n".join(sys.argv[3:]), end="", flush=True)
if not mark.exists():
    mark.touch()
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == thread:
            ctypes.CDLL(None).syscall(SYS_TGKILL, os.getpid(), int(task.name), signal.SIGSEGV)
            time.sleep(60)
    raise SystemExit("there is no such thread")
print("ended well", flush=True)
dist.destroy_process_group()
