"""``parallelize``: one call that splits a model by degrees, on one page.

In this order: the mesh; numbers for random values, which the whole model gives; equal values on all ranks; tensor
parallelism and the sequence, by a plan for the whole model; recomputation of blocks; parameters sharded or replicated
over the data axes, block by block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hyper_parallel.core.activation_memory.recompute import recompute as recompute_module
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.fully_shard.api import fully_shard, replicate
from hyper_parallel.core.fully_shard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from hyper_parallel.core.modules.initial_values import number_initial_values
from hyper_parallel.core.modules.numbered_blocks import number_blocks
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.parameter_styles import ReplicateParameters
from hyper_parallel.core.tensor_parallel.single_device_code import SingleDeviceModel
from hyper_parallel.parallel.degrees import REST, Degrees, as_degrees
from hyper_parallel.parallel.losses import loss_for
from hyper_parallel.parallel.meshes import Meshes, make_meshes
from hyper_parallel.parallel.parallel import Parallel
from hyper_parallel.plans.for_model import for_model, unsharded
from hyper_parallel.plans.roles import PlanError
from hyper_parallel.plans.structure import structure_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import require_module

__all__ = ["parallelize"]

_platform = get_platform()

_LATER = {
    "pp": "pipelines are not there yet; leave pp at 1",
    "ep": "experts are not sharded yet, and every rank of a line computes all of them; leave ep at 1",
}
_ATTENTION = ("auto", "gather")


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
    microbatches: int = 1,
    precision: str | MixedPrecisionPolicy | None = None,
    recompute: str | Callable[..., Any] | None = None,
    offload: bool = False,
    attention: str = "auto",
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
    ``microbatches``: parts in which this rank's rows run, one after the other.
    ``precision``: ``"bf16"``, ``"fp16"`` or a policy: dtype of the computation; parameters and sums keep their own.
    ``recompute``: ``"full"`` computes blocks again in backward; a policy ``(ctx, op, ...)`` says what is kept.
    ``offload``: parameters, gradients and optimizer state in host memory.
    ``attention``: ``"auto"`` or ``"gather"``: under cp each rank gathers keys and values.
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
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp, "pp": pp, "ep": ep}
    asked = as_degrees(degrees, **{axis: size for axis, size in given.items() if size is not None})
    for axis, reason in _LATER.items():
        if getattr(asked, axis) not in (1, REST):
            raise ValueError(f"parallelize: {axis}={getattr(asked, axis)}: {reason}")
    if attention not in _ATTENTION:
        raise ValueError(
            f"parallelize: attention={attention!r} is none of {', '.join(map(repr, _ATTENTION))}: under cp keys and "
            "values are gathered; ring and ulysses are not there yet"
        )
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"parallelize: microbatches is a number of parts from 1, got {microbatches!r}")
    policy, kept = _precision(precision), _recompute(recompute)
    fitted, meshes = make_meshes(asked, mesh)
    found = loss_for(model, loss)
    blocks = [dict(_platform.get_cells_and_names(model))[path] for path in structure_of(model).blocks]
    if kept is not None and not blocks:
        raise ValueError(
            f"parallelize: recompute is by block, and {type(model).__name__} has no list of blocks (a ModuleList)"
        )
    number_blocks(blocks)
    number_initial_values(model)
    _take_values_of_rank_0(model, meshes)
    _split_layers(model, meshes, plan, sequence_parallel, keep_whole)
    for block in blocks if kept is not None else ():
        recompute_module(block, **kept)  # type: ignore[arg-type]
    _share_parameters(model, meshes, policy, offload)
    return Parallel(model, fitted, meshes, found, microbatches)


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


def _split_layers(model: Any, meshes: Meshes, plan: Any, sequence_parallel: bool, keep_whole: Iterable[str]) -> None:
    """Tensor parallelism over tp; activations are then distributed over (cp, tp)."""
    compute = meshes.compute
    if compute.size() == 1:
        return
    is_split = compute.size("tp") > 1
    if plan is None:
        try:
            between = sequence_parallel and is_split
            plan = for_model(model, sequence_parallel=between, plain_outputs=False, keep_whole=tuple(keep_whole))
        except PlanError:
            if is_split:
                raise
            plan = unsharded(model)
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
    if data.size(("dp_shard", "cp")) == 1 and data.size() > 1 and not offload:
        replicate(model, data, mp_policy=policy, compute_mesh=meshes.compute)
    else:
        fully_shard(
            model,
            mesh=data,
            shard_axes=("dp_shard", "cp"),
            compute_mesh=meshes.compute,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if offload else None,
            units="auto",
        )
    model.set_reduce_op_type("sum")
