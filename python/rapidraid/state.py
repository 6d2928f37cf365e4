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
- :func:`replicated` and :func:`per_rank` declare anything else;
- everything that is not declared is private to its rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def _torch() -> Any:
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Returns whether ``value`` is a tensor."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Returns whether ``value`` is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_module(value: Any) -> bool:
    torch = _torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_optimizer(value: Any) -> bool:
    torch = _torch()
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_same_everywhere(value: Any) -> bool:
    """Returns whether an object's type makes it the same on all ranks: schedulers and scalers follow the optimizer."""
    torch = _torch()
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
    # That module imports this one.
    from ._optimizers import labels_of

    walk = Walk(world, ranks)
    walk.parameters = _named_parameters(state, ranks)
    walk.labels = labels_of(stored)
    walk.mapping((), state, None)
    return walk.flat


def _is_never(_name: str, _parameter: Any) -> bool:
    return False


@dataclass(frozen=True)
class _Unwrapped:
    """A module without its DDP wrapper."""

    module: Any
    #: Returns whether a parameter, of which it gets the name and the tensor, is kept equal on all ranks.
    is_synchronised: Callable[[str, Any], bool] = _is_never
    #: The ranks that DDP keeps equal, if these are not all ranks of the launch.
    some_ranks: list[int] | None = None


def _unwrap(module: Any, ranks: Sequence[int] | None) -> _Unwrapped:
    """Returns a module without its DDP wrapper, and which of its parameters are kept equal on all ranks.

    A module that ``torch.compile`` returned is looked through, and keeps the prefix that it gives to names. ``ranks`` are
    those of the launch, as for :func:`flatten`.
    """
    torch = _torch()
    inner, prefix = _uncompiled(module)
    parallel = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    if parallel is not None and isinstance(inner, parallel):
        bare = module if prefix else inner.module
        some_ranks = _ranks_of_some(inner, ranks)
        if some_ranks is not None:
            return _Unwrapped(bare, some_ranks=some_ranks)
        ignored = set(getattr(inner, "parameters_to_ignore", ()))
        begin = f"{prefix}module." if prefix else ""
        return _Unwrapped(bare, lambda name, _: name.removeprefix(begin) not in ignored)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if sharded is not None and isinstance(inner, sharded):
        # A plain tensor in such a module was excluded (ignored_params): each rank trains its own.
        return _Unwrapped(module, lambda _, parameter: is_dtensor(parameter))
    return _Unwrapped(module)


def _ranks_of_some(parallel: Any, ranks: Sequence[int] | None) -> list[int] | None:
    """Returns the ranks that a DDP module keeps equal if ranks of the launch are not among them, otherwise ``None``."""
    distributed = _torch().distributed
    group = parallel.process_group
    if not distributed.is_initialized() or group is distributed.group.WORLD:
        return None
    found = distributed.get_process_group_ranks(group)
    # Before torch 2.8, ``None`` is no group of this function.
    everyone = distributed.get_process_group_ranks(distributed.group.WORLD) if ranks is None else ranks
    return None if set(everyone) <= set(found) else sorted(found)


def is_of_fsdp1(parameters: Iterable[Any]) -> bool:
    """Returns whether any of the parameters belongs to a ``FullyShardedDataParallel`` module."""
    # That module sets the mark on its flat parameter and on the original ones (use_orig_params).
    return any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters)


def refuse_fsdp1(keys: Keys, what: str) -> InvalidError:
    """Returns the error for a module, or for its optimizer, of which no rank has whole parameters."""
    return InvalidError(
        f"{show(keys)} is {what} (FSDP1), whose parameters are flat pieces without names of their own",
        "shard the model by torch.distributed.fsdp.fully_shard (FSDP2)",
    )


