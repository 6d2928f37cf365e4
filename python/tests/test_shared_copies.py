"""Copies of a state that travel to another process without being copied again."""

from __future__ import annotations

import gc
import io
import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
copies = pytest.importorskip("rapidraid._shared_copies")


def mapped() -> list[str]:
    """Returns the lines of the memory files that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "rapidraid-copy" in line]


def state() -> dict[str, Any]:
    """Returns tensors of many kinds, some of which share memory."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "turned": base.t(),
        "row": base[2],
        "parameter": torch.nn.Parameter(torch.full((3,), 2.0)),
        "bfloat16": torch.full((5,), 0.5, dtype=torch.bfloat16),
        "float8": torch.full((5,), 0.5).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "nested": {"list": [torch.ones(2), 3, "text"], "none": None},
    }


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Returns the leaves of a state by their paths."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        return {path: value}
    return {at: leaf for key, child in children for at, leaf in flat(child, f"{path}/{key}").items()}


def assert_equal(found: Any, expected: Any) -> None:
    one, other = flat(found), flat(expected)
    assert one.keys() == other.keys()
    for path, value in other.items():
        if isinstance(value, torch.Tensor):
            assert (one[path].dtype, one[path].stride()) == (value.dtype, value.stride()), path
            assert torch.equal(one[path].float(), value.float()), path
        else:
            assert one[path] == value, path


def answer(pipe: Connection) -> None:
    """Compares what arrives with the state, and changes a tensor."""
    received = pipe.recv()
    try:
        assert type(received) is dict
        assert_equal(received, state())
        received["base"][0, 0] = 100.0
        assert received["turned"][0, 0] == 100.0, "it shares memory, as before"
        pipe.send(None)
    except AssertionError as error:
        pipe.send(repr(error))
    count = pipe.recv()
    many = pipe.recv()
    pipe.send(len(many) == count and all(bool((many[at] == at).all()) for at in range(count)))


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_copy_travels_as_places() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with few_descriptors(128):
        process = context.Process(target=answer, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        copy = copies.SharedStager().copy(state())
        assert_equal(dict(copy), state())
        ours.send(copy)
        assert ours.recv() is None
        assert copy["base"][0, 0] == 100.0, "the other process has the same memory"
        count = 1000
        many = copies.SharedStager().copy({at: torch.full((10,), float(at)) for at in range(count)})
        ours.send(count)
        ours.send(many)
        assert ours.recv() is True
        process.join(60)
        assert process.exitcode == 0


def test_each_copy_overwrites_the_one_before() -> None:
    gc.collect()
    before = len(mapped())
    stager = copies.SharedStager()
    first = stager.copy({"a": torch.ones(1000), "b": torch.ones(10)})
    lines = mapped()
    address = first["a"].data_ptr()
    second = stager.copy({"a": torch.full((1000,), 2.0), "b": torch.full((10,), 3.0)})
    assert second["a"].data_ptr() == address and mapped() == lines
    assert bool((second["a"] == 2.0).all()) and bool((second["b"] == 3.0).all())
    del first
    longer = stager.copy({"a": torch.full((copies.MIN_FILE_BYTES,), 4, dtype=torch.uint8), "b": torch.full((10,), 5.0)})
    assert len(mapped()) == before + 2
    assert bool((longer["a"] == 4).all()) and bool((longer["b"] == 5.0).all())


def test_memory_lives_as_long_as_a_tensor_of_it() -> None:
    gc.collect()
    before = mapped()
    gc.disable()
    try:
        stager = copies.SharedStager()
        copy = stager.copy({"a": torch.ones(1000), "b": torch.zeros(10)})
        stager.close()
        del stager
        tensor = copy["a"]
        del copy
        assert len(mapped()) == len(before) + 1 and bool((tensor == 1.0).all())
        del tensor
        assert mapped() == before
    finally:
        gc.enable()


def test_a_writer_that_is_dropped_leaves_no_copy() -> None:
    """Scripts make a Writer for each save, and some trainers switch the garbage collection off."""
    adapter = pytest.importorskip("rapidraid.torch")
    before = mapped()
    gc.disable()
    try:
        for _ in range(3):
            copy = adapter.Writer("job/1").stage({"weight": torch.ones(64)})
            assert len(mapped()) > len(before) and copy["weight"].eq(1.0).all()
            del copy
            assert mapped() == before
    finally:
        gc.enable()


def test_a_smaller_state_gives_memory_back() -> None:
    gc.collect()
    stager = copies.SharedStager()
    large = torch.zeros(copies.MIN_FILE_BYTES, dtype=torch.uint8)
    before = len(mapped())
    copy = stager.copy({"a": torch.ones(10), "b": large, "c": large + 1, "d": large + 2})
    assert len(mapped()) > before + 1
    del copy
    copy = stager.copy({"a": torch.full((10,), 2.0)})
    assert len(mapped()) == before + 1 and bool((copy["a"] == 2.0).all())


def test_views_that_are_conjugated_or_negated_are_copied_as_what_they_show() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    copy = copies.SharedStager().copy({"conjugated": base.conj(), "negated": base.conj().imag})
    assert copy["conjugated"].tolist() == [1 - 2j, 3 + 4j] and copy["negated"].tolist() == [-2.0, 4.0]


def test_a_tensor_of_other_memory_is_sent_by_its_bytes() -> None:
    copy = copies.SharedStager().copy({"a": torch.ones(4)})
    copy["own"] = torch.full((3,), 9.0)
    packed = io.BytesIO()
    copies._Packer(packed, copy._files).dump(dict(copy))
    found = copies._Unpacker(packed.getvalue(), copy._files).load()
    copy["a"][0] = 2.0
    copy["own"][0] = 2.0
    assert found["a"].tolist() == [2.0, 1.0, 1.0, 1.0] and found["own"].tolist() == [9.0, 9.0, 9.0]
