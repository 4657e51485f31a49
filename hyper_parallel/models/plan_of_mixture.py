"""How the model with mixtures of experts is cut, on one page: that of the Llama, and its mixtures.

Attention, the dense blocks, the embedding and the head are cut as the Llama's are. A mixture's steps depend on values:
every rank of a line of tp runs it on whole tokens, with whole weights.
"""

from __future__ import annotations

from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.tensor_parallel.parameter_styles import ReplicateParameters
from hyper_parallel.core.tensor_parallel.single_device_code import ComputeReplicated
from hyper_parallel.models.mixture_config import MixtureConfig
from hyper_parallel.models.plan_of_llama import Plan, llama_plan

__all__ = ["mixture_plan"]


def mixture_plan(config: MixtureConfig, *, sequence_parallel: bool = True, plain_outputs: bool = True) -> Plan:
    """The plan of :class:`hyper_parallel.models.Mixture`, for :func:`hyper_parallel.parallelize_module`.

    >>> mixture_plan(MixtureConfig(), sequence_parallel=False)["blocks.*.moe"]
    ComputeReplicated(output=Replicate())
    """
    between = Shard(1) if sequence_parallel else Replicate()
    plan = llama_plan(sequence_parallel=sequence_parallel, plain_outputs=plain_outputs)
    if not config.num_dense_blocks:
        plan = {path: style for path, style in plan.items() if "feed_forward" not in path}
    if config.num_dense_blocks < config.num_blocks:
        plan["blocks.*.moe_norm"] = ReplicateParameters()
        plan["blocks.*.moe"] = ComputeReplicated(output=between)
    return plan
