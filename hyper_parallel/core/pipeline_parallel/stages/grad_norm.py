"""Clipping by the norm of the gradients of all stages, with the bits of one device.

Each stage has the norms of its own parameters. Adding squares stage by stage rounds differently from adding them in the
order of the model, so the norms themselves travel, and every rank adds all of them in that order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.shard.dispatching.grad_norm import global_norms
from hyper_parallel.platform import get_platform

__all__ = ["clip_grad_norm_of_stages"]

_platform = get_platform()
_WIDE = ("float64", "complex128")


def clip_grad_norm_of_stages(
    parameters: Mapping[str, Any],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    order: Mapping[str, Any],
    stages: Any,
) -> Any:
    """Scale the gradients of this rank so that the norm of all stages' is at most ``max_norm``; the norm before.

    ``parameters`` are those of this rank by their names in the whole model, a tied one under the first of its names
    (``Split.own_parameters``). ``order`` has the trainable parameters of the whole model, in its order, with the dtypes
    of their gradients (``Split.order``), the same on all ranks; ``stages`` is the group of the ranks that hold the
    stages, or a mesh of one axis. A parameter that several ranks hold counts once, one without gradient as zeros.

    forward: for parameters that are sharded, the reductions of their norms, then one all-reduce of two numbers for each
    parameter of the model over ``stages``; backward: none. Nothing is read on the host unless ``error_if_nonfinite``.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_of_stages: max_norm must be 0 or more, got {max_norm}")
    if math.isnan(norm_type):
        raise ValueError(
            "clip_grad_norm_of_stages: norm_type is nan; give the order of the norm, 2.0 or inf for instance"
        )
    gradients = {name: _platform.get_grad(parameter) for name, parameter in parameters.items()}
    gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    unknown = [name for name in gradients if name not in order]
    if unknown:
        raise ValueError(
            f"clip_grad_norm_of_stages: {', '.join(map(repr, unknown[:5]))} {'are' if len(unknown) > 1 else 'is'} not "
            "in order=; give parameters the names of the whole model, a tied one the first of its names, as "
            "Split.own_parameters does"
        )
    with _platform.no_grad():
        own = dict(zip(gradients, global_norms(list(gradients.values()), norm_type), strict=True))
        total = _platform.total_of_norms(_of_all_stages(own, order, stages), norm_type)
    if error_if_nonfinite and not math.isfinite(float(_platform.tensor_to_numpy(total))):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients of {len(order)} parameters on all stages is "
            f"{float(_platform.tensor_to_numpy(total))}, so they cannot be clipped; pass error_if_nonfinite=False to "
            "scale them by it anyway"
        )
    _platform.clip_by_norm_(list(gradients.values()), total, max_norm)
    return total


def _of_all_stages(own: Mapping[str, Any], order: Mapping[str, Any], stages: Any) -> list[Any]:
    """The norm of every parameter of the model: the largest that a rank has, which has none of the others' as 0."""
    if not order:
        return []
    is_wide = any(str(dtype).lower().endswith(_WIDE) for dtype in order.values())
    travels_as = _platform.str_to_dtype("float64" if is_wide else "float32")
    like = next(iter(own.values()), None)
    nothing = _platform.zeros((), travels_as) if like is None else _platform.full_like(like, 0.0, travels_as)
    mine = [_platform.tensor_type_cast(own[name], travels_as) if name in own else nothing for name in order]
    group = stages.get_group() if isinstance(stages, DeviceMesh) else stages
    whole = attributed("norm of gradients", _platform.complete_norms, mine, math.inf, group)
    return [_platform.finished_norm(norm, norm, dtype) for norm, dtype in zip(whole, order.values(), strict=True)]
