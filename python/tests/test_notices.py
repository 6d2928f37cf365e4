"""The daemon's notices: a failure is raised once, and a warning is returned once, whoever has taken them from the daemon."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from rapidraid import errors
from rapidraid._launch import Launch, Notice

FAILURE: Notice = (10, (5, "rank 1 died", "start the job again"), "")
WARNING: Notice = (20, None, "no report from host host-b")


class Daemon:
    """A session with a daemon that gives these answers, one after the other."""

    def __init__(self, *answers: list[Notice] | Exception) -> None:
        self.answers = list(answers)

    def notices(self, _limit: float) -> list[Notice]:
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer


def launch_with(daemon: Any) -> Launch:
    launch = Launch.__new__(Launch)
    launch.session, launch.start, launch.is_closed, launch.timeout = daemon, False, False, 1.0
    launch._unraised, launch._logged = deque(), deque()
    return launch


def test_a_wait_keeps_failures_and_warnings_for_later_calls() -> None:
    """A wait takes notices to log warnings; the next call raises the failure, and ``wait`` returns the warning."""
    launch = launch_with(Daemon([FAILURE, WARNING]))
    launch._log_warnings(1.0)
    with pytest.raises(errors.RapidraidError, match="rank 1 died"):
        launch.raise_notices()
    launch.raise_notices()
    assert launch.take_warnings(10) == []
    assert launch.take_warnings(20) == [WARNING[2]]
    assert launch.take_warnings(20) == []


def test_a_daemon_that_does_not_answer_loses_no_failure() -> None:
    """The failure is raised by the first call that succeeds."""
    gone = errors.NoDaemonError("nobody listens", "start it")
    launch = launch_with(Daemon([FAILURE], gone, gone))
    launch._log_warnings(1.0)
    launch._log_warnings(1.0)
    with pytest.raises(errors.NoDaemonError):
        launch.raise_notices()
    with pytest.raises(errors.RapidraidError, match="rank 1 died"):
        launch.raise_notices()
