"""Tensors whose gradients are reduced later, and operators on them.

Why, and what follows: Note [Who sums] in ``core/dtensor/later_reduction.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.dtensor.autograd_edges import redistribute_with_grad
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.later_reduction import reduced_later
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.meshes.rank_grid import Axis
from hyper_parallel.core.shard.dispatching.strategy import Choice, axes_not_replicated
from hyper_parallel.core.shard.rule_kit.signature import OpCall, TensorSpec
from hyper_parallel.platform import get_platform

_platform = get_platform()


def reduce_later(tensor: DTensor, axes: str | Iterable[Axis]) -> DTensor:
    """The same values, whose gradient stays a partial sum on ``axes`` in every operator.

    forward: nothing; backward: one all-reduce where ``tensor`` needs a gradient, however often the result is used. A
    wrapper that reduces by itself gives values without a graph (``parameter.detach()``), makes leaves of them, and gets
    their gradients as ``Partial``.

    >>> import torch, hyper_parallel as hp
    >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), rank_list=(0,), init_backend=False)
    >>> weight = hp.distribute_tensor(torch.ones(2), mesh).requires_grad_()
    >>> reduce_later(weight, "dp").placements
    (Replicate(),)
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"reduce_later takes a DTensor, got a {type(tensor).__name__}: only a layout has axes")
    layout = reduced_later(tensor._layout, axes)
    if layout is tensor._layout:
        return tensor
    block = redistribute_with_grad(tensor._completed(), tensor._layout, layout, tuple(tensor._global_shape))
    return _platform.as_dtensor(DTensor, block, layout, tensor._global_shape)


def by_the_law(tree: Any) -> Any:
    """The tensors of a tree with whole gradients where they would be reduced later: for code that knows no layouts.

    forward: nothing; backward: nothing; one rank passes the gradient on.
    """

    def one(value: Any) -> Any:
        if not isinstance(value, DTensor) or not value._layout.reduced_later:
            return value
        layout = value._layout.reduced(pending=False)
        block = redistribute_with_grad(value._completed(), value._layout, layout, tuple(value._global_shape))
        return _platform.as_dtensor(DTensor, block, layout, value._global_shape)

    return _platform.tree_map(one, tree)


def keep_for_later(call: OpCall, choice: Choice, sources: Sequence[Layout], written: int | None) -> Choice:
    """``choice``, made for ordinary values, for inputs of which some, under ``sources``, are reduced later.

    On an axis along which the operator varies, an input that is reduced later enters without an edge. On any other the
    results are reduced later if what is written into is, or all inputs that can have a gradient are.
    """
    replicated = [set(range(layout.mesh.ndim)) - axes_not_replicated(layout) for layout in choice.inputs]
    same_on_all = set.intersection(*replicated)
    varying = set.union(*replicated) - same_on_all
    later = [set(layout.reduced_later) for layout in sources]
    if written is not None:
        passed_on = later[written] & same_on_all
    else:
        counted = [axes for axes, spec in zip(later, call.tensors, strict=True) if _has_gradient(spec)]
        passed_on = set.intersection(*(counted or [set()])) & same_on_all
    inputs, varies = [], []
    for target, own, whole, axes in zip(choice.inputs, later, replicated, choice.varies, strict=True):
        kept = own & whole & (varying | passed_on)
        inputs.append(reduced_later(target, kept))
        varies.append(tuple(sorted((set(axes) | (passed_on & whole)) - kept)))
    outputs = tuple(reduced_later(layout, passed_on) for layout in choice.outputs)
    return replace(choice, inputs=tuple(inputs), outputs=outputs, varies=tuple(varies))


def _has_gradient(spec: TensorSpec) -> bool:
    return "float" in _platform.dtype_name(spec.dtype) or "complex" in _platform.dtype_name(spec.dtype)
