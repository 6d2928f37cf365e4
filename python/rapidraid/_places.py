"""Places in the file system of fsspec: ``JOB/FOLDER/PATH``, and lists of what is there."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._jobs import SCHEME, parse_step_name
from .errors import InvalidError, NoFileError

#: A folder whose name contains this is temporary: it becomes a step when it is renamed to one.
TEMPORARY = "tmp"
#: The form of a path, for hints.
FORM = f'write "{SCHEME}JOB/STEP/FILE", as in "{SCHEME}gpt/100/model.pt"'


@dataclass(frozen=True)
class Place:
    """The parts of a path."""

    job: str
    #: The name of the folder below the job: ``step-N``, or that of a temporary folder. Empty for the job itself.
    folder: str
    #: The path below the folder. Empty for the folder itself.
    path: str
    #: The step, or ``None`` for a job or a temporary folder.
    step: int | None

    def __str__(self) -> str:
        return "/".join(part for part in (self.job, self.folder, self.path) if part)


def parse_place(path: str) -> Place:
    """Returns the parts of a path without its scheme.

    Raises:
        InvalidError: The path has another form than ``JOB``, ``JOB/STEP`` or ``JOB/STEP/FILE``, or names no job.

    """
    job, _, rest = path.strip("/").partition("/")
    folder, _, inside = rest.partition("/")
    if not job:
        raise InvalidError(f"{SCHEME} has no list of jobs", f"{FORM}; `rapidraid ls` lists the jobs")
    if job in (".", "..") or (inside and not {"", ".", ".."}.isdisjoint(inside.split("/"))):
        raise InvalidError(f"{path!r} names no file", FORM)
    try:
        is_temporary = TEMPORARY in folder.lower()
        name = parse_step_name(job if is_temporary else f"{job}/{folder}")
    except InvalidError:
        raise InvalidError(f"{path!r} names no step", FORM) from None
    return Place(name.job, folder if is_temporary or name.step is None else f"step-{name.step}", inside, name.step)


def describe_folder(name: str) -> dict[str, Any]:
    """Returns what ``info`` says of a folder."""
    return {"name": name, "size": 0, "type": "directory"}


def describe(name: str, path: Path) -> dict[str, Any]:
    """Returns what ``info`` says of a file or folder of the spool."""
    return describe_folder(name) if path.is_dir() else {"name": name, "size": path.stat().st_size, "type": "file"}


def list_all(name: str, place: Place, sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Returns a folder of a committed step and all below it, or a file. Raises :class:`NoFileError` if there is neither."""
    if place.path in sizes:
        return {name: {"name": name, "size": sizes[place.path], "type": "file"}}
    below = f"{place.path}/" if place.path else ""
    found = {name: describe_folder(name)}
    for path, size in sizes.items():
        if path.startswith(below):
            *parents, _ = path[len(below) :].split("/")
            for parent in itertools.accumulate(parents, "{}/{}".format):
                found[f"{name}/{parent}"] = describe_folder(f"{name}/{parent}")
            entry = f"{name}/{path[len(below) :]}"
            found[entry] = {"name": entry, "size": size, "type": "file"}
    if place.path and len(found) == 1:
        raise NoFileError(f"there is no {place}", "`ls` lists the files of a step")
    return found
