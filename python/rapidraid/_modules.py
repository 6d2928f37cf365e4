"""The modules of a state: their wrappers, their parameters, and what a load changes in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._leaves import Keys, Marked, imported_torch, is_dtensor, is_module, show
from .errors import InvalidError


def is_never(_name: str, _parameter: Any) -> bool:
    """Returns false: no parameter is kept equal on all ranks."""
    return False


@dataclass(frozen=True)
class UnwrappedModule:
    """A module without its DDP wrapper."""

    module: Any
    #: Returns whether a parameter, of which it gets the name and the tensor, is kept equal on all ranks.
    is_synchronised: Callable[[str, Any], bool] = is_never
    #: The ranks that DDP keeps equal, if these are not all ranks of the launch.
    some_ranks: list[int] | None = None


def unwrap_module(module: Any, ranks: Sequence[int] | None) -> UnwrappedModule:
    """Returns a module without its DDP wrapper, and which of its parameters are kept equal on all ranks.

    A module that ``torch.compile`` returned is looked through, and keeps the prefix that it gives to names. ``ranks`` are
    those of the launch, as for :func:`state.flatten`.
    """
    torch = imported_torch()
    inner, prefix = _uncompiled(module)
    parallel = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    if parallel is not None and isinstance(inner, parallel):
        bare = module if prefix else inner.module
        some_ranks = _ranks_of_some(inner, ranks)
        if some_ranks is not None:
            return UnwrappedModule(bare, some_ranks=some_ranks)
        ignored = set(getattr(inner, "parameters_to_ignore", ()))
        begin = f"{prefix}module." if prefix else ""
        return UnwrappedModule(bare, lambda name, _: name.removeprefix(begin) not in ignored)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if sharded is not None and isinstance(inner, sharded):
        # A plain tensor in such a module was excluded (ignored_params): each rank trains its own.
        return UnwrappedModule(module, lambda _, parameter: is_dtensor(parameter))
    return UnwrappedModule(module)


def _ranks_of_some(parallel: Any, ranks: Sequence[int] | None) -> list[int] | None:
    """Returns the ranks that a DDP module keeps equal if ranks of the launch are not among them, otherwise ``None``."""
    distributed = imported_torch().distributed
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


def load_itself(module: Any, extra: dict[str, Any]) -> None:
    """Gives a module the state that it has, with the entries ``extra``. What is in place already is copied onto itself."""
    # The dict that the module makes also has the versions of its parts.
    state = module.state_dict()
    state.update(extra)
    if type(module).load_state_dict is imported_torch().nn.Module.load_state_dict:
        # A hook may leave names out of the state_dict, or give them others.
        module.load_state_dict(state, strict=False)
    else:
        module.load_state_dict(state)


def acts_on_loads(module: Any) -> bool:
    """Returns whether a load of the module does more than to copy its parameters and buffers."""
    plain = imported_torch().nn.Module
    own = ("load_state_dict", "_load_from_state_dict")
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or any(getattr(type(part), name) is not getattr(plain, name) for name in own)
        for part in module.modules()
    )


#: The prefix that ``checkpoint_wrapper`` of torch gives to the names of parameters, and takes from those of a state_dict.
_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module."


def bare_name(name: str) -> str:
    """Returns a parameter's or buffer's name as the state_dict of its module has it."""
    return name.replace(_CHECKPOINT_WRAPPED, "")


def is_same_memory(value: Any, own: Any) -> bool:
    """Returns whether filling an entry of a module's state_dict fills the module's own tensor."""
    if value is own or value.is_meta or value.numel() == 0:
        return True
    if is_dtensor(value) or is_dtensor(own):
        # Autograd would record each of these views, which takes as long as the state_dict itself.
        with imported_torch().no_grad():
            return is_dtensor(value) and is_dtensor(own) and is_same_memory(value.to_local(), own.to_local())
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return type(value) is type(own) and all(is_same_memory(getattr(value, name), getattr(own, name)) for name in names)
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


def find_parameters(state: Mapping[Any, Any], ranks: Sequence[int] | None) -> dict[int, Named]:
    """Returns the parameters of the state's modules, by their identities.

    If modules have names in common, as a generator and a critic do, each name begins with the module's path.
    """
    found = [(prefix, bare_name(name), name, *more) for prefix, name, *more in _parameters_below("", state.items(), None, ranks)]
    first: dict[str, int] = {}
    is_ambiguous = any(first.setdefault(name, id(parameter)) != id(parameter) for _, name, _, parameter, _ in found)
    named: dict[int, Named] = {}
    for prefix, short, wrapped, parameter, declared in found:
        name, other = (f"{prefix}{short}", short) if is_ambiguous else (short, f"{prefix}{short}")
        earlier = f"{prefix}{wrapped}" if is_ambiguous else wrapped
        named.setdefault(id(parameter), Named(name, other, earlier, parameter, declared))
    return named


def reshard(module: Any) -> None:
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
        if is_module(inner):
            found = unwrap_module(inner, ranks)
            reshard(found.module)
            for name, parameter in found.module.named_parameters():
                declared = found.is_synchronised(name, parameter) if mark is None else not mark
                yield f"{prefix}{key}.", name, parameter, declared
        elif isinstance(inner, Mapping):
            yield from _parameters_below(f"{prefix}{key}.", inner.items(), mark, ranks)
        elif isinstance(inner, (list, tuple)):
            yield from _parameters_below(f"{prefix}{key}.", enumerate(inner), mark, ranks)
