"""Objects that are stored as plain values: torch's small types and scalars, numpy's scalars, and some containers of Python.

Each kind has a name, and a plain value represents the object. To describe an object, this module does not import torch or
numpy: an object of theirs exists only if they are already imported.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from typing import Any


def describe(value: Any) -> tuple[str, Any] | None:
    """Returns the kind's name and a plain value that represents ``value``, or ``None`` if its kind is unknown."""
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(value, torch.dtype):
            return "torch.dtype", str(value).removeprefix("torch.")
        if isinstance(value, torch.Size):
            return "torch.Size", [int(size) for size in value]
        if isinstance(value, torch.device):
            return "torch.device", str(value)
        if type(value) is torch.Tensor and value.dim() == 0 and value.layout is torch.strided and not value.is_meta:
            local = value.detach().cpu().contiguous().reshape(1)
            return "torch.Tensor", [str(local.dtype).removeprefix("torch."), bytes(local.view(torch.uint8).tolist())]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        kind = value.dtype
        if kind.hasobject or kind.names is not None:
            return None
        return "numpy", [kind.newbyteorder("<").str, value.astype(kind.newbyteorder("<")).tobytes()]
    if type(value) is OrderedDict:
        return "OrderedDict", dict(value)
    if type(value) is Counter:
        return "Counter", dict(value)
    if type(value) is range:
        return "range", [value.start, value.stop, value.step]
    if type(value) is set and all(type(item) in (int, str, bytes, bool, float) for item in value):
        return "set", sorted(value, key=repr)
    return None


def restore(kind: str, value: Any) -> Any:
    """Returns the value that :func:`describe` described."""
    from .errors import InvalidError, NotFoundError

    if kind == "OrderedDict":
        return OrderedDict(value)
    if kind == "Counter":
        return Counter(value)
    if kind == "range":
        return range(*value)
    if kind == "set":
        return set(value)
    package = kind.split(".")[0]
    try:
        if package == "torch":
            import torch

            if kind in ("torch.dtype", "torch.Tensor"):
                name = value if kind == "torch.dtype" else value[0]
                found = getattr(torch, name, None)
                if not isinstance(found, torch.dtype):
                    raise InvalidError(f"torch has no dtype {name!r}", "load with a newer torch")
                return found if kind == "torch.dtype" else torch.frombuffer(bytearray(value[1]), dtype=found).reshape(())
            if kind == "torch.Size":
                return torch.Size(value)
            if kind == "torch.device":
                return torch.device(value)
        if kind == "numpy":
            import numpy

            kind_of = numpy.dtype(value[0])
            # A text without characters has elements of no bytes, and was stored with more.
            return numpy.frombuffer(value[1], dtype=kind_of)[0] if kind_of.itemsize else numpy.zeros(1, kind_of)[0]
    except ImportError:
        raise NotFoundError(f"a value of {package} is stored, and {package} is not installed", f"install {package}") from None
    raise InvalidError(f"a value of the unknown kind {kind!r} is stored", "load with a newer rapidraid")
