"""Storage for ``transformers.Trainer``. What :mod:`rapidraid.accelerate` has is here too.

One class turns it on, and one argument resumes from the newest step, or begins anew if there is none:

    >>> from rapidraid.huggingface import RapidraidTrainer
    >>> trainer = RapidraidTrainer(job="gpt", model=model, args=args, train_dataset=data)
    >>> trainer.train(resume_from_checkpoint="rapidraid://gpt")

The model, the optimizer, the scheduler and the scaler are stored by name. The small files of a checkpoint
(``trainer_state.json``, ``rng_state.pth``) are stored as the framework writes them.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ._jobs import SCHEME, parse_step_name, refuse_skip, shared_checkpointer
from ._leaves import Flat
from ._match import LoadChoices, load_into
from ._tree import FILES, flatten_first, read_files, with_files
from .accelerate import check_kind, load_state, register, save_state
from .checkpointer import Checkpointer
from .errors import CorruptError, InvalidError, NotFoundError, RapidraidError

log = logging.getLogger("rapidraid")

#: The label of the step with the best metric. It keeps the step from being removed.
BEST = "best"
_FILES = str(FILES[1])


def _read_folder(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if Path(name).name != name:
            raise InvalidError(f"the step has a file {name!r}", "a name of a file has no folder")
        (folder / name).write_bytes(content)


def _with_keep(settings: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Returns settings in which ``keep`` is ``save_total_limit`` of the training arguments, unless they have a ``keep``."""
    limit = args.save_total_limit
    return {**({"keep": limit} if limit is not None and limit > 0 else {}), **settings}


def _load(checkpointer: Checkpointer, state: Mapping[Any, Any], step: int) -> None:
    """Loads all of a step but its files. The launch continues from it."""
    checkpointer.load(state, step, include=lambda name: not name.startswith(f"{_FILES}/"))


