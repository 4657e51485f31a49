"""What a checkpoint needs of a model and its optimizers, by PyTorch's names: either framework loads the other's.

Known are the optimizers that really update on a CPU and keep their state by parameter: ``AdamW``, ``Adam`` and ``SGD``
of ``mindspore.experimental.optim``. A slot is one thing that an optimizer keeps for one parameter (``exp_avg``);
options are what it keeps for a group of parameters (``lr``). MindSpore counts steps once for all parameters; here every
parameter has its ``step``, as on PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim

from hyper_parallel.platform.mindspore.base.memory import copy_into, from_array, memory_of
from hyper_parallel.platform.mindspore.dtensor.dtensor_gradients import get_grad
from hyper_parallel.platform.mindspore.modules.modules import parameters_dict

__all__ = [
    "blank_optimizer_slots",
    "check_optimizer_state",
    "named_state_parameters",
    "new_optimizer",
    "optimizer_groups",
    "optimizer_slots",
    "set_optimizer_options",
    "set_optimizer_slots",
    "step_optimizer",
]

# By PyTorch's names of slots, the attributes in which MindSpore keeps them, one tensor per parameter.
_MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_SLOTS = {optim.AdamW: _MOMENTS, optim.Adam: _MOMENTS, optim.SGD: {"momentum_buffer": "accum"}}
# What the class says on MindSpore, and an option on PyTorch.
_OPTIONS_BY_CLASS = {optim.AdamW: {"decoupled_weight_decay": True}, optim.Adam: {"decoupled_weight_decay": False}}
_OPTIONS_OF_OURS_ONLY = ("params", "grad_centralization")  # the second is never used by MindSpore


def named_state_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """Every parameter under each of its names, the names as in ``get_model_state_dict``."""
    return parameters_dict(model, remove_duplicate=False)


def optimizer_groups(optimizer: Any) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """(parameters, options) of each group; options that are tensors come as numbers."""
    by_class = _OPTIONS_BY_CLASS.get(_kind(optimizer), {})
    groups = []
    for group in optimizer.param_groups:
        options = {key: _as_number(value) for key, value in group.items() if key not in _OPTIONS_OF_OURS_ONLY}
        groups.append((list(group["params"]), options | by_class))
    return groups


def set_optimizer_options(optimizer: Any, index: int, options: Mapping[str, Any]) -> None:
    """Set the options of one group; those that this framework's optimizer does not have are left out."""
    group = optimizer.param_groups[index]
    for key, value in options.items():
        current = group.get(key)
        if key not in group:
            continue
        if isinstance(current, Tensor):
            copy_into(current, np.asarray(value, memory_of(current).dtype))
        elif isinstance(current, tuple):
            group[key] = tuple(value)
        else:  # MindSpore compiles a step for the types of the options
            group[key] = float(value) if isinstance(current, float) else value


