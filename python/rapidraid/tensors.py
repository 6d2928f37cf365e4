"""Tensors and arrays as they are stored: element type, shape, and the boxes that this rank holds."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._leaves import is_array, is_dtensor, is_tensor
from .errors import InvalidError, NotFoundError

#: Maximum number of threads of a copy. Few threads already use the full memory bandwidth of a host.
MAX_COPY_THREADS = 8
#: A box: its start and its size, by dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor on this rank, and the local tensor or view that holds its elements."""

    #: The box; ``None`` if the piece is the whole tensor.
    box: Box | None
    local: Any


@dataclass(frozen=True)
class Parts:
    """A tensor of which this rank holds boxes that are given instead of derived from a ``DTensor``."""

    shape: tuple[int, ...]
    dtype: Any
    pieces: tuple[Piece, ...]


def has_elements(value: Any) -> bool:
    """Returns whether a value is stored as a tensor."""
    return is_tensor(value) or is_array(value) or isinstance(value, Parts)


@dataclass(frozen=True)
class Described:
    """The declaration of a tensor, and its pieces on this rank."""

    element: str
    bits: int
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def len_bytes(self) -> int:
        """The length of this rank's pieces, in bytes."""
        return sum(nbytes(piece.local) for piece in self.pieces)


def nbytes(value: Any) -> int:
    """Returns the length of a tensor's or array's elements, in bytes."""
    if is_array(value):
        return int(value.nbytes)
    return int(value.numel() * value.element_size())


def refuse(name: str, why: str, hint: str) -> InvalidError:
    """Returns the error for something that cannot be stored."""
    return InvalidError(f"{name} cannot be stored: {why}", hint)


def describe(name: str, value: Any) -> Described:
    """Returns the description of a tensor or array.

    Raises :class:`InvalidError` with its name if it cannot be stored.
    """
    if is_array(value):
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ma.MaskedArray):
            raise refuse(name, "it is a masked array, whose mask would be lost", "store its data and its mask")
        kind = value.dtype
        if kind.hasobject or kind.names is not None or kind.kind not in "biufc":
            raise refuse(name, f"it is an array of {kind}", "convert it to numbers")
        whole = Piece(None, value)
        return Described(_numpy_name(kind), kind.itemsize * 8, tuple(value.shape), (whole,))
    if isinstance(value, Parts):
        for piece in value.pieces:
            check(name, piece.local)
        return Described(str(value.dtype).removeprefix("torch."), value.dtype.itemsize * 8, value.shape, value.pieces)
    check(name, value)
    shape = tuple(int(size) for size in value.shape)
    if is_dtensor(value):
        local = value.to_local()
        _check_local(name, local)
        pieces = _pieces_of_dtensor(name, value, shape)
        return Described(element_of(local), local.element_size() * 8, shape, pieces)
    return Described(element_of(value), value.element_size() * 8, shape, (Piece(None, value.detach()),))


