"""Loads of a launch: a step is opened, read by a function, and opened again where that helps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import _native
from ._gc import gc_paused
from ._launch import Launch
from ._planned_load import read_one
from ._ranks import raise_together, refusal_of
from ._reader import Reader, ReadWholeError
from .errors import CorruptError, DeadlineError, InvalidError, NotFoundError, RapidraidError, StaleError

log = logging.getLogger("rapidraid")

_T = TypeVar("_T", bound=tuple[Any, ...])

#: How long a host waits for staged steps before all ranks meet, in seconds. Process groups have timeouts of minutes.
TURN_S = 20.0

#: Maximum time for reporting the end of a load, in seconds. The daemon also notices it by itself.
RELEASE_S = 10.0


class Loads:
    """The loads of a launch. All methods need the lock of the launch."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        #: The number of the last load that all ranks have begun together, as the daemons count them.
        self._count = 0

    def load_with(
        self,
        step: int | None,
        read: Callable[[Reader], str | None],
        *,
        offline: bool,
        table_first: bool,
        timeout: float | None,
    ) -> int | None:
        """Loads a step, as :meth:`Checkpointer.load_with` says."""
        launch = self._launch
        limit = launch.timeout * 10 if timeout is None else timeout
        self._count += 1
        if launch.hosts.are_several:
            step = self._choose_together(step, offline, limit)
            if step is None:
                return None
            # A load that begins with the table is the only kind that reads this host's memory in
            # place. Other loads copy it first.
            table_first = True

        def load(reader: Reader) -> tuple[int, int | None, str | None]:
            damaged = read(reader)
            return reader.loaded.number, reader.loaded.newest_committed, damaged

        def attempt() -> tuple[int, int | None, str | None] | None:
            return self._read_step(step, load, number=self._count, offline=offline, table_first=table_first, limit=limit)

        for last in (False, True):
            try:
                done = attempt()
            except StaleError as error:
                log.warning("%s: the step is loaded again", error)
                done = attempt()
            if done is None:
                return None
            number, newest, damaged = done
            if damaged is None:
                break
            if last:
                hint = "the state may hold damaged bytes: load an older step, or initialise it again"
                raise CorruptError(f"{damaged} is damaged", hint)
            log.warning("%s is damaged: step %d is loaded again", damaged, number)
        launch.loaded, launch.newest_seen = number, newest
        if newest is not None and newest > number:
            log.warning(
                "step %d was loaded, and later steps up to %d are committed: the first save is refused unless abandon_later=True",
                number,
                newest,
            )
        return number

    def look_into(self, step: int | None, read: Callable[[Reader], _T]) -> _T | None:
        """Reads from a step, as :meth:`Checkpointer.look_into` says."""
        launch = self._launch
        limit = launch.timeout * 10
        number: int | None = None
        if step is None:
            self._count += 1
            if launch.hosts.are_several:
                step = self._choose_together(None, False, limit)
                if step is None:
                    return None
            else:
                number = self._count
        done = self._read_step(step, read, number=number, table_first=True, limit=limit)
        if done is not None and done[-1] is not None:
            log.warning("%s is damaged: it is read again", done[-1])
            done = self._read_step(step, read, number=number, table_first=True, limit=limit)
        return done

    def _choose_together(self, step: int | None, offline: bool, limit: float) -> int | None:
        """Lets rank 0 choose the step that the ranks of all hosts load, by default the newest committed one.

        By default the daemons of all hosts first wait for the steps that older launches have staged there: rank 0 may
        be on a new host, whose daemon has no part of them.
        """
        launch = self._launch
        until = time.monotonic() + limit
        failed: Exception | None = None
        try:
            if launch.saved:
                raise InvalidError("this launch has saved, and cannot go back", "make a new Checkpointer on all ranks, and load with it")
            if offline:
                raise InvalidError("offline=True with several hosts", "leave it out: each host has only a part of a step in memory")
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        told = launch.group.gather((step, refusal_of(failed)))
        raise_together(failed, launch.rank, [refusal for _, refusal in told])
        for rank, (other, _) in enumerate(told):
            if other != told[0][0]:
                raise InvalidError(f"rank 0 loads step={told[0][0]}, rank {rank} step={other}", "give all ranks the same step")
        if step is None:
            self._await_older_steps(until)
        # Each daemon has noted the step that it found under the old number, and these steps may differ. So the chosen
        # step is loaded under the next number.
        self._count += 1
        chosen: int | None = None
        try:
            if launch.rank == 0:
                loaded = self._open_step(step, until, number=self._count, table_first=True)
                if loaded is not None:
                    chosen = loaded.number
                    self._release(loaded, None)
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        told = launch.group.gather((chosen, refusal_of(failed)))
        raise_together(failed, launch.rank, [refusal for _, refusal in told])
        chosen = told[0][0]
        assert chosen is None or isinstance(chosen, int)
        return chosen

    def _await_older_steps(self, until: float) -> None:
        """Waits until no host has a step of an older launch that is still being saved and makes progress.

        The first rank of each host asks its daemon, for at most ``TURN_S`` at a time. All ranks meet after each turn,
        because a process group aborts ranks that wait in one collective for longer than its timeout.
        """
        launch = self._launch
        is_waiting = launch.rank == launch.hosts.ranks[0]
        while True:
            failed: Exception | None = None
            try:
                is_waiting = is_waiting and self._await_older_steps_here(until)
            except Exception as error:  # noqa: BLE001 - raised on all ranks below
                failed = error
            told = launch.group.gather((is_waiting, refusal_of(failed)))
            raise_together(failed, launch.rank, [refusal for _, refusal in told])
            if not any(still for still, _ in told):
                return

    def _await_older_steps_here(self, until: float) -> bool:
        """Waits for the steps of older launches on this host. Returns whether to wait for another turn.

        The daemon waits for them before it says what the resume point is, so this asks for it. The answer is not used.
        """
        try:
            loaded = self._open_step(None, min(until, time.monotonic() + TURN_S), number=self._count, table_first=True)
        except RapidraidError as error:
            if isinstance(error, DeadlineError) and time.monotonic() < until:
                log.warning("waiting for the staged steps of older launches: %s", error.message)
                return True
            # If the cause lasts, the load itself meets it again.
            log.info("cannot wait for the staged steps of older launches: %s", error)
            return False
        if loaded is not None:
            self._release(loaded, None)
        return False

    def read(self, step: int | None, name: str, timeout: float | None) -> Any:
        """Reads one entry of a step, as :meth:`Checkpointer.read` says."""
        limit = self._launch.timeout * 10 if timeout is None else timeout

        def read(reader: Reader) -> tuple[Any, str | None]:
            try:
                return read_one(reader, name, self._launch.allow_pickle), None
            except CorruptError:
                return None, name

        for last in (False, True):
            done = self._read_step(step, read, table_first=True, limit=limit)
            if done is None:
                raise NotFoundError(f"{self._launch.job} has no step", "save one first")
            value, damaged = done
            if damaged is None:
                return value
            if last:
                raise CorruptError(f"{damaged} is damaged", "read another step")
            log.warning("%s is damaged: it is read again", name)
        raise AssertionError("the second read returns or raises")

    def _read_step(
        self,
        step: int | None,
        read: Callable[[Reader], _T],
        *,
        table_first: bool,
        limit: float,
        number: int | None = None,
        offline: bool = False,
    ) -> _T | None:
        """Opens a step, as the launch's load ``number`` or for this process alone. Returns the result of ``read``.

        The last element of the result is the name of a damaged entry, or ``None``.
        """
        launch = self._launch
        until = time.monotonic() + limit
        while True:
            loaded = self._open_step(step, until, number=number, offline=offline, table_first=table_first)
            if loaded is None:
                return None
            damaged = None
            try:
                with gc_paused():
                    done = read(Reader(launch.session, loaded, 1 if number is None else len(launch.hosts.ranks), until))
                damaged = done[-1]
                return done
            except ReadWholeError:
                table_first = False
            finally:
                self._release(loaded, damaged)

    def _open_step(
        self, step: int | None, until: float, *, number: int | None, offline: bool = False, table_first: bool
    ) -> _native.LoadedStep | None:
        launch = self._launch
        return launch.daemon.load(
            launch.job,
            step=step,
            launch=None if number is None else launch.id,
            number=number or 0,
            offline=offline,
            table_first=table_first,
            # Each host has only a part of a step in memory, and may have one that the others do not know.
            from_cluster=number is not None and launch.hosts.are_several,
            timeout=max(0.0, until - time.monotonic()),
        )

    def _release(self, loaded: _native.LoadedStep, damaged: str | None) -> None:
        """Ends a load.

        Ignores failures: the loaded data is valid even if the daemon ended, and an error of the load takes
        precedence.
        """
        try:
            self._launch.session.release(loaded, damaged, RELEASE_S)
        except RapidraidError as error:
            log.debug("the daemon is not told of the end of a load: %s", error)
