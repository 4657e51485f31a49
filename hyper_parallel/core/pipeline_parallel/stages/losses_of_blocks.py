"""Auxiliary losses of blocks that lie before the last stage: what they add to the gradients, with no message for it.

A block with ``gives_loss`` gives (stream, loss), and its model adds the losses of its blocks to that of the targets.
Only the stream travels between stages, so a stage adds the gradient of its own blocks' losses by itself.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform

__all__ = ["gives_loss", "with_loss"]

_platform = get_platform()


def gives_loss(block: Any) -> bool:
    """Whether a block says that it gives (stream, loss)."""
    return bool(getattr(block, "gives_loss", False))


def with_loss(stream: Any, loss: Any) -> Any:
    """The stream; who goes back through it goes back through ``loss`` too, a number, as if it had been added.

    forward and backward: no communication.
    """
    if not _platform.is_recording() or not _platform.needs_grad(loss):
        return stream
    carrying = _platform.without_interception(_WithLoss.apply, stream, loss)
    if not isinstance(stream, DTensor):
        return carrying
    return _platform.as_dtensor(DTensor, carrying, stream._layout, tuple(stream.shape))


class _WithLoss(_platform.Function):  # type: ignore[name-defined]
    """forward: the stream as it is; backward: its gradient as it is, and 1 for the loss."""

    @staticmethod
    def forward(ctx: Any, stream: Any, loss: Any) -> Any:
        ctx.one = _platform.full_like(_platform.detached(loss), 1.0)
        return _platform.detached(stream)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, ctx.one
