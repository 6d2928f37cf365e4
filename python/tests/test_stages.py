"""Pipeline stages: modules that only some ranks have, and what a strict load expects of each rank."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from held import HeldRanks, HeldStep
from ranks import launch as run

import rapidraid
from rapidraid import errors, per_rank, replicated
from rapidraid._match import Stages
from rapidraid._tree import flatten_first
from rapidraid.state import flatten

torch = pytest.importorskip("torch")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
PROGRAM = str(Path(__file__).parent / "programs" / "stages.py")


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[Any]:
    """Makes this process a rank of four, of which ranks 0 and 1 have one stage, and ranks 2 and 3 the other one.

    Yields the group of its stage.
    """
    import torch.distributed as dist

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=4)
    try:
        yield [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    finally:
        dist.destroy_process_group()


def stage_of(group: Any, value: float) -> dict[str, Any]:
    """Returns a module under DDP, whose weights are ``value``, and its optimizer."""
    module = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(module.weight, value)
    parallel = torch.nn.parallel.DistributedDataParallel(module, process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return {"model": parallel, "optimizer": optimizer}


def test_stages_with_equal_names_keep_their_weights() -> None:
    """DDP keeps the weights equal within its group only, so each rank stores its own."""
    flats = []
    for rank in range(4):
        with as_rank(rank) as group:
            flats.append(flatten(stage_of(group, 1.0 + rank // 2), 4))
    step = HeldStep(flats)
    for rank in range(4):
        with as_rank(rank) as group:
            state = stage_of(group, 0.0)
            step.load(state, rank, 4)
        weight = state["model"].module.weight
        assert weight.eq(1.0 + rank // 2).all()
        assert state["optimizer"].state[weight]["momentum_buffer"].eq(1.0 + rank // 2).all()


def test_the_ranks_of_a_stage_are_named() -> None:
    """A warning says what to do if the names differ between stages. Rank 0 alone cannot store the stages of others."""
    with as_rank(2) as group:
        state = stage_of(group, 1.0)
        flat = flatten(state, 4)
        assert all(leaf.is_private for leaf in flat.leaves)
        (warning,) = flat.warnings
        assert "model is under DDP over the ranks [2, 3], which are not all" in warning and "rapidraid.replicated()" in warning
        compiled = {"model": torch.compile(state["model"]), "optimizer": state["optimizer"]}
        assert all(leaf.is_private for leaf in flatten(compiled, 4).leaves)
        shared = flatten({"model": replicated([state["model"]]), "optimizer": state["optimizer"]}, 4)
        assert not any(leaf.is_private for leaf in shared.leaves) and not shared.warnings
        with pytest.raises(errors.InvalidError, match="model is under DDP over some of the ranks"):
            flatten_first(state, 2, 4)


def test_the_ranks_of_the_launch_count() -> None:
    """They may be fewer than those of the default group: DDP has to keep all of them equal, and may keep others equal too."""
    with as_rank(1) as group:
        for ranks, is_shared in (([0, 1], True), ([1], True), ([1, 2], False), (None, False)):
            flat = flatten(stage_of(group, 1.0), 2, ranks)
            assert all(leaf.is_private != is_shared for leaf in flat.leaves), ranks
        assert not any(leaf.is_private for leaf in flatten(stage_of(None, 1.0), 2, [0, 1]).leaves)
        assert rapidraid._ranks.Group(group, False).ranks == [0, 1] and rapidraid._ranks.Group(None, True).ranks is None


def test_the_optimizer_of_a_module_that_is_declared_private_is_private_too() -> None:
    """The declaration counts more than DDP."""
    with as_rank(0):
        state = stage_of(None, 1.0)
        assert not any(leaf.is_private for leaf in flatten(state, 4).leaves)
        for declared in (per_rank(state["model"]), per_rank({"inner": state["model"]})):
            flat = flatten({"model": declared, "optimizer": state["optimizer"]}, 4)
            assert all(leaf.is_private for leaf in flat.leaves)


def named_stage(rank: int, value: float, *, layers: int = 3) -> dict[str, Any]:
    """Returns the state of one of two stages: layer 0, or the others. Its names are its own."""
    numbers = range(1) if rank < 2 else range(1, layers)
    model = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(2, 2, bias=False) for number in numbers})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return {"model": replicated(model), "optimizer": optimizer, "step": replicated(int(value))}


def load_all(step: HeldStep, states: list[dict[str, Any]], **choices: Any) -> tuple[list[Any], HeldRanks]:
    """Loads a step into the states of all ranks. Returns the errors, and the ranks."""
    ranks = HeldRanks(len(states))

    def load(rank: int) -> None:
        stages = Stages(lambda mine: ranks.gather(rank, mine))
        try:
            step.load(states[rank], rank, len(states), stages=stages, **choices)
        finally:
            stages.finish()

    return ranks.run(load), ranks


def test_what_another_stage_loads_is_not_extra() -> None:
    """Each rank gets its own layers by a strict load, with the state of an optimizer that is new."""
    step = HeldStep([named_stage(rank, 7.0) for rank in range(4)])
    states = [named_stage(rank, 0.0) for rank in range(4)]
    for state in states:
        state["optimizer"].state.clear()
    found, ranks = load_all(step, states)
    assert found == [None] * 4 and ranks.collectives == 1
    for state in states:
        assert state["step"].value == 7
        for parameter in state["model"].value.parameters():
            assert parameter.eq(7.0).all() and state["optimizer"].state[parameter]["momentum_buffer"].eq(7.0).all()


def test_what_no_rank_loads_is_extra_on_all_ranks() -> None:
    """The error names only what no rank has a place for. Nothing is changed."""
    step = HeldStep([named_stage(rank, 7.0, layers=4) for rank in range(4)])
    states = [named_stage(rank, 0.0) for rank in range(4)]
    found, _ = load_all(step, states)
    for error in found:
        assert isinstance(error, errors.InvalidError)
        assert "has model/layer3.weight, optimizer/state/layer3.weight/momentum_buffer, for which" in str(error)
    assert not any(parameter.any() for state in states for parameter in state["model"].value.parameters())
    assert load_all(step, states, include=lambda name: "layer3" not in name and "groups" not in name)[0] == [None] * 4


def test_one_rank_alone_has_no_other_stages() -> None:
    """Without a process group, a name without a place is extra as before."""
    step = HeldStep([named_stage(rank, 7.0) for rank in range(4)])
    with pytest.raises(errors.InvalidError, match="step 1 has model/layer1.weight"):
        step.load(named_stage(0, 0.0), 0, 1)


def test_a_rank_that_fails_does_not_keep_the_others_waiting() -> None:
    """It fails before it knows its names, or after. The others load what they have."""
    step = HeldStep([named_stage(rank, 7.0) for rank in range(4)])
    brokens: list[Any] = [[], {**named_stage(2, 0.0), "more": replicated(1)}]
    for broken in brokens:
        states: list[Any] = [named_stage(rank, 0.0) for rank in range(4)]
        states[2] = broken
        found, _ = load_all(step, states)
        assert isinstance(found[2], errors.RapidraidError)
        assert found[:2] + found[3:] == [None] * 3
        assert all(parameter.eq(7.0).all() for parameter in states[3]["model"].value.parameters())


def test_stages_of_fsdp_come_back_on_other_numbers_of_ranks(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Parameters, moments and counts of steps of both stages are those that were saved."""
    found = []
    for ranks, part in ((4, "save"), (4, "load"), (2, "load")):
        code, lines = run(PROGRAM, ranks, str(cluster.config), job, part)
        assert code == 0
        found.append(sorted(line for line in lines if line.startswith("layer")))
    assert len(found[0]) == 5 * 4 and found[0] == found[1] == found[2]


