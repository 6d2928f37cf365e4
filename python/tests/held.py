"""A step in the memory of this process, and threads for ranks, so that any launch loads the step without a daemon."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rapidraid import _native
from rapidraid._leaves import FLAG_ARRAY, Flat, is_array
from rapidraid._match import LoadChoices, Stages, load_into
from rapidraid._reader import Name, Reader, Target
from rapidraid.state import flatten
from rapidraid.tensors import describe, has_elements


class HeldStep:
    """What the ranks of a launch have saved, with the interface of an open step. Each state may be given by its leaves."""

    number = 1
    newest_committed = 1
    by_ranges = (False, "")

    def __init__(self, states: Sequence[Mapping[Any, Any] | Flat]) -> None:
        #: The name and the content of each row.
        self._rows: list[tuple[Name, Any]] = []
        seen = set()
        for rank, state in enumerate(states):
            flat = state if isinstance(state, Flat) else flatten(state, len(states))
            for leaf in flat.leaves:
                space = rank if leaf.is_private else None
                if (space, leaf.keys) not in seen:
                    seen.add((space, leaf.keys))
                    self._add(space, leaf.keys, leaf.value)

    def _add(self, space: int | None, keys: Any, value: Any) -> None:
        if not has_elements(value):
            content = _native.encode_value(value)
            assert content is not None, keys
            self._rows.append(((space, list(keys), "value", "uint8", 8, [], 0), content))
            return
        found = describe("", value)
        name = (space, list(keys), "tensor", found.element, found.bits, list(found.shape), FLAG_ARRAY if is_array(value) else 0)
        content = value.copy() if is_array(value) else value.detach().clone().contiguous()
        self._rows.append((name, content))

    def names(self) -> list[Name]:
        """Returns all names, by row."""
        return [name for name, _ in self._rows]

    def content(self, row: int) -> bytes:
        """Returns the bytes of a plain value."""
        found: bytes = self._rows[row][1]
        return found

    def extents_of(self, targets: Sequence[Target]) -> list[list[int]]:
        """Returns the rows of the extents of each target."""
        return [[row] for row, *_ in targets]

    def windows(self, targets: Sequence[Target], names: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Returns one window for all."""
        return [([], list(range(len(targets) + len(names))))]

    def _copy(self, targets: Sequence[Target], _threads: int) -> str | None:
        for row, part, address, length in targets:
            content = self._rows[row][1]
            assert part is None, "no test has parts"
            source = content.ctypes.data if is_array(content) else content.data_ptr()
            assert length == math.prod(content.shape) * content.itemsize
            ctypes.memmove(address, source, length)
        return None

    def load(
        self,
        state: Mapping[Any, Any],
        rank: int = 0,
        world: int = 1,
        *,
        strict: bool = True,
        include: Callable[[str], bool] | None = None,
        private: Any = None,
        stages: Stages | None = None,
    ) -> None:
        """Loads the step into the state of a rank, as :meth:`rapidraid.Checkpointer.load` does."""
        reader = Reader(None, self, 1, math.inf)  # type: ignore[arg-type]
        choices = LoadChoices(strict, include, False, private, False)
        assert load_into(reader, state, rank, world, choices, stages=stages) is None


class HeldRanks:
    """The ranks of a launch as threads, with a collective between them."""

    def __init__(self, world: int) -> None:
        self.world = world
        #: The number of collectives that all ranks took part in.
        self.collectives = 0
        self._told: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=20.0)

    def gather(self, rank: int, mine: Any) -> list[Any]:
        """Returns the ``mine`` of every rank."""
        self._told[rank] = mine
        if self._barrier.wait() == 0:
            self.collectives += 1
        found = list(self._told)
        self._barrier.wait()
        return found

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        """Calls a function with each rank. Returns the results and the errors of all ranks."""
        found: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            try:
                found[rank] = call(rank)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found
