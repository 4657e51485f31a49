"""Forward, backward and weight gradients of the microbatches of one stage; it knows no schedule.

Several microbatches are in flight. Of each, what came in is a leaf whose gradient goes back, and of what went out only
the root of the graph is kept: its memory goes when it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random.sample_address import at_address, current
from hyper_parallel.core.pipeline_parallel.runtime.boundary import without_partial_sums
from hyper_parallel.core.pipeline_parallel.runtime.weight_gradients import WeightGradients, noting
from hyper_parallel.platform import get_platform

__all__ = ["StageWork"]

_platform = get_platform()


@dataclass
class _InFlight:
    """What is kept of a microbatch between its forward and its last gradient."""

    leaves: list[Any]  # what came in and needs a gradient
    roots: list[Any]  # of what went out, or of the loss
    pending: WeightGradients | None


class StageWork:
    """A stage at work. ``call(microbatch, received)`` runs it and gives the tensors to hand on, or what to
    differentiate on the last stage.
    """

    def __init__(self, call: Callable[[int, tuple[Any, ...]], Sequence[Any]], is_last: bool) -> None:
        self.call, self.is_last = call, is_last
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self, microbatch: int, received: Sequence[Any], needs_grad: Sequence[bool], is_split: bool = False
    ) -> list[Any]:
        """Run the stage; what it gives. ``needs_grad`` says of what was received whether its gradient is asked for.

        ``is_split``: the gradients of weights will be computed apart from those of inputs.
        """
        records = _platform.is_recording()
        inputs, leaves = [], []
        for tensor, needed in zip(received, needs_grad, strict=True):
            if records and needed:
                leaves.append(_platform.set_tensor_requires_grad(tensor))
                # Edges of the law are remembered on what is no leaf: three uses of an alias pay one reduction.
                tensor = _aliased(leaves[-1])
            inputs.append(tensor)
        pending = WeightGradients() if is_split and records else None
        with noting(pending):
            outputs = list(self.call(microbatch, tuple(inputs)))
            if not self.is_last:
                outputs = [without_partial_sums(one) for one in outputs]
        if records:
            roots = [_platform.graph_root(one) for one in outputs if _platform.needs_grad(one)]
            self._in_flight[microbatch] = _InFlight(leaves, roots, pending)
        return outputs

    def backward(self, microbatch: int, gradients: Sequence[Any] | None, keeps_weights: bool = False) -> list[Any]:
        """Go back through the stage: the gradients of what was received; those of weights are added to ``grad``.

        ``gradients`` are those of what went out and needs one; None on the last stage, whose output is the loss. With
        ``keeps_weights`` those of linear layers' weights wait for :meth:`weight_gradients`.
        """
        work = self._in_flight[microbatch]
        if work.roots:
            # Recomputation without memory leaves the address of its draws behind.
            with noting(work.pending), at_address(current.address):
                _platform.backward(work.roots, None if gradients is None else list(gradients))
        work.roots = []
        found = [_gradient_of(leaf) for leaf in work.leaves]
        work.leaves = []
        if not keeps_weights:
            self.weight_gradients(microbatch)
        return found

    def weight_gradients(self, microbatch: int) -> None:
        """Compute the weight gradients that :meth:`backward` has left."""
        work = self._in_flight.pop(microbatch)
        if work.pending is not None:
            work.pending.compute()

    def forget(self) -> None:
        """Let go of what an interrupted step has left."""
        self._in_flight = {}


def _aliased(leaf: Any) -> Any:
    alias = _platform.alias(leaf)
    return _platform.as_dtensor(DTensor, alias, leaf._layout, tuple(leaf.shape)) if isinstance(leaf, DTensor) else alias


def _gradient_of(leaf: Any) -> Any:
    """What backward has left on a leaf; zeros where nothing depends on it."""
    gradient = _platform.get_grad(leaf)
    _platform.set_grad(leaf, None)
    if gradient is None:
        return _platform.full_like(_platform.detached(leaf), 0.0)
    if isinstance(gradient, DTensor) and isinstance(leaf, DTensor):
        wanted = leaf._layout.gradient()
        if gradient._layout is not wanted:
            gradient = gradient.redistribute(gradient.device_mesh, wanted)
    return gradient