class HeldSession:
    """A session with a daemon that has one step, and fails as often as it is told."""

    instance = "folder"
    cluster = "cluster"

    def __init__(self, step: HeldStep | None, failures: list[Exception]) -> None:
        self.step = step
        self.failures = failures

    def load(self, *_: Any, **__: Any) -> HeldStep | None:
        if self.failures:
            raise self.failures.pop(0)
        return self.step

    def release(self, *_: Any) -> None:
        pass

    leave = leave_to_parent = release


class HeldGroup:
    """The process group of a thread."""

    is_default = True
    ranks = None

    def __init__(self, ranks: HeldRanks, rank: int) -> None:
        self.rank, self.world = rank, ranks.world
        self.gather = lambda mine: ranks.gather(rank, mine)
        self.is_any = lambda mine, *_: any(ranks.gather(rank, mine))
        self.close = lambda: None


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes the Checkpointers of a launch, one for each session."""
    own = threading.local()
    monkeypatch.setattr("rapidraid._launch.find_config", lambda _: Path("config"))
    monkeypatch.setattr("rapidraid._launch.connect", lambda *_: own.session)
    monkeypatch.setattr("rapidraid.checkpointer.Group", lambda *_: own.group)

    def make(sessions: list[HeldSession], settings: Sequence[dict[str, Any]] = ()) -> tuple[HeldRanks, list[rapidraid.Checkpointer]]:
        ranks = HeldRanks(len(sessions))

        def one(rank: int) -> rapidraid.Checkpointer:
            own.session, own.group = sessions[rank], HeldGroup(ranks, rank)
            return rapidraid.Checkpointer(**{"job": "job", **(settings[rank] if settings else {})})

        return ranks, ranks.run(one)

    return make


def test_each_load_makes_the_same_collectives(launch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens on a rank: a load that is tried again, an error of the daemon, or a job without a step."""
    caplog.set_level(logging.ERROR, logger="rapidraid")
    step = HeldStep([named_stage(rank, 7.0) for rank in range(4)])
    failures: list[list[Exception]] = [[], [errors.StaleError("the memory was used again")], [errors.DeadlineError("too late")], []]
    ranks, made = launch([HeldSession(step, failed) for failed in failures])
    assert ranks.collectives == 1
    states = [named_stage(rank, 0.0) for rank in range(4)]
    found = ranks.run(lambda rank: made[rank].load(states[rank]))
    assert isinstance(found[2], errors.DeadlineError) and str(found[0]).startswith("rank 2: too late")
    assert all(isinstance(error, errors.DeadlineError) for error in found)
    assert ranks.collectives == 3
    assert ranks.run(lambda rank: made[rank].load(states[rank])) == [1] * 4 and ranks.collectives == 5
    assert ranks.run(lambda rank: made[rank].load(states[rank], strict=False)) == [1] * 4 and ranks.collectives == 7
    found = ranks.run(lambda rank: made[rank].load(states[rank], strict=rank < 2))
    assert ranks.collectives == 9
    assert all(isinstance(error, errors.InvalidError) and "strict=False" in str(error) for error in found)
    ranks, made = launch([HeldSession(None, []) for _ in range(2)])
    assert ranks.run(lambda rank: made[rank].load(states[rank])) == [None] * 2 and ranks.collectives == 3


