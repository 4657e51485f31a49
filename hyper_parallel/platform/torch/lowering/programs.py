"""Running recorded programs in place of a module's calls, and what their guards ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase, local_alias
from hyper_parallel.platform.torch.communication.pretend_groups import is_silent
from hyper_parallel.platform.torch.modules.parameter_units import comparing_gradients
from hyper_parallel.platform.torch.private_api import (
    NoInterception,
    has_global_hooks,
    has_replaced_call,
    is_transformed,
    num_dispatch_modes,
    num_function_modes,
    replace_call,
    restore_call,
    saving_hooks,
)

__all__ = [
    "ambient_key",
    "ambient_state",
    "attributes_of",
    "call_instead",
    "call_itself",
    "can_record",
    "facts_of",
    "get_draw_state",
    "gradients_of_sum",
    "hooks_of",
    "is_called_otherwise",
    "is_dense",
    "relative_difference",
    "rounding",
    "run_locally",
    "saves_otherwise",
    "saving_as_ever",
    "set_draw_state",
    "tensor_names",
    "values_at",
    "why_no_backend",
]

_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_DEVICE: Any = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_IS_LEAF: Any = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_OWN_ATTRIBUTES = ("_layout", "_global_shape", "_edges", "_gathered_from", "_source", "_hyper_parallel_", "_dynamo_")
_STRIDE = torch.Tensor.stride
_DEVICE_TYPES = ["cpu"] + ([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])  # type: ignore[union-attr]


def ambient_key() -> tuple[Any, ...]:
    """What a program's operators depend on besides their arguments, as far as it may differ from call to call."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        num_dispatch_modes(),
        num_function_modes(),
        *[(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES],
    )


def ambient_state() -> tuple[Any, ...]:
    """What must stay as it is while a program is recorded: settings, hooks of saved tensors, transforms."""
    return (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        saving_hooks(),
        is_transformed(),
    )


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What a program has set on a tensor besides its values."""
    return {name: value for name, value in tensor.__dict__.items() if not name.startswith(_OWN_ATTRIBUTES)}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one memory, with strides, that holds its values as they are: none of the views that
    conjugate or negate when they are read.
    """
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())


def facts_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Of each tensor, or of a DTensor's block: shape, strides, dtype, device, needs a gradient, is a leaf."""
    with NoInterception():
        return [(_SHAPE(t), _STRIDE(t), _DTYPE(t), _DEVICE(t), _REQUIRES_GRAD(t), _IS_LEAF(t)) for t in tensors]


def values_at(places: Sequence[tuple[nn.Module, str, str]]) -> list[Any]:
    """What modules see under names: what shadows a parameter or buffer, or itself. A place is (module, table, name)."""
    found = []
    for module, table, name in places:
        own = module.__dict__
        value = own.get(name)
        found.append(own[table].get(name) if value is None else value)
    return found


def run_locally(program: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a recorded program: on the blocks of DTensors, directly."""
    with NoInterception():
        return program(*args)


def call_instead(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``call`` answer calls of the module, inside of what ``fully_shard`` and ``recompute`` put around them; how
    the module is called itself.
    """
    return replace_call(module, call)


def call_itself(module: nn.Module) -> None:
    """Undo :func:`call_instead`."""
    restore_call(module)


def is_called_otherwise(module: nn.Module) -> bool:
    """Whether something answers calls of the module in its place."""
    return has_replaced_call(module)


def saves_otherwise() -> bool:
    """Whether hooks see what is saved for backward: recomputation, or saved tensors on the host."""
    return saving_hooks() is not None


def saving_as_ever() -> Any:
    """A context in which no such hooks see what is saved."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def can_record() -> bool:
    """Whether calls of this thread may be recorded and replaced now: not where tensors have no memory, or hooks for all
    modules are to see those inside, or under ``torch.func``, whose tensors stand for others.
    """
    return not (is_silent() or has_global_hooks() or is_transformed())


def tensor_names(module: nn.Module) -> list[tuple[str, str]]:
    """(table, name) of the module's own parameters and buffers."""
    own = vars(module)
    return [(table, name) for table in ("_parameters", "_buffers") for name in own[table]]


def hooks_of(module: nn.Module) -> list[Any]:
    """The functions that run before and behind the module's own forward and backward."""
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for table in tables for hook in vars(module)[table].values()]


def why_no_backend(backend: str) -> str | None:
    """Why programs cannot be compiled by ``backend`` here; None where they can."""
    return None


def get_draw_state() -> Any:
    """The state of the framework's generators."""
    devices = torch.get_device_module().get_rng_state() if torch.accelerator.is_available() else None
    return torch.get_rng_state(), devices


def set_draw_state(state: Any) -> None:
    """Return to a state that :func:`get_draw_state` gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module().set_rng_state(state[1])


def gradients_of_sum(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The gradients of the sum of all elements of all blocks of ``outputs``; None where there is none."""
    with NoInterception(), torch.enable_grad(), comparing_gradients():  # autograd's own code must not see global shapes
        wanted = [local_alias(one) if isinstance(one, DTensorBase) else one for one in outputs if _REQUIRES_GRAD(one)]
        if not wanted or not inputs:
            return [None] * len(inputs)
        ones = [torch.ones_like(one) for one in map(torch.Tensor.detach, wanted)]
        return list(torch.autograd.grad(wanted, inputs, ones, retain_graph=True, allow_unused=True))


def relative_difference(one: Any, other: Any) -> float:
    """The largest difference of two blocks, relative to the largest value of ``other``."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    with NoInterception():
        one, other = torch.Tensor.detach(one), torch.Tensor.detach(other)
        if _SHAPE(one) != _SHAPE(other) or _DTYPE(one) is not _DTYPE(other):
            return math.inf
        if not one.numel() or torch.equal(one, other):
            return 0.0
        wide = torch.complex128 if one.is_complex() else torch.float64
        one, other = one.to(wide), other.to(wide)
        same = (one == other) | (one.isnan() & other.isnan())
        if bool(same.all()):
            return 0.0
        scale = other.abs().nan_to_num(0.0, 0.0).max().item()
        worst = (one - other).abs().masked_fill(same, 0.0).max().item()
        return math.inf if math.isnan(worst) else worst / (scale or 1.0)


def rounding(tensor: Any) -> float:
    """How many times coarser than float32 the tensor's dtype, or autocast now, rounds, at least 1."""
    if tensor is None or not _DTYPE(tensor).is_floating_point:
        return 1.0
    kinds = [torch.float32, _DTYPE(tensor)]
    kinds += [torch.get_autocast_dtype(kind) for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)]
    return max(torch.finfo(one).eps for one in kinds) / torch.finfo(torch.float32).eps
