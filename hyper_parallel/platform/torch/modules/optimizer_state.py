"""What a checkpoint needs of a model and its optimizers: names of parameters, slots (moments and the like), options.

A *slot* is one thing that an optimizer keeps for one parameter: ``exp_avg``, ``momentum_buffer``, ``step``. Options are
what it keeps for a group of parameters: ``lr``, ``betas``.
"""

from __future__ import annotations

import resource
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.host.free_memory import free_host_memory
from hyper_parallel.platform.torch.base.devices import get_device_handle, get_device_type
from hyper_parallel.platform.torch.modules.state import _without_wrappers, _wrappers

__all__ = [
    "blank_optimizer_slots",
    "device_memory",
    "named_state_parameters",
    "new_optimizer",
    "optimizer_groups",
    "optimizer_slots",
    "peak_memory",
    "set_extra_states",
    "set_optimizer_options",
    "set_optimizer_slots",
    "step_optimizer",
]

# How a step is computed, not what it computes: an optimizer keeps its own choice whatever a checkpoint says.
_WAYS_OF_COMPUTING = ("foreach", "fused", "capturable", "differentiable")
# param_names is what torch keeps of an optimizer made from named parameters; the names in a state are the model's.
_NOT_OPTIONS = ("params", "param_names", *_WAYS_OF_COMPUTING)
_BLANK = "hyper_parallel_blank"


def named_state_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under each of its names, the names as in ``get_model_state_dict``."""
    wrappers = _wrappers(model)
    named = model.named_parameters(remove_duplicate=False)
    return {_without_wrappers(name, wrappers): parameter for name, parameter in named}


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Hand what modules gave by ``get_extra_state`` back to them; ``states`` has the names of the state dict."""
    wrappers = _wrappers(model)
    for name, module in model.named_modules(remove_duplicate=False):
        key = _without_wrappers(f"{name}._extra_state" if name else "_extra_state", wrappers)
        if key in states:
            module.set_extra_state(states[key])


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
    """(parameters, options) of each group, without how a step is computed; options that are tensors come as numbers."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"an optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    groups = []
    for group in optimizer.param_groups:
        options = {key: _as_number(value) for key, value in group.items() if key not in _NOT_OPTIONS}
        groups.append((list(group["params"]), options))
    return groups


def set_optimizer_options(optimizer: torch.optim.Optimizer, index: int, options: Mapping[str, Any]) -> None:
    """Set the options of one group, except how a step is computed (foreach, fused and the like)."""
    group = optimizer.param_groups[index]
    for key, value in options.items():
        if key in _WAYS_OF_COMPUTING:
            continue
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        elif isinstance(current, tuple) and isinstance(value, list):
            group[key] = tuple(value)
        else:
            group[key] = value


def optimizer_slots(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """What the optimizer keeps for a parameter now; empty before its first step."""
    slots = optimizer.state.get(parameter, {})
    for name, value in slots.items():
        if isinstance(value, (list, tuple, dict)):
            raise TypeError(
                f"{type(optimizer).__name__} keeps a {type(value).__name__} under {name!r}: its state belongs to all "
                "parameters together and cannot be kept by the names of parameters; save optimizer.state_dict() as it "
                "is, which loads on the same layout only"
            )
    return dict(slots)


# Note [Slots before the first step]
# PyTorch's optimizers make their slots in the first step. To load into an optimizer that has not stepped, somebody must
# know which slots it will have and how they lie. No optimizer tells, so one is tried: a twin that shares the options
# but has only a copy of one parameter, a gradient of zeros and a learning rate of 0 makes one step, and its slots are
# what we want to know. The optimizer itself and its parameters are not touched, and one parameter is copied at a time.
def blank_optimizer_slots(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Slots as the first step would make them, to load values into; the values in them mean nothing."""
    (group,) = [g for g in optimizer.param_groups if any(parameter is p for p in g["params"])]
    with torch.no_grad():
        copy = nn.Parameter(parameter.detach().clone())
        copy.grad = torch.zeros_like(parameter.detach())
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [copy], "lr": 0.0}]
    try:
        type(optimizer).step(twin)
    except Exception as error:
        raise RuntimeError(
            f"{type(optimizer).__name__} has not stepped yet and does not tell what it will keep for a parameter (a "
            f"step with a gradient of zeros failed: {error}); let it make one step first"
        ) from error
    slots = optimizer_slots(twin, copy)
    for value in slots.values():
        if isinstance(value, torch.Tensor):
            setattr(value, _BLANK, True)
    return slots


def set_optimizer_slots(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, slots: Mapping[str, Any] | None
) -> None:
    """Let the optimizer keep ``slots`` for a parameter, as copies; None: what it keeps before its first step.

    Blank slots are taken over without a copy, once: the next one to be given them gets copies.
    """
    if slots is None:
        optimizer.state.pop(parameter, None)
        return
    mine = optimizer.state[parameter]
    with torch.no_grad():
        for name, value in slots.items():
            current = mine.get(name)
            if not isinstance(value, torch.Tensor) or value is current:
                mine[name] = value
            elif hasattr(value, _BLANK):
                delattr(value, _BLANK)
                mine[name] = value
            elif isinstance(current, torch.Tensor) and current.dtype == value.dtype and current.shape == value.shape:
                current.copy_(value)
            else:
                mine[name] = value.detach().clone()
    for name in [name for name in mine if name not in slots]:
        del mine[name]


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------- making and stepping them

_KINDS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def new_optimizer(name: str, groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    return _KINDS[name](groups, **options)


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_memory() -> int | None:
    if get_device_type() == "cpu":
        return free_host_memory()
    return int(get_device_handle().get_device_properties(0).total_memory)