def test_ranks_that_load_different_steps_are_refused(launch: Any) -> None:
    """A commit can come between the calls of ``latest`` by two ranks."""
    steps = [HeldStep([named_stage(rank, 7.0) for rank in range(2)]) for _ in range(2)]
    steps[1].number = 2
    ranks, made = launch([HeldSession(step, []) for step in steps])
    states = [named_stage(rank, 0.0) for rank in range(2)]
    for error in ranks.run(lambda rank: made[rank].load(states[rank], step=rank + 1)):
        assert isinstance(error, errors.InvalidError) and "rank 0 loads step 1, rank 1 step 2" in str(error)


def test_ranks_of_different_jobs_or_settings_are_refused(launch: Any) -> None:
    """A job named by the time can differ by a second, and one rank alone would resume."""
    _, made = launch([HeldSession(None, []) for _ in range(2)], [{"job": "a"}, {"job": "b"}])
    for error in made:
        assert isinstance(error, errors.InvalidError) and "rank 0 has job='a', rank 1 job='b'" in str(error)
    for settings, message in [
        ({"keep": 3}, "rank 0 has keep=3, rank 1 keep=None"),
        ({"abandon_later": True}, "rank 0 has abandon_later=True, rank 1 abandon_later=False"),
    ]:
        ranks, made = launch([HeldSession(None, []) for _ in range(2)], [settings, {}])
        for error in ranks.run(lambda rank, made=made: made[rank].prepare({})):
            assert isinstance(error, errors.InvalidError) and message in str(error)


