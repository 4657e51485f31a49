"""``parallelize``: one call that splits a model by degrees, on one page.

In this order: the mesh; numbers for random values, which the whole model gives; equal values on all ranks; experts in
blocks; tensor parallelism and the sequence, by a plan for the whole model; recomputation of blocks; parameters sharded
or replicated over the data axes, block by block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.activation_memory.recompute import recompute as recompute_module
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.expert_parallel.routing_memory import keeps_routing
from hyper_parallel.core.fully_shard.api import fully_shard, replicate
from hyper_parallel.core.fully_shard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from hyper_parallel.core.lowering.lower import BACKENDS, lower
from hyper_parallel.core.modules.initial_values import number_initial_values
from hyper_parallel.core.modules.numbered_blocks import number_blocks
from hyper_parallel.core.modules.replaced_parameters import remember_parameters
from hyper_parallel.core.pipeline_parallel.stages.stage_model import StageModel
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.parameter_styles import ReplicateParameters
from hyper_parallel.core.tensor_parallel.single_device_code import SingleDeviceModel
from hyper_parallel.parallel.degrees import Degrees, as_degrees
from hyper_parallel.parallel.experts import ExpertShards, find_experts, shard_experts
from hyper_parallel.parallel.losses import loss_for
from hyper_parallel.parallel.meshes import Meshes, make_meshes
from hyper_parallel.parallel.micro_batches import warn_of_batch_statistics
from hyper_parallel.parallel.parallel import Parallel
from hyper_parallel.parallel.pipeline import Pipeline, in_silent_world
from hyper_parallel.parallel.sequence_inputs import Sequences
from hyper_parallel.parallel.stages import split_model, stream_between, table_for
from hyper_parallel.plans.adapters import adapted_parameters
from hyper_parallel.plans.for_model import for_model, unsharded
from hyper_parallel.plans.roles import PlanError
from hyper_parallel.plans.structure import structure_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import require_module

__all__ = ["parallelize"]

_platform = get_platform()


def parallelize(
    model: Any,
    degrees: str | Mapping[str, Any] | Degrees | None = None,
    *,
    dp_replicate: int | str | None = None,
    dp_shard: int | str | None = None,
    cp: int | str | None = None,
    tp: int | str | None = None,
    pp: int | str | None = None,
    ep: int | None = None,
    mesh: DeviceMesh | None = None,
    plan: Any = None,
    sequence_parallel: bool = True,
    microbatches: int | None = None,
    schedule: str | Table = "1f1b",
    stages_per_rank: int | None = None,
    stages: Sequence[int] | None = None,
    balance: str | Sequence[float] = "time",
    precision: str | MixedPrecisionPolicy | None = None,
    recompute: str | Callable[..., Any] | None = None,
    compile: bool | str = False,
    offload: bool = False,
    attention: str = "auto",
    order: str = "contiguous",
    keep_whole: Iterable[str] = (),
    loss: Callable[..., Any] | None = None,
) -> Parallel:
    """Split ``model`` over the ranks of the world by ``degrees``, in place; the object that trains it.

    ``degrees`` is ``"dp_shard=4, tp=2"``, a dict, ``hp.Degrees`` or the keywords; what they leave of the world is
    ``dp_shard``, unless another axis is ``"rest"``. The model may have memory, and then rank 0's values count, or be
    built under ``deferred_init()``: call ``materialize()`` or ``load_hugging_face(folder)`` of the result.

    ``mesh``: a mesh of the axes pp, dp_replicate, dp_shard, cp, tp, or some of them, in place of one of all ranks.
    ``plan``: how layers are split over tp: a dict from paths to styles, or a function from the model to one; default
    ``plans.for_model``. ``sequence_parallel`` and ``keep_whole`` are options of that.
    ``microbatches``: parts in which this rank's rows run, one after the other; default 1, with pp twice its degree
    and at most the rows of the first batch.
    ``schedule``: under pp the name of a schedule (``hyper-parallel pipeline show`` draws them) or a ``Table`` of your
    own; ``stages_per_rank`` for those that take any number. ``stages``: how many blocks each stage has; default:
    balanced by ``"time"``, ``"bytes"`` or a list of costs.
    ``precision``: ``"bf16"``, ``"fp16"`` or a policy: dtype of the computation; parameters and sums keep their own.
    ``recompute``: ``"full"`` computes blocks again in backward; a policy ``(ctx, op, ...)`` says what is kept.
    ``compile``: blocks run as recorded local programs, compiled (True or ``"inductor"``) or as they are (``"local"``).
    ``offload``: parameters, gradients and optimizer state in host memory.
    ``attention``: under cp how queries meet the keys of other ranks: ``"ring"``, ``"ulysses"``, ``"gather"``,
    ``"hybrid"``, or ``"auto"``, the cheapest. ``order``: how tokens lie on the ranks of cp: ``"contiguous"``, or
    ``"zigzag"`` or ``"striped"`` for equal work in causal attention; batches are given and returned in their own order.
    ``loss``: ``fn(outputs, batch) -> (sum, count)``; without, the model gets ``labels`` and returns its loss.

    >>> import hyper_parallel as hp, torch
    >>> model = hp.models.Llama(hp.models.LlamaConfig(vocab_size=11, dim=16, num_blocks=1, num_heads=2, num_kv_heads=1))
    >>> run = hp.parallelize(model)  # a world of one; started by torchrun, of all
    >>> ids = torch.arange(10).reshape(2, 5)
    >>> loss = run.forward_backward(ids, labels=ids)
    >>> run
    Parallel(Llama, "dp_shard=1", microbatches=1)
    """
    require_module("parallelize", model)
    _refuse_unready(model)
    for name, switch in (("sequence_parallel", sequence_parallel), ("offload", offload)):
        if not isinstance(switch, bool):
            raise TypeError(f"parallelize: {name} is True or False, got {switch!r}")
    if isinstance(keep_whole, str):
        raise TypeError(f"parallelize: keep_whole takes a list of paths; write keep_whole=[{keep_whole!r}]")
    if plan is not None and keep_whole:
        raise ValueError(
            "parallelize: keep_whole is an option of the ready plan; leave these modules out of your plan="
        )
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp, "pp": pp, "ep": ep}
    asked = as_degrees(degrees, **{axis: size for axis, size in given.items() if size is not None})
    Sequences(1, attention, order)
    if microbatches is not None and (
        isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
    ):
        raise ValueError(f"parallelize: microbatches is a number of parts from 1, got {microbatches!r}")
    policy, kept, backend = _precision(precision), _recompute(recompute), _backend(compile)
    fitted, meshes = make_meshes(asked, mesh)
    num_ranks = fitted.sizes["pp"]
    make_table = functools.partial(table_for, schedule, num_ranks, microbatches, stages_per_rank)
    table = make_table() if num_ranks > 1 else None
    parts = microbatches or 1 if table is None else table.microbatches
    split = None if table is None else split_model(model, table.stages.num_stages, stages, balance)
    experts = find_experts(model, int(fitted.ep)) if meshes.expert_axes else {}
    in_parts = parts > 1 or meshes.batch.size() > 1
    if in_parts:
        warn_of_batch_statistics(model)
    found = loss_for(model, loss, in_parts=in_parts)
    sequences = Sequences(fitted.sizes["cp"], attention, order)
    sequences.prepare(model, found)
    blocks = [dict(_platform.get_cells_and_names(model))[path] for path in structure_of(model).blocks]
    if kept is not None and not blocks:
        raise ValueError(
            f"parallelize: recompute is by block, and {type(model).__name__} has no list of blocks (a ModuleList, or a "
            "Sequential of modules with several layers each)"
        )
    if backend is not None and not blocks:
        raise ValueError(
            f"parallelize: compile is by block, and {type(model).__name__} has no list of blocks (a ModuleList, or a "
            "Sequential of modules with several layers each): parallelize it without, and name its modules in "
            "hyper_parallel.lower"
        )
    number_blocks(blocks)
    number_initial_values(model)
    _take_values_of_rank_0(model, meshes)
    compare_parameters = remember_parameters(model)
    shard_experts(experts, meshes)
    _split_layers(model, meshes, plan, sequence_parallel, keep_whole, tuple(experts))
    stream = stream_between(model, meshes.compute) if table is not None and in_silent_world() else None
    if experts and kept == {}:
        kept = {"context_fn": keeps_routing}
    for block in blocks if kept is not None else ():
        recompute_module(block, **kept)  # type: ignore[arg-type]
    lowering = lower(model, list(structure_of(model).blocks), backend=backend) if backend is not None else None
    share = functools.partial(_share_parameters, meshes=meshes, policy=policy, offload=offload)
    if table is None or split is None:
        share(model)
        compare_parameters()
        run = Parallel(model, fitted, meshes, found, parts, sequences=sequences)
        run.lowering = lowering
        return run
    own = StageModel(model, split, table.stages.stages_of(meshes.world["pp"].get_local_rank()), wrap=share)
    compare_parameters()
    is_open = microbatches is None and not isinstance(schedule, Table)
    pipeline = Pipeline(own, table, meshes, found, stream, make_table if is_open else None)
    run = Parallel(model, fitted, meshes, found, parts, pipeline, sequences)
    run.lowering = lowering
    return run


# Modules around a model that do themselves what parallelize is asked for, and where they have it.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}


def _refuse_unready(model: Any) -> None:
    for name, parameter in _platform.parameters_dict(model).items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parallelize: {name!r} is distributed already, by an earlier parallelize, parallelize_module or "
                "fully_shard; parallelize takes a model as one device has it, once: build it again, and use the "
                "object that the first call gave"
            )
    for path, module in _platform.get_cells_and_names(model):
        inside = _WRAPPERS.get(type(module).__name__)
        if inside is not None:
            raise ValueError(
                f"parallelize: {f'{path!r} of the model' if path else 'the model'} is a {type(module).__name__}, which "
                f"would run beside what parallelize does; give the module inside, its .{inside}, and let parallelize "
                f"{'compile it, by compile=True' if inside == '_orig_mod' else 'distribute it'}"
            )
        is_lazy = getattr(module, "has_uninitialized_params", None)
        if is_lazy is not None and is_lazy():
            raise ValueError(
                f"parallelize: the parameters of {path!r}, a {type(module).__name__}, get their sizes from the first "
                "input: call the model once, on any one sample, before it is parallelized"
            )


def _backend(compile: bool | str) -> str | None:
    """How blocks are lowered; None: they run by dispatch."""
    if compile is False or compile is None:
        return None
    backend = "inductor" if compile is True else compile
    if backend not in BACKENDS:
        raise ValueError(f"parallelize: compile is False, True, 'local' or 'inductor', got {compile!r}")
    refused = _platform.why_no_backend(backend)
    if refused is not None:
        raise ValueError(f"parallelize: compile={backend!r}: {refused}")
    return backend


def _precision(given: Any) -> MixedPrecisionPolicy | None:
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
    if given not in names:
        raise ValueError(f"parallelize: precision is None, 'bf16', 'fp16' or a MixedPrecisionPolicy, got {given!r}")
    dtype = _platform.str_to_dtype
    return MixedPrecisionPolicy(param_dtype=dtype(names[given]), reduce_dtype=dtype("float32"))


def _recompute(given: Any) -> dict[str, Any] | None:
    """The options of ``recompute`` for each block; None: nothing is computed again."""
    if given is None:
        return None
    if given == "full":
        return {}
    if not callable(given):
        raise ValueError(f"parallelize: recompute is None, 'full' or a policy (ctx, op, ...), got {given!r}")
    return {"context_fn": functools.partial(_platform.create_selective_checkpoint_contexts, given)}


def _take_values_of_rank_0(model: Any, meshes: Meshes) -> None:
    """All ranks have the parameters and buffers of the first: ranks that were seeded otherwise would train apart.

    forward: a broadcast of each tensor that has memory, over all ranks.
    """
    mesh = meshes.world
    if mesh.size() == 1:
        return
    group, first = mesh.get_group(tuple(range(mesh.ndim))), mesh.rank_list[0]
    with _platform.no_grad():
        for tensor in _platform.state_tensors(model):
            if not _platform.has_no_memory(tensor) and not isinstance(tensor, DTensor):
                values = _platform.broadcast(_platform.copied(_platform.detached(tensor)), first, group)
                _platform.load_into_param(tensor, values)


def _split_layers(
    model: Any, meshes: Meshes, plan: Any, sequence_parallel: bool, keep_whole: Iterable[str], experts: tuple[str, ...]
) -> None:
    """Tensor parallelism over tp; activations are then distributed over (cp, tp). ``experts`` are sharded already."""
    compute = meshes.compute
    if compute.size() == 1:
        return
    is_split = compute.size("tp") > 1
    if plan is None:
        try:
            plan = for_model(
                model,
                sequence_parallel=sequence_parallel and is_split,
                plain_outputs=False,
                keep_whole=tuple(keep_whole),
                experts=experts,
            )
        except PlanError:
            if is_split:
                raise
            plan = unsharded(model, experts)
    elif callable(plan):
        plan = plan(model)
    if compute.size("cp") > 1:
        plan = _on_sequences(plan)
    parallelize_module(model, compute, plan, axes="tp", src_data_rank=None)
    if compute.size("cp") > 1:
        parallelize_module(model, compute, _of_the_rest(model), axes="tp", src_data_rank=None)


def _on_sequences(plan: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A plan whose model and styles are for distributed activations; an error for styles that are not."""
    found = {path: [*given] if isinstance(given, (list, tuple)) else [given] for path, given in plan.items()}
    local = [path for path, styles in found.items() if any(getattr(one, "use_local_output", False) for one in styles)]
    if local:
        raise ValueError(
            f"parallelize: under cp activations are distributed tensors, and the plan's styles for {', '.join(local)} "
            "give local ones; make them with use_local_output=False"
        )
    if not any(isinstance(one, SingleDeviceModel) for styles in found.values() for one in styles):
        found[""] = [SingleDeviceModel(plain_outputs=False), *found.get("", [])]
    return found


