"""Optimizers: which of them are stored entry by entry, and how a load gives them their settings and their state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._found import new_on_host, setter, with_found
from ._leaves import Key, Keys, Maker, is_dtensor, is_tensor, key_of, show
from ._modules import Named
from .errors import InvalidError
from .tensors import dtype_of

if TYPE_CHECKING:
    from .state import Walk

#: The packages whose wrappers of optimizers keep no state of their own.
WRAPPERS = ("accelerate", "lightning", "lightning_fabric")
_GROUPS: Key = (0, "groups")
_STATE: Key = (0, "state")
_MEMBERS = "params"


def unwrap(optimizer: Any) -> Any:
    """Returns the optimizer inside the wrapper of a framework, or the optimizer itself."""
    while type(optimizer).__module__.partition(".")[0] in WRAPPERS:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, sys.modules["torch"].optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def has_own_state_dict(optimizer: Any) -> bool:
    """Returns whether an optimizer's class has a ``state_dict`` of its own, so that its state may not be where torch keeps it."""
    # A class that has only a load_state_dict of its own keeps all that it saves where torch keeps it.
    return type(optimizer).state_dict is not sys.modules["torch"].optim.Optimizer.state_dict


def check_complete(keys: Keys, optimizer: Any) -> None:
    """Raises :class:`InvalidError` for an optimizer whose ``state_dict`` does not have the state of this rank."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise InvalidError(
            f"{show(keys)} is a {type(optimizer).__name__}, whose ranks keep different parts of the state and do not name them",
            "shard the model and its optimizer by FSDP2 (fully_shard), or use a plain optimizer",
        )


@dataclass(frozen=True)
class _Member:
    """A parameter of an optimizer."""

    #: The parameter's name, or its position among all parameters.
    label: Key
    parameter: Any
    #: Whether the parameter is declared to be the same on all ranks.
    is_declared: bool


@dataclass(frozen=True)
class _Members:
    """The parameters of an optimizer, by identity, and the labels of each group."""

    by_id: dict[int, _Member]
    groups: list[list[str | int]]
    is_named: bool
    #: The names that the parameters have in steps that were saved with other modules.
    others: frozenset[str | int]
    #: Whether the step has state under any of the labels.
    is_found: bool

    @property
    def labels(self) -> set[str | int]:
        """The labels of all groups."""
        return {label for labels in self.groups for label in labels}


def labels_of(stored: Iterable[Keys]) -> dict[Keys, set[Key]]:
    """Returns the labels of the parameters in a step, by each path that may be that of an optimizer's state."""
    found: dict[Keys, set[Key]] = {}
    for keys in stored:
        for at in range(1, len(keys)):
            if keys[at - 1] == _STATE:
                found.setdefault(keys[:at], set()).add(keys[at])
    return found


def _spellings(parameters: list[Any], named: Mapping[int, Named]) -> list[list[Key]]:
    """Returns the labels that a save may have given to the parameters, in the order of preference; positions are the last ones.

    The names depend on the other modules of the state. Positions are used if a parameter belongs to none of them.
    """
    positions: list[Key] = [(1, at) for at in range(len(parameters))]
    if not all(id(parameter) in named for parameter in parameters):
        return [positions]
    names: list[Key] = [(0, named[id(parameter)].name) for parameter in parameters]
    others: list[Key] = [(0, named[id(parameter)].other) for parameter in parameters]
    earlier: list[Key] = [(0, named[id(parameter)].earlier) for parameter in parameters]
    # Without its module's path, a name may stand for several parameters.
    is_unique = len(set(others)) == len({id(parameter) for parameter in parameters})
    return [names, others, earlier, positions] if is_unique else [names, earlier, positions]


