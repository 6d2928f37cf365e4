"""The leaves of a state: its entries, the names that they have, and how an entry is declared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import _native
from .errors import InvalidError

#: A key of a path: 0 and a text, 1 and an integer, or 2 and a position in a list.
Key = tuple[int, str | int]
Keys = tuple[Key, ...]

#: The entry that stores the type and the length of a list or tuple with tensors in it.
SEQUENCE: Key = (0, "__sequence__")

#: The entry that stores the type of a tensor that wraps others, and the names of the wrapped ones.
WRAPPED: Key = (0, "__wrapped__")

#: Flags of a name, stored in the table.
FLAG_ARRAY = 1
FLAG_PICKLE = 2
FLAG_PARAMETER = 4


@dataclass(frozen=True)
class Marked:
    """A part of a state with a declaration."""

    value: Any
    is_private: bool


def per_rank(value: Any) -> Marked:
    """Declares that ``value`` belongs to this rank alone: each rank stores its own, and they are never merged."""
    return Marked(value, True)


def replicated(value: Any) -> Marked:
    """Declares that ``value`` is the same on all ranks: one of them stores it."""
    return Marked(value, False)


@dataclass
class Leaf:
    """An entry of a state."""

    keys: Keys
    value: Any
    #: Whether the entry belongs to this rank alone.
    is_private: bool
    #: A function that puts a loaded plain value in its place. Tensors and arrays are filled in place
    #: instead.
    put: Callable[[Any], None] | None = None
    flags: int = 0
    #: Whether a load keeps the value if the step lacks the entry.
    is_optional: bool = False
    #: A function that raises if a loaded plain value does not fit, before anything is changed. Its second argument
    #: says whether the load is strict.
    check: Callable[[Any, bool], None] | None = None
    #: Whether a shared plain value that differs between the ranks is an error.
    must_be_equal: bool = False
    #: Whether the entry belongs to a module.
    is_of_module: bool = False
    #: Whether a load may put a value of another kind or shape in place: its object receives the value by a call.
    is_replaceable: bool = False
    #: Whether the tensor was made for a load, and has to be put in place.
    is_made: bool = False


#: A function that makes the tensor for a path that only the checkpoint has, from the path, the
#: element type and the shape.
Maker = Callable[[Keys, str, list[int]], Any]


@dataclass
class Flat:
    """The leaves of a state, and functions to call when all of them are loaded."""

    leaves: list[Leaf] = field(default_factory=list)
    finish: list[Callable[[dict[Keys, Any]], None]] = field(default_factory=list)
    #: Prefixes below which an object of the state accepts names without a leaf, and the makers of
    #: their tensors.
    creatable: dict[Keys, Maker] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    #: The modules that DDP keeps equal only on some ranks of the launch.
    partial: list[Keys] = field(default_factory=list)
    #: The error that ended the walk early; ``prepare`` raises it on all ranks.
    error: Exception | None = None


def show(keys: Keys) -> str:
    """Returns the text form of a path."""
    return _native.format_path(list(keys)) if keys else "the state"


def imported_torch() -> Any:
    """Returns torch, or ``None`` if no code of this process has imported it."""
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Returns whether ``value`` is a tensor."""
    torch = imported_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Returns whether ``value`` is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_module(value: Any) -> bool:
    """Returns whether ``value`` is a module."""
    torch = imported_torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Returns whether ``value`` is an optimizer of torch."""
    torch = imported_torch()
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def is_stateful(value: Any) -> bool:
    """Returns whether ``value`` has a state that it returns and loads by itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_same_everywhere(value: Any) -> bool:
    """Returns whether an object's type makes it the same on all ranks: schedulers and scalers follow the optimizer."""
    torch = imported_torch()
    if torch is None:
        return False
    kinds: list[type] = [torch.optim.lr_scheduler.LRScheduler]
    scaler = getattr(getattr(torch, "amp", None), "GradScaler", None)
    if scaler is not None:
        kinds.append(scaler)
    return isinstance(value, tuple(kinds))


def is_dtensor(value: Any) -> bool:
    """Returns whether ``value`` is a tensor that is distributed over ranks."""
    # torch 2.4 has both modules, and the class only in the second one.
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        kind = getattr(sys.modules.get(module), "DTensor", None)
        if kind is not None:
            return isinstance(value, kind)
    return False


def key_of(key: Any, where: Keys) -> Key:
    """Returns a dict's key as a key of a path."""
    if type(key) is str:
        return 0, key
    if type(key) is int:
        if not -(1 << 63) <= key < 1 << 63:
            raise InvalidError(f"the dict at {show(where) or 'the top'} has the key {key}, which has more than 64 bits", "use a text")
        return 1, key
    raise InvalidError(
        f"the dict at {show(where) or 'the top'} has the key {key!r} of type {type(key).__name__}",
        "keys have to be texts or integers",
    )
