"""Measures of what ``torch.distributed.checkpoint`` (DCP) sees, beside a ``Checkpointer`` on the same state."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

import rapidraid
from rapidraid._dcp import flatten_plan
from rapidraid._plan import make_plan
from rapidraid.torch import Reader, Writer, async_save
from rapidraid.torch import load as load_by_name

from . import state as states
from .beds import Host
from .host import seconds
from .record import Measure, say

#: The simulated launch of the planning measure.
RANKS, TENSORS = 1024, 500


def save_in_turn(name: str, ways: Mapping[str, Callable[[int], Callable[[], Any]]], repeats: int, stall: Measure, commit: Measure) -> None:
    """Saves steps in each way in turn. A way returns when the save no longer stalls, with a function that waits for the commit."""
    for step in range(1, repeats + 2):
        for arm, save in ways.items():
            begun = time.perf_counter()
            wait = save(step)
            stalled = time.perf_counter() - begun
            wait()
            # The first save prepares the memory.
            if step > 1:
                stall.add(arm, stalled)
                commit.add(arm, time.perf_counter() - begun)
            # The kernel still frees the removed memory, on both processors.
            time.sleep(2)
        say(f"{name}: step {step}, " + ", ".join(f"{arm} {times[-1]:.3f} s" for arm, times in stall.arms.items()))


def through_dcp(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures stalls, commits and loads through DCP's writer and reader."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    state = states.make(large_bytes=large_bytes)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stall = Measure("dcp-stall", "stall of `rapidraid.torch.async_save`", "async_save", ["Checkpointer"], 1.2)
    commit = Measure("dcp-commit", "the same, until committed", "async_save", ["Checkpointer"], 1.2)
    load = Measure("dcp-load", "`rapidraid.torch.load` from the host's memory, verified", "load", ["Checkpointer"], 1.2)
    with Host(block="4MiB", staging={"memory": "8GiB"}) as bed, rapidraid.Checkpointer("plain", config=bed.config, keep=2) as checkpointer:
        writer = Writer(config=bed.config, keep=2)

        def save_plainly(step: int) -> Callable[[], Any]:
            checkpointer.save(step, state)
            return checkpointer.wait

        def save_by_name(step: int) -> Callable[[], Any]:
            return async_save(state, f"named/{step}", writer=writer).result

        def save_by_dcp(step: int) -> Callable[[], Any]:
            future = dcp_async_save(state, checkpoint_id=f"dcp/{step}", storage_writer=writer)
            assert not isinstance(future, AsyncSaveResponse)
            return future.result

        ways = {"Checkpointer": save_plainly, "async_save": save_by_name, "dcp.async_save": save_by_dcp}
        save_in_turn("dcp", ways, repeats, stall, commit)
        yield stall
        yield commit
        reader = Reader(config=bed.config)
        for _ in range(repeats):
            load.add("Checkpointer", seconds(checkpointer.load, into))
            load.add("load", seconds(lambda: load_by_name(into, f"named/{repeats + 1}", reader=reader)))
            load.add("dcp.load", seconds(lambda: dcp_load(into, checkpoint_id=f"named/{repeats + 1}", storage_reader=reader)))
            say(f"dcp: loads {load.arms['dcp.load'][-1]:.3f} s beside {load.arms['Checkpointer'][-1]:.3f} s")
        yield load


def plan(repeats: int, large_bytes: int) -> Iterator[Measure]:
    """Measures plans of 1,024 simulated ranks with 500 sharded tensors each: the bytes that are gathered, and the time."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    measure = Measure("plan", f"plan of {RANKS:,} simulated ranks x {TENSORS} tensors", "ours", ["DCP"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        state = {f"layers.{at}.weight": DTensor.from_local(torch.ones(1, 64), mesh, [Shard(0)], run_check=False) for at in range(TENSORS)}
        for _ in range(min(repeats, 3)):
            planner = DefaultSavePlanner()
            planner.set_up_planner(state, None, True)
            begun = time.perf_counter()
            local = planner.create_local_plan()
            theirs = [pickle.loads(pickle.dumps(local)) for _ in range(RANKS)]
            for rank, other in enumerate(theirs):
                _move(other, rank)
            dcp_gathered = len(pickle.dumps(local)) * RANKS
            copied = time.perf_counter()
            planner.create_global_plan(theirs)
            # The copies stand for what other ranks do at the same time.
            measure.add("DCP", time.perf_counter() - copied)
            say(f"plan: DCP gathers {dcp_gathered} bytes and plans for {measure.arms['DCP'][-1]:.2f} s; {copied - begun:.1f} s of copies")
            gathered = 0

            def gather(mine: Any) -> list[Any]:
                nonlocal gathered
                gathered += len(pickle.dumps(mine)) * RANKS
                return [mine] * RANKS

            begun = time.perf_counter()
            writer = Writer("plan/1", config="unused")
            kept = planner.create_local_plan()
            told = writer.prepare_local_plan(kept)
            all_told = gather(told)
            writer.prepare_global_plan(planner.create_global_plan(all_told)[0])
            gather(True)
            make_plan(flatten_plan(kept.items, kept.planner_data, planner), 0, RANKS, gather, False)
            measure.add("ours", time.perf_counter() - begun)
            measure.facts = {"gathered_bytes": gathered, "dcp_gathered_bytes": dcp_gathered}
            say(f"plan: ours gathers {gathered} bytes and plans for {measure.arms['ours'][-1]:.2f} s")
    finally:
        dist.destroy_process_group()
    yield measure


def _move(plan: Any, rank: int) -> None:
    """Gives the items of a copied plan the offsets that they have on a rank."""
    import dataclasses

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    for at, item in enumerate(plan.items):
        offsets = torch.Size([rank, 0])
        about = dataclasses.replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, item.tensor_data.chunk.sizes))
        plan.items[at] = dataclasses.replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=about)
