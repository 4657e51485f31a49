"""From what a user asks of a pipeline to its table and to where the model is cut."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.pipeline_parallel.runtime.boundary import TensorSpec, describe, without_partial_sums
from hyper_parallel.core.pipeline_parallel.stages.first_blocks import InputsDoNotFit, look
from hyper_parallel.core.pipeline_parallel.stages.losses_of_blocks import gives_loss
from hyper_parallel.core.pipeline_parallel.stages.split import Split, split_stages
from hyper_parallel.core.pipeline_parallel.stages.stage_model import refuse_stages
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import make_table, schedule_name
from hyper_parallel.core.pipeline_parallel.tables.counts import TooFewRows, default_microbatches
from hyper_parallel.core.shard.dispatching.mixing import implicit_replication
from hyper_parallel.models.expert_balance import mixtures_of
from hyper_parallel.parallel.losses import inside_adapters
from hyper_parallel.parallel.micro_batches import input_names
from hyper_parallel.parallel.sequence_inputs import shard_sequences
from hyper_parallel.plans.structure import structure_of
from hyper_parallel.platform import get_platform

__all__ = ["split_model", "stream_between", "table_for"]

_platform = get_platform()
_ROWS = ("Sequential", "SequentialCell", "ModuleDict", "CellDict")


def table_for(
    schedule: str | Table, ranks: int, microbatches: int | None, stages_per_rank: int | None, rows: int | None = None
) -> Table:
    """The table of a schedule by name, or the given one, which has to be for as many ranks.

    Where nobody says how many microbatches, ``rows`` of the batch decide, or, not known yet, the ranks alone.
    """
    if not isinstance(schedule, Table):
        name = schedule_name(schedule)
        try:
            return make_table(name, ranks, microbatches or default_microbatches(name, ranks, rows), stages_per_rank)
        except TooFewRows as error:
            raise ValueError(
                f"parallelize: {error}: give larger batches, a schedule that takes any number (1f1b, zb_h1, zbv), or "
                f"microbatches={error.least}, of which some then have no rows and cost their time"
            ) from None
    if schedule.num_ranks != ranks:
        raise ValueError(
            f"parallelize: the table {schedule.name} is for {schedule.num_ranks} ranks, and pp={ranks}; give one for "
            "as many"
        )
    return schedule


def split_model(
    model: Any, num_stages: int, stages: Sequence[int] | None, balance: str | Sequence[float] = "time"
) -> Split:
    """Where the model is cut: ``stages`` has the numbers of blocks, else they are balanced.

    The model runs once up to its second block where inputs can be made for it, to see what blocks hand on.
    """
    if stages is not None and (isinstance(stages, (str, int)) or not all(isinstance(one, int) for one in stages)):
        raise TypeError(f"parallelize: stages={stages!r}: give the number of blocks of each stage, such as [5, 6]")
    if stages is not None and len(stages) != num_stages:
        raise ValueError(
            f"parallelize: stages={list(stages)} are {len(stages)} stages, and the schedule has {num_stages}; give the "
            "number of blocks of each"
        )
    modules = dict(_platform.get_cells_and_names(model))
    refuse_stages(model, modules.values())
    blocks, prologue = _row_of(model)
    giving = tuple(f"{path}." for path in blocks if gives_loss(modules[path]))
    for path, mixture in mixtures_of(model):
        if mixture.config.has_losses and not path.startswith(giving):
            raise ValueError(
                f"parallelize: '{path}' has auxiliary losses, and the block around it does not say that it hands them "
                "on: let it give (stream, loss), with gives_loss = True as an attribute, and the model a MixtureLoss"
            )
    cut = functools.partial(
        split_stages,
        model,
        num_stages if stages is None else stages,
        blocks=blocks,
        prologue=prologue,
        balance=balance,
    )
    try:
        return cut(inputs=_example(model))
    except InputsDoNotFit:  # they are a guess: a model may take sequences of one length only
        return cut()


def _row_of(model: Any) -> tuple[Sequence[str], Sequence[str]]:
    """The blocks, and what runs before them: without a list the members of the largest row of modules."""
    found = structure_of(model)
    modules = dict(_platform.get_cells_and_names(model))
    if found.blocks:
        return _without_layers(found.blocks, found.prologue, modules)
    rows: dict[str, list[str]] = {
        path: [] for path, one in modules.items() if any(kind.__name__ in _ROWS for kind in type(one).__mro__)
    }
    for path in modules:
        around = path.rpartition(".")[0]
        if path and around in rows:
            rows[around].append(path)
    if not rows:
        return (), found.prologue
    blocks = max(rows.values(), key=lambda row: sum(len(_platform.parameters_dict(modules[one])) for one in row))
    order = list(modules)
    return blocks, [path for path in found.prologue if blocks and order.index(path) < order.index(blocks[0])]


def _without_layers(
    blocks: Sequence[str], prologue: Sequence[str], modules: Mapping[str, Any]
) -> tuple[Sequence[str], Sequence[str]]:
    """Blocks, and what runs before them: lists of single layers beside one of blocks are embeddings or heads."""

    def is_block(path: str) -> bool:
        has_parts = any(one.startswith(f"{path}.") for one in modules)
        return has_parts and bool(_platform.parameters_dict(modules[path]))

    rows = {path.rpartition(".")[0] for path in blocks if is_block(path)}
    if not rows:
        return blocks, prologue
    layers = [path for path in blocks if path.rpartition(".")[0] not in rows]
    before = [path for path in layers if _platform.is_embedding_module(modules[path])]
    return [path for path in blocks if path not in layers], [*prologue, *before]


def stream_between(model: Any, mesh: DeviceMesh) -> TensorSpec | None:
    """How the stream between two blocks is distributed, with the shape that it has for small inputs; None: not known.

    The model runs up to its second block, whole, after its layers were split.
    """
    inputs = _example(model)
    if inputs is None:
        return None
    with implicit_replication():
        seen = look(model, _row_of(model)[0], shard_sequences(inputs, mesh), at_second=False)
    return describe(without_partial_sums(seen.handed_on))


def _example(model: Any) -> dict[str, Any] | None:
    """Small inputs, of models of tokens or of pictures; None for others, and for what cannot run as it is."""
    names = input_names(inside_adapters(model))
    like = next(iter(_platform.parameters_dict(model).values()), None)
    if like is None or (_platform.has_no_memory(like) and not _platform.runs_without_memory):
        return None
    for name in ("input_ids", "ids"):
        if name in names:
            return {name: _platform.index_tensor([[0, 0, 0, 0]], like.device)}
    config: Any = getattr(model, "config", None)
    if "pixel_values" in names and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        shape = (1, getattr(config, "num_channels", 3), *size)
        return {"pixel_values": _platform.zeros(shape, like.dtype, like.device)}
    return None
