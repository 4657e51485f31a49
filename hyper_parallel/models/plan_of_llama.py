"""How the Llama-like model is cut, on one page: from each part of the model to its style.

In each half of a block the first projections are cut by their outputs and the last by its inputs, so that the middle,
heads and hidden features, needs no communication. With sequence parallelism the stream between the halves is cut on the
sequence: an all-gather leads into each half, a reduce-scatter out of it. Without, the stream is whole and an all-reduce
leads out of each half. The vocabulary is cut in the embedding and in the head, so no rank ever has all logits.
"""

from __future__ import annotations

from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.tensor_parallel.gather_inputs import GatherInputs
from hyper_parallel.core.tensor_parallel.parameter_styles import ReplicateParameters
from hyper_parallel.core.tensor_parallel.single_device_code import SingleDeviceCode, SingleDeviceModel
from hyper_parallel.core.tensor_parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel

Plan = dict[str, ParallelStyle | list[ParallelStyle]]


def llama_plan(*, sequence_parallel: bool = True, plain_outputs: bool = True) -> Plan:
    """The plan of :class:`hyper_parallel.models.Llama`, for :func:`hyper_parallel.parallelize_module`.

    >>> llama_plan(sequence_parallel=False)["blocks.*.feed_forward.down"]
    RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate(), use_local_output=False)
    """
    between = Shard(1) if sequence_parallel else Replicate()
    by_outputs = ColwiseParallel(use_local_output=False)
    by_inputs = RowwiseParallel(output_layouts=between, use_local_output=False)
    whole = ReplicateParameters()
    return {
        "": SingleDeviceModel(plain_outputs=plain_outputs),
        "embedding": by_inputs,
        "blocks.*": SingleDeviceCode(),
        "blocks.*.attention_norm": whole,
        "blocks.*.attention": GatherInputs(),
        "blocks.*.attention.query": by_outputs,
        "blocks.*.attention.key": by_outputs,
        "blocks.*.attention.value": by_outputs,
        "blocks.*.attention.output": by_inputs,
        "blocks.*.feed_forward_norm": whole,
        "blocks.*.feed_forward": GatherInputs(),
        "blocks.*.feed_forward.gate": by_outputs,
        "blocks.*.feed_forward.up": by_outputs,
        "blocks.*.feed_forward.down": by_inputs,
        "norm": whole,
        "head": [GatherInputs(), by_outputs],
    }
