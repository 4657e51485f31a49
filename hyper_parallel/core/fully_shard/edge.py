"""The edge of the autograd graph through which a unit's parameters enter its forward.

Note [One edge per unit]
The edge is made when the unit's forward begins, and once in a pass: what calls the unit again, or borrows a tied
parameter of it, gets the same whole values. Engines run the nodes of a graph from the youngest to the oldest, so the
edge runs right after the last operator that used its values, before those of units that ran earlier: gradients are
reduced while backward goes on. Made before the model runs, all edges would run at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.forward_pass import ForwardPass
    from hyper_parallel.core.fully_shard.unit import Unit

_platform = get_platform()


class EnterUnit(_platform.Function):  # type: ignore[name-defined]
    """forward: shards -> whole values, which lie gathered already; backward: their gradients, reduced to shards."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, forward_pass: ForwardPass, index: int, *shards: Any) -> Any:
        del shards
        ctx.unit, ctx.forward_pass, ctx.index = unit, forward_pass, index
        # For whoever looks which plain parameters a value was computed from: by result, None for distributed ones.
        ctx.stands_for = unit.plain_tensors
        _platform.leave_gradients_missing(ctx)
        values = unit.whole_tensors()
        frozen = [value for value, needs_grad in zip(values, unit.needs_grad, strict=True) if not needs_grad]
        if frozen:
            _platform.mark_not_differentiable(ctx, frozen)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for gradient in gradients if _platform.is_recording() else ():
            if gradient is not None and _platform.needs_grad(gradient):
                raise RuntimeError(
                    f"fully_shard: backward(create_graph=True) reaches the parameters of {ctx.unit}: the reduction of "
                    "their gradients cannot be differentiated. Gradients of inputs can: torch.autograd.grad(outputs, "
                    "inputs, create_graph=True)"
                )
        may_return_later = _platform.adds_to_leaves(ctx)
        blocks = ctx.forward_pass.reduce(ctx.index, ctx.unit, list(gradients), may_return_later)
        return (None, None, None, *(blocks or [None] * len(gradients)))


def enter(unit: Unit, forward_pass: ForwardPass, index: int) -> list[Any]:
    """The whole values of the unit's parameters, recorded."""
    blocks = _platform.without_interception(EnterUnit.apply, unit, forward_pass, index, *unit.tensors)
    return unit.values(blocks)