def optimizer_slots(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    """What the optimizer keeps for a parameter now; empty before its first step."""
    if _kind(optimizer) is optim.SGD:
        return _slots(optimizer, parameter, 0) if _sgd_has_stepped(optimizer, parameter) else {}
    step = int(memory_of(optimizer.state_step))
    return _slots(optimizer, parameter, step) if step else {}


def blank_optimizer_slots(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    """Slots as the first step would leave them, to load values into; the values in them mean nothing."""
    return _slots(optimizer, parameter, 0)


def check_optimizer_state(optimizer: Any, slots: Mapping[str, Any], options: list[Mapping[str, Any]]) -> None:
    """Refuse what this framework's optimizer would silently do in another way."""
    kind = _kind(optimizer)
    for number, (group, new) in enumerate(zip(optimizer.param_groups, options, strict=True)):
        mine = {**group, **_OPTIONS_BY_CLASS.get(kind, {})}
        for key in ("amsgrad", "decoupled_weight_decay"):
            if key in mine and new.get(key, mine[key]) != mine[key]:
                raise ValueError(
                    f"set_state_dict: group {number} of the {kind.__name__} has {key}={mine[key]} and the state "
                    f"{key}={new[key]}: make the optimizer that the state was saved from"
                )
    if kind is optim.SGD:
        return
    steps = {name: 0 if kept is None else int(np.asarray(_values(kept["step"]))) for name, kept in slots.items()}
    if len(set(steps.values())) > 1:
        least, most = min(steps, key=lambda name: steps[name]), max(steps, key=lambda name: steps[name])
        raise ValueError(
            f"set_state_dict: MindSpore's {kind.__name__} counts its steps once for all parameters, but '{least}' has "
            f"made {steps[least]} of them and '{most}' {steps[most]}: give them to different optimizers"
        )


def set_optimizer_slots(optimizer: Any, parameter: Tensor, slots: Mapping[str, Any] | None) -> None:
    """Let the optimizer keep copies of these slots for a parameter; None: as before its first step."""
    for name, tensor in _slots(optimizer, parameter, 0).items():
        if name == "step":
            step = 0 if slots is None else int(np.asarray(_values(slots[name])))
            copy_into(optimizer.state_step, np.array(step, memory_of(optimizer.state_step).dtype))
        elif slots is None:
            memory_of(_block(tensor))[...] = 0
        elif slots[name] is not tensor:
            copy_into(_block(tensor), np.asarray(_values(slots[name])))
    if _kind(optimizer) is optim.SGD:  # ones before the first step, in which the buffer becomes the gradient
        memory_of(_block(optimizer.stat[_place(optimizer, parameter)]))[...] = slots is None


def _kind(optimizer: Any) -> type:
    for kind in _SLOTS:
        if isinstance(optimizer, kind):
            if kind is optim.Adam and any(group.get("amsgrad") for group in optimizer.param_groups):
                raise TypeError("MindSpore's Adam takes amsgrad and does not use it; its experimental.optim.AdamW does")
            return kind
    known = ", ".join(f"mindspore.experimental.optim.{kind.__name__}" for kind in _SLOTS)
    raise TypeError(f"a {type(optimizer).__name__} does not tell what it keeps for a parameter; use one of {known}")


def _place(optimizer: Any, parameter: Tensor) -> int:
    return next(index for index, known in enumerate(optimizer.parameters) if known is parameter)


def _slots(optimizer: Any, parameter: Tensor, step: int) -> dict[str, Any]:
    kind, place = _kind(optimizer), _place(optimizer, parameter)
    (group,) = (group for group in optimizer.param_groups if any(parameter is known for known in group["params"]))
    if kind is optim.SGD and not group["momentum"]:
        return {}
    found: dict[str, Any] = {name: getattr(optimizer, attribute)[place] for name, attribute in _SLOTS[kind].items()}
    if group.get("amsgrad"):
        found["max_exp_avg_sq"] = optimizer.max_exp_avg_sq[place]
    if kind is not optim.SGD:
        found["step"] = from_array(np.array(step, np.float32))
    return found


def _sgd_has_stepped(optimizer: Any, parameter: Tensor) -> bool:
    """Whether the parameter's ``stat`` is no longer ones; of one without elements on this rank, the others tell."""
    own = memory_of(_block(optimizer.stat[_place(optimizer, parameter)]))
    if own.size:
        return not own.any()
    known = [memory_of(_block(stat)) for stat in optimizer.stat]
    return any(stat.size and not stat.any() for stat in known)


def _block(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _values(value: Any) -> Any:
    return memory_of(_block(value)) if isinstance(value, Tensor) else value


def _as_number(value: Any) -> Any:
    """A number, the shortest one that a float32 is read from: 0.1 and not 0.10000000149."""
    if not isinstance(value, Tensor):
        return value
    number = value.asnumpy()[()]
    return float(str(number)) if value.dtype == ms.float32 else number.item()


# ---------------------------------------------------------------- making and stepping them

_KINDS = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD}


def new_optimizer(name: str, groups: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    return _KINDS[name](groups, **options)


def step_optimizer(optimizer: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer(tuple(get_grad(parameter) for parameter in parameters))
