"""Weight gradients of linear layers that are put off: backward in two parts, for the input (I) and for weights (W).

Note [The tap]
While a :class:`WeightGradients` is noting, a linear layer computes ``y = linear(x, weight, bias)`` without a gradient
of the weight, and ``y`` passes a tap: the identity, whose backward notes weight, input and gradient of ``y``. So I is
an ordinary backward, which frees all that W does not need, and W is one product for each note. The products are those
of the whole backward, on distributed tensors with the layouts that the law gives.

Norms, biases, embeddings and adapters have their gradients in I: they are small, or there is nothing to win. So have
layers that are not plain products, or whose weight is made of parameters: subclasses of linear layers with a forward of
their own, parametrized, compiled and fused ones, and those of modules that run on whole plain tensors. And so has a
weight with hooks on its gradient, which W does not call.

Note [The same when it runs again]
What is recomputed in I must do what it did in F, or the framework finds other tensors than it kept. So :func:`noting`
is around I as it was around F. Backward may run in threads of the framework; they have the value of the one that asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.dtensor.mesh_axes import axes_within, widened
from hyper_parallel.core.modules.linear_layers import (
    AroundProduct,
    HoldsProduct,
    Linear,
    LinearForward,
    forward_with_product,
    linear_function,
)
from hyper_parallel.core.modules.lora import adapter_of
from hyper_parallel.core.shard.custom.custom_ops import register_op
from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature, letters
from hyper_parallel.platform import get_platform

__all__ = ["WeightGradients", "noting", "split_backward"]

_platform = get_platform()

_in_force = _platform.new_thread_value("hyper_parallel.weight_gradients")


class WeightGradients:
    """The weight gradients of one microbatch of a stage that are put off: what I notes, W computes."""

    def __init__(self) -> None:
        self._notes: list[_Note] = []

    def compute(self) -> None:
        """W: add the gradient of each noted weight to its ``grad``, in the order noted; what was noted is freed.

        The gradients of a weight that several layers share are summed first, as in a whole backward. Hooks of the
        weights are not called.
        """
        waiting: dict[int, list[_Note]] = {}
        for note in self._notes:
            waiting.setdefault(id(note.use.weight), []).append(note)
        self._notes = []
        with _platform.no_grad():
            while waiting:
                notes = waiting.pop(next(iter(waiting)))
                weight = notes[0].use.weight
                total = notes.pop(0).gradient()
                while notes:
                    total = total + notes.pop(0).gradient()
                _platform.add_to_grad(weight, total)

    def __len__(self) -> int:
        """How many products wait."""
        return len(self._notes)


def split_backward(model: Any) -> int:
    """Let the linear layers of a stage's model hand their weight gradients to the :class:`WeightGradients` in force.

    Once, in place; how many layers do so. Outside of :func:`noting` nothing changes. Which layers: Note [The tap].
    """
    taps: set[int] = set()
    for _, module in _platform.get_cells_and_names(model):
        holder = _holder(module)
        if holder is None:
            continue
        if not isinstance(holder.linear, _TappedProduct):
            dims = _platform.linear_weight_dims(module)
            holder.linear = _TappedProduct(holder.linear, outputs_first=dims == (0, 1))
        taps.add(id(holder))
    return len(taps)


@contextmanager
def noting(into: WeightGradients | None) -> Iterator[None]:
    """Around F, I and B of a microbatch of a stage whose backward is split; None: nothing is put off."""
    before, _in_force.value = _in_force.value, into
    try:
        yield
    finally:
        _in_force.value = before


def _holder(module: Any) -> HoldsProduct | None:
    """What holds the product of a linear layer whose weight is a parameter of its own."""
    if _platform.linear_weight_dims(module) is None or "weight" not in _platform.own_parameters(module):
        return None
    holder = adapter_of(module) or forward_with_product(module)
    if holder is None:
        linear = linear_function(module)
        if linear is None:
            return None
        holder = LinearForward(linear)
        _platform.replace_forward(module, holder)
    return holder


# ---------------------------------------------------------------- forward


@dataclass(slots=True)
class _Use:
    """One use of a weight in a forward. ``layouts`` of distributed tensors: of weight, input and output."""

    pending: WeightGradients
    weight: Any
    outputs_first: bool
    layouts: tuple[Layout, Layout, Layout] | None = None
    shapes: tuple[Shape, Shape] = ((), ())  # global, of input and output


class _TappedProduct(AroundProduct):
    """A product that puts the gradient of its weight off; see Note [The tap]."""

    def __init__(self, linear: Linear, outputs_first: bool) -> None:
        self.linear, self.outputs_first = linear, outputs_first

    def __call__(self, x: Any, weight: Any, bias: Any) -> Any:
        pending = _in_force.value
        if pending is None or not _takes_gradient(weight) or _platform.has_gradient_hooks(weight):
            return self.linear(x, weight, bias)
        is_distributed = isinstance(weight, DTensor)
        if isinstance(x, DTensor) is not is_distributed:
            return self.linear(x, weight, bias)
        use = _Use(pending, weight, self.outputs_first)
        if not is_distributed:
            y = self.linear(x, _platform.detached(weight), bias)
            return _Tap.apply(y, _kept(x, y), weight, use)
        mesh = x.device_mesh
        if weight.device_mesh != mesh and axes_within(weight.device_mesh, mesh) is None:
            return self.linear(x, weight, bias)
        layout = widened(weight._layout, mesh)
        fixed = _platform.as_dtensor(DTensor, _platform.detached(weight), layout, weight._global_shape)
        y = self.linear(x, fixed, bias)
        use.layouts = (layout, x._layout, y._layout)
        use.shapes = (tuple(x._global_shape), tuple(y._global_shape))
        tapped = _platform.without_interception(_Tap.apply, y, _kept(x, y), weight, use)
        return _platform.as_dtensor(DTensor, tapped, y._layout, y._global_shape)


def _takes_gradient(weight: Any) -> bool:
    """Whether somebody asks the tensor for its gradient: not one that is computed from a parameter at every call."""
    asked = _platform.is_leaf(weight) or isinstance(weight, _platform.Parameter)
    return bool(asked and _platform.needs_grad(weight))


def _kept(x: Any, y: Any) -> Any:
    """The block of an input for W, in the dtype of the product, which under autocast is not the input's own."""
    block = _platform.detached(x)
    return block if block.dtype == y.dtype else _platform.tensor_type_cast(block, y.dtype)


