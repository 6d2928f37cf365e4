"""Names of steps as frameworks write them, and the :class:`Checkpointer` that the integrations of a process share."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._program import find_config
from .checkpointer import Checkpointer
from .errors import InvalidError

#: The prefix of a step's URL.
SCHEME = "rapidraid://"
_STEP = re.compile(r"[^0-9/]*([0-9]+)")
_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True)
class StepName:
    """A job, and one of its steps. ``None`` stands for the step that a launch resumes from."""

    job: str
    step: int | None

    def __str__(self) -> str:
        return self.job if self.step is None else f"{self.job}/{self.step}"


def parse_step_name(text: str | os.PathLike[str]) -> StepName:
    """Returns the job and the step that ``JOB``, ``JOB/STEP`` or ``rapidraid://JOB/STEP`` names.

    The step is a number, or ends in the only number that it contains: ``100``, ``step-100``, ``global_step100``.

    Raises:
        InvalidError: The text has another form.

    """
    shown = os.fspath(text)
    job, _, rest = shown.removeprefix(SCHEME).strip("/").partition("/")
    step = _STEP.fullmatch(rest)
    if not _JOB.fullmatch(job) or (rest and step is None):
        raise InvalidError(f"{shown!r} names no step", 'write "JOB/STEP", as in "gpt/100" or "gpt/step-100"')
    return StepName(job, int(step[1]) if step else None)


#: Settings that take effect at the first save, and may be changed until then.
_LATE = ("keep", "abandon_later")


def refuse_skip(settings: Mapping[str, Any]) -> None:
    """Raises :class:`InvalidError` for ``when_full="skip"``: a framework takes a save that returns for done."""
    if settings.get("when_full") == "skip":
        raise InvalidError('when_full="skip" with a framework', "leave it out: the framework would take a skipped step for a saved one")


_opened: dict[tuple[str, Path, Any, bool], tuple[Checkpointer, dict[str, Any]]] = {}
#: Reentrant: a signal handler may save while this thread holds it.
_lock = threading.RLock()


def shared_checkpointer(job: str, settings: Mapping[str, Any]) -> Checkpointer:
    """Returns this process's :class:`Checkpointer` of a job. Makes it if there is none.

    The integrations of a process belong to one launch, so a save goes on from the step that was loaded.

    Args:
        job: The job.
        settings: Arguments of :class:`Checkpointer`. ``config``, ``group`` and ``alone`` choose among the job's Checkpointers.
            If there are no other settings, the chosen one is returned with the settings that it has.

    Raises:
        InvalidError: The chosen Checkpointer has other settings.

    """
    more = dict(settings)
    config = find_config(more.pop("config", None)).resolve()
    key = (job, config, more.pop("group", None), bool(more.pop("alone", False)))
    with _lock:
        found = _opened.get(key)
        if found is not None and not found[0].is_closed:
            fixed, wanted = ({name: value for name, value in one.items() if name not in _LATE} for one in (found[1], more))
            is_set = not more or (fixed == wanted and found[0].set_before_first_save({**found[1], **more}))
            if not is_set:
                raise InvalidError(
                    f"this process uses {job} with {_show(found[1])}, and now with {_show(more)}",
                    "pass the same settings everywhere, or one Checkpointer",
                )
            found[1].update(more)
            return found[0]
        made = Checkpointer(job, config=config, group=key[2], alone=key[3], **more)
        _opened[key] = (made, more)
        return made


def resumed_steps(alone: bool) -> dict[str, tuple[int | None, int | None]]:
    """Returns for each job of this process what :attr:`Checkpointer.resumed` says.

    With ``alone``, only Checkpointers of one rank are considered; without it, only the others.
    """
    with _lock:
        return {key[0]: checkpointer.resumed for key, (checkpointer, _) in _opened.items() if key[3] == alone}


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "no settings"


def forget_checkpointers() -> None:
    """Ends the sessions of all shared Checkpointers without waiting. Their staged steps are saved all the same."""
    with _lock:
        ended = [checkpointer for checkpointer, _ in _opened.values()]
        _opened.clear()
    for checkpointer in ended:
        checkpointer.leave()


def _after_fork() -> None:
    """Lets a forked child make Checkpointers of its own with ``alone``. The others refuse the child: the ranks do not know it."""
    global _lock
    _lock = threading.RLock()
    for key in [key for key in _opened if key[3]]:
        del _opened[key]


atexit.register(forget_checkpointers)
os.register_at_fork(after_in_child=_after_fork)
