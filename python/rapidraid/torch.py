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

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from ._dcp import flatten_objects, flatten_plan, metadata_of, read_objects, read_plan
from ._jobs import StepName, parse_step_name, refuse_skip, resumed_steps, shared_checkpointer
from ._leaves import Flat
from ._reader import Names
from ._reader import Reader as StepReader
from .checkpointer import Checkpointer
from .errors import InvalidError, NotFoundError

try:
    from torch.distributed.checkpoint.staging import AsyncStager

    from ._shared_copies import SharedCopy, SharedStager
except ImportError as error:
    raise ImportError(f"rapidraid.torch needs torch 2.9 or later, tested with 2.15, and this is torch {torch.__version__}") from error

log = logging.getLogger("rapidraid")


class _Adapter:
    """The job and step that DCP works on, and the Checkpointer that does the work.

    A save or load of DCP runs in one thread from ``reset`` on, and several may run at once. So what belongs to one of
    them is kept by thread.
    """

    def __init__(
        self, checkpoint_id: str | os.PathLike[str] | None, checkpointer: Checkpointer | None, settings: Mapping[str, Any]
    ) -> None:
        if checkpointer is not None and settings:
            raise InvalidError("a Checkpointer and settings", "pass the settings to the Checkpointer")
        refuse_skip(settings if checkpointer is None else {"when_full": checkpointer.when_full})
        self._given = checkpointer
        self._settings = dict(settings)
        self._default_id = checkpoint_id
        if checkpoint_id is not None:
            parse_step_name(checkpoint_id)
        #: The state of the save or load of each thread.
        self._local = threading.local()
        #: For each job, :attr:`Checkpointer.resumed` of the trainer, if this is a copy in another process.
        self._resumed: dict[str, tuple[int | None, int | None]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save or a load. Without an id, that of the constructor is used."""
        if checkpoint_id is not None:
            parse_step_name(checkpoint_id)
        self._local.__dict__.clear()
        self._local.id = checkpoint_id

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The id of the save or load of this thread."""
        found: str | os.PathLike[str] | None = getattr(self._local, "id", None)
        return self._default_id if found is None else found

    @property
    def name(self) -> StepName:
        """The job and the step."""
        if self.checkpoint_id is None:
            raise InvalidError("no checkpoint_id", 'pass checkpoint_id="JOB/STEP"')
        return parse_step_name(self.checkpoint_id)

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer of the job."""
        if self._given is None:
            found = shared_checkpointer(self.name.job, self._settings)
            found.inherit(*self._resumed.get(self.name.job, (None, None)))
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
        state = {**self.__dict__, "_resumed": resumed_steps(bool(self._settings.get("alone")))}
        del state["_local"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()


class Writer(_Adapter, StorageWriter, AsyncStager):
    """Saves what DCP plans: a ``StorageWriter``, and the ``AsyncStager`` of ``dcp.async_save``.

    The plan of a rank stays on the rank: DCP's coordinator gets an empty one. The ranks compare a digest of their layouts
    when one of them has changed. ``dcp.save`` returns when the step is committed.

    Args:
        checkpoint_id: ``JOB/STEP``. DCP's argument of the same name overrides it.
        checkpointer: The Checkpointer to save with. Default: the one of this process for the job.
        async_staging: Whether ``dcp.async_save`` copies the state in a thread. It then returns at once, an
            ``AsyncSaveResponse``. The state must not change until its ``staging_completion`` is done.
        commit_timeout: The maximum time for a commit, in seconds.
        settings: Arguments of :class:`Checkpointer`, if none is given.

    """

    _synchronize_after_execute = False

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        checkpointer: Checkpointer | None = None,
        async_staging: bool = False,
        commit_timeout: float = 3600.0,
        **settings: Any,
    ) -> None:
        super().__init__(checkpoint_id, checkpointer, settings)
        self.commit_timeout = commit_timeout
        self.async_staging = async_staging
        #: The thread that copies, if there is one.
        self._copier: ThreadPoolExecutor | None = None
        self._stager: SharedStager | None = None
        #: Closes the stager once, at the latest when the Writer is dropped.
        self._close_stager: weakref.finalize[[], Writer] | None = None
        #: The last copy. It is alive as long as an upload uses it, in this process or in DCP's.
        self._copy: weakref.ref[SharedCopy] | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank."""
        self._local.may_gather = bool(kwargs.get("use_collectives", True))
        if self.name.step is None:
            raise InvalidError(f"checkpoint_id {self.name} has no step", 'write "JOB/STEP"')
        self.check_rank(kwargs.get("rank"))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keeps the plan. Returns a plan without items, so that the ranks have nothing to gather."""
        self._local.plan = plan
        return SavePlan([], planner_data={}, usable=plan.usable)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Stages the items of the plan that was kept, and waits until the step is committed."""
        step = self.name.step
        assert step is not None
        checkpointer = self.checkpointer
        kept: SavePlan = self._local.plan

        def flat() -> Flat:
            found = kept if kept.usable else _cached_plan(planner)
            return flatten_plan(found.items, found.planner_data or {}, planner)

        checkpointer.save_flat(step, flat, may_gather=self._local.may_gather)
        checkpointer.wait_for(step, self.commit_timeout)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Puts the id into the metadata that DCP returns. The step is committed by now."""
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta:
        """Returns the id of the checkpoint."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copies a state in the host's memory, for ``dcp.async_save``. Returns the copy, or its future."""
        if not self.async_staging:
            return self._stage_now(state_dict)
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "rapidraid staging")
        return self._copier.submit(self._stage_now, state_dict)

    def _stage_now(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._copy is not None and self._copy() is not None:
            # An upload still reads the memory of the stager.
            self._forget_stager()
        if self._stager is None:
            self._stager = SharedStager()
            # A Writer that is dropped without ``close`` must not leave its copy behind.
            self._close_stager = weakref.finalize(self, self._stager.close)
            self._close_stager.atexit = False
        copy = self._stager.copy(state_dict)
        self._copy = weakref.ref(copy)
        return copy

    def _forget_stager(self) -> None:
        """Releases the stager, whose memory stays as long as a copy uses it."""
        if self._close_stager is not None:
            # It has references to itself, which a trainer without garbage collection would never free.
            self._close_stager()
        self._stager = self._close_stager = None

    def synchronize_staging(self) -> None:
        """Does nothing: the copy is complete when :meth:`stage` returns it, or when its future is done."""
        return None

    def close(self) -> None:
        """Releases the copy."""
        self._forget_stager()
        if self._copier is not None:
            self._copier.shutdown()
            self._copier = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stager": None, "_close_stager": None, "_copy": None, "_copier": None}


def _cached_plan(planner: SavePlanner) -> SavePlan:
    """Returns the plan in a planner's cache. A planner that caches plans sends none if its plan has not changed."""
    found = planner._cached_save_plan.get(getattr(planner, "_cached_plans_key", ""))
    if found is None:
        raise InvalidError(f"{type(planner).__name__} sends no plan and has none in its cache", "use a planner that sends its plan")
    return found


class Reader(_Adapter, StorageReader):
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

    def newest(self, job: str | None = None) -> int | None:
        """Returns the step from which ``dcp.load`` of the job would resume. Returns ``None`` if there is none.

        All ranks must call it, and get the same step. ``job`` is the Reader's by default.
        """
        if job is not None:
            self.reset(job)
        found = self.checkpointer.look_into(None, lambda reader: (reader.loaded.number, None))
        return None if found is None else found[0]

    def read_metadata(self, *args: Any) -> Metadata:
        """Returns the names of the step. Each tensor is one chunk, however many ranks have saved it."""
        checkpointer = self.checkpointer

        def look(reader: StepReader) -> tuple[int, Names, None]:
            return reader.loaded.number, Names(reader.loaded), None

        try:
            found = checkpointer.look_into(self.name.step, look)
            if found is None:
                raise NotFoundError(f"{self.name.job} has no step", "save one first")
        except Exception as error:
            # DCP raises another error in its place, which in torch 2.9 does not say why.
            log.error("a load fails: %s", error)
            raise
        self._local.step, names, _ = found
        return metadata_of(names, checkpointer.rank, StorageMeta(checkpoint_id=f"{self.name.job}/{self.step}"))

    @property
    def step(self) -> int:
        """The step that :meth:`read_metadata` has found in this thread."""
        found: int = self._local.step
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a load on this rank."""
        self.check_rank(kwargs.get("rank"))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keeps the plan. Returns a plan without items, so that the ranks have nothing to gather."""
        self._local.plan = plan
        return LoadPlan([])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads the items of the plan that was kept. The launch continues from the step."""
        checkpointer = self.checkpointer
        items = self._local.plan.items

        def read(reader: StepReader) -> str | None:
            return read_plan(reader, items, planner, checkpointer.rank, cast=self.cast, allow_pickle=checkpointer.allow_pickle)

        checkpointer.load_with(self.step, read, table_first=True)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def _is_stateful(value: Any) -> bool:
    # The protocol's own check takes five microseconds, and a flat state has thousands of tensors.
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


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
    chosen = writer or Writer(**settings)
    chosen.reset(checkpoint_id)
    checkpointer = chosen.checkpointer
    chosen.set_up_storage_writer(checkpointer.rank == 0)
    step = chosen.name.step
    assert step is not None

    def flat() -> Flat:
        plain = {key: value.state_dict() if _is_stateful(value) else value for key, value in state_dict.items()}
        used = planner or DefaultSavePlanner()
        used.set_up_planner(plain, chosen.storage_meta(), checkpointer.rank == 0)
        if planner is None and isinstance(used, DefaultSavePlanner):
            found = flatten_objects(used)
            if found is not None:
                return found
        plan = used.create_local_plan()
        plan = plan if plan.usable else _cached_plan(used)
        return flatten_plan(plan.items, plan.planner_data or {}, used)

    checkpointer.save_flat(step, flat)
    future: Future[None] = Future()

    def wait() -> None:
        try:
            checkpointer.wait_for(step, chosen.commit_timeout)
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where the future is asked
            future.set_exception(error)

    threading.Thread(target=wait, name=f"rapidraid commit {step}", daemon=True).start()
    return future


def load(state_dict: dict[str, Any], checkpoint_id: str | os.PathLike[str], *, reader: Reader | None = None, **settings: Any) -> int:
    """Loads ``JOB/STEP``, or the step that ``JOB`` resumes from, into a state, in place. Returns the step.

    Does the same as ``dcp.load`` with the default planner, without the time that DCP takes to plan. All ranks must call it.
    An error of any rank is raised on all ranks; the state of the other ranks may be loaded then.

    Args:
        state_dict: As for ``dcp.load``.
        checkpoint_id: ``JOB/STEP`` or ``JOB``.
        reader: The Reader to load with. Default: a new one.
        settings: Arguments of that new :class:`Reader`.

    Raises:
        NotFoundError: There is no such step, or it lacks an entry of the state.

    """
    if reader is not None and settings:
        raise InvalidError("a Reader and settings", "pass the settings to the Reader")
    chosen = reader or Reader(**settings)
    chosen.reset(checkpoint_id)
    checkpointer = chosen.checkpointer
    planner = DefaultLoadPlanner()
    # As in DCP, all ranks take the objects in one order: their methods may use collectives.
    order = sorted(state_dict) if checkpointer.world > 1 else list(state_dict)
    plain: dict[str, Any] = {}
    failed: Exception | None = None
    try:
        for key in order:
            plain[key] = state_dict[key].state_dict() if _is_stateful(state_dict[key]) else state_dict[key]
        planner.set_up_planner(plain, None, checkpointer.rank == 0)
    except Exception as error:  # noqa: BLE001 - raised by the load, in whose collectives this rank takes part
        failed = error

    def read(found: StepReader) -> str | None:
        if failed is not None:
            raise failed
        return read_objects(found, planner, checkpointer.rank, cast=chosen.cast, allow_pickle=checkpointer.allow_pickle)

    with checkpointer.together():
        step = checkpointer.load_with(chosen.name.step, read, table_first=True)
    if step is None:
        raise NotFoundError(f"{chosen.name.job} has no step", "save one first")
    with checkpointer.together():
        for key in order:
            if _is_stateful(state_dict[key]):
                state_dict[key].load_state_dict(plain[key])
            else:
                state_dict[key] = plain[key]
    return step


__all__ = ["Reader", "Writer", "async_save", "load"]
