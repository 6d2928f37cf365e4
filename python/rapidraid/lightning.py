"""Storage for Lightning's ``Trainer``.

One plug-in turns it on, and one argument resumes from the newest step, or begins anew if there is none:

    >>> from rapidraid.lightning import RapidraidCheckpointIO
    >>> trainer = Trainer(plugins=[RapidraidCheckpointIO("gpt")])
    >>> trainer.fit(model, ckpt_path="rapidraid://gpt")

Lightning names checkpoints by paths. In place of each file stands a pointer of one line, which names the step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from fsspec.core import url_to_fs
from torch.multiprocessing.reductions import StorageWeakRef

from ._jobs import SCHEME, parse_step_name, shared_checkpointer
from ._leaves import is_array, is_tensor
from ._tree import flatten_tree, load_tree
from .checkpointer import Checkpointer
from .errors import ExistsError, InvalidError, NotFoundError, RapidraidError

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
else:
    # The package of the older name has its own base class, which its Trainer wants.
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

log = logging.getLogger("rapidraid")

#: The parts of Lightning's dict that a Checkpointer or DCP finds tensor by tensor.
WHOLE = ("state_dict", "optimizer_states")
#: The maximum number of elements of a tensor by which a change since its save is noticed.
SAMPLE = 64
#: The maximum length of a pointer, in bytes. A longer file is a checkpoint of Lightning's own.
MAX_POINTER_BYTES = 256
_VERSION = "pytorch-lightning_version"
#: The entry of a file that names the job to which its step belongs.
_JOB = "rapidraid_job"
#: The names that ModelCheckpoint gives to its newest checkpoint. With ``filename=``, others may begin with the same word.
_LAST = re.compile(r"last(-v[0-9]+)?\.ckpt")

_Path = str | os.PathLike[str]


class _Nothing(dict[str, Any]):
    """The checkpoint of a job without a step. Lightning restores nothing from it, because it is false."""

    def __bool__(self) -> bool:
        return False


class RapidraidCheckpointIO(TorchCheckpointIO):
    """Saves the steps of a job for Lightning's ``Trainer``, on rank 0, and loads them on all ranks.

    ``save_checkpoint`` returns when the step is staged: it survives the death of the trainer from then on. ``teardown``
    waits for the commits.

    Args:
        job: The job.
        commit_timeout: The maximum time for a commit, in seconds.
        settings: Arguments of :class:`Checkpointer`, such as ``config`` and ``allow_pickle``.

    """

    def __init__(self, job: str, *, commit_timeout: float = 3600.0, **settings: Any) -> None:
        if "group" in settings or "alone" in settings:
            raise InvalidError("group or alone for Lightning", "leave them out: Lightning saves on rank 0 alone")
        if settings.get("when_full") == "skip":
            raise InvalidError('when_full="skip" for Lightning', "leave it out: Lightning removes an older step for each that it saves")
        self.job = parse_step_name(job).job
        self.commit_timeout = commit_timeout
        self._settings = dict(settings)
        #: The steps of the paths in the folders that this process has saved to, loaded from or removed from.
        self._steps: dict[str, int] = {}
        self._known: set[str] = set()
        #: The last saved step, its parts, and the marks of its weights.
        self._last: tuple[int, frozenset[Any], dict[str, Any]] | None = None
        #: The step of the file that was loaded, if it was saved as a file of this job.
        self._resumed_file: int | None = None
        #: Steps without a path that stay until a newer one is staged: they may be the newest.
        self._unnamed: set[int] = set()
        self._removals: list[threading.Thread] = []
        self._failures: list[RapidraidError] = []

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer that saves. It has one rank, because Lightning saves on rank 0."""
        return shared_checkpointer(self.job, {**self._settings, "alone": True})

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _Path, storage_options: Any | None = None) -> None:
        """Stages a checkpoint as the step that it names as ``global_step``, and writes a pointer to it.

        A step is stored once: a second path for it gets a pointer only. If the weights have changed since the step was
        saved, as stochastic weight averaging changes them, the second checkpoint becomes a file. So does a dict without
        ``global_step``, as some launchers pass it between processes.

        Raises:
            InvalidError: The step is stored already, without parts that this checkpoint has.
            ExistsError: The step is the one that was loaded, and the weights have changed since.
            RapidraidError: An earlier save has failed.

        """
        self._raise_failure()
        step = checkpoint.get("global_step")
        if type(step) is not int:
            log.warning("%s has no global_step: it is saved as a file, not as a step", path)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        parts, marks = frozenset(checkpoint), _marks(checkpoint.get("state_dict"))
        if self._last is None or self._last[0] != step:
            resumed = self._resumed_file
            if resumed is not None and not self.checkpointer.has_saved():
                self.checkpointer.go_on_from(resumed, resumed)
            if not self.checkpointer.has_saved() and step == self.checkpointer.resumed[0]:
                self._check_same(step, checkpoint)
            else:
                self.checkpointer.save_flat(step, lambda: flatten_tree(checkpoint, WHOLE), raise_earlier=True)
            self._last = (step, parts, marks)
            self._learn_of(checkpoint)
            for unnamed in self._unnamed - {step}:
                self._unnamed.discard(unnamed)
                self._remove_unnamed(unnamed)
        elif self._has_changed(self._last, checkpoint, marks):
            log.warning(
                "%s: the weights are not known to be those of step %d of %s: this checkpoint is saved as a file, not as a step",
                path,
                step,
                self.job,
            )
            fs, place = url_to_fs(os.fspath(path))
            # An earlier process may have written a pointer here, whose step has no path then.
            self._learn(fs, os.path.dirname(place))
            super().save_checkpoint({**checkpoint, _JOB: self.job}, path, storage_options)
            before = self._steps.pop(place, None)
            # This step stays even if no path names it: a run that loads the file continues from it.
            if before is not None and before != step:
                self._remove_unnamed(before)
            return
        elif not parts <= self._last[1]:
            missing = ", ".join(sorted(str(key) for key in parts - self._last[1]))
            raise InvalidError(
                f"step {step} of {self.job} is saved without {missing}", "put the ModelCheckpoint with save_weights_only=True last"
            )
        self._point(path, step)

    def _has_changed(self, last: tuple[int, frozenset[Any], dict[str, Any]], checkpoint: dict[str, Any], marks: dict[str, Any]) -> bool:
        """Returns whether a checkpoint has other weights than the last saved step, or cannot be compared with it."""
        step, parts, before = last
        if "state_dict" in checkpoint and marks == before:
            return False
        try:
            is_same = self._has_weights_of(step, checkpoint)
        except RapidraidError as error:
            log.warning("step %d of %s cannot be compared: %s", step, self.job, error)
            return True
        if is_same:
            self._last = (step, parts, marks)
        return not is_same

    def _has_weights_of(self, step: int, checkpoint: dict[str, Any]) -> bool:
        """Returns whether a step has the ``state_dict`` of a checkpoint, or all that is in it if it has none."""
        found = load_tree(self.checkpointer, step)
        stored = {} if found is None else found[1]
        names = ["state_dict"] if "state_dict" in checkpoint else list(checkpoint)
        return all(name in stored and _is_same(stored[name], checkpoint[name]) for name in names)

    def _check_same(self, step: int, checkpoint: dict[str, Any]) -> None:
        """Raises :class:`ExistsError` unless a checkpoint has the weights of the step that was loaded."""
        if "state_dict" in checkpoint and not self._has_weights_of(step, checkpoint):
            raise ExistsError(f"step {step} of {self.job} is saved already, with other weights", "save to another job, or train on first")

    def _point(self, path: _Path, step: int) -> None:
        """Writes a pointer in place of a checkpoint's file. The step that the old pointer named is removed if no other path names it."""
        fs, place = url_to_fs(os.fspath(path))
        self._learn(fs, os.path.dirname(place))
        before = self._steps.get(place)
        fs.makedirs(os.path.dirname(place), exist_ok=True)
        fs.pipe_file(place, f"{SCHEME}{self.job}/{step}\n".encode())
        self._steps[place] = step
        self._unnamed.discard(step)
        if before is not None and before != step:
            self._remove_unnamed(before)

    def _learn(self, fs: Any, folder: str) -> None:
        """Reads the pointers of a folder once: an earlier process has written some of them."""
        if folder in self._known:
            return
        for info in fs.ls(folder, detail=True) if fs.isdir(folder) else []:
            if info["type"] == "file" and not info.get("islink"):
                step = self._read_pointer(fs, info["name"])
                if step is not None:
                    self._steps[fs._strip_protocol(info["name"])] = step
        self._known.add(folder)

    def _learn_of(self, checkpoint: Mapping[str, Any]) -> None:
        """Reads the pointers in the folders of all ModelCheckpoints, of which each has its folder in the checkpoint."""
        for state in checkpoint.get("callbacks", {}).values():
            folder = state.get("dirpath") if isinstance(state, Mapping) else None
            if isinstance(folder, str):
                self._learn(*url_to_fs(folder))

    def _read_pointer(self, fs: Any, place: str) -> int | None:
        """Returns the step that a file names, or ``None`` if it is no pointer of this job."""
        if fs.size(place) > MAX_POINTER_BYTES:
            return None
        content = fs.cat_file(place)
        if not content.startswith(SCHEME.encode()):
            return None
        try:
            name = parse_step_name(content.decode().strip())
        except (InvalidError, UnicodeDecodeError):
            log.warning("%s is no pointer to a step: %r", place, content)
            return None
        return name.step if name.job == self.job else None

    def load_checkpoint(self, path: _Path, map_location: Any | None = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns a checkpoint, with its tensors in the host's memory unless ``map_location`` says otherwise.

        ``rapidraid://JOB`` and ``last.ckpt`` are the step to resume from, on which all ranks agree. If the job has no
        step, the checkpoint is empty. A file that is no pointer is loaded as Lightning does.

        Args:
            path: ``rapidraid://JOB``, ``rapidraid://JOB/STEP``, or a path that was saved.
            map_location: As for ``torch.load``.
            weights_only: ``True`` refuses pickles, whatever ``allow_pickle`` says.

        Raises:
            NotFoundError: There is no such path or step.

        """
        text = os.fspath(path)
        step: int | None
        if text.startswith(SCHEME):
            name = parse_step_name(text)
            if name.job != self.job:
                raise InvalidError(f"{name} with the plug-in of {self.job}", f'use RapidraidCheckpointIO("{name.job}")')
            step = name.step
        else:
            fs, place = url_to_fs(text)
            if not fs.exists(place):
                raise NotFoundError(f"there is no {text}", f'pass ckpt_path="{SCHEME}{self.job}" to resume from the newest step')
            self._learn(fs, os.path.dirname(place))
            step = self._read_pointer(fs, place)
            if step is None:
                loaded: dict[str, Any] = super().load_checkpoint(path, map_location or _keep, weights_only)
                if isinstance(loaded, dict) and loaded.pop(_JOB, None) == self.job:
                    # The file belongs to a step of this job, so the next save continues from that step.
                    self._resumed_file = loaded["global_step"]
                return loaded
            if _LAST.fullmatch(os.path.basename(place)):
                # A kill may come between a save and its pointer.
                step = None
        if step is None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # Lightning loads on all ranks. Together they wait for what is staged, and choose what all hosts can read.
            with Checkpointer(self.job, **self._settings) as together:
                agreed = together.look_into(None, lambda reader: (reader.loaded.number, None))
            step = None if agreed is None else agreed[0]
        found = load_tree(self.checkpointer, step, allow_pickle=False if weights_only else None)
        if found is None:
            log.warning("%s has no step: nothing is restored", self.job)
            return _Nothing({_VERSION: _version()})
        # A file that was loaded before may have been for `validate` or `test`.
        self._resumed_file = None
        return cast(dict[str, Any], _to_location(found[1], map_location))

    def remove_checkpoint(self, path: _Path) -> None:
        """Removes a path, and its step if no other path names it.

        The step stays until a newer one is committed. The newest step stays until another one is staged, or ``teardown``.
        """
        fs, place = url_to_fs(os.fspath(path))
        self._learn(fs, os.path.dirname(place))
        if fs.exists(place):
            fs.rm(place, recursive=True)
        step = self._steps.pop(place, None)
        if step is not None:
            self._remove_unnamed(step)

    def _remove_unnamed(self, step: int) -> None:
        """Removes a step that no path names, once the newest one is committed. The newest step stays until another one is staged."""
        if step in self._steps.values():
            return
        if self._last is None or step == self._last[0]:
            self._unnamed.add(step)
            return
        self._start_removal(step, self._last[0])

    def _start_removal(self, step: int, newest: int) -> None:
        checkpointer = self.checkpointer

        def remove() -> None:
            try:
                if checkpointer.has_saved(newest):
                    checkpointer.wait_for(newest, self.commit_timeout)
            except RapidraidError as error:
                self._failures.append(error)
                return
            try:
                checkpointer.remove(step)
            except NotFoundError:
                pass  # ``keep`` or the policy of the cluster has removed it.
            except RapidraidError as error:
                log.warning("step %d of %s stays: %s", step, self.job, error)

        thread = threading.Thread(target=remove, name=f"rapidraid remove {step}", daemon=True)
        self._removals = [*(other for other in self._removals if other.is_alive()), thread]
        thread.start()

    def _raise_failure(self) -> None:
        """Raises the first failure of a save that a removal has waited for."""
        if self._failures:
            raise self._failures.pop(0)

    def teardown(self) -> None:
        """Waits until the saved steps are committed. Removes those without a path. Raises the failures of their saves."""
        if self._last is not None:
            self.checkpointer.wait(timeout=self.commit_timeout)
            newest = self._last[0]
            if newest in self._unnamed and newest not in self._steps.values() and self.checkpointer.has_saved(newest):
                self._unnamed.discard(newest)
                self._last = None
                self._start_removal(newest, newest)
        for thread in self._removals:
            thread.join(self.commit_timeout)
        self._removals.clear()
        self._raise_failure()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_removals": [], "_last": None}


def _keep(storage: Any, _location: str) -> Any:
    return storage


def _version() -> str:
    if "lightning.pytorch" in sys.modules:
        return str(sys.modules["lightning.pytorch"].__version__)
    return str(sys.modules["pytorch_lightning"].__version__)


def _marks(state: Any) -> dict[str, Any]:
    """Returns a mark for each entry of a state_dict, by which a change of the entry is noticed.

    The mark of a tensor is its storage, the version that torch counts, and a sample. A change through ``.data`` counts
    nothing: it is missed if no element of the sample changes.
    """
    marks: dict[str, Any] = {}
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if value is None or type(value) in (bool, int, float, str, bytes):
            marks[name] = value
            continue
        # The mark of anything else equals no other, so the contents are compared.
        marks[name] = object()
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
            with contextlib.suppress(Exception):
                flat = value.detach().reshape(-1)
                sample = flat[:: max(1, -(-flat.numel() // SAMPLE))].cpu().contiguous().view(torch.uint8).numpy().tobytes()
                # While the reference lives, no other storage equals it.
                storage = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
                marks[name] = (storage, value.storage_offset(), value._version, sample)
    return marks


def _is_same(stored: Any, own: Any) -> bool:
    """Returns whether two values of a state_dict are equal: tensors and arrays by their bytes, so that NaN equals itself."""
    if is_tensor(stored) and is_tensor(own):
        if stored.shape != own.shape or stored.dtype != own.dtype:
            return False
        one, other = (value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1) for value in (stored, own))
        return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))
    if is_array(stored) and is_array(own):
        return bool(stored.shape == own.shape and stored.dtype == own.dtype and stored.tobytes() == own.tobytes())
    if isinstance(stored, dict) and isinstance(own, dict):
        return stored.keys() == own.keys() and all(_is_same(value, own[key]) for key, value in stored.items())
    if isinstance(stored, (list, tuple)) and type(stored) is type(own):
        return len(stored) == len(own) and all(_is_same(value, other) for value, other in zip(stored, own, strict=True))
    if any(is_tensor(value) or is_array(value) for value in (stored, own)):
        return False
    return bool(stored == own)


def _to_location(value: Any, where: Any) -> Any:
    """Returns a nested dict with its tensors where ``map_location`` of ``torch.load`` would put them."""
    if where is None:
        return value
    if isinstance(value, dict):
        return {key: _to_location(item, where) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_location(item, where) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(where, Mapping):
        return value.to(where.get("cpu", "cpu"))
    if not callable(where):
        return value.to(where)
    storage = where(value.untyped_storage(), "cpu")
    if storage is None or storage.device.type == "cpu":
        return value
    return torch.empty(0, dtype=value.dtype, device=storage.device).set_(storage, 0, value.shape, value.stride())


__all__ = ["RapidraidCheckpointIO"]
