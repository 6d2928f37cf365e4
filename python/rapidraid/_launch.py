"""A process as a rank of a launch: its session with the staging daemon, and what it has loaded and saved."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from . import _native
from ._program import connect, find_config, start_daemon
from ._ranks import Group, Hosts, raise_together, refusal_of
from ._signals import handlers_deferred
from .errors import DeadlineError, InvalidError, NoDaemonError, RapidraidError, UnavailableError, of_code

log = logging.getLogger("rapidraid")

#: A step, and its failure (code, message, hint) or a warning about it.
Notice: TypeAlias = tuple[int, tuple[int, str, str] | None, str]

#: How long a thread that waits for a commit blocks other threads from the session at a time, in
#: seconds.
WAIT_TURN_S = 0.05
#: How often a thread that waits for a commit asks the daemon for warnings, in seconds.
WARNINGS_EVERY_S = 1.0
#: Maximum number of failures, and of warnings, that a wait has taken from the daemon and that no call has raised or
#: returned yet. The oldest ones are forgotten first.
MAX_UNRAISED = 64
#: Maximum number of failed attempts in a row of a wait for a commit, while the daemon does not answer.
WAIT_TRIES = 4
#: Maximum time for ending a session, in seconds. The daemon also notices the end of the process.
LEAVE_S = 5.0
#: Maximum time for asking the daemon what has failed, when a session ends without waiting, in
#: seconds.
QUICK_S = 1.0


@dataclass(frozen=True)
class _Settings:
    """The settings of a rank, as it tells them to the others."""

    job: str
    when_full: str
    cluster: str
    #: The staging folder, which the ranks of one host share.
    instance: str
    host: str
    #: The id of the launch, if this is rank 0, and the time at which it was drawn.
    launch: str
    born_ns: int


class Launch:
    """A process as a rank of a launch of a job.

    All methods but :meth:`wait_for` need :attr:`lock`: only one thread at a time uses the session.

    Args:
        job: The job.
        group: The ranks of the launch.
        config: The client's configuration file, or ``None`` to look for one.
        timeout: The maximum time that a call waits for the daemon, in seconds.
        when_full: What ``save`` does while every segment holds an uncommitted step.
        allow_pickle: Whether objects that are not plain values are stored and loaded by ``pickle``.
        start: Whether to start a staging daemon if none answers.
        sets_signals: Whether this rank will set signal handlers.

    """

    def __init__(
        self,
        job: str,
        group: Group,
        config: str | os.PathLike[str] | None,
        *,
        timeout: float,
        when_full: Literal["wait", "skip", "error"],
        allow_pickle: bool,
        start: bool,
        sets_signals: bool,
    ) -> None:
        self.job = job
        self.group = group
        self.timeout = timeout
        self.when_full = when_full
        self.allow_pickle = allow_pickle
        self.start = start
        self.lock = threading.RLock()
        #: The step that was loaded last, and the newest committed step at that time.
        self.loaded: int | None = None
        self.newest_seen: int | None = None
        #: The steps that this process has staged, in this order.
        self.saved: list[int] = []
        self.is_closed = False
        #: Failures of steps that a wait has taken from the daemon, and that no call has raised yet.
        self._unraised: deque[Notice] = deque(maxlen=MAX_UNRAISED)
        #: Warnings that a wait has logged, and that no call has returned yet.
        self._logged: deque[tuple[int, str]] = deque(maxlen=MAX_UNRAISED)
        self.hosts: Hosts
        self.session, self.id, self.born_ns = self._connect(config, sets_signals)

    @property
    def rank(self) -> int:
        """The rank of this process in the launch."""
        return self.group.rank

    @property
    def world(self) -> int:
        """The number of ranks of the launch."""
        return self.group.world

    def _connect(self, config: str | os.PathLike[str] | None, sets_signals: bool) -> tuple[_native.Session, str, int]:
        """Connects to the daemon, draws the launch's id on rank 0, and checks that the ranks' settings agree.

        Returns the session, the id and its time. An error of any rank is raised on all ranks.
        """
        session: _native.Session | None = None
        failed: Exception | None = None
        mine: _Settings | None = None
        try:
            if sets_signals and threading.current_thread() is not threading.main_thread():
                raise InvalidError("save_on outside the main thread", "Python handles signals there alone: make this Checkpointer in it")
            self.config = find_config(config)
            session = connect(self.config, self.timeout, self.start)
            mine = _Settings(
                self.job, self.when_full, session.cluster, session.instance, socket.gethostname(), secrets.token_hex(16), _native.boot_ns()
            )
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        told = self.group.gather((mine, refusal_of(failed)))
        raise_together(failed, self.rank, [refusal for _, refusal in told])
        found = [of_rank for of_rank, _ in told]
        assert session is not None
        first = found[0]
        for rank, other in enumerate(found):
            if other.job != first.job:
                raise InvalidError(f"rank 0 has job={first.job!r}, rank {rank} job={other.job!r}", "give all ranks the same job")
            if other.when_full != first.when_full:
                raise InvalidError(
                    f"rank 0 has when_full={first.when_full!r}, rank {rank} when_full={other.when_full!r}",
                    "give all ranks the same when_full",
                )
            if other.cluster != first.cluster:
                raise InvalidError(
                    f"rank 0 saves to cluster {first.cluster}, rank {rank} to {other.cluster}", "give all ranks one configuration"
                )
        self.hosts = Hosts.of(self.rank, [other.instance for other in found], [other.host for other in found])
        if self.hosts.are_several and first.when_full != "wait":
            raise InvalidError(
                f"when_full={first.when_full!r} with {len(self.hosts.names)} hosts",
                'a launch of several hosts saves every step: pass when_full="wait"',
            )
        # The time counts from the boot of a host, so each host has its own.
        return session, first.launch, found[self.hosts.ranks[0]].born_ns

    @property
    def daemon(self) -> _native.Session:
        """The session. Raises :class:`InvalidError` if it has ended."""
        if self.is_closed:
            raise InvalidError("this Checkpointer is closed", "make another one")
        return self.session

    def _wait(self, step: int, limit: float) -> tuple[str, list[str]]:
        """Waits in short turns, so that another thread can save in between.

        A daemon that is gone is started again, and goes on with what was staged.
        """
        until = time.monotonic() + limit
        tries = WAIT_TRIES
        look_at = time.monotonic() + WARNINGS_EVERY_S
        while True:
            left = until - time.monotonic()
            try:
                with self.lock, handlers_deferred():
                    save, notes = self.daemon.wait(step, max(0.0, min(left, WAIT_TURN_S)))
                    if save is None and time.monotonic() >= look_at:
                        look_at = time.monotonic() + WARNINGS_EVERY_S
                        self._log_warnings(max(0.0, min(left, QUICK_S)))
                tries = WAIT_TRIES
            except UnavailableError as error:
                # A dropped step is reported by an error of the same kind, at each attempt.
                tries -= 1
                if tries == 0 or left <= 0 or (isinstance(error, NoDaemonError) and not self.start):
                    raise
                if isinstance(error, NoDaemonError):
                    log.warning("the staging daemon is gone: it is started again")
                    try:
                        start_daemon(self.config, self.timeout)
                    except NoDaemonError as failed:
                        # The new daemon may have been killed as well.
                        if tries == 1:
                            raise
                        log.warning("%s", failed.message)
                continue
            if save is not None:
                return save, notes
            if left <= WAIT_TURN_S:
                raise DeadlineError(
                    f"the commit took longer than {limit:.1f} s{notes[0]}", "`rapidraid stage --status` shows what is under way"
                )
            # Without a pause the lock would go back to this thread each time.
            time.sleep(0.001)

    def wait_for(self, step: int, timeout: float) -> list[str]:
        """Waits until ``step`` is committed, for frameworks. Returns remarks about its save.

        Raises the error of this step only. Errors of other steps are raised by the waits for those steps.
        """
        save, notes = self._wait(step, timeout)
        for note in notes:
            log.warning("step %d: %s", step, note)
        log.debug("step %d is committed as save %s", step, save)
        return notes

    def _log_warnings(self, limit: float) -> None:
        """Logs the daemon's warnings, such as a host that does not report. Keeps failures for later calls."""
        try:
            notices = self.daemon.notices(limit)
        except RapidraidError as error:
            log.debug("the daemon's warnings are not known: %s", error)
            return
        for notice in notices:
            if notice[1] is None:
                self._log_warning(notice)
            else:
                self._unraised.append(notice)

    def _log_warning(self, notice: Notice) -> None:
        step, _, warning = notice
        log.warning("step %d: %s", step, warning)
        self._logged.append((step, warning))

    def take_warnings(self, step: int) -> list[str]:
        """Returns the warnings about ``step`` that were logged since the last call for it."""
        taken = [warning for of, warning in self._logged if of == step]
        left = [logged for logged in self._logged if logged[0] != step]
        self._logged.clear()
        self._logged.extend(left)
        return taken

    def notices(self) -> list[Notice]:
        """Returns the daemon's notices. Restarts a dead daemon; the new one recovers the staged steps."""
        taken = self._take_notices()
        unraised = list(self._unraised)
        self._unraised.clear()
        return unraised + taken

    def _take_notices(self) -> list[Notice]:
        for _ in range(2):
            try:
                return self.daemon.notices(self.timeout)
            except NoDaemonError:
                if not self.start:
                    raise
                log.warning("the staging daemon is gone: it is started again")
                start_daemon(self.config, self.timeout)
            except UnavailableError as error:
                log.warning("%s", error.message)
        return self.daemon.notices(self.timeout)

    def is_staged(self, step: int) -> bool:
        """Returns whether the daemon has a step that this rank has filled. Restarts a dead daemon."""
        try:
            self._unraised.extend(self._take_notices())
            self.daemon.wait(step, 0.0)
        except RapidraidError as error:
            log.debug("step %d is not staged: %s", step, error)
            return False
        return True

    def log_notices(self) -> None:
        """Logs failures and warnings. A wait for a failed step raises its error."""
        for step, failure, warning in self.notices():
            if failure is None:
                log.warning("step %d: %s", step, warning)
            else:
                log.error("step %d was not saved: %s", step, of_code(*failure))

    def raise_notices(self) -> None:
        """Logs the daemon's notices, and raises the first failure among them."""
        first: RapidraidError | None = None
        for notice in self.notices():
            step, failure, _ = notice
            if failure is None:
                self._log_warning(notice)
                continue
            error = of_code(*failure)
            log.error("step %d was not saved: %s", step, error)
            first = first or error
        if first is not None:
            raise first

    @staticmethod
    def _log_failures(notices: Iterable[Notice]) -> None:
        for step, failure, _ in notices:
            if failure is not None:
                log.error("step %d was not saved: %s", step, of_code(*failure))

    def log_unsaved(self) -> float:
        """Logs what has failed and what is not committed yet.

        Returns how long the end of the session may take, in seconds: 0 if the daemon does not answer.
        """
        limit = LEAVE_S
        self._log_failures(self._unraised)
        try:
            self._log_failures(self.session.notices(QUICK_S))
            if self.saved and self.session.wait(self.saved[-1], 0.0)[0] is None:
                log.warning("step %d of %s is staged, and not committed yet: the daemon goes on with it", self.saved[-1], self.job)
        except RapidraidError as error:
            # A session that has saved nothing has nothing to report.
            if self.saved:
                log.warning("step %d of %s: %s", self.saved[-1], self.job, error.message)
            # A daemon that does not answer needs not be told either.
            limit = 0.0
        return limit

    def end(self, limit: float) -> None:
        """Tells the daemon that the session ends. :attr:`is_closed` is set before."""
        try:
            self.session.leave(limit)
        except RapidraidError as error:
            log.debug("the daemon is not told of the end: %s", error)