def element_of(tensor: Any) -> str:
    """Returns the name of a tensor's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def _numpy_name(kind: Any) -> str:
    return str(kind.newbyteorder("=").name)


def check(name: str, tensor: Any) -> None:
    """Raises :class:`InvalidError` for tensors whose elements are not plain memory.

    Storing them would store zeros or nothing.
    """
    torch = sys.modules["torch"]
    if tensor.is_meta:
        raise refuse(name, "it is on the meta device, so it has no content", "give it content first (to_empty, then load)")
    if tensor.layout is not torch.strided:
        raise refuse(name, f"its layout is {tensor.layout}", "store its indices and values as tensors of their own")
    if tensor.is_quantized:
        raise refuse(name, "it is quantized", "store int_repr(), scale and zero point")
    if tensor.is_nested:
        raise refuse(name, "it is a nested tensor", "store its values and offsets")
    if hasattr(tensor, "global_offsets"):
        raise refuse(name, "it is a part of a tensor, as DCP's CheckpointableTensor says", "save and load it by DCP, with rapidraid.torch")
    if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor") or (tensor.numel() > 0 and _is_lazy(tensor)):
        raise refuse(name, f"it is a {type(tensor).__name__} without content", "materialise it first")

    # A subclass may have a shape but no memory of its own. Copying from it would store something
    # else, or crash.
    if tensor.numel() > 0 and type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(tensor) and not _has_memory(tensor):
        raise refuse(name, f"it is a {type(tensor).__name__}, which has no memory of its own", "give it __tensor_flatten__")


def _check_local(name: str, local: Any) -> None:
    """Raises :class:`InvalidError` for the local tensor of a ``DTensor`` if it wraps other tensors, or is no plain memory."""
    kind = type(local)
    # A result of a collective stands for the tensor in it, and chunks describe themselves.
    if hasattr(kind, "__tensor_flatten__") and kind.__name__ != "AsyncCollectiveTensor" and not hasattr(kind, "__create_chunk_list__"):
        raise refuse(
            name,
            f"it is a DTensor of {kind.__name__}, which wraps other tensors",
            "keep quantized weights and states of optimizers in plain tensors when they are sharded",
        )
    check(name, local)


def _has_memory(tensor: Any) -> bool:
    try:
        return bool(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return False


def _is_lazy(tensor: Any) -> bool:
    return getattr(tensor, "device", None) is not None and tensor.device.type in ("lazy", "xla")


def _pieces_of_dtensor(name: str, tensor: Any, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    for placement in tensor.placements:
        if placement.is_partial():
            raise refuse(name, "it has a Partial placement, so no rank holds its values", "redistribute it first")
    local = tensor.to_local().detach()
    if tensor.device_mesh.get_coordinate() is None:
        return ()
    if 0 in shape:
        # There is nothing to divide, and each rank of the mesh has the whole.
        return (Piece(None, local.new_empty(shape)),)
    if hasattr(local, "__create_chunk_list__"):
        chunks = tensor.__create_chunk_list__()
        if len(chunks) != 1:
            raise refuse(name, f"its local tensor is in {len(chunks)} chunks", "give it one chunk")
        boxes = [(tuple(chunks[0].offsets), tuple(chunks[0].sizes))]
        return tuple(Piece(box, local) for box in boxes)
    runs = _local_runs(tensor, shape)
    if any(sum(size for _, size in dim) != have for dim, have in zip(runs, local.shape, strict=True)):
        raise refuse(name, f"its local tensor has the shape {tuple(local.shape)}, which its placements do not give", "see how it was made")
    return tuple(_boxes(runs, local))


#: Consecutive indices of a dimension: the first one, and their number.
Run = tuple[int, int]


def _local_runs(tensor: Any, shape: tuple[int, ...]) -> list[list[Run]]:
    """Returns for each dimension the runs of indices that this rank holds, in the order of the local tensor."""
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
    coordinate = tensor.device_mesh.get_coordinate()
    for at, dim, count, factor in _cuts(tensor):
        own = coordinate[at]
        # A strided shard has its chunk of each of several parts.
        parts = [_chunk(runs[dim], factor, part) for part in range(factor)]
        runs[dim] = _join([run for part in parts for run in _chunk(part, count, own)])
    return runs


def _cuts(tensor: Any) -> list[tuple[int, int, int, int]]:
    """Returns the cuts of a ``DTensor`` in their order: dimension of the mesh and of the tensor, number of chunks, split factor.

    FSDP2 cuts what tensor parallelism to its right in the mesh has left on each rank. It says so by a strided shard whose
    split factor is the number of those parts, so such a shard is a plain cut after the cuts of tensor parallelism. For
    dimensions that divide evenly this is the same as a cut of each part.
    """
    cuts: list[tuple[int, int, int, int]] = []
    # The dimensions with a strided shard that is no plain cut.
    strided: set[int] = set()
    for at in reversed(range(len(tensor.placements))):
        placement = tensor.placements[at]
        dim = getattr(placement, "dim", None)
        if placement.is_replicate() or dim is None:
            continue
        factor = int(getattr(placement, "split_factor", 1))
        count = int(tensor.device_mesh.size(at))
        parts = math.prod(size for _, other, size, _ in cuts if other == dim)
        if factor > 1 and factor == parts and dim not in strided:
            cuts.append((at, dim, count, 1))
            continue
        cuts.insert(0, (at, dim, count, factor))
        if factor > 1:
            strided.add(dim)
    return cuts


def _chunk(runs: list[Run], count: int, own: int) -> list[Run]:
    """Returns one of ``count`` chunks of the indices of ``runs``, cut as ``torch.chunk`` does; those at the end may be empty."""
    length = -(-sum(size for _, size in runs) // count)
    begin, end = own * length, (own + 1) * length
    chunk: list[Run] = []
    at = 0
    for start, size in runs:
        low, high = max(begin - at, 0), min(end - at, size)
        if low < high:
            chunk.append((start + low, high - low))
        at += size
    return chunk


def _join(runs: list[Run]) -> list[Run]:
    """Returns the runs. Runs that follow each other without a gap are joined."""
    joined: list[Run] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def _boxes(runs: list[list[Run]], local: Any) -> list[Piece]:
    """Returns a box and its local view for each combination of runs."""
    if any(not dim for dim in runs):
        return []
    pieces = [Piece(((), ()), local)]
    for dim, dim_runs in enumerate(runs):
        longer = []
        for piece in pieces:
            at = 0
            for start, size in dim_runs:
                assert piece.box is not None
                view = piece.local.narrow(dim, at, size)
                longer.append(Piece(((*piece.box[0], start), (*piece.box[1], size)), view))
                at += size
        pieces = longer
    return pieces


def volume(shape: tuple[int, ...]) -> int:
    """Returns the number of elements of a shape."""
    return math.prod(shape)


def alias_key(value: Any) -> tuple[Any, ...] | None:
    """Returns a key that is equal for two views of the same content, or ``None`` for a value without memory.

    The key consists of storage, offset, shape, strides and element type.
    """
    if is_array(value):
        return ("array", value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str) if value.size else None
    if not is_tensor(value) or value.numel() == 0:
        return None
    local = value.to_local() if is_dtensor(value) else value
    if local.numel() == 0:
        return None
    flags = (local.is_conj(), local.is_neg())
    storage = local.untyped_storage().data_ptr()
    return (storage, local.storage_offset(), tuple(local.shape), local.stride(), str(local.dtype), flags, tuple(value.shape))


@dataclass(frozen=True)
class Layout:
    """Shape and type of a tensor or array, without its memory."""

    shape: tuple[int, ...]
    dtype: Any
    is_array: bool
    is_on_cuda: bool

    @classmethod
    def of(cls, value: Any) -> Layout:
        """Returns the layout of a tensor or array."""
        array = is_array(value)
        return cls(tuple(value.shape), value.dtype, array, not array and value.device.type == "cuda")


def view_of(buffer: Any, offset: int, layout: Layout) -> Any:
    """Returns a tensor or array of this layout over ``buffer``, from ``offset`` on."""
    count = math.prod(layout.shape)
    if layout.is_array:
        numpy = sys.modules["numpy"]
        kind = layout.dtype.newbyteorder("<")
        return numpy.frombuffer(buffer, dtype=kind, count=count, offset=offset).reshape(layout.shape)
    torch = sys.modules["torch"]
    if count == 0:
        return torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=layout.dtype, count=count, offset=offset).view(layout.shape)


def copy_all(segment: Any, offsets: list[int], targets: list[Any], sources: list[Any]) -> None:
    """Copies each source into its target, a view of the segment's data at the given offset.

    One call copies all contiguous memory of the host and bypasses the caches; another one copies all other tensors.
    """
    torch = sys.modules.get("torch")
    direct: list[tuple[int, int, int]] = []
    tensors: list[tuple[Any, Any]] = []
    for offset, to, source in zip(offsets, targets, sources, strict=True):
        if is_array(source):
            if source.flags.c_contiguous and source.dtype.isnative:
                direct.append((offset, source.ctypes.data, source.nbytes))
            else:
                to[...] = source
        elif _is_plain_memory(source):
            direct.append((offset, source.data_ptr(), source.nbytes))
        else:
            tensors.append((to, source))
    threads = torch.get_num_threads() if torch is not None else len(os.sched_getaffinity(0))
    segment._fill(direct, min(threads, MAX_COPY_THREADS))
    if not tensors or torch is None:
        return
    devices = {source.device for _, source in tensors if source.device.type == "cuda"}
    with torch.no_grad():
        # Segments are registered with CUDA, so these copies run at the speed of the bus, all at
        # once. The loop below waits for them. A copy from a device conjugates or negates in the
        # segment, and does not wait for the bytes to be there, so that is done before.
        sources = [source.detach().resolve_conj().resolve_neg() for _, source in tensors]
        torch._foreach_copy_([to for to, _ in tensors], sources, non_blocking=bool(devices))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _is_plain_memory(value: Any) -> bool:
    torch = sys.modules["torch"]
    return bool(
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.is_cpu
        and value.layout is torch.strided
        and value.is_contiguous()
        and not (value.is_conj() or value.is_neg())
    )


def register(buffer: Any) -> Callable[[], None]:
    """Registers memory with CUDA, so that copies from a device need no buffer in between.

    Returns a function that unregisters it.
    """
    torch = sys.modules["torch"]
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(int(cudart.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)))

    def unregister() -> None:
        cudart.cudaHostUnregister(whole.data_ptr())

    return unregister


def address(value: Any) -> int:
    """Returns the address of the memory of a contiguous tensor or array."""
    return int(value.ctypes.data if is_array(value) else value.data_ptr())


def is_fillable(value: Any) -> bool:
    """Returns whether bytes can be copied straight into the memory of a tensor or array."""
    if is_array(value):
        return bool(value.flags.c_contiguous and value.flags.writeable and value.dtype.isnative)
    return bool(value.device.type == "cpu" and value.is_contiguous() and not value.is_conj() and not value.is_neg())


def memory_span(value: Any) -> tuple[int, int] | None:
    """Returns start and end of a tensor's or array's memory on the host; ``None`` if it is empty or on a device."""
    if is_array(value):
        if not value.size:
            return None
        steps = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
        start = int(value.ctypes.data)
        return start + sum(step for step in steps if step < 0), start + sum(step for step in steps if step > 0) + int(value.itemsize)
    if value.numel() == 0 or value.device.type != "cpu":
        return None
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    start = int(value.data_ptr())
    return start, start + (last + 1) * int(value.element_size())


def check_writable(name: str, value: Any) -> None:
    """Raises :class:`InvalidError` for a destination of a load that cannot receive its elements."""
    if is_array(value) and not value.flags.writeable:
        raise InvalidError(f"{name} cannot be loaded: it is a read-only array", "load into a copy of it")
    strides = value.strides if is_array(value) else value.stride()
    if math.prod(value.shape) > 0 and any(stride == 0 and size > 1 for stride, size in zip(strides, value.shape, strict=True)):
        raise InvalidError(f"{name} cannot be loaded: it is expanded, so elements share memory", "load into a contiguous copy of it")


def scratch_like(value: Any) -> Any:
    """Returns an empty contiguous tensor or array on the host with the shape and type of ``value``."""
    if is_array(value):
        numpy = sys.modules["numpy"]
        return numpy.empty(value.shape, dtype=value.dtype.newbyteorder("="))
    torch = sys.modules["torch"]
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


def put_scratch(value: Any, scratch: Any) -> None:
    """Copies the loaded content from the scratch memory into a tensor or array."""
    if is_array(value):
        value[...] = scratch
        return
    torch = sys.modules["torch"]
    with torch.no_grad():
        value.copy_(scratch)


def new_tensor(element: str, shape: list[int]) -> Any:
    """Returns an empty tensor of an element type and a shape in the host's memory, into which a load copies."""
    return _import_torch().empty(shape, dtype=dtype_of(element), device="cpu")


def new_array(element: str, shape: list[int]) -> Any:
    """Returns an empty numpy array of an element type and a shape, into which a load copies."""
    try:
        import numpy
    except ImportError:
        raise NotFoundError("an array of numpy is stored, and numpy is not installed", "install numpy") from None
    try:
        kind = numpy.dtype(element)
    except TypeError:
        raise InvalidError(f"numpy has no dtype {element!r}", "load with a newer numpy") from None
    return numpy.empty(shape, dtype=kind)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise NotFoundError("a tensor of torch is stored, and torch is not installed", "install torch") from None
    return torch


def dtype_of(element: str) -> Any:
    """Returns the dtype of torch for an element type. Raises :class:`InvalidError` if there is none."""
    torch = _import_torch()
    kind = getattr(torch, element, None)
    if not isinstance(kind, torch.dtype):
        raise InvalidError(f"torch has no dtype {element!r}", "load with a newer torch")
    return kind
