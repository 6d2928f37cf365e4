"""From a training state to named leaves, and the ranks that hold the parts of each.

A state is a (nested) dict of modules, optimizers, objects with ``state_dict`` and ``load_state_dict``, tensors, arrays and
plain values. :func:`flatten` walks it and returns its leaves. The rank that stores a leaf follows from declarations,
never from equal bytes:

- tensors that are ``DTensor`` declare their parts themselves;
- parameters of modules under FSDP, under DDP over all ranks of the launch, and of any module in a world of one rank, are
  the same on all ranks;
- an optimizer's state for a parameter is treated like the parameter. Its settings are the same on all ranks if all its
  parameters are, or are ``DTensor``. An optimizer whose class has a ``state_dict`` of its own may differ between ranks;
- schedulers and gradient scalers are the same on all ranks;
- :func:`rapidraid.replicated` and :func:`rapidraid.per_rank` declare anything else;
- everything that is not declared is private to its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import _optimizers
from ._found import extender, new_on_host, setter, with_found
from ._leaves import (
    FLAG_PARAMETER,
    SEQUENCE,
    WRAPPED,
    Flat,
    Key,
    Keys,
    Leaf,
    Marked,
    imported_torch,
    is_array,
    is_dtensor,
    is_module,
    is_optimizer,
    is_same_everywhere,
    is_stateful,
    is_tensor,
    key_of,
    show,
)
from ._modules import (
    Named,
    UnwrappedModule,
    acts_on_loads,
    bare_name,
    find_parameters,
    is_never,
    is_of_fsdp1,
    is_same_memory,
    load_itself,
    refuse_fsdp1,
    unwrap_module,
)
from .errors import InvalidError


def flatten(state: Mapping[Any, Any], world: int, ranks: Sequence[int] | None = None, stored: Iterable[Keys] = ()) -> Flat:
    """Returns the leaves of a state.

    Args:
        state: The state.
        world: The number of ranks of the launch.
        ranks: The numbers of these ranks in the default group. Default: all ranks of that group.
        stored: The names of the step that is loaded, from which optimizers learn how it names their parameters.

    """
    if not isinstance(state, Mapping):
        raise InvalidError(f"a state is a dict, not {type(state).__name__}", 'pass {"model": model, "optimizer": optimizer}')
    walk = Walk(world, ranks)
    walk.parameters = find_parameters(state, ranks)
    walk.labels = _optimizers.labels_of(stored)
    walk.mapping((), state, None)
    return walk.flat


class Walk:
    """A walk over a state, which collects its leaves."""

    def __init__(self, world: int, ranks: Sequence[int] | None) -> None:
        self.world = world
        self.ranks = ranks
        self.flat = Flat()
        #: The parameters of the state's modules, by identity.
        self.parameters: dict[int, Named] = {}
        #: The labels of parameters in the step that is loaded, by the path of an optimizer's state.
        self.labels: dict[Keys, set[Key]] = {}

    def mapping(self, keys: Keys, mapping: Mapping[Any, Any], is_private: bool | None) -> None:
        """Walks a dict. ``is_private`` is the declaration of the nearest mark above it."""
        if not mapping and keys:
            self.leaf(keys, {}, is_private, None)
        if keys and type(mapping) is dict and not self.is_creatable(keys) and not _has_arrays(mapping):
            # Its keys may come and go, as those of metrics do.
            self.flat.creatable[keys] = new_on_host
            self.flat.finish.append(extender(mapping, keys))
        for key, value in mapping.items():
            below = (*keys, key_of(key, keys))

            def put(new: Any, key: Any = key) -> None:
                mapping[key] = new  # type: ignore[index]

            self.value(below, value, is_private, put)

    def value(self, keys: Keys, value: Any, is_private: bool | None, put: Callable[[Any], None] | None) -> None:
        """Walks a value of any kind."""
        torch = imported_torch()
        if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
            self.flat.leaves.append(Leaf(keys, value, is_private is not False, put))
        elif isinstance(value, Marked):
            # A nearer mark overrides one above it. The loaded value is put inside the mark.
            self.value(keys, value.value, value.is_private, None if put is None else _remark(put, value))
        elif is_tensor(value):
            self.tensor(keys, value, is_private, put)
        elif is_array(value):
            self.leaf(keys, value, is_private, put)
        elif is_module(value):
            self.module(keys, value, is_private)
        elif is_optimizer(value):
            self.optimizer(keys, value, is_private)
        elif isinstance(value, Mapping):
            if type(value) is dict or _has_arrays(value):
                self.mapping(keys, value, is_private)
            else:
                self.leaf(keys, value, is_private, put)
        elif isinstance(value, (list, tuple)) and _has_arrays(value):
            self.sequence(keys, value, is_private, put)
        elif is_stateful(value):
            self.stateful(keys, value, is_private)
        else:
            self.leaf(keys, value, is_private, put)

    def is_creatable(self, keys: Keys) -> bool:
        """Returns whether an object at or above a path accepts names that have no leaf."""
        return any(keys[:end] in self.flat.creatable for end in range(1, len(keys) + 1))

    def leaf(self, keys: Keys, value: Any, is_private: bool | None, put: Callable[[Any], None] | None, **more: Any) -> None:
        """Adds a leaf.

        Without a declaration it is private, unless it is a ``DTensor``, which declares its parts itself.
        """
        private = not is_dtensor(value) if is_private is None else is_private
        self.flat.leaves.append(Leaf(keys, value, private, put, must_be_equal=not private, **more))

    def tensor(self, keys: Keys, value: Any, is_private: bool | None, put: Callable[[Any], None] | None, flags: int = 0) -> None:
        """Adds a tensor. A tensor that only wraps others, such as quantized weights, is stored as the wrapped ones."""
        if is_dtensor(value) or not hasattr(value, "__tensor_flatten__"):
            self.leaf(keys, value, is_private, put, flags=flags)
            return
        names, _ = value.__tensor_flatten__()
        self.leaf((*keys, WRAPPED), [type(value).__qualname__, list(names)], is_private, None)
        for name in names:
            # The wrapped tensors are filled in place.
            self.tensor((*keys, (0, name)), getattr(value, name), is_private, None, flags)

    def sequence(self, keys: Keys, items: Any, is_private: bool | None, put: Callable[[Any], None] | None) -> None:
        """Walks a list or tuple that contains tensors. A load replaces a tuple by a new one."""
        loaded = list(items)

        def grow(marker: Any) -> None:
            if isinstance(items, list):
                items.extend([None] * (marker[1] - len(items)))

        self.leaf((*keys, SEQUENCE), [type(items).__name__, len(loaded)], is_private, grow)
        for at, item in enumerate(loaded):

            def place(new: Any, at: int = at) -> None:
                if isinstance(items, list):
                    items[at] = new
                else:
                    loaded[at] = new
                    if put is not None:
                        put(type(items)(*loaded) if hasattr(items, "_fields") else type(items)(loaded))

            self.value((*keys, (2, at)), item, is_private, place)

    def module(self, keys: Keys, wrapped: Any, is_private: bool | None) -> None:
        """Walks a module. Its parameters and buffers are filled in place."""
        unwrapped = unwrap_module(wrapped, self.ranks)
        module, is_synchronised = unwrapped.module, unwrapped.is_synchronised
        parameters = {bare_name(name): (name, value) for name, value in module.named_parameters(remove_duplicate=False)}
        if is_of_fsdp1(value for _, value in parameters.values()):
            raise refuse_fsdp1(keys, "a FullyShardedDataParallel module")
        if is_private is None and self.world > 1:
            self.warn_of_copies(keys, unwrapped)
        buffers = {bare_name(name): value for name, value in module.named_buffers(remove_duplicate=False)}
        extra: dict[str, Any] = {}
        begin = len(self.flat.leaves)
        for name, value in module.state_dict().items():
            below = (*keys, (0, name))
            wrapped_name, own = parameters.get(name, (name, buffers.get(name)))
            if is_tensor(value) and own is not None and is_same_memory(value, own):
                is_parameter = name in parameters
                private = is_private
                if private is None:
                    # DDP and FSDP do not synchronise buffers after the step that changed them.
                    private = self.world > 1 and not (is_parameter and is_synchronised(wrapped_name, own))
                    private = private and not is_dtensor(value)
                self.tensor(below, value, private, None, flags=FLAG_PARAMETER if is_parameter else 0)
            else:
                # The module made this entry for its state_dict, and receives it again through
                # load_state_dict.
                extra[name] = value
                made = len(self.flat.leaves)
                self.value(below, value, is_private if is_private is not None or self.world > 1 else False, setter(extra, name))
                self.mark_replaceable(made)
        for leaf in self.flat.leaves[begin:]:
            leaf.is_of_module = True
        if extra or acts_on_loads(module):
            self.flat.finish.append(lambda _: load_itself(module, extra))

    def mark_replaceable(self, begin: int) -> None:
        """Lets a load replace the leaves from ``begin`` on by values of another kind or shape."""
        for leaf in self.flat.leaves[begin:]:
            leaf.is_replaceable = leaf.put is not None and not is_dtensor(leaf.value)

    def warn_of_copies(self, keys: Keys, module: UnwrappedModule) -> None:
        """Warns of a module without a declaration of which each rank stores a copy."""
        if module.some_ranks is not None:
            self.flat.partial.append(keys)
            self.flat.warnings.append(
                f"{show(keys)} is under DDP over the ranks {module.some_ranks}, which are not all: each rank stores its own copy. "
                "Wrap it in rapidraid.replicated() if no other rank has a different parameter under one of its names"
            )
        elif module.is_synchronised is is_never:
            self.flat.warnings.append(
                f"{show(keys)} is a plain module in a world of {self.world} ranks: each rank stores its own copy. "
                "Wrap it in rapidraid.replicated() if it is the same on all ranks"
            )

    def optimizer(self, keys: Keys, optimizer: Any, is_private: bool | None) -> None:
        """Walks an optimizer: entry by entry, unless its ``state_dict`` has more than torch's own would have."""
        found = _optimizers.unwrap(optimizer)
        if is_of_fsdp1(parameter for group in found.param_groups for parameter in group["params"]):
            raise refuse_fsdp1(keys, "an optimizer of a FullyShardedDataParallel module")
        if _optimizers.has_own_state_dict(found):
            _optimizers.check_complete(keys, found)
            # The content may differ between ranks, whatever its parameters do.
            self.stateful(keys, found, is_private if is_private is not None or self.world > 1 else False)
        else:
            _optimizers.walk(self, keys, found, is_private)

    def stateful(self, keys: Keys, value: Any, is_private: bool | None) -> None:
        """Walks an object with ``state_dict`` and ``load_state_dict``."""
        inner = value.state_dict()
        if not isinstance(inner, Mapping):
            raise InvalidError(f"state_dict() of {show(keys)} returned {type(inner).__name__}", "it has to return a dict")
        declared = False if is_private is None and is_same_everywhere(value) else is_private
        inner = dict(inner)
        self.flat.creatable[keys] = new_on_host
        begin = len(self.flat.leaves)
        self.mapping(keys, inner, declared)
        self.mark_replaceable(begin)
        self.flat.finish.append(lambda found: value.load_state_dict(with_found(inner, keys, found)))


def _remark(put: Callable[[Any], None], mark: Marked) -> Callable[[Any], None]:
    return lambda new: put(Marked(new, mark.is_private))


def _has_arrays(value: Any) -> bool:
    """Returns whether a container contains, at any depth, a tensor, an array, a mark, or an object with a state."""
    items = value.values() if isinstance(value, Mapping) else value
    return any(
        is_tensor(item)
        or is_array(item)
        or isinstance(item, Marked)
        or (is_stateful(item) and not isinstance(item, type))
        or (isinstance(item, (Mapping, list, tuple)) and _has_arrays(item))
        for item in items
    )
