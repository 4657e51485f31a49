"""Modules and their parameters: finding, replacing, reading and filling them, hooks, and giving meta parameters values.

A parameter may be spread over ranks: then it is an object with ``to_local()``, and what this file reads and writes is
this rank's part of it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils.hooks import RemovableHandle

from hyper_parallel.platform.shared.module_wrappers import innermost
from hyper_parallel.platform.shared.parameters import (
    FoundParameter,
    ParameterFramework,
    ParameterFunctions,
    check_init_arguments,
)
from hyper_parallel.platform.torch.base.devices import current_device

# ---------------------------------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------------------------------


def get_cell_construct(cell: nn.Module) -> Callable:
    """The function that computes the module's output, bound to the module."""
    return cell.forward


def get_cells_and_names(cell: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the module itself (its name is empty) and of all inside it."""
    return cell.named_modules()


def state_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def cast_parameters(module: nn.Module, dtype: str) -> nn.Module:
    return module.to(getattr(torch, dtype))


def set_training(module: nn.Module, modes: bool | dict[nn.Module, bool]) -> dict[nn.Module, bool]:
    before = {one: one.training for one in module.modules()}
    for one in before:
        one.training = modes if isinstance(modes, bool) else modes.get(one, modes[module])
    return before


def is_linear_module(module: object) -> bool:
    return isinstance(module, nn.Linear)


def is_embedding_module(module: object) -> bool:
    return isinstance(module, nn.Embedding)


def linear_weight_dims(module: object) -> tuple[int, int] | None:
    """The dims of ``weight`` for outputs and inputs; Hugging Face's ``Conv1D`` is a linear layer with them swapped.

    A layer whose weight is computed from other parameters (``weight_norm``, parametrizations) has none to be sharded.
    """
    if isinstance(module, nn.Linear):
        return (0, 1) if "weight" in own_parameters(module) else None
    return (1, 0) if _conv1d_of(module) is not None else None


def linear_function(module: nn.Module) -> Callable[[Any, Any, Any], Any] | None:
    """What the layer computes of input, weight and bias; None for a subclass with a forward of its own."""
    kind = type(module)
    if kind.forward is nn.Linear.forward and "forward" not in vars(module):
        return nn.functional.linear
    conv1d = _conv1d_of(module)
    is_own = conv1d is not None and getattr(module.forward, "__func__", None) is conv1d.forward
    return _transposed_linear if is_own else None


def _conv1d_of(module: object) -> Any:
    """Hugging Face's class, of which the module's may be a subclass that wraps calls."""
    kinds = (kind for kind in type(module).__mro__ if kind.__name__ == "Conv1D")
    return next((kind for kind in kinds if kind.__module__ == "transformers.pytorch_utils"), None)


def _transposed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return nn.functional.linear(x, weight.transpose(0, 1), bias)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, weight)


def dropout(x: torch.Tensor, probability: float) -> torch.Tensor:
    return nn.functional.dropout(x, probability)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let ``forward(module, ...)`` compute the module's output; hooks stay around it, and copies have it too."""
    module.forward = types.MethodType(forward, module)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the module itself, by their names there."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def install_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let ``parameter`` be the module's own parameter of that name."""
    module.register_parameter(name, parameter)


def take_out_tensors(module: nn.Module) -> None:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in own:
        delattr(module, name)
        # Code asks emptied modules for dtypes and shapes too; one element, for a dry run counts it.
        setattr(module, name, torch.empty((), dtype=tensor.dtype, device="meta").expand(tuple(tensor.shape)))


def use_separate_projections(module: nn.MultiheadAttention) -> None:
    """Let the attention compute with ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``.

    PyTorch decides that when the module is built, from its sizes, and keeps the answer under a private name only.
    """
    module._qkv_same_embed_dim = False


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on the meta device."""
    return tensor.is_meta


def register_forward_pre_hook(
    module: nn.Module, hook: Callable, prepend: bool = False, with_kwargs: bool = False
) -> RemovableHandle:
    """Before each forward, ``hook(module, args)``, or ``hook(module, args, kwargs)``, may change the inputs."""
    return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)


def register_full_backward_hook(module: nn.Module, hook: Callable, prepend: bool = False) -> RemovableHandle:
    """After each backward of the module, ``hook(module, grad_input, grad_output)`` may change ``grad_input``."""
    return module.register_full_backward_hook(hook, prepend=prepend)


def register_full_backward_pre_hook(module: nn.Module, hook: Callable, prepend: bool = False) -> RemovableHandle:
    """Before each backward of the module, ``hook(module, grad_output)`` may change ``grad_output``."""
    return module.register_full_backward_pre_hook(hook, prepend=prepend)


# ---------------------------------------------------------------------------------------------------------------------
# Finding and replacing parameters
# ---------------------------------------------------------------------------------------------------------------------


def parameters_dict(cell: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Name -> parameter. A tied parameter appears under its first name, or, without ``remove_duplicate``, under all."""
    return dict(cell.named_parameters(remove_duplicate=remove_duplicate))


def search_parameter_by_name(cell: nn.Module, param_name: str) -> FoundParameter | None:
    """The parameter of exactly that dotted name, any name of a tied one; ``None`` when there is none."""
    owner_name, _, own_name = param_name.rpartition(".")
    try:
        owner = innermost(cell.get_submodule(owner_name))
    except AttributeError:
        return None
    parameter = dict(owner.named_parameters(recurse=False, remove_duplicate=False)).get(own_name)
    return None if parameter is None else FoundParameter(owner_name, owner, parameter)


# ---------------------------------------------------------------------------------------------------------------------
# This rank's part of a parameter
# ---------------------------------------------------------------------------------------------------------------------


def _places(cell: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in cell.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, parameter


def _as_parameter(tensor: torch.Tensor, old: nn.Parameter) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=old.requires_grad)


@torch.no_grad()
def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.detach().copy_(source)


_functions = ParameterFunctions(
    ParameterFramework(
        tensor=torch.Tensor,
        places=_places,
        install=setattr,
        as_parameter=_as_parameter,
        detached=lambda tensor: tensor.detach(),
        is_meta=lambda tensor: tensor.device.type == "meta",
        keeps_meaning=torch.can_cast,
        dtype_name=str,
        copy=_copy,
    )
)
update_parameter_by_name = _functions.update_parameter_by_name
set_layout_into_parameter = _functions.set_layout_into_parameter
get_param_local_shape = _functions.get_param_local_shape
get_param_local_data = _functions.get_param_local_data
update_param_data = _functions.update_param_data
load_into_param = _functions.load_into_param


def get_param_type_size(param: torch.Tensor) -> int:
    """Bytes of one element."""
    return param.dtype.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# Values for meta parameters
# ---------------------------------------------------------------------------------------------------------------------


def init_parameters(module: nn.Module, stage_index: int, device: torch.device | str | None = None) -> None:
    """Give parameters and buffers on the meta device memory on ``device`` (default: the current one) and values.

    Values come from the ``reset_parameters`` of the modules, called from the inside out as constructors do, so that the
    same seed gives the same values as building the module there. Tensors that already have values keep them. A tied
    tensor is initialised by the first module that owns it. ``stage_index`` names the pipeline stage in messages.
    """
    check_init_arguments(module, nn.Module, stage_index, device)
    device = torch.device(device) if device is not None else current_device()
    has_values = [tensor for tensor in _tensors_inside(module) if not tensor.is_meta]
    materialised = _materialise(module, device)
    if materialised:
        _reset(module, materialised, has_values)
        _check_all_have_values(module, materialised, stage_index)


def reset_parameters(
    module: nn.Module,
    parameters: list[torch.Tensor],
    fill_random: Callable[..., Any],
    around: Callable[[nn.Module], Any],
) -> None:
    """Let the modules inside give ``parameters`` their initial values, from the inside out; others keep theirs.

    ``fill_random`` is not needed: the modules' own code calls random operators, and those of distributed tensors are
    HyperParallel's.
    """
    del fill_random
    wanted = {id(parameter) for parameter in parameters}
    if wanted:
        _reset(module, wanted, [tensor for tensor in _tensors_inside(module) if id(tensor) not in wanted], around)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _tensors_inside(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _materialise(module: nn.Module, device: torch.device) -> set[int]:
    """Replace each meta tensor by one on ``device``, tied ones by one and the same; returns the ids of the new ones."""
    replacements: dict[int, torch.Tensor] = {}
    for submodule in module.modules():
        for name, tensor in list(_own_tensors(submodule)):
            if tensor.is_meta:
                if id(tensor) not in replacements:
                    replacements[id(tensor)] = _allocate(tensor, device)
                setattr(submodule, name, replacements[id(tensor)])
                if getattr(submodule, name).is_meta:
                    raise RuntimeError(
                        "init_parameters: called inside init_on_device, which puts every parameter back on the meta "
                        "device; call it after that block"
                    )
    return {id(tensor) for tensor in replacements.values()}


def _allocate(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, UninitializedTensorMixin):
        allocated = type(tensor)(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
    else:
        allocated = torch.empty_like(tensor.detach(), device=device)
        if _can_be_nan(allocated):
            allocated.fill_(float("nan"))  # what no reset_parameters fills is found by it afterwards
        allocated = allocated.as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
    allocated.__dict__.update(tensor.__dict__)
    return allocated


def _reset(
    root: nn.Module,
    materialised: set[int],
    has_values: list[torch.Tensor],
    around: Callable[[nn.Module], Any] = lambda module: nullcontext(),
) -> None:
    kept_ids = {id(tensor) for tensor in has_values}
    initialised: set[int] = set()
    for module in _from_inside_out(root):
        inside = list(_tensors_inside(module))
        if materialised.isdisjoint(map(id, inside)):
            continue
        reset = _reset_function(module)
        own = [tensor for _, tensor in _own_tensors(module)]
        if reset is not None:
            keep = [tensor for tensor in inside if id(tensor) in kept_ids]
            keep += [tensor for tensor in own if id(tensor) in initialised]
            with torch.no_grad():
                values = [tensor.clone() for tensor in keep]
                with around(module):
                    reset()
                for tensor, value in zip(keep, values, strict=True):
                    tensor.copy_(value)
            initialised.update(map(id, own))


def _reset_function(module: nn.Module) -> Callable[[], None] | None:
    # MultiheadAttention and Transformer, of torch's own modules, only have the one with the underscore.
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


def _from_inside_out(root: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                yield from visit(child)
            yield module

    return visit(root)


def _check_all_have_values(root: nn.Module, materialised: set[int], stage_index: int) -> None:
    missing = []
    for module_name, module in root.named_modules():
        for name, tensor in _own_tensors(module):
            if id(tensor) in materialised and _has_no_values(module, tensor):
                missing.append(f"'{module_name}.{name}' of {type(module).__name__}".replace("'.", "'"))
    if missing:
        raise RuntimeError(
            f"init_parameters: stage {stage_index}: no module gave a value to {', '.join(missing)}; define "
            "reset_parameters() in the module, or build it outside of the meta device (buffers: init_on_device with "
            "include_buffers=False)"
        )


def _has_no_values(module: nn.Module, tensor: torch.Tensor) -> bool:
    if isinstance(tensor, UninitializedTensorMixin):
        return False
    if _can_be_nan(tensor):
        return bool(torch.isnan(tensor.detach()).any())
    return _reset_function(module) is None


def _can_be_nan(tensor: torch.Tensor) -> bool:
    # Not all float8 types have a nan.
    return (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.is_complex()