def _uncompiled(module: Any) -> tuple[Any, str]:
    """Returns the module that ``torch.compile`` wraps, and the prefix of its names; the module itself if it is not wrapped."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled = getattr(dynamo, "OptimizedModule", None)
    if compiled is not None and isinstance(module, compiled):
        return module._orig_mod, "_orig_mod."
    return module, ""


def _load_itself(module: Any, extra: dict[str, Any]) -> None:
    """Gives a module the state that it has, with the entries ``extra``. What is in place already is copied onto itself."""
    # The dict that the module makes also has the versions of its parts.
    state = module.state_dict()
    state.update(extra)
    if type(module).load_state_dict is _torch().nn.Module.load_state_dict:
        # A hook may leave names out of the state_dict, or give them others.
        module.load_state_dict(state, strict=False)
    else:
        module.load_state_dict(state)


def _acts_on_loads(module: Any) -> bool:
    """Returns whether a load of the module does more than to copy its parameters and buffers."""
    plain = _torch().nn.Module
    own = ("load_state_dict", "_load_from_state_dict")
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or any(getattr(type(part), name) is not getattr(plain, name) for name in own)
        for part in module.modules()
    )


#: The prefix that ``checkpoint_wrapper`` of torch gives to the names of parameters, and takes from those of a state_dict.
_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module."


def _bare(name: str) -> str:
    """Returns a parameter's or buffer's name as the state_dict of its module has it."""
    return name.replace(_CHECKPOINT_WRAPPED, "")


def _is_same_memory(value: Any, own: Any) -> bool:
    """Returns whether filling an entry of a module's state_dict fills the module's own tensor."""
    if value is own or value.is_meta or value.numel() == 0:
        return True
    if is_dtensor(value) or is_dtensor(own):
        # Autograd would record each of these views, which takes as long as the state_dict itself.
        with _torch().no_grad():
            return is_dtensor(value) and is_dtensor(own) and _is_same_memory(value.to_local(), own.to_local())
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return type(value) is type(own) and all(_is_same_memory(getattr(value, name), getattr(own, name)) for name in names)
    try:
        return bool(value.data_ptr() == own.data_ptr() and value.stride() == own.stride())
    except (RuntimeError, NotImplementedError):
        # The value has no memory of its own, and is refused by name elsewhere.
        return True


@dataclass(frozen=True)
class Named:
    """A parameter of a module of the state."""

    #: The name that a save of this state gives it.
    name: str
    #: The name that a save gives it together with other modules.
    other: str
    #: The name that earlier releases gave it: with the prefixes of ``checkpoint_wrapper``.
    earlier: str
    parameter: Any
    #: Whether it is declared to be the same on all ranks.
    is_declared: bool


def _named_parameters(state: Mapping[Any, Any], ranks: Sequence[int] | None) -> dict[int, Named]:
    """Returns the parameters of the state's modules, by their identities.

    If modules have names in common, as a generator and a critic do, each name begins with the module's path.
    """
    found = [(prefix, _bare(name), name, *more) for prefix, name, *more in _parameters_below("", state.items(), None, ranks)]
    first: dict[str, int] = {}
    is_ambiguous = any(first.setdefault(name, id(parameter)) != id(parameter) for _, name, _, parameter, _ in found)
    named: dict[int, Named] = {}
    for prefix, short, wrapped, parameter, declared in found:
        name, other = (f"{prefix}{short}", short) if is_ambiguous else (short, f"{prefix}{short}")
        earlier = f"{prefix}{wrapped}" if is_ambiguous else wrapped
        named.setdefault(id(parameter), Named(name, other, earlier, parameter, declared))
    return named


def _reshard(module: Any) -> None:
    """Gives the modules under FSDP2 their shards back, if an evaluation without gradients has left whole parameters.

    A module whose forward or backward is under way keeps what it has.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for inner in module.modules():
        if not isinstance(inner, kind) or all(is_dtensor(parameter) for parameter in inner.parameters()):
            continue
        state = inner._get_fsdp_state()
        phase = getattr(getattr(state, "_training_state", None), "name", "IDLE")
        if phase == "IDLE":
            inner.reshard()


#: Types of values below which there are no modules.
_SIMPLE = frozenset({int, float, bool, str, bytes, type(None)})


