"""The state of a model and its optimizers as dicts with one name per parameter, and back.

    model_state, optimizer_state = get_state_dict(model, optimizers)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    ...
    load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=model_state, optim_state_dict=optimizer_state)

The state of optimizers is kept by the *name* of the parameter, never by its number:

    {"state": {"layer.weight": {"exp_avg": DTensor, "exp_avg_sq": DTensor, "step": tensor}, ...},
     "options": {"layer.weight": {"lr": 0.1, "betas": (0.9, 0.999)}, ...},
     "stepped": {"layer.weight": True, ...}}

so it fits a program with other parameter groups, another order of them, or another number of optimizers, and moments
are cut as their parameters are, so that they load under any other layout. ``stepped`` tells whether the optimizer has
made a step for a parameter. Those without have slots in ``state`` too, to load into, but their values mean nothing: an
optimizer that takes this state over starts with them as if new. A rank tells only of the parameters that it has a part
of: those of other pipeline stages are told by theirs, and a checkpoint keeps every name by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hyper_parallel.core.distributed_checkpoint.planning.flatten import Entries
from hyper_parallel.core.dtensor.distribute import distribute_tensor
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.modules.first_names import noted_first_names
from hyper_parallel.platform import get_platform

__all__ = [
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_LISTED = 20  # names in a message


def get_state_dict(model: Any, optimizers: Any, *, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the model and of its optimizer or optimizers, by parameter name; ``options`` are the model's.

    The tensors are those of the model and of the optimizers, not copies: loading into them loads the model.
    """
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizers)


def set_state_dict(
    model: Any, optimizers: Any, *, model_state_dict: Mapping[str, Any], optim_state_dict: Mapping[str, Any]
) -> None:
    """Take over what :func:`get_state_dict` gave, here or in another program, under any layout.

    Names that are missing or unexpected are an error that lists them, and so is a moment that would be dropped; then
    nothing has changed.
    """
    apply_model = _plan_model(model, model_state_dict)
    apply_optimizers = _plan_optimizers(model, optimizers, optim_state_dict)
    apply_model()
    apply_optimizers()


def get_model_state_dict(model: Any, *, options: Any = None) -> dict[str, Any]:
    """Every parameter and persistent buffer by its name; a tied one appears under each of its names."""
    return get_platform().get_model_state_dict(model, options=options)


def set_model_state_dict(model: Any, model_state_dict: Mapping[str, Any]) -> None:
    """Copy values into the model's parameters and buffers; names that are missing or unexpected are an error."""
    _plan_model(model, model_state_dict)()


def get_optimizer_state_dict(model: Any, optimizers: Any) -> dict[str, Any]:
    """The state of one optimizer, or of several as if they were one; see the top of this file for its form."""
    platform = get_platform()
    owners = _Owners(model, optimizers)
    state: dict[str, dict[str, Any]] = Entries()
    stepped, options_of = Entries(), Entries()
    for name, (optimizer, parameter) in owners.by_name.items():
        slots = platform.optimizer_slots(optimizer, parameter)
        stepped[name] = bool(slots)
        if not slots and platform.needs_grad(parameter):
            slots = platform.blank_optimizer_slots(optimizer, parameter)
        if slots:
            state[name] = slots
    for _, _, names, options in owners.groups:
        options_of.update((name, dict(options)) for name in names)
    return {"state": state, "options": options_of, "stepped": stepped}


def set_optimizer_state_dict(model: Any, optimizers: Any, optim_state_dict: Mapping[str, Any]) -> None:
    """Let the optimizers go on from a state; names that are missing or unexpected are an error, nothing is dropped."""
    _plan_optimizers(model, optimizers, optim_state_dict)()