def test_a_first_save_that_fails_on_one_rank_fails_on_all(launch: Any) -> None:
    """The other ranks compare their layouts, and would wait for this one."""
    ranks, made = launch([HeldSession(None, []) for _ in range(2)])
    gone = errors.DeniedError("it is another staging folder", "start again")

    def save(rank: int) -> bool:
        def raise_notices() -> None:
            if rank == 1:
                raise gone

        made[rank]._launch.raise_notices = raise_notices
        return bool(made[rank].save(1, {"a": replicated(torch.ones(2))}))

    found = ranks.run(save)
    assert found[1] is gone and isinstance(found[0], errors.DeniedError) and str(found[0]).startswith("rank 1: "), found


def test_a_load_by_names_of_dcp_raises_an_error_of_one_rank_on_all(launch: Any) -> None:
    """Whether the state cannot be planned, the step cannot be loaded, or an object does not take what was loaded."""
    adapter = pytest.importorskip("rapidraid.torch")
    step = HeldStep([{"a": {"x": replicated(torch.ones(2))}}])

    class Object:
        def __init__(self, **entries: Any) -> None:
            self.entries = entries
            self.loaded: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.entries)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    class Broken(Object):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("broken")

    class Refusing(Object):
        def load_state_dict(self, _: dict[str, Any]) -> None:
            raise ValueError("refused")

    for broken, message in [
        (Object(x=torch.zeros(2), y=torch.zeros(2)), "step 1 does not have a.y"),
        (Broken(), "broken"),
        (Refusing(x=torch.zeros(2)), "refused"),
    ]:
        ranks, made = launch([HeldSession(step, []) for _ in range(3)])
        states = [Object(x=torch.zeros(2)), broken, Object(x=torch.zeros(2))]

        def load(rank: int, made: Any = made, states: Any = states) -> int:
            return int(adapter.load({"a": states[rank]}, "job/1", reader=adapter.Reader(checkpointer=made[rank])))

        found = ranks.run(load)
        assert all(isinstance(error, Exception) and message in str(error) for error in found), found
        assert all(str(found[rank]).startswith("rank 1: ") for rank in (0, 2))
        assert bool(states[0].loaded) == isinstance(broken, Refusing), "no object gets a part of what failed"
        states[1] = Object(x=torch.zeros(2))
        assert ranks.run(load) == [1] * 3 and all(state.loaded["x"].eq(1.0).all() for state in states)


def test_an_error_for_damage_says_what_becomes_of_the_state(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are verified while they are copied, so the state may hold damaged ones."""
    step = HeldStep([{"a": torch.ones(2)}])
    monkeypatch.setattr(step, "_copy", lambda *_: "a")
    _, (alone,) = launch([HeldSession(step, [])])
    with pytest.raises(errors.CorruptError, match="a is damaged") as raised:
        alone.load({"a": torch.zeros(2)})
    assert "may hold damaged bytes" in raised.value.hint and "initialise" in raised.value.hint


def test_a_forked_child_makes_no_collective(launch: Any) -> None:
    """It is no rank of the launch, and would wait for the ranks forever."""
    ranks, made = launch([HeldSession(None, [errors.ForkedError("this process was forked")]) for _ in range(2)])
    with pytest.raises(errors.ForkedError):
        made[0].load({})
    assert ranks.collectives == 1


def test_all_ranks_stop_at_one_step(launch: Any) -> None:
    """A signal reaches one rank, and all ranks are told at the same call."""
    ranks, made = launch([HeldSession(None, []) for _ in range(3)])

    def steps(rank: int) -> int:
        for number in range(1, 10):
            if rank == 1 and number == 4:
                made[rank].should_stop = True
            if made[rank].should_stop_together():
                return number
        return 0

    assert ranks.run(steps) == [4, 4, 4]
    _, (alone,) = launch([HeldSession(None, [])])
    assert not alone.should_stop_together()
    alone.should_stop = True
    assert alone.should_stop_together()
