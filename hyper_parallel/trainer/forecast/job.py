"""A run as a job of the dry run: the model that its config builds, split and trained as the trainer does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hyper_parallel.analysis.model_source import ModelSource
from hyper_parallel.analysis.rank_run import Job
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.parallel.losses import is_hugging_face
from hyper_parallel.plans.structure import structure_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member
from hyper_parallel.trainer.building import build_model, model_vocabulary
from hyper_parallel.trainer.optimizers import make_optimizer
from hyper_parallel.trainer.splitting import split_model

if TYPE_CHECKING:
    from hyper_parallel.parallel.parallel import Parallel
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["job_of", "state_of"]

_SLOTS = {"adamw": 2, "adam": 2}  # tensors of the parameter's size that an optimizer keeps
_STEP_BYTES = 4  # the number of steps that it keeps for each parameter


def job_of(config: RunConfig, world_size: int, device: str) -> Job:
    """Rank 0's part of the run, which has as many rows as any."""
    degrees = config.parallel.degrees.fit(world_size)
    rows = math.ceil(config.train.batch / (degrees.sizes["dp_replicate"] * degrees.sizes["dp_shard"]))
    clip = config.train.clip_norm

    def build(length: int) -> tuple[Any, Any]:
        model = build_model(config.model, config.train.dtype)
        return model, _inputs(model, rows, length)

    return Job(
        source=ModelSource("the model", build),
        degrees=degrees,
        batch=rows,
        length=config.data.length,
        microbatches=config.microbatches(world_size),
        offload=config.parallel.offload,
        recompute="" if config.recompute.mode == "none" else config.recompute.mode,
        split_by=lambda model: split_model(model, config, degrees),
        clip_norm=math.inf if clip == "none" else clip,
        optimizer=lambda parameters: make_optimizer(config.optimizer, [("", one) for one in parameters]),
        device=device,
    )


def _inputs(model: Any, rows: int, length: int) -> dict[str, Any]:
    ids = get_platform().token_ids(rows, length)
    if is_hugging_face(model):
        return {"input_ids": ids, "labels": ids, "shift_labels": ids}
    return {get_platform().argument_names_of(model)[0]: ids, "labels": ids}


def state_of(job: Job, config: RunConfig) -> dict[str, Any]:
    """What the model and its optimizer hold on rank 0, by arithmetic on the parameters as they are split."""
    platform = get_platform()
    with as_member(Member(0, job.world_size, platform.silent_group)):
        with platform.building_without_memory():
            model, inputs = job.source.build(job.length)
        total = sum(math.prod(one.shape) for one in platform.parameters_dict(model).values())
        run = job.split(model, inputs)
        named = dict(run.named_parameters())
        sizes = {name: _local_bytes(one) for name, one in named.items()}
        trained = {name: size for name, size in sizes.items() if platform.requires_grad(named[name])}
        optimizer = config.optimizer
        slots = _SLOTS.get(optimizer.name, int(optimizer.momentum > 0))
        steps = _STEP_BYTES * len(trained) if optimizer.name in _SLOTS else 0
        return {
            "num_parameters": total,
            "parameters": sum(sizes.values()),
            "gradients": sum(trained.values()),
            "optimizer_state": slots * sum(trained.values()) + steps,
            "largest_gather": _largest_gather(run, config),
            "logits": _logits(model, job, config),
        }


def _local_bytes(parameter: Any) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return math.prod(local.shape) * get_platform().get_element_size(local)


def _element_size(name: str) -> int:
    return {"float64": 8, "float32": 4}.get(name, 2)


_SHARDING = ("dp_replicate", "dp_shard", "edp", "cp")  # the axes over which blocks of a parameter are gathered


def _largest_gather(run: Parallel, config: RunConfig) -> int:
    """The whole parameters of a block, or of all that is outside of blocks; 0 where they are not sharded."""
    sizes = run.degrees.sizes
    if sizes["dp_shard"] * sizes["cp"] == 1:
        return 0
    blocks = structure_of(run.model).blocks
    units: dict[str, int] = {}
    for name, parameter in run.named_parameters():
        unit = next((path for path in blocks if name.startswith(f"{path}.")), "")
        layout = parameter._layout
        parts = math.prod(run.mesh.size(str(label)) for label in _labels(layout) if label not in _SHARDING)
        units[unit] = units.get(unit, 0) + math.prod(parameter.shape) // parts
    compute = config.train.dtype if config.precision.compute == "same" else config.precision.compute
    return max(units.values()) * _element_size(compute)


def _labels(layout: Any) -> list[Any]:
    """The axes that shard a tensor."""
    return [layout.mesh.axis_label(axis) for axes in layout.shard_axes for axis in axes]


def _logits(model: Any, job: Job, config: RunConfig) -> int | None:
    vocabulary = model_vocabulary(model)
    if vocabulary is None:
        return None
    sizes = job.degrees.sizes
    tokens = math.ceil(job.batch / job.microbatches) * math.ceil(job.length / sizes["cp"])
    compute = config.train.dtype if config.precision.compute == "same" else config.precision.compute
    return tokens * math.ceil(vocabulary / sizes["tp"]) * _element_size(compute)
