"""Writes files of a step by URLs without completing it, says so, and waits to be killed. Imports no torch.

usage: fsspec_held.py JOB STEP
"""

from __future__ import annotations

import sys
import time

import fsspec

job, step = sys.argv[1:]
fs = fsspec.filesystem("rapidraid")
fs.pipe(f"rapidraid://{job}/{step}/left", b"by a process that was killed")
fs.pipe(f"rapidraid://{job}/{step}/.metadata.tmp", b"no metadata")
half = fs.open(f"rapidraid://{job}/{step}/half", "wb")
half.write(b"half")
half.flush()
assert fs.exists(f"rapidraid://{job}/{step}/left") and "torch" not in sys.modules
print("written", flush=True)
time.sleep(600)
