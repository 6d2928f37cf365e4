"""Puts what only a checkpoint has into the objects of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._leaves import SEQUENCE, Keys, show
from .errors import InvalidError
from .tensors import new_tensor


def new_on_host(_keys: Keys, element: str, shape: list[int]) -> Any:
    """Returns an empty tensor of an element type and a shape in the host's memory: a :data:`Maker`."""
    return new_tensor(element, shape)


def setter(into: dict[Any, Any], key: Any) -> Callable[[Any], None]:
    """Returns a function that sets a key of a dict."""

    def put(new: Any) -> None:
        into[key] = new

    return put


def extender(mapping: dict[Any, Any], keys: Keys) -> Callable[[dict[Keys, Any]], None]:
    """Returns a function that extends a dict of the state by the entries that only the checkpoint has."""

    def extend(found: dict[Keys, Any]) -> None:
        with_found(mapping, keys, found)

    return extend


def with_found(inner: dict[Any, Any], keys: Keys, found: dict[Keys, Any]) -> dict[Any, Any]:
    """Returns ``inner``, extended by the entries below ``keys`` that only the checkpoint has."""
    new: list[tuple[Any, Any]] = []
    for path, value in found.items():
        if path[: len(keys)] != keys or path[-1] == SEQUENCE:
            continue
        into: Any = inner
        try:
            for depth, (_, key) in enumerate(path[len(keys) : -1], len(keys) + 1):
                if (into.get(key) if isinstance(into, dict) else into[key]) is None:
                    marker = found.get((*path[:depth], SEQUENCE))
                    into[key] = {} if marker is None else [None] * marker[1]
                    if marker is not None and marker[0] == "tuple":
                        new.append((into, key))
                into = into[key]
            into[path[-1][1]] = value
        except (TypeError, IndexError) as error:
            raise InvalidError(f"{show(path)} has no place in the state: {error}", "load into a state of the same structure") from None
    # The innermost ones come last and must be converted first.
    for into, key in reversed(new):
        into[key] = tuple(into[key])
    return inner
