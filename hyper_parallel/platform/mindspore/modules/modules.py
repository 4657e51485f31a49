"""Modules and their parameters: finding, replacing, reading and filling them, hooks, and giving meta parameters values.

A parameter may be spread over ranks: then it is an object with ``to_local()``, and what this file reads and writes is
this rank's part of it.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import devices
from hyper_parallel.platform.mindspore.base.memory import copy_into, from_array, memory_of, numpy_type
from hyper_parallel.platform.mindspore.base.tensors import detached, dtype_name, is_meta, tensor_to_numpy
from hyper_parallel.platform.mindspore.mends.empty_blocks import has_no_elements, zeros_of
from hyper_parallel.platform.shared.module_wrappers import innermost
from hyper_parallel.platform.shared.parameters import (
    FoundParameter,
    ParameterFramework,
    ParameterFunctions,
    check_init_arguments,
)

_GIVEN_NO_NAME = re.compile(r"(Parameter([#$]\d+)?)?")  # what MindSpore calls a parameter that was given none


# ---------------------------------------------------------------- modules


def get_cell_construct(cell: nn.Cell) -> Callable:
    """The function that computes the module's output, bound to the module."""
    return cell.construct


def get_cells_and_names(cell: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    """(name, module) of the module itself (its name is empty) and of all inside it."""
    return cell.cells_and_names()


def state_tensors(module: nn.Cell) -> Iterator[Tensor]:
    seen: set[int] = set()
    for _, cell in module.cells_and_names():
        for tensor in (*cell.parameters_dict(False).values(), *private_api.buffers_of(cell).values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def cast_parameters(module: nn.Cell, dtype: str) -> nn.Cell:
    if dtype != "float32":
        raise ValueError(f"dtype {dtype!r}: on MindSpore's CPU models are trained in float32")
    return module


def set_training(module: nn.Cell, modes: bool | dict[nn.Cell, bool]) -> dict[nn.Cell, bool]:
    before = {cell: cell.training for _, cell in module.cells_and_names()}
    for cell in before:
        mode = modes if isinstance(modes, bool) else modes.get(cell, modes[module])
        if cell.training != mode:
            cell.training = mode
    return before


def is_linear_module(module: object) -> bool:
    return isinstance(module, (nn.Dense, mint.nn.Linear))


def is_embedding_module(module: object) -> bool:
    return isinstance(module, (nn.Embedding, mint.nn.Embedding))


def linear_weight_dims(module: object) -> tuple[int, int] | None:
    """The dims of ``weight`` that stand for outputs and inputs; None for other modules."""
    return (0, 1) if is_linear_module(module) else None


def weight_name(module: object) -> str:
    """What a dense layer or an embedding calls its weight."""
    return "embedding_table" if isinstance(module, nn.Embedding) else "weight"


def linear_function(module: nn.Cell) -> Callable[[Any, Any, Any], Any] | None:
    """What the layer computes of input, weight and bias; None for one that does more, as ``Dense`` with an activation.

    A subclass with a ``construct`` of its own does more.
    """
    construct = type(module).construct
    is_own = any(construct is kind.construct for kind in (nn.Dense, mint.nn.Linear))
    if not is_own or "construct" in vars(module) or getattr(module, "activation_flag", False):
        return None
    return _linear


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    """The product and the bias; of plain blocks without elements too, see Note [Sums over nothing]."""
    if hasattr(weight, "to_local") or not (has_no_elements(weight) or has_no_elements(x)):
        return mint.nn.functional.linear(x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    out = zeros_of((*x.shape[:-1], weight.shape[0]), x.dtype, *given)
    return out if bias is None or has_no_elements(out) else out + bias


def linear(x: Any, weight: Any) -> Any:
    return _linear(x, weight, None)


def dropout(x: Any, probability: float) -> Any:
    return ops.dropout(x, probability)


def replace_forward(module: nn.Cell, forward: Callable[..., Any]) -> None:
    """Let ``forward(module, ...)`` compute the module's output; hooks stay around it."""
    module.construct = types.MethodType(forward, module)


def own_parameters(module: nn.Cell) -> dict[str, Parameter]:
    """The parameters of the module itself, by their names there."""
    return {name: value for name, value in private_api.parameters_of(module).items() if value is not None}


def install_parameter(module: nn.Cell, name: str, parameter: Parameter | None) -> None:
    """Let ``parameter`` be the module's own parameter of that name; one without a name of its own gets its path's.

    ``None`` takes the parameter away.
    """
    own = private_api.parameters_of(module)
    old = own.get(name)
    if parameter is None:
        own.pop(name, None)
        vars(module)[name] = None
        return
    if _GIVEN_NO_NAME.fullmatch(parameter.name):
        parameter.name = old.name if old is not None else _path_in(own) + name
    own[name] = parameter
    if name in vars(module):
        vars(module)[name] = parameter


def take_out_tensors(module: nn.Cell) -> None:
    for name in own_parameters(module):
        install_parameter(module, name, None)
    buffers = private_api.buffers_of(module)
    for name in list(buffers):
        buffers[name] = None


def _path_in(own: dict[str, Parameter]) -> str:
    """What comes before the own names of a module's parameters, read from one that has it."""
    paths = (one.name.removesuffix(name) for name, one in own.items() if one is not None and one.name.endswith(name))
    return next(paths, "")


def has_no_memory(tensor: Tensor) -> bool:
    """Whether the tensor is on the meta device."""
    return is_meta(tensor)


def register_forward_pre_hook(module: nn.Cell, hook: Callable, prepend: bool = False, with_kwargs: bool = False) -> Any:
    """Before each forward, ``hook(module, args)``, or ``hook(module, args, kwargs)``, may change the inputs."""
    return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)


def register_full_backward_hook(module: nn.Cell, hook: Callable, prepend: bool = False) -> Any:
    """After each backward of the module, ``hook(module, grad_input, grad_output)`` may change ``grad_input``."""
    return _registered_first(module.register_backward_hook(hook), prepend)


def register_full_backward_pre_hook(module: nn.Cell, hook: Callable, prepend: bool = False) -> Any:
    """Before each backward of the module, ``hook(module, grad_output)`` may change ``grad_output``."""
    return _registered_first(module.register_backward_pre_hook(hook), prepend)


def _registered_first(handle: Any, prepend: bool) -> Any:
    if prepend:
        private_api.move_hook_to_front(handle)
    return handle


# ---------------------------------------------------------------- finding and replacing parameters


def parameters_dict(cell: nn.Cell, remove_duplicate: bool = True) -> dict[str, Parameter]:
    """Name -> parameter. A tied parameter appears under its first name, or, without ``remove_duplicate``, under all."""
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for owner_name, owner in cell.cells_and_names():
        for name, parameter in private_api.parameters_of(owner).items():
            if parameter is not None and (not remove_duplicate or id(parameter) not in seen):
                seen.add(id(parameter))
                found[f"{owner_name}.{name}" if owner_name else name] = parameter
    return found


def search_parameter_by_name(cell: nn.Cell, param_name: str) -> FoundParameter | None:
    """The parameter of exactly that dotted name, any name of a tied one; ``None`` when there is none."""
    owner_name, _, own_name = param_name.rpartition(".")
    owner = dict(_all_cells(cell)).get(owner_name)
    if owner is None:
        return None
    parameter = private_api.parameters_of(owner).get(own_name)
    return None if parameter is None else FoundParameter(owner_name, owner, parameter)


def _all_cells(cell: nn.Cell, prefix: str = "") -> Iterator[tuple[str, nn.Cell]]:
    """(name, module) under every name; ``cells_and_names`` gives a module that is in two places once."""
    cell = innermost(cell)
    yield prefix, cell
    for name, child in cell.name_cells().items():
        yield from _all_cells(child, f"{prefix}.{name}" if prefix else name)


# ---------------------------------------------------------------- this rank's part of a parameter


def _places(cell: nn.Cell) -> Iterator[tuple[nn.Cell, str, Parameter]]:
    for _, module in cell.cells_and_names():
        for name, parameter in private_api.parameters_of(module).items():
            yield module, name, parameter


def _as_parameter(tensor: Tensor, old: Parameter) -> Parameter:
    if not isinstance(tensor, Parameter):
        tensor = Parameter(tensor, requires_grad=old.requires_grad)
    tensor.name = old.name
    return tensor


def _keeps_meaning(source: Any, target: Any) -> bool:
    """bool, integers, floats, complex numbers: each can hold what those before it mean."""
    order = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}
    return order[numpy_type(source).kind] <= order[numpy_type(target).kind]


def _copy(target: Tensor, source: Tensor) -> None:
    if target.dtype == source.dtype:
        copy_into(target, memory_of(source))
    else:
        copy_into(target, tensor_to_numpy(source).astype(numpy_type(target.dtype)))


_functions = ParameterFunctions(
    ParameterFramework(
        tensor=Tensor,
        places=_places,
        install=install_parameter,
        as_parameter=_as_parameter,
        detached=detached,
        is_meta=is_meta,
        keeps_meaning=_keeps_meaning,
        dtype_name=dtype_name,
        copy=_copy,
    )
)
update_parameter_by_name = _functions.update_parameter_by_name
set_layout_into_parameter = _functions.set_layout_into_parameter
get_param_local_shape = _functions.get_param_local_shape
get_param_local_data = _functions.get_param_local_data
update_param_data = _functions.update_param_data
load_into_param = _functions.load_into_param


def get_param_type_size(param: Tensor) -> int:
    """Bytes of one element."""
    return numpy_type(param.dtype).itemsize


# ---------------------------------------------------------------- values for meta parameters


def init_parameters(module: nn.Cell, stage_index: int, device: Any = None) -> None:
    """Give parameters and buffers on the meta device memory and values; those that already have values keep them.

    Values come from the module's ``reset_parameters``, if it has one, else from the initializers that the parameters
    were made with, in the order in which the module lists them. ``stage_index`` names the pipeline stage in messages.
    """
    check_init_arguments(module, nn.Cell, stage_index, device)
    if devices.is_building_elsewhere():
        raise RuntimeError(
            "init_parameters: called inside init_on_device, which puts every parameter back on the meta device; call "
            "it after that block"
        )
    missing, resets = [], []
    for owner_name, owner in module.cells_and_names():
        places = [private_api.parameters_of(owner), private_api.buffers_of(owner)]
        waiting = [(name, tensor) for place in places for name, tensor in place.items() if _is_waiting(tensor)]
        resets_itself = callable(getattr(owner, "reset_parameters", None))
        for name, tensor in waiting:
            if not _give_values(tensor) and not resets_itself:
                missing.append(f"'{owner_name}.{name}' of {type(owner).__name__}".replace("'.", "'"))
        if waiting and resets_itself:
            resets.append(owner)
    if missing:
        raise RuntimeError(
            f"init_parameters: stage {stage_index}: no module gave a value to {', '.join(missing)}; define "
            "reset_parameters() in the module, make the parameter with an initializer, or build it outside of the meta "
            "device (buffers: init_on_device with include_buffers=False)"
        )
    for owner in reversed(resets):
        owner.reset_parameters()


def _is_waiting(tensor: Any) -> bool:
    return tensor is not None and is_meta(tensor)


def _give_values(tensor: Tensor) -> bool:
    """Give a meta tensor memory, filled by its initializer; False if it has none, and then with NaN or zeros."""
    values = np.zeros(tuple(tensor.shape), numpy_type(tensor.dtype))
    init = getattr(tensor, "init", None)
    if init is not None:
        wide = values.astype(np.float32) if tensor.dtype == ms.bfloat16 else values
        init(wide)
        values[...] = wide.astype(values.dtype)
        tensor.init_mode = None
    elif values.dtype.kind in "fcV":
        values[...] = np.nan
    tensor.data = from_array(values)
    return init is not None
