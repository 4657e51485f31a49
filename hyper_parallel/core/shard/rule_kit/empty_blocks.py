"""What a rank does whose block has no elements, where the framework's own operator would refuse it.

Note [Spare rows]
The ranks meet in the edges of the graph, so all of them must have the same edges in it, also in the graph of the
gradients. Which those are is for the operator to say: the gradient of a convolution belongs to the graph of all its
inputs at once. So a rank without rows runs the operator itself, on a row of zeros, and takes nothing of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.shard.rule_kit.signature import LocalCall
from hyper_parallel.platform import get_platform


def has_empty_block(call: LocalCall) -> bool:
    """Whether this rank's block of an input or output has no elements; the framework's kernels may refuse those."""
    return any(0 in layout.local_shape(shape) for layout, shape in _described(call))


def lacks_rows(call: LocalCall) -> bool:
    """Whether this rank has no rows of a dim that has some elsewhere: see :func:`with_spare_rows`."""
    return any(_missing(layout, shape) for layout, shape in _described(call))


def with_spare_rows(call: LocalCall, run: Callable[[LocalCall], Any] = LocalCall.plain) -> Any:
    """What ``run`` gives for blocks with a row of zeros in every dim of which this rank has none: see the note.

    The results are without the rows that came of those. What is written into keeps its size: there ``run`` is called
    as it is.
    """
    if call.written is not None or not lacks_rows(call):
        return run(call)
    platform = get_platform()
    described = iter(zip(call.inputs, call.input_shapes, strict=True))

    def widened(value: Any) -> Any:
        if platform.is_tensor(value):
            for dim in _missing(*next(described)):
                value = with_spare_row(value, dim)
        return value

    args = tuple(map(widened, call.args))
    kwargs = {name: widened(value) for name, value in call.kwargs.items()}
    result = run(dataclasses.replace(call, args=args, kwargs=kwargs))
    if platform.is_tensor(result):
        return _narrowed(result, call, 0)
    return getattr(result, "_make", type(result))([_narrowed(one, call, index) for index, one in enumerate(result)])


def with_spare_row(block: Any, dim: int) -> Any:
    """The block with a row of zeros behind its last, so that there is one even where the block is empty."""
    return get_platform().cat([block, block.narrow(dim, 0, 0).sum(dim, keepdim=True).to(block.dtype)], dim)


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
    sums = [platform.zeros_kept_in_graph(one).sum() for one in tensors if one.is_floating_point() or one.is_complex()]
    return zeros + combine(*sums) if sums else zeros


def _described(call: LocalCall) -> list[tuple[Layout, Shape]]:
    return [*zip(call.inputs, call.input_shapes, strict=True), *zip(call.outputs, call.output_shapes, strict=True)]


def _missing(layout: Layout, shape: Shape) -> list[int]:
    """The dims of which there are rows, but none here."""
    return [dim for dim, size in enumerate(layout.local_shape(shape)) if size == 0 and shape[dim] > 0]


def _narrowed(result: Any, call: LocalCall, index: int) -> Any:
    for dim in _missing(call.outputs[index], call.output_shapes[index]):
        result = result.narrow(dim, 0, 0)
    return result
