"""What a stage has in place of modules that run before its blocks and belong to stage 0: the shape of their output.

Models ask the stream for its shape, dtype and device before the first block, to make positions and masks; its values
are replaced. So a hole gives NaNs of the right shape, which models may write to, on the device where the stage runs:
some move their ids to that of the embedding, and what was taken out of the model has none. A model that uses the values
all the same, beside the stream, is told so when a gradient comes back to them, and without one its loss is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform import get_platform

__all__ = ["hole_of", "refusing_gradients"]

_platform = get_platform()


def hole_of(path: str, module: Any) -> Callable[[Any, Any, Any], Any]:
    """What gives NaNs like the output of a module for its input, on a device and in a dtype (None: its parameters').

    Of an embedding, a linear layer or a norm.
    """
    own = _platform.own_parameters(module)
    dtype = next(iter(own.values())).dtype
    dims = _platform.linear_weight_dims(module)
    if _platform.is_embedding_module(module):
        width = own[_platform.weight_name(module)].shape[-1]
        return lambda ids, device, given: _unknown((*ids.shape, width), given or dtype, device)
    if dims is not None:
        size = own[_platform.weight_name(module)].shape[dims[0]]
        return lambda x, device, given: _unknown((*x.shape[:-1], size), given or dtype, device)
    if all(len(parameter.shape) == 1 for parameter in own.values()):
        return lambda x, device, given: _unknown(tuple(x.shape), given or dtype, device)
    raise ValueError(
        f"split_stages: '{path}' ({type(module).__name__}) runs before the blocks, and the shape of what it gives "
        "cannot be told on stages without it; embeddings, linear layers and norms may stand there: move it into "
        "the first block"
    )


def _unknown(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    zeros = _platform.zeros(shape, dtype, device)
    return _platform.full_like(zeros, math.nan) if "float" in _platform.dtype_name(dtype) else zeros


def refusing_gradients(hole: Any, path: str) -> Any:
    """The NaNs in place of what ``path`` gives; an error in backward when something was computed with them."""
    if not _platform.is_recording():
        return hole
    return _Unused.apply(_platform.set_tensor_requires_grad(hole), path)


class _Unused(_platform.Function):  # type: ignore[name-defined]
    """forward: the same; backward: an error."""

    @staticmethod
    def forward(ctx: Any, hole: Any, path: str) -> Any:
        ctx.path = path
        return _platform.detached(hole)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise RuntimeError(
            f"what '{ctx.path}' gives before the blocks is used beside the stream, behind the blocks or in them, and "
            "on stages without it there is nothing in its place; only the stream travels: use tp, dp_shard or cp for "
            "this model, or hand it on as a part of the stream"
        )
