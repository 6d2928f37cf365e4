"""Checkpoints for distributed trainers.

A save stalls training for one copy of the state in memory. The staging daemon of the host then replicates it to the
cluster, where it is archived later. After a crash the job resumes from the host's memory if the step is still there,
otherwise from the cluster, on any number of ranks.

    >>> import rapidraid
    >>> checkpointer = rapidraid.Checkpointer("gpt", config="client/rapidraid.toml")
    >>> step = checkpointer.load({"model": model, "optimizer": optimizer}) or 0
    >>> checkpointer.save(step + 100, {"model": model, "optimizer": optimizer})
    >>> checkpointer.wait(step + 100)
"""

from __future__ import annotations

from . import errors
from ._leaves import per_rank, replicated
from ._native import VERSION as __version__
from .checkpointer import Checkpointer, Info
from .cluster import LocalCluster, local_cluster
from .errors import RapidraidError

__all__ = [
    "Checkpointer",
    "Info",
    "LocalCluster",
    "RapidraidError",
    "__version__",
    "errors",
    "local_cluster",
    "per_rank",
    "replicated",
]
