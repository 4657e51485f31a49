"""HyperParallel: train one model on many devices from one description of how it is split.

This page is the public API. Names are imported on first use, so that ``import hyper_parallel`` needs no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.platform import Platform as _Platform

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hyper_parallel.platform import get_platform as get_platform

_DTENSOR = "hyper_parallel.core.dtensor"
_SHARD = "hyper_parallel.core.shard"
_MODULES = "hyper_parallel.core.modules"
_FULLY_SHARD = "hyper_parallel.core.fully_shard"
_PARALLEL = "hyper_parallel.parallel"
_CONTEXT_PARALLEL = "hyper_parallel.core.context_parallel"
_OWN_STAGES = "hyper_parallel.core.pipeline_parallel.own_stages"
_TENSOR_PARALLEL = "hyper_parallel.core.tensor_parallel"
_EXPERT_PARALLEL = "hyper_parallel.core.expert_parallel"
_HOME_OF = {
    "get_platform": "hyper_parallel.platform",
    **dict.fromkeys(
        ("backward", "grad_of", "parallelize_value_and_grad", "value_and_grad", "zero_grad"),
        "hyper_parallel.platform.shared.gradients",
    ),
    "DeviceMesh": f"{_DTENSOR}.device_mesh",
    "init_device_mesh": f"{_DTENSOR}.device_mesh",
    "get_current_mesh": f"{_DTENSOR}.meshes.mesh_context",
    "Layout": f"{_DTENSOR}.layout",
    "Shard": f"{_DTENSOR}.placement_types",
    "Replicate": f"{_DTENSOR}.placement_types",
    "Partial": f"{_DTENSOR}.placement_types",
    **dict.fromkeys(
        (
            "DTensor",
            "SkipDTensorDispatch",
            "arange",
            "distribute_module",
            "distribute_tensor",
            "empty",
            "full",
            "ones",
            "rand",
            "randn",
            "zeros",
        ),
        f"{_DTENSOR}.dtensor",
    ),
    "CommRecorder": f"{_DTENSOR}.comm_recorder",
    "draw": "hyper_parallel.drawing.drawing",
    "dry_run": "hyper_parallel.analysis.dry_run",
    "dry_run_classes": "hyper_parallel.analysis.dry_run",
    "fully_shard": f"{_FULLY_SHARD}.api",
    "replicate": f"{_FULLY_SHARD}.api",
    "HSDPModule": f"{_FULLY_SHARD}.hsdp_module",
    **dict.fromkeys(
        ("CommFusionPolicy", "CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"), f"{_FULLY_SHARD}.policies"
    ),
    "get_model_state_dict": f"{_FULLY_SHARD}.model_state",
    "hsdp_sync_stream": f"{_FULLY_SHARD}.mean_share",
    "share_of_mean": f"{_FULLY_SHARD}.mean_share",
    "set_model_state_dict": f"{_FULLY_SHARD}.model_state",
    "Trainer": "hyper_parallel.trainer.trainer",
    "RunConfig": "hyper_parallel.trainer.config.run_config",
    "explain": f"{_DTENSOR}.explain",
    "redistribute_local": f"{_DTENSOR}.tensor_redistribution",
    "DFunction": f"{_SHARD}.dfunction",
    "DistributedOp": f"{_SHARD}.custom.custom_ops",
    "implicit_replication": f"{_SHARD}.dispatching.mixing",
    "custom_shard": f"{_SHARD}.custom.custom_ops",
    "local_map": f"{_SHARD}.custom.custom_ops",
    "reduce_later": f"{_SHARD}.dispatching.reduce_later",
    "register_op": f"{_SHARD}.custom.custom_ops",
    "strict": f"{_SHARD}.dispatching.strict_mode",
    "ShardingPlan": f"{_MODULES}.sharding_plan",
    "shard_module": f"{_MODULES}.sharding_plan",
    "Visibility": f"{_CONTEXT_PARALLEL}.blocks.visibility",
    "attention": f"{_CONTEXT_PARALLEL}.attention",
    **dict.fromkeys(("ContextParallel", "AsyncContextParallel"), f"{_CONTEXT_PARALLEL}.style"),
    **dict.fromkeys(("attention_scheme", "explain_attention"), f"{_CONTEXT_PARALLEL}.blocks.schemes"),
    "Degrees": f"{_PARALLEL}.degrees",
    "Parallel": f"{_PARALLEL}.parallel",
    "next_token_loss": f"{_PARALLEL}.losses",
    "parallelize": f"{_PARALLEL}.parallelize",
    "Table": "hyper_parallel.core.pipeline_parallel.table",
    "BatchDimSpec": f"{_OWN_STAGES}.batch_dims",
    "MetaStep": f"{_OWN_STAGES}.meta_step",
    "MetaStepType": f"{_OWN_STAGES}.meta_step",
    "PipelineStage": f"{_OWN_STAGES}.pipeline_stage",
    "SharedParameterInfo": f"{_OWN_STAGES}.pipeline_stage",
    **dict.fromkeys(
        ("PipelineContext", "PipelineSchedule", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"),
        f"{_OWN_STAGES}.schedules",
    ),
    "manual_seed": f"{_DTENSOR}.random.random_state",
    "draws_by_sample": f"{_DTENSOR}.random.by_sample",
    "without_samples": f"{_DTENSOR}.random.sample_address",
    "SampleRows": f"{_DTENSOR}.random.sample_rows",
    "number_blocks": f"{_MODULES}.numbered_blocks",
    "FusedColwiseParallel": f"{_TENSOR_PARALLEL}.fused_and_head_styles",
    "HeadParallel": f"{_TENSOR_PARALLEL}.fused_and_head_styles",
    "deferred_init": f"{_MODULES}.deferred",
    "materialize": f"{_MODULES}.deferred",
    "add_lora": f"{_MODULES}.lora",
    "hugging_face_init": f"{_MODULES}.hugging_face_init",
    "number_initial_values": f"{_MODULES}.initial_values",
    "loss_parallel": f"{_TENSOR_PARALLEL}.loss",
    **dict.fromkeys(("Lowering", "lower"), "hyper_parallel.core.lowering.lower"),
    "LoweringMismatch": "hyper_parallel.core.lowering.verify",
    "parallelize_module": f"{_TENSOR_PARALLEL}.parallelize",
    **dict.fromkeys(
        (
            "ColwiseParallel",
            "NoParallel",
            "ParallelStyle",
            "PrepareModuleInput",
            "PrepareModuleInputOutput",
            "PrepareModuleOutput",
            "RowwiseParallel",
            "SequenceParallel",
        ),
        f"{_TENSOR_PARALLEL}.style",
    ),
    "experts": f"{_EXPERT_PARALLEL}.experts_op",
    **dict.fromkeys(
        (
            "AllToAllTokenDispatcher",
            "BaseExpertParallel",
            "DeredundencyTokenDispatcher",
            "ExpertParallel",
            "ExpertTensorParallel",
            "TensorParallel",
        ),
        f"{_EXPERT_PARALLEL}.style",
    ),
}

_ROOMS = (
    "checkpoint",
    "data",
    "launch",
    "models",
    "plans",
    "testing",
)  # modules that are part of the public API as they are
# Methods of the platform of this process: HyperParallel 1.0 has them at its front door.
_OF_PLATFORM = (
    "clip_grad_norm_",
    "destroy_process_group",
    "get_backend",
    "get_group_local_rank",
    "get_process_group_ranks",
    "init_on_device",
    "init_parameters",
    "init_process_group",
    "mark_created_groups",
    "split_group",
)

__all__ = ["__version__", *_HOME_OF, *_OF_PLATFORM, *_ROOMS, "init_empty_weights"]


# What lies above the platform's folder and is asked for through it.
_Platform.tensor_transform_provider = staticmethod(lambda: __getattr__("redistribute_local"))
_Platform.operators_provider = staticmethod(lambda: importlib.import_module(f"{_SHARD}.dispatching.dispatch"))


def init_empty_weights() -> Any:
    """Context: parameters of modules built inside have a shape and no memory; buffers are made as usual."""
    platform = importlib.import_module("hyper_parallel.platform").get_platform()
    return platform.init_on_device(platform.meta_device)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _OF_PLATFORM:
        return getattr(importlib.import_module("hyper_parallel.platform").get_platform(), name)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
