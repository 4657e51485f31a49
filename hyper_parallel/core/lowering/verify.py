"""A lowered call compared with dispatch on the values of the moment: outputs, and the gradients of all inputs.

Dispatch is the truth, and its results are the call's. Both draw the same random numbers. Every rank must come here at
the same call, since the comparison communicates as the call and its backward do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.lowering.guards import Inputs
from hyper_parallel.core.lowering.program import Program
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.lowering.region import Region

_platform = get_platform()

TOLERANCE = {"local": 0.0, "inductor": 1e-5}  # relative to the largest value; wider for half precision


class LoweringMismatch(RuntimeError):
    """A lowered call gave other values than dispatch."""


def run_verified(region: Region, program: Program, inputs: Inputs, dispatch: Callable[[], Any]) -> Any:
    """The results of dispatch, after the program's were found equal; :class:`LoweringMismatch` where they are not."""
    states = random_state.get_whole_state(), _platform.get_draw_state()
    lowered = program(inputs.tensors)
    random_state.set_whole_state(states[0])
    _platform.set_draw_state(states[1])
    truth = dispatch()
    limit = TOLERANCE[program.backend]
    pairs = [("output", *pair) for pair in zip(_tensors(lowered), _tensors(truth), strict=True)]
    if _platform.is_recording():
        wanted = [
            (name, one) for name, one in zip(inputs.names, inputs.tensors, strict=True) if _platform.needs_grad(one)
        ]
        grads = [
            _platform.gradients_of_sum(_tensors(one), [tensor for _, tensor in wanted]) for one in (lowered, truth)
        ]
        pairs += [(f"gradient of {name}", *pair) for (name, _), *pair in zip(wanted, *grads, strict=True)]
    for what, one, other in pairs:
        difference = _platform.relative_difference(one, other)
        if difference > limit * _platform.rounding(other):
            raise LoweringMismatch(
                f"lower: {region.path or 'the model'}, {what}: the recorded program differs from dispatch by "
                f"{difference:.3g} relative. It depends on something that no guard sees (a global, an object's state): "
                "make it an argument, or do not lower this module"
            )
    return truth


def _tensors(value: Any) -> list[Any]:
    if _platform.is_tensor(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []
