"""The exceptions of the package: one tree, with one class for each kind of error.

Every exception has a ``hint``, which says what to do next where the message does not.
"""

from __future__ import annotations


class RapidraidError(Exception):
    """The base of all exceptions of the package."""

    #: Advice on what to do next; may be empty.
    hint: str

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[type[RapidraidError], tuple[str, str]]:
        return type(self), (self.message, self.hint)


class InvalidError(RapidraidError, ValueError):
    """The request itself is wrong. Only changing it helps."""


class ForkedError(InvalidError):
    """A forked child used the Checkpointer of its parent."""


class NotFoundError(RapidraidError, LookupError):
    """There is no such step, name or segment, or a file or program that the call needs is missing."""


class NoFileError(NotFoundError, FileNotFoundError):
    """There is no such file or folder."""


class ExistsError(RapidraidError, FileExistsError):
    """The step, or the target of an export, exists already, or another process is working on it."""


class DeniedError(RapidraidError, PermissionError):
    """The staging daemon or the cluster refuses access to this process."""


class FencedError(RapidraidError):
    """A newer launch writes for the job. This process should end."""


class UnavailableError(RapidraidError, ConnectionError):
    """The other side cannot be reached, or lost the step that was being filled. A retry can succeed."""


class NoDaemonError(UnavailableError):
    """No staging daemon answers on this host."""


class StaleError(UnavailableError):
    """The step was replaced in memory while it was being loaded. Load again."""


class BusyError(RapidraidError):
    """Memory is short at the moment, or another process is taking a folder that the call needs. Try again later."""


class DeadlineError(RapidraidError, TimeoutError):
    """A deadline passed."""


class CorruptError(RapidraidError):
    """Bytes do not match their hashes.

    After a load that raises it, the state may hold a part of the step, and damaged bytes of it: load another step, or
    initialise the state again, before anything uses it.
    """


class LostError(RapidraidError):
    """Too much data is lost to continue."""


class SystemError_(RapidraidError, OSError):
    """A call to the operating system failed."""

    def __init__(self, message: str, hint: str = "") -> None:
        RapidraidError.__init__(self, message, hint)


class InternalError(RapidraidError):
    """A defect of rapidraid. Please report it with its message."""


_KINDS: dict[str, type[RapidraidError]] = {
    "invalid": InvalidError,
    "forked": ForkedError,
    "not_found": NotFoundError,
    "exists": ExistsError,
    "denied": DeniedError,
    "fenced": FencedError,
    "unavailable": UnavailableError,
    "no_daemon": NoDaemonError,
    "stale": StaleError,
    "busy": BusyError,
    "timeout": DeadlineError,
    "corrupt": CorruptError,
    "lost": LostError,
    "io": SystemError_,
    "internal": InternalError,
}

#: The kinds in the order of their codes on the wire, from 1.
_CODES = [
    "invalid",
    "not_found",
    "exists",
    "denied",
    "fenced",
    "unavailable",
    "busy",
    "timeout",
    "corrupt",
    "lost",
    "io",
    "internal",
]


def of_kind(kind: str, message: str, hint: str) -> RapidraidError:
    """Returns the exception for the name of an error kind."""
    return _KINDS.get(kind, InternalError)(message, hint)


def of_code(code: int, message: str, hint: str) -> RapidraidError:
    """Returns the exception for an error kind's code on the wire."""
    kind = _CODES[code - 1] if 1 <= code <= len(_CODES) else "internal"
    return of_kind(kind, message, hint)
