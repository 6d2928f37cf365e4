"""Saves of a launch: the memory that is prepared for its state, and the copies into it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ._gc import gc_paused
from ._launch import Launch
from ._leaves import Flat
from ._plan import Plan, Sources, make_plan
from ._ranks import raise_together, refusal_of
from .errors import BusyError, InvalidError, NotFoundError, RapidraidError, UnavailableError
from .state import flatten

log = logging.getLogger("rapidraid")

#: Maximum time for giving up a step, in seconds. The daemon also drops steps that exceed
#: ``staging.fill_s``.
GIVE_UP_S = 5.0


@dataclass
class Stall:
    """The time that a save took, by phase, in seconds."""

    traversal: float = 0.0
    waiting: float = 0.0
    copy: float = 0.0
    socket: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all phases, in seconds."""
        return self.traversal + self.waiting + self.copy + self.socket


class Saver:
    """The saves of a launch. All methods but :meth:`set_before_first_save` need the lock of the launch.

    Args:
        launch: The launch.
        keep: The number of committed steps to keep, or 0 for all.
        abandon_later: Whether the first save removes steps that are later than the loaded one.

    """

    def __init__(self, launch: Launch, *, keep: int, abandon_later: bool) -> None:
        self._launch = launch
        self._keep, self._abandon_later = keep, abandon_later
        #: The layout of the state and its segments, once they are prepared.
        self.plan: Plan | None = None
        #: The time that the last save took, by phase.
        self.last_stall = Stall()

    def prepare_flat(self, flat_state: Callable[[], Flat]) -> None:
        """Prepares for the state that ``flat_state`` returns. Its errors are raised on all ranks."""
        launch = self._launch
        try:
            flat = flat_state()
        except Exception as error:  # noqa: BLE001 - make_plan raises it on all ranks
            flat = Flat(error=error)
        for warning in flat.warnings:
            log.warning("%s", warning)
        self._compare_settings()
        plan = make_plan(flat, launch.rank, launch.world, launch.group.gather, launch.allow_pickle, launch.group.is_default)
        failed: Exception | None = None
        try:
            self._prepare(plan)
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        try:
            raise_together(failed, launch.rank, launch.group.gather(refusal_of(failed)))
        except BaseException:
            self.drop_plan()
            raise
        # Now that all ranks have one segment, none can take the memory of another's first. An error is not one of all
        # ranks, and the next save meets its cause again.
        try:
            self._add_segments(launch.daemon.make_ordered_segments(launch.timeout))
        except RapidraidError as error:
            log.warning("the second segment is not made now: %s", error)

    def _compare_settings(self) -> None:
        """Raises :class:`InvalidError` on all ranks if ``keep`` or ``abandon_later`` differ."""
        told = self._launch.group.gather((self._keep or None, self._abandon_later))
        for rank, other in enumerate(told):
            for name, of_first, of_other in zip(("keep", "abandon_later"), told[0], other, strict=True):
                if of_other != of_first:
                    raise InvalidError(f"rank 0 has {name}={of_first}, rank {rank} {name}={of_other}", f"give all ranks the same {name}")

    def drop_plan(self) -> None:
        """Forgets the layout, and unmaps its segments."""
        if self.plan is not None:
            self.plan.release_segments()
        self.plan = None

    def _prepare(self, plan: Plan) -> None:
        launch = self._launch
        self.drop_plan()
        # Keep the plan even if preparing fails: in a save the other ranks do not prepare, and a new
        # plan would wait for them. ``prepare_flat`` drops it on all ranks.
        self.plan = plan
        count = launch.daemon.prepare(
            launch.job,
            launch.id,
            len(launch.hosts.ranks),
            launch.hosts.ranks.index(launch.rank),
            segment_bytes=plan.segment_bytes,
            # The sum stays the same if this rank alone makes longer segments: the other ranks keep the memory reserved for them.
            launch_bytes=max(plan.segment_bytes, sum(plan.rank_bytes[rank] for rank in launch.hosts.ranks)),
            born_ns=launch.born_ns,
            loaded=launch.loaded,
            newest_seen=launch.newest_seen,
            abandon_later=self._abandon_later,
            keep=self._keep,
            hosts=(launch.hosts.own, launch.hosts.names) if launch.hosts.are_several else None,
            timeout=launch.timeout,
        )
        self._add_segments(count)

    def save(self, step: int, state: Mapping[Any, Any]) -> bool:
        """Stages a state, as :meth:`Checkpointer.save` says."""
        launch = self._launch
        if self.plan is None:

            def checked() -> Flat:
                # The other ranks prepare too, so a failure must be raised where they learn of it.
                launch.raise_notices()
                return flatten(state, launch.world, launch.group.ranks)

            self.prepare_flat(checked)
        else:
            launch.raise_notices()
        plan = self.plan
        assert plan is not None
        begun = time.perf_counter()
        with gc_paused():
            flat = flatten(state, launch.world, launch.group.ranks)
            # Several ranks prepare together, and this one does not know whether the others have to.
            is_alone = launch.world == 1
            sources = plan.sources_if_fitting(flat, launch.allow_pickle) if is_alone else plan.sources(flat, launch.allow_pickle)
        if sources is None:
            plan, sources = self._prepare_again(flat)
        elif plan.needed_bytes(sources) > plan.segment_bytes:
            # The other ranks have nothing to do with the length of this rank's plain values.
            plan.grow(sources)
            self._prepare(plan)
        return self._stage(step, plan, sources, time.perf_counter() - begun)

    def _prepare_again(self, flat: Flat) -> tuple[Plan, Sources]:
        """Prepares for a state whose layout has changed. Returns the new plan, and the contents to copy."""
        self.prepare_flat(lambda: flat)
        plan = self.plan
        assert plan is not None
        return plan, plan.sources(flat, self._launch.allow_pickle)

    def save_flat(self, step: int, flat_state: Callable[[], Flat], *, may_gather: bool, raise_earlier: bool) -> bool:
        """Stages the state that ``flat_state`` returns, as :meth:`Checkpointer.save_flat` says."""
        launch = self._launch
        begun = time.perf_counter()
        flat: Flat | None = None
        sources: Sources | None = None
        failed: Exception | None = None
        plan = self.plan
        try:
            if raise_earlier:
                launch.raise_notices()
            else:
                launch.log_notices()
            with gc_paused():
                flat = flat_state()
                sources = plan.sources_if_fitting(flat, launch.allow_pickle) if plan is not None else None
        except Exception as error:  # noqa: BLE001 - raised on all ranks below
            failed = error
        is_changed = sources is None
        # Without a plan, all ranks prepare together below anyway.
        if may_gather or plan is None:
            told = launch.group.gather((is_changed, refusal_of(failed)))
            raise_together(failed, launch.rank, [refusal for _, refusal in told])
            is_changed = any(changed for changed, _ in told)
        elif is_changed:
            refused = failed or InvalidError(
                "the layout of the state has changed, and the ranks may not tell each other", "save once with use_collectives=True"
            )
            # The others may have staged the step already, and would wait for this rank until their time is over.
            at, fill, _ = self._fill(step, plan)
            if at is not None:
                self._give_up(step, fill, refused)
            raise refused
        assert flat is not None
        if is_changed or sources is None:
            plan, sources = self._prepare_again(flat)
        assert plan is not None
        return self._stage(step, plan, sources, time.perf_counter() - begun)

    def _stage(self, step: int, plan: Plan, sources: Sources, traversal_s: float) -> bool:
        launch = self._launch
        stall = Stall(traversal=traversal_s)
        begun = time.perf_counter()
        at, fill, count = self._fill(step, plan)
        stall.waiting = time.perf_counter() - begun
        if at is None:
            return False
        try:
            self._add_segments(count)
            begun = time.perf_counter()
            with gc_paused():
                samples = plan.copy(at, sources, launch.id, step)
            stall.copy = time.perf_counter() - begun
            begun = time.perf_counter()
            try:
                launch.daemon.stage(step, at, fill, plan.writer, samples, launch.timeout)
            except UnavailableError as error:
                # The segment's header says that the step is staged. A restarted daemon reads it. Among several ranks another
                # one may have given the step up, which the daemon answers in the same way.
                if launch.world > 1 or not launch.is_staged(step):
                    raise
                log.warning("step %d is staged, although the daemon did not answer: %s", step, error.message)
            stall.socket = time.perf_counter() - begun
        except BaseException as error:
            self._give_up(step, fill, error)
            raise
        self.last_stall = stall
        launch.saved.append(step)
        return True

    def _give_up(self, step: int, fill: str, why: BaseException) -> None:
        """Gives up a step, so that the other ranks learn of it. Has no effect if all ranks have staged the step."""
        try:
            self._launch.daemon.give_up(step, fill, f"{type(why).__name__}: {why}", GIVE_UP_S)
        except RapidraidError as error:
            log.debug("the daemon is not told that step %d is given up: %s", step, error)

    def _fill(self, step: int, plan: Plan) -> tuple[int | None, str, int]:
        """Returns the index of the segment to fill, the filling's id, and the number of segments.

        The index is ``None`` if the step is skipped.
        """
        launch = self._launch
        waited = time.monotonic()
        # The daemon decides for all ranks of the launch, so that no rank fills a step that another
        # one skips.
        or_skip = launch.when_full != "wait"
        try:
            at, fill, count = launch.daemon.fill(step, or_skip, launch.timeout)
        except NotFoundError:
            # The daemon was restarted, and this rank has no segments any more.
            self._prepare(plan)
            at, fill, count = launch.daemon.fill(step, or_skip, launch.timeout)
        if at is None:
            if launch.when_full == "error":
                raise BusyError(f"step {step} is not saved: {fill}", 'wait for earlier steps, or pass when_full="wait"')
            log.warning("step %d is skipped: %s", step, fill)
            return None, "", 0
        waited = time.monotonic() - waited
        if waited > 0.1:
            log.info("step %d waited %.2f s for a free segment", step, waited)
        return at, fill, count

    def _add_segments(self, count: int) -> None:
        plan = self.plan
        assert plan is not None
        while plan.segments < count:
            plan.add_segment(self._launch.daemon.segment(plan.segments))

    def set_before_first_save(self, settings: Mapping[str, Any]) -> bool:
        """Sets ``keep`` and ``abandon_later``, unless this process has prepared or saved. Returns whether they have these values now."""
        keep, abandon_later = settings.get("keep") or 0, bool(settings.get("abandon_later"))
        if (keep, abandon_later) == (self._keep, self._abandon_later):
            return True
        if self.plan is not None or self._launch.saved:
            return False
        self._keep, self._abandon_later = keep, abandon_later
        return True