class _Tap(_platform.Function):  # type: ignore[name-defined]
    """forward: ``y`` as it is; backward: its gradient as it is, noted with ``x`` for W. See Note [The tap].

    The weight is an input for its place in the graph alone: it gets no gradient here.
    """

    @staticmethod
    def forward(ctx: Any, y: Any, x: Any, weight: Any, use: _Use) -> Any:
        del weight
        ctx.save_for_backward(x)
        ctx.use = use
        return _platform.detached(y)  # not y itself, nor a view of it: these could not be written to in place

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        ctx.use.pending._notes.append(_Note(ctx.use, _platform.detached(x), _platform.detached(gradient)))
        return gradient, None, None, None


# ---------------------------------------------------------------- W


@dataclass(slots=True)
class _Note:
    """What one use of a weight has left to do."""

    use: _Use
    x: Any
    gradient_of_y: Any

    def gradient(self) -> Any:
        """The block of the weight's gradient, in the weight's dtype."""
        x, gradient, use = self.x, self.gradient_of_y, self.use
        if use.layouts is not None:
            weight_layout, x_layout, y_layout = use.layouts
            x = _platform.as_dtensor(DTensor, x, x_layout, use.shapes[0])
            gradient = _platform.as_dtensor(DTensor, gradient, y_layout.gradient(), use.shapes[1])
            product = _outer(gradient, x) if use.outputs_first else _outer(x, gradient)
            lawful = weight_layout.gradient()
            if product._layout is not lawful:
                product = product.redistribute(lawful.mesh, lawful)
            block = _platform.detached(product)
        else:
            block = _outer(gradient, x) if use.outputs_first else _outer(x, gradient)
        dtype = use.weight.dtype
        return block if block.dtype == dtype else _platform.tensor_type_cast(block, dtype)


def _rule(call: OpCall) -> Signature:
    batch = letters(call.tensors[0].ndim - 1)
    alone = (frozenset({0}), frozenset({1}))
    inputs = ((*batch, "M"), (*batch, "N"))
    return Signature(inputs, (("M", "N"),), reduces=dict.fromkeys(batch, "sum"), linear=alone)


@register_op(_rule)
def _outer(first: Any, second: Any) -> Any:
    """The sum over all dims but the last of the products of each element of ``first`` with each of ``second``."""
    first, second = (one.reshape((math.prod(one.shape[:-1]), one.shape[-1])) for one in (first, second))
    return _platform.linear(first.T, second.T)
