"""The :class:`Checkpointer`: saves and loads the state of a training job through the staging daemon of its host."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from ._launch import LEAVE_S, Launch
from ._leaves import Flat
from ._loads import Loads
from ._match import LoadChoices, Private, Stages, load_into
from ._ranks import Group, raise_together, refusal_of
from ._reader import Reader
from ._save import Saver, Stall
from ._signals import handlers_deferred
from .errors import ExistsError, ForkedError, InvalidError, RapidraidError
from .state import flatten

log = logging.getLogger("rapidraid")

_T = TypeVar("_T", bound=tuple[Any, ...])
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _one_thread(call: Callable[Concatenate[Checkpointer, _P], _R]) -> Callable[Concatenate[Checkpointer, _P], _R]:
    """Wraps a method so that only one thread at a time uses the session of a :class:`Checkpointer`."""

    @functools.wraps(call)
    def wrapped(self: Checkpointer, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._launch.lock:
            return call(self, *args, **kwargs)

    return wrapped


def _uninterrupted(call: Callable[Concatenate[Checkpointer, _P], _R]) -> Callable[Concatenate[Checkpointer, _P], _R]:
    """Wraps a method as :func:`_one_thread` does. Signals that arrive meanwhile are handled after the call."""

    @functools.wraps(call)
    def wrapped(self: Checkpointer, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._launch.lock, handlers_deferred():
            return call(self, *args, **kwargs)

    return wrapped


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
        self.commit_timeout = commit_timeout
        #: Set by a signal of ``save_on``, on this rank: the job should save once more and end. A launch of several ranks
        #: asks :meth:`should_stop_together`.
        self.should_stop = False
        self._launch = Launch(
            job,
            Group(group, alone),
            config,
            timeout=timeout,
            when_full=when_full,
            allow_pickle=allow_pickle,
            start=start,
            sets_signals=bool(signals),
        )
        self._saver = Saver(self._launch, keep=keep or 0, abandon_later=abandon_later)
        self._loads = Loads(self._launch)
        #: The previous signal handlers, restored at the end and in forked children.
        self._handlers: dict[signal.Signals, Any] = {}
        _checkpointers.add(self)
        try:
            for number in signals:
                self._handlers[number] = signal.signal(number, self._on_signal)
        except BaseException:
            self._end()
            raise

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._launch.job

    @property
    def rank(self) -> int:
        """The rank of this process in the launch."""
        return self._launch.rank

    @property
    def world(self) -> int:
        """The number of ranks of the launch."""
        return self._launch.world

    @property
    def timeout(self) -> float:
        """The maximum time that a call waits for the daemon, in seconds."""
        return self._launch.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._launch.timeout = seconds

    @property
    def when_full(self) -> Literal["wait", "skip", "error"]:
        """The behaviour of ``save`` while every segment holds an uncommitted step."""
        return self._launch.when_full

    @property
    def allow_pickle(self) -> bool:
        """Whether objects that are not plain values are stored and loaded by ``pickle``."""
        return self._launch.allow_pickle

    @allow_pickle.setter
    def allow_pickle(self, is_allowed: bool) -> None:
        self._launch.allow_pickle = is_allowed

    @property
    def last_stall(self) -> Stall:
        """The time that the last save took, by phase."""
        return self._saver.last_stall

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.should_stop = True
        log.warning("signal %s: save once more, then end", signal.Signals(number).name)

    def should_stop_together(self) -> bool:
        """Returns whether :attr:`should_stop` is set on any rank. All ranks must call it, and get the same answer.

        A signal reaches the ranks at different steps. A rank that left its loop alone would be missed by the collectives of
        the others.
        """
        return self._launch.group.is_any(self.should_stop, self._launch.id, self._launch.lock)

    @_uninterrupted
    def prepare(self, state: Mapping[Any, Any]) -> None:
        """Reserves memory for ``state`` and compares its layout between the ranks. All ranks must call it.

        The first ``save`` calls it. Call it earlier so that no training step waits for it, and again after the layout
        of the state has changed.
        """
        self._saver.prepare_flat(lambda: flatten(state, self.world, self._launch.group.ranks))

    @_uninterrupted
    def save(self, step: int, state: Mapping[Any, Any]) -> bool:
        """Copies ``state`` into shared memory. The daemon then saves it as ``step`` from there.

        Returns whether the step was staged, ``False`` only with ``when_full="skip"``. Raises failures of earlier saves.
        In a launch of several ranks, it also raises :class:`InvalidError` if the layout of the state has changed since
        it was prepared.
        """
        return self._saver.save(step, state)

    @_uninterrupted
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
        return self._saver.save_flat(step, flat_state, may_gather=may_gather, raise_earlier=raise_earlier)

    def wait(self, step: int | None = None, timeout: float | None = None) -> list[str]:
        """Waits until ``step`` (default: the last saved one) is committed. Returns remarks about its save.

        Raises failures of other saves too. Raises :class:`DeadlineError` after ``timeout`` seconds (default: the
        Checkpointer's).
        """
        if step is None:
            if not self._launch.saved:
                return []
            step = self._launch.saved[-1]
        notes = self.wait_for(step, self.timeout if timeout is None else timeout)
        with self._launch.lock, handlers_deferred():
            self._launch.raise_notices()
            return notes + self._launch.take_warnings(step)

    def wait_for(self, step: int, timeout: float) -> list[str]:
        """Waits until ``step`` is committed, for frameworks. Returns remarks about its save.

        Raises the error of this step only. Errors of other steps are raised by the waits for those steps.
        """
        return self._launch.wait_for(step, timeout)

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
        stages = Stages(self._launch.group.gather, strict)

        def load(reader: Reader) -> str | None:
            return load_into(reader, state, self.rank, self.world, choices, ranks=self._launch.group.ranks, stages=stages)

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
        refusals = self._launch.group.gather(refusal_of(failed))
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
        return self._loads.load_with(step, read, offline=offline, table_first=table_first, timeout=timeout)

    @_one_thread
    def look_into(self, step: int | None, read: Callable[[Reader], _T]) -> _T | None:
        """Opens a step, by default the resume point. Returns the result of ``read``, or ``None`` if the job has no step.

        The last element of the result is the name of a damaged entry, or ``None``. If an entry is damaged, ``read`` is called
        once more, for other copies of the step. The launch does not continue from the step, unless ``step`` is ``None`` and
        the launch has prepared: then the daemon records the step as the one that the launch has loaded. If ``step`` is
        ``None``, all ranks must call it.
        """
        return self._loads.look_into(step, read)

    @_one_thread
    def read(self, step: int | None, name: str, *, timeout: float | None = None) -> Any:
        """Returns one entry of a step by name: ``model/layers.0.weight`` or, if private, ``rank 3: rng/torch``."""
        return self._loads.read(step, name, timeout)

    def latest(self, label: str | None = None) -> int | None:
        """Returns the newest committed step, or the newest one with a label. Returns ``None`` if there is none."""
        if label is None:
            steps = self.steps()
            return steps[-1].step if steps else None
        return max((step for step, labels in self.labels().items() if label in labels), default=None)

    @_uninterrupted
    def labels(self) -> dict[int, list[str]]:
        """Returns the labels of the committed steps that have any, oldest step first."""
        return dict(self._launch.daemon.labels(self.job, self.timeout))

    @_uninterrupted
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
        self._launch.daemon.label(self.job, step, name, remove, self.timeout)

    @_uninterrupted
    def steps(self) -> list[Info]:
        """Returns the committed steps, oldest first."""
        return [Info(*info) for info in self._launch.daemon.steps(self.job, self.timeout)]

    @_uninterrupted
    def remove(self, step: int) -> None:
        """Removes a committed step."""
        self._launch.daemon.remove(self.job, step, self.timeout)

    def close(self) -> None:
        """Waits for the commit of the last saved step, for at most ``commit_timeout``, and ends the session."""
        if self._launch.is_closed:
            return
        try:
            self.wait(timeout=self.commit_timeout)
        finally:
            self._end()

    def has_saved(self, step: int | None = None) -> bool:
        """Returns whether this process has staged the step, or any step."""
        return bool(self._launch.saved) if step is None else step in self._launch.saved

    @property
    def resumed(self) -> tuple[int | None, int | None]:
        """The step from which another launch of the trainer continues, and the newest step that it counts as seen.

        After a save, both are the last staged step, which may not be committed yet.
        """
        return (self._launch.saved[-1], self._launch.saved[-1]) if self._launch.saved else (self._launch.loaded, self._launch.newest_seen)

    @_one_thread
    def go_on_from(self, loaded: int | None, newest_seen: int | None) -> None:
        """Sets the step from which the launch continues and the newest step that it counts as seen, in place of what was loaded.

        Has no effect after the launch has prepared or saved.
        """
        if not self._launch.saved:
            self._launch.loaded, self._launch.newest_seen = loaded, newest_seen

    @_one_thread
    def inherit(self, loaded: int | None, newest_seen: int | None) -> None:
        """Continues as another process of the same trainer would, unless this one has loaded or saved."""
        if self._launch.loaded is None:
            self.go_on_from(loaded, newest_seen)

    def set_before_first_save(self, settings: Mapping[str, Any]) -> bool:
        """Sets ``keep`` and ``abandon_later``, unless this process has prepared or saved. Returns whether they have these values now."""
        return self._saver.set_before_first_save(settings)

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""
        return self._launch.is_closed

    def leave(self) -> None:
        """Ends the session without waiting, and logs what has failed. The daemon saves what was staged."""
        if self.is_closed or not self._launch.lock.acquire(timeout=LEAVE_S):
            return
        try:
            with handlers_deferred():
                limit = self._launch.log_unsaved()
            self._end(limit)
        finally:
            self._launch.lock.release()

    @_one_thread
    def _end(self, limit: float = LEAVE_S) -> None:
        # No other thread may begin a save while its memory goes.
        self._launch.is_closed = True
        self._saver.drop_plan()
        self._restore_handlers()
        self._launch.group.close()
        self._launch.end(limit)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            # Another handler may have been set since.
            if signal.getsignal(number) == self._on_signal and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or self.is_closed or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        try:
            # Staged steps are saved without this process. Only collect the failures that are known
            # by now.
            self.wait(timeout=0.0)
        except RapidraidError as reason:
            log.warning(
                "not known to be committed at exit: step %s: %s", self._launch.saved[-1] if self._launch.saved else "-", reason.message
            )
        finally:
            self._end()


_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


#: How long a fork waits until no other thread uses any session, in seconds. The child could not
#: release a session that another thread uses.
FORK_S = 5.0
_held_for_fork: list[Checkpointer] = []


def _before_fork() -> None:
    until = time.monotonic() + FORK_S
    for checkpointer in list(_checkpointers):
        if checkpointer._launch.lock.acquire(timeout=max(0.0, until - time.monotonic())):
            _held_for_fork.append(checkpointer)


def _after_fork_in_parent() -> None:
    for checkpointer in _held_for_fork:
        checkpointer._launch.lock.release()
    _held_for_fork.clear()


def _after_fork() -> None:
    _held_for_fork.clear()
    sessions = list(_checkpointers)
    # A child that only sets a flag would survive the signal. The handlers of several sessions form a chain, of which each
    # round restores at least one.
    for checkpointer in sessions * len(sessions):
        checkpointer._restore_handlers()
    for checkpointer in sessions:
        # The thread that held the lock does not exist in this process.
        checkpointer._launch.lock = threading.RLock()
        checkpointer._saver.plan = None
        try:
            checkpointer._launch.session.leave_to_parent()
        except RuntimeError as error:
            # Another thread used the session during the fork. The child must release the others all the same.
            log.warning("the forked process %d keeps memory of %s: %s", os.getpid(), checkpointer.job, error)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)

__all__ = ["Checkpointer", "ExistsError", "Info", "Stall"]
