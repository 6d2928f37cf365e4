"""The :class:`Checkpointer`: saves and loads the state of a training job through the staging daemon of its host."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import secrets
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from . import _native
from ._load import LoadChoices, Private, Reader, ReadWholeError, Stages, load_into, read_one
from ._plan import Plan, Sources, make_plan
from ._program import connect, find_config, start_daemon
from ._ranks import Group, Hosts, raise_together, refusal_of
from .errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    ExistsError,
    ForkedError,
    InvalidError,
    NoDaemonError,
    NotFoundError,
    RapidraidError,
    StaleError,
    UnavailableError,
    of_code,
)
from .state import Flat, flatten

log = logging.getLogger("rapidraid")

_T = TypeVar("_T", bound=tuple[Any, ...])
_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Maximum time for reporting the end of a load, in seconds. The daemon also notices it by itself.
RELEASE_S = 10.0
#: Maximum time for giving up a step, in seconds. The daemon also drops steps that exceed
#: ``staging.fill_s``.
GIVE_UP_S = 5.0
#: How long a thread that waits for a commit blocks other threads from the session at a time, in
#: seconds.
WAIT_TURN_S = 0.05
#: Maximum number of failed attempts in a row of a wait for a commit, while the daemon does not answer.
WAIT_TRIES = 4
#: Maximum time for ending a session, in seconds. The daemon also notices the end of the process.
LEAVE_S = 5.0
#: Maximum time for asking the daemon what has failed, when a session ends without waiting, in
#: seconds.
QUICK_S = 1.0


def _one_thread(call: Callable[Concatenate[Checkpointer, _P], _R]) -> Callable[Concatenate[Checkpointer, _P], _R]:
    """Wraps a method so that only one thread at a time uses the session of a :class:`Checkpointer`."""

    @functools.wraps(call)
    def wrapped(self: Checkpointer, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return call(self, *args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Keeps Python's collector of cyclic garbage from running: with torch it takes a tenth of a second, longer than a save."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Info:
    """A step of a job."""

    step: int
    #: Whether the step is committed in the cluster.
    is_committed: bool
    #: Whether the step is in this host's memory.
    is_in_memory: bool
    #: The length of the step, in bytes.
    len_bytes: int


@dataclass
class Stall:
    """The time that a save took, by phase, in seconds."""

    traversal: float = 0.0
    waiting: float = 0.0
    copy: float = 0.0
    socket: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all phases, in seconds."""
        return self.traversal + self.waiting + self.copy + self.socket


