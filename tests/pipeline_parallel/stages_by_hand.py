"""All stages of a model in one process, what they hand on moved by hand: forward in order, backward in reverse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.pipeline_parallel.stages.split import Split, split_stages
from hyper_parallel.core.pipeline_parallel.stages.stage_model import StageModel
from hyper_parallel.plans.structure import structure_of
from hyper_parallel.platform import get_platform


def split_of(model: Any, stages: Any, **options: Any) -> Split:
    found = structure_of(model)
    return split_stages(model, stages, blocks=found.blocks, prologue=found.prologue, **options)


def cut(model: Any, split: Split, prepare: Callable[[Any], Any] = lambda model: model) -> list[StageModel]:
    """Each stage from a copy of the model, on which ``prepare`` does what comes before the cut."""
    stages = []
    for index in range(split.num_stages):
        copied = copy.deepcopy(model)
        prepare(copied)
        stages.append(StageModel(copied, split, index))
    return stages


def run(stages: Sequence[StageModel], batches: Sequence[dict[str, Any]], loss_of: Callable[[Any], Any]) -> list[Any]:
    """Forward of all micro-batches, then backward of all; the losses. Streams are cut between stages."""
    platform = get_platform()
    losses, runs = [], []
    for batch in batches:
        stream, ends = None, []
        for stage in stages:
            if stream is not None:
                stream = _received(stream)
            outputs = stage(stream, **batch)
            ends.append((stream, outputs))
            stream = outputs
        ends[-1] = (ends[-1][0], loss_of(ends[-1][1]))
        losses.append(ends[-1][1])
        runs.append(ends)
    for ends in runs:
        gradient = None
        for received, outputs in reversed(ends):
            platform.backward(outputs) if gradient is None else platform.backward(outputs, gradient)
            gradient = None if received is None else platform.get_grad(received)
    return losses


def _received(stream: Any) -> Any:
    """What arrives: the values, of a distributed tensor this rank's block alone."""
    platform = get_platform()
    block = platform.copied(platform.detached(stream))
    if isinstance(stream, DTensor):
        block = platform.as_dtensor(DTensor, block, stream.layout, tuple(stream.shape))
    return platform.set_tensor_requires_grad(block)


def gradients_of(stages: Sequence[StageModel]) -> dict[str, Any]:
    """By name in the whole model; what several stages hold is summed."""
    found: dict[str, Any] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters().items():
            gradient = get_platform().get_grad(parameter)
            if gradient is not None:
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[name] = found[name] + gradient if name in found else gradient
    return found