def _first_names(model: Any) -> dict[str, str]:
    """Every name of a parameter -> the first of its names."""
    first: dict[int, str] = {}
    named = get_platform().named_state_parameters(model)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def _plan_model(model: Any, given: Mapping[str, Any]) -> Any:
    """Check everything; what is returned does it."""
    platform = get_platform()
    targets = get_model_state_dict(model)
    first_names = _first_names(model)
    # Of a tied parameter any of its names will do.
    brought = {first_names.get(name, name) for name in given}
    missing = [name for name in targets if first_names.get(name, name) not in brought]
    _complain("set_state_dict: the model", missing, [name for name in given if name not in targets])
    problems = []
    copies: list[tuple[Any, Any]] = []
    extra: dict[str, Any] = {}
    value_of: dict[str, tuple[str, Any]] = {}
    for name, target in targets.items():
        if name not in given:
            continue
        tied, value = value_of.setdefault(first_names.get(name, name), (name, given[name]))
        if tied != name and _differ(value, given[name]):
            problems.append(f"'{tied}' and '{name}' are one tensor here, but two with different values there")
        if tied != name:
            continue
        if not platform.is_tensor(target):
            extra[name] = given[name]
        elif problem := _misfit(given[name], target):
            problems.append(f"'{name}' {problem}")
        else:
            copies.append((target, given[name]))
    if problems:
        raise ValueError(f"set_state_dict: the model: {_listed(problems, '; ')}")

    def apply() -> None:
        with platform.no_grad():
            for target, value in copies:
                platform.load_into_param(target, _moved(value, target.layout if isinstance(target, DTensor) else None))
        platform.set_extra_states(model, extra)

    return apply


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------


class _Owners:
    """Which optimizer keeps which parameter, by name."""

    def __init__(self, model: Any, optimizers: Any) -> None:
        platform = get_platform()
        noted = noted_first_names(model)
        self.aliases = {**noted, **{name: noted.get(first, first) for name, first in _first_names(model).items()}}
        first_names = {id(p): self.aliases[name] for name, p in platform.named_state_parameters(model).items()}
        self.by_name: dict[str, tuple[Any, Any]] = {}
        self.elsewhere: set[str] = set()
        self.groups: list[tuple[Any, int, list[str], dict[str, Any]]] = []
        self.optimizers = _as_list(optimizers)
        for number, optimizer in enumerate(self.optimizers):
            for index, (parameters, options) in enumerate(platform.optimizer_groups(optimizer)):
                names = []
                for place, parameter in enumerate(parameters):
                    name = first_names.get(id(parameter))
                    if name is None:
                        raise ValueError(
                            f"parameter {place} (shape {tuple(parameter.shape)}) of group {index} of optimizer {number}"
                            f" ({type(optimizer).__name__}) is not a parameter of the model: pass the model that the "
                            "optimizer was made for, and make optimizers after the model was parallelized"
                        )
                    if name in self.by_name:
                        raise ValueError(
                            f"'{name}' is in two places of the optimizers; its state can only be kept once"
                        )
                    if isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is None:
                        self.elsewhere.add(name)  # of another stage, whose ranks know what was done with it
                        continue
                    self.by_name[name] = (optimizer, parameter)
                    names.append(name)
                self.groups.append((optimizer, index, names, options))


def _as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]


def _plan_optimizers(model: Any, optimizers: Any, given: Mapping[str, Any]) -> Any:
    """Check everything; what is returned does it."""
    platform = get_platform()
    for key in ("state", "options", "stepped"):
        if key not in given:
            raise ValueError(
                f"set_state_dict: the state of the optimizers has no {key!r}, only {sorted(given)}: pass what "
                "get_state_dict gave"
            )
    owners = _Owners(model, optimizers)
    options_of = {owners.aliases.get(name, name): options for name, options in given["options"].items()}
    state = {owners.aliases.get(name, name): slots for name, slots in given["state"].items()}
    stepped = {owners.aliases.get(name, name) for name, has in given["stepped"].items() if has}
    known = owners.by_name.keys() | owners.elsewhere
    unexpected = [name for name in [*options_of, *sorted(stepped)] if name not in known]
    _complain(
        "set_state_dict: the optimizers",
        [name for name in owners.by_name if name not in options_of],
        list(dict.fromkeys(unexpected)),
        "their moments would be dropped" if not stepped.isdisjoint(unexpected) else "",
    )
    new_options = [_agreed_options(names, options_of) for _, _, names, _ in owners.groups]

    missing_slots, unexpected_slots, problems = [], [], []
    new_slots: dict[str, dict[str, Any] | None] = {}
    for name, (optimizer, parameter) in owners.by_name.items():
        if name not in stepped:
            new_slots[name] = None
            continue
        mine = platform.optimizer_slots(optimizer, parameter) or platform.blank_optimizer_slots(optimizer, parameter)
        slots = state.get(name, {})
        missing_slots += [f"{name}: {slot}" for slot in mine if slot not in slots]
        unexpected_slots += [f"{name}: {slot}" for slot in slots if slot not in mine]
        for slot, value in slots.items():
            if platform.is_tensor(mine.get(slot)) and (problem := _misfit(value, mine[slot])):
                problems.append(f"'{name}: {slot}' {problem}")
        new_slots[name] = {slot: _Place(value, mine.get(slot)) for slot, value in slots.items()}
    dropped = "these moments would be dropped" if unexpected_slots else ""
    _complain("set_state_dict: the optimizers' slots", missing_slots, unexpected_slots, dropped)
    if problems:
        raise ValueError(f"set_state_dict: the optimizers: {_listed(problems, '; ')}")
    for one in owners.optimizers:
        slots_of_one = {
            name: None if new_slots[name] is None else state[name]
            for name, (optimizer, _) in owners.by_name.items()
            if optimizer is one
        }
        options_of_one = [new for (owner, *_), new in zip(owners.groups, new_options, strict=True) if owner is one]
        platform.check_optimizer_state(one, slots_of_one, options_of_one)

    def apply() -> None:
        for name, (optimizer, parameter) in owners.by_name.items():
            slots = new_slots[name]
            ready = None if slots is None else {slot: place.fitted() for slot, place in slots.items()}
            platform.set_optimizer_slots(optimizer, parameter, ready)
        for (optimizer, index, _, _), options in zip(owners.groups, new_options, strict=True):
            platform.set_optimizer_options(optimizer, index, options)

    return apply