def _members(optimizer: Any, named: Mapping[int, Named], stored: set[Key]) -> _Members:
    """Labels the parameters: in a load as the step does, whose labels are ``stored``; otherwise as a save does."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group[_MEMBERS]]
    spellings = _spellings(parameters, named)
    labels = max(spellings, key=lambda spelling: len(stored.intersection(spelling)))
    others = frozenset(label[1] for spelling in spellings[:-1] if spelling is not labels for label in spelling)
    found = _Members({}, [], labels is not spellings[-1], others, not stored.isdisjoint(labels))
    left = iter(labels)
    for group in optimizer.param_groups:
        found.groups.append([])
        for parameter, label in zip(group[_MEMBERS], left, strict=False):
            is_declared = id(parameter) in named and named[id(parameter)].is_declared
            found.by_id[id(parameter)] = _Member(label, parameter, is_declared)
            found.groups[-1].append(label[1])
    return found


def walk(walk: Walk, keys: Keys, optimizer: Any, is_private: bool | None) -> None:
    """Adds the leaves of an optimizer: the settings of its groups, and its state by parameter."""
    members = _members(optimizer, walk.parameters, walk.labels.get((*keys, _STATE), set()))
    if walk.world > 1 and is_private is None:
        _check_named(walk, keys, members)
    if foreign := [key for key in optimizer.state if id(key) not in members.by_id]:
        raise InvalidError(
            f"{show(keys)} keeps state for {foreign[0]!r}, which is no parameter of its groups"[:200],
            "store optimizer.state_dict() as a dict, or add the parameter to a group",
        )
    groups = _walk_groups(walk, keys, optimizer, members, is_private)
    for member in members.by_id.values():
        below = (*keys, _STATE, member.label)
        walk.flat.creatable[below] = _maker_for(member.parameter)
        entries = optimizer.state.get(member.parameter, {})
        for key, value in entries.items():
            private = is_private
            if private is None:
                private = walk.world > 1 and not (member.is_declared or is_dtensor(member.parameter)) and not is_dtensor(value)
            walk.value((*below, key_of(key, below)), value, private, setter(entries, key))
    walk.flat.finish.append(lambda found: _finish(optimizer, keys, members.by_id.values(), groups, found))


def _check_named(walk: Walk, keys: Keys, members: _Members) -> None:
    """Raises :class:`InvalidError` for parameters of a pipeline stage without names: the stages have the same positions."""
    launch = set(range(walk.world) if walk.ranks is None else walk.ranks)
    for member in members.by_id.values():
        if id(member.parameter) in walk.parameters or not is_dtensor(member.parameter):
            continue
        lacking = launch.difference(member.parameter.device_mesh.mesh.flatten().tolist())
        if lacking:
            raise InvalidError(
                f"{show(keys)} knows its parameters only by position, and ranks {sorted(lacking)[:5]} of the launch have other ones there",
                "put the module itself into the state, beside its optimizer, instead of module.state_dict()",
            )


def _walk_groups(walk: Walk, keys: Keys, optimizer: Any, members: _Members, is_private: bool | None) -> list[dict[str, Any]]:
    """Adds the settings and the members of the groups. Returns the groups into which a load puts its values.

    A load keeps settings that only the optimizer has, and adds settings that only the step has: releases of torch add some.
    """
    is_declared = all(member.is_declared or is_dtensor(member.parameter) for member in members.by_id.values())
    default = is_private if is_private is not None else walk.world > 1 and not is_declared
    loaded: list[dict[str, Any]] = []
    for at, group in enumerate(optimizer.param_groups):
        below = (*keys, _GROUPS, (2, at))
        walk.flat.creatable[below] = new_on_host
        loaded.append({key: value for key, value in group.items() if key != _MEMBERS})
        begin = len(walk.flat.leaves)
        for key, value in loaded[at].items():
            walk.value((*below, key_of(key, below)), value, default, setter(loaded[at], key))
        for leaf in walk.flat.leaves[begin:]:
            leaf.is_optional = True

        def check(stored: Any, is_strict: bool, at: int = at) -> None:
            _check_members(show(keys), at, members, stored, is_strict, walk.world == 1)

        walk.leaf((*below, (0, _MEMBERS)), members.groups[at], default, None, check=check)
        # Each pipeline stage has parameters of its own.
        walk.flat.leaves[-1].must_be_equal = False
    return loaded


def _check_members(where: str, at: int, members: _Members, stored: Any, is_strict: bool, is_alone: bool) -> None:
    """Raises :class:`InvalidError` if a group of the step has other parameters than the group of the optimizer.

    A load that is not strict may match parameters by name, but not by position: that could match the wrong ones. In a launch
    of several ranks, the step may have the group of another pipeline stage.
    """
    own, remade = members.groups[at], "make the optimizer with the groups that it was saved with"
    names = set(stored) if isinstance(stored, list) else set()
    if members.is_found and names and names <= members.others and not names <= members.labels:
        raise InvalidError(
            f"group {at} of {where} has other names in the step, which the state gives to other parameters too",
            "load it with the modules that it was saved with",
        )
    if members.is_named and not is_strict:
        return
    unknown = names - members.labels - members.others
    is_of_stage = members.is_named and not is_alone and any(isinstance(name, str) for name in unknown)
    if not isinstance(stored, list) or (len(stored) != len(own) and not is_of_stage):
        count = len(stored) if isinstance(stored, list) else "no"
        raise InvalidError(f"group {at} of {where} has {count} parameters in the step, and {len(own)} in the state", remade)
    if not members.is_named:
        return
    group_of = {name: group for group, labels in enumerate(members.groups) for name in labels}
    moved = next((name for name in stored if group_of.get(name, at) != at), None)
    if moved is not None:
        raise InvalidError(
            f"the parameter {moved} is in group {at} of {where} in the step, and in group {group_of[moved]} in the state", remade
        )


def _maker_for(parameter: Any) -> Maker:
    """Returns the maker of the state of a parameter that the optimizer does not have yet."""

    def make(keys: Keys, element: str, shape: list[int]) -> Any:
        torch = sys.modules["torch"]
        key = keys[-1][1]
        if list(parameter.shape) == list(shape) and (shape or key != "step"):
            # The new tensor has the placements of the parameter too.
            return torch.empty_like(parameter.detach(), dtype=dtype_of(element))
        # The settings of the group may be loaded too, so `_finish` applies them.
        return torch.empty(shape, dtype=dtype_of(element), device=state_device(key, parameter, {}))

    return make


def state_device(key: str | int, parameter: Any, group: Mapping[str, Any]) -> Any:
    """Returns the device of an entry of a parameter's state, by the policy of ``torch.optim.Optimizer.load_state_dict``.

    Args:
        key: The innermost key of the entry.
        parameter: The parameter. If it is a ``DTensor``, its device is that of its local tensor.
        group: The settings of its group.

    """
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return sys.modules["torch"].device("cpu")
    return parameter.device


def _finish(optimizer: Any, keys: Keys, members: Iterable[_Member], groups: list[dict[str, Any]], found: dict[Keys, Any]) -> None:
    """Puts the settings of the groups in place, and creates state that the optimizer did not have yet."""
    created: dict[Keys, dict[Keys, Any]] = {}
    for path, value in found.items():
        if path[: len(keys)] == keys:
            created.setdefault(path[: len(keys) + 2], {})[path] = value
    for at, (group, loaded) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        below = (*keys, _GROUPS, (2, at))
        group.update(with_found(loaded, below, created.get(below, {})))
    for member in members:
        below = (*keys, _STATE, member.label)
        if below in created:
            with_found(optimizer.state[member.parameter], below, created[below])
    _place_steps(optimizer)


def _place_steps(optimizer: Any) -> None:
    """Moves the counts of steps of fused and capturable groups to the devices where these settings want them."""
    torch = sys.modules["torch"]
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group[_MEMBERS]:
            entries = optimizer.state.get(parameter, {})
            step = entries.get("step")
            if is_tensor(step) and step.device != (device := state_device("step", parameter, group)):
                entries["step"] = step.to(device=device, dtype=torch.float32)
