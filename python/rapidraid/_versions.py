"""The versions of frameworks whose interfaces may still change."""

from __future__ import annotations

import importlib.metadata

from .errors import InvalidError


def check_version(package: str, tested: str) -> None:
    """Raises :class:`InvalidError` if another version of a package is installed than the one that was tested."""
    found = importlib.metadata.version(package)
    if found.partition("+")[0] != tested:
        raise InvalidError(
            f"{package} {found} is installed, and rapidraid.{package} is tested with {tested}",
            f"install {package}=={tested}, or a rapidraid that is tested with {found}",
        )
