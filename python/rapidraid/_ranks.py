"""The ranks of a launch, and the hosts on which they run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from .errors import InvalidError, RapidraidError


class Group:
    """The ranks of the launch.

    Collectives are used to agree on the launch, in ``prepare``, in the saves of frameworks and, if there are several hosts, in
    loads.
    """

    def __init__(self, group: Any, is_alone: bool) -> None:
        torch = sys.modules.get("torch")
        distributed = None if is_alone else getattr(torch, "distributed", None)
        self.distributed = distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None
        self.group = group
        self.rank = self.distributed.get_rank(group) if self.distributed else 0
        self.world = self.distributed.get_world_size(group) if self.distributed else 1

    @property
    def is_default(self) -> bool:
        """Whether the ranks have the numbers that they have in the default group, and so in meshes."""
        return self.distributed is None or self.distributed.get_process_group_ranks(self.group) == list(
            range(self.distributed.get_world_size())
        )

    def gather(self, mine: Any) -> list[Any]:
        """Returns the ``mine`` of every rank, in the order of the ranks."""
        if self.distributed is None or self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        self.distributed.all_gather_object(found, mine, group=self.group)
        return found


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
