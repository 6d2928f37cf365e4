"""The parts of a ``DTensor`` that a rank holds, computed from its placements, against torch and against lists of all indices."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import launch

torch = pytest.importorskip("torch")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from rapidraid.tensors import _local_runs, describe  # noqa: E402


def tensor_of(mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: list[Any]) -> Any:
    """Returns what the placements of a tensor are read from."""
    device_mesh = SimpleNamespace(size=lambda at: mesh[at], get_coordinate=lambda: list(coordinate))
    return SimpleNamespace(device_mesh=device_mesh, placements=placements)


def indices_of(tensor: Any, shape: tuple[int, ...]) -> list[list[int]]:
    """Returns the indices of each dimension, by cutting lists of all of them with torch."""
    indices = [torch.arange(size) for size in shape]

    def chunk(index: Any, count: int) -> list[Any]:
        chunks = list(torch.chunk(index, count)) if index.numel() else []
        return chunks + [index[:0]] * (count - len(chunks))

    placements = list(enumerate(tensor.placements))
    # FSDP2 cuts some dimensions last, after the cuts of others. The split factor is the number of parts that those have made.
    last = []
    for at, placement in reversed(placements):
        right = (
            [(other, found) for other, found in placements[at + 1 :] if not found.is_replicate() and found.dim == placement.dim]
            if (not placement.is_replicate())
            else []
        )
        parts = math.prod(tensor.device_mesh.size(other) for other, _ in right)
        if (
            not placement.is_replicate()
            and 1 < getattr(placement, "split_factor", 1) == parts
            and all(other in last or getattr(found, "split_factor", 1) == 1 for other, found in right)
        ):
            last.append(at)
    plain = [(at, placement) for at, placement in placements if at not in last]
    for at, placement in plain + [(at, Shard(tensor.placements[at].dim)) for at in last]:
        if placement.is_replicate():
            continue
        count, own = tensor.device_mesh.size(at), tensor.device_mesh.get_coordinate()[at]
        parts = [chunk(part, count)[own] for part in chunk(indices[placement.dim], getattr(placement, "split_factor", 1))]
        indices[placement.dim] = torch.cat(parts)
    return [index.tolist() for index in indices]


@pytest.mark.parametrize("seed", range(4))
def test_runs_are_those_of_the_indices(seed: int) -> None:
    """Any placements, with several shards of one dimension, strided ones, and dimensions that do not divide evenly."""
    drawn = random.Random(seed)
    for _ in range(150):
        shape = tuple(drawn.randrange(0, 40) for _ in range(drawn.randint(1, 3)))
        mesh = tuple(drawn.randint(1, 5) for _ in range(drawn.randint(1, 3)))
        dims = [drawn.randrange(len(shape)) for _ in mesh]
        kinds = [Replicate(), *(Shard(dim) for dim in dims), *(_StridedShard(dim, split_factor=drawn.randint(1, 4)) for dim in dims)]
        placements = [drawn.choice(kinds) for _ in mesh]
        for coordinate in itertools.product(*(range(count) for count in mesh)):
            tensor = tensor_of(mesh, coordinate, placements)
            runs = _local_runs(tensor, shape)
            found = [[index for start, size in dim for index in range(start, start + size)] for dim in runs]
            assert found == indices_of(tensor, shape), (shape, mesh, coordinate, placements)
            follows = [one[0] + one[1] == other[0] for dim in runs for one, other in itertools.pairwise(dim)]
            assert not any(follows), "runs are as long as possible"


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1), Replicate()), (Replicate(), Shard(0))])
def test_boxes_are_those_of_torch(placements: tuple[Any, ...]) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for rank, shape in itertools.product(range(8), [(13, 9), (16, 8), (3, 2)]):
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=8)
        try:
            mesh = init_device_mesh("cpu", (4, 2))
            size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
            local = torch.empty(size)
            tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
            pieces = describe("w", tensor).pieces
        finally:
            dist.destroy_process_group()
        assert [piece.box for piece in pieces] == ([(tuple(offset), tuple(size))] if local.numel() else [])


def test_the_time_does_not_depend_on_the_size() -> None:
    """No list has an entry for each index: the lists of these dimensions would fit into no memory."""
    tensor = tensor_of((64,), (63,), [Shard(0)])
    assert _local_runs(tensor, (1 << 60, 1 << 50)) == [[(63 << 54, 1 << 54)], [(0, 1 << 50)]]
    tensor = tensor_of((8, 8), (1, 2), [_StridedShard(0, split_factor=8), Shard(0)])
    (runs,) = _local_runs(tensor, (1 << 60,))
    assert sum(size for _, size in runs) == 1 << 54


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (8, 2), (2, 3), (3, 4)])
def test_fsdp_cuts_the_parts_of_tensor_parallelism(dp: int, tp: int) -> None:
    """Also where the rows do not divide evenly, as 50,257 rows of a vocabulary do not."""
    for rows in (*range(1, 40), 50257):
        for own, part in itertools.product(range(dp), range(tp)):
            tensor = tensor_of((dp, tp), (own, part), [_StridedShard(0, split_factor=tp), Shard(0)])
            cut = torch.arange(rows)
            for count, at in ((tp, part), (dp, own)):
                cut = (*torch.chunk(cut, count), *[cut[:0]] * count)[at] if cut.numel() else cut
            (runs,) = _local_runs(tensor, (rows,))
            assert runs == ([(int(cut[0]), cut.numel())] if cut.numel() else [])


def test_fsdp_over_tensor_parallelism_is_where_torch_has_it() -> None:
    """Ranks of a launch of their own, with the real ``parallelize_module`` and ``fully_shard``."""
    program = str(Path(__file__).parent / "programs" / "tensor_parallel.py")
    for dp, tp in ((2, 2), (3, 2)):
        assert launch(program, dp * tp, str(dp), str(tp)) == (0, ["right"] * dp * tp)
