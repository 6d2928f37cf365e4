"""Storage for ``torch.distributed.checkpoint`` (DCP).

One argument turns it on in a script that calls DCP:

    >>> import torch.distributed.checkpoint as dcp
    >>> from rapidraid.torch import Reader, Writer
    >>> dcp.load(state, checkpoint_id="gpt", storage_reader=Reader())
    >>> dcp.save(state, checkpoint_id="gpt/100", storage_writer=Writer())

:func:`async_save` stages a step by its name before it returns, so the step survives the death of the trainer from then
on. ``dcp.async_save`` tells the writer the name later, in its upload thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from ._dcp import Mappings, flatten_objects, flatten_plan, layout_of_items, layout_of_leaves, metadata_of, read_plan
from ._jobs import StepName, parse_step_name, resumed_steps, shared_checkpointer
from ._load import Names
from ._load import Reader as StepReader
from .checkpointer import Checkpointer
from .errors import InvalidError, NotFoundError
from .state import Flat


class _Door:
    """The job and step that DCP works on, and the Checkpointer that does the work."""

    def __init__(
        self, checkpoint_id: str | os.PathLike[str] | None, checkpointer: Checkpointer | None, settings: Mapping[str, Any]
    ) -> None:
        if checkpointer is not None and settings:
            raise InvalidError("a Checkpointer and settings", "pass the settings to the Checkpointer")
        self._given = checkpointer
        self._settings = dict(settings)
        self.checkpoint_id = checkpoint_id
        self._name = None if checkpoint_id is None else parse_step_name(checkpoint_id)
        #: What the trainer has loaded of each job, if this is its copy in another process.
        self._resumed: dict[str, tuple[int | None, int | None]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save or a load. Without an id, the one of the constructor counts."""
        if checkpoint_id is not None:
            self._name = parse_step_name(checkpoint_id)
            self.checkpoint_id = checkpoint_id

    @property
    def name(self) -> StepName:
        """The job and the step."""
        if self._name is None:
            raise InvalidError("no checkpoint_id", 'pass checkpoint_id="JOB/STEP"')
        return self._name

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer of the job."""
        if self._given is None:
            found = shared_checkpointer(self.name.job, self._settings)
            found._go_on_from(*self._resumed.get(self.name.job, (None, None)))
            return found
        if self._given.job != self.name.job:
            raise InvalidError(f"checkpoint_id {self.name} with the Checkpointer of {self._given.job}", "use one job")
        return self._given

    def check_rank(self, rank: int | None) -> None:
        """Raises :class:`InvalidError` if DCP counts ranks in another way than the Checkpointer."""
        if rank is not None and rank != self.checkpointer.rank:
            raise InvalidError(
                f"rank {self.checkpointer.rank} is rank {rank} for DCP",
                "pass alone=True if DCP has no_dist=True, or the same process group as group=",
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether an id names a step."""
        try:
            parse_step_name(checkpoint_id)
        except InvalidError:
            return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        if self._given is not None:
            raise InvalidError(
                "a Checkpointer cannot be used in another process",
                "pass its settings to the Writer instead, or AsyncCheckpointerType.THREAD",
            )
        return {**self.__dict__, "_resumed": resumed_steps()}