def _parameters_below(
    prefix: str, items: Iterable[tuple[Any, Any]], is_private: bool | None, ranks: Sequence[int] | None
) -> Iterator[tuple[str, str, Any, bool]]:
    """Yields the prefix, the name and the tensor of each parameter, and whether it is declared to be the same on all ranks.

    ``is_private`` is the declaration of the nearest mark above the items.
    """
    for key, value in items:
        if type(value) in _SIMPLE:
            continue
        inner, mark = (value.value, value.is_private) if isinstance(value, Marked) else (value, is_private)
        if _is_module(inner):
            found = _unwrap(inner, ranks)
            _reshard(found.module)
            for name, parameter in found.module.named_parameters():
                declared = found.is_synchronised(name, parameter) if mark is None else not mark
                yield f"{prefix}{key}.", name, parameter, declared
        elif isinstance(inner, Mapping):
            yield from _parameters_below(f"{prefix}{key}.", inner.items(), mark, ranks)
        elif isinstance(inner, (list, tuple)):
            yield from _parameters_below(f"{prefix}{key}.", enumerate(inner), mark, ranks)


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
            self.flat.finish.append(_extender(mapping, keys))
        for key, value in mapping.items():
            below = (*keys, key_of(key, keys))

            def put(new: Any, key: Any = key) -> None:
                mapping[key] = new  # type: ignore[index]

            self.value(below, value, is_private, put)

    def value(self, keys: Keys, value: Any, is_private: bool | None, put: Callable[[Any], None] | None) -> None:
        """Walks a value of any kind."""
        torch = _torch()
        if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
            self.flat.leaves.append(Leaf(keys, value, is_private is not False, put))
        elif isinstance(value, Marked):
            # A nearer mark overrides one above it. The loaded value is put inside the mark.
            self.value(keys, value.value, value.is_private, None if put is None else _remark(put, value))
        elif is_tensor(value):
            self.tensor(keys, value, is_private, put)
        elif is_array(value):
            self.leaf(keys, value, is_private, put)
        elif _is_module(value):
            self.module(keys, value, is_private)
        elif _is_optimizer(value):
            self.optimizer(keys, value, is_private)
        elif isinstance(value, Mapping):
            if type(value) is dict or _has_arrays(value):
                self.mapping(keys, value, is_private)
            else:
                self.leaf(keys, value, is_private, put)
        elif isinstance(value, (list, tuple)) and _has_arrays(value):
            self.sequence(keys, value, is_private, put)
        elif _is_stateful(value):
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
        unwrapped = _unwrap(wrapped, self.ranks)
        module, is_synchronised = unwrapped.module, unwrapped.is_synchronised
        parameters = {_bare(name): (name, value) for name, value in module.named_parameters(remove_duplicate=False)}
        if is_of_fsdp1(value for _, value in parameters.values()):
            raise refuse_fsdp1(keys, "a FullyShardedDataParallel module")
        if is_private is None and self.world > 1:
            self.warn_of_copies(keys, unwrapped)
        buffers = {_bare(name): value for name, value in module.named_buffers(remove_duplicate=False)}
        extra: dict[str, Any] = {}
        begin = len(self.flat.leaves)
        for name, value in module.state_dict().items():
            below = (*keys, (0, name))
            wrapped_name, own = parameters.get(name, (name, buffers.get(name)))
            if is_tensor(value) and own is not None and _is_same_memory(value, own):
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
        if extra or _acts_on_loads(module):
            self.flat.finish.append(lambda _: _load_itself(module, extra))

    def mark_replaceable(self, begin: int) -> None:
        """Lets a load replace the leaves from ``begin`` on by values of another kind or shape."""
        for leaf in self.flat.leaves[begin:]:
            leaf.is_replaceable = leaf.put is not None and not is_dtensor(leaf.value)

    def warn_of_copies(self, keys: Keys, module: _Unwrapped) -> None:
        """Warns of a module without a declaration of which each rank stores a copy."""
        if module.some_ranks is not None:
            self.flat.partial.append(keys)
            self.flat.warnings.append(
                f"{show(keys)} is under DDP over the ranks {module.some_ranks}, which are not all: each rank stores its own copy. "
                "Wrap it in rapidraid.replicated() if no other rank has a different parameter under one of its names"
            )
        elif module.is_synchronised is _is_never:
            self.flat.warnings.append(
                f"{show(keys)} is a plain module in a world of {self.world} ranks: each rank stores its own copy. "
                "Wrap it in rapidraid.replicated() if it is the same on all ranks"
            )

    def optimizer(self, keys: Keys, optimizer: Any, is_private: bool | None) -> None:
        """Walks an optimizer: entry by entry, unless its ``state_dict`` has more than torch's own would have."""
        # That module imports this one.
        from . import _optimizers

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
        declared = False if is_private is None and _is_same_everywhere(value) else is_private
        inner = dict(inner)
        self.flat.creatable[keys] = new_on_host
        begin = len(self.flat.leaves)
        self.mapping(keys, inner, declared)
        self.mark_replaceable(begin)
        self.flat.finish.append(lambda found: value.load_state_dict(with_found(inner, keys, found)))


def new_on_host(_keys: Keys, element: str, shape: list[int]) -> Any:
    """Returns an empty tensor of an element type and a shape in the host's memory: a :data:`Maker`."""
    # That module imports this one.
    from .tensors import new_tensor

    return new_tensor(element, shape)


def _remark(put: Callable[[Any], None], mark: Marked) -> Callable[[Any], None]:
    return lambda new: put(Marked(new, mark.is_private))


def setter(into: dict[Any, Any], key: Any) -> Callable[[Any], None]:
    """Returns a function that sets a key of a dict."""

    def put(new: Any) -> None:
        into[key] = new

    return put


def _has_arrays(value: Any) -> bool:
    """Returns whether a container contains, at any depth, a tensor, an array, a mark, or an object with a state."""
    items = value.values() if isinstance(value, Mapping) else value
    return any(
        is_tensor(item)
        or is_array(item)
        or isinstance(item, Marked)
        or (_is_stateful(item) and not isinstance(item, type))
        or (isinstance(item, (Mapping, list, tuple)) and _has_arrays(item))
        for item in items
    )


def _extender(mapping: dict[Any, Any], keys: Keys) -> Callable[[dict[Keys, Any]], None]:
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