def _of_the_rest(model: Any) -> dict[str, ReplicateParameters]:
    """Parameters that the plan leaves plain: their gradients too must be parts of a sum over cp."""
    found: dict[str, ReplicateParameters] = {}
    for path, module in _platform.get_cells_and_names(model):
        names = [name for name, one in _platform.own_parameters(module).items() if not isinstance(one, DTensor)]
        if names:
            found[path] = ReplicateParameters(names)
    return found


def _share_parameters(model: Any, meshes: Meshes, policy: MixedPrecisionPolicy | None, offload: bool) -> None:
    """Parameters sharded over dp_shard and cp, or replicated; gradients summed over all data axes."""
    data = meshes.data
    if data.size() == 1 and policy is None and not offload:
        return
    adapted = adapted_parameters(dict(_platform.get_cells_and_names(model)))
    if adapted:
        raise ValueError(
            f"parallelize: peft adapts the parameter {adapted[0]!r} (target_parameters) by replacing it while its "
            "module runs, which cannot be where fully_shard holds it: adapt linear layers (target_modules), or leave "
            "dp_replicate, dp_shard and cp at 1, without precision and offload"
        )
    for path, module in _platform.get_cells_and_names(model) if data.size() > 1 else ():
        if _platform.is_embedding_module(module) and getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"parallelize: the embedding {path!r} has max_norm, which writes into its weight in forward: ranks "
                "along the data axes would write other rows each. Leave it out, and scale the rows it gives"
            )
    if data.size(meshes.parameter_axes) == 1 and data.size() > 1 and not offload:
        replicate(model, data, mp_policy=policy, compute_mesh=meshes.compute)
    else:
        fully_shard(
            model,
            mesh=data,
            shard_axes=meshes.parameter_axes,
            shard_placement_fn=ExpertShards(meshes) if meshes.expert_axes else None,
            compute_mesh=meshes.compute,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if offload else None,
            units="auto",
        )
    model.set_reduce_op_type("sum")