class Writer(_Door, StorageWriter, AsyncStager):
    """Saves what DCP plans: a ``StorageWriter``, and the ``AsyncStager`` of ``dcp.async_save``.

    DCP's own coordinator only learns that a rank takes part: the plan stays on its rank, and the ranks compare it only when
    it changes. ``dcp.save`` returns when the step is committed.

    Args:
        checkpoint_id: ``JOB/STEP``. DCP's argument of the same name overrides it.
        checkpointer: The Checkpointer to save with. Default: the one of this process for the job.
        commit_timeout: The maximum time for a commit, in seconds.
        settings: Arguments of :class:`Checkpointer`, if none is given.

    """

    _synchronize_after_execute = False

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        checkpointer: Checkpointer | None = None,
        commit_timeout: float = 3600.0,
        **settings: Any,
    ) -> None:
        super().__init__(checkpoint_id, checkpointer, settings)
        self.commit_timeout = commit_timeout
        self._kept = _KeptPlan()
        self._uses_collectives = True
        self._stager: DefaultStager | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank."""
        self._uses_collectives = bool(kwargs.get("use_collectives", True))
        if self.name.step is None:
            raise InvalidError(f"checkpoint_id {self.name} has no step", 'write "JOB/STEP"')
        self.check_rank(kwargs.get("rank"))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keeps the items of the plan. Returns a plan without items, so that the ranks have nothing to gather."""
        self._kept.keep(plan)
        return SavePlan([], planner_data={}, usable=plan.usable)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Stages the kept items as the step, and waits until the step is committed."""
        step = self.name.step
        assert step is not None
        checkpointer = self.checkpointer
        try:
            self._kept.save(checkpointer, step, planner, self._uses_collectives)
        finally:
            self._is_copied.set()
        checkpointer.wait(step, self.commit_timeout)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Notes the step in the metadata that DCP returns. The step is committed by now."""
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta:
        """Returns the id of the checkpoint."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies a state in the host's memory, for ``dcp.async_save``. Returns the copy.

        Waits until the upload thread has read the copy of the save before.
        """
        if not self._is_copied.wait(self.commit_timeout):
            raise InvalidError("the save before is not staged yet", "wait for its future first")
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = self._stager.stage(state_dict)
        assert isinstance(copied, dict)
        self._is_copied.clear()
        return copied

    def synchronize_staging(self) -> None:
        """Does nothing: the copy is complete when :meth:`stage` returns."""
        return None

    def close(self) -> None:
        """Releases the copy."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_kept": _KeptPlan(), "_stager": None, "_is_copied": None}
        # A process that gets the copy reads the same memory, at a time that this process does not see.
        self._stager = None
        self._is_copied.set()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._is_copied = threading.Event()
        self._is_copied.set()


class _KeptPlan:
    """The items of the last plan of this rank."""

    def __init__(self) -> None:
        self.items: list[WriteItem] = []
        self.mappings: Mappings = {}

    def keep(self, plan: SavePlan) -> None:
        """Keeps the items. A planner that caches plans sends none if they are those of the save before."""
        if plan.usable:
            self.items, self.mappings = plan.items, plan.planner_data or {}

    def save(self, checkpointer: Checkpointer, step: int, planner: SavePlanner, uses_collectives: bool) -> None:
        """Stages the items as a step. Prepares memory before if they have changed on any rank."""

        def flat() -> Flat:
            return flatten_plan(self.items, self.mappings, planner)

        checkpointer._prepare_if_changed(layout_of_items(self.items, self.mappings), flat, uses_collectives)
        checkpointer._save_flat(step, flat)


class Reader(_Door, StorageReader):
    """Loads a step through DCP, verified, on any number of ranks.

    Args:
        checkpoint_id: ``JOB/STEP``, or ``JOB`` for the step to resume from. DCP's argument of the same name overrides it.
        checkpointer: The Checkpointer to load with. Default: the one of this process for the job.
        cast: Whether to convert element types where they differ.
        settings: Arguments of :class:`Checkpointer`, if none is given.

    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        checkpointer: Checkpointer | None = None,
        cast: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(checkpoint_id, checkpointer, settings)
        self.cast = cast
        self._step: int | None = None

    def newest(self, job: str | None = None) -> int | None:
        """Returns the newest committed step of a job, by default of the Reader's. Returns ``None`` if there is none."""
        if job is not None:
            self.reset(job)
        return self.checkpointer.latest()

    def read_metadata(self, *args: Any) -> Metadata:
        """Returns the names of the step. Each tensor is one chunk, however many ranks have saved it."""
        checkpointer = self.checkpointer

        def look(reader: StepReader) -> tuple[int, Names, None]:
            return reader.loaded.number, Names(reader.loaded), None

        found = checkpointer._look_into(self.name.step, look)
        if found is None:
            raise NotFoundError(f"{self.name.job} has no step", "save one first")
        self._step, names, _ = found
        return metadata_of(names, checkpointer.rank, StorageMeta(checkpoint_id=f"{self.name.job}/{self._step}"))

    @property
    def step(self) -> int:
        """The step that :meth:`read_metadata` has found."""
        assert self._step is not None
        return self._step

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a load on this rank."""
        self.check_rank(kwargs.get("rank"))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keeps the items. Returns a plan without items, so that the ranks have nothing to gather."""
        self._plan = plan
        return LoadPlan([])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads the items of the plan. The launch continues from the step."""
        checkpointer = self.checkpointer
        items = self._plan.items

        def read(reader: StepReader) -> str | None:
            return read_plan(reader, items, planner, checkpointer.rank, cast=self.cast, allow_pickle=checkpointer.allow_pickle)

        checkpointer._load_with(self._step, read, table_first=True)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def async_save(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    writer: Writer | None = None,
    **settings: Any,
) -> Future[None]:
    """Stages a state as ``JOB/STEP`` before it returns. Returns a future that is done when the step is committed.

    From the return on the step survives the death of the trainer, which ``dcp.async_save`` cannot promise: it names the
    step only later, in its upload thread.

    Args:
        state_dict: As for ``dcp.save``.
        checkpoint_id: ``JOB/STEP``.
        planner: A planner of DCP. Default: a ``DefaultSavePlanner``.
        writer: The writer to save with. Default: a new one.
        settings: Arguments of that new :class:`Writer`.

    """
    if writer is not None and settings:
        raise InvalidError("a Writer and settings", "pass the settings to the Writer")
    writer = writer or Writer(**settings)
    writer.reset(checkpoint_id)
    checkpointer = writer.checkpointer
    writer.set_up_storage_writer(checkpointer.rank == 0)
    step = writer.name.step
    assert step is not None
    plain = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
    used = planner or DefaultSavePlanner()
    used.set_up_planner(plain, writer.storage_meta(), checkpointer.rank == 0)
    flat = flatten_objects(used) if planner is None and isinstance(used, DefaultSavePlanner) else None
    # Ranks with and without such a state prepare alike, so they may take different ways here.
    if flat is None:
        writer.prepare_local_plan(used.create_local_plan())
        writer._kept.save(checkpointer, step, used, uses_collectives=True)
    else:
        found = flat
        checkpointer._prepare_if_changed(layout_of_leaves(found), lambda: found, together=True)
        checkpointer._save_flat(step, lambda: found)
    future: Future[None] = Future()

    def wait() -> None:
        try:
            checkpointer.wait(step, writer.commit_timeout)
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where the future is asked
            future.set_exception(error)

    threading.Thread(target=wait, name=f"rapidraid commit {step}", daemon=True).start()
    return future


__all__ = ["Reader", "Writer", "async_save"]
