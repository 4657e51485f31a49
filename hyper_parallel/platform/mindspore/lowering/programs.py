"""Running recorded programs in place of a cell's calls, and what their guards ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import tensor_to_numpy
from hyper_parallel.platform.mindspore.dtensor import gradients
from hyper_parallel.platform.mindspore.dtensor.tensor_type import is_distributed, local_alias

__all__ = [
    "ambient_key",
    "ambient_state",
    "call_instead",
    "call_itself",
    "can_record",
    "facts_of",
    "get_draw_state",
    "grad_mode",
    "gradients_of_sum",
    "hooks_of",
    "is_called_otherwise",
    "obstacle_in",
    "own_attributes",
    "relative_difference",
    "repeatability",
    "rounding",
    "run_locally",
    "saves_otherwise",
    "set_draw_state",
    "tensor_names",
    "values_at",
    "why_no_backend",
]


def why_no_backend(backend: str) -> str | None:
    """Why programs cannot be run by ``backend`` here; None where they can."""
    if backend == "local":
        return None
    return "it compiles programs of PyTorch; on MindSpore use backend='local' (in parallelize: compile='local')"


def ambient_key() -> tuple[Any, ...]:
    """What a program's operators depend on besides their arguments, as far as it may differ from call to call."""
    return (private_api.is_recording(), private_api.has_started_recording(), private_api.mixed_precision())


def ambient_state() -> tuple[Any, ...]:
    """What must stay as it is while a program is recorded."""
    return (private_api.has_started_recording(), private_api.mixed_precision(), private_api.saves_otherwise())


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """Inside, gradients are recorded, or not."""
    before = private_api.is_recording()
    private_api.set_recording(enabled)
    try:
        yield
    finally:
        private_api.set_recording(before)


def facts_of(tensors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of each tensor, or of a DTensor's block: shape, strides, dtype, needs a gradient, is a leaf."""
    blocks = [tensor._local if is_distributed(tensor) else tensor for tensor in tensors]
    return [(t._shape, t._strides, t._dtype, t._requires_grad, t._is_leaf) for t in blocks]


def values_at(places: Sequence[tuple[nn.Cell, str, str]]) -> list[Any]:
    """What cells see under names: what shadows a parameter or buffer, or itself. A place is (cell, table, name)."""
    found = []
    for cell, table, name in places:
        own = vars(cell)
        value = own.get(name)
        found.append(own[table].get(name) if value is None else value)
    return found


def tensor_names(module: nn.Cell) -> list[tuple[str, str]]:
    """(table, name) of the cell's own parameters and buffers."""
    own = vars(module)
    return [(table, name) for table in private_api.TABLES for name in own[table]]


def run_locally(program: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a recorded program on the blocks of DTensors."""
    try:
        return program(*[arg._local if is_distributed(arg) else arg for arg in args])
    except Exception:
        private_api.start_recording()  # MindSpore stops recording when an operator fails
        raise


def call_instead(module: nn.Cell, call: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``call`` answer calls of the cell's ``construct``, inside of its own hooks; how it is called itself."""
    own = module.construct
    vars(module)["_construct_before_lowering"] = vars(module).get("construct")
    vars(module)["construct"] = call
    return own


def call_itself(module: nn.Cell) -> None:
    """Undo :func:`call_instead`."""
    if is_called_otherwise(module):
        own = vars(module).pop("_construct_before_lowering")
        del vars(module)["construct"]
        if own is not None:
            vars(module)["construct"] = own


def is_called_otherwise(module: nn.Cell) -> bool:
    """Whether something answers calls of the cell in its place."""
    return "_construct_before_lowering" in vars(module)


def own_attributes() -> frozenset[str]:
    """Attributes of cells in which MindSpore keeps its own accounts."""
    return _OWN_ATTRIBUTES


_OWN_ATTRIBUTES = frozenset(vars(nn.Cell())) - {"training"}


def hooks_of(module: nn.Cell) -> list[Any]:
    """The functions that run before and behind the cell's own forward and backward."""
    return private_api.hooks_of(module)


def obstacle_in(module: nn.Cell) -> str | None:
    """Why calls of the cell cannot be recorded; None where they can."""
    if module.has_bprop:
        return "has a bprop of its own: make it an autograd function (hyper_parallel.get_platform().Function)"
    if vars(module).get("_recompute_cell") is not None:
        return "recomputes itself (recompute()): put hyper_parallel's recompute around the module that is lowered"
    return None


def saves_otherwise() -> bool:
    """Whether hooks see what is saved for backward: recomputation, or saved tensors on the host."""
    return private_api.saves_otherwise()


def can_record() -> bool:
    """Whether calls of this thread may be recorded and replaced now: not in GRAPH_MODE."""
    return bool(ms.get_context("mode") == ms.PYNATIVE_MODE)


def get_draw_state() -> Any:
    """The state of MindSpore's generator; on a CPU its dropout has one of its own, which cannot be had."""
    return ms.get_rng_state()


def set_draw_state(state: Any) -> None:
    """Return to a state that :func:`get_draw_state` gave."""
    ms.set_rng_state(state)


def gradients_of_sum(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The gradients of the sum of all elements of all blocks of ``outputs``; None where there is none."""
    wanted = [local_alias(one) for one in outputs if private_api.requires_grad(local_alias(one))]
    if not wanted or not inputs:
        return [None] * len(inputs)
    ones = [ms.ops.ones_like(one.data) for one in wanted]
    return list(gradients.grad(wanted, [local_alias(one) for one in inputs], ones, True, False, True))


def relative_difference(one: Any, other: Any) -> float:
    """The largest difference of two blocks, relative to the largest value of ``other``."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    one, other = (np.asarray(tensor_to_numpy(local_alias(each).data)) for each in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.size or np.array_equal(one, other):
        return 0.0
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    one, other = one.astype(wide), other.astype(wide)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return 0.0
    scale = float(np.abs(np.where(np.isfinite(other), other, 0.0)).max())
    worst = float(np.where(same, 0.0, np.abs(one - other)).max())
    return math.inf if math.isnan(worst) else worst / (scale or 1.0)


def rounding(tensor: Any) -> float:
    """How many times coarser than float32 the tensor's dtype rounds, at least 1."""
    name = "" if tensor is None else str(tensor.dtype)
    return {"Float16": 2.0**13, "BFloat16": 2.0**16}.get(name, 1.0)


def repeatability() -> float:
    """MindSpore's kernels on a CPU round differently from call to call."""
    return 1e-5