class _Place:
    """A value and where it lies in the optimizer: nothing of the optimizer's own is kept alive by it."""

    def __init__(self, value: Any, model_slot: Any) -> None:
        self.value = value
        self.layout = model_slot.layout if isinstance(model_slot, DTensor) else None
        self.is_tensor = get_platform().is_tensor(value)

    def fitted(self) -> Any:
        return _moved(self.value, self.layout) if self.is_tensor else self.value


def _agreed_options(names: list[str], options_of: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The options that all parameters of a group here had in the state."""
    if not names:
        return {}
    first = options_of[names[0]]
    for name in names[1:]:
        other = options_of[name]
        if other is not first and other != first:
            differing = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
            values = "; ".join(f"{key}: {first.get(key)!r} and {other.get(key)!r}" for key in differing)
            raise ValueError(
                f"set_state_dict: '{names[0]}' and '{name}' are in one parameter group here, but the state has "
                f"different options for them ({values}): put them into different groups"
            )
    return first


# ---------------------------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------------------------


def _misfit(value: Any, target: Any) -> str:
    """Why the value cannot become the target's, or nothing."""
    if not get_platform().is_tensor(value):
        return f"is a {type(value).__name__} in the state dict and a tensor here"
    if tuple(value.shape) != tuple(target.shape):
        return f"has shape {tuple(value.shape)} in the state dict and {tuple(target.shape)} here"
    if value.dtype != target.dtype:
        return f"has {value.dtype} in the state dict and {target.dtype} here; cast it on purpose"
    return ""


def _differ(one: Any, other: Any) -> bool:
    """Whether two values, or the blocks of them on this rank, are seen to differ."""
    platform = get_platform()
    if one is other or not (platform.is_tensor(one) and platform.is_tensor(other)):
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        if one.layout is not other.layout:
            return tuple(one.shape) != tuple(other.shape)
        one, other = one.to_local(), other.to_local()
    elif isinstance(one, DTensor) or isinstance(other, DTensor):
        return tuple(one.shape) != tuple(other.shape)
    return tuple(one.shape) != tuple(other.shape) or platform.digest(one) != platform.digest(other)


def _moved(value: Any, layout: Any) -> Any:
    """The value under a layout, or whole and plain when there is none."""
    if layout is None:
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        return value if value.layout is layout else value.redistribute(layout.mesh, layout)
    return distribute_tensor(value, layout.mesh, layout)


def _complain(who: str, missing: list[str], unexpected: list[str], consequence: str = "") -> None:
    parts = []
    if missing:
        parts.append(f"missing in the state dict: {_listed(missing)}")
    if unexpected:
        parts.append(f"in the state dict but not here: {_listed(unexpected)}")
    if parts:
        raise ValueError(f"{who}: {'; '.join(parts)}{'; ' + consequence if consequence else ''}")


def _listed(names: list[str], between: str = ", ") -> str:
    more = len(names) - _LISTED
    return between.join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
