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

from hyper_parallel.platform.mindspore.memory import copy_into, from_array, memory_of
from hyper_parallel.platform.mindspore.modules import parameters_dict

__all__ = [
    "blank_optimizer_slots",
    "named_state_parameters",
    "optimizer_groups",
    "optimizer_slots",
    "set_optimizer_options",
    "set_optimizer_slots",
]

# By PyTorch's names of slots, the attributes in which MindSpore keeps them, one tensor per parameter.
_SLOTS = {
    optim.AdamW: {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    optim.Adam: {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    optim.SGD: {"momentum_buffer": "accum"},
}
_STEP = {optim.AdamW: "state_step", optim.Adam: "state_step"}


def named_state_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """Every parameter under each of its names, the names as in ``get_model_state_dict``."""
    return parameters_dict(model, remove_duplicate=False)


def optimizer_groups(optimizer: Any) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """(parameters, options) of each group; options that are tensors come as numbers."""
    _kind(optimizer)
    groups = []
    for group in optimizer.param_groups:
        options = {key: _as_number(value) for key, value in group.items() if key != "params"}
        groups.append((list(group["params"]), options))
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
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value


def optimizer_slots(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    """What the optimizer keeps for a parameter now; empty before its first step."""
    step = _num_steps(optimizer)
    if step == 0:
        return {}
    return _slots(optimizer, parameter, step)


def blank_optimizer_slots(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    """Slots as the first step would leave them, to load values into; the values in them mean nothing."""
    return _slots(optimizer, parameter, 0)


def set_optimizer_slots(optimizer: Any, parameter: Tensor, slots: Mapping[str, Any] | None) -> None:
    """Let the optimizer keep copies of these slots for a parameter; None: as before its first step."""
    own = _slots(optimizer, parameter, 0)
    for name, tensor in own.items():
        if name == "step":
            _set_step(optimizer, 0 if slots is None else int(np.asarray(_values(slots.get(name, 0)))))
        elif slots is None:
            copy_into(tensor, np.zeros(tuple(_block(tensor).shape), memory_of(_block(tensor)).dtype))
        elif slots[name] is not tensor:
            copy_into(_block(tensor), np.asarray(_values(slots[name])))


def _kind(optimizer: Any) -> type:
    for kind in _SLOTS:
        if isinstance(optimizer, kind):
            return kind
    known = ", ".join(f"mindspore.experimental.optim.{kind.__name__}" for kind in _SLOTS)
    raise TypeError(f"a {type(optimizer).__name__} does not tell what it keeps for a parameter; use one of {known}")


def _slots(optimizer: Any, parameter: Tensor, step: int) -> dict[str, Any]:
    kind = _kind(optimizer)
    place = next(index for index, known in enumerate(optimizer.parameters) if known is parameter)
    found: dict[str, Any] = {name: getattr(optimizer, place_name)[place] for name, place_name in _SLOTS[kind].items()}
    if kind in _STEP:
        found["step"] = from_array(np.array(step, np.float32))
    return found


def _num_steps(optimizer: Any) -> int:
    kind = _kind(optimizer)
    if kind in _STEP:
        return int(memory_of(getattr(optimizer, _STEP[kind])))
    return int(any(memory_of(_block(slot)).any() for slot in optimizer.accum))


def _set_step(optimizer: Any, step: int) -> None:
    counter = getattr(optimizer, _STEP[_kind(optimizer)])
    copy_into(counter, np.array(step, memory_of(counter).dtype))


def _block(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _values(value: Any) -> Any:
    return memory_of(_block(value)) if isinstance(value, Tensor) else value


def _as_number(value: Any) -> Any:
    if isinstance(value, Tensor):
        number = value.asnumpy().item()
        return float(number) if value.dtype in (ms.float32, ms.float64) else number
    return value
