"""The ranks of a launch, and the hosts on which they run."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .errors import ForkedError, InvalidError, RapidraidError

#: How long a rank waits for the others to ask whether to end.
TOGETHER_LIMIT = timedelta(minutes=30)


class Group:
    """The ranks of the launch.

    Collectives are used to agree on the launch, in ``prepare``, in the saves of frameworks and in loads.
    """

    def __init__(self, group: Any, is_alone: bool) -> None:
        torch = sys.modules.get("torch")
        distributed = None if is_alone else getattr(torch, "distributed", None)
        self.distributed = distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None
        if self.distributed is None and not is_alone:
            _check_single(group)
        self.group = group
        #: The default group, and what :meth:`is_any` uses while this is the default group.
        self._separate: tuple[Any, Any] | None = None
        self._process = os.getpid()
        self.rank = self.distributed.get_rank(group) if self.distributed else 0
        self.world = self.distributed.get_world_size(group) if self.distributed else 1
        if self.distributed is not None and self.rank < 0:
            raise InvalidError(
                f"rank {self.distributed.get_rank()} is not in the process group that group= names",
                "make the Checkpointer only on the ranks of that group",
            )

    @property
    def is_default(self) -> bool:
        """Whether the ranks have the numbers that they have in the default group, and so in meshes."""
        return self.distributed is None or self.ranks == list(range(self.distributed.get_world_size()))

    @property
    def ranks(self) -> list[int] | None:
        """The numbers of the ranks in the default group; ``None`` without a process group."""
        if self.distributed is None:
            return None
        # Before torch 2.8, ``None`` is no group of this function.
        found: list[int] = self.distributed.get_process_group_ranks(self.group or self.distributed.group.WORLD)
        return found

    def gather(self, mine: Any) -> list[Any]:
        """Returns the ``mine`` of every rank, in the order of the ranks."""
        if self.distributed is None or self.world == 1:
            return [mine]
        self._refuse_child()
        found: list[Any] = [None] * self.world
        self.distributed.all_gather_object(found, mine, group=self.group)
        return found

    def is_any(self, mine: bool, launch: str, lock: AbstractContextManager[Any]) -> bool:
        """Returns whether ``mine`` is set on any rank of the launch.

        The ranks ask each other over connections that only this method uses: ``dcp.async_save`` has a thread in collectives of
        the launch, and on another rank the two threads may come in the other order. Such a thread needs a group with gloo.
        Without gloo this is a collective like any other, under the lock of the launch.
        """
        if self.distributed is None or self.world == 1:
            return mine
        if "gloo" not in str(self.distributed.get_backend_config(self.group)):
            with lock:
                return any(self.gather(mine))
        self._refuse_child()
        c10d = self.distributed.distributed_c10d
        whole = self.distributed.group.WORLD
        if self._separate is None or self._separate[0] is not whole:
            # A group that torch knows of would have a name, on which ranks of different groups may disagree.
            store = c10d.PrefixStore(f"rapidraid/{launch}", c10d._get_default_store())
            self._separate = whole, c10d.ProcessGroupGloo(store, self.rank, self.world, TOGETHER_LIMIT)
        flag = sys.modules["torch"].tensor([int(mine)])
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MAX
        self._separate[1].allreduce([flag], options).wait()
        return bool(flag.item())

    def close(self) -> None:
        """Closes the connections of :meth:`is_any`."""
        self._separate = None

    def _refuse_child(self) -> None:
        """Raises :class:`ForkedError` in a process that was forked from this rank."""
        if os.getpid() != self._process:
            raise ForkedError(
                f"process {os.getpid()} was forked from rank {self.rank}, and is no rank of the launch",
                "call the Checkpointer in the process that made it",
            )


def _check_single(group: Any) -> None:
    """Raises :class:`InvalidError` if a process without a process group is a rank of several.

    Each of the ranks would be a launch of its own, and end the launches of the others.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if group is not None or (world.isdecimal() and int(world) > 1):
        what = "group= is given" if group is not None else f"WORLD_SIZE is {world}"
        raise InvalidError(
            f"{what}, and there is no process group",
            "call torch.distributed.init_process_group first, or pass alone=True if this process is a launch of its own",
        )


@dataclass
class Hosts:
    """The hosts of a launch: the number of this one, the names of all, and the ranks that run on this one."""

    own: int
    names: list[str]
    ranks: list[int]

    @classmethod
    def of(cls, rank: int, instances: list[str], names: list[str]) -> Hosts:
        """Numbers the hosts in the order of their first ranks. Ranks with one staging folder are on one host."""
        numbers = {instance: number for number, instance in enumerate(dict.fromkeys(instances))}
        first = {instance: names[instances.index(instance)][:60] for instance in numbers}
        is_unique = len(set(first.values())) == len(first)
        shown = [name if is_unique else f"{name}#{number}" for number, name in enumerate(first.values())]
        return cls(numbers[instances[rank]], shown, [other for other, instance in enumerate(instances) if instance == instances[rank]])

    @property
    def are_several(self) -> bool:
        """Whether the launch runs on several hosts, each of which saves a part of every step."""
        return len(self.names) > 1


def refusal_of(error: Exception | None) -> RapidraidError | None:
    """Returns an error of this rank as it is told to the other ranks. An exception of another package becomes an :class:`InvalidError`."""
    if error is None or isinstance(error, RapidraidError):
        return error
    return InvalidError(f"{type(error).__name__}: {error}")


def raise_together(error: Exception | None, rank: int, refusals: list[RapidraidError | None]) -> None:
    """Raises the error of the first rank that met one: on that rank as it is, on the others with the number of the rank.

    A rank that continued alone would wait for the others forever.

    Args:
        error: The error of this rank.
        rank: This rank.
        refusals: The result of :func:`refusal_of` of each rank.

    """
    for other, refusal in enumerate(refusals):
        if refusal is None:
            continue
        if error is not None and other == rank:
            raise error
        raise type(refusal)(f"rank {other}: {refusal.message}", refusal.hint)
