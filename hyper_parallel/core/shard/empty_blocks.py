"""What a rank does whose block has no elements, where the framework's own operator would refuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.signature import LocalCall
from hyper_parallel.platform import get_platform


def has_empty_block(call: LocalCall) -> bool:
    """Whether this rank's block of an input or output has no elements; the framework's kernels may refuse those."""
    described = [*zip(call.inputs, call.input_shapes, strict=True), *zip(call.outputs, call.output_shapes, strict=True)]
    return any(0 in layout.local_shape(shape) for layout, shape in described)


def block_tensors(call: LocalCall) -> list[Any]:
    """The tensors among the arguments, in their order."""
    platform = get_platform()
    return [value for value in (*call.args, *call.kwargs.values()) if platform.is_tensor(value)]


def zeros_in_graph(call: LocalCall, index: int = 0, combine: Callable[..., Any] = lambda *sums: sum(sums)) -> Any:
    """Zeros of the shape of an output's block that keep all inputs in the graph, with gradients of zeros.

    ``combine`` takes a zero for each input and gives zero; the gradients must depend on the inputs as those of the
    operator do, so that this rank takes part in the gradients of gradients with the others.
    """
    platform = get_platform()
    tensors = block_tensors(call)
    zeros = platform.zeros(call.local_output_shape(index), tensors[0].dtype, tensors[0].device)
    sums = [platform.silenced(one).sum() for one in tensors if one.is_floating_point() or one.is_complex()]
    return zeros + combine(*sums) if sums else zeros