class Checkpointer:
    """Saves and loads the state of one job.

    Args:
        job: The job's name: 1 to 128 letters, digits, ``.``, ``_`` or ``-``.
        config: The client's configuration file. Default: ``RAPIDRAID_CONFIG``, ``./rapidraid.toml``, or the user's.
        group: The process group of the launch. Default: the default group, if there is one. Without any group,
            ``WORLD_SIZE`` above 1 in the environment is refused.
        alone: Whether this process is a launch of its own, although there is a process group.
        keep: The number of committed steps to keep. Older ones are removed after each commit. Default: all.
        when_full: The behaviour of ``save`` while every segment holds an uncommitted step: ``"wait"`` for one, ``"skip"``
            the step, or raise (``"error"``). A launch on several hosts needs ``"wait"``.
        abandon_later: Whether the first save removes steps that are later than the loaded one.
        save_on: Signals that set :attr:`should_stop`, for preemption.
        start: Whether to start a staging daemon if none answers.
        allow_pickle: Whether objects that are not plain values are stored and loaded by ``pickle``. Loading a pickle
            runs code that it names.
        timeout: The maximum time that a call waits for the daemon, in seconds.
        commit_timeout: The maximum time that ``close`` waits for the commit of the last saved step, in seconds.

    """

    def __init__(
        self,
        job: str,
        *,
        config: str | os.PathLike[str] | None = None,
        group: Any = None,
        alone: bool = False,
        keep: int | None = None,
        when_full: Literal["wait", "skip", "error"] = "wait",
        abandon_later: bool = False,
        save_on: signal.Signals | tuple[signal.Signals, ...] = (),
        start: bool = True,
        allow_pickle: bool = False,
        timeout: float = 120.0,
        commit_timeout: float = 3600.0,
    ) -> None:
        if when_full not in ("wait", "skip", "error"):
            raise InvalidError(f"when_full={when_full!r}", 'it is "wait", "skip" or "error"')
        if keep is not None and keep < 1:
            raise InvalidError(f"keep={keep}", "it is at least 1, or None to keep all steps")
        signals = (save_on,) if isinstance(save_on, signal.Signals) else save_on
        self.job = job
        self.timeout = timeout
        self.commit_timeout = commit_timeout
        self.when_full = when_full
        self.allow_pickle = allow_pickle
        #: Set by a signal of ``save_on``, on this rank: the job should save once more and end. A launch of several ranks
        #: asks :meth:`should_stop_together`.
        self.should_stop = False
        #: The time that the last save took, by phase.
        self.last_stall = Stall()
        self._keep = keep or 0
        self._group = Group(group, alone)
        self._start = start
        self._hosts: Hosts
        self._session, self._launch, self._born_ns = self._connect(config, bool(signals))
        self._loads = 0
        self._lock = threading.RLock()
        self._loaded: int | None = None
        self._newest_seen: int | None = None
        self._abandon_later = abandon_later
        self._plan: Plan | None = None
        self._saved: list[int] = []
        self._is_closed = False
        #: The previous signal handlers, restored at the end and in forked children.
        self._handlers: dict[signal.Signals, Any] = {}
        _sessions.add(self)
        try:
            for number in signals:
                self._handlers[number] = signal.signal(number, self._on_signal)
        except BaseException:
            self._end()
            raise

    @property
    def rank(self) -> int:
        """The rank of this process in the launch."""
        return self._group.rank

    @property
    def world(self) -> int:
        """The number of ranks of the launch."""
        return self._group.world

    def _connect(self, config: str | os.PathLike[str] | None, sets_signals: bool) -> tuple[_native.Session, str, int]:
        """Connects to the daemon, draws the launch's id on rank 0, and checks that the ranks' settings agree.

        Returns the session, the id and its time. An error of any rank is raised on all ranks.
        """
        session: _native.Session | None = None
        failed: Exception | None = None
        mine: tuple[str, int, str, str, str, str] | None = None
        try:
            if sets_signals and threading.current_thread() is not threading.main_thread():
                raise InvalidError("save_on outside the main thread", "Python handles signals there alone: make this Checkpointer in it")
            self._config = find_config(config)
            session = connect(self._config, self.timeout, self._start)
            mine = (secrets.token_hex(16), _native.boot_ns(), session.instance, session.cluster, self.when_full, socket.gethostname())
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        told = self._group.gather((mine, refusal_of(failed)))
        raise_together(failed, self.rank, [refusal for _, refusal in told])
        found = [of_rank for of_rank, _ in told]
        assert session is not None
        launch, _, _, cluster, when_full, _ = found[0]
        for rank, (_, _, _, other_cluster, other_when_full, _) in enumerate(found):
            if other_when_full != when_full:
                raise InvalidError(
                    f"rank 0 has when_full={when_full!r}, rank {rank} when_full={other_when_full!r}", "give all ranks the same when_full"
                )
            if other_cluster != cluster:
                raise InvalidError(f"rank 0 saves to cluster {cluster}, rank {rank} to {other_cluster}", "give all ranks one configuration")
        self._hosts = Hosts.of(self.rank, [instance for _, _, instance, _, _, _ in found], [host for *_, host in found])
        if self._hosts.are_several and when_full != "wait":
            raise InvalidError(
                f"when_full={when_full!r} with {len(self._hosts.names)} hosts",
                'a launch of several hosts saves every step: pass when_full="wait"',
            )
        # The time counts from the boot of a host, so each host has its own.
        born_ns = found[self._hosts.ranks[0]][1]
        return session, launch, born_ns

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.should_stop = True
        log.warning("signal %s: save once more, then end", signal.Signals(number).name)

    @_one_thread
    def should_stop_together(self) -> bool:
        """Returns whether :attr:`should_stop` is set on any rank. All ranks must call it, and get the same answer.

        A signal reaches the ranks at different steps. A rank that left its loop alone would be missed by the collectives of
        the others.
        """
        return any(self._group.gather(self.should_stop))

    @property
    def _daemon(self) -> _native.Session:
        if self._is_closed:
            raise InvalidError("this Checkpointer is closed", "make another one")
        return self._session

    def prepare(self, state: Mapping[Any, Any]) -> None:
        """Reserves memory for ``state`` and compares its layout between the ranks. All ranks must call it.

        The first ``save`` calls it. Call it earlier so that no training step waits for it, and again after the layout
        of the state has changed.
        """
        self._prepare_flat(lambda: flatten(state, self.world, self._group.ranks))

    @_one_thread
    def _prepare_flat(self, flat_state: Callable[[], Flat]) -> None:
        """Prepares for the state that ``flat_state`` returns. Its errors are raised on all ranks."""
        try:
            flat = flat_state()
        except Exception as error:  # noqa: BLE001 - make_plan raises it on all ranks
            flat = Flat(error=error)
        for warning in flat.warnings:
            log.warning("%s", warning)
        plan = make_plan(flat, self.rank, self.world, self._group.gather, self.allow_pickle, self._group.is_default)
        failed: Exception | None = None
        try:
            self._prepare(plan)
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        try:
            raise_together(failed, self.rank, self._group.gather(refusal_of(failed)))
        except BaseException:
            self._drop_plan()
            raise
        # Now that all ranks have one segment, none can take the memory of another's first. An error is not one of all
        # ranks, and the next save meets its cause again.
        try:
            self._add_segments(self._daemon.make_ordered_segments(self.timeout))
        except RapidraidError as error:
            log.warning("the second segment is not made now: %s", error)

    def _drop_plan(self) -> None:
        if self._plan is not None:
            self._plan.release_segments()
        self._plan = None

    def _prepare(self, plan: Plan) -> None:
        self._drop_plan()
        # Keep the plan even if preparing fails: in a save the other ranks do not prepare, and a new
        # plan would wait for them. ``_prepare_flat`` drops it on all ranks.
        self._plan = plan
        count = self._daemon.prepare(
            self.job,
            self._launch,
            len(self._hosts.ranks),
            self._hosts.ranks.index(self.rank),
            segment_bytes=plan.segment_bytes,
            # The sum stays the same if this rank alone makes longer segments: the other ranks keep the memory reserved for them.
            launch_bytes=max(plan.segment_bytes, sum(plan.rank_bytes[rank] for rank in self._hosts.ranks)),
            born_ns=self._born_ns,
            loaded=self._loaded,
            newest_seen=self._newest_seen,
            abandon_later=self._abandon_later,
            keep=self._keep,
            hosts=(self._hosts.own, self._hosts.names) if self._hosts.are_several else None,
            timeout=self.timeout,
        )
        self._add_segments(count)

    @_one_thread
    def save(self, step: int, state: Mapping[Any, Any]) -> bool:
        """Copies ``state`` into shared memory. The daemon then saves it as ``step`` from there.

        Returns whether the step was staged, ``False`` only with ``when_full="skip"``. Raises failures of earlier saves.
        In a launch of several ranks, it also raises :class:`InvalidError` if the layout of the state has changed since
        it was prepared.
        """
        self._raise_notices()
        if self._plan is None:
            self.prepare(state)
        plan = self._plan
        assert plan is not None
        begun = time.perf_counter()
        with _gc_paused():
            flat = flatten(state, self.world, self._group.ranks)
            # Several ranks prepare together, and this one does not know whether the others have to.
            is_alone = self.world == 1
            sources = plan.sources_if_fitting(flat, self.allow_pickle) if is_alone else plan.sources(flat, self.allow_pickle)
        if sources is None:
            plan, sources = self._prepare_again(flat)
        elif plan.needed_bytes(sources) > plan.segment_bytes:
            # The other ranks have nothing to do with the length of this rank's plain values.
            plan.grow(sources)
            self._prepare(plan)
        return self._stage(step, plan, sources, time.perf_counter() - begun)

    def _prepare_again(self, flat: Flat) -> tuple[Plan, Sources]:
        """Prepares for a state whose layout has changed. Returns the new plan, and the contents to copy."""
        self._prepare_flat(lambda: flat)
        plan = self._plan
        assert plan is not None
        return plan, plan.sources(flat, self.allow_pickle)

    @_one_thread
    def save_flat(self, step: int, flat_state: Callable[[], Flat], *, may_gather: bool = True, raise_earlier: bool = False) -> bool:
        """Saves the state that ``flat_state`` returns, for frameworks. Prepares anew if its layout has changed on any rank.

        Returns whether the step was staged, as :meth:`save` does. All ranks must call it. Errors of ``flat_state`` are
        raised on all ranks.

        Args:
            step: The step.
            flat_state: Returns the leaves of the state.
            may_gather: Whether the ranks may tell each other that the layout has changed. If not, only the first call
                prepares. Later, an error or a changed layout is raised on its rank alone, and the step is given up.
            raise_earlier: Whether to raise failures of earlier steps, instead of logging them.

        """
        begun = time.perf_counter()
        flat: Flat | None = None
        sources: Sources | None = None
        failed: Exception | None = None
        plan = self._plan
        try:
            if raise_earlier:
                self._raise_notices()
            else:
                self._log_notices()
            with _gc_paused():
                flat = flat_state()
                sources = plan.sources_if_fitting(flat, self.allow_pickle) if plan is not None else None
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        is_changed = sources is None
        # Without a plan, all ranks prepare together below anyway.
        if may_gather or plan is None:
            told = self._group.gather((is_changed, refusal_of(failed)))
            raise_together(failed, self.rank, [refusal for _, refusal in told])
            is_changed = any(changed for changed, _ in told)
        elif is_changed:
            refused = failed or InvalidError(
                "the layout of the state has changed, and the ranks may not tell each other", "save once with use_collectives=True"
            )
            # The others may have staged the step already, and would wait for this rank until their time is over.
            at, fill, _ = self._fill(step, plan)
            if at is not None:
                self._give_up(step, fill, refused)
            raise refused
        assert flat is not None
        if is_changed or sources is None:
            plan, sources = self._prepare_again(flat)
        assert plan is not None
        return self._stage(step, plan, sources, time.perf_counter() - begun)

    def _stage(self, step: int, plan: Plan, sources: Sources, traversal_s: float) -> bool:
        stall = Stall(traversal=traversal_s)
        begun = time.perf_counter()
        at, fill, count = self._fill(step, plan)
        stall.waiting = time.perf_counter() - begun
        if at is None:
            return False
        try:
            self._add_segments(count)
            begun = time.perf_counter()
            with _gc_paused():
                samples = plan.copy(at, sources, self._launch, step)
            stall.copy = time.perf_counter() - begun
            begun = time.perf_counter()
            self._daemon.stage(step, at, fill, plan.writer, samples, self.timeout)
            stall.socket = time.perf_counter() - begun
        except BaseException as error:
            self._give_up(step, fill, error)
            raise
        self.last_stall = stall
        self._saved.append(step)
        return True

    def _give_up(self, step: int, fill: str, why: BaseException) -> None:
        """Gives up a step, so that the other ranks learn of it. Has no effect if all ranks have staged the step."""
        try:
            self._daemon.give_up(step, fill, f"{type(why).__name__}: {why}", GIVE_UP_S)
        except RapidraidError as error:
            log.debug("the daemon is not told that step %d is given up: %s", step, error)

    def _fill(self, step: int, plan: Plan) -> tuple[int | None, str, int]:
        """Returns the index of the segment to fill, the filling's id, and the number of segments.

        The index is ``None`` if the step is skipped.
        """
        waited = time.monotonic()
        # The daemon decides for all ranks of the launch, so that no rank fills a step that another
        # one skips.
        or_skip = self.when_full != "wait"
        try:
            at, fill, count = self._daemon.fill(step, or_skip, self.timeout)
        except NotFoundError:
            # The daemon was restarted, and this rank has no segments any more.
            self._prepare(plan)
            at, fill, count = self._daemon.fill(step, or_skip, self.timeout)
        if at is None:
            if self.when_full == "error":
                raise BusyError(f"step {step} is not saved: {fill}", 'wait for earlier steps, or pass when_full="wait"')
            log.warning("step %d is skipped: %s", step, fill)
            return None, "", 0
        waited = time.monotonic() - waited
        if waited > 0.1:
            log.info("step %d waited %.2f s for a free segment", step, waited)
        return at, fill, count

    def _add_segments(self, count: int) -> None:
        plan = self._plan
        assert plan is not None
        while plan.segments < count:
            plan.add_segment(self._daemon.segment(plan.segments))

    def wait(self, step: int | None = None, timeout: float | None = None) -> list[str]:
        """Waits until ``step`` (default: the last saved one) is committed. Returns remarks about its save.

        Raises failures of other saves too. Raises :class:`DeadlineError` after ``timeout`` seconds (default: the
        Checkpointer's).
        """
        if step is None:
            if not self._saved:
                return []
            step = self._saved[-1]
        notes = self.wait_for(step, self.timeout if timeout is None else timeout)
        return notes + [warning for of, warning in self._raise_notices() if of == step]

    def _wait(self, step: int, limit: float) -> tuple[str, list[str]]:
        """Waits in short turns, so that another thread can save in between.

        A daemon that is gone is started again, and goes on with what was staged.
        """
        until = time.monotonic() + limit
        tries = WAIT_TRIES
        while True:
            left = until - time.monotonic()
            try:
                with self._lock:
                    save, notes = self._daemon.wait(step, max(0.0, min(left, WAIT_TURN_S)))
                tries = WAIT_TRIES
            except UnavailableError as error:
                # A dropped step is reported by an error of the same kind, at each attempt.
                tries -= 1
                if tries == 0 or left <= 0 or (isinstance(error, NoDaemonError) and not self._start):
                    raise
                if isinstance(error, NoDaemonError):
                    log.warning("the staging daemon is gone: it is started again")
                    start_daemon(self._config, self.timeout)
                continue
            if save is not None:
                return save, notes
            if left <= WAIT_TURN_S:
                raise DeadlineError(
                    f"the commit took longer than {limit:.1f} s{notes[0]}", "`rapidraid stage --status` shows what is under way"
                )
            # Without a pause the lock would go back to this thread each time.
            time.sleep(0.001)

    @_one_thread
    def _notices(self) -> list[tuple[int, tuple[int, str, str] | None, str]]:
        """Returns the daemon's notices. Restarts a dead daemon; the new one recovers the staged steps."""
        for _ in range(2):
            try:
                return self._daemon.notices(self.timeout)
            except NoDaemonError:
                if not self._start:
                    raise
                log.warning("the staging daemon is gone: it is started again")
                start_daemon(self._config, self.timeout)
            except UnavailableError as error:
                log.warning("%s", error.message)
        return self._daemon.notices(self.timeout)

    def _log_notices(self) -> None:
        """Logs failures and warnings. A wait for a failed step raises its error."""
        for step, failure, warning in self._notices():
            if failure is None:
                log.warning("step %d: %s", step, warning)
            else:
                log.error("step %d was not saved: %s", step, of_code(*failure))

    def wait_for(self, step: int, timeout: float) -> list[str]:
        """Waits until ``step`` is committed, for frameworks. Returns remarks about its save.

        Raises the error of this step only. Errors of other steps are raised by the waits for those steps.
        """
        save, notes = self._wait(step, timeout)
        for note in notes:
            log.warning("step %d: %s", step, note)
        log.debug("step %d is committed as save %s", step, save)
        return notes

    def _raise_notices(self) -> list[tuple[int, str]]:
        """Raises the first failure among the daemon's notices and logs all of them.

        Returns the warnings, each with its step.
        """
        warnings: list[tuple[int, str]] = []
        first: RapidraidError | None = None
        for step, failure, warning in self._notices():
            if failure is None:
                log.warning("step %d: %s", step, warning)
                warnings.append((step, warning or ""))
                continue
            error = of_code(*failure)
            log.error("step %d was not saved: %s", step, error)
            first = first or error
        if first is not None:
            raise first
        return warnings

    def load(
        self,
        state: Mapping[Any, Any],
        step: int | None = None,
        *,
        strict: bool = True,
        include: Callable[[str], bool] | None = None,
        cast: bool = False,
        private: Private | None = None,
        offline: bool = False,
        timeout: float | None = None,
    ) -> int | None:
        """Loads ``step`` (default: the resume point) into ``state``, in place.

        Returns the step, or ``None`` if the job has none. All ranks of the launch must call it equally often, with the same
        ``step`` and ``strict``. An error of any rank is raised on all ranks; the state of the other ranks may be loaded then.

        Args:
            state: The same structure as was saved. Missing entries, such as the state of a fresh optimizer, are created.
            step: The step.
            strict: Whether to raise if the checkpoint has names that the states of no rank have, or the other way round.
            include: A predicate. Only names for which it returns true are loaded.
            cast: Whether to convert element types where they differ.
            private: How to treat private state if the launch that saved had another number of ranks. ``"skip"`` leaves
                it as it is; a function returns for each rank the rank whose private state it takes.
            offline: Whether to accept a step from this host's memory if the cluster does not answer. Refused if the
                launch runs on several hosts.
            timeout: The maximum duration, in seconds. Default: ten times the checkpointer's timeout.

        """
        choices = LoadChoices(strict, include, cast, private, self.allow_pickle)
        stages = Stages(self._group.gather, strict)

        def load(reader: Reader) -> str | None:
            return load_into(reader, state, self.rank, self.world, choices, ranks=self._group.ranks, stages=stages)

        with self.together(stages.finish):
            return self.load_with(step, load, offline=offline, table_first=include is not None, timeout=timeout)

    @contextlib.contextmanager
    def together(self, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Raises an error of the block on all ranks. All ranks must enter the block.

        Args:
            finish: A function that is called before the ranks tell each other: the others may be waiting for this one.

        """
        failed: Exception | None = None
        try:
            yield
        except ForkedError:
            # This process is no rank of the launch.
            raise
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        finish()
        refusals = self._group.gather(refusal_of(failed))
        if failed is not None:
            # Each rank that failed raises its own error, which says what is wrong on this rank.
            raise failed
        raise_together(None, self.rank, refusals)

    @_one_thread
    def load_with(
        self,
        step: int | None,
        read: Callable[[Reader], str | None],
        *,
        offline: bool = False,
        table_first: bool = False,
        timeout: float | None = None,
    ) -> int | None:
        """Loads a step by ``read``, which returns the name of a damaged entry or ``None``. The launch continues from it.

        Returns the step, or ``None`` if the job has none. If the launch runs on several hosts, all ranks must call it.
        """
        limit = self.timeout * 10 if timeout is None else timeout
        self._loads += 1
        if self._hosts.are_several:
            step = self._choose_together(step, offline, limit)
            if step is None:
                return None
            # A load uses the part of the step in this host's memory only if it begins with the table.
            table_first = True

        def load(reader: Reader) -> tuple[int, int | None, str | None]:
            damaged = read(reader)
            return reader.loaded.number, reader.loaded.newest_committed, damaged

        def attempt() -> tuple[int, int | None, str | None] | None:
            return self._read_step(step, load, number=self._loads, offline=offline, table_first=table_first, limit=limit)

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
        self._loaded, self._newest_seen = number, newest
        if newest is not None and newest > number:
            log.warning(
                "step %d was loaded, and later steps up to %d are committed: the first save is refused unless abandon_later=True",
                number,
                newest,
            )
        return number

    @_one_thread
    def look_into(self, step: int | None, read: Callable[[Reader], _T]) -> _T | None:
        """Opens a step, by default the resume point. Returns the result of ``read``, or ``None`` if the job has no step.

        The last element of the result is the name of a damaged entry, or ``None``. If an entry is damaged, ``read`` is called
        once more, for other copies of the step. The launch does not continue from the step, unless ``step`` is ``None`` and
        the launch has prepared: then the daemon records the step as the one that the launch has loaded. If ``step`` is
        ``None``, all ranks must call it.
        """
        limit = self.timeout * 10
        number: int | None = None
        if step is None:
            self._loads += 1
            if self._hosts.are_several:
                step = self._choose_together(None, False, limit)
                if step is None:
                    return None
            else:
                number = self._loads
        done = self._read_step(step, read, number=number, table_first=True, limit=limit)
        if done is not None and done[-1] is not None:
            log.warning("%s is damaged: it is read again", done[-1])
            done = self._read_step(step, read, number=number, table_first=True, limit=limit)
        return done

    def _choose_together(self, step: int | None, offline: bool, limit: float) -> int | None:
        """Lets rank 0 choose the step that the ranks of all hosts load, the newest committed one by default."""
        chosen: int | None = None
        failed: Exception | None = None
        try:
            if self._saved:
                raise InvalidError("this launch has saved, and cannot go back", "make a new Checkpointer on all ranks, and load with it")
            if offline:
                raise InvalidError("offline=True with several hosts", "leave it out: each host has only a part of a step in memory")
            if self.rank == 0:
                loaded = self._open_step(step, time.monotonic() + limit, number=self._loads, table_first=True)
                if loaded is not None:
                    chosen = loaded.number
                    self._release(loaded, None)
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        told = self._group.gather((chosen, refusal_of(failed)))
        raise_together(failed, self.rank, [refusal for _, refusal in told])
        chosen = told[0][0]
        assert chosen is None or isinstance(chosen, int)
        return chosen

    @_one_thread
    def read(self, step: int | None, name: str, *, timeout: float | None = None) -> Any:
        """Returns one entry of a step by name: ``model/layers.0.weight`` or, if private, ``rank 3: rng/torch``."""
        limit = self.timeout * 10 if timeout is None else timeout

        def read(reader: Reader) -> tuple[Any, str | None]:
            try:
                return read_one(reader, name, self.allow_pickle), None
            except CorruptError:
                return None, name

        for last in (False, True):
            done = self._read_step(step, read, table_first=True, limit=limit)
            if done is None:
                raise NotFoundError(f"{self.job} has no step", "save one first")
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
        until = time.monotonic() + limit
        while True:
            loaded = self._open_step(step, until, number=number, offline=offline, table_first=table_first)
            if loaded is None:
                return None
            damaged = None
            try:
                with _gc_paused():
                    done = read(Reader(self._session, loaded, 1 if number is None else len(self._hosts.ranks), until))
                damaged = done[-1]
                return done
            except ReadWholeError:
                table_first = False
            finally:
                self._release(loaded, damaged)

    def _open_step(
        self, step: int | None, until: float, *, number: int | None, offline: bool = False, table_first: bool
    ) -> _native.LoadedStep | None:
        return self._daemon.load(
            self.job,
            step=step,
            launch=None if number is None else self._launch,
            number=number or 0,
            offline=offline,
            table_first=table_first,
            # Each host has only a part of a step in memory, and may have one that the others do not know.
            from_cluster=number is not None and self._hosts.are_several,
            timeout=max(0.0, until - time.monotonic()),
        )

    def _release(self, loaded: _native.LoadedStep, damaged: str | None) -> None:
        """Ends a load.

        Ignores failures: the loaded data is valid even if the daemon ended, and an error of the load takes
        precedence.
        """
        try:
            self._session.release(loaded, damaged, RELEASE_S)
        except RapidraidError as error:
            log.debug("the daemon is not told of the end of a load: %s", error)

    def latest(self, label: str | None = None) -> int | None:
        """Returns the newest committed step, or the newest one with a label. Returns ``None`` if there is none."""
        if label is None:
            steps = self.steps()
            return steps[-1].step if steps else None
        return max((step for step, labels in self.labels().items() if label in labels), default=None)

    @_one_thread
    def labels(self) -> dict[int, list[str]]:
        """Returns the labels of the committed steps that have any, oldest step first."""
        return dict(self._daemon.labels(self.job, self.timeout))

    @_one_thread
    def label(self, step: int, name: str, *, remove: bool = False) -> None:
        """Gives a committed step a label, for example after an evaluation, or takes it away.

        The newest step with each label is kept: neither ``keep`` nor the policy of the cluster removes it.

        Args:
            step: The step, which must be committed.
            name: The label, 1 to 64 of ``A-Z a-z 0-9 . _ -``. A step has at most 16.
            remove: Whether to take the label away.

        Raises:
            NotFoundError: The step is not committed.
            InvalidError: The name is not valid, or the step has too many labels.

        """
        self._daemon.label(self.job, step, name, remove, self.timeout)

    @_one_thread
    def steps(self) -> list[Info]:
        """Returns the committed steps, oldest first."""
        return [Info(*info) for info in self._daemon.steps(self.job, self.timeout)]

    @_one_thread
    def remove(self, step: int) -> None:
        """Removes a committed step."""
        self._daemon.remove(self.job, step, self.timeout)

    def close(self) -> None:
        """Waits for the commit of the last saved step, for at most ``commit_timeout``, and ends the session."""
        if self._is_closed:
            return
        try:
            self.wait(timeout=self.commit_timeout)
        finally:
            self._end()

    def has_saved(self, step: int | None = None) -> bool:
        """Returns whether this process has staged the step, or any step."""
        return bool(self._saved) if step is None else step in self._saved

    @property
    def resumed(self) -> tuple[int | None, int | None]:
        """The step from which another launch of the trainer continues, and the newest step that it counts as seen.

        After a save, both are the last staged step, which may not be committed yet.
        """
        return (self._saved[-1], self._saved[-1]) if self._saved else (self._loaded, self._newest_seen)

    @_one_thread
    def go_on_from(self, loaded: int | None, newest_seen: int | None) -> None:
        """Records what another process of the same trainer has loaded, unless this one has loaded or saved."""
        if self._loaded is None and not self._saved:
            self._loaded, self._newest_seen = loaded, newest_seen

    def set_before_first_save(self, settings: Mapping[str, Any]) -> bool:
        """Sets ``keep`` and ``abandon_later``, unless this process has prepared or saved. Returns whether they have these values now."""
        keep, abandon_later = settings.get("keep") or 0, bool(settings.get("abandon_later"))
        if (keep, abandon_later) == (self._keep, self._abandon_later):
            return True
        if self._plan is not None or self._saved:
            return False
        self._keep, self._abandon_later = keep, abandon_later
        return True

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""
        return self._is_closed

    def leave(self) -> None:
        """Ends the session without waiting, and logs what has failed. The daemon saves what was staged."""
        if self._is_closed or not self._lock.acquire(timeout=LEAVE_S):
            return
        try:
            self._leave()
        finally:
            self._lock.release()

    def _leave(self) -> None:
        limit = LEAVE_S
        try:
            for step, failure, _ in self._session.notices(QUICK_S):
                if failure is not None:
                    log.error("step %d was not saved: %s", step, of_code(*failure))
            if self._saved and self._session.wait(self._saved[-1], 0.0)[0] is None:
                log.warning("step %d of %s is staged, and not committed yet: the daemon goes on with it", self._saved[-1], self.job)
        except RapidraidError as error:
            # A session that has saved nothing has nothing to report.
            if self._saved:
                log.warning("step %d of %s: %s", self._saved[-1], self.job, error.message)
            # A daemon that does not answer needs not be told either.
            limit = 0.0
        self._end(limit)

    @_one_thread
    def _end(self, limit: float = LEAVE_S) -> None:
        self._is_closed = True
        self._drop_plan()
        self._restore_handlers()
        try:
            self._session.leave(limit)
        except RapidraidError as error:
            log.debug("the daemon is not told of the end: %s", error)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            # Another handler may have been set since.
            if signal.getsignal(number) == self._on_signal and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or self._is_closed:
            self.close()
            return
        try:
            # Staged steps are saved without this process. Only collect the failures that are known
            # by now.
            self.wait(timeout=0.0)
        except RapidraidError as reason:
            log.warning("not known to be committed at exit: step %s: %s", self._saved[-1] if self._saved else "-", reason.message)
        finally:
            self._end()


_sessions: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


#: How long a fork waits until no other thread uses a session, in seconds. The child could not
#: release a session that another thread uses.
FORK_S = 5.0
_held_for_fork: list[Checkpointer] = []


def _before_fork() -> None:
    _held_for_fork[:] = [checkpointer for checkpointer in list(_sessions) if checkpointer._lock.acquire(timeout=FORK_S)]


def _after_fork_in_parent() -> None:
    for checkpointer in _held_for_fork:
        checkpointer._lock.release()
    _held_for_fork.clear()


def _after_fork() -> None:
    _held_for_fork.clear()
    sessions = list(_sessions)
    # A child that only sets a flag would survive the signal. The handlers of several sessions form a chain, of which each
    # round restores at least one.
    for checkpointer in sessions * len(sessions):
        checkpointer._restore_handlers()
    for checkpointer in sessions:
        # The thread that held the lock does not exist in this process.
        checkpointer._lock = threading.RLock()
        checkpointer._plan = None
        checkpointer._session.leave_to_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)

__all__ = ["Checkpointer", "ExistsError", "Info", "Stall"]
