"""How the parts of a batch run: one after the other through the whole model, or through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol

from hyper_parallel.core.dtensor.random.sample_address import at_address, current
from hyper_parallel.core.fully_shard.hsdp_module import HSDPModule
from hyper_parallel.core.shard.dispatching.mixing import OtherSamplesError, samples_differ_beyond
from hyper_parallel.parallel.degrees import Degrees
from hyper_parallel.parallel.meshes import Meshes
from hyper_parallel.parallel.micro_batches import MicroBatch
from hyper_parallel.parallel.sequence_inputs import shard_sequences
from hyper_parallel.platform import get_platform

__all__ = ["Beside", "InTurn", "Objective", "PartRuns", "own_samples", "raise_added", "weighted"]

_platform = get_platform()

#: (model, number of the part, its values) to tensors, of which the first is differentiated.
Objective = Callable[[Callable[..., Any], int, dict[str, Any]], tuple[Any, ...]]
#: (number of the part, auxiliary losses of blocks) to what they add to the loss.
Beside = Callable[[int, Sequence[Any]], Any]
Draws = Callable[[MicroBatch], AbstractContextManager[None]]


class PartRuns(Protocol):
    """What runs the parts of a batch."""

    def run(
        self,
        parts: Sequence[MicroBatch],
        objective: Objective,
        draws: Draws,
        backward: bool,
        beside: Beside | None = None,
    ) -> list[tuple[Any, ...]]:
        """What the objective gives for each part, without gradient; nothing on a rank that does not know.

        ``beside``: what auxiliary losses add to the loss that stages before the last, without an objective, have.
        """

    def settle_buffers(self) -> None:
        """Let all ranks have the buffers of the ranks that compute with them."""


class InTurn:
    """One part after the other through the whole model."""

    def __init__(self, model: Any, degrees: Degrees, meshes: Meshes) -> None:
        self._model, self._meshes = model, meshes
        self._wrapper = model if isinstance(model, HSDPModule) else None
        self._sizes = degrees.sizes

    def run(
        self,
        parts: Sequence[MicroBatch],
        objective: Objective,
        draws: Draws,
        backward: bool,
        beside: Beside | None = None,
    ) -> list[tuple[Any, ...]]:
        """See :class:`PartRuns`. forward and backward: the model's collectives, in each part."""
        results = []
        for number, part in enumerate(parts):
            self._reduce_now(len(parts), is_last=number == len(parts) - 1)
            values = shard_sequences(part.values, self._meshes.compute)
            with draws(part):
                found = weighted(objective(self._model, number, values), part)
            if backward:
                _require_gradient(found[0])
                # Recomputation without memory leaves the address of its draws behind: PyTorch's fork_rng skips those.
                with at_address(current.address):
                    _platform.backward(found[0])
            results.append(tuple(map(_platform.detached, found)))
        return results

    def settle_buffers(self) -> None:
        """Every rank runs the whole model."""

    def _reduce_now(self, num_parts: int, is_last: bool) -> None:
        """Parameters that are replicated have room for whole gradients, and reduce them once, with the last part."""
        if self._wrapper is None or num_parts == 1:
            return
        if self._sizes["dp_shard"] * self._sizes["cp"] == 1:
            self._wrapper.set_requires_gradient_sync(is_last)
        elif self._sizes["dp_replicate"] > 1:
            self._wrapper.set_requires_all_reduce(is_last)


def weighted(found: tuple[Any, ...], part: MicroBatch) -> tuple[Any, ...]:
    """What an objective gives, of a part without rows nothing; see Note [A part without rows]."""
    return found if part.rows else tuple(one * 0 for one in found)


def _require_gradient(loss: Any) -> None:
    if not _platform.requires_grad(loss):
        raise ValueError(
            "forward_backward: the loss depends on no parameter that asks for a gradient: all are frozen, or the model "
            "or the loss function detaches what it gives; loss_of computes a loss without gradients"
        )


def raise_added(name: str, parameter: Any) -> NoReturn:
    """A plain parameter along the data axes: each rank would train its own, by its own samples."""
    raise ValueError(
        f"the parameter {name!r} of shape {tuple(parameter.shape)} was added to the model, or replaced, after "
        "parallelize: each rank would train one of its own. Add modules and adapters before, and load values with "
        "hyper_parallel.set_model_state_dict"
    )


@contextmanager
def own_samples(model: Any, meshes: Meshes) -> Iterator[None]:
    """Context, around runs of parts: ranks off the compute mesh have other samples, if there are any.

    An error about a parameter of ``model`` has its name.
    """
    if meshes.batch.size() == 1:
        yield
        return
    try:
        with samples_differ_beyond(meshes.compute):
            yield
    except OtherSamplesError as error:
        named = _platform.named_state_parameters(model)
        name = next((name for name, parameter in named.items() if parameter is error.tensor), None)
        if name is None:
            raise
        raise OtherSamplesError(error.tensor, error.axes, f"the parameter {name!r}") from error