class RapidraidTrainer(Trainer):
    """``transformers.Trainer`` without a local copy of its checkpoints.

    ``class Mine(RapidraidTrainer, SFTTrainer)`` does the same for another subclass of ``Trainer``.

    Args:
        args: As for ``Trainer``.
        job: The job.
        settings: Arguments of :class:`Checkpointer`. ``keep`` is by default ``save_total_limit`` of the training arguments.
        commit_timeout: The maximum time for a commit, in seconds.
        kwargs: As for ``Trainer``.

    """

    def __init__(
        self, *args: Any, job: str, settings: Mapping[str, Any] | None = None, commit_timeout: float = 3600.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._job = parse_step_name(job).job
        refuse_skip(settings or {})
        self._settings = _with_keep(settings or {}, self.args)
        self._commit_timeout = commit_timeout
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise InvalidError(f'hub_strategy="{self.args.hub_strategy}" needs files', 'pass hub_strategy="end"')
        #: The step that this run resumes from, and the names that it has.
        self._resumed: tuple[int, set[str]] | None = None
        self._last: int | None = None
        #: The URL of the best step, if the step that this run resumes from knows one.
        self._best: str | None = None
        self._labelling: threading.Thread | None = None
        self._failure: RapidraidError | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer of the job."""
        return shared_checkpointer(self._job, self._settings)

    def _check_kind(self) -> None:
        version = getattr(getattr(self.accelerator.state, "fsdp_plugin", None), "fsdp_version", 2)
        if self.is_deepspeed_enabled or self.is_fsdp_xla_enabled or (self.is_fsdp_enabled and version != 2):
            raise InvalidError("DeepSpeed, XLA or FSDP 1 with RapidraidTrainer", "use DDP or FSDP 2, or save by the framework's own files")

    def _state(self) -> dict[str, Any]:
        """Returns the objects of the run, except its files."""
        self._check_kind()
        state = {"model": self.model_wrapped}
        if not self.args.save_only_model:
            state["optimizer"] = getattr(self.optimizer, "optimizer", self.optimizer)
            state["scheduler"] = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
            if getattr(self.accelerator, "scaler", None) is not None:
                state["scaler"] = self.accelerator.scaler
        return state

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as ``Trainer.train`` does, and waits until the last step is committed.

        ``rapidraid://JOB`` resumes from the newest step, or begins anew if there is none; ``rapidraid://JOB/STEP`` from
        that step. ``True`` resumes from the newest step.

        Raises:
            NotFoundError: There is no such step, or none for ``True``.

        """
        self._resumed = None
        # The last step of an earlier call must not be skipped in this one: the daemon refuses it.
        self._last = None
        with tempfile.TemporaryDirectory(prefix="rapidraid-") as folder:
            resume: str | bool | None = resume_from_checkpoint
            if resume is True or (isinstance(resume, str) and resume.startswith(SCHEME)):
                name = parse_step_name(f"{SCHEME}{self._job}" if resume is True else resume)
                if name.job != self._job:
                    raise InvalidError(f"{name} with the trainer of {self._job}", f'pass job="{name.job}"')
                found = read_files(self.checkpointer, name.step)
                if found is None and resume is True:
                    raise NotFoundError(f"{self._job} has no step", f'"{SCHEME}{self._job}" begins anew if there is none')
                resume = None if found is None else folder
                if found is not None:
                    step, files, names = found
                    if TRAINER_STATE_NAME not in files:
                        raise NotFoundError(f"step {step} of {self._job} has no state of a Trainer", "load it as it was saved")
                    # Trainer resumes from a folder, and looks for the best model there.
                    state = json.loads(files[TRAINER_STATE_NAME])
                    self._best = state.get("best_model_checkpoint")
                    files[TRAINER_STATE_NAME] = json.dumps({**state, "best_model_checkpoint": None}).encode()
                    _write_folder(Path(folder), files)
                    self._resumed = (step, names)
            done = super().train(resume, *args, **kwargs)
        self._join_label()
        self.checkpointer.wait(timeout=self._commit_timeout)
        return done

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # All is loaded at once, when the optimizer and the scheduler are made.
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        step, names = self._resumed
        _load(self.checkpointer, {key: value for key, value in self._state().items() if key in names}, step)
        self.state.best_model_checkpoint = self._best

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_scaler(checkpoint)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        if trial is not None or self.hp_search_backend is not None:
            raise InvalidError("a search of hyper-parameters with RapidraidTrainer", 'pass save_strategy="no"')
        if step == self._last:
            return
        self.store_flos()
        is_best = self.args.should_save and self.state.best_global_step == step
        if self.state.best_global_step == step:
            # An evaluation may find a best step that is not saved.
            self.state.best_model_checkpoint = f"{SCHEME}{self._job}/{step}"
        checkpointer = self.checkpointer
        failed: RapidraidError | None = None
        try:
            # A step that is not labelled yet could be removed when the next one is committed.
            self._join_label()
        except RapidraidError as error:
            failed = error

        def flat() -> Flat:
            if failed is not None:
                raise failed
            with tempfile.TemporaryDirectory(prefix="rapidraid-") as folder:
                if not self.args.save_only_model:
                    self._save_rng_state(folder)
                if self.args.should_save:
                    self._collect_callbacks()
                    self.state.save_to_json(f"{folder}/{TRAINER_STATE_NAME}")
                files = _read_folder(Path(folder))
            return with_files(flatten_first(self._state(), checkpointer.rank, checkpointer.world), files)

        checkpointer.save_flat(step, flat, raise_earlier=True)
        self._last = step
        if is_best:
            self._labelling = threading.Thread(target=self._label, args=(checkpointer, step), daemon=True)
            self._labelling.start()

    def _collect_callbacks(self) -> None:
        """Puts the states of the callbacks into the state of the run, as ``Trainer._save_checkpoint`` does."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(callback.state())
                else:
                    self.state.stateful_callbacks[name] = callback.state()

    def _label(self, checkpointer: Checkpointer, step: int) -> None:
        try:
            checkpointer.wait_for(step, self._commit_timeout)
        except RapidraidError as error:
            self._failure = error
            return
        try:
            checkpointer.label(step, BEST)
        except RapidraidError as error:
            log.warning("step %d of %s gets no label: %s", step, self._job, error)

    def _join_label(self) -> None:
        """Waits until the best step has its label. Raises if its save has failed."""
        if self._labelling is not None:
            self._labelling.join(self._commit_timeout)
            self._labelling = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not best.startswith(SCHEME):
            super()._load_best_model()
            return
        checkpointer, state = self.checkpointer, {"model": self.model_wrapped}
        step = parse_step_name(best).step
        choices = LoadChoices(True, lambda name: name.startswith("model/"), False, None, checkpointer.allow_pickle)
        with checkpointer.together():
            self._join_label()
            if step is not None and checkpointer.has_saved(step):
                # A step of several hosts can be read when it is committed.
                checkpointer.wait_for(step, self._commit_timeout)
            found = checkpointer.look_into(step, lambda reader: (load_into(reader, state, checkpointer.rank, checkpointer.world, choices),))
            if found is not None and found[0] is not None:
                raise CorruptError(f"{found[0]} of {best} is damaged", "load another step")


class RapidraidCallback(TrainerCallback):
    """Saves each checkpoint of a plain ``Trainer`` as a step too, after the local files.

    Only :class:`RapidraidTrainer` can resume from the step: no event of a callback comes early enough.

    Args:
        job: The job.
        commit_timeout: The maximum time for a commit at the end of the training, in seconds.
        settings: Arguments of :class:`Checkpointer`.

    """

    def __init__(self, job: str, *, commit_timeout: float = 3600.0, **settings: Any) -> None:
        self.job = parse_step_name(job).job
        self.commit_timeout = commit_timeout
        refuse_skip(settings)
        self.settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises :class:`InvalidError` for DeepSpeed, XLA and FSDP 1."""
        # All instances of this class have one state, which Trainer has set.
        check_kind(AcceleratorState())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stages the objects of the run, with the small files of the local checkpoint."""
        checkpointer = shared_checkpointer(self.job, _with_keep(self.settings, args))
        local = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        mine = "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"
        wanted = [mine, TRAINER_STATE_NAME] if checkpointer.rank == 0 else [mine]
        files = {name: (local / name).read_bytes() for name in wanted if (local / name).is_file()}
        objects = {"model": kwargs["model"]}
        if not args.save_only_model:
            objects["optimizer"] = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
            objects["scheduler"] = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])
        checkpointer.save_flat(
            state.global_step, lambda: with_files(flatten_first(objects, checkpointer.rank, checkpointer.world), files), raise_earlier=True
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits until the last step is committed."""
        shared_checkpointer(self.job, _with_keep(self.settings, args)).wait(timeout=self.commit_timeout)


__all__ = ["RapidraidCallback", "RapidraidTrainer", "load_state", "register", "save_state"]
